"""Measure the errors of the ops over an lm_head on peaked logits, and what their fp32 logits cost.

    python -m benchmarks head-accuracy --json RECORD      # on a GPU: about 3 minutes
    python -m benchmarks head-accuracy --tiny             # small shapes, also on the CPU

The hidden states and weights are 16-bit, and their logits have a standard deviation of 1 to 40. The truth is the
unfused formula in fp64 on the same inputs. Each op stands beside two unfused formulas with 16-bit gradients of the
logits: one with logits in fp32, and one with logits in 16 bits. An error is a relative Frobenius norm.

Times are of forward and backward, in turns: the op as it is, and the op with logits in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from benchmarks.harness import Bench, Case, peaks_bytes, times_ms
from tigon.bench.numerical_errors import DTYPE_NAMES, relative_error
from tigon.ops import products as matrix_products
from tigon.ops.head.inputs import LogitBuffer

DEVIATIONS = (1.0, 10.0, 20.0, 30.0, 40.0)
DTYPES = (torch.bfloat16, torch.float16)
SHAPE, TINY_SHAPE = (512, 2048, 128256), (48, 64, 1000)
"""Tokens, hidden size, vocabulary of the errors."""
TIMED_SHAPES = ((8192, 4096, 128256), (2048, 4096, 128256), (4096, 2048, 128256), (4096, 1600, 50257))
TINY_TIMED_SHAPES = ((64, 32, 256),)
NEAR = 0.02
"""Size of the change that makes a near teacher out of the student, relative to the student's values."""

Heads = dict[str, Tensor]
Formula = Callable[..., Tensor]


class _Product(torch.autograd.Function):
    """Logits in fp32 of 16-bit factors. Their gradient is rounded to 16 bits before its products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = gradients[0].to(x.dtype).float()
        return (g @ weight.float()).to(x.dtype), (g.t() @ x.float()).to(x.dtype)


def _fp32_logits(x: Tensor, weight: Tensor) -> Tensor:
    return _Product.apply(x, weight)  # type: ignore[no-untyped-call,no-any-return]


def _16_bit_logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).float()


def _divergence(kind: str, beta: float, z_s: Tensor, z_t: Tensor) -> Tensor:
    log_s, log_t = z_s.log_softmax(-1), z_t.log_softmax(-1)

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    if kind == "forward":
        return kl(log_t, log_s)
    if kind == "reverse":
        return kl(log_s, log_t)
    share = torch.tensor(beta, dtype=log_s.dtype, device=log_s.device)
    log_m = torch.logaddexp(log_t + share.log(), log_s + (-share).log1p())
    return beta * kl(log_t, log_m) + (1.0 - beta) * kl(log_s, log_m)


def _entropy(z: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Head:
    """An op with its options, and the formula of the logits that it computes."""

    name: str
    call: Formula
    formula: Formula
    teacher: str = ""
    """"far", "near", or "" for an op of one head."""
    scalar: bool = False
    """Whether the result is one number, not one per token."""


def _kl_case(kind: str, beta: float, teacher: str) -> Head:
    options: dict[str, Any] = {"kind": kind} if kind != "jsd" else {"kind": kind, "beta": beta}
    name = f"linear_kl, {kind}{f' beta={beta:g}' if kind == 'jsd' else ''}, {teacher} teacher"
    return Head(
        name=name,
        call=lambda h, **_: tigon.linear_kl(h["x"], h["w"], h["teacher_x"], h["teacher_w"], **options),
        formula=lambda z, z_t, **_: _divergence(kind, beta, z, z_t),
        teacher=teacher,
    )


def _logprobs_case(name: str, options: dict[str, Any], pick: Callable[[Any], Tensor], formula: Formula) -> Head:
    return Head(
        name=f"linear_logprobs, {name}",
        call=lambda h, ids, **_: pick(tigon.linear_logprobs(h["x"], h["w"], ids, **options)),
        formula=lambda z, ids, **_: formula(z, ids),
    )


def _loss_case(name: str, labels: str, options: dict[str, Any]) -> Head:
    def loss(found: Any) -> Tensor:
        return found.loss if isinstance(found, tuple) else found  # type: ignore[attr-defined,no-any-return]

    return Head(
        name=f"linear_cross_entropy, {name}, {labels} labels",
        call=lambda h, **given: loss(tigon.linear_cross_entropy(h["x"], h["w"], given[labels], **options)),
        formula=lambda z, **given: F.cross_entropy(z, given[labels], reduction=options.get("reduction", "mean")),
        scalar=options.get("reduction") != "none",
    )


def _picked(z: Tensor, ids: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def cases(tokens: int, vocab: int) -> list[Head]:
    """All cases for heads of this size."""
    kinds = (("forward", 0.0), ("reverse", 0.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9))
    found = [_kl_case(*kind, teacher) for kind in kinds for teacher in ("far", "near")]
    found += [
        _logprobs_case("one id", {}, lambda logprobs: logprobs, _picked),
        _logprobs_case("entropy", {"outputs": ("entropy",)}, lambda r: r.entropy, lambda z, ids: _entropy(z)),
        _logprobs_case("log-sum-exp", {"outputs": ("lse",)}, lambda r: r.lse, lambda z, ids: z.logsumexp(-1)),
    ]
    chunks = {"chunk_bytes": 2 * vocab * max(tokens // 3, 1)}
    for labels in ("random", "sampled"):
        found += [
            _loss_case("one chunk", labels, {}),
            _loss_case("chunks", labels, chunks),
            _loss_case("each token", labels, {"reduction": "none"}),
            # Entropy needs the pass over the logits, where the product could otherwise write exponentials.
            _loss_case("one chunk with entropy", labels, {"outputs": ("entropy",)}),
            _loss_case("chunks with entropy", labels, {"outputs": ("entropy",), **chunks}),
        ]
    return found


def heads(shape: tuple[int, int, int], deviation: float, dtype: torch.dtype, device: torch.device) -> dict[str, Heads]:
    """Student and teacher by the teacher's kind."""
    N, H, V = shape
    x, w = torch.randn(N, H, device=device), torch.randn(V, H, device=device) * (deviation / H**0.5)
    other_x, other_w = torch.randn_like(x), torch.randn_like(w) * (deviation / H**0.5)
    near_x, near_w = x + NEAR * other_x, w + NEAR * other_w
    student = {"x": x.to(dtype), "w": w.to(dtype)}
    return {
        "far": {**student, "teacher_x": other_x.to(dtype), "teacher_w": other_w.to(dtype)},
        "near": {**student, "teacher_x": near_x.to(dtype), "teacher_w": near_w.to(dtype)},
        "": student,
    }


def _results(value: Callable[[Heads], Tensor], tensors: Heads, upstream: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = value(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype).expand(out.shape))
    return {"value": out.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def errors(case: Head, tensors: Heads, given: dict[str, Tensor], upstream: Tensor) -> dict[str, dict[str, float]]:
    """Variant -> result -> error against fp64."""

    def of_logits(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Heads], Tensor]:
        def value(h: Heads) -> Tensor:
            logits = [product(h[x], h[w]) for x, w in (("x", "w"), ("teacher_x", "teacher_w")) if x in h]
            return case.formula(*logits, **given)

        return value

    variants: dict[str, Callable[[Heads], Tensor]] = {
        "tigon": lambda h: case.call(h, **given),
        "fp32 logits": of_logits(_fp32_logits),
        "16-bit logits": of_logits(_16_bit_logits),
    }
    exact = {name: t.double() for name, t in tensors.items()}
    truth = _results(of_logits(lambda x, w: x @ w.t()), exact, upstream)
    found = {}
    for name, value in variants.items():
        got = _results(value, tensors, upstream)
        found[name] = {result: relative_error(t, truth[result]) for result, t in got.items()}
    return found


def all_errors(bench: Bench, shape: tuple[int, int, int]) -> None:
    """A row for each dtype, deviation and case; prints the errors of the gradients of the student, or of the head."""
    (N, _, V), device = shape, bench.device
    for dtype in DTYPES:
        for deviation in DEVIATIONS:
            by_teacher = heads(shape, deviation, dtype, device)
            student = by_teacher[""]
            p = (student["x"].double() @ student["w"].double().t()).softmax(-1)
            ids, labels = (torch.multinomial(p, 1).squeeze(1) for _ in range(2))
            del p
            given = {"ids": ids, "sampled": labels, "random": torch.randint(V, (N,), device=device)}
            upstream = torch.randn(N, device=device)
            for case in cases(N, V):
                found = errors(case, by_teacher[case.teacher], given, upstream[0] if case.scalar else upstream)
                row = {"dtype": DTYPE_NAMES[dtype], "deviation": deviation, "case": case.name, "errors": found}
                text = "  ".join(f"{name} {of['dx']:.1e} {of['dw']:.1e}" for name, of in found.items())
                bench.add("errors", row, f"{DTYPE_NAMES[dtype]} {deviation:>3g}  {case.name:<62} dX dW: {text}")


# --- the cost ---------------------------------------------------------------------------------------------------------


def _with_backward(value: Callable[[], Tensor], leaves: list[Tensor], upstream: Tensor) -> Callable[[], None]:
    def run() -> None:
        out = value()
        out.backward(upstream.expand(out.shape))
        for leaf in leaves:
            leaf.grad = None

    return run


def timed_ops(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], None]]:
    """Op -> its forward and backward. A teacher is frozen."""
    N, _, V = shape
    tensors = heads(shape, 2.0, dtype, device)["far"]
    x, w = (tensors[name].requires_grad_() for name in ("x", "w"))
    teacher_x, teacher_w = tensors["teacher_x"], tensors["teacher_w"]
    ids, per_token = torch.randint(V, (N,), device=device), torch.randn(N, device=device)
    gib = 1 << 30

    def kl(**options: Any) -> Callable[[], Tensor]:
        return lambda: tigon.linear_kl(x, w, teacher_x, teacher_w, **options)

    def logprobs(**options: Any) -> Callable[[], Tensor]:
        def value() -> Tensor:
            found = tigon.linear_logprobs(x, w, ids, **options)
            return found if isinstance(found, Tensor) else found.logprob + found.entropy  # type: ignore[operator]

        return value

    def loss(**options: Any) -> Callable[[], Tensor]:
        def value() -> Tensor:
            found = tigon.linear_cross_entropy(x, w, ids, **options)
            return found if isinstance(found, Tensor) else found.loss

        return value

    values = {
        "linear_kl, jsd": kl(kind="jsd"),
        "linear_kl, jsd, chunk_bytes=1 GiB": kl(kind="jsd", chunk_bytes=gib),
        "linear_kl, forward": kl(kind="forward"),
        "linear_logprobs": logprobs(),
        "linear_logprobs, chunk_bytes=6 GiB": logprobs(chunk_bytes=6 * gib),
        "linear_logprobs with entropy": logprobs(outputs=("entropy",)),
        "linear_cross_entropy": loss(),
        "linear_cross_entropy with entropy": loss(outputs=("entropy",)),
    }
    one = torch.ones((), device=device)
    return {
        name: _with_backward(value, [x, w], one if "cross" in name else per_token) for name, value in values.items()
    }


def products(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], None]]:
    """The product of the logits of 2,048 and of 512 tokens, with results in 16 bits and in fp32."""
    _, H, V = shape
    w = torch.randn(V, H, device=device, dtype=dtype)
    found: dict[str, Callable[[], None]] = {}
    for tokens in (2048, 512):
        x = torch.randn(tokens, H, device=device, dtype=dtype)
        for name, of_result in (("16 bits", dtype), ("fp32", torch.float32)):
            out = LogitBuffer(tokens, V, x, of_result).view(tokens, V)

            def run(x: Tensor = x, out: Tensor = out) -> None:
                matrix_products.logits_into(x, w, None, out)

            found[f"logits of {tokens} tokens in {name}"] = run
    return found


def cost(calls: dict[str, Callable[[], None]], device: torch.device) -> dict[str, dict[str, float]]:
    """Name -> milliseconds of a call, and MiB that it adds to the peak."""
    medians, peaks = times_ms(calls, device), peaks_bytes(calls, device)
    return {name: {"ms": medians[name], "mib": peaks[name] / 2**20} for name in calls}


def _in_16_bits(call: Callable[[], None]) -> Callable[[], None]:
    """The call with logits in the dtype of the hidden states."""

    def run() -> None:
        with patch.object(matrix_products, "logits_dtype", lambda dtype: dtype):
            call()

    return run


def all_times(bench: Bench, shapes: tuple[tuple[int, int, int], ...]) -> None:
    """A row for each shape and op."""
    for shape in shapes:
        for dtype in DTYPES[: 2 if shape is shapes[0] else 1]:
            size = {"shape": shape, "dtype": DTYPE_NAMES[dtype]}
            title = f"{'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}"
            for name, found in cost(products(shape, dtype, bench.device), bench.device).items():
                bench.add(
                    "times", {**size, "op": name, "fp32 logits": found}, f"{title} {name:<40} {found['ms']:.3f} ms"
                )
            for op, call in timed_ops(shape, dtype, bench.device).items():
                of_op = cost({"fp32 logits": call, "16-bit logits": _in_16_bits(call)}, bench.device)
                text = "  ".join(f"{name} {of['ms']:8.2f} ms {of['mib']:7.0f} MiB" for name, of in of_op.items())
                ratio = of_op["fp32 logits"]["ms"] / of_op["16-bit logits"]["ms"]
                bench.add("times", {**size, "op": op, **of_op}, f"{title} {op:<40} {text}  {ratio:.3f} x")


def measure(bench: Bench) -> None:
    torch.manual_seed(0)
    bench.fields["shape"] = shape = TINY_SHAPE if bench.tiny else SHAPE
    all_errors(bench, shape)
    all_times(bench, TINY_TIMED_SHAPES if bench.tiny else TIMED_SHAPES)


CASE = Case(measure=measure)
