"""Liger Kernel 0.8.5's allocations, for comparison: those of the Triton kernels that `use_liger_kernel=True` selects.

They follow the package's ops/{rms_norm,rope,swiglu,geglu,fused_linear_cross_entropy}.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.planner.trace.dispatch_recorder import Inplace, TraceRecorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# N tokens, C tokens of a chunk, H hidden, V vocabulary.

# Liger writes rotations into q and k, dX of a norm into dY, and the gradients of a gated unit into its saved inputs.
INPLACE: Mapping[str, Inplace] = {
    "tigon::rope_rotate": {0: 0, 1: 1},
    "tigon::norm_bwd": {0: 0},
    "tigon::glu_bwd": {0: 1, 1: 2},
}


# CPU time per launch of a Liger kernel, as a number of operators: 0.09 ms with roofline.HOST_S. It was fitted to a
# CPU-bound step of 4 x 1024 tokens. A small norm's forward and backward passes alone were measured as 0.24 to 0.6 ms.
HOST_CALLS = 30


def chunk_rows(tokens: int, hidden: int, vocab: int) -> int:
    """Tokens per chunk of Liger's fused loss, with `chunk_mem_const` 1."""
    share = -(-vocab // hidden)
    return min(1 << (-(-tokens // share) - 1).bit_length(), tokens)


class _FusedLoss(torch.autograd.Function):
    """The forward computes both gradients, dW in the weight's dtype. The backward scales them in place."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, recorder: TraceRecorder) -> Tensor:
        (N, H), V = hidden_NH.shape, weight_VH.shape[0]
        rows = chunk_rows(N, H, V)
        grads = torch.empty_like(hidden_NH), torch.empty_like(weight_VH)
        losses, logits_CV = hidden_NH.new_empty(N, dtype=torch.float32), hidden_NH.new_empty((rows, V))
        recorder.count(flops=6.0 * math.prod(hidden_NH.shape) * V, dtype=hidden_NH.dtype, launches=5 * -(-N // rows))
        # Liger's loss kernel reads the logits twice and writes them once. Every chunk reads and writes dW. Two products
        # per chunk read the weight, and have too few rows to hide the time of these reads.
        recorder.count(moved_bytes=3.0 * N * V * logits_CV.itemsize + 4.0 * -(-N // rows) * grads[1].nbytes, launches=0)
        del logits_CV
        ctx.save_for_backward(*grads)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, None


def fuse_loss(model: PreTrainedModel, recorder: TraceRecorder) -> None:
    """Replace the model's loss with Liger's: the head returns its input, and the loss reads the head's weight."""
    head = model.get_output_embeddings()
    project, unfused = head.forward, model.loss_function

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
        if not model.training:
            return unfused(logits=logits, labels=labels, vocab_size=vocab_size)  # type: ignore[no-any-return]
        hidden_NH, weight = logits.reshape(-1, logits.shape[-1]), head.weight
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            hidden_NH, weight = hidden_NH.to(dtype), weight.to(dtype)
        return _FusedLoss.apply(hidden_NH, weight, recorder)  # type: ignore[no-any-return]

    head.forward = lambda hidden: hidden if model.training else project(hidden)
    model.loss_function = loss
