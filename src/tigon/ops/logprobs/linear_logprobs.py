"""Log-probabilities of ids, log-sum-exp and entropy of `hidden @ weight.T + bias`, without holding all the logits.

Every post-training loss is a function of these (`tigon.losses`). The gradient exists for any upstream gradient of each
of them; `blocks.py` says how it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Differentiable, first_order
from tigon.ops.lm_head import check_head, may_wait, settle_dtypes, worth_gathering
from tigon.ops.logprobs.blocks import (
    BackwardOptions,
    HeadTensors,
    keeps_logits,
    linear_logprobs_bwd,
    linear_logprobs_fwd,
    logit_bytes,
)
from tigon.ops.logprobs.divided_logprobs import divided_logprobs
from tigon.ops.logprobs.oracle import logprobs_oracle, make_ids
from tigon.ops.logprobs.results import Results, finished, public, spread_results
from tigon.ops.logprobs.rows import (
    LogprobOptions,
    Logprobs,
    Upstream,
    backward_ids,
    check_ids,
    check_options,
    contiguous,
    flat_ids,
    fp16_scales,
    joined_upstream,
)
from tigon.ops.losses import common
from tigon.ops.losses.chunk_plan import MIB, default_chunk_bytes
from tigon.ops.losses.options import check_chunk_bytes
from tigon.ops.vocab_parallel import ANY_VOCABULARY, DividedHead, VocabParallelOptions, divided_head, replicated

# N tokens, H hidden, V vocabulary, K ids of a token, J largest logits of a token.

# Reading the number of tokens that count leaves the GPU idle for 0.7 ms (H200, 4096 x 2048 x 128256, 2026-11-24), as
# long as products of 5e11 operations take. With a mask, some tokens do not count, and the wait is worth as much. Ids
# alone may all count: then the wait may cost at most 2 % of the products.
WORTH_A_WAIT_FLOPS = {"mask": 5 * 10**11, "ids": 2 * 10**13}


@dataclass(frozen=True, kw_only=True)
class LinearLogprobsCall:
    """The arguments of one call that are not differentiated."""

    ids_NK: Tensor
    index: Tensor | None
    """Flat positions of the tokens that count; None for all."""
    options: LogprobOptions
    lse: bool
    chunk_bytes: Sequence[int]
    """(most bytes of logits and of their gradient in a block, most bytes if logits are kept)"""


class LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias: Tensor | None, call: LinearLogprobsCall,
        grad_enabled: bool,
    ) -> Results:  # fmt: skip
        ctx.want = tuple(grad_enabled and need for need in ctx.needs_input_grad[:3])
        options, index, ids_NK, rows = call.options, call.index, call.ids_NK, hidden_NH.shape[0]
        if index is not None:
            hidden_NH, ids_NK = hidden_NH.index_select(0, index), ids_NK.index_select(0, index)
        (N, _), V = hidden_NH.shape, weight_VH.shape[0]
        block_bytes, most_kept = call.chunk_bytes
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        tensors = HeadTensors(hidden_NH, weight_VH, bias)
        keep = any(ctx.want) and isinstance(N, int) and keeps_logits(N, V, tensors.logit_bytes, most_kept)
        computed = linear_logprobs_fwd(tensors, ids_NK, options, keep, block_bytes)
        if any(ctx.want):
            all_ids, options_of_backward = backward_ids(ids_NK, computed.topk_ids_NJ, options)
            ctx.options = options_of_backward
            kept = computed.kept_NV if keep else None
            ctx.save_for_backward(
                hidden_NH, weight_VH, bias, all_ids, computed.stats_2N, computed.entropy_N, kept, index
            )  # fmt: skip
        ctx.lse, ctx.rows, ctx.ids = call.lse, rows, ids_NK.shape[1]
        ctx.block_bytes = most_kept if keep else block_bytes
        ctx.dtypes = (hidden_NH.dtype, weight_VH.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        lse_N = computed.stats_2N.sum(0) if call.lse else computed.entropy_N.new_empty(0)
        results = Results(
            computed.logprob_NK, lse_N, computed.entropy_N, computed.predicted_N, computed.topk_logprob_NJ,
            computed.topk_ids_NJ,
        )  # fmt: skip
        results = spread_results(results, index, rows, options, lse=call.lse)
        ctx.mark_non_differentiable(results.predicted_N, results.topk_ids_NJ)
        return results

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dlogprob: Tensor | None, dlse: Tensor | None, dentropy: Tensor | None, _dpredicted: Any,
        dtopk: Tensor | None, _dids: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        hidden_NH, weight_VH, bias, ids_NK, stats_2N, entropy_N, kept_NV, index = ctx.saved_tensors
        acc, N = stats_2N.dtype, hidden_NH.shape[0]
        # A compiled graph passes zeros for a result that was not asked for.
        dlse, dentropy = dlse if ctx.lse else None, dentropy if ctx.options.entropy else None
        dlogprob, dlse, dentropy, dtopk = (
            g if g is None or index is None else g.index_select(0, index) for g in (dlogprob, dlse, dentropy, dtopk)
        )
        dlogprob_NK = joined_upstream(dlogprob, dtopk, stats_2N, (ctx.ids, ctx.options.top_k))
        dlse, dentropy = contiguous(dlse, acc), contiguous(dentropy, acc)
        scale = left = None
        if hidden_NH.dtype == torch.float16 and N:
            scale, left = fp16_scales(dlogprob_NK, dlse, dentropy, ctx.options)
        want_hidden, want_weight, want_bias = ctx.want
        gradients = linear_logprobs_bwd(
            HeadTensors(hidden_NH, weight_VH, bias),
            Upstream(ids_NK, stats_2N, entropy_N, dlogprob_NK, dlse, dentropy, scale),
            kept_NV,
            ctx.options,
            BackwardOptions(want_hidden, want_weight, want_bias, ctx.block_bytes, gathered=index is not None),
        )
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        return (
            finished(gradients.dx_NH, left, index, ctx.rows, x_dtype) if want_hidden else None,
            finished(gradients.dw_VH, left, None, weight_VH.shape[0], w_dtype) if want_weight else None,
            finished(gradients.db_V.unsqueeze(1), left, None, weight_VH.shape[0], b_dtype).squeeze(1)
            if want_bias
            else None,
            None,
            None,
        )


def _apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: LinearLogprobsCall) -> Results:
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    return Results(*LinearLogprobs.apply(hidden, weight, bias, call, torch.is_grad_enabled()))


_linear_logprobs = Differentiable("linear_logprobs", _apply)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    outputs: tuple[str, ...] = (),
    top_k: int = 0,
    chunk_bytes: int | None = None,
    vocab_parallel: VocabParallelOptions | None = None,
) -> Tensor | Logprobs:
    """Log-probabilities of `ids` under softmax(z), z = softcap(logit_scale · (hidden @ weight.T + bias)) / temperature.

    Args:
        hidden: (..., H), fp16, bf16, fp32 or fp64.
        weight: (V, H), the weight of `lm_head`. If its dtype differs from hidden's, both are promoted. Under autocast
            both are cast to autocast's dtype, as in F.linear.
        ids: (...) for one id of each token, or (..., K); int64 or int32. They are not shifted.
        bias: (V,) or None.
        temperature: divides the logits, after the softcap.
        softcap: c > 0; the logits become c·tanh(logits / c).
        logit_scale: multiplies the logits before the softcap; not 0.
        ignore_index: an id that is left out: its log-probability and gradient are 0. A token is left out if all its ids
            are.
        mask: (...) bool; tokens where it is False are left out. Those take no time, because they are dropped before the
            products. To know their number, the host waits for the device once (without a mask only if the products
            take longer than 25 ms). Under torch.compile and CUDA graphs every token is computed.
        outputs: values to return in addition: "lse", "entropy", "predicted"; see `Logprobs`.
        top_k: also return the `top_k` largest log-probabilities of each token and their ids.
        chunk_bytes: largest number of bytes of logits and of their gradient alive at once. Logits are fp32, 4 bytes
            each, also for 16-bit inputs. Logits of all tokens are kept for backward if they fit together with an
            eighth of their gradient, which saves a product. The default is 512 MiB for logits that are computed again,
            and 1 GiB for logits that are kept, on GPUs; 16 MiB on the CPU.
        vocab_parallel: the rows of the weight that this process holds, if the head is divided by vocabulary. weight and
            bias are then these rows. A weight that is a DTensor of Shard(0) needs no such options, and hidden is a
            DTensor of Replicate().

    Returns:
        Log-probabilities of the shape of ids, fp32 (fp64 for fp64 inputs); with `outputs` or `top_k`, a `Logprobs`.
        Each is differentiable for any upstream gradient. A frozen weight or hidden skips its product.

    Raises:
        ShapeError: hidden, weight, bias, ids or mask has the wrong shape; V or H is 0 (a weight with 0 elements is
            sharded); or the tensors are on several devices.
        DtypeError: hidden, weight or bias is none of the four floats, or ids are neither int64 nor int32.
        OptionError: an option is unknown, is not a number or is outside its range.
        ShardingError: a DTensor has other placements, or vocab_parallel is given without a process group.
        LabelError: an id is outside [0, V) and is not ignore_index. Checked on the CPU, and on a GPU only with
            TIGON_CHECK=1; otherwise the log-probability on a GPU is NaN.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    divided = divided_head(hidden, weight, bias, vocab_parallel)
    if divided is not None:
        hidden, ids, mask = divided.hidden, replicated(ids, "ids"), replicated(mask, "mask")
    else:
        check_head(hidden, weight, bias)
    common.check_devices(hidden=hidden, weight=weight, bias=bias, ids=ids, mask=mask)
    options = check_options(
        ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, temperature=temperature, top_k=top_k,
        outputs=outputs, vocab=_most_top_k(weight, divided),
    )  # fmt: skip
    check_chunk_bytes(chunk_bytes)
    rows = hidden.shape[:-1]
    ids_NK = flat_ids(ids, mask, rows, ignore_index, "hidden")
    bytes_of_blocks = default_chunk_bytes(hidden) if chunk_bytes is None else (chunk_bytes, chunk_bytes)
    if divided is not None:
        results = divided_logprobs(divided, ids_NK, options, bytes_of_blocks)
        return public(results, ids.shape, rows, options, "lse" in outputs)
    hidden, weight, bias = settle_dtypes(hidden, weight, bias)
    if may_wait(ids_NK):
        # Checked here so that the message names the caller's position: tokens are dropped below.
        check_ids(hidden, ids_NK, weight.shape[0], ignore_index)
    call = LinearLogprobsCall(
        ids_NK=ids_NK,
        index=rows_that_count(ids_NK, ignore_index, weight, "ids" if mask is None else "mask"),
        options=options,
        lse="lse" in outputs,
        chunk_bytes=bytes_of_blocks,
    )
    apply = _linear_logprobs if torch.compiler.is_compiling() else _apply
    results = apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, call)
    return public(results, ids.shape, rows, options, "lse" in outputs)


def _most_top_k(weight: Tensor, divided: DividedHead | None) -> int:
    """The whole vocabulary; a bound of it for a divided head whose other parts are unknown."""
    if divided is None or divided.vocab is not None:
        return weight.shape[0]
    return ANY_VOCABULARY


def rows_that_count(ids_NK: Tensor, ignore_index: int, weight_VH: Tensor, by: str) -> Tensor | None:
    """Flat positions of the tokens that count, or None to compute all.

    All are computed if few are left out, if the host cannot wait for their number, or if waiting takes longer than the
    products of all tokens.
    """
    N = ids_NK.shape[0]
    if not may_wait(ids_NK) or (ids_NK.is_cuda and 6 * N * weight_VH.numel() < WORTH_A_WAIT_FLOPS[by]):
        return None
    index_N = (ids_NK != ignore_index).any(1).nonzero().squeeze(1)
    return worth_gathering(index_N, N)


# --- the record -------------------------------------------------------------------------------------------------------


def linear_logprobs_oracle(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, bias: Tensor | None = None, chunk_bytes: int | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The unfused formula: one product, logits in the product's dtype, then `logprobs_oracle`."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))
    return logprobs_oracle(logits, ids, **options)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, V = case.shape
    options = dict(case.options)
    has_bias, peaked = options.pop("bias", False), options.pop("peaked", False)
    weight = randn(V, H, dtype=dtype, device=device, scale=2.0 / H**0.5)
    ids = make_ids(options, tuple(rows), V, device)
    hidden = randn(*rows, H, dtype=dtype, device=device)
    if peaked:
        # Each token's hidden state points at the weight of its id, so that its probability is near 1.
        one_id = ids if ids.ndim == len(rows) else ids[..., 0]
        hidden = (hidden * 0.1 + 6.0 * weight[one_id.clamp(0, V - 1).long()]).to(dtype)
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": randn(V, dtype=dtype, device=device) if has_bias else None,
        "ids": ids,
        **options,
    }


def _cost(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> Cost:
    # Four products of 2·N·H·V operations; operands move once in each pass. Logits are written and read twice, their
    # gradient is written once and read twice.
    H, V = weight.shape[1], weight.shape[0]
    N, size = hidden.numel() // H, logit_bytes(hidden.dtype)
    return Cost(
        moved_bytes=3 * (hidden.nbytes + weight.nbytes) + N * V * (4 * size.logits + 3 * size.gradients),
        saved_bytes=hidden.nbytes + weight.nbytes,
        flops=8 * N * H * V,
    )


_ALL = {"outputs": ("lse", "entropy")}
LINEAR_LOGPROBS = Op(
    name="linear_logprobs",
    call=linear_logprobs,
    oracle=linear_logprobs_oracle,
    make=_make,
    grads=("hidden", "weight", "bias"),
    cases=(
        # Kept logits, or blocks of some tokens and some columns.
        Case(id="one-id-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
        Case(id="one-id-blocks-bias", shape=(2, 21, 24, 100), options={"chunk_bytes": 42 * 30 * 4, "bias": True}),
        Case(id="all-outputs-keep", shape=(2, 21, 24, 100), options={**_ALL, "chunk_bytes": 1 << 20}),
        Case(id="all-outputs-blocks", shape=(42, 24, 100), options={**_ALL, "bias": True, "chunk_bytes": 42 * 30 * 4}),
        Case(id="several-ids", shape=(42, 24, 100), options={**_ALL, "ids": 5, "chunk_bytes": 42 * 40 * 4}),
        Case(
            id="temperature-softcap-scale",
            shape=(42, 24, 100),
            options={**_ALL, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5, "chunk_bytes": 42 * 40 * 4},
        ),
        Case(id="temperature", shape=(42, 24, 100), options={**_ALL, "temperature": 1.5, "chunk_bytes": 42 * 40 * 4}),
        Case(id="peaked", shape=(42, 24, 100), options={**_ALL, "peaked": True, "chunk_bytes": 42 * 40 * 4}),
        Case(id="half-masked", shape=(42, 24, 100), options={**_ALL, "masked": 0.5, "chunk_bytes": 42 * 40 * 4}),
        Case(id="odd-vocab", shape=(9, 16, 4099), options={"chunk_bytes": 40_000}, product_orders=8),
        # Several blocks of columns, which need more than 1,024 columns.
        Case(id="odd-vocab-softcap", shape=(9, 16, 4099), options={**_ALL, "softcap": 3.0, "chunk_bytes": 40_000}),
        Case(id="llama-1b-head", shape=(4, 512, 2048, 128256), options={"chunk_bytes": 128 * MIB}, small=False),
        Case(id="qwen-head", shape=(2048, 1024, 151936), options={**_ALL, "chunk_bytes": 128 * MIB}, small=False),
        Case(id="gemma-3-head", shape=(512, 640, 262144), options=_ALL, small=False),
    ),
    cost=_cost,
    errors={"fp32": 2.4e-06, "bf16": 1.0e-02, "fp16": 2.6e-03},
)
