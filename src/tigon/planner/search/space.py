"""What the planner may change, and in which order: the search's space and the study's ladder, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, text_config
from tigon.techniques import TECHNIQUES
from tigon.techniques.choices import Choices

HEADROOM = 0.02
"""Share of a GPU's memory that a recommended recipe leaves free: what the prediction of reserved memory may miss."""

# --- the search ------------------------------------------------------------------------------------------------------

PRECISIONS = ("amp-bf16", "bf16")
"""fp32 is slower and larger than amp-bf16, and every GPU of the table has bf16."""
CHECKPOINTINGS = ("none", "selective", "every-2", "full", "offload")
"""Fastest first."""
TILE_TOKENS = 8192
"""Tokens of an MLP's tile, the last resort where rows are longer: a Llama MLP of this many fills a GPU."""
OPTIMIZERS = (
    "adamw", "adamw-8bit", "adamw-torchao-8bit", "adamw-torchao-4bit", "adafactor", "galore", "galore-layerwise",
)  # fmt: skip
"""What trains like AdamW, from the least change of its numbers to the most."""
LAST_RESORTS = frozenset({"adamw-torchao-4bit", "adafactor", "galore", "galore-layerwise"})
"""Tried only where nothing that changes less fits: their traces take seconds, and their time is modelled roughly."""
PLACEMENTS: tuple[Mapping[str, Any], ...] = (
    {"zero": 0, "fsdp": False, "offload": "none"},
    {"zero": 2, "fsdp": False, "offload": "none"},
    {"zero": 3, "fsdp": False, "offload": "none"},
    {"zero": 0, "fsdp": True, "offload": "none"},
    {"zero": 2, "fsdp": False, "offload": "cpu"},
    {"zero": 3, "fsdp": False, "offload": "cpu"},
    {"zero": 0, "fsdp": True, "offload": "cpu"},
    {"zero": 3, "fsdp": False, "offload": "nvme"},
)
"""Where weights and states live, least traffic first."""
MAX_SPLITS = 5

LEAST_COST: Mapping[str, float] = {"none": 1.0, "selective": 1.02, "every-2": 1.07, "full": 1.15, "offload": 1.15}
"""A step takes at least so many times as long as without checkpointing; Llama's layers 1.07, 1.11 and 1.21."""

KEPT_SHARE: Mapping[str, float] = {"none": 1.0, "every-2": 0.5, "selective": 0.35}
"""At least this share of the layers' activations stays with a kind of checkpointing; nothing with the others.

every-N: the layers that are not recomputed. selective: the products' outputs, 0.55 to 0.68 in Llama's layers; less is
said here, because what it is for is to rule out without a trace."""

CHANGE_RANKS: Mapping[str, int] = {
    "zero-1": 1, "zero-2": 1, "zero-3": 1, "adamw-8bit": 1, "paged-adamw-8bit": 1, "adamw-torchao-8bit": 1,
    "adamw-torchao-4bit": 2, "bf16": 3, "adafactor": 4, "lion-8bit": 4, "galore": 4, "galore-layerwise": 5, "sgd": 5,
    "lora": 6, "qlora": 7,
}  # fmt: skip
"""How far a technique takes a run from AdamW under autocast: an order of ours, not a measurement. Sums of them decide
which of two recipes changes less."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question to the planner: a run, the GPU it is to fit, and what may be changed."""

    request: Request
    """What was not given is the recipe's default."""
    free: frozenset[str]
    """The fields of Choices that were not given."""
    gpu: Gpu
    runnable_here: bool = False
    """Only what this machine has the packages for."""
    effective_batch: int | None = None
    """Rows of an optimizer step over all GPUs that are wanted; None: those of the request."""

    @property
    def rows(self) -> int:
        """Rows of an optimizer step on one GPU."""
        gpus = self.request.choices.gpus
        wanted = self.effective_batch
        return self.request.batch * self.request.choices.accumulate if wanted is None else max(1, wanted // gpus)


def with_headroom(gpu: Gpu) -> Gpu:
    """The GPU as recommendations see it."""
    return replace(gpu, memory_bytes=int(gpu.memory_bytes * (1.0 - HEADROOM)))


def as_request(request: Request, choices: Choices, batch: int) -> Request:
    """`request` with these choices. What is updated in the backward pass cannot be clipped."""
    clipped = request.clipped and choices.optimizer != "galore-layerwise"
    return replace(request, choices=choices, batch=batch, clipped=clipped)


def changes(choices: Choices) -> Mapping[str, str]:
    """The techniques that change a run's numbers against AdamW under autocast: name -> what they do to them."""
    return {
        name: TECHNIQUES[name].precision
        for name in CHANGE_RANKS
        if name in TECHNIQUES and TECHNIQUES[name].used_by(choices)
    }


def change_rank(choices: Choices) -> int:
    """The sum of CHANGE_RANKS; and 1 for states on the host, whose time is modelled more roughly than a GPU's."""
    return sum(CHANGE_RANKS[name] for name in changes(choices)) + (choices.offload != "none")


def walks(asked: Asked) -> list[Choices]:
    """Every precision, optimizer and placement that is free to choose, fewest changes of the numbers first."""
    base = asked.request.choices
    precisions = PRECISIONS if "precision" in asked.free else (base.precision,)
    optimizers = OPTIMIZERS if "optimizer" in asked.free else (base.optimizer,)
    found = [
        placed
        for optimizer in optimizers
        for precision in precisions
        for placed in placements(asked, replace(base, precision=precision, optimizer=optimizer))
    ]
    return sorted(found, key=change_rank)


def placements(asked: Asked, choices: Choices) -> Iterator[Choices]:
    """`choices` with every placement that agrees with what is fixed and can make a difference."""
    base = asked.request.choices
    fixed = {name: getattr(base, name) for name in PLACEMENTS[0] if name not in asked.free}
    found = [row for row in PLACEMENTS if all(row[name] == value for name, value in fixed.items())]
    if base.gpus == 1 and not any(fixed.get(name) for name in ("zero", "fsdp")):
        # One GPU has nothing to share with: only what lives on the host is gone from it.
        found = [row for row in found if row["offload"] != "none" or not (row["zero"] or row["fsdp"])]
        if base.lora_rank is not None:  # adapters have no states worth moving
            found = [row for row in found if row["offload"] == "none"]
    for row in found or [fixed]:
        placed = replace(choices, **row)
        if placed.optimizer != "adamw-torchao-8bit" or placed.fsdp or "optimizer" not in asked.free:
            yield placed  # elsewhere bitsandbytes has the same bytes without a compiler


def recomputations(asked: Asked, choices: Choices) -> list[Mapping[str, Any]]:
    """What of a layer may be kept, fastest first: fields of Choices. Last comes a layer in pieces, if rows are long."""
    kinds = CHECKPOINTINGS if "checkpointing" in asked.free else (choices.checkpointing,)
    found: list[Mapping[str, Any]] = [{"checkpointing": kind} for kind in kinds]
    pieces = {"mlp_tile_tokens": TILE_TOKENS, "attention_groups": _key_heads(asked.request.config)}
    pieces = {name: value for name, value in pieces.items() if name in asked.free}
    if pieces and asked.request.seq > TILE_TOKENS and choices.attention == "sdpa" and kinds[-1] != "none":
        found.append({**found[-1], **pieces})
    return found


def _key_heads(config: Any) -> int:
    text = text_config(config)
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def splits(asked: Asked) -> list[tuple[int, int]]:
    """(batch, accumulate) with as many rows in an optimizer step as asked for, largest micro-batch first."""
    request = asked.request
    if "accumulate" not in asked.free:
        return [(request.batch, request.choices.accumulate)]
    rows = asked.rows
    most = min(request.batch, rows)
    sizes = [size for size in range(most, 0, -1) if rows % size == 0]
    if len(sizes) > MAX_SPLITS:
        sizes = [*sizes[: MAX_SPLITS - 1], sizes[-1]]
    return [(size, rows // size) for size in sizes]


# --- the study's ladder ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder."""

    name: str
    change: Mapping[str, Any]
    """Fields of Choices."""
    without: Mapping[str, Any]
    """What of the rungs before it is given up where the matrix refuses both together."""
    needs_gpus: int = 1


LADDER_START: Mapping[str, Any] = {
    "kernels": "none", "precision": "fp32", "optimizer": "adamw", "checkpointing": "none", "zero": 0, "fsdp": False,
    "offload": "none", "accumulate": 1,
}  # fmt: skip
LADDER = (
    Rung(name="fused kernels", change={"kernels": "tigon"}, without={}),
    Rung(name="ZeRO-2", change={"zero": 2}, without={"fsdp": False}, needs_gpus=2),
    Rung(name="checkpointing", change={"checkpointing": "full"}, without={}),
    Rung(name="mixed precision", change={"precision": "amp-bf16"}, without={}),
    Rung(name="ZeRO-3", change={"zero": 3}, without={"fsdp": False}),
    Rung(name="CPU offload", change={"offload": "cpu"}, without={}),
    Rung(name="GaLore", change={"optimizer": "galore"}, without={"zero": 0, "fsdp": False, "offload": "none"}),
    Rung(name="8-bit states", change={"optimizer": "adamw-8bit"}, without={"offload": "none"}),
    Rung(name="NVMe", change={"zero": 3, "offload": "nvme"}, without={"optimizer": "adamw"}),
)
