"""Measure heads that are frozen, as under LoRA: log-probabilities, losses per token and divergences.

    python -m benchmarks frozen-heads --json RECORD      # on a GPU: about 2 minutes
    python -m benchmarks frozen-heads --tiny             # small shapes, also without a GPU

Each line is one op on one shape, forward and backward, with an upstream gradient per token:

    once        the forward computes the gradient of hidden for an upstream gradient of 1
    twice       the backward computes the logits again, as for a head that is trained
    products    the matrix products of `once` alone, by the vendor's library
    trl         TRL's function, where TRL is installed: log-probabilities and entropy

`errors` has relative errors of the gradient against fp64, on few tokens.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import Bench, Case, peaks_bytes, times_ms
from tigon.bench.numerical_errors import relative_error
from tigon.ops import linear_cross_entropy, linear_kl, linear_logprobs
from tigon.ops.head import chunks, divergence, logprobs

OPS = ("logprobs", "logprobs and entropy", "loss per token", "divergence")
ERROR_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """Tokens, hidden size and vocabulary."""

    tokens: int
    hidden: int
    vocab: int


SHAPES = (
    Shape(8192, 4096, 128256),
    Shape(8192, 4096, 151936),
    Shape(4096, 2048, 128256),
    Shape(16384, 3584, 152064),
)
TINY = (Shape(40, 16, 101),)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a line. The teacher's are as large as the student's."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    ids: Tensor
    upstream: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
        torch.manual_seed(0)
        hiddens = [torch.randn(shape.tokens, shape.hidden, device=device).to(dtype) for _ in range(2)]
        weights = [
            (torch.randn(shape.vocab, shape.hidden, device=device) * 2 * shape.hidden**-0.5).to(dtype) for _ in range(2)
        ]
        ids = torch.randint(0, shape.vocab, (shape.tokens,), device=device)
        upstream = torch.randn(shape.tokens, device=device)
        return cls(hiddens[0].requires_grad_(), weights[0], hiddens[1], weights[1], ids, upstream)

    def double(self) -> Inputs:
        tensors = (self.hidden, self.weight, self.teacher_hidden, self.teacher_weight)
        hidden, weight, *teacher = (tensor.detach().double() for tensor in tensors)
        return Inputs(hidden.requires_grad_(), weight, teacher[0], teacher[1], self.ids, self.upstream.double())


def values(op: str, given: Inputs) -> Tensor:
    """The result of an op per token, which has a gradient."""
    if op == "logprobs":
        found = linear_logprobs(given.hidden, given.weight, given.ids)
        assert isinstance(found, Tensor)
        return found
    if op == "logprobs and entropy":
        both: Any = linear_logprobs(given.hidden, given.weight, given.ids, outputs=("entropy", "predicted"))
        return both.logprob  # type: ignore[no-any-return]
    if op == "loss per token":
        loss: Any = linear_cross_entropy(given.hidden, given.weight, given.ids, reduction="none")
        return loss  # type: ignore[no-any-return]
    return linear_kl(given.hidden, given.weight, given.teacher_hidden, given.teacher_weight, kind="forward")


def gradient(op: str, given: Inputs) -> Tensor:
    result = values(op, given)
    (found,) = torch.autograd.grad(result, given.hidden, given.upstream.to(result.dtype))
    return found


@contextlib.contextmanager
def computed_twice() -> Iterator[None]:
    """Let the ops treat frozen heads as trained ones, whose backward computes the logits again."""
    of_chunks = property(lambda request: "recompute" if request.per_row else "stream")
    with (
        mock.patch.object(logprobs, "is_frozen", lambda *wanted: False),
        mock.patch.object(divergence, "is_frozen", lambda *wanted: False),
        mock.patch.object(chunks.ChunkRequest, "mode_of_chunks", of_chunks),
    ):
        yield


def twice(op: str, given: Inputs) -> Tensor:
    with computed_twice():
        return gradient(op, given)


def products(op: str, given: Inputs) -> Callable[[], Any]:
    """The products of logits and of hidden's gradient, over tokens whose logits fit into 1 GiB."""
    rows = max((1 << 30) // (2 * given.weight.shape[0]), 1)
    logits = given.hidden.new_empty((min(rows, len(given.hidden)), given.weight.shape[0])).detach()
    dx = given.hidden.new_empty((len(logits), given.weight.shape[1])).detach()
    hidden, teacher = given.hidden.detach(), given.teacher_hidden

    def run() -> None:
        for start in range(0, len(hidden), len(logits)):
            part = hidden[start : start + len(logits)]
            if op == "divergence":
                torch.mm(teacher[start : start + len(logits)], given.teacher_weight.t(), out=logits[: len(part)])
            torch.mm(part, given.weight.t(), out=logits[: len(part)])
            torch.mm(logits[: len(part)], given.weight, out=dx[: len(part)])

    return run


def trl(given: Inputs) -> Callable[[], Any] | None:
    """TRL's own function; None if TRL is not installed or has another one."""
    try:
        function = importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction
    except (ImportError, AttributeError):
        return None

    def run() -> Tensor:
        # hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
        found = function.apply(
            given.hidden, given.weight, None, given.ids, 1.0, 256, None, 1.0, ("log_probs", "entropy", "is_top1")
        )
        (dx,) = torch.autograd.grad(found[0], given.hidden, given.upstream)
        return dx

    return run


def calls_of(op: str, given: Inputs) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "once": partial(gradient, op, given),
        "twice": partial(twice, op, given),
        "products": products(op, given),
    }
    theirs = trl(given) if op == "logprobs and entropy" else None
    if theirs is not None:
        try:
            theirs()
        except Exception as error:  # another version's arguments
            print(f"TRL's function: {error!r}"[:300], flush=True)
        else:
            calls["trl"] = theirs
    return calls


def measure(bench: Bench) -> None:
    for shape in TINY if bench.tiny else SHAPES:
        few = Inputs.random(Shape(min(ERROR_TOKENS, shape.tokens), shape.hidden, shape.vocab), bench.device)
        for op in OPS:
            exact = twice(op, few.double())
            found = {name: relative_error(run(op, few), exact) for name, run in (("once", gradient), ("twice", twice))}
            bench.add("errors", {"op": op, "shape": vars(shape), **found})
        del few, exact
        bench.free()
        given = Inputs.random(shape, bench.device)
        for op in OPS:
            calls = calls_of(op, given)
            line = {"op": op, "shape": vars(shape), "median_ms": times_ms(calls, bench.device, turns=8)}
            bench.add("heads", {**line, "peak_bytes": peaks_bytes(calls, bench.device)})
        del given, calls
        bench.free()


CASE = Case(measure=measure, packages=("trl",))
