"""Cross entropy on logits that exist already.

The forward reads the logits once and keeps (m, log Σ exp(z - m), z_y) per row. The backward reads them again and writes
the gradient, with the upstream gradient folded in. Any upstream gradient, a second backward and fp16 loss scaling are
therefore exact, and the caller's logits are not changed.

`inplace=True` needs only one read and one write in total. The forward overwrites the logits with their gradient. The
backward only multiplies, which costs nothing if the upstream gradient is 1. It can run once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import DoubleBackwardError, OptionError, ShapeError
from tigon.ops import dispatch
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Context, Differentiable, check_dtype, first_order
from tigon.ops.losses.cross_entropy_rows import Rows, cross_entropy_bwd, cross_entropy_fwd, rows_with_gradient
from tigon.ops.losses.inputs import (
    LossOptions,
    check_devices,
    check_options,
    check_target,
    check_vector,
    check_vocabulary,
    gradient_scales,
    inverse_denominator,
    sum_times,
)
from tigon.ops.losses.results import LossOutput, LossResults

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall:
    """The arguments of one call that are not differentiated."""

    target: Tensor
    class_weight: Tensor | None
    token_weight: Tensor | None
    inv_denominator: Tensor
    options: LossOptions
    per_row: bool
    entropy: bool
    predicted: bool


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_NV: Tensor, call: CrossEntropyCall) -> LossResults:
        rows = Rows(logits_NV, call.target, call.class_weight, call.token_weight, call.options)
        loss_N, *others = cross_entropy_fwd(rows, call.entropy, call.predicted)
        ctx.save_for_backward(
            logits_NV, call.target, call.class_weight, call.token_weight, call.inv_denominator, others[0]
        )
        ctx.options = call.options
        ctx.mark_non_differentiable(*others)
        return LossResults(loss_N if call.per_row else sum_times(loss_N, call.inv_denominator), *others)

    @staticmethod
    @first_order
    def backward(ctx: Context, dloss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        logits_NV, target, class_weight, token_weight, inv_denominator, stats = ctx.saved_tensors
        rows = Rows(logits_NV, target, class_weight, token_weight, ctx.options)
        return cross_entropy_bwd(rows, stats, dloss.expand(target.shape), inv_denominator), None


class CrossEntropyInplace(torch.autograd.Function):
    """The forward overwrites the logits with their gradient. Eager mode only; one backward."""

    @staticmethod
    def forward(ctx: Context, logits_NV: Tensor, call: CrossEntropyCall) -> LossResults:
        stored, ctx.left = gradient_scales(
            logits_NV.dtype, call.inv_denominator, call.token_weight, call.class_weight, call.options
        )
        buffer = logits_NV.detach()
        rows = Rows(buffer, call.target, call.class_weight, call.token_weight, call.options)
        loss_N, *others = rows_with_gradient(rows, call.entropy, call.predicted, stored, buffer)
        # The kernel's write is invisible to autograd. The new version makes other nodes that saved these logits raise.
        torch.autograd.graph.increment_version(logits_NV)
        ctx.gradient = buffer
        ctx.mark_non_differentiable(*others)
        return LossResults(loss_N if call.per_row else sum_times(loss_N, call.inv_denominator), *others)

    @staticmethod
    @first_order
    def backward(ctx: Context, dloss: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise DoubleBackwardError(
                "cross_entropy(inplace=True): the gradient was scaled in place by the first backward. "
                "Call cross_entropy without inplace where a graph is walked twice."
            )
        gradient, ctx.gradient = ctx.gradient, None
        scale = dloss if ctx.left is None else dloss * ctx.left
        if dispatch.uses_kernel(gradient):
            from tigon.kernels.scale_rows import scale_rows_

            return scale_rows_(gradient, scale), None
        return gradient.mul_(scale.unsqueeze(-1)), None


def _apply(logits: Tensor, call: CrossEntropyCall) -> LossResults:
    return LossResults(*CrossEntropy.apply(logits, call))


_cross_entropy = Differentiable("cross_entropy", _apply)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    inplace: bool = False,
    outputs: tuple[str, ...] = (),
) -> Tensor | LossOutput:
    """Softmax cross entropy of `logits` against class indices, computed in fp32 (fp64 for fp64 logits).

    Args:
        logits: (..., V), fp16, bf16, fp32 or fp64, any strides.
        target: (...), int64 or int32 class indices.
        weight: (V,) class weights w, as in torch.
        ignore_index: rows with this label do not count and get gradient 0.
        reduction: "mean" divides the sum by `num_items` if given, else by Σ w_y over the rows that are not ignored
            (without class weights, by their number); "sum"; "none" returns one loss per row.
        label_smoothing: ε in [0, 1], as in torch.
        softcap: c > 0; the logits become c·tanh(logits / c) (Gemma 2, arXiv 2408.00118).
        logit_scale: multiplies the logits before the cap.
        z_loss: λ; adds λ·lse² to each row's loss (PaLM, arXiv 2204.02311).
        num_items: the mean's denominator, a number or a 0-dim tensor (Trainer's `num_items_in_batch`).
        token_weight: (...), multiplies each row's loss; it does not enter the mean's denominator.
        inplace: overwrite `logits` with their gradient, which saves a read and a tensor and allows one backward only.
            Ignored under torch.compile, where the compiled graph keeps the logits.
        outputs: values to return in addition: "logprob", "entropy", "accuracy", "predicted"; see `LossOutput`.

    Returns:
        0-dim fp32 (fp64 for fp64 logits), or (...) for "none"; a `LossOutput` if `outputs` names anything. If no row
        counts (no tokens, or all ignored), loss and gradient are 0, for the mean too. PyTorch's mean is NaN there, and
        one fully masked micro-batch would end a run.

    Raises:
        ShapeError: logits are 0-dim or V is 0; target, weight, token_weight or num_items has the wrong shape;
            or the tensors are on several devices.
        DtypeError: logits are none of the four floats, target is not int64 or int32, or a weight or num_items is
            complex.
        OptionError: an option is unknown, is not a number, is not finite or is outside its range; num_items is given
            without reduction="mean"; weight, token_weight or num_items requires grad; or inplace=True with logits
            that cannot be viewed as (rows, V) or whose rows overlap.
        LabelError: a label is outside [0, V) and is not ignore_index. Checked on the CPU, and on a GPU only with
            TIGON_CHECK=1; otherwise that row's loss on a GPU is NaN.
        DoubleBackwardError: in backward, with create_graph=True, or in the second backward with inplace=True.
    """
    check_dtype(logits)
    options, num_items = check_options(
        LossOptions(ignore_index, label_smoothing, softcap, logit_scale, z_loss),
        reduction=reduction,
        num_items=num_items,
        outputs=outputs,
    )
    if logits.ndim == 0:
        raise ShapeError("logits are 0-dim; pass (..., V).")
    V = logits.shape[-1]
    check_vocabulary(V)
    check_target(target, logits.shape[:-1], "logits")
    check_devices(logits=logits, target=target, weight=weight, token_weight=token_weight)
    check_vector("weight", weight, (V,))
    check_vector("token_weight", token_weight, target.shape)
    logits_NV = logits.reshape(-1, V)
    if logits_NV.stride(1) != 1 and V > 1:
        logits_NV = logits_NV.contiguous()
    target_N = target.reshape(-1).contiguous()
    token_weight_N = None if token_weight is None else token_weight.reshape(-1).contiguous()
    class_weight = None if weight is None else weight.contiguous()
    call = CrossEntropyCall(
        target=target_N,
        class_weight=class_weight,
        token_weight=token_weight_N,
        inv_denominator=inverse_denominator(
            logits_NV,
            target_N,
            class_weight,
            num_items=num_items,
            ignore_index=ignore_index,
            reduction=reduction,
        ),
        options=options,
        per_row=reduction == "none",
        entropy="entropy" in outputs,
        predicted="predicted" in outputs or "accuracy" in outputs,
    )
    compiling = torch.compiler.is_compiling()
    if inplace and torch.is_grad_enabled() and logits.requires_grad and not compiling:
        _check_inplace(logits, logits_NV)
        results = LossResults(*CrossEntropyInplace.apply(logits_NV, call))
    else:
        results = (_cross_entropy if compiling else _apply)(logits_NV, call)
    loss = results.loss.view(target.shape) if call.per_row else results.loss
    return results.with_outputs(loss, target, outputs, ignore_index) if outputs else loss


def _check_inplace(logits: Tensor, logits_NV: Tensor) -> None:
    """Raise unless the rows can be overwritten with their gradient."""
    if logits_NV.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
        raise OptionError(
            f"inplace=True needs logits that can be viewed as (rows, V); strides are {logits.stride()} for shape "
            f"{tuple(logits.shape)}. Pass them contiguous, or drop inplace."
        )
    if logits_NV.shape[0] > 1 and logits_NV.stride(0) < logits_NV.shape[1]:
        raise OptionError(
            f"inplace=True needs rows that do not overlap; strides are {logits.stride()} for shape "
            f"{tuple(logits.shape)}. Pass them contiguous, or drop inplace."
        )


def cross_entropy_oracle(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The unfused formula: logits are cast to fp32, as in transformers, then passed to F.cross_entropy."""
    ignore_index, label_smoothing, softcap, logit_scale, z_loss = LossOptions(**options)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1]) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    target_N = target.reshape(-1).to(torch.int64)
    weight = None if weight is None else weight.to(z.dtype)
    valid = target_N != ignore_index
    loss = F.cross_entropy(
        z, target_N, weight=weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        loss = loss + z_loss * torch.where(valid, torch.logsumexp(z, -1).square(), 0.0)
    if token_weight is not None:
        loss = loss * token_weight.reshape(-1).to(z.dtype)
    if reduction == "none":
        return loss.reshape(target.shape)
    if reduction == "sum":
        return loss.sum()
    if num_items is None:
        counts = valid.to(z.dtype) if weight is None else weight[target_N.clamp(min=0)] * valid
        num_items = counts.sum()
    return loss.sum() / num_items


def make_target(rows: tuple[int, ...], vocab: int, ignored: float, ignore_index: int, device: torch.device) -> Tensor:
    """Random labels; a share `ignored` of them is ignore_index, but never all."""
    target = torch.randint(0, vocab, rows, device=device)
    drop = torch.rand(rows, device=device) < ignored
    drop.view(-1)[:1] = False
    return target.masked_fill_(drop, ignore_index)


def loss_inputs(case: Case, rows: tuple[int, ...], vocab: int, device: torch.device) -> dict[str, Any]:
    """Target and options of a case; `class_weight` and `token_weight` in its options add random vectors."""
    options = dict(case.options)
    ignored = options.pop("ignored", 0.3)
    has_class, has_token = options.pop("class_weight", False), options.pop("token_weight", False)
    inputs: dict[str, Any] = {"target": make_target(rows, vocab, ignored, options.get("ignore_index", -100), device)}
    if has_class:
        weight = torch.rand(vocab, device=device)
        weight[::5] = 0.0
        inputs["class_weight"] = weight
    if has_token:
        inputs["token_weight"] = torch.randn(rows, device=device)
    return inputs | options


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, vocab = case.shape
    options = dict(case.options)
    scale = options.pop("magnitude", 2.0)
    plain = Case(id=case.id, shape=case.shape, options=options)
    inputs = loss_inputs(plain, tuple(rows), vocab, device)
    if "class_weight" in inputs:
        inputs["weight"] = inputs.pop("class_weight")
    return {"logits": randn(*case.shape, dtype=dtype, device=device, scale=scale), **inputs}


def _cost(logits: Tensor, target: Tensor, *, inplace: bool = False, **_: object) -> Cost:
    # forward reads; backward reads and writes. With inplace: one read and one write.
    rows = target.numel()
    return Cost(
        moved_bytes=(2 if inplace else 3) * logits.nbytes, saved_bytes=logits.nbytes + 12 * rows + target.nbytes
    )


CROSS_ENTROPY = Op(
    name="cross_entropy",
    call=cross_entropy,
    oracle=cross_entropy_oracle,
    make=_make,
    grads=("logits",),
    case=Case(id="mean", shape=(2, 9, 50)),
    cost=_cost,
    errors={"fp32": 3.0e-07, "bf16": 2.8e-03, "fp16": 1.4e-03},
)
