"""Log-probabilities of ids, log-sum-exp and entropy of logits that exist already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Differentiable, Primitive, by_vocabulary, check_dtype, first_order, outside_graphs
from tigon.ops.losses.inputs import check_devices, check_vocabulary
from tigon.ops.losses.logprob_inputs import LogprobOptions, check_ids, check_logprob_options, flat_ids
from tigon.ops.losses.logprob_rows import Block, Rows, Upstream, add_block, gradient_into
from tigon.ops.losses.results import Logprobs, Results, RowResults
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
    def forward(ctx: Any, logits_NV: Tensor, call: LogprobsCall, vocabulary: Vocabulary) -> Results:
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
    def backward(
        ctx: Any, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, _dpredicted: Any,
        dtopk: Tensor | None, _dids: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        logits_NV, *saved = ctx.saved_tensors
        # A compiled graph passes zeros for a result that was not asked for.
        grads = (dlogprob, dlse if ctx.lse else None, dentropy if ctx.call_options.entropy else None, dtopk)
        upstream, options = ctx.vocabulary.upstream(saved, grads, ctx.call_options, ctx.sizes)
        return logprobs_bwd(logits_NV, upstream, options), None, None


def _apply(logits: Tensor, call: LogprobsCall) -> Results:
    return Results(*LogprobsOfLogits.apply(logits, call, WHOLE))


_logprobs = Differentiable("logprobs", _apply)


@outside_graphs
def _divided(
    logits: Tensor, ids: Tensor, *, vocab_parallel: VocabParallelOptions, **options: Any
) -> Tensor | Logprobs:  # fmt: skip
    """`logprobs` for this process's columns of the logits."""
    inputs = _Inputs.of(logits, ids, vocab=ANY_VOCABULARY, **options)
    vocabulary = DividedVocabulary(check_columns(vocab_parallel, logits.shape[-1]))
    call = LogprobsCall(ids_NK=inputs.call.ids_NK.long(), options=inputs.call.options, lse=True)
    return inputs.public(Results._make(LogprobsOfLogits.apply(inputs.logits_NV, call, vocabulary)))


@dataclass(frozen=True)
class _Inputs:
    """Checked and flattened logits and ids."""

    logits_NV: Tensor
    call: LogprobsCall
    shape: torch.Size
    """Of the ids."""
    rows: torch.Size

    @classmethod
    def of(
        cls, logits: Tensor, ids: Tensor, *, vocab: int | None = None, mask: Tensor | None = None,
        ignore_index: int = -100, outputs: tuple[str, ...] = (), **options: Any,
    ) -> _Inputs:  # fmt: skip
        """vocab: a bound of the whole vocabulary; None if the logits have it."""
        check_dtype(logits)
        if logits.ndim == 0:
            raise ShapeError("logits are 0-dim; pass (..., V).")
        V, rows = logits.shape[-1], logits.shape[:-1]
        check_vocabulary(V)
        check_devices(logits=logits, ids=ids, mask=mask)
        checked = check_logprob_options(vocab=vocab or V, ignore_index=ignore_index, outputs=outputs, **options)
        ids_NK = flat_ids(ids, mask, rows, ignore_index, "logits")
        logits_NV = logits.reshape(-1, V)
        if logits_NV.stride(1) != 1 and V > 1:
            logits_NV = logits_NV.contiguous()
        return cls(logits_NV, LogprobsCall(ids_NK=ids_NK, options=checked, lse="lse" in outputs), ids.shape, rows)

    def public(self, results: Results) -> Tensor | Logprobs:
        return results.public(self.shape, self.rows, self.call.options, self.call.lse)


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
    inputs = _Inputs.of(
        logits, ids, mask=mask, ignore_index=ignore_index, outputs=outputs, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, top_k=top_k,
    )  # fmt: skip
    return inputs.public((_logprobs if torch.compiler.is_compiling() else _apply)(inputs.logits_NV, inputs.call))


# --- the record -------------------------------------------------------------------------------------------------------


def logprobs_oracle(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, mask: Tensor | None = None, outputs: tuple[str, ...] = (), top_k: int = 0,
) -> Tensor | Logprobs:  # fmt: skip
    """Log-softmax in at least fp32, then a gather; differentiated by autograd."""
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


def _cost(logits: Tensor, ids: Tensor, **options: Any) -> Cost:
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
