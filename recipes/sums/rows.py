"""Writes sums.jsonl: questions such as 4 + 9, with the right answer, a wrong one, and a label.

    python recipes/sums/rows.py            # numbers from 1 to 9
    python recipes/sums/rows.py 50         # numbers from 1 to 50

One file serves three objectives. grpo reads `prompt` and `answer`, dpo `chosen` and `rejected`, kto `completion` and
`label`.
"""

import json
import random
import sys
from typing import Any


def message(role: str, text: object) -> list[dict[str, str]]:
    return [{"role": role, "content": str(text)}]


def rows(largest: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    draw.shuffle(pairs)
    made = []
    for a, b in pairs:
        right, wrong = a + b, a + b + draw.choice([-3, -2, -1, 1, 2, 3])
        label = draw.random() < 0.5
        made.append(
            {
                "prompt": message("system", "Answer with the number only.") + message("user", f"What is {a} + {b}?"),
                "answer": str(right),
                "chosen": message("assistant", right),
                "rejected": message("assistant", wrong),
                "completion": message("assistant", right if label else wrong),
                "label": label,
            }
        )
    return made


if __name__ == "__main__":
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with open("sums.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(largest))
    print(f"sums.jsonl: {largest * largest} rows")
