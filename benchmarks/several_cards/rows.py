"""The rows of `python -m benchmarks several-cards`, as recipe keys, the most important first.

A row of losses trains a small model in fp32 on the samples of one process, with another number of processes, and names
the row of one process whose losses it must repeat. A timed row has the real widths of its model. If it has fewer layers
than the model, its name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]

N_SAMPLES = 48
"""Samples of every row of losses. Equal numbers have one order, whatever the number of processes."""
LIMIT = 1e-5
LATER = 5e-4
"""The limit of the losses after the first. AdamW divides a gradient by its own size, which makes rounding large."""
"""The largest relative difference of a loss from that of one process."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of `tigon train` on a number of cards."""

    name: str
    cards: int
    keys: Keys
    equals: str = ""
    """The row whose losses this row must repeat."""
    limit: float = LIMIT
    post_training: bool = False
    seconds: float = 25
    """How long it takes, start included. It is ended after three times as long."""
    without_cudnn: bool = False
    """Attention is not cuDNN's."""
    profiled: bool = False
    """Record the kernels of one step too, in the main process."""
    tiny: Keys = field(default_factory=dict)
    """Keys of `--tiny`."""


# --- losses -----------------------------------------------------------------------------------------------------------

_SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
_DENSE = {**_SMALL, "intermediate_size": 512, "vocab_size": 1024, "tie_word_embeddings": False}
_EXPERTS = {**_DENSE, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "head_dim": 32}
_EXACT: Keys = {
    "model.name": "tigon-demo",
    "model.config": _DENSE,
    "data.sequence_length": 256,
    "train.precision": "fp32",
    "train.learning_rate": 1e-3,
    "train.schedule": "constant",
}
_FSDP: Keys = {"sharding.fsdp": True}
_RING: Keys = {"sharding.sequence_method": "ring"}
_AMP: Keys = {"train.precision": "amp-bf16"}  # a ring needs 16 bits on a GPU
_LORA: Keys = {"lora.rank": 8}
_QLORA: Keys = {"lora.rank": 8, "lora.quantize": True}
_ON_EXPERTS: Keys = {"lora.rank": 8, "lora.targets": ["linear", "experts"]}
_MOE: Keys = {"model.name": "qwen3-30b-a3b", "model.config": _EXPERTS}
_ZERO_2, _ZERO_3 = ({"sharding.zero": stage} for stage in (2, 3))


def _shares(keys: Keys) -> int:
    return int(keys.get("sharding.sequence", 1)) * int(keys.get("sharding.tensor", 1))


def _exact(name: str, cards: int, keys: Keys, *, like: str = "one", **options: Any) -> Row:
    """A row of losses with four samples per step."""
    batch = 4 * _shares(keys) // cards
    own = {"train.batch_size": batch, "train.steps": N_SAMPLES // (batch * cards), "sharding.gpus": cards}
    reference = "" if cards == 1 else f"losses, {like}"
    return Row(name=f"losses, {name}", cards=cards, keys={**_EXACT, **keys, **own}, equals=reference, **options)


_ALIGNED: Keys = {
    **_EXACT,
    "model.config": {**_DENSE, "vocab_size": 1024},
    "data.source": "toy-answers",
    "data.vocab_size": 1024,
    "data.sequence_length": 64,
    "train.steps": 3,
    "train.learning_rate": 1e-4,
}
_GRPO: Keys = {
    "train.objective": "grpo",
    "post_training.rewards": ["benchmarks.several_cards.rows:short"],
    "post_training.generations": 4,
    "post_training.completion_length": 16,
}


def short(completions: list[str], **columns: Any) -> list[float]:
    """GRPO's reward: few words."""
    return [-float(len(str(text).split())) for text in completions]


def _aligned(name: str, cards: int, keys: Keys, *, like: str = "") -> Row:
    """A row of losses of post-training, with eight samples per step."""
    own = {"train.batch_size": 8 // cards, "sharding.gpus": cards}
    return Row(
        name=f"losses, {name}",
        cards=cards,
        keys={**_ALIGNED, **keys, **own},
        equals=like and f"losses, {like}",
        limit=1e-4,
        post_training=True,
    )


_DPO: Keys = {"train.objective": "dpo"}
_TWO_LOSSES = (
    _exact("one", 1, {}),
    _exact("DDP", 2, {}),
    _exact("FSDP2", 2, _FSDP),
    _exact("ZeRO-2", 2, _ZERO_2),
    _exact("ZeRO-3", 2, _ZERO_3),
    _exact("Ulysses", 2, {**_FSDP, "sharding.sequence": 2}),
    _exact("amp-bf16, one", 1, _AMP),
    _exact("ring", 2, {**_AMP, **_FSDP, **_RING, "sharding.sequence": 2}, like="amp-bf16, one", limit=2e-3),
    _exact("LoRA, one", 1, _LORA),
    _exact("LoRA, FSDP2", 2, {**_LORA, **_FSDP}, like="LoRA, one"),
    _exact("LoRA, ZeRO-3", 2, {**_LORA, **_ZERO_3}, like="LoRA, one"),
    _exact("QLoRA, one", 1, _QLORA),
    _exact("QLoRA, FSDP2", 2, {**_QLORA, **_FSDP}, like="QLoRA, one"),
    _exact("experts, one", 1, _MOE),
    _exact("experts, FSDP2", 2, {**_MOE, **_FSDP}, like="experts, one"),
    _exact("LoRA on experts, one", 1, {**_MOE, **_ON_EXPERTS}),
    _exact("LoRA on experts, FSDP2", 2, {**_MOE, **_ON_EXPERTS, **_FSDP}, like="LoRA on experts, one"),
    _exact("Muon, one", 1, {"train.optimizer": "muon"}),
    _exact("Muon, FSDP2", 2, {"train.optimizer": "muon", **_FSDP}, like="Muon, one"),
    _aligned("DPO, one", 1, _DPO),
    _aligned("DPO, DDP", 2, _DPO, like="DPO, one"),
    _aligned("DPO, FSDP2", 2, {**_DPO, **_FSDP}, like="DPO, one"),
    _aligned("DPO, ZeRO-3", 2, {**_DPO, **_ZERO_3}, like="DPO, one"),
    _aligned("GRPO, DDP", 2, _GRPO),  # every process writes its own completions, so one process has no such run
    _aligned("GRPO, FSDP2", 2, {**_GRPO, **_FSDP}, like="GRPO, DDP"),
    _aligned("GRPO, ZeRO-3", 2, {**_GRPO, **_ZERO_3}, like="GRPO, DDP"),
    _exact("ZeRO++ with 8-bit weights", 2, {**_ZERO_3, "sharding.zero_int8_weights": True}, limit=1e-2, seconds=60),
)
_FOUR_LOSSES = (
    _exact("four, DDP", 4, {}),
    _exact("four, FSDP2", 4, _FSDP),
    _exact("four, FSDP2 with two copies", 4, {**_FSDP, "sharding.replicas": 2}),
    _exact("four, tensor groups of two", 4, {**_FSDP, "sharding.tensor": 2}),
    _exact("four, Ulysses", 4, {**_FSDP, "sharding.sequence": 4}),
    _exact("four, ring", 4, {**_AMP, **_FSDP, **_RING, "sharding.sequence": 4}, like="amp-bf16, one", limit=2e-3),
    _exact("four, ZeRO++ with copies of two", 4, {**_ZERO_3, "sharding.zero_copy_ranks": 2}),
)

# --- times ------------------------------------------------------------------------------------------------------------

_8B: Keys = {
    "model.name": "llama-3.1-8b",
    "data.sequence_length": 512,
    "train.precision": "bf16",
    "train.batch_size": 8,
    "train.checkpointing": "full",
    "train.steps": 7,
}
_8B_ADAPTERS: Keys = {**_8B, "train.precision": "amp-bf16", "data.sequence_length": 1024, "train.batch_size": 4}
_LONG: Keys = {
    "model.name": "llama-3.2-1b",
    "train.precision": "amp-bf16",
    "train.batch_size": 1,
    "train.checkpointing": "none",
    "train.steps": 4,
    "sharding.fsdp": True,
}
_1B_ALIGNED: Keys = {
    "model.name": "llama-3.2-1b",
    "data.source": "toy-answers",
    "data.sequence_length": 64,
    "train.precision": "amp-bf16",
    "train.checkpointing": "full",
    "train.batch_size": 16,
    "train.steps": 5,
}
_GRPO_TIMED: Keys = {**_GRPO, "post_training.generations": 8, "post_training.completion_length": 64}


def _layers(count: int, keys: Keys) -> Keys:
    return {**keys, "model.config": {"num_hidden_layers": count}}


_HALF = _layers(16, _8B)
_TINY: Keys = {
    "model.name": "tigon-demo",
    "model.config": {**_DENSE, "num_attention_heads": 4, "num_key_value_heads": 4},
    "data.sequence_length": 64,
    "train.batch_size": 8,
    "train.steps": 4,
}


def _timed(name: str, cards: int, keys: Keys, **options: Any) -> Row:
    return Row(name=name, cards=cards, keys={**keys, "sharding.gpus": cards}, tiny=_TINY, **options)


_TWO_TIMES = (
    _timed("8B, 16 layers, one card", 1, _HALF),
    _timed("8B, 16 layers, DDP", 2, _HALF),
    _timed("8B, 16 layers, FSDP2", 2, {**_HALF, **_FSDP}),
    _timed("8B, FSDP2", 2, {**_8B, **_FSDP}, profiled=True, seconds=35),
    _timed("1B, row of 78,336, Ulysses", 2, {**_LONG, "data.sequence_length": 78336, "sharding.sequence": 2}),
    _timed(
        "1B, row of 78,336, ring",
        2,
        {**_LONG, **_RING, "data.sequence_length": 78336, "sharding.sequence": 2},
        profiled=True,
    ),
    _timed(
        "1B, row of 78,336, ring with PyTorch's flash attention",
        2,
        {**_LONG, **_RING, "data.sequence_length": 78336, "sharding.sequence": 2},
        without_cudnn=True,
    ),
    _timed("8B, 16 layers, ZeRO-3", 2, {**_HALF, **_ZERO_3}),
    _timed("8B, 16 layers, ZeRO-2", 2, {**_HALF, **_ZERO_2}),
    _timed("8B, 8 layers, LoRA, DDP", 2, {**_layers(8, _8B_ADAPTERS), **_LORA}),
    _timed("8B, 8 layers, LoRA, FSDP2", 2, {**_layers(8, _8B_ADAPTERS), **_LORA, **_FSDP}, seconds=40),
    _timed("8B, 8 layers, LoRA, ZeRO-3", 2, {**_layers(8, _8B_ADAPTERS), **_LORA, **_ZERO_3}, seconds=40),
    _timed(
        "70B, 4 layers, QLoRA, FSDP2",
        2,
        {**_layers(4, _8B_ADAPTERS), "model.name": "llama-3.1-70b", **_QLORA, **_FSDP},
        seconds=50,
    ),
    _timed("8B, 16 layers, Muon, FSDP2", 2, {**_HALF, "train.optimizer": "muon", **_FSDP}),
    _timed("30B-A3B, 4 layers, FSDP2", 2, {**_layers(4, _8B), "model.name": "qwen3-30b-a3b", **_FSDP}),
    _timed(
        "30B-A3B, 4 layers, LoRA on experts, FSDP2",
        2,
        {**_layers(4, _8B_ADAPTERS), "model.name": "qwen3-30b-a3b", **_ON_EXPERTS, **_FSDP},
        seconds=40,
    ),
    *(
        _timed(f"1B, {name}, {engine}", 2, {**_1B_ALIGNED, **keys, **how}, post_training=True, seconds=40)
        for name, keys in (("DPO", _DPO), ("GRPO", _GRPO_TIMED))
        for engine, how in (("DDP", {}), ("FSDP2", _FSDP), ("ZeRO-3", _ZERO_3))
    ),
    _timed("8B, 16 layers, ZeRO++ with 8-bit weights", 2, {**_HALF, **_ZERO_3, "sharding.zero_int8_weights": True}),
    _timed("8B, ZeRO-3", 2, {**_8B, **_ZERO_3}, seconds=45),
)
_FOUR_TIMES = (
    _timed("8B, 16 layers, four, DDP", 4, _HALF),
    _timed("8B, 16 layers, four, FSDP2", 4, {**_HALF, **_FSDP}),
    _timed("8B, 16 layers, four, FSDP2 with two copies", 4, {**_HALF, **_FSDP, "sharding.replicas": 2}),
    _timed("8B, 16 layers, four, tensor groups of two", 4, {**_HALF, **_FSDP, "sharding.tensor": 2}),
    _timed("1B, row of 131,072, four, Ulysses", 4, {**_LONG, "data.sequence_length": 131072, "sharding.sequence": 4}),
    _timed(
        "1B, row of 131,072, four, ring",
        4,
        {**_LONG, **_RING, "data.sequence_length": 131072, "sharding.sequence": 4},
    ),
    _timed("8B, four, FSDP2", 4, {**_8B, **_FSDP}, seconds=35),
    _timed("8B, 16 layers, four, ZeRO++, copies of two", 4, {**_HALF, **_ZERO_3, "sharding.zero_copy_ranks": 2}),
    _timed(
        "70B, 8 layers, four, LoRA, FSDP2",
        4,
        {**_layers(8, _8B_ADAPTERS), "model.name": "llama-3.1-70b", **_LORA, **_FSDP},
        seconds=60,
    ),
)

STAGES: tuple[tuple[Row, ...], ...] = (
    (*_TWO_LOSSES[:8], *_TWO_TIMES[:6]),
    (*_FOUR_LOSSES, *_FOUR_TIMES[:6]),
    (*_TWO_LOSSES[8:], *_TWO_TIMES[6:]),
    _FOUR_TIMES[6:],
)
"""Rows of at most two cards and rows of four, in turns. Rows of two cards run two at a time."""


def sections(row: Row, *, tiny: bool) -> dict[str, dict[str, Any]]:
    """The recipe of a row."""
    keys = {**row.keys, **(row.tiny if tiny else {}), "train.log_steps": 1, "train.report_to": ["none"]}
    keys |= {"model.self_test": "off", "output.save_model": False, "output.sample_tokens": 0, "data.eval_fraction": 0}
    if tiny:
        keys |= {"train.device": "cpu", "train.precision": "fp32", "data.vocab_size": 1024}
        keys["train.steps"] -= not row.post_training  # on a CPU a sweep adds a step, which meters memory
    if not row.post_training:
        keys["data.cross_document_attention"] = True  # random rows are one document each
    recipe: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        recipe.setdefault(section, {})[name] = value
    return recipe


def every() -> Iterator[Row]:
    for stage in STAGES:
        yield from stage


def worst_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference of the losses that both have."""
    pairs = list(zip(losses, reference, strict=False))
    return max((abs(a - b) / max(abs(b), 1e-3) for a, b in pairs), default=math.inf)


def chosen(pattern: str) -> tuple[tuple[Row, ...], ...]:
    """The stages with the rows whose name contains `pattern`, and the rows whose losses they repeat."""
    wanted = {row.name for row in every() if pattern in row.name}
    wanted |= {row.equals for row in every() if row.name in wanted}
    return tuple(tuple(row for row in stage if row.name in wanted) for stage in STAGES)
