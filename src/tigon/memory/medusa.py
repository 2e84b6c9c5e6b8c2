"""Medusa heads (arXiv 2401.10774), in closed form on top of the model's trace: head k is one residual block, a product
of (hidden, hidden) with a SiLU, and a product onto the vocabulary of its own; all are trained beside the model.
"""

from __future__ import annotations

from tigon.memory.recorder import rounded
from tigon.memory.request import Request
from tigon.memory.statics import Weight
from tigon.memory.tape import Segment, Tape

FP32 = 4


def weights(heads: int, head_shape: tuple[int, int], itemsize: int) -> tuple[Weight, ...]:
    """The parameters of `heads` heads for a model whose own head is (vocab, hidden)."""
    vocab, hidden = head_shape
    shapes = {"block.weight": (hidden, hidden), "block.bias": (hidden,), "head.weight": (vocab, hidden)}
    return tuple(
        Weight(f"medusa_{k}.{name}", shape, _numel(shape), itemsize, trained=True, projected=False)
        for k in range(heads)
        for name, shape in shapes.items()
    )


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] if len(shape) == 2 else shape[0]


def with_heads(tape: Tape, request: Request, head_shape: tuple[int, int], itemsize: int, activation: int) -> Tape:
    """The tape with the heads' activations and loss between its two directions. itemsize: of a weight; activation: of
    an element of the hidden states."""
    vocab, hidden = head_shape
    tokens = request.batch * request.seq
    fused = request.choices.kernels in ("tigon", "liger")
    sums = (FP32 if request.choices.kernels == "tigon" else itemsize) * vocab * hidden
    # Unfused: the logits in fp32 and their log-softmax wait for the backward, head by head.
    loss = sums if fused else 2 * FP32 * tokens * vocab
    # The block's product before and after SiLU, and the sum.
    kept = 3 * activation * tokens * hidden
    out = Tape(list(tape.segments), list(tape.sizes), list(tape.components))
    first = next(i for i, segment in enumerate(out.segments) if segment.where.phase == "loss")
    last = max(i for i, segment in enumerate(out.segments) if segment.where.phase == "loss")
    made, gone, grads = [], [], []
    for _ in range(request.medusa_heads):
        made += [_block(out, kept, "activations"), _block(out, loss, "logits")]
        grads += [_block(out, weight.grad_bytes, "gradients") for weight in weights(1, head_shape, itemsize)]
    gone = [~block for block in made]
    out.segments[first] = _with(out.segments[first], [*out.segments[first].events, *made])
    out.segments[last] = _with(out.segments[last], [*grads, *gone, *out.segments[last].events])
    flops = 6.0 * request.medusa_heads * tokens * hidden * (vocab + hidden)
    out.segments[first].cost.add(type(out.segments[first].cost)(flops=flops))
    return out


def _with(segment: Segment, events: list[int]) -> Segment:
    cost = type(segment.cost)(**vars(segment.cost))
    return Segment(segment.where, events, cost)


def _block(tape: Tape, nbytes: int, component: str) -> int:
    tape.sizes.append(rounded(nbytes))
    tape.components.append(component)
    return len(tape.sizes) - 1
