"""An op against its fp64 formula, on the device that is here: what `tigon doctor` shows and a run on a GPU asks first.

The rule is the record's: an op may err against the oracle in fp64 by at most `error_factor` times as much as the oracle
does in the op's own dtype, or as rounding the truth to that dtype can, where that is more. A result is the share of
that allowance that was used, so 1 is the limit. Both the largest error of an element and the Frobenius norm obey it,
for the outputs and for every gradient. The suite of the repository applies the rule to numbers it knows; here they come
from whatever device is there, and how two sums round against each other is a matter of luck: with other seeds the share
came to 1.03 in one of five draws. Hence `LUCK`. A wrong formula is off by far more. Triton's interpreter cuts bf16 off
instead of rounding, hence a factor there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.ops import OPS, Case, Op, _dispatch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# PyTorch's own matrix product comes first: where it dies, an op that dies after it is not to blame.
PRODUCT = "torch matrix product"
LUCK = 2.0
INTERPRETED_BF16_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class OpCheck:
    """One op in one dtype."""

    op: str
    dtype: str
    share: float | None = None
    """Largest error over the cases, as a share of what is allowed; None where it did not finish."""
    worst: str = ""
    """Case and tensor of the largest share."""
    cases: int = 0
    error: str | None = None
    """The exception, or the signal the process died of."""

    @property
    def passed(self) -> bool:
        return self.error is None and self.share is not None and self.share <= 1.0


def check_op(name: str, dtype: str) -> OpCheck:
    """Run one check in this process."""
    try:
        if name == PRODUCT:
            return _check_product(dtype)
        op, device = OPS[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
        cases = cases_of(op, device)
        shares = [(*_share(op, case, DTYPES[dtype], device), case.id) for case in cases]
        share, tensor, case_id = max(shares)
        return OpCheck(op=name, dtype=dtype, share=share, worst=f"{tensor} of case {case_id}", cases=len(cases))
    except Exception as error:  # whatever a broken installation raises is what this is here to show
        text = " ".join(str(error).split())
        return OpCheck(op=name, dtype=dtype, error=f"{type(error).__name__}: {text[:300]}")


def _check_product(dtype: str) -> OpCheck:
    """A product of integers that every dtype represents, so that the result is exact."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = (torch.arange(64 * 64, device=device) % 2).view(64, 64)
    if not torch.equal((a.to(DTYPES[dtype]) @ a.to(DTYPES[dtype])).double(), a.double() @ a.double()):
        raise ValueError("a product of small integers is not exact")
    return OpCheck(op=PRODUCT, dtype=dtype, share=0.0, worst="product", cases=1)


def cases_of(op: Op, device: torch.device) -> Sequence[Case]:
    """All small cases of the reference, 2 s together; of kernels the first, as each case compiles variants."""
    small = [case for case in op.cases if case.small]
    kernel = _dispatch.uses_kernel(torch.empty(1, device=device))
    return small[:1] if kernel else small


def _share(op: Op, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[float, str]:
    torch.manual_seed(20)
    inputs = op.make(case, dtype, device)
    got = _run(op.call, op, inputs)
    upstream_dtypes = [t.dtype for name, t in got.items() if name.startswith("output")]
    wide = {name: _as(value, torch.float64) for name, value in inputs.items()}
    truth = _run(op.oracle, op, wide, upstream_dtypes)
    baseline = _run(op.oracle, op, inputs, upstream_dtypes)
    factor = LUCK * op.error_factor
    if dtype == torch.bfloat16 and _dispatch.INTERPRET and device.type == "cpu":
        factor *= INTERPRETED_BF16_FACTOR
    return max((share_of_allowance(got[name], truth[name], baseline[name], factor), name) for name in got)


def share_of_allowance(got: Tensor, truth: Tensor, baseline: Tensor, factor: float) -> float:
    """The larger of error / allowance in the largest element and in the Frobenius norm.

    Raises ValueError where the two cannot be compared: another shape or dtype, or NaN where the truth has none.
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
        # `rounding` is more than half a step among the subnormals of fp16.
        rounded = max(float(norm(rounding)), half_step * size)
        allowed = factor * (max(float(norm(unfused)), rounded) + arithmetic * size)
        shares.append(err / allowed if err else 0.0)
    return max(shares)


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(
    call: Callable[..., Any], op: Op, inputs: dict[str, Any], upstream_dtypes: Sequence[torch.dtype] | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name, for a random upstream gradient.

    It is rounded to the outputs' dtypes or to those given: the formula in fp64 has to see the numbers the op sees.
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


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
