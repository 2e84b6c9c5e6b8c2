"""The longest sequence that the planner predicts to fit on common cards: the record and the table of the front page.

    python -m benchmarks.pages.what_fits        # plans again and writes the record; takes some minutes

`python -m benchmarks.pages.front_page` writes the table from the record. Nothing here is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tigon.models.loading.config import load_config
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.search.largest_batch import longest_sequence
from tigon.techniques.records.choices import Choices

RECORD = Path(__file__).parents[1] / "results" / "planned" / "what-fits.json"
CARDS: Mapping[str, str] = {
    "8 GB": "8GB", "16 GB": "rtx-4080", "24 GB": "rtx-4090", "48 GB": "rtx-6000-ada", "80 GB": "h100",
}  # fmt: skip
"""Size on the box -> a card of `tigon plan --gpu`."""
ROWS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "1B, full fine-tuning in bf16": ("llama-3.2-1b", {"precision": "bf16"}),
    "1B, LoRA": ("llama-3.2-1b", {"lora_rank": 16}),
    "8B, QLoRA": ("llama-3.1-8b", {"lora_rank": 32, "quantized": True}),
    "8B, LoRA": ("llama-3.1-8b", {"lora_rank": 16}),
    "8B, full fine-tuning in bf16": ("llama-3.1-8b", {"precision": "bf16"}),
}
"""Name of a row -> preset and choices. Every row keeps the inputs of the layers on the host."""
STEP = 128


def planned(row: str, card: str) -> int:
    """Tokens of one sample that fit, or 0."""
    model, choices = ROWS[row]
    request = Request(
        model=model, config=load_config(model), batch=1, seq=8192, choices=Choices(checkpointing="offload", **choices)
    )
    return longest_sequence(request, find_gpu(CARDS[card]))


def table(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["| one sample | " + " | ".join(CARDS) + " |", "|---|" + "---:|" * len(CARDS)]
    for row in ROWS:
        cells = (record["tokens"][row][card] for card in CARDS)
        lines.append(f"| {row} | " + " | ".join(f"{tokens:,}" if tokens else "–" for tokens in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    tokens: dict[str, dict[str, int]] = {}
    for row in ROWS:
        tokens[row] = {card: planned(row, card) for card in CARDS}
        print(row, tokens[row], flush=True)
    record = {
        "cards": {card: {"gpu": gpu, "gib": round(find_gpu(gpu).memory_bytes / GIB, 2)} for card, gpu in CARDS.items()},
        "versions": {name: version(name).partition("+")[0] for name in ("torch", "transformers")},
        "tokens": tokens,
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
