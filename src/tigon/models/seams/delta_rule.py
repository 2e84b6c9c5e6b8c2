"""The seam for the gated delta rule: a layer whose forward calls the global `torch_chunk_gated_delta_rule`.

transformers decorates that function: it runs flash-linear-attention's kernel if the library is installed, and PyTorch
otherwise. The op takes the place of PyTorch's code, and of the library's kernel on GPUs where the library refuses its
backward. The layer's forward is rebuilt with the op under that name (`rebind.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.errors import ShapeError
from tigon.models.seams.base import is_dtensor
from tigon.models.verification import probe
from tigon.ops.gated_delta_rule import MAX_WIDTH

NAME = "torch_chunk_gated_delta_rule"


def normalised(x: Tensor) -> Tensor:
    """x (..., K) with rows of length one: x / sqrt(Σ x² + 1e-6)."""
    K = x.shape[-1]
    weight = torch.full((K,), K**-0.5, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return ops.rms_norm(x, weight, 1e-6 / K, casting="fp32")


def delta_rule(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' function of the same arguments, by the op."""
    if key.shape[-1] > MAX_WIDTH or is_dtensor(value):
        if cu_seqlens is not None:
            raise ShapeError(
                f"PyTorch's gated delta rule would mix packed documents, and tigon's takes no keys of {key.shape[-1]} "
                f"numbers (the limit is {MAX_WIDTH}) and no DTensors; set data.packing: false."
            )
        return original(  # type: ignore[no-any-return]
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            **rest,
        )
    if use_qk_l2norm_in_kernel:
        query, key = normalised(query), normalised(key)
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (query, key, value)))
    o, final = ops.gated_delta_rule(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return o.to(query.dtype), final


@functools.cache
def fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """The rule with the op; one object for each original."""
    return functools.partial(delta_rule, original)


def objection(original: Callable[..., Any]) -> str | None:
    """Why the op must not take the place of a function, or None: PyTorch's code under its decorator differs."""
    plain = inspect.unwrap(original)

    def results(call: Callable[..., Any], *given: Tensor) -> Tensor:
        q, k, v, g, beta = given
        o, final = call(q, k, v, g=-g.abs(), beta=beta.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True)
        return torch.cat((o.flatten(), final.flatten()))

    return probe.disagreement(
        nn.Module,
        _inputs,
        lambda _, *given: results(fused(original), *given),
        lambda _, *given: results(plain, *given),
    )


def _inputs() -> tuple[Tensor, ...]:
    """q, k (2, T, 2, K), v (2, T, 4, V), g and beta (2, T, 4)."""
    shapes = ((2, 9, 2, 6), (2, 9, 2, 6), (2, 9, 4, 5), (2, 9, 4), (2, 9, 4))
    return tuple(probe.random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes, start=1))
