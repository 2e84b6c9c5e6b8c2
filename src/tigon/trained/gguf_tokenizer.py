"""The tokenizer of a GGUF file: tokens, merges, special tokens, chat template, and how text is split before merging.

llama.cpp knows each way of splitting text by a name, so a tokenizer whose rules are none of these cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tigon.errors import UsageError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""llama.cpp's kinds of tokens."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Split:
    """A way of splitting text."""

    name: str
    """llama.cpp's name."""
    pattern: str | None = None
    """The regular expression; None: that of GPT-2, which the byte-level step brings."""
    digits: bool = False
    """Whether each digit is split off before."""
    read_by_transformers: bool = True
    """Whether transformers splits in this way when it reads the file."""


SPLITS = (
    Split("gpt-2"),
    Split("smollm", digits=True, read_by_transformers=False),
    Split("qwen2", _WORDS + r"\p{N}" + _REST),
    Split("llama-bpe", _WORDS + r"\p{N}{1,3}" + _REST),
)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a GGUF file holds it."""

    split: Split
    tokens: Sequence[str]
    kinds: Sequence[int]
    merges: Sequence[str]
    special: dict[str, int]
    """gguf's name of a special token, such as `eos`, and its id."""
    adds_bos: bool
    template: str | None

    def add_to(self, writer: Any) -> None:
        """Write it into a `gguf.GGUFWriter`."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split.name)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self.merges)
        for name, token_id in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token_id)
        writer.add_add_bos_token(self.adds_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)


def of(tokenizer: Any, vocab_size: int, ends: Sequence[int] = ()) -> Vocabulary:
    """The tokenizer in the form of a GGUF file.

    Args:
        tokenizer: A tokenizer of transformers with byte-level BPE.
        vocab_size: The number of the model's embeddings. Ids that the tokenizer lacks get unused tokens.
        ends: The ids at which the model's generation config ends an answer.

    Raises:
        UsageError: The tokenizer has another form.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError("--gguf: the tokenizer has no tokenizer.json, from which the merges are read")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    split = _split_of(state)
    added = {token["id"]: token for token in state["added_tokens"]}
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= vocab_size:
            raise UsageError(
                f"--gguf: the token {token!r} has id {token_id}, and the model has {vocab_size} embeddings"
            )
        tokens[token_id] = token
        kinds[token_id] = _NORMAL
    for token_id, token in added.items():
        kinds[token_id] = _CONTROL if token["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    template = tokenizer.chat_template
    if template is not None and not isinstance(template, str):
        raise UsageError("--gguf: the tokenizer has several chat templates, of which a GGUF file holds one")
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    return Vocabulary(split, tokens, kinds, merges, _special(tokenizer, ends), adds_bos, template)


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, int]:
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "unk": tokenizer.unk_token_id}
    ids["pad"] = tokenizer.pad_token_id
    others = [i for i in ends if i != tokenizer.eos_token_id]
    ids["eot"] = others[0] if others else None  # a second end, such as that of a turn
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _split_of(state: dict[str, Any]) -> Split:
    """The way of splitting text of a tokenizer's tokenizer.json."""
    model, normalizer = state["model"], (state.get("normalizer") or {}).get("type")
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise UsageError(f"--gguf: the tokenizer is {_kind(model)}, and tigon writes byte-level BPE")
    if normalizer not in (None, "NFC"):
        raise UsageError(f"--gguf: the tokenizer normalises text by {normalizer}, which llama.cpp does not")
    step = state.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    kinds = [each.get("type") for each in steps]
    for split in SPLITS:
        own = ["Split"] if split.pattern else ["Digits"] if split.digits else []
        if kinds == [*own, "ByteLevel"] and _agrees(split, steps):
            return split
    raise UsageError(
        f"--gguf: the tokenizer splits text by rules that are none of {', '.join(split.name for split in SPLITS)}"
    )


def _agrees(split: Split, steps: Sequence[dict[str, Any]]) -> bool:
    byte_level = steps[-1]
    if byte_level.get("add_prefix_space") or bool(byte_level.get("use_regex", True)) == bool(split.pattern):
        return False
    if split.digits:
        return bool(steps[0].get("individual_digits"))
    return split.pattern is None or steps[0]["pattern"] == {"Regex": split.pattern}


def _kind(model: dict[str, Any]) -> str:
    return "BPE with byte fallback, as SentencePiece makes it" if model["type"] == "BPE" else str(model["type"])
