"""Compares an export with the trained model, after the program that will read the export has loaded it.

Two comparisons find different faults. The loaded model is compared with the weights that were to be written, rounded
as the format rounds them, so that each bit of the weights must agree. It is also compared with the trained model,
whose adapters are not merged, which shows how much the format's rounding changes the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tigon.errors import UsageError
from tigon.models.loading.classifier import task_of
from tigon.models.loading.weight_files import listed
from tigon.techniques.qat.formats import FORMATS
from tigon.techniques.qat.qat import round_layers
from tigon.trained.behaviour import Behaviour, checksums, observe
from tigon.trained.probes import CHATS, N_TOKENS, Probes, rendered
from tigon.trainer.evaluation.generate import end_tokens

ROUNDINGS = 2.0
"""Each weight is rounded once. The errors of layers add up as a random walk, so the limit is this many roundings times
the root of the number of layers. Merges in bf16 reached a quarter of it for a small random model,
and a fourteenth for SmolLM2-135M."""
FP32_LIMIT = 1e-4
"""The limit for the order of sums in fp32, in which all models compute here."""
_ANYWAY = "nothing was written; --no-verify writes it without this check"


@dataclass(frozen=True)
class Expected:
    """The model that is to be written."""

    behaviour: Behaviour
    checksums: Mapping[str, int]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Reader:
    """What a program made of the written files."""

    name: str
    """The program and its version."""
    model: Any
    tokenizer: Any
    """None: the files hold none."""
    ends: tuple[int, ...] | None = None
    """The ids at which it ends an answer; None: those of its generation config."""
    unread: Sequence[str] = ()
    """What this program does not read of the file, in words."""
    splits_text: bool = True
    """Whether the program splits text as the trained tokenizer."""


@dataclass
class Verification:
    """One export's comparison. `see_trained` and `expect` come before the files are written."""

    tokenizer: Any
    probes: Probes
    trained_over: str | None = None
    """The format to which the run rounded the frozen weights, such as NF4, if it did. Here they are not rounded."""
    rounded_to: str | None = None
    """The format of the export, if the run computed with weights in this format (`train.qat`)."""
    prompts: list[list[int]] = field(init=False)
    trained: Behaviour = field(default_factory=Behaviour)
    predicts: str = field(init=False, default="next tokens")
    """What the model predicts for each token, in words."""
    effect: float | None = None
    """How much the adapters change the logits."""
    seen: Behaviour | None = None
    """What the run's loss saw: the trained model with weights in the format `rounded_to`."""

    def __post_init__(self) -> None:
        self.prompts = [ids for probe in self.probes.texts if (ids := probe.ids(self.tokenizer)[:N_TOKENS])]

    def see_trained(self, model: Any) -> None:
        """Keep what the trained model computes, with adapters that are not merged."""
        self.predicts = "next tokens" if task_of(model.config) is None else "labels of tokens"
        self.trained = observe(model, self.prompts)
        if hasattr(model, "disable_adapter") and self.trained.hidden:
            with model.disable_adapter():
                self.effect = _largest(self.trained, observe(model, self.prompts))[-1]
        if self.rounded_to is not None:
            undo = round_layers(model, FORMATS[self.rounded_to])
            self.seen = observe(model, self.prompts)
            undo()

    def expect(self, model: Any, *, changed: bool) -> Expected:
        """Keep what the model in memory computes, which has the weights that are written.

        Args:
            model: The model.
            changed: Whether its weights are others than those of the trained model.

        Raises:
            UsageError: It differs from the trained model by more than the rounding of its dtype.
        """
        behaviour = observe(model, self.prompts) if changed else self.trained
        dtype = next(model.parameters()).dtype
        if self.trained.hidden and behaviour.hidden:
            self._refuse_wrong_weights(behaviour, dtype)
            if dtype == torch.float16:
                self._refuse_overflow(observe(model, self.prompts, in_fp32=False))
        return Expected(behaviour, checksums(model), tuple(end_tokens(model, self.tokenizer)))

    def expect_rounded(self, model: Any) -> Expected:
        """Keep what the model in memory computes after its weights were rounded to a format of few bits."""
        return Expected(observe(model, self.prompts), checksums(model), tuple(end_tokens(model, self.tokenizer)))

    def check(self, reader: Reader, expected: Expected) -> str:
        """Compare what a program has loaded with what was expected.

        Returns:
            A line for the user with the measured difference.

        Raises:
            UsageError: A tensor, a layer, a token, the chat template or a stop token differs.
        """
        unlike = _unlike(expected.checksums, checksums(reader.model))
        loaded = observe(reader.model, self.prompts)
        if loaded.hidden and expected.behaviour.hidden:
            differences = _largest(expected.behaviour, loaded)
            wrong = next((i for i, size in enumerate(differences) if not size <= FP32_LIMIT), None)
            if wrong is not None:
                where = f" ({listed(unlike, 'tensor')})" if unlike else "; its weights agree, so its config differs"
                raise UsageError(
                    f"{reader.name} computes otherwise from the written file: {_layer(wrong, differences)} is the "
                    f"first that differs, by {differences[wrong]:.2g}{where}; {_ANYWAY}"
                )
        if unlike:
            raise UsageError(
                f"{reader.name} reads other weights than were written: {listed(unlike, 'tensor')}; {_ANYWAY}"
            )
        if reader.tokenizer is not None:
            self._check_tokenizer(reader, expected)
        return self._line(reader, loaded)

    def _refuse_wrong_weights(self, written: Behaviour, dtype: torch.dtype) -> None:
        # The median of the tokens, because rounding may send a few of them to another expert.
        differences = _largest(self.trained, written, typical=True)
        for i, size in enumerate(differences):
            limit = max(FP32_LIMIT, ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(i + 1))
            if not size <= limit:
                raise UsageError(
                    f"the weights in {_words(dtype)} compute otherwise than the trained model: "
                    f"{_layer(i, differences)} is the first that differs, by {size:.2g}, and rounding explains "
                    f"{limit:.2g}; {_ANYWAY}"
                )

    def _refuse_overflow(self, written: Behaviour) -> None:
        for states in written.hidden:
            for i, state in enumerate(states):
                if not bool(torch.isfinite(state).all()):
                    layer = _layer(i, states)
                    raise UsageError(
                        f"--dtype fp16: {layer} computes values beyond 65504; use --dtype bf16, or --no-verify for a "
                        "program that computes in another dtype; nothing was written"
                    )

    def _check_tokenizer(self, reader: Reader, expected: Expected) -> None:
        ours, theirs = self.tokenizer, reader.tokenizer
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            if (own := getattr(ours, name)) is not None and own != getattr(theirs, name):
                raise UsageError(f"{reader.name} reads {name} {getattr(theirs, name)}, and it is {own}; {_ANYWAY}")
        for token_id in ours.all_special_ids:
            if (own := ours.convert_ids_to_tokens(token_id)) != theirs.convert_ids_to_tokens(token_id):
                raise UsageError(f"{reader.name} has another token than {own!r} with id {token_id}; {_ANYWAY}")
        ends = tuple(end_tokens(reader.model, theirs)) if reader.ends is None else reader.ends
        if missing := [i for i in expected.ends if i not in ends]:
            words = ", ".join(repr(ours.decode([i])) for i in missing)
            raise UsageError(f"{reader.name} does not end an answer at {words}; {_ANYWAY}")
        chats, theirs_as_text = list(rendered(ours, CHATS)), list(rendered(theirs, CHATS))
        if chats != theirs_as_text:
            raise UsageError(f"{reader.name} reads another chat template; {_ANYWAY}")
        if reader.splits_text:
            for probe in self.probes.texts:
                if (text := _first_token_apart(ours, probe.ids(ours), probe.ids(theirs))) is not None:
                    raise UsageError(f"{reader.name} splits text into other tokens, first at {text}; {_ANYWAY}")

    def _line(self, reader: Reader, loaded: Behaviour) -> str:
        parts = ["weights, tokens, chat template and stop tokens agree"]
        if reader.tokenizer is None:
            parts = ["weights agree", "the folder has no tokenizer"]
        elif not reader.splits_text:
            parts = ["weights, chat template and stop tokens agree"]
        if self.trained.hidden and loaded.hidden:
            trained = self.seen or self.trained
            same, n_tokens = same_next_tokens(trained, loaded)
            size = _largest(trained, loaded)[-1]
            if n_tokens:  # a reward model predicts none
                reference = "the trained model" if self.trained_over is None else "the model with adapters"
                reference += f" as its loss saw it, in {self.rounded_to}" if self.seen else ""
                parts.append(f"{same} of {n_tokens} {self.predicts} {self.probes.origin} are those of {reference}")
            parts.append(f"{'logits' if n_tokens else 'scores'} differ by {size:.2%}")
            if same < _FEW_CHANGES * n_tokens:
                parts[-1] += ", so answers change: ask it your own questions before you serve it"
            if self.effect is not None:
                parts[-1] += f", and the adapters change them by {self.effect:.2%}"
            if (rounded := self.trained_over) is not None:
                parts.append(
                    f"trained over {rounded}; compared with its 16-bit weights, so the rounding of {rounded} is not in "
                    "these figures"
                )
        else:
            parts.append(f"nothing was computed: {self.trained.problem or loaded.problem or 'no prompt has tokens'}")
        return f"verified by {reader.name}: {'; '.join([*parts, *reader.unread])}"


_FEW_CHANGES = 0.8
"""Below this share of equal next tokens the line says that answers change. Of SmolLM2-135M, fp8 and Q4_K_M kept 0.85
and 0.88, int4 0.62 (docs/trained-models.md); int4 of another run had 0.63, and answered 4 of 11 learned questions
wrong."""


def same_next_tokens(one: Behaviour, other: Behaviour) -> tuple[int, int]:
    """(positions at which both have the same likeliest next token, positions)."""
    pairs = [(a[-1], b[-1]) for a, b in zip(one.hidden, other.hidden, strict=True) if not _has_score(a)]
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    return same, sum(len(a) for a, _ in pairs)


def _has_score(states: Sequence[Tensor]) -> bool:
    """Whether the model gives each token one score instead of the logits of the next one."""
    return states[-1].shape[-1] == 1


def _largest(one: Behaviour, other: Behaviour, *, typical: bool = False) -> list[float]:
    """The relative difference of the embeddings, each layer and the logits: the largest of all prompts.

    typical: Whether the difference of a prompt is the median of its tokens, and not that of all together.
    """
    per_prompt = [
        [_relative(a, b, typical=typical) for a, b in zip(states, others, strict=True)]
        for states, others in zip(one.hidden, other.hidden, strict=True)
    ]
    return [max(sizes) for sizes in zip(*per_prompt, strict=True)]


def _relative(one: Tensor, other: Tensor, *, typical: bool) -> float:
    if one.shape != other.shape:
        return math.inf
    rows = one.ndim if typical else 0
    difference, norm = ((t.double().norm(dim=-1) if rows == 2 else t.double().norm()) for t in (one - other, one))
    sizes = torch.where(difference == 0, 0.0, difference / norm)  # two zeros agree
    return float(sizes.nan_to_num(nan=math.inf, posinf=math.inf).median())


def _layer(index: int, states: Sequence[object]) -> str:
    if index == 0:
        return "the embedding"
    return "the head" if index == len(states) - 1 else f"layer {index - 1}"


def _unlike(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """The tensors whose values differ. A program may leave out a tied weight, which it has under its other name."""
    return [name for name, value in one.items() if other.get(name, value) != value]


def _first_token_apart(tokenizer: Any, ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    if list(ours) == list(theirs):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"token {at}, in {tokenizer.decode(list(ours[max(0, at - 2) : at + 3]))!r}"


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
