"""Divergence per token between a student's and a teacher's distribution, without holding all the logits.

Distillation losses are sums of these. The gradient exists for any upstream gradient; `blocks.py` says how it is
computed.

Two heads that are divided alike by vocabulary exchange the statistics of each chunk, because a divergence's terms need
the log-sum-exps of both whole rows of logits. So the kernel runs twice on each process's columns. The divergence and
the means for its gradient are sums over columns, so one all-reduce at the end adds them up. The columns of the largest
z_p and z_q are those of one process. The others get column -1, which no block has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.errors import OptionError, ShapeError, ShardingError
from tigon.ops._op import Case, Cost, Op, randn
from tigon.ops.dispatch import (
    Context,
    Differentiable,
    by_vocabulary,
    check_number,
    first_order,
    is_dtensor,
    no_autocast,
    outside_graphs,
    runs_eagerly,
)
from tigon.ops.head.autograd import finished, head_gradients
from tigon.ops.head.blocks import (
    BackwardOptions,
    HeadPair,
    KlResults,
    PairBuffers,
    WantedPair,
    linear_kl_bwd,
    linear_kl_fwd,
    rows_at_once,
)
from tigon.ops.head.divided import DividedHead
from tigon.ops.head.frozen import is_frozen, linear_kl_frozen
from tigon.ops.head.inputs import Head, Wanted, default_chunk_bytes
from tigon.ops.head.logprobs import WORTH_A_WAIT_FLOPS
from tigon.ops.head.plan import LogitBytes, keeps_logits
from tigon.ops.losses.divergence_rows import DivergenceRows, KlOptions, KlUpstream, divergence, fp16_scale
from tigon.ops.losses.inputs import CountedTokens, check_chunk_bytes, check_devices, tokens_that_count
from tigon.ops.losses.logprob_inputs import check_logit_map, check_mask, check_temperature
from tigon.ops.losses.logprob_rows import contiguous
from tigon.ops.vocab_parallel import VocabParallelOptions, exchange, replicated

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


class _Whole:
    """All columns of both rows of logits are in this process."""

    def most_rows(self, pair: HeadPair) -> int:
        """The most rows of a weight that a process holds."""
        return pair.p.vocab

    def forward(self, pair: HeadPair, call: LinearKlCall, keep: bool) -> KlResults:
        return linear_kl_fwd(pair, call.counts_N, call.options, keep, call.chunk_bytes[0])  # type: ignore[no-any-return]

    def sum_hidden(self, dx_NH: Tensor) -> None:
        """Add up the gradient of hidden over all columns, in place."""


_WHOLE = _Whole()


@dataclass(frozen=True)
class _Divided:
    """This process has some columns of both."""

    part: VocabParallelOptions
    most: int
    """The most rows that a process holds. They decide the chunks, of which each process must have as many."""

    def most_rows(self, pair: HeadPair) -> int:
        return self.most

    def forward(self, pair: HeadPair, call: LinearKlCall, keep: bool) -> KlResults:
        (N, U), options = pair.size, call.options
        plan = rows_at_once(pair, self.most, keep, call.chunk_bytes[0])
        buffers, results = PairBuffers(pair, plan), pair.empty_rows(call.counts_N)
        with no_autocast(pair.p.hidden_NH):
            for at in plan.token_slices(N):
                logits, of_rows = buffers.view(at.stop - at.start, U), results.part(at)
                if U:
                    pair.logits_into(logits, at, slice(0, U))
                    divergence(logits, of_rows, options, terms=False)
                _exchange_statistics(of_rows, self.part, has_columns=U > 0)
                if U:
                    divergence(logits, of_rows, options, statistics=False)
        _add_up(results, self.part, has_columns=U > 0)
        return KlResults.of(pair, results, buffers if keep and U else None)

    def sum_hidden(self, dx_NH: Tensor) -> None:
        self.part.sum_hidden_grad(dx_NH)


class LinearKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, *args: Any) -> Tensor:
        *tensors, call, vocabulary, grad_enabled = args
        wanted = WantedPair(*(Wanted.of(ctx.needs_input_grad[at : at + 3], grad_enabled) for at in (0, 3)))
        counted = CountedTokens(call.index, tensors[0].shape[0])
        pair, trained = HeadPair(Head(*tensors[:3]), Head(*tensors[3:])).at(counted), any(map(any, wanted))
        (N, _), (block_bytes, most_kept) = pair.size, call.chunk_bytes
        # A symbolic token count must not decide anything, or every count would need a new compilation.
        known = trained and isinstance(N, int)
        ctx.tokens, ctx.at_once = counted.tokens, known and vocabulary is _WHOLE and _is_frozen(pair, wanted)
        if ctx.at_once:
            made = linear_kl_frozen(pair, call.counts_N, call.options, wanted, block_bytes)
            ctx.save_for_backward(
                *(dx if want.want_hidden else None for dx, want in zip(made[1:], wanted, strict=True)),
                call.index,
                call.counts_N,
            )
            return counted.spread(made.value_N, 0.0)
        keep = known and keeps_logits(N, vocabulary.most_rows(pair), pair.logit_bytes(wanted), most_kept)
        computed = vocabulary.forward(pair, call, keep)
        if trained:
            kept = computed[3:] if keep and pair.p.vocab else (None, None)
            ctx.save_for_backward(
                *pair.p[:3], *pair.q[:3], call.index, call.counts_N, computed.stats_8N, computed.peaks_2N, *kept
            )
        ctx.wanted, ctx.options, ctx.vocabulary = wanted, call.options, vocabulary
        ctx.block_bytes = most_kept if keep else block_bytes
        return counted.spread(computed.value_N, 0.0)

    @staticmethod
    @first_order
    def backward(ctx: Context, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.at_once:
            return _scaled_rows(ctx, dvalue_N)
        *tensors, index, counts_N, stats_8N, peaks_2N, p_kept_NV, q_kept_NV = ctx.saved_tensors
        counted = CountedTokens(index, ctx.tokens)
        pair, options, vocabulary = HeadPair(Head(*tensors[:3]), Head(*tensors[3:])), ctx.options, ctx.vocabulary
        dvalue_N = contiguous(counted.take(dvalue_N), stats_8N.dtype)
        p_scale, p_left = _scales(pair.p, dvalue_N, options, is_p=True)
        q_scale, q_left = _scales(pair.q, dvalue_N, options, is_p=False)
        upstream = KlUpstream(counts_N, stats_8N, peaks_2N, dvalue_N, p_scale, q_scale)
        how = BackwardOptions(ctx.block_bytes, fp32_hidden=vocabulary is not _WHOLE)
        made = linear_kl_bwd(pair, upstream, p_kept_NV, q_kept_NV, options, ctx.wanted, how)
        results: list[Tensor | None] = []
        for head, wanted, side, left in zip(pair, ctx.wanted, (made[:3], made[3:]), (p_left, q_left), strict=True):
            if wanted.want_hidden:
                vocabulary.sum_hidden(side[0])
            results += head_gradients(side, wanted, (left, left), counted, head.dtype)
        return *results, None, None, None


def _is_frozen(pair: HeadPair, wanted: WantedPair) -> bool:
    """Whether only hidden states have gradients, rows times the upstream gradient. fp16 would need a loss scale."""
    dtypes = {head.dtype for head in pair}
    return is_frozen(*wanted) and torch.float16 not in dtypes and runs_eagerly(pair.p.hidden_NH)


def _scaled_rows(ctx: Context, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the hidden states from those for an upstream gradient of 1."""
    p_dx_NH, q_dx_NH, index, counts_N = ctx.saved_tensors
    counted = CountedTokens(index, ctx.tokens)
    u_N = counted.take(dvalue_N)
    assert u_N is not None
    if counts_N is not None:  # a token that is left out has no gradient, even if its own is NaN
        u_N = u_N.masked_fill(counts_N == 0, 0.0)
    p, q = (None if dx is None else finished(dx, u_N, counted, dx.dtype) for dx in (p_dx_NH, q_dx_NH))
    return p, None, None, q, *(None,) * 5


def _scales(head: Head, dvalue_N: Tensor, options: KlOptions, *, is_p: bool) -> tuple[Tensor | None, Tensor | None]:
    """(factor of a side's stored gradient, factor still to multiply by); None for 1."""
    if head.dtype != torch.float16 or not head.tokens:
        return None, None
    return fp16_scale(dvalue_N, options.p if is_p else options.q, is_difference=options.is_jsd or not is_p)


def _exchange_statistics(rows: DivergenceRows, part: VocabParallelOptions, has_columns: bool) -> None:
    """Replace the statistics of this process's columns by those of all columns."""
    stats_8N, peaks_2N = rows.stats_8N, rows.peaks_2N
    if not has_columns:
        stats_8N[:4] = -torch.inf
    (of_all,) = exchange(part, [stats_8N[:4].t()], stats_8N.dtype)
    mine = part.rank
    for side, m_at in enumerate((0, 2)):
        m, log_s = of_all[..., m_at], of_all[..., m_at + 1]
        top_N = m.amax(0)
        base_N = torch.where(top_N == -torch.inf, 0.0, top_N)
        stats_8N[m_at] = top_N
        stats_8N[m_at + 1] = torch.logsumexp((m - base_N) + log_s, 0)
        has_peak_N = (m == top_N).to(torch.uint8).argmax(0) == mine
        peaks_2N[side] = torch.where(has_peak_N, peaks_2N[side], -1) if has_columns else -1


def _add_up(rows: DivergenceRows, part: VocabParallelOptions, has_columns: bool) -> None:
    """Add up the divergences and the means over the processes, in place."""
    sums = torch.cat([rows.value_N.unsqueeze(0), rows.stats_8N[4:6]])
    if not has_columns:
        sums.zero_()
    part.all_reduce(sums)
    rows.value_N.copy_(sums[0])
    rows.stats_8N[4:6] = sums[1:]


def _apply(
    p_hidden: Tensor,
    p_weight: Tensor,
    p_bias: Tensor | None,
    q_hidden: Tensor,
    q_weight: Tensor,
    q_bias: Tensor | None,
    call: LinearKlCall,
) -> Tensor:
    # The grad mode is passed in, because it is always off inside forward and needs_input_grad ignores no_grad.
    sides = (p_hidden, p_weight, p_bias, q_hidden, q_weight, q_bias)
    return LinearKl.apply(*sides, call, _WHOLE, torch.is_grad_enabled())  # type: ignore[no-any-return]


_linear_kl = Differentiable("linear_kl", _apply)


class _Request(NamedTuple):
    """The checked options of a call."""

    student_first: bool
    """Whether p is the student."""
    options: KlOptions
    mask_N: Tensor | None
    chunk_bytes: tuple[int, int]

    @classmethod
    def of(
        cls, hidden: Tensor, teacher_hidden: Tensor, mask: Tensor | None, *, kind: str = "forward", beta: float = 0.5,
        temperature: float = 1.0, softcap: float | None = None, teacher_softcap: float | None = None,
        logit_scale: float = 1.0, teacher_logit_scale: float = 1.0, chunk_bytes: int | None = None,
    ) -> _Request:  # fmt: skip
        rows = hidden.shape[:-1]
        check_devices(hidden=hidden, teacher_hidden=teacher_hidden, mask=mask)
        if teacher_hidden.shape[:-1] != rows:
            raise ShapeError(
                f"hidden has tokens {tuple(rows)}, teacher_hidden has {tuple(teacher_hidden.shape[:-1])}; they must "
                "agree."
            )
        if mask is not None:
            check_mask(mask, rows)
        check_chunk_bytes(chunk_bytes)
        student, teacher = (
            check_logit_map(softcap, logit_scale),
            check_logit_map(teacher_softcap, teacher_logit_scale, "teacher_"),
        )
        temperature = check_temperature(temperature)
        student_first, share = _direction(kind, beta)
        maps = (*student, *teacher) if student_first else (*teacher, *student)
        mask_N = None if mask is None else mask.reshape(-1)
        return cls(
            student_first, KlOptions(share, temperature, *maps), mask_N, default_chunk_bytes(hidden, chunk_bytes)
        )

    def call(self, index: Tensor | None) -> LinearKlCall:
        counts_N = None if self.mask_N is None or index is not None else self.mask_N.to(torch.uint8)
        return LinearKlCall(counts_N=counts_N, index=index, options=self.options, chunk_bytes=self.chunk_bytes)


def _check_vocabularies(weight: Tensor, teacher_weight: Tensor) -> None:
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ShapeError(
            f"weight has {weight.shape[0]} classes, teacher_weight has {teacher_weight.shape[0]}; they must agree. If "
            "one is padded, pass its first rows."
        )


def _tokens(mask_N: Tensor | None, *, wait_pays: bool) -> Tensor | None:
    return None if mask_N is None else tokens_that_count(mask_N, lambda: mask_N, wait_pays=wait_pays)


@outside_graphs
def _divided(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, bias: Tensor | None = None,
    teacher_bias: Tensor | None = None, mask: Tensor | None = None, vocab_parallel: VocabParallelOptions | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`linear_kl` for two heads that are divided alike by vocabulary."""
    alike = vocab_parallel is not None or is_dtensor(weight) == is_dtensor(teacher_weight)
    if alike:
        student = DividedHead.of(hidden, weight, bias, vocab_parallel)
        teacher = DividedHead.of(teacher_hidden, teacher_weight, teacher_bias, vocab_parallel, "teacher_")
        alike = student.part == teacher.part
    if not alike:
        raise ShardingError(
            "weight and teacher_weight are not divided alike by vocabulary. Divide both over the same processes, into "
            "the same rows."
        )
    request = _Request.of(student.hidden, teacher.hidden, replicated(mask, "mask"), **options)
    _check_vocabularies(student.weight, teacher.weight)
    # The mask alone decides, because processes with different numbers of rows must drop the same tokens.
    call = request.call(_tokens(request.mask_N, wait_pays=True))
    p, q = (student, teacher) if request.student_first else (teacher, student)
    vocabulary = _Divided(student.part, student.most_rows())
    sides = (*p.head[:3], *q.head[:3])
    found: Tensor = LinearKl.apply(*sides, call, vocabulary, torch.is_grad_enabled())
    return found.view(student.hidden.shape[:-1])


@by_vocabulary(_divided, weight=1, teacher_weight=3)
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
    student, teacher = Head.of(hidden, weight, bias), Head.of(teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    request = _Request.of(
        hidden, teacher_hidden, mask, kind=kind, beta=beta, temperature=temperature, softcap=softcap,
        teacher_softcap=teacher_softcap, logit_scale=logit_scale, teacher_logit_scale=teacher_logit_scale,
        chunk_bytes=chunk_bytes,
    )  # fmt: skip
    _check_vocabularies(weight, teacher_weight)
    # Two products in the forward, and in the backward again; two more for the student's gradients.
    flops = student.tokens * (8 * weight.numel() + 4 * teacher_weight.numel())
    call = request.call(_tokens(request.mask_N, wait_pays=flops >= WORTH_A_WAIT_FLOPS["mask"]))
    p, q = (student, teacher) if request.student_first else (teacher, student)
    apply = _linear_kl if torch.compiler.is_compiling() else _apply
    found: Tensor = apply(p.hidden_NH, p.weight_VH, p.bias, q.hidden_NH, q.weight_VH, q.bias, call)
    return found.view(hidden.shape[:-1])


def _direction(kind: str, beta: float) -> tuple[bool, float]:
    """(whether p is the student, p's share of the mixture or 0 for a KL divergence)"""
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r} is unknown; choose from {', '.join(KINDS)}.")
    if not 0.0 <= check_number("beta", beta) <= 1.0:
        raise OptionError(f"beta={beta} is outside [0, 1].")
    if kind == "jsd" and 0.0 < beta < 1.0:
        return False, float(beta)
    return kind == "reverse" or (kind == "jsd" and beta == 1.0), 0.0


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


def _cost(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **options: object) -> Cost:
    # Two products in each pass, and two more for each head that is trained. Operands move once in each pass. Logits are
    # written in both passes, read twice in the forward and once in the backward; gradients are written and read twice.
    N, V = hidden.numel() // hidden.shape[-1], weight.shape[0]
    heads = ((hidden, weight), (teacher_hidden, teacher_weight))
    trained = [w.requires_grad or h.requires_grad for h, w in heads]
    if not any(trained):
        trained = [True, True]
    operand_bytes = [h.nbytes + w.nbytes for h, w in heads]
    sizes = [LogitBytes.of(h.dtype) for h, _ in heads]
    return Cost(
        moved_bytes=sum(
            (3 if t else 2) * o + N * V * (5 * size.logits + (3 if t else 0) * size.gradients)
            for t, o, size in zip(trained, operand_bytes, sizes, strict=True)
        ),
        saved_bytes=sum(operand_bytes),
        flops=sum((8 if t else 4) * N * w.numel() for t, (_, w) in zip(trained, heads, strict=True)),
    )


LINEAR_KL = Op(
    name="linear_kl",
    call=linear_kl,
    oracle=linear_kl_oracle,
    make=_make,
    grads=("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias"),
    case=Case(id="forward-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
    cost=_cost,
    errors={"fp32": 5.1e-06, "bf16": 4.5e-02, "fp16": 1.2e-02},
)
