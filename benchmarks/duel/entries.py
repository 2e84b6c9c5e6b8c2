"""The rows of the comparison: three tasks, two sizes, and the libraries with the settings that they document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOOP, TRAINER = "loop", "TRL's SFTTrainer"
CARD_GIB = 23.5
"""The memory of an RTX 4090, which is sold with 24 GB."""


@dataclass(frozen=True)
class Task:
    """Which model is trained, and which of its weights."""

    model: str
    words: str
    learning_rate: float
    four_bit: bool = False
    adapters: bool = True


TASKS: Mapping[str, Task] = {
    "qlora": Task("llama-3.1-8b", "QLoRA of Llama 3.1 8B", 1e-4, four_bit=True),
    "lora": Task("llama-3.1-8b", "LoRA of Llama 3.1 8B in bf16", 1e-4),
    # With AdamW an 8B takes 60 GiB. Hugging Face's logits of 16,384 tokens do not fit beside that in 80 GB.
    "full": Task("llama-3.2-3b", "full fine-tuning of Llama 3.2 3B in bf16", 1e-5, adapters=False),
}


@dataclass(frozen=True)
class Entry:
    """One library with one setting."""

    library: str
    """hf, liger, unsloth or tigon."""
    where: str
    setting: str
    """The library's own word for its activation checkpointing; `fp8` is tigon's `auto` with products in FP8."""
    xformers: bool = False
    memory: str | None = None
    """What tigon's plan may take; None: what the GPU has free."""
    limit_gib: float | None = None
    """Memory of the process, as on a card of this size; None: the whole GPU."""


ENTRIES: Mapping[str, Entry] = {
    "hf": Entry("hf", LOOP, "full"),
    "hf-trl": Entry("hf", TRAINER, "full"),
    "liger": Entry("liger", LOOP, "full"),
    "unsloth": Entry("unsloth", TRAINER, "unsloth"),
    "unsloth-loop": Entry("unsloth", LOOP, "unsloth"),
    "unsloth-xformers": Entry("unsloth", TRAINER, "unsloth", xformers=True),
    "unsloth-loop-xformers": Entry("unsloth", LOOP, "unsloth", xformers=True),
    "unsloth-auto": Entry("unsloth", TRAINER, "auto"),
    "unsloth-none": Entry("unsloth", LOOP, "none"),
    "tigon-full": Entry("tigon", LOOP, "full"),
    "tigon-offload": Entry("tigon", LOOP, "offload"),
    "tigon-offload-attention": Entry("tigon", LOOP, "offload-attention"),
    "tigon-auto9": Entry("tigon", LOOP, "auto", memory="9GiB"),
    "tigon-auto24": Entry("tigon", LOOP, "auto", memory="24GiB"),
    # A little more than Unsloth takes without checkpointing, because a plan also leaves room for what is not PyTorch's.
    "tigon-auto37": Entry("tigon", LOOP, "auto", memory="37GiB"),
    "tigon-auto46": Entry("tigon", LOOP, "auto", memory="46.5GiB"),
    "tigon-auto": Entry("tigon", LOOP, "auto"),
    "tigon-fp8": Entry("tigon", LOOP, "fp8"),
    "tigon-trl": Entry("tigon", TRAINER, "offload"),
    "tigon-trl-auto": Entry("tigon", TRAINER, "auto"),
    "unsloth-loop-in-24gb": Entry("unsloth", LOOP, "unsloth", limit_gib=CARD_GIB),
    "tigon-offload-in-24gb": Entry("tigon", LOOP, "offload", limit_gib=CARD_GIB),
    "tigon-auto-in-24gb": Entry("tigon", LOOP, "auto", memory=f"{CARD_GIB}GiB", limit_gib=CARD_GIB),
}


@dataclass(frozen=True)
class Row:
    """One process: a task, an entry and a size."""

    task: str
    entry: str
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.task}:{self.entry}:{self.batch}x{self.seq}"

    @property
    def size(self) -> str:
        return f"{self.batch}x{self.seq}"


def row_of(text: str) -> Row:
    """The row that `str` wrote.

    Raises:
        ValueError: a part is missing, or not known.
    """
    try:
        task, entry, size = text.split(":")
        batch, seq = (int(part) for part in size.split("x"))
    except ValueError:
        raise ValueError(f"{text!r} is not a row; write TASK:ENTRY:BATCHxTOKENS, such as qlora:hf:4x2048") from None
    for word, known in ((task, TASKS), (entry, ENTRIES)):
        if word not in known:
            raise ValueError(f"{text!r}: {word!r} is not known; choose one of {', '.join(known)}")
    return Row(task, entry, batch, seq)


SHORT, LONG, LONGEST = (4, 2048), (1, 16384), (1, 78464)
"""The last is nearly the 78,475 tokens that Unsloth publishes for 24 GB."""
TINY_SIZES = {SHORT: (2, 64), LONG: (1, 128), LONGEST: (1, 256)}

# First what the front page shows, then the trainers, then the rest.
_FIRST = ("unsloth-loop", "unsloth", "tigon-offload", "tigon-auto24", "tigon-auto", "hf", "liger")
_LONG = ("unsloth-loop", "tigon-offload-attention", "tigon-offload", "tigon-auto24", "tigon-auto", "hf", "liger")
_FULL = ("unsloth-loop", "tigon-offload", "tigon-auto", "hf", "liger")
_BLOCKS: tuple[tuple[str, tuple[int, int], tuple[str, ...]], ...] = (
    ("qlora", SHORT, (*_FIRST, "unsloth-none", "unsloth-auto")),
    ("qlora", SHORT, ("tigon-auto37",)),
    ("lora", SHORT, (*_FIRST, "tigon-auto46", "tigon-fp8")),
    ("qlora", LONG, _LONG),
    ("full", SHORT, (*_FULL, "tigon-auto24")),
    ("qlora", SHORT, ("tigon-trl", "hf-trl", "tigon-trl-auto", "tigon-full")),
    ("qlora", SHORT, ("unsloth-loop-xformers", "unsloth-xformers")),
    ("lora", LONG, _LONG),
    ("full", LONG, (*_FULL, "tigon-offload-attention")),
    ("lora", SHORT, ("unsloth-none", "unsloth-auto", "tigon-full", "tigon-trl", "tigon-trl-auto", "hf-trl")),
    ("full", SHORT, ("unsloth", "tigon-trl", "hf-trl")),
    ("qlora", LONG, ("unsloth", "unsloth-loop-xformers", "tigon-full", "tigon-trl", "hf-trl")),
    ("lora", LONG, ("unsloth", "tigon-trl")),
    ("full", LONG, ("unsloth", "tigon-trl")),
    ("qlora", SHORT, ("tigon-offload-attention", "tigon-auto9")),
    ("qlora", LONGEST, ("unsloth-loop-in-24gb", "tigon-auto-in-24gb", "tigon-offload-in-24gb")),
)
ORDER: tuple[Row, ...] = tuple(Row(task, entry, *size) for task, size, entries in _BLOCKS for entry in entries)
"""Every row, the most important first."""
