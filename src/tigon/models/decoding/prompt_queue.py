"""Which completions wait for a row, and where the prompts of those that are written stand in the pool.

Equal prompts are one group. Its completions begin one after another, so that they find their prompt in the pool. If
there are more completions than rows, the room of a prompt whose completions have ended is given to the next prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tigon.models.decoding.rows import MOST_ROWS


@dataclass(frozen=True)
class Room:
    """How many completions are written at once, and how many tokens of prompts the pool holds."""

    rows: int
    prompt_tokens: int

    @classmethod
    def of(cls, completions: int, total: int, longest: int, most_rows: int = MOST_ROWS) -> Room:
        """total, longest: tokens of all different prompts and of the longest. A plan calls it too.

        If completions wait, prompts have twice the room that the first ones need: completions of one prompt end at
        different steps, and the prompt stays until the last has ended.
        """
        if completions <= most_rows:
            return cls(completions, total)
        return cls(most_rows, min(total, max(longest, -(-2 * total * most_rows // completions))))


class PromptQueue:
    """The completions that have not begun, those of equal prompts together."""

    def __init__(self, prompts: Sequence[Sequence[int]], most_rows: int = MOST_ROWS) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for number, prompt in enumerate(prompts):
            members.setdefault(tuple(prompt), []).append(number)
        self.prompts = list(members)
        """The prompt of each group."""
        self.longest = max(map(len, self.prompts))
        self.room = Room.of(len(prompts), sum(map(len, self.prompts)), self.longest, most_rows)
        self.ranges: dict[int, tuple[int, int]] = {}
        """The slots in the pool of each group that stands there."""
        self._waiting = deque((number, group) for group, own in enumerate(members.values()) for number in own)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, most: int, running: Collection[int]) -> list[tuple[int, int]]:
        """(completion, group) of at most this many completions, which get a range if their prompt has none yet.

        They are fewer if the pool has no room for a prompt. running: The groups whose prompts are still read.
        """
        kept = {*running, *(group for _, group in list(self._waiting)[:1])}
        self.ranges = {group: place for group, place in self.ranges.items() if group in kept}
        taken: list[tuple[int, int]] = []
        while self._waiting and len(taken) < most:
            group = self._waiting[0][1]
            if group not in self.ranges and not self._place(group):
                break
            taken.append(self._waiting.popleft())
        return taken

    def continues(self, group: int) -> bool:
        """Whether a completion of this group waits."""
        return bool(self._waiting) and self._waiting[0][1] == group

    def _place(self, group: int) -> bool:
        """Give a group the first gap that holds its prompt. Returns whether there is one."""
        begin, length = 0, len(self.prompts[group])
        for used_begin, used_end in sorted(self.ranges.values()):
            if used_begin - begin >= length:
                break
            begin = used_end
        if begin + length > self.room.prompt_tokens:
            return False
        self.ranges[group] = (begin, begin + length)
        return True
