"""The loop over chunks of linear cross entropy. `linear_cross_entropy.py` decides on the number of chunks.

For each chunk, one product computes the logits, one pass turns them into their gradient, and two products compute the
gradients of hidden and weight. Logits of 16-bit inputs are fp32, a part of the chunk at a time, and their gradient has
16 bits. Otherwise the gradient takes the logits' place.

On chips with a `logits_tile` in kernels/chips.py, the product of bf16 logits writes exponentials instead, and the pass
is not needed (kernels/linear_cross_entropy.py). Each row of exponentials still lacks a factor, which is applied to dX,
and to X before dW's product. It also lacks the label's own term, which is added to both in fp32. Label smoothing, a
trained bias, an adapter, entropy and predictions need the pass.

A head's LoRA adapter is a second, thin product: logits = X Wᵀ + U Bᵀ, with U of rank R. It is added to a chunk's logits
before the pass, so neither W + s·B A nor all logits exist. The gradients of U and B are two thin products of the
logits' gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tigon.kernels.chips import LogitsTile
from tigon.ops import dispatch, lm_head
from tigon.ops.dispatch import Primitive
from tigon.ops.lm_head import column_sum, logits_buffer, logits_into, no_autocast, product_into
from tigon.ops.losses import common
from tigon.ops.losses.options import LossOptions
from tigon.ops.signature import SYMBOLIC

# N tokens, C tokens of a chunk, H hidden, V vocabulary, R rank of an adapter.


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


# --- logits as exponentials ------------------------------------------------------------------------------------------

_UNPLANNED_ROWS = 128
"""Tokens whose fp32 logits exist at once if the plan was for exponentials, and the weight does not start on 16 bytes.
For 128256 columns they take 63 MiB, which no plan counts."""
_FEWEST_EXP_ROWS = 16
"""With fewer tokens, reading the weight takes the time, and the vendor's product is faster. It takes 0.25 ms instead of
0.33 for 1 x 4096 x 128256 on an H200 (torch 2.11+cu130, triton 3.6, commit 3dc13d9, 2026-11-21)."""


def _exp_tile(hidden_NH: Tensor, weight_VH: Tensor, options: LossOptions, other_outputs: bool) -> LogitsTile | None:
    """The tile of the product that writes exponentials, or None if a pass over the logits follows. Reads no data."""
    bf16 = hidden_NH.dtype == weight_VH.dtype == torch.bfloat16
    aligned = hidden_NH.shape[1] % 8 == 0  # rows of 16 bytes, which tensor descriptors need
    if not (bf16 and aligned) or options.label_smoothing or other_outputs:
        return None
    chip = dispatch.planned_chip(hidden_NH)
    return None if chip is None else chip.logits_tile


def needs_fp32_logits(hidden_NH: Tensor, weight_VH: Tensor, options: LossOptions, other_outputs: bool) -> bool:
    """Whether the loop stores fp32 logits: a pass reads the logits, and the hidden states have 16 bits.

    other_outputs: a bias is trained, or there is an adapter, entropy or predictions.
    """
    wide = lm_head.logits_dtype(hidden_NH.dtype) != hidden_NH.dtype
    return wide and _exp_tile(hidden_NH, weight_VH, options, other_outputs) is None


def _starts_aligned(x: Tensor) -> bool:
    """Whether rows have unit stride and start at multiples of 16 bytes."""
    step = 16 // x.element_size()
    return x.stride(1) == 1 and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0


def _exp_logits(
    chunk: ChunkTensors, options: LossOptions, tile: LogitsTile, e_CV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, stats, factors) of a chunk; writes the exponentials E, which lack the factors, into `e_CV`."""
    from tigon.kernels.linear_cross_entropy import exp_logits

    x_CH = chunk.hidden_NH
    if common.wants_label_check(x_CH):
        common.check_labels(chunk.weight_VH.shape[0], chunk.target, options.ignore_index)
    x_CH = x_CH if _starts_aligned(x_CH) else x_CH.clone(memory_format=torch.contiguous_format)
    return exp_logits(x_CH, chunk, options, tile, e_CV)  # type: ignore[no-any-return]


def _label_term(factors: Tensor, target: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(c, label) per row; both are 0 if the label is ignored or invalid."""
    valid = (target >= 0) & (target < vocab)
    return torch.where(valid, factors[1], 0.0), torch.where(valid, target, 0).long()


def _scaled_product(e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    """f ⊙ (E W) + c ⊙ W[y], by one kernel if its tiles fill the chip, else by the vendor's product in fp32."""
    kernel = dispatch.uses_kernel(e_NV) and weight_VH.stride(1) == 1
    if kernel and _starts_aligned(e_NV) and _starts_aligned(weight_VH):
        from tigon.kernels.linear_cross_entropy import scaled_product, suits_scaled_product

        tile = dispatch.planned_chip(e_NV).logits_tile  # type: ignore[union-attr]
        if suits_scaled_product(e_NV.shape[0], weight_VH.shape[1], tile, e_NV.device.index):
            return scaled_product(e_NV, weight_VH, factors, target, tile)  # type: ignore[no-any-return]
    product = e_NV.new_empty((e_NV.shape[0], weight_VH.shape[1]), dtype=factors.dtype)
    product_into(e_NV, weight_VH, product, accumulate=False)
    if kernel:
        from tigon.kernels.linear_cross_entropy import scaled_rows

        return scaled_rows(product, weight_VH, factors, target)  # type: ignore[no-any-return]
    c, labels = _label_term(factors, target, weight_VH.shape[0])
    return (product * factors[0].unsqueeze(1) + weight_VH[labels] * c.unsqueeze(1)).to(e_NV.dtype)


def _exp_hidden_grad_body(
    e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor, index: Tensor | None, rows: int
) -> Tensor:
    """f ⊙ (E W) + c ⊙ W[y], rounded once, at the positions `index` of `rows` rows."""
    with no_autocast(e_NV):
        dx = _scaled_product(e_NV, weight_VH, factors, target)
    return dx if index is None else dx.new_zeros((rows, dx.shape[1])).index_copy_(0, index, dx)


def _exp_hidden_grad_fake(
    e_NV: Tensor, weight_VH: Tensor, factors: Tensor, target: Tensor, index: Tensor | None, rows: int
) -> Tensor:
    return e_NV.new_empty((rows, weight_VH.shape[1]))


exp_hidden_grad = Primitive(
    "linear_cross_entropy_exp_hidden_grad",
    "(Tensor e, Tensor weight, Tensor factors, Tensor target, Tensor? index, SymInt rows) -> Tensor",
    composite=_exp_hidden_grad_body,
    fake=_exp_hidden_grad_fake,
)


def _exp_weight_grad_into(
    e_CV: Tensor, x_CH: Tensor, factors: Tensor, target: Tensor, dw_VH: Tensor, accumulate: bool
) -> None:
    """dW (+)= Eᵀ (f ⊙ X), then adds c_i · x_i to row y_i."""
    scaled = common.scale_rows.body(x_CH)(x_CH, factors[0], None, x_CH.shape[0], x_CH.dtype)
    product_into(e_CV.t(), scaled, dw_VH, accumulate)
    if dispatch.uses_kernel(e_CV):
        from tigon.kernels.linear_cross_entropy import add_label_rows

        add_label_rows(x_CH if x_CH.stride(1) == 1 else x_CH.contiguous(), target, factors, dw_VH)
        return
    c, labels = _label_term(factors, target, dw_VH.shape[0])
    # In fp32 and rounded once, as in the kernel.
    touched = dw_VH.to(factors.dtype).index_add_(0, labels, x_CH.to(factors.dtype) * c.unsqueeze(1))
    dw_VH.copy_(touched)


def _exp_weight_grad_body(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    dw_VH = x_NH.new_empty((e_NV.shape[1], x_NH.shape[1]))
    with no_autocast(e_NV):
        _exp_weight_grad_into(e_NV, x_NH, factors, target, dw_VH, accumulate=False)
    return dw_VH


def _exp_weight_grad_fake(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor) -> Tensor:
    torch.empty_like(x_NH)
    return x_NH.new_empty((e_NV.shape[1], x_NH.shape[1]))


exp_weight_grad = Primitive(
    "linear_cross_entropy_exp_weight_grad",
    "(Tensor e, Tensor hidden, Tensor factors, Tensor target) -> Tensor",
    composite=_exp_weight_grad_body,
    fake=_exp_weight_grad_fake,
)


def add_exp_weight_grad(e_NV: Tensor, x_NH: Tensor, factors: Tensor, target: Tensor, grad_VH: Tensor) -> None:
    """As `exp_weight_grad`, added to `grad`. It is not an operator, because compilers never see it."""
    with no_autocast(e_NV):
        _exp_weight_grad_into(e_NV, x_NH, factors, target, grad_VH, accumulate=True)


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChunkTensors:
    """The tensors that the loop reads."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias: Tensor | None = None
    target: Tensor
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    grad_scale: Tensor
    """0-dim; the gradients are for an upstream gradient of 1 / grad_scale."""
    low_NR: Tensor | None = None
    """The product of the hidden states and the adapter's first matrix, scaled; None without an adapter."""
    lora_b_VR: Tensor | None = None

    def part(self, rows: slice) -> ChunkTensors:
        """The tensors of some of the tokens."""
        return ChunkTensors(
            hidden_NH=self.hidden_NH[rows],
            weight_VH=self.weight_VH,
            bias=self.bias,
            target=self.target[rows],
            class_weight=self.class_weight,
            token_weight=None if self.token_weight is None else self.token_weight[rows],
            grad_scale=self.grad_scale,
            low_NR=None if self.low_NR is None else self.low_NR[rows],
            lora_b_VR=self.lora_b_VR,
        )

    def logits_into(self, logits_CV: Tensor) -> None:
        """Write the logits of all these tokens."""
        logits_into(self.hidden_NH, self.weight_VH, self.bias, logits_CV)
        if self.low_NR is not None and self.lora_b_VR is not None:
            product_into(self.low_NR, self.lora_b_VR.t(), logits_CV, accumulate=True)


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """The chunk size, and the results that are wanted."""

    loss: LossOptions
    chunk: Annotated[int, SYMBOLIC]
    """Tokens of a chunk."""
    logit_tokens: Annotated[int, SYMBOLIC] = 0
    """As in `Plan`."""
    keep: bool = False
    """Return the logits' gradient instead of the gradients of hidden and weight."""
    fp32_accumulate: bool = True
    want_hidden: bool = False
    want_weight: bool = False
    want_bias: bool = False
    entropy: bool = False
    predicted: bool = False
    want_low: bool = False
    want_lora_b: bool = False

    @property
    def want_grad(self) -> bool:
        return self.want_hidden or self.want_weight or self.want_bias or self.want_low or self.want_lora_b


class ChunkResults(NamedTuple):
    """The results of the loop; tensors that are not wanted are empty."""

    loss: Tensor
    stats: Tensor
    entropy: Tensor
    predicted: Tensor
    dx_NH: Tensor
    dw_VH: Tensor
    db_V: Tensor
    kept_NV: Tensor
    factors: Tensor
    """(2, N): the factors of kept_NV's rows and of the label terms that it lacks; empty if it is complete."""
    dlow_NR: Tensor
    dlora_b_VR: Tensor


def _chunks_outputs(tensors: ChunkTensors, options: ChunkOptions, exp: bool) -> ChunkResults:
    """Uninitialised outputs of the chunk loop; outputs that are not wanted are empty."""
    hidden_NH, weight_VH, keep = tensors.hidden_NH, tensors.weight_VH, options.keep
    (N, H), V = hidden_NH.shape, weight_VH.shape[0]
    R = 0 if tensors.low_NR is None else tensors.low_NR.shape[1]
    acc = torch.promote_types(hidden_NH.dtype, torch.float32)
    # fp16 sums stay in fp32 until the loss scale is applied.
    dx_dtype = acc if hidden_NH.dtype == torch.float16 else hidden_NH.dtype
    dw_dtype = acc if options.fp32_accumulate else weight_VH.dtype
    return ChunkResults(
        loss=hidden_NH.new_empty(N, dtype=acc),
        stats=hidden_NH.new_empty((3, N), dtype=acc),
        entropy=hidden_NH.new_empty(N if options.entropy else 0, dtype=acc),
        predicted=hidden_NH.new_empty(N if options.predicted else 0, dtype=torch.int64),
        dx_NH=hidden_NH.new_empty((N, H) if options.want_hidden and not keep else (0, H), dtype=dx_dtype),
        dw_VH=hidden_NH.new_empty((V, H) if options.want_weight and not keep else (0, H), dtype=dw_dtype),
        db_V=hidden_NH.new_empty(V if options.want_bias else 0, dtype=acc),
        kept_NV=logits_buffer(N, V, hidden_NH) if keep else hidden_NH.new_empty((0, V)),
        factors=hidden_NH.new_empty((2, N if keep and exp else 0), dtype=acc),
        dlow_NR=hidden_NH.new_empty((N if options.want_low and not keep else 0, R), dtype=dx_dtype),
        dlora_b_VR=hidden_NH.new_empty((V if options.want_lora_b and not keep else 0, R), dtype=acc),
    )


def _tile_of(tensors: ChunkTensors, options: ChunkOptions) -> LogitsTile | None:
    other_outputs = options.want_bias or options.entropy or options.predicted or tensors.low_NR is not None
    return _exp_tile(tensors.hidden_NH, tensors.weight_VH, options.loss, other_outputs)


def _chunks_body(tensors: ChunkTensors, options: ChunkOptions) -> ChunkResults:
    tile = _tile_of(tensors, options)
    outputs = _chunks_outputs(tensors, options, tile is not None)
    hidden_NH, weight_VH = tensors.hidden_NH, tensors.weight_VH
    N, V = hidden_NH.shape[0], weight_VH.shape[0]
    if tile is not None and (N < _FEWEST_EXP_ROWS or not _starts_aligned(weight_VH)):
        tile = None
        outputs.factors[0], outputs.factors[1] = 1.0, 0.0
    most = min(options.chunk, N)
    logits_CV = _logits_memory(tensors, options, most) if tile is None else None
    shared = tile is None and logits_CV is None
    buffer_CV = outputs.kept_NV
    if not options.keep:
        buffer_CV = logits_buffer(most if options.want_grad or shared else 0, V, hidden_NH)
    with no_autocast(hidden_NH):
        for number, rows in enumerate(_chunks(N, options.chunk)):
            grad_CV = buffer_CV[: rows.stop - rows.start]
            if tile is not None:
                outputs = _exp_chunk(tensors, options, outputs, rows, tile, grad_CV, number > 0)
            else:
                outputs = _logits_chunk(tensors, options, outputs, rows, logits_CV, grad_CV)
                _gradients_of_chunk(tensors.part(rows), options, outputs, rows, grad_CV, number > 0)
    if N == 0:
        for empty_sum in (outputs.dw_VH, outputs.db_V, outputs.dlora_b_VR):
            empty_sum.zero_()
    return outputs


def _logits_memory(tensors: ChunkTensors, options: ChunkOptions, rows: int) -> Tensor | None:
    """Memory for logits that are wider than their gradient; None if both share memory. rows: of a chunk."""
    hidden_NH, V = tensors.hidden_NH, tensors.weight_VH.shape[0]
    dtype = lm_head.logits_dtype(hidden_NH.dtype)
    if dtype == hidden_NH.dtype:
        return None
    return logits_buffer(min(options.logit_tokens or _UNPLANNED_ROWS, rows), V, hidden_NH, dtype)


def _exp_chunk(
    tensors: ChunkTensors, options: ChunkOptions, outputs: ChunkResults, rows: slice, tile: LogitsTile,
    e_CV: Tensor, accumulate: bool,
) -> ChunkResults:  # fmt: skip
    """The results of a chunk whose logits leave their product as exponentials."""
    part, N, keep = tensors.part(rows), tensors.hidden_NH.shape[0], options.keep
    x_CH, target = part.hidden_NH, part.target
    loss, stats, factors = _exp_logits(part, options.loss, tile, e_CV if options.want_grad else None)
    outputs = _with_rows(outputs, rows, N, loss=loss, stats=stats)
    if keep:
        return _with_rows(outputs, rows, N, factors=factors)
    del loss, stats  # otherwise they stay until the next chunk's exist: 16 bytes per token of a chunk
    if options.want_hidden:
        outputs.dx_NH[rows] = _exp_hidden_grad_body(e_CV, part.weight_VH, factors, target, None, len(x_CH))
    if options.want_weight:
        _exp_weight_grad_into(e_CV, x_CH, factors, target, outputs.dw_VH, accumulate)
    return outputs


def _logits_chunk(
    tensors: ChunkTensors, options: ChunkOptions, outputs: ChunkResults, rows: slice, logits_CV: Tensor | None,
    grad_CV: Tensor,
) -> ChunkResults:  # fmt: skip
    """The results of a chunk; writes the gradient of its logits into `grad_CV`.

    logits_CV: memory for the logits of a part of the chunk; None if `grad_CV` holds the logits too.
    """
    N = tensors.hidden_NH.shape[0]
    step = len(grad_CV) if logits_CV is None else len(logits_CV)
    for start in range(rows.start, rows.stop, max(step, 1)):
        at = slice(start, min(start + step, rows.stop))
        part, of_part = tensors.part(at), grad_CV[at.start - rows.start : at.stop - rows.start]
        logits = of_part if logits_CV is None else logits_CV[: at.stop - at.start]
        part.logits_into(logits)
        loss, stats, entropies, argmax = common.rows_with_gradient(
            common.Rows(logits, part.target, part.class_weight, part.token_weight, options.loss),
            options.entropy, options.predicted, part.grad_scale, of_part if options.want_grad else None,
        )  # fmt: skip
        outputs = _with_rows(outputs, at, N, loss=loss, stats=stats)
        if options.entropy:
            outputs = _with_rows(outputs, at, N, entropy=entropies)
        if options.predicted:
            outputs = _with_rows(outputs, at, N, predicted=argmax)
        del loss, stats, entropies, argmax  # as in _exp_chunk
    return outputs


def _gradients_of_chunk(
    part: ChunkTensors, options: ChunkOptions, outputs: ChunkResults, rows: slice, grad_CV: Tensor, accumulate: bool
) -> None:
    """Write a chunk's gradient of hidden, and add those of the weight, the bias and the adapter."""
    if options.want_bias:
        outputs.db_V.copy_(outputs.db_V + column_sum(grad_CV) if accumulate else column_sum(grad_CV))
    if options.keep:
        return
    if options.want_hidden:
        product_into(grad_CV, part.weight_VH, outputs.dx_NH[rows], accumulate=False)
    if options.want_weight:
        product_into(grad_CV.t(), part.hidden_NH, outputs.dw_VH, accumulate)
    if part.low_NR is not None and part.lora_b_VR is not None:
        if options.want_low:
            product_into(grad_CV, part.lora_b_VR, outputs.dlow_NR[rows], accumulate=False)
        if options.want_lora_b:
            product_into(grad_CV.t(), part.low_NR, outputs.dlora_b_VR, accumulate)


def _with_rows(outputs: ChunkResults, rows: slice, tokens: int, **parts: Tensor) -> ChunkResults:
    """`outputs` with the values of a chunk's rows. A single chunk's tensors are taken as they are, without a copy."""
    if rows.stop - rows.start == tokens:
        return outputs._replace(**parts)
    for name, part in parts.items():
        getattr(outputs, name)[..., rows] = part
    return outputs


def _chunks_fake(tensors: ChunkTensors, options: ChunkOptions) -> ChunkResults:
    tile = _tile_of(tensors, options)
    outputs = _chunks_outputs(tensors, options, tile is not None)
    hidden_NH, keep, want_grad = tensors.hidden_NH, options.keep, options.want_grad
    # The planner traces this fake: besides the outputs, the loop holds a chunk's logits and its kernels' buffers.
    rows, (V, H) = options.chunk, tensors.weight_VH.shape
    logits = _logits_memory(tensors, options, rows) if tile is None else None
    alive = [] if logits is None else [logits]
    shared = tile is None and logits is None
    del logits
    if not keep and (want_grad or shared):
        alive.append(logits_buffer(rows, V, hidden_NH))
    if tile is not None:
        alive.append(hidden_NH.new_empty((rows, -(-V // tile.vocab)), dtype=torch.float32))
        if want_grad and not keep:
            alive.append(hidden_NH.new_empty((rows, H)))
    del alive
    return outputs


chunk_loop = Primitive("linear_cross_entropy_chunks", composite=_chunks_body, fake=_chunks_fake)
"""Run the loop; chunk_loop(ChunkTensors, ChunkOptions) -> ChunkResults."""
