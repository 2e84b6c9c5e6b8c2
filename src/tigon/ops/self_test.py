"""Compares each op with its fp64 formula on the present device, for `tigon doctor` and before a run on a GPU.

The allowed error is `Op.factor` times the error of the oracle in the op's dtype, or the rounding error of that dtype
if it is larger. All errors are measured against the fp64 oracle. A result is the op's error as a share of the allowed
error, so 1 is the limit. The limit holds for the largest error of an element and for the Frobenius norm, for the
outputs and for every gradient.

The repository's tests apply this limit to known devices. On other devices sums may round differently: with other seeds
the share was 1.03 in one of five draws. The limit is therefore multiplied by `LUCK`; a wrong formula exceeds it by far.
Triton's interpreter truncates bf16 instead of rounding it, so an extra factor applies to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.ops import OPS, Case, Op, dispatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# PyTorch's own matrix product runs first: if it crashes, the ops are not to blame for their crashes.
PRODUCT = "torch matrix product"
LUCK = 2.0
INTERPRETED_BF16_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class OpCheck:
    """One op in one dtype."""

    op: str
    dtype: str
    share: float | None = None
    """Largest error as a share of the allowed error; None if the check did not finish."""
    worst: str = ""
    """The tensor with the largest share."""
    error: str | None = None
    """The exception, or the signal that ended the process."""

    @property
    def passed(self) -> bool:
        return self.error is None and self.share is not None and self.share <= 1.0


def check_op(name: str, dtype: str) -> OpCheck:
    """Run one check in this process."""
    try:
        if name == PRODUCT:
            return _check_product(dtype)
        op, device = OPS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
        share, tensor = _share(op, op.case, DTYPES[dtype], device)
        return OpCheck(op=name, dtype=dtype, share=share, worst=f"{tensor} of case {op.case.id}")
    except Exception as error:  # a broken installation may raise anything, and this check reports it
        text = " ".join(str(error).split())
        return OpCheck(op=name, dtype=dtype, error=f"{type(error).__name__}: {text[:300]}")


def _check_product(dtype: str) -> OpCheck:
    """Check a product of small integers, which every dtype represents exactly."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = (torch.arange(64 * 64, device=device) % 2).view(64, 64)
    if not torch.equal((a.to(DTYPES[dtype]) @ a.to(DTYPES[dtype])).double(), a.double() @ a.double()):
        raise ValueError("a product of small integers is not exact")
    return OpCheck(op=PRODUCT, dtype=dtype, share=0.0, worst="product")


def _share(op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[float, str]:
    torch.manual_seed(20)
    inputs = op.make(case, dtype, device)
    got = _run(op.call, op, inputs)
    upstream_dtypes = [t.dtype for name, t in got.items() if name.startswith("output")]
    wide = {name: _as(value, torch.float64) for name, value in inputs.items()}
    truth = _run(op.oracle, op, wide, upstream_dtypes)
    baseline = _run(op.oracle, op, inputs, upstream_dtypes)
    factor = LUCK * op.factor(dtype)
    if dtype == torch.bfloat16 and dispatch.INTERPRET and device.type == "cpu":
        factor *= INTERPRETED_BF16_FACTOR
    return max((share_of_allowance(got[name], truth[name], baseline[name], factor), name) for name in got)


def share_of_allowance(got: Tensor, truth: Tensor, baseline: Tensor, factor: float) -> float:
    """The error as a share of the allowed error, for the largest element or the Frobenius norm if that is larger.

    Raises:
        ValueError: shape or dtype differ, or NaNs are in different places.
    """
    if got.shape != baseline.shape or got.dtype != baseline.dtype:
        raise ValueError(f"{tuple(got.shape)} {got.dtype} instead of {tuple(baseline.shape)} {baseline.dtype}")
    if not torch.equal(got.isnan(), truth.isnan()):
        raise ValueError(f"{int(got.isnan().sum())} NaN where the formula has {int(truth.isnan().sum())}")
    if not got.numel():
        return 0.0
    truth = truth.double()
    error, unfused, rounding = ((t.double() - truth).abs() for t in (got, baseline, truth.to(got.dtype)))
    arithmetic, half_step = torch.finfo(torch.float32).eps, torch.finfo(got.dtype).eps / 2
    shares = []
    norms: tuple[Callable[[Tensor], Tensor], ...] = (Tensor.max, torch.linalg.vector_norm)
    for norm in norms:
        size, err = float(norm(truth.abs())), float(norm(error))
        # For fp16's subnormal numbers, `rounding` is more than half a step.
        rounded = max(float(norm(rounding)), half_step * size)
        allowed = factor * (max(float(norm(unfused)), rounded) + arithmetic * size)
        shares.append(err / allowed if err else 0.0)
    return max(shares)


def _as(value: object, dtype: torch.dtype) -> Any:
    return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(
    call: Callable[..., Any], op: Op, inputs: dict[str, Any], upstream_dtypes: Sequence[torch.dtype] | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name, for a random upstream gradient.

    The upstream gradient is rounded to the given dtypes, by default the outputs' dtypes, so that the fp64 formula and
    the op get the same numbers.
    """
    leaves = {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}
    wanted = [name for name in op.grads if isinstance(leaves.get(name), Tensor)]
    for name in wanted:
        leaves[name].requires_grad_()
    result = call(**leaves)
    outputs = [t for t in ((result,) if isinstance(result, Tensor) else result) if _differentiable(t)]
    generator = torch.Generator().manual_seed(21)
    dtypes = [t.dtype for t in outputs] if upstream_dtypes is None else upstream_dtypes
    upstream = [torch.randn(t.shape, generator=generator).to(d).to(t) for t, d in zip(outputs, dtypes, strict=True)]
    grads = torch.autograd.grad(outputs, [leaves[name] for name in wanted], upstream)
    named = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return {**named, **{f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}}


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
