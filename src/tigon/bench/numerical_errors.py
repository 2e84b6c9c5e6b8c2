"""Measures the error of an implementation against fp64, and sets the limit on it.

The reference result is the op's oracle in fp64 on the same rounded inputs. The baseline is the oracle in the inputs'
dtype. The error is the relative Frobenius norm of the difference in an output or gradient. The limit is `Op.factor` (2;
4 for the gated delta rule in fp32) times (the larger of the baseline's error and the error of rounding the fp64 result,
plus one rounding step of fp32). The op tests use the same rule.

The mean over the N tokens of a linear op has rounded logits, so its error is random. Its rounding error is taken as
eps / sqrt(N). tigon is not timed on a row where it breaks the rule. Another library is timed and marked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tigon.bench.inputs import PERMISSIONS, Problem, gradients, leaves_of, outputs_of

Named = dict[str, Tensor]
_FP32_EPS = torch.finfo(torch.float32).eps
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def name_results(outputs: Sequence[Tensor], names: Sequence[str], grads: Sequence[Tensor]) -> Named:
    """Outputs and gradients, under the names that the record uses."""
    named = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    return named | {f"gradient of {name}": t for name, t in zip(names, grads, strict=True)}


def oracle(problem: Problem, dtype: torch.dtype | None = None) -> Named:
    """Outputs and gradients of the unfused formula, in `dtype` or in the dtype of the inputs."""
    cast = {
        name: value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in problem.inputs.items()
        if name not in PERMISSIONS
    }
    names = problem.differentiable()
    leaves = leaves_of(cast, names)
    outputs = outputs_of(problem.op.oracle(**leaves), problem.row.mean)
    return name_results(outputs, names, gradients(outputs, [leaves[n] for n in names], problem.upstream))


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference divided by that of the fp64 result; inf for a wrong shape.

    It is computed on slices of rows to save memory.
    """
    if got.shape != truth.shape:
        return float("inf")
    difference = scale = 0.0
    got, truth = (t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (got.detach(), truth))
    step = max(1, (1 << 28) // max(1, truth.shape[1]))
    for start in range(0, truth.shape[0], step):
        part = truth[start : start + step]
        difference += float((got[start : start + step].double() - part).square().sum())
        scale += float(part.square().sum())
    return math.sqrt(difference / scale if scale else difference)


def errors_of(got: Named, truth: Named) -> dict[str, float]:
    """The relative error of each named result."""
    return {name: relative_error(value, truth[name]) for name, value in got.items()}


def allowed_errors(
    problem: Problem, truth: Named, dtype: torch.dtype, baseline: Mapping[str, float] | None
) -> dict[str, float]:
    """The error limit of each result. Without a baseline (it did not fit) it comes from the errors in the Op record."""
    op, inputs = problem.op, problem.inputs
    recorded = op.errors[DTYPE_NAMES[dtype]]
    allowed = {}
    for name, exact in truth.items():
        if exact.ndim:
            rounding = relative_error(exact.to(dtype), exact)
        elif not op.cost(**inputs).flops:
            rounding = 0.0
        else:
            tokens = inputs["target"].numel() if "target" in inputs else inputs["hidden"].shape[:-1].numel()
            rounding = torch.finfo(dtype).eps / tokens**0.5
        unfused = recorded if baseline is None else baseline[name]
        allowed[name] = op.factor(dtype) * (max(unfused, rounding) + _FP32_EPS)
    return allowed


def breaks_rule(errors: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """The results whose error is over the limit. NaN counts as over the limit."""
    return [name for name, error in errors.items() if not error <= allowed[name]]
