"""The queue of completions: prompts keep their places while they are read, and the room is never exceeded."""

from __future__ import annotations

import itertools

import pytest

from tigon.models.decoding.prompt_queue import PromptQueue, Room


def test_equal_prompts_are_one_group_with_one_range() -> None:
    queue = PromptQueue([[1, 2], [3], [1, 2]], most_rows=8)
    assert queue.take(8, ()) == [(0, 0), (2, 0), (1, 1)]
    assert queue.ranges == {0: (0, 2), 1: (2, 3)} and queue.room == Room(3, 3) and not queue


def test_a_prompt_gets_the_room_of_one_whose_completions_have_ended() -> None:
    queue = PromptQueue([[n] * 4 for n in range(10)], most_rows=2)
    assert queue.room == Room(2, 16)
    assert [queue.take(1, ()), queue.take(1, [0]), queue.take(1, [1])] == [[(0, 0)], [(1, 1)], [(2, 2)]]
    assert queue.ranges == {1: (4, 8), 2: (0, 4)}


@pytest.mark.parametrize("lengths", [[9, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 9], [3, 5, 2, 7, 4, 6]], ids=str)
@pytest.mark.parametrize("most_rows", [1, 2, 4])
def test_every_completion_begins_and_no_two_prompts_overlap(lengths: list[int], most_rows: int) -> None:
    queue = PromptQueue([[n] * length for n, length in enumerate(lengths) for _ in range(2)], most_rows)
    running: list[int] = []
    begun = []
    while queue:
        running = running[1:]  # the oldest completion has ended
        taken = queue.take(most_rows - len(running), running)
        begun += [number for number, _ in taken]
        running += [group for _, group in taken]
        assert running, "with every row free a completion begins"
        places = sorted(queue.ranges[group] for group in set(running))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert places[-1][1] <= queue.room.prompt_tokens
    assert begun == list(range(2 * len(lengths)))
