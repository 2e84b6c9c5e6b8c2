"""The rewards that come with tigon, from the text of a completion."""

from __future__ import annotations

import pytest

from tigon.rewards import answer_format, exact_answer, length, text_of


def test_text_of_messages_is_the_last_ones() -> None:
    turns = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "5"}]
    assert text_of("5 6") == "5 6"
    assert text_of([*turns, {"role": "assistant", "content": "It is 5."}]) == "It is 5."
    assert text_of([{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize(
    ("completion", "answer", "pattern", "reward"),
    [
        ("12 + 5 = 17.", "17", None, 1),
        ("17 is 12 + 5", "17", None, 0),
        ("The sum is 1,017.0", 1017, None, 1),
        ("-3", "-3", None, 1),
        ("no number", "17", None, 0),
        ("nan", "17", None, 0),
        (" Paris ", "Paris", None, 1),
        ("Paris, I think", "Paris", None, 0),
        ("<answer>Rome</answer> <answer>Paris</answer>", "Paris", "<answer>(.*?)</answer>", 1),
        ("It is (b).", "b", r"\((.)\)", 1),
        ("It is b.", "b", r"\((.)\)", 0),
        ("#### 17", "17", r"#### \d+", 0),
        ("x", "", "(y)?x", 1),
    ],
)
def test_exact_answer_is_one_only_for_the_rows_answer(completion, answer, pattern, reward) -> None:
    found = exact_answer([completion, [{"role": "assistant", "content": completion}]], [answer] * 2, pattern=pattern)
    assert found == [reward, reward]


def test_answer_format_matches_the_whole_text_with_line_breaks() -> None:
    thinking = ["<think>\n1 + 1\n</think>\n2\n", "<think></think>2", "I <think>so</think> 2"]
    assert answer_format(thinking) == [1, 0, 0]
    assert answer_format(["17", "17."], pattern=r"\d+") == [1, 0]


def test_length_falls_from_the_limit_to_its_double() -> None:
    ids = [[0] * tokens for tokens in (1, 10, 15, 20, 40)]
    assert length(["x"] * 5, ids, most=10) == [1, 1, 0.5, 0, 0]
