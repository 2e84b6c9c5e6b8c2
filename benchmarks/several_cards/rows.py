"""The rows of `python -m benchmarks several-cards`, as recipe keys, the most important first.

A row of losses trains a small model in fp32 on the samples of one process, with another number of processes, and names
the row of one process whose losses it must repeat. A timed row has the real widths of its model. If it has fewer layers
than the model, its name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Keys = Mapping[str, Any]

N_SAMPLES = 48
"""Samples of every row of losses. Equal numbers have one order, whatever the number of processes."""
LIMIT = 1e-5
"""The largest relative difference of the first loss, and of the first gradient norm, from one process."""
LATER = 5e-4
"""The limit of later losses and norms. AdamW divides a gradient by its own size, which makes rounding large."""


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
    plain: bool = False
    """Transformers' model in PyTorch's FSDP2, without tigon (benchmarks/cases/plain_fsdp2.py)."""
    without_cudnn: bool = False
    """Attention is not cuDNN's."""
    profiled: bool = False
    """Record the kernels of one step too, in the main process."""
    dense_layers: int | None = None
    """The run reads a checkpoint in which so many layers have random matrices, and the matrices of the others are 0.
    None: tigon draws the weights."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes."""
    tiny: Keys = field(default_factory=dict)
    """Keys of `--tiny`."""

    @property
    def is_planned(self) -> bool:
        """Whether the planner predicts it: a timed run of `tigon train`."""
        return not self.name.startswith("losses") and not self.plain


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
_GRPO_EXACT: Keys = {**_GRPO, "post_training.generator": "transformers"}
"""Engines that divide weights write completions with `transformers`, which samples other tokens than tigon's generator.
So DDP, which they are compared with, must write its completions with it too."""


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
    _exact("LoRA, DDP", 2, _LORA, like="LoRA, one"),
    _exact("LoRA, ZeRO-2", 2, {**_LORA, **_ZERO_2}, like="LoRA, one"),
    _exact("LoRA, Ulysses", 2, {**_LORA, **_FSDP, "sharding.sequence": 2}, like="LoRA, one"),
    _exact("LoRA, amp-bf16, one", 1, {**_LORA, **_AMP}),
    _exact(
        "LoRA, ring",
        2,
        {**_LORA, **_AMP, **_FSDP, **_RING, "sharding.sequence": 2},
        like="LoRA, amp-bf16, one",
        limit=2e-3,
    ),
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
    _aligned("GRPO, DDP", 2, _GRPO_EXACT),  # every process writes its own completions, so one process has no such run
    _aligned("GRPO, FSDP2", 2, {**_GRPO_EXACT, **_FSDP}, like="GRPO, DDP"),
    _aligned("GRPO, ZeRO-3", 2, {**_GRPO_EXACT, **_ZERO_3}, like="GRPO, DDP"),
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
    _exact(
        "four, ZeRO++ with copies of two and 4-bit gradients",
        4,
        {**_ZERO_3, "sharding.zero_copy_ranks": 2, "sharding.zero_int4_gradients": True},
        limit=1e-2,
    ),
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


_8B_LORA: Keys = {**_8B_ADAPTERS, **_LORA}
_8B_LORA_LONG: Keys = {
    **_8B_LORA,
    "data.sequence_length": 32768,
    "train.batch_size": 1,
    "train.steps": 4,
    "sharding.fsdp": True,
    "sharding.sequence": 2,
}
_70B_LORA: Keys = {**_8B_LORA, "model.name": "llama-3.1-70b", **_FSDP}
_INT8: Keys = {**_ZERO_3, "sharding.zero_int8_weights": True}
_FIRST_CHOICE, _PLAIN_MEMORY = "mlp:20,elementwise:12", "mlp:17,elementwise:15"
"""The planner's fastest recomputation of the 8B under FSDP2 in the 33.9 GiB that plain FSDP2 takes with all layers
recomputed. Layers at the end may keep more: the backward pass frees their activations before most gradients exist.
The first is from a plan that was 0.6 GiB too high."""
_8B_FSDP: Keys = {**_8B, **_FSDP}
_MORE_STEPS: Keys = {**_8B_FSDP, "train.steps": 13}
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
    _timed("8B, FSDP2", 2, {**_8B, **_FSDP}, seconds=35),
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
    _timed(
        "8B, 8 layers, LoRA, FSDP2, lora.base: fp32",
        2,
        {**_layers(8, _8B_ADAPTERS), **_LORA, **_FSDP, "lora.base": "fp32"},
        seconds=40,
    ),
    _timed("8B, LoRA, one card", 1, _8B_LORA),
    _timed("8B, LoRA, DDP", 2, _8B_LORA),
    _timed("8B, LoRA, FSDP2", 2, {**_8B_LORA, **_FSDP}, dense_layers=32, seconds=40),
    _timed("8B, LoRA, ZeRO-2", 2, {**_8B_LORA, **_ZERO_2}),
    _timed("8B, LoRA, ZeRO-3", 2, {**_8B_LORA, **_ZERO_3}, dense_layers=32, seconds=40),
    _timed("8B, LoRA, row of 32,768, Ulysses", 2, _8B_LORA_LONG, dense_layers=32, seconds=40),
    _timed("8B, LoRA, row of 32,768, ring", 2, {**_8B_LORA_LONG, **_RING}, dense_layers=32, seconds=40),
    _timed("8B, 8 layers, LoRA, ZeRO-3", 2, {**_layers(8, _8B_ADAPTERS), **_LORA, **_ZERO_3}, seconds=40),
    _timed("70B, 4 layers, QLoRA, FSDP2", 2, {**_layers(4, _70B_LORA), **_QLORA}, dense_layers=4, seconds=40),
    _timed("70B, QLoRA, FSDP2", 2, {**_70B_LORA, **_QLORA, "train.steps": 4}, dense_layers=4, seconds=65),
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
    *(
        _timed(
            f"1B, GRPO, {engine}, transformers' generate",
            2,
            {**_1B_ALIGNED, **_GRPO_TIMED, **how, "post_training.generator": "transformers"},
            post_training=True,
            seconds=40,
        )
        for engine, how in (("FSDP2", _FSDP), ("ZeRO-3", _ZERO_3))
    ),
    _timed("8B, 16 layers, ZeRO++ with 8-bit weights", 2, {**_HALF, **_INT8}),
    _timed("8B, ZeRO-3", 2, {**_8B, **_ZERO_3}, seconds=45),
    _timed("8B, ZeRO-2", 2, {**_8B, **_ZERO_2}, seconds=45),
    _timed("8B, plain FSDP2", 2, _MORE_STEPS, plain=True),
    _timed("8B, FSDP2 in 33.1 GiB", 2, {**_8B_FSDP, "train.checkpointing": _FIRST_CHOICE}, seconds=35),
    _timed("8B, FSDP2 in 33.7 GiB", 2, {**_MORE_STEPS, "train.checkpointing": _PLAIN_MEMORY}),
    _timed("8B, FSDP2, nothing recomputed", 2, {**_8B_FSDP, "train.checkpointing": "none"}, seconds=35),
    _timed(
        "8B, FSDP2 in 33.7 GiB, collectives on 8 multiprocessors",
        2,
        {**_MORE_STEPS, "train.checkpointing": _PLAIN_MEMORY},
        environment={"NCCL_MAX_CTAS": "8"},
    ),
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
    _timed("70B, 8 layers, four, LoRA, FSDP2", 4, _layers(8, _70B_LORA), dense_layers=8, seconds=60),
    _timed("8B, LoRA, four, DDP", 4, _8B_LORA),
    _timed("8B, LoRA, four, FSDP2", 4, {**_8B_LORA, **_FSDP}, dense_layers=32, seconds=40),
    _timed("70B, four, LoRA, FSDP2", 4, {**_70B_LORA, "train.steps": 4}, dense_layers=4, seconds=100),
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


def chosen(patterns: Sequence[str]) -> tuple[tuple[Row, ...], ...]:
    """The rows that `patterns` choose, and the rows whose losses they repeat, in the order of the patterns.

    A pattern is the name of a row or a part of names. Without patterns: all stages.

    Raises:
        KeyError: No row has a pattern in its name.
    """
    if not patterns:
        return STAGES
    rows = {row.name: row for row in every()}
    found: dict[str, Row] = {}
    for pattern in patterns:
        names = [pattern] if pattern in rows else [name for name in rows if pattern in name]
        if not names:
            raise KeyError(pattern)
        for name in names:
            if rows[name].equals:
                found.setdefault(rows[name].equals, rows[rows[name].equals])
            found.setdefault(name, rows[name])
    return (tuple(found.values()),)
