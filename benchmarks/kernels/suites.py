"""The suites of rows, with tigon's targets for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.kernels.targets import PerformanceTarget
from tigon.bench.rows import SMALL, Row, row, small_row
from tigon.bench.rows import SUITES as OF_THE_WHEEL

Targets = tuple[PerformanceTarget, ...]
Aimed = tuple[Row, Targets]
"""A row with its targets."""


def _aimed(op: str, *shape: int, reach: Targets = (), **fields: Any) -> Aimed:
    return row(op, *shape, **fields), reach


def _fraction(bound: float) -> Targets:
    return (PerformanceTarget(quantity="fraction", bound=bound),)


def _at_most(ratio: float, vs: str, *, of: str = "", memory_gib: float | None = None) -> PerformanceTarget:
    return PerformanceTarget(quantity="ratio", bound=ratio, vs=vs, of=of, memory_gib=memory_gib)


_VARIANTS = (
    _at_most(0.60, "tigon", of="tigon half ignored"),
    _at_most(0.72, "tigon", of="tigon frozen head"),
    _at_most(0.36, "tigon", of="tigon eval"),
)
_KEPT = _at_most(1.10, "products", of="tigon kept logits")
_LOGPROB_VARIANTS = (
    _KEPT,
    _at_most(1.03, "tigon", of="tigon with entropy"),
    _at_most(0.60, "tigon", of="tigon half masked"),
)
_RECOMPUTED = _at_most(1.08, "four products", of="tigon recomputed logits")
_LINEAR, _LOGPROBS = "linear_cross_entropy", "linear_logprobs"
_FROZEN: dict[str, Any] = {
    "frozen": ("teacher_hidden", "teacher_weight"),
    "limits": ("six products", "products once"),
}


def _linear_kl(*shape: int) -> tuple[Aimed, ...]:
    """Divergences of two heads: both trained, a frozen teacher, and the mean that Liger's function returns."""
    trained = (_at_most(1.15, "eight products"),)
    mean = {**_FROZEN, "mean": True, "reach": (_at_most(1.0, "liger jsd"),)}
    within = (_at_most(1.15, "six products", memory_gib=2.0),)
    return (
        _aimed("linear_kl", *shape, limits=("eight products",), problem="jsd, both heads trained", reach=trained),
        _aimed("linear_kl", *shape, problem="jsd, frozen teacher", reach=within, **_FROZEN),
        _aimed("linear_kl", *shape, problem="mean jsd, frozen teacher", **mean),
        _aimed("linear_kl", *shape, problem="mean forward KL, frozen teacher", options={"kind": "forward"}, **mean),
    )


TARGETS: tuple[Aimed, ...] = (
    _aimed("rms_norm", 16384, 2048, reach=_fraction(0.90)),
    _aimed("rms_norm", 16384, 4096, reach=_fraction(0.90)),
    _aimed("rms_norm", 16384, 8192, reach=_fraction(0.90)),
    _aimed("rms_norm", 16384, 16384, reach=_fraction(0.88)),
    _aimed("rms_norm", 1, 4096, reach=(PerformanceTarget(quantity="host_us", bound=80.0),)),
    _aimed("add_rms_norm", 16384, 4096, reach=_fraction(0.94)),
    _aimed("add_rms_norm", 16384, 8192, reach=_fraction(0.94)),
    _aimed("layer_norm", 16384, 4096, reach=_fraction(0.88)),
    _aimed("layer_norm", 16384, 8192, reach=_fraction(0.88)),
    _aimed("rope", 4, 32, 4096, 128, reach=_fraction(0.94)),
    _aimed("rope", 4, 32, 4096, 64, reach=_fraction(0.94)),
    _aimed("swiglu", 16384, 14336, reach=(*_fraction(0.98), PerformanceTarget(quantity="kept_bytes", bound=0.0))),
    _aimed("geglu", 16384, 14336, reach=_fraction(0.98)),
    _aimed("cross_entropy", 8192, 128256, reach=(PerformanceTarget(quantity="ms", bound=1.15),)),
    _aimed("cross_entropy", 8192, 32000, reach=(PerformanceTarget(quantity="ms", bound=0.29),)),
    _aimed("cross_entropy", 4096, 262144, reach=(PerformanceTarget(quantity="ms", bound=1.20),)),
    _aimed("cross_entropy", 8192, 128256, logits="peaked"),
    _aimed(
        _LINEAR,
        *(8192, 4096, 128256),
        reach=(
            _at_most(1.00, "products", memory_gib=3.0),
            _at_most(1.04, "products", memory_gib=2.1),
            _at_most(1.08, "products", memory_gib=1.4),
            *_VARIANTS,
        ),
    ),
    _aimed(_LINEAR, 32768, 2048, 128256, reach=(_at_most(1.04, "products"),)),
    _aimed(_LINEAR, 4096, 2048, 128256, reach=(_at_most(1.04, "products"),)),
    _aimed(_LINEAR, 16384, 3584, 152064, reach=(_at_most(1.03, "products"),)),
    _aimed(_LINEAR, 8192, 4096, 128256, logits="peaked"),
    _aimed(
        _LOGPROBS,
        *(8192, 4096, 151936),
        reach=(_at_most(1.08, "four products", memory_gib=2.5), *_LOGPROB_VARIANTS),
    ),
    # The logits of this row fit, so tigon keeps them unless told otherwise.
    _aimed(_LOGPROBS, 4096, 2048, 128256, reach=(_RECOMPUTED, *_LOGPROB_VARIANTS)),
    # The same without the time from the call to the first product, which a training step hides.
    _aimed(
        _LOGPROBS,
        *(4096, 2048, 128256),
        graph=True,
        problem="CUDA graph",
        impls=("tigon kept logits", "tigon recomputed logits"),
        reach=(_RECOMPUTED, _KEPT),
    ),
    *_linear_kl(8192, 4096, 128256),
    *(
        _aimed("lora_linear", 8192, *shape, 16, reach=(_at_most(1.10, "two products", of="tigon frozen weight"),))
        for shape in ((4096, 14336), (14336, 4096))
    ),
    _aimed("fp8_linear", 8192, 4096, 14336, reach=(_at_most(0.70, "16-bit products", of="tigon"),)),
)

# The sweeps of the kernel benchmarks in the Liger Kernel paper (arXiv 2410.10989), with Liger and the formula of
# transformers. Only the swept dimension is the paper's. The others are a Llama's: 8192 tokens, or four sequences of T,
# and F = 11008.
_PAPER_IMPLS = ("tigon", "eager", "liger")
_PAPER_WIDTHS = (4096, 6144, 8192, 10240, 12288, 14336, 16384)
PAPER: tuple[Row, ...] = (
    *(row("cross_entropy", 8192, V, impls=_PAPER_IMPLS) for V in (40960, 81920, 122880, 163840)),
    *(row(op, 4 * T, 11008, impls=_PAPER_IMPLS) for op in ("geglu", "swiglu") for T in (4096, 8192, 12288, 16384)),
    *(row(op, 8192, H, impls=_PAPER_IMPLS) for op in ("rms_norm", "layer_norm") for H in _PAPER_WIDTHS),
    # 32 query heads, 8 key heads, so the width of a head grows with the hidden size.
    *(row("rope", 1, 32, 8192, H // 32, impls=_PAPER_IMPLS) for H in _PAPER_WIDTHS),
)

# Never slower than torch native or torch.compile by more than 5 %.
_NO_SLOWER = (_at_most(1.05, "torch"), _at_most(1.05, "compile"))


def _odd(op: str, *shape: int) -> Aimed:
    has_native = op in ("rms_norm", "layer_norm") or (op == "cross_entropy" and shape[0] > 1)
    return _aimed(op, *shape, reach=_NO_SLOWER if has_native else _NO_SLOWER[1:])


ODD: tuple[Aimed, ...] = (
    *(_odd("rms_norm", 1_000_000, D) for D in (64, 96, 128, 256)),
    *(_odd("rms_norm", 16384, H) for H in (2560, 3072, 5120, 28672)),
    *(_odd("layer_norm", 16384, H) for H in (2560, 3072, 5120, 28672)),
    *(_odd("add_rms_norm", 16384, H) for H in (2560, 3072, 5120)),
    *(_odd("swiglu", 16384, F) for F in (6912, 8960, 28672)),
    *(_odd("cross_entropy", 4096, V) for V in (50257, 151936, 262144)),
    *(_odd(_LINEAR, 4096, 2048, V) for V in (50257, 151936, 262144)),
    *(_odd("logprobs", 4096, V) for V in (50257, 128256, 262144)),
    _odd("rms_norm", 1, 4096),
    _odd("add_rms_norm", 1, 4096),
    _odd("layer_norm", 1, 4096),
    _odd("rope", 1, 32, 1, 128),
    _odd("swiglu", 1, 14336),
    _odd("geglu", 1, 14336),
    _odd("cross_entropy", 1, 128256),
    _aimed(_LINEAR, 1, 4096, 128256, graph=True, reach=_NO_SLOWER[1:]),
    _odd("multi_head_linear_cross_entropy", 2, 2048, 2048, 32000),
)

_WITH_TARGETS: Mapping[str, tuple[Aimed, ...]] = {"targets": TARGETS, "odd": ODD}
SUITES: Mapping[str, tuple[Row, ...]] = {
    **{name: tuple(row for row, _ in aimed) for name, aimed in _WITH_TARGETS.items()},
    "paper": PAPER,
    SMALL: (
        *(row for row in OF_THE_WHEEL[SMALL] if row.op != "linear_kl"),
        small_row("cross_entropy", logits="peaked"),
        small_row("linear_cross_entropy", logits="peaked"),
        *(row for row, _ in _linear_kl(64, 32, 1000)),
    ),
}
_REACH: Mapping[str, Mapping[str, Targets]] = {
    name: {row.id: targets for row, targets in aimed} for name, aimed in _WITH_TARGETS.items()
}


def targets_of(suite: str, row_id: str) -> Targets:
    """What tigon is to reach on a row of a suite."""
    return _REACH.get(suite, {}).get(row_id, ())
