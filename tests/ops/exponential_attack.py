"""Rows that logits kept as exponentials could get wrong, each against fp64 by the 2x rule.

Run as a program for one size, vocabulary and option, it names every step on stdout before it starts. A GPU that stops
answering then leaves the name of the step that did it: `python tests/ops/exponential_attack.py small 32000 softcap`.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tigon.ops import linear_cross_entropy
from tigon.ops.head.cross_entropy import linear_cross_entropy_oracle

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 30.0},
    "scale": {"logit_scale": 0.25},
    "z-loss": {"z_loss": 1e-4},
    "per-token": {"reduction": "none"},
}
DEVIATIONS = (0.1, 1.0, 10.0, 40.0, 150.0)
SIZES = {"small": (256, 512), "large": (2048, 2048)}
"""Tokens and hidden. The large one fills the GPU with tiles, so that dX comes from the kernel instead of cuBLAS."""
LABELS = ("random", "largest", "smallest", "mixed")
BAD_VALUES = {"nan": float("nan"), "inf": float("inf"), "1e30": 1e30, "3e38": 3e38}
SECONDS_PER_STEP = 60
"""A step compiles its kernels first."""


def head(tokens: int, hidden: int, vocab: int, deviation: float, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden (tokens, hidden), weight (vocab, hidden) and a bias (vocab,), whose logits have this deviation."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=generator) * deviation / hidden**0.5
    w, bias = torch.randn(vocab, hidden, generator=generator), torch.randn(vocab, generator=generator)
    return tuple(t.bfloat16().to(device) for t in (x, w, bias))  # type: ignore[return-value]


def labels_of(kind: str, x: Tensor, w: Tensor) -> Tensor:
    logits = x.double() @ w.double().t()
    chosen = {
        "largest": logits.argmax(1),
        "smallest": logits.argmin(1),
        "random": (torch.arange(len(x), device=x.device) * 7919) % len(w),
    }
    if kind in chosen:
        return chosen[kind]
    mixed = torch.stack([chosen["largest"], chosen["smallest"], chosen["random"]])
    target = mixed.gather(0, (torch.arange(len(x), device=x.device) % 3).unsqueeze(0)).squeeze(0)
    target[::5] = -100
    return target


def results(compute: Any, x: Tensor, w: Tensor, target: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    loss = compute(x, w, target, **options)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), device=x.device, dtype=loss.dtype).reshape(loss.shape)
    dx, dw = torch.autograd.grad(loss, (x, w), upstream)
    return {"loss": loss.detach(), "dX": dx, "dW": dw}


def compare(got: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor], rows: Any = slice(None)) -> str:
    """The results that are more than twice as far from fp64 as the unfused op; empty if there are none."""
    wrong = []
    for name, expected in truth.items():
        at = rows if name != "dW" and expected.ndim else slice(None)
        want = expected[at] if expected.ndim else expected
        mine, unfused, rounded = (
            t[at] if t.ndim else t for t in (got[name], plain[name], expected.to(got[name].dtype))
        )
        error, other, rounding = (float((t.double() - want).norm()) for t in (mine, unfused, rounded))
        allowed = 2.0 * max(other, rounding) + 1e-6 * float(want.norm())
        if not error <= allowed:
            wrong.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}")
    return "; ".join(wrong)


def wide(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}


def steps(tokens: int, hidden: int, vocab: int, option: str, device: str) -> Iterator[tuple[str, Any]]:
    """(name, a function that returns what is wrong) for every step."""

    def given(deviation: float) -> tuple[Tensor, Tensor, dict[str, Any]]:
        x, w, bias = head(tokens, hidden, vocab, deviation, device)
        options = dict(OPTIONS[option])
        if options.pop("bias", False):
            options["bias"] = bias
        return x, w, options

    def _ordinary(deviation: float, kind: str) -> str:
        x, w, options = given(deviation)
        target = labels_of(kind, x, w)
        got, plain = (results(f, x, w, target, options) for f in (linear_cross_entropy, linear_cross_entropy_oracle))
        truth = results(linear_cross_entropy_oracle, x.double(), w.double(), target, wide(options))
        return compare(got, plain, truth)

    def _beside_bad_rows(bad: str) -> str:
        """The good rows' losses and dX are those of a batch without the bad ones. dW has a share of every row."""
        x, w, options = given(2.0)
        target, options = labels_of("random", x, w), {**options, "reduction": "none"}
        spoiled = x.clone()
        spoiled[3], spoiled[tokens // 2] = BAD_VALUES[bad], -BAD_VALUES[bad]
        target[tokens // 2] = -100
        rows = torch.ones(tokens, dtype=torch.bool, device=x.device)
        rows[3] = rows[tokens // 2] = False
        got = results(linear_cross_entropy, spoiled, w, target, options)
        plain = results(linear_cross_entropy_oracle, x, w, target, options)
        truth = results(linear_cross_entropy_oracle, x.double(), w.double(), target, wide(options))
        del truth["dW"]
        return compare(got, plain, truth, rows)

    for deviation in DEVIATIONS:
        for kind in LABELS:
            yield f"deviation {deviation:g}, labels {kind}", lambda d=deviation, k=kind: _ordinary(d, k)
    for bad in BAD_VALUES:
        yield f"a row of {bad} beside good ones", lambda b=bad: _beside_bad_rows(b)


def count_calls(file: str, name: str) -> list[int]:
    """A list that holds how often this launcher of a file of tigon.kernels has been called."""
    kernels = importlib.import_module(f"tigon.kernels.{file}")
    launcher, calls = getattr(kernels, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return launcher(*args, **kwargs)

    setattr(kernels, name, counted)
    return calls


def main() -> int:
    size, vocab, option = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    exponentials, scaled_products = (
        count_calls("linear_cross_entropy", "exp_logits"),
        count_calls("exponential_products", "scaled_product"),
    )
    for name, step in steps(*SIZES[size], vocab, option, "cuda"):
        print(f"{size} {vocab} {option}: {name}", flush=True)
        faulthandler.dump_traceback_later(SECONDS_PER_STEP, exit=True)
        wrong = step()
        torch.cuda.synchronize()
        faulthandler.cancel_dump_traceback_later()
        if wrong:
            print(f"wrong: {wrong}", flush=True)
            return 1
    print(f"{exponentials[0]} chunks of exponentials, {scaled_products[0]} products by the kernel")
    return int(not exponentials[0] or (size == "large" and not scaled_products[0]))


if __name__ == "__main__":
    sys.exit(main())
