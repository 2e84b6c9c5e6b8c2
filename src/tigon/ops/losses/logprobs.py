"""Log-probabilities of ids, log-sum-exp and entropy of logits that exist already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    Primitive,
    by_vocabulary,
    check_dtype,
    first_order,
    outside_graphs,
)
from tigon.ops.losses.inputs import check_vocabulary
from tigon.ops.losses.logprob_inputs import (
    LogprobInputs,
    LogprobOptions,
    check_ids,
)
from tigon.ops.losses.logprob_rows import Block, Rows, Upstream, add_block, gradient_into
from tigon.ops.losses.results import Logprobs, Results, RowResults, wanted_gradients
from tigon.ops.losses.vocabulary import WHOLE, DividedVocabulary, Vocabulary
from tigon.ops.vocab_parallel import ANY_VOCABULARY, VocabParallelOptions, check_columns

# N rows (tokens), V vocabulary, K ids of a row, J largest logits of a row.


def _fwd_body(logits_NV: Tensor, ids_NK: Tensor, options: LogprobOptions) -> RowResults:
    V = logits_NV.shape[1]
    check_ids(logits_NV, ids_NK, V, options.ignore_index)
    rows = Rows.empty(ids_NK, logits_NV, options, one_block=True)
    add_block(Block(logits_NV, 0, V), rows, options)
    return rows.results(options)


def _fwd_fake(logits_NV: Tensor, ids_NK: Tensor, options: LogprobOptions) -> RowResults:
    rows = Rows.empty(ids_NK, logits_NV, options, one_block=True)
    return RowResults(
        rows.logprob_NK, rows.stats_2N, rows.entropy_N, rows.predicted_N, rows.topk_raw_NJ, rows.topk_ids_NJ
    )


def _bwd_body(logits_NV: Tensor, upstream: Upstream, options: LogprobOptions) -> Tensor:
    grad_NV = logits_NV.new_empty(logits_NV.shape)
    gradient_into(Block(logits_NV, 0, logits_NV.shape[1]), upstream, options, grad_NV)
    return grad_NV


def _bwd_fake(logits_NV: Tensor, upstream: Upstream, options: LogprobOptions) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape)


logprobs_fwd = Primitive("logprobs_fwd", composite=_fwd_body, fake=_fwd_fake)
logprobs_bwd = Primitive("logprobs_bwd", composite=_bwd_body, fake=_bwd_fake)


@dataclass(frozen=True, kw_only=True)
class LogprobsCall:
    """The arguments of one call that are not differentiated."""

    ids_NK: Tensor
    options: LogprobOptions
    lse: bool


class LogprobsOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, logits_NV: Tensor, call: LogprobsCall, vocabulary: Vocabulary) -> Results:
        def compute(ids_NK: Tensor, options: LogprobOptions) -> RowResults:
            return logprobs_fwd(logits_NV, ids_NK, options)  # type: ignore[no-any-return]

        results, saved = vocabulary.results(compute, call.ids_NK, call.options, call.lse)
        ctx.save_for_backward(logits_NV, *saved)
        ctx.call_options, ctx.lse, ctx.vocabulary = call.options, call.lse, vocabulary
        ctx.sizes = (call.ids_NK.shape[1], call.options.top_k)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.predicted_N, results.topk_ids_NJ)
        return results

    @staticmethod
    @first_order
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_NV, *saved = ctx.saved_tensors
        wanted = wanted_gradients(grads, ctx.call_options, ctx.lse)
        upstream, options = ctx.vocabulary.upstream(saved, wanted, ctx.call_options, ctx.sizes)
        return logprobs_bwd(logits_NV, upstream, options), None, None


def _apply(logits: Tensor, call: LogprobsCall) -> Results:
    return Results(*LogprobsOfLogits.apply(logits, call, WHOLE))


_logprobs = Differentiable("logprobs", _apply)


def _rows_of(logits: Tensor) -> Tensor:
    """Checked logits as (N, V) with unit stride along the row."""
    check_dtype(logits)
    if logits.ndim == 0:
        raise ShapeError("logits are 0-dim; pass (..., V).")
    V = logits.shape[-1]
    check_vocabulary(V)
    logits_NV = logits.reshape(-1, V)
    return logits_NV if logits_NV.stride(1) == 1 or V == 1 else logits_NV.contiguous()


@outside_graphs
def _divided(
    logits: Tensor,
    ids: Tensor,
    *,
    vocab_parallel: VocabParallelOptions,
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor | Logprobs:
    """`logprobs` for this process's columns of the logits."""
    logits_NV = _rows_of(logits)
    given = LogprobInputs.of("logits", logits, ids, mask, ANY_VOCABULARY, options)
    vocabulary = DividedVocabulary(check_columns(vocab_parallel, logits.shape[-1]))
    call = LogprobsCall(ids_NK=given.ids_NK.long(), options=given.options, lse=True)
    return Results._make(LogprobsOfLogits.apply(logits_NV, call, vocabulary)).public(given)


@by_vocabulary(_divided)
def logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    outputs: tuple[str, ...] = (),
    top_k: int = 0,
    vocab_parallel: VocabParallelOptions | None = None,
) -> Tensor | Logprobs:
    """Log-probabilities of `ids` under softmax(z), z = softcap(logit_scale · logits) / temperature.

    Args:
        logits: (..., V), fp16, bf16, fp32 or fp64, any strides; never written to.
        ids, temperature, softcap, logit_scale, ignore_index, mask, outputs, top_k: as in `linear_logprobs`.
        vocab_parallel: the columns of the logits that this process has, if they are divided by vocabulary. logits are
            then (..., U), these columns.

    Returns:
        As `linear_logprobs`.

    Raises:
        ShapeError: logits are 0-dim or V is 0; ids or mask has the wrong shape; or the tensors are on several devices.
        ShardingError: vocab_parallel is given without a process group.
        DtypeError, OptionError, LabelError, DoubleBackwardError: as in `linear_logprobs`.
    """
    logits_NV = _rows_of(logits)
    options = {"ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    given = LogprobInputs.of(
        "logits", logits, ids, mask, logits.shape[-1], {**options, "top_k": top_k, "outputs": outputs}
    )
    call = LogprobsCall(ids_NK=given.ids_NK, options=given.options, lse=given.lse)
    return (_logprobs if torch.compiler.is_compiling() else _apply)(logits_NV, call).public(given)


# --- the record -------------------------------------------------------------------------------------------------------


def logprobs_oracle(
    logits: Tensor, ids: Tensor, *, mask: Tensor | None = None, outputs: tuple[str, ...] = (), **options: Any
) -> Tensor | Logprobs:
    """Log-softmax in at least fp32, then a gather; differentiated by autograd."""
    ignore_index, softcap, logit_scale, temperature, top_k, *_ = LogprobOptions(**options)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    one = ids.ndim < logits.ndim
    ids = ids.unsqueeze(-1) if one else ids
    if mask is not None:
        ids = torch.where(mask.unsqueeze(-1), ids, ignore_index)
    ignored = ids == ignore_index
    out = ignored.all(-1)
    logprob = log_p.gather(-1, ids.masked_fill(ignored, 0).long()).masked_fill(ignored, 0.0)
    logprob = logprob.squeeze(-1) if one else logprob
    if not outputs and not top_k:
        return logprob
    top = torch.topk(logits if logit_scale > 0 else -logits, top_k, -1).indices if top_k else None
    return Logprobs(
        logprob,
        lse=torch.logsumexp(z / temperature, -1).masked_fill(out, 0.0) if "lse" in outputs else None,
        entropy=(-(log_p.exp() * log_p).sum(-1)).masked_fill(out, 0.0) if "entropy" in outputs else None,
        predicted=z.argmax(-1).masked_fill(out, ignore_index) if "predicted" in outputs else None,
        topk_logprob=None if top is None else log_p.gather(-1, top).masked_fill(out.unsqueeze(-1), 0.0),
        topk_ids=None if top is None else top.masked_fill(out.unsqueeze(-1), ignore_index),
    )


def make_ids(options: dict[str, Any], rows: tuple[int, ...], V: int, device: torch.device) -> Tensor:
    """Random ids of a case.

    Takes "ids" (K), "masked" and "ignored" (shares of the tokens and of the ids) out of `options`, and adds the mask.
    """
    K, masked, share = options.pop("ids", None), options.pop("masked", 0.0), options.pop("ignored", 0.1)
    ids = torch.randint(V, rows if K is None else (*rows, K), device=device)
    ignored = torch.rand(ids.shape, device=device) < share
    if masked:
        options["mask"] = torch.rand(rows, device=device) >= masked
    return ids.masked_fill(ignored, options.get("ignore_index", -100))


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, V = case.shape
    options = dict(case.options)
    ids = make_ids(options, tuple(rows), V, device)
    return {"logits": randn(*rows, V, dtype=dtype, device=device, scale=3.0), "ids": ids, **options}


def _cost(logits: Tensor, ids: Tensor, **options: object) -> Cost:
    return Cost(moved_bytes=3 * logits.nbytes, saved_bytes=logits.nbytes)


LOGPROBS = Op(
    name="logprobs",
    call=logprobs,
    oracle=logprobs_oracle,
    make=_make,
    grads=("logits",),
    case=Case(id="one-id", shape=(2, 21, 100)),
    cost=_cost,
    errors={"fp32": 1.1e-07, "bf16": 2.0e-03, "fp16": 2.4e-04},
)
