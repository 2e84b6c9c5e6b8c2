"""Log-probabilities of ids, log-sum-exp and entropy of logits that exist already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.errors import ShapeError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Differentiable, Primitive, check_dtype, first_order
from tigon.ops.logprobs.divided_logprobs import (
    Parted,
    check_known,
    combined,
    local_ids,
    local_options,
    local_upstream,
)
from tigon.ops.logprobs.oracle import logprobs_oracle, make_ids
from tigon.ops.logprobs.results import Results, public
from tigon.ops.logprobs.rows import (
    Block,
    LogprobOptions,
    Logprobs,
    Rows,
    Upstream,
    add_block,
    backward_ids,
    check_ids,
    check_options,
    contiguous,
    flat_ids,
    gradient_into,
    joined_upstream,
)
from tigon.ops.losses import common
from tigon.ops.vocab_parallel import ANY_VOCABULARY, VocabParallelOptions, check_columns, outside_graphs

# N rows (tokens), V vocabulary, U columns of the logits in this process, K ids of a row, J largest logits of a row.


class RowResults(NamedTuple):
    """The forward's results; those that are not wanted are empty."""

    logprob_NK: Tensor
    stats_2N: Tensor
    entropy_N: Tensor
    predicted_N: Tensor
    topk_logprob_NJ: Tensor
    topk_ids_NJ: Tensor


def _fwd_body(logits_NV: Tensor, ids_NK: Tensor, options: LogprobOptions) -> RowResults:
    V = logits_NV.shape[1]
    check_ids(logits_NV, ids_NK, V, options.ignore_index)
    rows = Rows.empty(ids_NK, logits_NV, options, one_block=True)
    add_block(Block(logits_NV, 0, V), rows, options)
    return RowResults(
        rows.logprob_NK, rows.stats_2N, rows.entropy_N, rows.predicted_N, rows.topk_logprob(options), rows.topk_ids_NJ
    )


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
    def forward(ctx: Any, logits_NV: Tensor, call: LogprobsCall) -> Results:
        options, ids_NK = call.options, call.ids_NK
        computed = logprobs_fwd(logits_NV, ids_NK, options)
        all_ids, ctx.options = backward_ids(ids_NK, computed.topk_ids_NJ, options)
        ctx.save_for_backward(logits_NV, all_ids, computed.stats_2N, computed.entropy_N)
        ctx.lse, ctx.ids = call.lse, ids_NK.shape[1]
        ctx.set_materialize_grads(False)
        lse_N = computed.stats_2N.sum(0) if call.lse else computed.entropy_N.new_empty(0)
        ctx.mark_non_differentiable(computed.predicted_N, computed.topk_ids_NJ)
        return Results(
            computed.logprob_NK,
            lse_N,
            computed.entropy_N,
            computed.predicted_N,
            computed.topk_logprob_NJ,
            computed.topk_ids_NJ,
        )

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, _dpredicted: Any,
        dtopk: Tensor | None, _dids: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        logits_NV, ids_NK, stats_2N, entropy_N = ctx.saved_tensors
        dlogprob_NK = joined_upstream(dlogprob, dtopk, stats_2N, (ctx.ids, ctx.options.top_k))
        acc = stats_2N.dtype
        # A compiled graph passes zeros for a result that was not asked for.
        dlse, dentropy = dlse if ctx.lse else None, dentropy if ctx.options.entropy else None
        upstream = Upstream(
            ids_NK, stats_2N, entropy_N, dlogprob_NK, contiguous(dlse, acc), contiguous(dentropy, acc), None
        )
        return logprobs_bwd(logits_NV, upstream, ctx.options), None


class DividedLogits(torch.autograd.Function):
    """For logits whose columns are divided among processes; see `divided_logprobs.py`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NU: Tensor, ids_NK: Tensor, options: LogprobOptions, part: VocabParallelOptions
    ) -> Results:
        local = local_ids(ids_NK, ids_NK == options.ignore_index, part)
        of_local = local_options(options, logits_NU.shape[1])
        results, parted = combined(logprobs_fwd(logits_NU, local.local_NK, of_local), local, options, part)
        check_known(ids_NK, parted.unknown_NK, logits_NU)
        ctx.save_for_backward(logits_NU, *parted)
        ctx.options, ctx.sizes = of_local, (ids_NK.shape[1], options.top_k)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results.predicted_N, results.topk_ids_NJ)
        return results

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, _dpredicted: Any,
        dtopk: Tensor | None, _dids: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        logits_NU, *parted = ctx.saved_tensors
        upstream = local_upstream(Parted(*parted), (dlogprob, dlse, dentropy, dtopk), ctx.sizes)
        return logprobs_bwd(logits_NU, upstream, ctx.options), None, None, None


@outside_graphs
def divided_logits(
    logits_NU: Tensor, ids_NK: Tensor, options: LogprobOptions, part: VocabParallelOptions
) -> Results:  # fmt: skip
    """The results of `logprobs` for ids (N, K) of the whole vocabulary and this process's logits."""
    return Results._make(DividedLogits.apply(logits_NU, ids_NK.long(), options, part))


def _apply(logits: Tensor, call: LogprobsCall) -> Results:
    return Results(*LogprobsOfLogits.apply(logits, call))


_logprobs = Differentiable("logprobs", _apply)


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
    check_dtype(logits)
    if logits.ndim == 0:
        raise ShapeError("logits are 0-dim; pass (..., V).")
    V, rows = logits.shape[-1], logits.shape[:-1]
    common.check_vocabulary(V)
    common.check_devices(logits=logits, ids=ids, mask=mask)
    options = check_options(
        ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, temperature=temperature, top_k=top_k,
        outputs=outputs, vocab=V if vocab_parallel is None else ANY_VOCABULARY,
    )  # fmt: skip
    ids_NK = flat_ids(ids, mask, rows, ignore_index, "logits")
    logits_NV = logits.reshape(-1, V)
    if logits_NV.stride(1) != 1 and V > 1:
        logits_NV = logits_NV.contiguous()
    if vocab_parallel is not None:
        divided = divided_logits(logits_NV, ids_NK, options, check_columns(vocab_parallel, V))
        return public(divided, ids.shape, rows, options, "lse" in outputs)
    apply = _logprobs if torch.compiler.is_compiling() else _apply
    results: Results = apply(logits_NV, LogprobsCall(ids_NK=ids_NK, options=options, lse="lse" in outputs))
    return public(results, ids.shape, rows, options, "lse" in outputs)


# --- the record -------------------------------------------------------------------------------------------------------


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, V = case.shape
    options = dict(case.options)
    ids = make_ids(options, tuple(rows), V, device)
    return {"logits": randn(*rows, V, dtype=dtype, device=device, scale=3.0), "ids": ids, **options}


def _cost(logits: Tensor, ids: Tensor, **options: Any) -> Cost:
    return Cost(moved_bytes=3 * logits.nbytes, saved_bytes=logits.nbytes)


_ALL = {"outputs": ("lse", "entropy")}
LOGPROBS = Op(
    name="logprobs",
    call=logprobs,
    oracle=logprobs_oracle,
    make=_make,
    grads=("logits",),
    cases=(
        Case(id="one-id", shape=(2, 21, 100)),
        Case(id="all-outputs", shape=(42, 100), options=_ALL),
        Case(id="several-ids", shape=(42, 100), options={**_ALL, "ids": 5}),
        Case(
            id="temperature-softcap-scale",
            shape=(42, 100),
            options={**_ALL, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5},
        ),
        Case(id="half-masked", shape=(42, 100), options={**_ALL, "masked": 0.5}),
        Case(id="odd-vocab", shape=(9, 4099)),
        Case(id="several-tiles", shape=(3, 9000), options=_ALL),
        Case(id="llama-logits", shape=(2048, 128256), options=_ALL, small=False),
    ),
    cost=_cost,
    errors={"fp32": 1.1e-07, "bf16": 2.0e-03, "fp16": 2.4e-04},
)
