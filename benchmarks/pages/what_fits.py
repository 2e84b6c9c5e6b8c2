"""The longest sequence that the planner predicts to fit on common cards: the record and the table of the front page.

    python -m benchmarks.pages.what_fits        # plans again and writes the record; takes a minute

`python -m benchmarks.pages.front_page` writes the table from the record. Each cell is what `tigon plan` prints for
`recipes/what-fits.yaml`, with more positions than the models have. No cell is measured; the last column has the
nearest run that was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.pages import base_offload
from tigon.cli.plan_request import Flags, problem_of
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.search.largest_batch import longest_sequence
from tigon.planner.search.space import with_headroom
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "what-fits.yaml"
RECORD = ROOT / "benchmarks" / "results" / "planned" / "what-fits.json"
MEASURED = ROOT / "benchmarks" / "results" / "nvidia-h200"
CARDS: Mapping[str, str] = {
    "8 GB": "8GB",
    "12 GB": "rtx-4070",
    "16 GB": "rtx-4080",
    "24 GB": "rtx-4090",
    "48 GB": "rtx-6000-ada",
    "80 GB": "h100",
}
"""Size on the box -> a card of `tigon plan --gpu`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    changes: Sequence[str] = ()
    """Assignments of `--set` that change the recipe."""
    nearest: str | None = None
    """The case of `planner/runs.json`, or the row of `lora/base-offload.json`, that is most like the row; None if none
    is. Both records are of an H200."""


FULL = ("lora.rank=null", "lora.quantize=false", "train.precision=bf16")
LORA = ("lora.quantize=false",)
POSITIONS = "model.config={max_position_embeddings: 2097152}"
"""Lets every model read longer rows than its checkpoint declares, as the measured row of 524,288 tokens did."""
SMALL, LARGE = "model.name=llama-3.2-1b", "model.name=llama-3.1-70b"
ON_HOST = "lora.base_offload=true"
TILED = ("train.mlp_tile_tokens=4096", "train.attention_groups=8")
ROWS: Mapping[str, Row] = {
    "1B, full fine-tuning in bf16": Row(changes=(SMALL, *FULL), nearest="llama-3.2-1b b16 s2048 ckpt-offload"),
    "1B, LoRA": Row(changes=(SMALL, *LORA)),
    "8B, QLoRA": Row(),
    "8B, QLoRA, layers on the host": Row(changes=(ON_HOST,), nearest="24gb"),
    "8B, QLoRA, layers on the host, tiles": Row(changes=(ON_HOST, *TILED), nearest="8gb-tiles"),
    "32B, QLoRA, layers on the host": Row(changes=("model.name=qwen3-32b", ON_HOST), nearest="qwen3-32b-full"),
    "70B, QLoRA, layers on the host": Row(changes=(LARGE, ON_HOST), nearest="llama-3.1-70b-full"),
    "8B, LoRA": Row(changes=LORA, nearest="llama-3.1-8b b4 s4096 bf16 ckpt-full lora16"),
    "8B, full fine-tuning in bf16": Row(changes=FULL, nearest="llama-3.1-8b b2 s8192 bf16 ckpt-offload"),
}


def planned(row: str, card: str) -> int:
    """Tokens of one sample that fit, or 0: the longest sequence "as asked" of `tigon plan`."""
    flags = Flags(target=str(RECIPE), gpu=find_gpu(CARDS[card]), assignments=(POSITIONS, *ROWS[row].changes))
    return longest_sequence(problem_of(flags).request, with_headroom(flags.gpu))


def nearest(row: str) -> str:
    """Planned and measured peak, in GiB, of the measured run that is most like the row."""
    name = ROWS[row].nearest
    if name is None:
        return "–"
    on_host = {line["row"]: line["on_host"] for line in base_offload.load()["steps"]}
    if name in on_host:
        both = base_offload.plan_of(on_host[name])["peak_bytes"], on_host[name]["peak_bytes"]
    else:
        runs = {case["id"]: case for case in _read("planner/runs.json")["cases"]}
        both = _read("planner/runs-predicted.json")["cases"][name]["allocated"], runs[name]["allocated_bytes"]
    return " / ".join(f"{size / GIB:.2f}" for size in both)


def _read(name: str) -> Any:
    return json.loads((MEASURED / name).read_text(encoding="utf-8"))


def table(record: Mapping[str, Any], more: Sequence[Sequence[str]] = ()) -> str:
    """The record as Markdown, with more rows below it."""
    rows = []
    for row in ROWS:
        cells = (record["tokens"][row][card] for card in CARDS)
        rows.append([row, *(f"{tokens:,}" if tokens else "–" for tokens in cells), nearest(row)])
    return markdown_table(("one sample", *CARDS, "nearest measured run, GiB"), [*rows, *more], texts=(0,))


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
