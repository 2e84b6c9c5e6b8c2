"""Helpers for the tests of the ops: running an op with its gradients, the rule for its error, and hostile memory.

The rule. The truth is the oracle in fp64 on the same (rounded) inputs, the baseline is the oracle in the inputs' own
dtypes. An op's error in the Frobenius norm may be `factor` (2) times the baseline's error. If rounding the truth alone
errs more, that error counts instead, because a baseline may be exact by luck. `factor` fp32 rounding steps are added
for the arithmetic. The largest error of an element has the same limit plus one rounding step of the result's dtype,
because it also depends on luck in tensors of a hundred elements. No tolerance is written by hand, so none can be too
loose to fail. Triton's interpreter rounds fp32 to bf16 by cutting off, which errs by up to twice as much as rounding
and without cancelling: its bf16 factor is 4.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.cases import cases_of
from tigon.ops import OPS, Case, Op

Inputs = dict[str, Any]

# Guard elements on each side of an allocation; 64 of any dtype keep it aligned to 64 bytes.
PAD = 64
CANARY = -77.0
# Multiply-adds beyond which a case is for GPUs only.
CPU_ELEMENTS = 1 << 21


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    outputs: list[Tensor]
    grads: dict[str, Tensor | None]

    def named(self) -> dict[str, Tensor]:
        outputs = {f"output {i}": t.detach() for i, t in enumerate(self.outputs)}
        return outputs | {f"gradient of {name}": t for name, t in self.grads.items() if t is not None}


def cases(*, large: bool = False) -> list[Any]:
    """(op, case) of the registry as pytest parameters; the large ones too if wanted."""
    return [
        pytest.param(op, case, id=f"{op.name}-{case.id}")
        for op in OPS.values()
        for case in cases_of(op)
        if case.small or large
    ]


def first_cases() -> list[Any]:
    """One case an op, the first, for behaviour that does not depend on options."""
    return [pytest.param(op, op.case, id=op.name) for op in OPS.values()]


# Cases that take another way through the kernels than an op's first one. The interpreter, at 1 ms a program, runs what
# does not depend on numbers on these alone; the reference and a GPU run it on every case.
OTHER_WAYS = (
    "partial-interleaved", "packed", "none", "class-weight-smoothing", "mean-chunks-bias", "none-chunks-bias",
    "all-outputs-blocks", "several-ids", "half-masked", "forward-blocks-bias", "jsd-beta-blocks", "gpt-oss", "outside",
)  # fmt: skip


def takes_another_way(op: Op, case: Case) -> bool:
    return case is op.case or case.id in OTHER_WAYS


def has_a_way_of_its_own(op: Op, dtype: torch.dtype) -> bool:
    """bf16 logits leave their product as exponentials."""
    return dtype == torch.bfloat16 and op.name == "linear_cross_entropy"


def _worth_interpreting(op: Op, case: Case, heads: bool) -> bool:
    # The heads' kernels are linear_cross_entropy's, and 50 programs a call.
    return takes_another_way(op, case) and (heads or not op.name.startswith("multi_head"))


def contract_cases(*, first: bool = False, heads: bool = False, once: str | None = None) -> list[Any]:
    """(backend, op, case), for `parametrize(CONTRACT, contract_cases(), indirect=["backend"])`.

    first: one case an op. heads: interpret the multi-head kernels too. once: why an op's first case proves the
    behaviour of its kernels on all; the others are second proofs in the interpreter.
    """
    second = () if once is None or torch.cuda.is_available() else pytest.mark.second_proof(once)
    small = [(op, case) for op in OPS.values() for case in ([op.case] if first else cases_of(op)) if case.small]
    kernel = small if torch.cuda.is_available() else [pair for pair in small if _worth_interpreting(*pair, heads)]
    return [
        pytest.param(
            backend, op, case, id=f"{backend}-{op.name}-{case.id}",
            marks=second if backend == "kernel" and case is not op.case else (),
        )
        for backend, chosen in (("reference", small), ("kernel", kernel))
        for op, case in chosen
    ]  # fmt: skip


CONTRACT = ("backend", "op", "case")


def runs_here(case: Case, device: torch.device) -> bool:
    return case.small or device.type == "cuda" or math.prod(case.shape) <= CPU_ELEMENTS


def make(op: Op, case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Inputs:
    """The op's inputs for a case, the same in every call."""
    torch.manual_seed(20)
    return op.make(case, dtype, torch.device(device))


def differentiable(op: Op, inputs: Inputs) -> list[str]:
    return [name for name in op.grads if isinstance(inputs.get(name), Tensor)]


def with_leaves(
    op: Op, inputs: Inputs, copy: Callable[[Tensor], Tensor] = Tensor.clone, names: Sequence[str] | None = None
) -> Inputs:
    """Fresh copies of all tensors; those in `names` (all differentiable ones) require a gradient."""
    wanted = differentiable(op, inputs) if names is None else names
    leaves = {name: copy(t.detach()) if isinstance(t, Tensor) else t for name, t in inputs.items()}
    for name in wanted:
        leaves[name].requires_grad_()
    return leaves


def tensors_of(result: Any) -> list[Tensor]:
    """The differentiable outputs of a call: a tensor, or those of a tuple."""
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    return [t for t in outputs if isinstance(t, Tensor) and t.is_floating_point()]


def upstream_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random gradients, drawn on the CPU so that every backend sees the same."""
    torch.manual_seed(21)
    return [torch.randn(t.shape, dtype=torch.float32).to(t.dtype).to(t.device) for t in outputs]


def run(
    call: Callable[..., Any],
    op: Op,
    leaves: Inputs,
    upstream: Sequence[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> Result:
    """Outputs, and the gradients of every tensor in `leaves` that requires one."""
    outputs = tensors_of(call(**leaves))
    if upstream is None:
        upstream = upstream_for(outputs)
    upstream = [g.to(t.dtype) for g, t in zip(upstream, outputs, strict=True)]
    names = [n for n in differentiable(op, leaves) if leaves[n].requires_grad]
    grads = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream, retain_graph=retain_graph)
    return Result(outputs, dict(zip(names, grads, strict=True)))


def cast(inputs: Inputs, dtype: torch.dtype, device: torch.device | str | None = None) -> Inputs:
    """All floating-point tensors in another dtype, values exact when it is wider."""
    return {
        name: t.detach().to(device=device or t.device, dtype=dtype if t.is_floating_point() else t.dtype)
        if isinstance(t, Tensor)
        else t
        for name, t in inputs.items()
    }


def truth_and_baseline(
    op: Op, inputs: Inputs, upstream: Sequence[Tensor], product_orders: int = 1
) -> tuple[Result, Result]:
    """The oracle in fp64 on the inputs' values, and in the inputs' own dtypes.

    With several orders of summation, each tensor of the baseline is that of the order with the largest error.
    """
    truth = run(op.oracle, op, with_leaves(op, cast(inputs, torch.float64)), upstream)
    baseline = run(op.oracle, op, with_leaves(op, inputs), upstream)
    for seed in range(1, product_orders):
        baseline = worse_of(baseline, _in_another_order(op, inputs, upstream, seed), truth)
    return truth, baseline


def worse_of(first: Result, second: Result, truth: Result) -> Result:
    """Each tensor of the result whose error is larger."""
    mine, its, exact = first.named(), second.named(), truth.named()
    worse = {n for n in mine if relative_error(its[n], exact[n]) > relative_error(mine[n], exact[n])}
    outputs = enumerate(zip(first.outputs, second.outputs, strict=True))
    return Result(
        [b if f"output {i}" in worse else a for i, (a, b) in outputs],
        {n: second.grads[n] if f"gradient of {n}" in worse else g for n, g in first.grads.items()},
    )


def _in_another_order(op: Op, inputs: Inputs, upstream: Sequence[Tensor], seed: int) -> Result:
    """The oracle's result if products, of hidden states and weights or of queries and keys, sum in another order."""
    generator = torch.Generator().manual_seed(seed)
    axes = {"gate_up": -2 if inputs.get("transposed") else -1}  # where the hidden width is not the last axis
    orders: dict[str, Tensor] = {}
    for group in (("hidden", "weight", "gate_up"), ("teacher_hidden", "teacher_weight"), ("q", "k")):
        if group[0] in inputs:
            order = torch.randperm(inputs[group[0]].shape[-1], generator=generator).to(inputs[group[0]].device)
            orders |= {name: order for name in group if isinstance(inputs.get(name), Tensor)}
    moved = {n: t.index_select(axes.get(n, -1), orders[n]) if n in orders else t for n, t in inputs.items()}
    result = run(op.oracle, op, with_leaves(op, moved), upstream)
    for name, order in orders.items():
        if (gradient := result.grads[name]) is not None:
            result.grads[name] = gradient.index_select(axes.get(name, -1), order.argsort())
    return result


# --- the rule ---------------------------------------------------------------------------------------------------------


def assert_within(
    got: Tensor, truth: Tensor, baseline: Tensor, factor: float, what: str, beside: Tensor | None = None
) -> None:
    """The rule at the top of this file. `beside` is the truth of inputs half a rounding step away.

    `factor` times the distance to it is allowed too, because no arithmetic of that precision can avoid it.
    """
    assert got.dtype == baseline.dtype, f"{what}: {got.dtype}, the unfused op gives {baseline.dtype}"
    assert got.shape == baseline.shape, f"{what}: {tuple(got.shape)}, the unfused op gives {tuple(baseline.shape)}"
    if got.dtype == torch.float64:
        # The truth is no more exact than the op here; only the order of summation may differ.
        error = relative_error(got, truth)
        assert error <= 1e-13, f"{what}: relative error {error:.1e} against the formula, both fp64"
        return
    if not got.numel():
        return
    rounded = truth.to(got.dtype)
    truth, baseline = truth.double(), baseline.double()
    assert torch.equal(got.isnan(), truth.isnan()), f"{what}: NaN where the truth has none, or the reverse"
    error, unfused, rounding = ((t.double() - truth).abs() for t in (got, baseline, rounded))
    step = torch.finfo(torch.float32).eps
    unavoidable = torch.zeros_like(truth) if beside is None else beside.double() - truth
    for norm, steps, text in ((torch.Tensor.max, 1, "largest error"), (torch.linalg.vector_norm, 0, "Frobenius error")):
        allowed = factor * (max(float(norm(unfused)), float(norm(rounding))) + step * float(norm(truth.abs())))
        allowed += steps * float(norm(rounding)) + factor * float(norm(unavoidable.abs()))
        assert float(norm(error)) <= allowed, (
            f"{what} {tuple(got.shape)}: {text} {float(norm(error)):.2e} where the unfused op has "
            f"{float(norm(unfused)):.2e} and rounding {float(norm(rounding)):.2e}; allowed {allowed:.2e}"
        )


def assert_result_within(
    got: Result, truth: Result, baseline: Result, factor: float, beside: Result | None = None
) -> None:
    values, exact, unfused = got.named(), truth.named(), baseline.named()
    moved = {} if beside is None else beside.named()
    assert values.keys() == exact.keys()
    for name, value in values.items():
        near = moved[name].cpu() if moved else None
        assert_within(value.cpu(), exact[name].cpu(), unfused[name].cpu(), factor, name, near)


def nudged(inputs: Inputs, seed: int = 22) -> Inputs:
    """fp64 inputs, each half an fp32 rounding step larger or smaller, by the toss of a coin."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(torch.float32).eps / 2

    def moved(t: Tensor) -> Tensor:
        return t * (1 + half * (2 * torch.randint(0, 2, t.shape, generator=generator) - 1).to(t.device))

    return {n: moved(t) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in inputs.items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    if not got.numel():
        return 0.0
    got, expected = got.detach().double(), expected.detach().double()
    difference, scale = (got - expected).norm(), expected.norm()
    return float(difference / scale) if scale else float(difference)


def farthest(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative distance of a gradient; the same parameters must have one."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    least = 1e-4 * max(float(t.norm()) for t in want.values())
    return max(float((got[n] - t).norm()) / max(float(t.norm()), least) for n, t in want.items())


def assert_same(got: Result, expected: Result, *, ulps: float = 0.0) -> None:
    """Bit for bit, or up to `ulps` rounding steps in the Frobenius norm where sums may run in another order."""
    values, wanted = got.named(), expected.named()
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert value.dtype == wanted[name].dtype and value.shape == wanted[name].shape, name
        if not ulps:
            assert torch.equal(value, wanted[name]), f"{name} differs by {relative_error(value, wanted[name]):.1e}"
        else:
            error = relative_error(value, wanted[name])
            assert error <= ulps * torch.finfo(value.dtype).eps, f"{name}: relative error {error:.1e}"


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every non-empty subset of up to three names; of more, each alone and all."""
    sizes = range(1, len(names) + 1) if len(names) <= 3 else (1, len(names))
    for size in sizes:
        yield from itertools.combinations(names, size)


# --- hostile memory ---------------------------------------------------------------------------------------------------


def _poison(t: Tensor) -> Tensor:
    if t.is_floating_point():
        return t.fill_(float("nan"))
    return t.fill_(torch.iinfo(t.dtype).min) if t.dtype != torch.bool else t


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def guarded(t: Tensor) -> Tensor:
    """A copy with t's strides in the middle of NaN: what is read next to it, or between its rows, shows."""
    if not t.numel() or 0 in t.stride():
        return t.clone()
    buffer = _poison(torch.empty(_extent(t.shape, t.stride()) + 2 * PAD, dtype=t.dtype, device=t.device))
    # set_ and not a view, which autograd would treat differently from the caller's own tensor.
    inside = torch.empty(0, dtype=t.dtype, device=t.device)
    return inside.set_(buffer.untyped_storage(), PAD, t.shape, t.stride()).copy_(t)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that tigon allocates uninitialised is NaN (the smallest integer), between canaries checked on exit.

    An element that no program writes then shows in the result, and a write outside shows in the canaries.
    """
    real_empty = torch.empty
    allocations: list[tuple[Tensor, int, str]] = []

    def hostile(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **options: Any) -> Tensor:
            t = original(*args, **options)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("tigon") or type(t) is not Tensor or t.is_meta or not t.numel() or t.is_pinned():
                return t
            extent = _extent(t.shape, t.stride())
            buffer = real_empty(extent + 2 * PAD, dtype=t.dtype, device=t.device).fill_(int(CANARY))
            _poison(buffer[PAD : PAD + extent])
            allocations.append((buffer, extent, caller))
            return real_empty(0, dtype=t.dtype, device=t.device).set_(
                buffer.untyped_storage(), PAD, t.shape, t.stride()
            )

        return allocate

    with (
        patch("torch.empty", hostile(torch.empty)),
        patch("torch.empty_like", hostile(torch.empty_like)),
        patch("torch.empty_strided", hostile(torch.empty_strided)),
        patch.object(Tensor, "new_empty", hostile(Tensor.new_empty)),
    ):
        yield
    for buffer, extent, caller in allocations:
        around = torch.cat((buffer[:PAD], buffer[PAD + extent :]))
        assert bool((around == int(CANARY)).all()), f"a write outside of a tensor of {extent} made in {caller}"


def in_fork(test: Callable[[], None]) -> None:
    """Run `test` in a forked child, so that an address out of bounds fails it and does not end the session."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            test()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code >= 0, f"the child died of signal {-code}: an address out of bounds"
    assert code == 0, "failed in the child; its traceback is above"


def virtually_strided(t: Tensor, dim: int) -> Tensor:
    """A copy whose elements along `dim` (9 of them or more) lie 2^28 apart, so that the last offsets pass 2^31.

    The memory is reserved and not touched, except for the pages that hold t.
    """
    gap = 1 << 28
    assert (t.shape[dim] - 1) * gap >= 1 << 31
    strides = list(t.contiguous().stride())
    strides[dim] = gap
    storage = torch.empty(_extent(t.shape, strides), dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, strides).copy_(t)


class Count(TorchDispatchMode):
    """How often each operator runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.n: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
