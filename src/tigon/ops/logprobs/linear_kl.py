"""Divergence per token between a student's and a teacher's distribution, without holding all the logits.

Distillation losses are sums of these. The gradient exists for any upstream gradient; `kl_blocks.py` says how it is
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError, ShardingError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import Differentiable, check_number, first_order
from tigon.ops.lm_head import check_head, may_wait, settle_dtypes, spread, worth_gathering
from tigon.ops.logprobs.blocks import keeps_logits, logit_bytes
from tigon.ops.logprobs.divided_kl import DividedKlCall, divided_kl
from tigon.ops.logprobs.kl_backward import kl_gradients, save_for_backward
from tigon.ops.logprobs.kl_blocks import HeadPair, linear_kl_fwd
from tigon.ops.logprobs.kl_rows import DivergenceRows, KlOptions
from tigon.ops.logprobs.linear_logprobs import WORTH_A_WAIT_FLOPS
from tigon.ops.logprobs.rows import check_logit_map, check_mask, check_temperature
from tigon.ops.losses import common
from tigon.ops.losses.chunk_plan import MIB, default_chunk_bytes
from tigon.ops.losses.options import check_chunk_bytes
from tigon.ops.vocab_parallel import DividedHead, VocabParallelOptions, divided_head, replicated

# N tokens, H hidden, V vocabulary.

KINDS = ("forward", "reverse", "jsd")


@dataclass(frozen=True, kw_only=True)
class LinearKlCall:
    """The arguments of one call that are not differentiated."""

    counts_N: Tensor | None
    """uint8, 0 for a token that is left out; None if none is, or if `index` names the others."""
    index: Tensor | None
    """Flat positions of the tokens that count; None for all."""
    options: KlOptions
    chunk_bytes: Sequence[int]
    """(most bytes of logits and of their gradient in a block, most bytes if logits are kept)"""


class LinearKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, call, grad_enabled = args
        pair, index, rows = HeadPair(*tensors), call.index, tensors[0].shape[0]
        ctx.want = tuple(grad_enabled and need for need in ctx.needs_input_grad[:6])
        pair = pair if index is None else pair.tokens_at(index)
        block_bytes, most_kept = call.chunk_bytes
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        keep = (
            any(ctx.want)
            and isinstance(pair.tokens, int)
            and keeps_logits(pair.tokens, pair.vocab, pair.logit_bytes(ctx.want), most_kept)
        )
        computed = linear_kl_fwd(pair, call.counts_N, call.options, keep, block_bytes)
        if any(ctx.want):
            rows_of_results = DivergenceRows(call.counts_N, computed.value_N, computed.stats_8N, computed.peaks_2N)
            kept = (computed.p_kept_NV, computed.q_kept_NV) if keep else None
            save_for_backward(ctx, pair, call.counts_N, index, rows_of_results, kept)
        ctx.options, ctx.rows, ctx.block_bytes = call.options, rows, most_kept if keep else block_bytes
        return spread(computed.value_N, index, rows, 0.0)

    @staticmethod
    @first_order
    def backward(ctx: Any, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        return (*kl_gradients(ctx, dvalue_N, None), None, None)


def _apply(
    p_hidden: Tensor, p_weight: Tensor, p_bias: Tensor | None, q_hidden: Tensor, q_weight: Tensor,
    q_bias: Tensor | None, call: LinearKlCall,
) -> Tensor:  # fmt: skip
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    sides = (p_hidden, p_weight, p_bias, q_hidden, q_weight, q_bias)
    return LinearKl.apply(*sides, call, torch.is_grad_enabled())  # type: ignore[no-any-return]


_linear_kl = Differentiable("linear_kl", _apply)


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    vocab_parallel: VocabParallelOptions | None = None,
) -> Tensor:
    """Divergence per token between a student's distribution p_s and a teacher's p_t, over one vocabulary.

    Each distribution is the softmax of softcap(logit_scale · (hidden @ weight.T + bias)) / temperature. The kinds are

        forward   KL(p_t || p_s)
        reverse   KL(p_s || p_t)
        jsd       beta · KL(p_t || m) + (1 - beta) · KL(p_s || m) of the mixture m = beta · p_t + (1 - beta) · p_s

    jsd is the generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649, equation 1) and of TRL's
    `GKDTrainer.generalized_jsd_loss`, where beta is the teacher's share. As in TRL, beta=0 is forward and beta=1 is
    reverse. These are the limits of jsd / beta and jsd / (1 - beta); jsd itself tends to 0.

    If only the teacher's K largest log-probabilities are known, pass their ids (..., K) to `tigon.linear_logprobs` and
    the result to `tigon.losses.topk_divergence`, which adds a bin for the rest of the vocabulary.

    Args:
        hidden: (..., H), the student's hidden states: fp16, bf16, fp32 or fp64.
        weight: (V, H), the weight of the student's `lm_head`. If its dtype differs from hidden's, both are promoted.
            Under autocast both are cast to autocast's dtype, as in F.linear.
        teacher_hidden: (..., G) of the same tokens, with another hidden size or dtype if the teacher has one.
        teacher_weight: (V, G).
        kind: "forward", "reverse" or "jsd".
        beta: in [0, 1], for "jsd" only.
        bias, teacher_bias: (V,) or None.
        temperature: divides the logits of both, after the softcap. The result is not multiplied by its square.
        softcap, teacher_softcap: c > 0; the logits become c·tanh(logits / c).
        logit_scale, teacher_logit_scale: multiplies the logits before the softcap; not 0.
        mask: (...) bool; tokens where it is False are left out: their divergence and gradient are 0. They take no time,
            because they are dropped before the products. To know their number, the host waits for the device once.
            Under torch.compile and CUDA graphs every token is computed.
        chunk_bytes: largest number of bytes of logits and of their gradient, the student's and the teacher's together,
            alive at once. One token's are the least. Logits are fp32, 4 bytes each, also for 16-bit inputs. Logits of
            all tokens are kept for backward if they fit together with an eighth of their gradient, which saves two
            products. The default is 512 MiB for logits that are computed again, and 1 GiB for logits that are kept, on
            GPUs; 16 MiB on the CPU.
        vocab_parallel: the rows of both weights that this process holds, if the heads are divided by vocabulary. The
            weights and biases are then these rows. Weights that are DTensors of Shard(0) need no such options, and
            hidden states are DTensors of Replicate(). Both heads must be divided alike.

    Returns:
        (...) divergences in nats, fp32 (fp64 if an input is fp64). They are differentiable for any upstream gradient,
        towards student and teacher. If the teacher requires no gradient, its gradients and their products are skipped.

    Raises:
        ShapeError: a tensor has the wrong shape; teacher and student have different tokens or vocabularies; V or H is 0
            (a weight with 0 elements is sharded); or the tensors are on several devices.
        DtypeError: a tensor is none of the four floats.
        OptionError: an option is unknown, is not a number or is outside its range.
        ShardingError: one head is divided otherwise than the other, a DTensor has other placements, or vocab_parallel
            is given without a process group.
        DoubleBackwardError: in backward, with create_graph=True.
    """
    divided = _divided_pair((hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), vocab_parallel)
    if divided is None:
        check_head(hidden, weight, bias)
        check_head(teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    else:
        (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = (head.tensors for head in divided)
        mask = replicated(mask, "mask")
    common.check_devices(
        hidden=hidden, weight=weight, bias=bias, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_bias=teacher_bias, mask=mask,
    )  # fmt: skip
    rows = hidden.shape[:-1]
    if teacher_hidden.shape[:-1] != rows:
        raise ShapeError(
            f"hidden has tokens {tuple(rows)}, teacher_hidden has {tuple(teacher_hidden.shape[:-1])}; they must agree."
        )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ShapeError(
            f"weight has {weight.shape[0]} classes, teacher_weight has {teacher_weight.shape[0]}; they must agree. If "
            "one is padded, pass its first rows."
        )
    if mask is not None:
        check_mask(mask, rows)
    check_chunk_bytes(chunk_bytes)
    student_map = check_logit_map(softcap, logit_scale)
    teacher_map = check_logit_map(teacher_softcap, teacher_logit_scale, "teacher_")
    temperature = check_temperature(temperature)
    student_first, share = _direction(kind, beta)
    student = _flat_head(hidden, weight, bias)
    teacher = _flat_head(teacher_hidden, teacher_weight, teacher_bias)
    index = None if mask is None else _rows_that_count(mask.reshape(-1), weight, teacher_weight, divided is not None)
    maps = (*student_map, *teacher_map) if student_first else (*teacher_map, *student_map)
    sides = (*student, *teacher) if student_first else (*teacher, *student)
    counts_N = None if mask is None or index is not None else mask.reshape(-1).to(torch.uint8)
    options = KlOptions(share, temperature, *maps)
    block_bytes = default_chunk_bytes(hidden) if chunk_bytes is None else (chunk_bytes, chunk_bytes)
    if divided is not None:
        of_parts = DividedKlCall(
            counts_N=counts_N, index=index, options=options, chunk_bytes=block_bytes, part=divided[0].part,
            most_rows=divided[0].most_rows(),
        )  # fmt: skip
        return divided_kl(sides, of_parts).view(rows)
    call = LinearKlCall(counts_N=counts_N, index=index, options=options, chunk_bytes=block_bytes)
    apply = _linear_kl if torch.compiler.is_compiling() else _apply
    return apply(*sides, call).view(rows)


_Head = tuple[Tensor, Tensor, Tensor | None]


def _divided_pair(
    student: _Head, teacher: _Head, vocab_parallel: VocabParallelOptions | None
) -> tuple[DividedHead, DividedHead] | None:
    """This process's parts of two heads that are divided alike; None for whole heads."""
    student_part = divided_head(*student, vocab_parallel)
    teacher_part = divided_head(*teacher, vocab_parallel, "teacher_")
    if student_part is None and teacher_part is None:
        return None
    if student_part is None or teacher_part is None or student_part.part != teacher_part.part:
        raise ShardingError(
            "weight and teacher_weight are not divided alike by vocabulary. Divide both over the same processes, into "
            "the same rows."
        )
    return student_part, teacher_part


def _direction(kind: str, beta: float) -> tuple[bool, float]:
    """(whether p is the student, p's share of the mixture or 0 for a KL divergence)"""
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r} is unknown; choose from {', '.join(KINDS)}.")
    if not 0.0 <= check_number("beta", beta) <= 1.0:
        raise OptionError(f"beta={beta} is outside [0, 1].")
    if kind == "jsd" and 0.0 < beta < 1.0:
        return False, float(beta)
    return kind == "reverse" or (kind == "jsd" and beta == 1.0), 0.0


def _flat_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(N, H) hidden states, weight and bias, in the dtype of their products."""
    hidden, weight, bias = settle_dtypes(hidden, weight, bias)
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias


def _rows_that_count(mask_N: Tensor, weight_VH: Tensor, teacher_weight_VG: Tensor, divided: bool) -> Tensor | None:
    """Flat positions of the tokens that count, or None to compute all (see `linear_logprobs`).

    divided: the mask alone decides, because processes with different numbers of rows must drop the same tokens.
    """
    # Two products in the forward, and in the backward again; two more for the student's gradients.
    flops = mask_N.numel() * (8 * weight_VH.numel() + 4 * teacher_weight_VG.numel())
    if not may_wait(mask_N) or (mask_N.is_cuda and not divided and flops < WORTH_A_WAIT_FLOPS["mask"]):
        return None
    return worth_gathering(mask_N.nonzero().squeeze(1), mask_N.numel())


# --- the record -------------------------------------------------------------------------------------------------------


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float, temperature: float
) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype))
    z = logits.to(torch.promote_types(dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return torch.log_softmax(z / temperature, -1)


def linear_kl_oracle(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, kind: str = "forward",
    beta: float = 0.5, bias: Tensor | None = None, teacher_bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, teacher_softcap: float | None = None, logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0, mask: Tensor | None = None, chunk_bytes: int | None = None,
) -> Tensor:  # fmt: skip
    """The unfused formula, as in TRL's GKDTrainer: two products, two log-softmaxes in at least fp32, `F.kl_div`."""
    log_s = _log_softmax(hidden, weight, bias, softcap, logit_scale, temperature)
    log_t = _log_softmax(
        teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale, temperature
    )

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

    if kind == "jsd" and 0.0 < beta < 1.0:
        share = torch.tensor(beta, dtype=log_s.dtype, device=log_s.device)
        log_m = torch.logsumexp(torch.stack([log_s + torch.log1p(-share), log_t + torch.log(share)]), 0)
        value = beta * kl(log_t, log_m) + (1.0 - beta) * kl(log_s, log_m)
    elif kind == "reverse" or (kind == "jsd" and beta == 1.0):
        value = kl(log_s, log_t)
    else:
        value = kl(log_t, log_s)
    return value if mask is None else value.masked_fill(~mask, 0.0)


def _make(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    *rows, H, V = case.shape
    options = dict(case.options)
    G = options.pop("teacher_hidden_size", H)
    masked, near, peaked, grid = (options.pop(name, 0.0) for name in ("masked", "near", "peaked", "grid"))
    biased = {name: options.pop(name, False) for name in ("bias", "teacher_bias")}
    weight = randn(V, H, dtype=dtype, device=device, scale=2.0 / H**0.5)
    hidden = randn(*rows, H, dtype=dtype, device=device)
    if peaked:
        # Each token's hidden state points at one weight, so that its probability is near 1.
        favourite = torch.randint(V, tuple(rows), device=device)
        hidden = (hidden * 0.1 + peaked * weight[favourite]).to(dtype)
    if near:
        # A teacher from which the student has hardly moved.
        teacher_weight = (weight + randn(V, H, dtype=dtype, device=device, scale=near)).to(dtype)
        teacher_hidden = (hidden + randn(*rows, H, dtype=dtype, device=device, scale=near)).to(dtype)
    else:
        teacher_weight = randn(V, G, dtype=dtype, device=device, scale=2.0 / G**0.5)
        teacher_hidden = randn(*rows, G, dtype=dtype, device=device)
    if grid:
        # Multiples of a power of 2, so that no order of summation rounds their products in fp32.
        hidden, weight, teacher_hidden, teacher_weight = (
            ((t / grid).round() * grid).to(dtype) for t in (hidden, weight, teacher_hidden, teacher_weight)
        )
    if masked:
        options["mask"] = torch.rand(tuple(rows), device=device) >= masked
    return {
        "hidden": hidden,
        "weight": weight,
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight,
        **{name: randn(V, dtype=dtype, device=device) if wanted else None for name, wanted in biased.items()},
        **options,
    }


def _cost(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **options: Any) -> Cost:
    # Two products in each pass, and two more for each head that is trained. Operands move once in each pass. Logits are
    # written in both passes, read twice in the forward and once in the backward; gradients are written and read twice.
    N, V = hidden.numel() // hidden.shape[-1], weight.shape[0]
    heads = ((hidden, weight), (teacher_hidden, teacher_weight))
    trained = [w.requires_grad or h.requires_grad for h, w in heads]
    if not any(trained):
        trained = [True, True]
    operand_bytes = [h.nbytes + w.nbytes for h, w in heads]
    sizes = [logit_bytes(h.dtype) for h, _ in heads]
    return Cost(
        moved_bytes=sum(
            (3 if t else 2) * o + N * V * (5 * size.logits + (3 if t else 0) * size.gradients)
            for t, o, size in zip(trained, operand_bytes, sizes, strict=True)
        ),
        saved_bytes=sum(operand_bytes),
        flops=sum((8 if t else 4) * N * w.numel() for t, (_, w) in zip(trained, heads, strict=True)),
    )


_BLOCKS = {"chunk_bytes": 42 * 30 * 8}
LINEAR_KL = Op(
    name="linear_kl",
    call=linear_kl,
    oracle=linear_kl_oracle,
    make=_make,
    grads=("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias"),
    cases=(
        # Kept logits, or blocks of some tokens in the forward and of some columns in the backward.
        Case(id="forward-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
        Case(id="forward-blocks-bias", shape=(2, 21, 24, 100), options={**_BLOCKS, "bias": True, "teacher_bias": True}),
        Case(id="reverse-blocks", shape=(42, 24, 100), options={"kind": "reverse", **_BLOCKS}),
        Case(id="jsd-keep", shape=(42, 24, 100), options={"kind": "jsd", "chunk_bytes": 1 << 20}),
        Case(id="jsd-beta-blocks", shape=(42, 24, 100), options={"kind": "jsd", "beta": 0.3, "bias": True, **_BLOCKS}),
        Case(
            id="hidden-sizes",
            shape=(42, 24, 100),
            options={"teacher_hidden_size": 40, "teacher_bias": True, "temperature": 1.5, **_BLOCKS},
        ),
        Case(
            id="teacher-softcap-scale",
            shape=(42, 24, 100),
            options={"kind": "jsd", "beta": 0.3, "teacher_softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7,
                     **_BLOCKS},
        ),
        Case(id="student-softcap", shape=(42, 24, 100), options={"softcap": 3.0, "temperature": 0.7, **_BLOCKS}),
        Case(id="peaked", shape=(42, 24, 100), options={"peaked": 6.0, **_BLOCKS}),
        Case(id="near", shape=(42, 24, 100), options={"near": 0.1, **_BLOCKS}),
        Case(
            id="near-peaked-jsd",
            shape=(42, 24, 100),
            options={"kind": "jsd", "near": 0.1, "peaked": 6.0, **_BLOCKS},
            product_orders=8,
        ),
        Case(
            id="near-peaked-exact-products",
            shape=(42, 24, 100),
            options={"kind": "jsd", "near": 0.1, "peaked": 6.0, "grid": 1 / 64, **_BLOCKS},
        ),
        Case(id="half-masked", shape=(42, 24, 100), options={"kind": "reverse", "masked": 0.5, **_BLOCKS}),
        Case(id="odd-vocab", shape=(42, 16, 4099), options={"kind": "jsd", "chunk_bytes": 300_000}),
        Case(
            id="qwen-head",
            shape=(2048, 1024, 151936),
            options={"kind": "jsd", "teacher_hidden_size": 2048, "chunk_bytes": 256 * MIB},
            small=False,
        ),
        Case(id="gemma-3-head", shape=(512, 640, 262144), options={"teacher_softcap": 30.0}, small=False),
    ),
    cost=_cost,
    errors={"fp32": 5.1e-06, "bf16": 4.5e-02, "fp16": 1.2e-02},
)  # fmt: skip
