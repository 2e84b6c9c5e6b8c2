"""What the tests of `tigon train` share."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY_MODEL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, the lines of both streams."""

    code: int
    out: str
    err: str

    def error_line(self) -> str:
        """The one line on stderr, after checking that it is one and that the code is 2."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("tigon: ")
        return lines[0]


def words(n_words: int, seed: int = 0) -> str:
    """Text with some structure, in lines of ten words."""
    draw = random.Random(seed)
    names = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "pu") for b in ("ran", "tis", "vel", "dor")]
    chosen = [draw.choice(names) for _ in range(n_words)]
    return "\n".join(" ".join(chosen[i : i + 10]) for i in range(0, n_words, 10)) + "\n"


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def tree(folder: Path) -> set[str]:
    """Every path below, to show that nothing was written."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
