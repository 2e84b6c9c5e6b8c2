"""Ring attention (arXiv 2310.01889) over the shards of a row: PyTorch's, for tensors that are not DTensors.

`torch.distributed.tensor.experimental.context_parallel` passes keys and values around, and merges the parts of the
softmax. It finds attention as an operator on DTensors, and has none for the CPU: torch 2.13 raises
`aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered`. Its loops take
any attention operator, so they are called here with the flash operators of CPU and CUDA, and with cuDNN's on a GPU
whose ordinary attention is cuDNN's. The loops are private.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.errors import RecipeError

# B rows, h heads, t tokens of a shard, D head width, N processes of a group.

CUDNN_FROM = (9, 0)
"""The compute capability from which PyTorch prefers cuDNN's attention to its own flash attention."""
CHUNKS = 2
"""A process has this many chunks of a row, one early and one late, so that all compute as many causal products."""


def check() -> None:
    """Raise RecipeError if this PyTorch has not the loops that `ring_attention` calls."""
    _pytorchs()


def own_tokens(rank: int, size: int, length: int) -> list[slice]:
    """The places in a row of `length` tokens that a process has: chunk `rank` from the front and from the back."""
    chunk = length // (CHUNKS * size)
    return [slice(number * chunk, (number + 1) * chunk) for number in (rank, CHUNKS * size - 1 - rank)]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, *, scale: float | None = None
) -> Tensor:
    """Causal attention over whole rows, of which each process has the tokens of `own_tokens`.

    Args:
        query: (B, h, t, D).
        key: (B, k, t, D); k divides h. It travels with its own heads.
        value: as `key`.
        group: The processes that share the rows.
        scale: Of the products; None: 1 / sqrt(D).

    Returns:
        (B, h, t, D).

    Raises:
        RecipeError: The tensors are on a GPU and neither fp16 nor bf16, without autocast.
    """
    query, key, value = _autocast(query, key, value)
    if query.device.type == "cuda" and query.dtype not in (torch.float16, torch.bfloat16):
        raise RecipeError(
            f"sharding.sequence_method: ring needs 16-bit attention on a GPU, and this run's is {query.dtype}; set "
            "train.precision: amp-bf16, or sharding.sequence_method: ulysses"
        )
    return _Ring.apply(query, key, value, group, scale)  # type: ignore[no-any-return]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, as the sdpa function casts them: autocast does not know the operators here."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, scale: float | None
    ) -> Tensor:
        operators = _operators(query.device)
        forward = partial(_attend, operators.forward, **operators.options)
        with _in_turns() as loops:
            out, lse, *rest = loops._templated_ring_attention(
                group, 2, forward, query=query, key=key, value=value, is_causal=True, dropout_p=0.0, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group, ctx.scale, ctx.rest = group, scale, rest
        return out  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        operators = _operators(query.device)
        options: dict[str, Any] = {"dropout_p": 0.0, "scale": ctx.scale, **operators.backward_options}
        if query.device.type == "cuda":  # as the forward returned them
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            options |= dict(zip(names, ctx.rest, strict=False))
        with _in_turns() as loops:
            dq, dk, dv, *_ = loops._templated_ring_attention_backward(
                ctx.group,
                2,
                partial(_attend_backward, operators.backward),
                grad_out=dout.contiguous(),
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=lse,
                is_causal=True,
                **options,
            )
        return dq, dk, dv, None, None


@dataclass(frozen=True)
class _Operators:
    """An attention of a device, its backward, and their arguments besides those that all attentions have."""

    forward: Any
    backward: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    backward_options: Mapping[str, Any] = field(default_factory=dict)


def _operators(device: torch.device) -> _Operators:
    """The attention of a device. On a GPU it is the one that `scaled_dot_product_attention` prefers there."""
    aten = torch.ops.aten
    if device.type == "cpu":
        return _Operators(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    if torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(device) >= CUDNN_FROM:
        return _Operators(
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
            {"attn_bias": None, "compute_log_sumexp": True},
            {"attn_bias": None},
        )
    return _Operators(
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default
    )


def _attend(operator: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """An operator's attention for keys of fewer heads than the queries. They are repeated after they have travelled."""
    repeats = query.shape[1] // key.shape[1]
    return operator(query, *(x.repeat_interleave(repeats, dim=1) for x in (key, value)), **options)


def _attend_backward(operator: Any, *, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of `_attend`; those of a key are sums over the heads that share it."""
    n_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    dq, dk, dv = operator(query=query, key=key, value=value, **options)
    return dq, *(x.unflatten(1, (n_heads, repeats)).sum(2) for x in (dk, dv))


@contextlib.contextmanager
def _in_turns() -> Iterator[Any]:
    """PyTorch's loops, with chunks as in `own_tokens`. Each process sends its keys to the next one, so that it never
    has those of the whole row."""
    loops = _pytorchs()
    options = loops._cp_options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance, options.rotate_method = True, loops._RotateMethod.ALL_TO_ALL
    try:
        yield loops
    finally:
        options.enable_load_balance, options.rotate_method = before


def _pytorchs() -> Any:
    """The module of PyTorch's ring attention."""
    if not dist.is_available():
        raise RecipeError("sharding.sequence_method: ring needs a PyTorch with torch.distributed")
    loops: Any = None
    with contextlib.suppress(ImportError):
        from torch.distributed.tensor.experimental._context_parallel import _attention

        loops = _attention
    names = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options", "_RotateMethod")
    if loops is None or not all(hasattr(loops, name) for name in names):
        raise RecipeError(
            f"sharding.sequence_method: ring calls private functions of PyTorch that torch {torch.__version__} does "
            "not have; use torch 2.13, or sharding.sequence_method: ulysses"
        )
    return loops
