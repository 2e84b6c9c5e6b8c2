"""The suites of rows. A row is an op, a shape and options, and `reach` has tigon's targets for it.

Shapes are those of the op's `make`:

- norms: rows x H
- rope: (B, heads, T, D)
- gated units: rows x F
- cross entropy: N x V
- linear cross entropy: N x H x V, with several heads B x T x H x V
- LoRA linear: rows x H x F x rank
- logprobs: N x V; linear logprobs and linear KL: N x H x V
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tigon.errors import OptionError, ShapeError
from tigon.ops import OPS

Logits = Literal["random", "peaked"]
Quantity = Literal["fraction", "ms", "ratio", "host_us", "kept_bytes"]


@dataclass(frozen=True, kw_only=True)
class PerformanceTarget:
    """One target. `fraction` must be at least `bound`, every other quantity at most `bound`.

    - fraction: the bound's time (the row's `limit_ms`) divided by tigon's time.
    - ms: forward + backward, of the kind that the row is judged by (graph or eager).
    - ratio: that time divided by the time of the implementation `vs`.
    - host_us: host time of one eager forward + backward.
    - kept_bytes: memory that the forward keeps for the backward beyond inputs and outputs, as a share of the inputs.
    """

    quantity: Quantity
    bound: float
    of: str = ""
    """The implementation that must reach it; "" stands for any of tigon's that computes the row's problem."""
    vs: str = ""
    memory_gib: float | None = None
    """The target holds only for implementations with at most this much extra peak memory."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a suite."""

    op: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    logits: Logits = "random"
    graph: bool = True
    """Judge by CUDA-graph replay. False for rows of tens of milliseconds, where launches do not matter."""
    reach: tuple[PerformanceTarget, ...] = ()
    impls: tuple[str, ...] = ()
    """Measure only these implementations; () means all."""
    limits: tuple[str, ...] = ()
    """Measure only these limits; () means all of the op's. The first one in `LIMITS` is the row's bound."""
    frozen: tuple[str, ...] = ()
    """Inputs that get no gradient."""
    mean: bool = False
    """Measure the mean of the outputs over the tokens. Some peers return no value per token."""
    problem: str = ""
    """Tells the row from others of its shape, e.g. "jsd, frozen teacher"."""

    @property
    def id(self) -> str:
        """The row's name, e.g. "rope 4x32x4096x128" or "cross_entropy 8192x128256 peaked"."""
        shape = "x".join(map(str, self.shape))
        logits = self.logits if self.logits != "random" else ""
        return " ".join(part for part in (self.op, shape, logits, self.problem) if part)


def _fraction(bound: float) -> tuple[PerformanceTarget, ...]:
    return (PerformanceTarget(quantity="fraction", bound=bound),)


def _over_products(ratio: float, memory_gib: float | None = None) -> PerformanceTarget:
    return PerformanceTarget(quantity="ratio", bound=ratio, vs="products", memory_gib=memory_gib)


# Default options per op: those of a training step.
USUAL: dict[str, dict[str, Any]] = {
    "rope": {"kv_heads": 8},
    "cross_entropy": {"ignored": 0.0, "inplace": True},
    "linear_cross_entropy": {"ignored": 0.0},
    "logprobs": {"ignored": 0.0},
    "linear_logprobs": {"ignored": 0.0},
    "linear_kl": {"kind": "jsd"},
    "multi_head_linear_cross_entropy": {
        "hiddens": 3, "weights": 3, "shifts": (2, 3, 4), "head_weights": (1.0, 0.8, 0.64),
    },
}  # fmt: skip


def row(op: str, *shape: int, **fields: Any) -> Row:
    """A row with the op's default options, overridden by `fields["options"]`."""
    options = {**USUAL.get(op, {}), **fields.pop("options", {})}
    return Row(op=op, shape=shape, options=options, **fields)


def _linear(*shape: int, reach: tuple[PerformanceTarget, ...] = (), **fields: Any) -> Row:
    return row("linear_cross_entropy", *shape, graph=False, reach=reach, **fields)


def _linear_logprobs(*shape: int, reach: tuple[PerformanceTarget, ...] = (), **fields: Any) -> Row:
    return row("linear_logprobs", *shape, reach=reach, **{"graph": False, **fields})


_VARIANTS = (
    PerformanceTarget(quantity="ratio", bound=0.60, of="tigon half ignored", vs="tigon"),
    PerformanceTarget(quantity="ratio", bound=0.72, of="tigon frozen head", vs="tigon"),
    PerformanceTarget(quantity="ratio", bound=0.36, of="tigon eval", vs="tigon"),
)

_KEPT = PerformanceTarget(quantity="ratio", bound=1.10, of="tigon kept logits", vs="products")
_LOGPROB_VARIANTS = (
    _KEPT,
    PerformanceTarget(quantity="ratio", bound=1.03, of="tigon with entropy", vs="tigon"),
    PerformanceTarget(quantity="ratio", bound=0.60, of="tigon half masked", vs="tigon"),
)


_TEACHER = ("teacher_hidden", "teacher_weight")


def _linear_kl(*shape: int) -> tuple[Row, ...]:
    """Divergences of two heads: both trained, a frozen teacher, and the mean that Liger's function returns."""
    frozen = {"frozen": _TEACHER, "limits": ("six products", "products once")}
    within = PerformanceTarget(quantity="ratio", bound=1.15, vs="six products", memory_gib=2.0)
    return (
        row(
            "linear_kl", *shape, graph=False, limits=("eight products",), problem="jsd, both heads trained",
            reach=(PerformanceTarget(quantity="ratio", bound=1.15, vs="eight products"),),
        ),
        row("linear_kl", *shape, graph=False, **frozen, problem="jsd, frozen teacher", reach=(within,)),
        *(
            row(
                "linear_kl", *shape, graph=False, **frozen, mean=True, options={"kind": kind},
                problem=f"mean {name}, frozen teacher",
                reach=(PerformanceTarget(quantity="ratio", bound=1.0, vs="liger jsd"),),
            )
            for kind, name in (("jsd", "jsd"), ("forward", "forward KL"))
        ),
    )  # fmt: skip


def _over_four_products(**fields: Any) -> PerformanceTarget:
    return PerformanceTarget(quantity="ratio", bound=1.08, vs="four products", **fields)


TARGETS = (
    row("rms_norm", 16384, 2048, reach=_fraction(0.90)),
    row("rms_norm", 16384, 4096, reach=_fraction(0.90)),
    row("rms_norm", 16384, 8192, reach=_fraction(0.90)),
    row("rms_norm", 16384, 16384, reach=_fraction(0.88)),
    row("rms_norm", 1, 4096, reach=(PerformanceTarget(quantity="host_us", bound=80.0),)),
    row("add_rms_norm", 16384, 4096, reach=_fraction(0.94)),
    row("add_rms_norm", 16384, 8192, reach=_fraction(0.94)),
    row("layer_norm", 16384, 4096, reach=_fraction(0.88)),
    row("layer_norm", 16384, 8192, reach=_fraction(0.88)),
    row("rope", 4, 32, 4096, 128, reach=_fraction(0.94)),
    row("rope", 4, 32, 4096, 64, reach=_fraction(0.94)),
    row("swiglu", 16384, 14336, reach=(*_fraction(0.98), PerformanceTarget(quantity="kept_bytes", bound=0.0))),
    row("geglu", 16384, 14336, reach=_fraction(0.98)),
    row("cross_entropy", 8192, 128256, reach=(PerformanceTarget(quantity="ms", bound=1.15),)),
    row("cross_entropy", 8192, 32000, reach=(PerformanceTarget(quantity="ms", bound=0.29),)),
    row("cross_entropy", 4096, 262144, reach=(PerformanceTarget(quantity="ms", bound=1.20),)),
    row("cross_entropy", 8192, 128256, logits="peaked"),
    _linear(
        8192, 4096, 128256,
        reach=(_over_products(1.00, 3.0), _over_products(1.04, 2.1), _over_products(1.08, 1.4), *_VARIANTS),
    ),
    _linear(32768, 2048, 128256, reach=(_over_products(1.04),)),
    _linear(4096, 2048, 128256, reach=(_over_products(1.04),)),
    _linear(16384, 3584, 152064, reach=(_over_products(1.03),)),
    _linear(8192, 4096, 128256, logits="peaked"),
    _linear_logprobs(8192, 4096, 151936, reach=(_over_four_products(memory_gib=2.5), *_LOGPROB_VARIANTS)),
    # The logits of this row fit, so tigon keeps them unless told otherwise.
    _linear_logprobs(
        4096, 2048, 128256, reach=(_over_four_products(of="tigon recomputed logits"), *_LOGPROB_VARIANTS)
    ),
    # The same without the time from the call to the first product, which a training step hides.
    _linear_logprobs(
        4096, 2048, 128256, graph=True, problem="CUDA graph", impls=("tigon kept logits", "tigon recomputed logits"),
        reach=(_over_four_products(of="tigon recomputed logits"), _KEPT),
    ),
    *_linear_kl(8192, 4096, 128256),
    *(
        row(
            "lora_linear", 8192, *shape, 16, options={"scaling": 2.0},
            reach=(PerformanceTarget(quantity="ratio", bound=1.10, of="tigon frozen weight", vs="two products"),),
        )
        for shape in ((4096, 14336), (14336, 4096))
    ),
    row(
        "fp8_linear", 8192, 4096, 14336,
        reach=(PerformanceTarget(quantity="ratio", bound=0.70, of="tigon", vs="16-bit products"),),
    ),
)  # fmt: skip

# The sweeps of the kernel benchmarks in the Liger Kernel paper (arXiv 2410.10989), with Liger and the formula of
# transformers. Only the swept dimension is the paper's. The others are a Llama's: 8192 tokens, or four sequences of T,
# and F = 11008.
_PAPER_IMPLS = ("tigon", "eager", "liger")
PAPER = (
    *(row("cross_entropy", 8192, V, impls=_PAPER_IMPLS) for V in (40960, 81920, 122880, 163840)),
    *(row(op, 4 * T, 11008, impls=_PAPER_IMPLS) for op in ("geglu", "swiglu") for T in (4096, 8192, 12288, 16384)),
    *(
        row(op, 8192, H, impls=_PAPER_IMPLS)
        for op in ("rms_norm", "layer_norm")
        for H in (4096, 6144, 8192, 10240, 12288, 14336, 16384)
    ),
    # 32 query heads, 8 key heads, so the width of a head grows with the hidden size.
    *(row("rope", 1, 32, 8192, H // 32, impls=_PAPER_IMPLS) for H in (4096, 6144, 8192, 10240, 12288, 14336, 16384)),
)

# Never slower than torch native or torch.compile by more than 5 %.
_NO_SLOWER = (
    PerformanceTarget(quantity="ratio", bound=1.05, vs="torch"),
    PerformanceTarget(quantity="ratio", bound=1.05, vs="compile"),
)
_NO_SLOWER_THAN_COMPILED = _NO_SLOWER[1:]
ODD = (
    *(row("rms_norm", 1_000_000, D, reach=_NO_SLOWER) for D in (64, 96, 128, 256)),
    *(row("rms_norm", 16384, H, reach=_NO_SLOWER) for H in (2560, 3072, 5120, 28672)),
    *(row("layer_norm", 16384, H, reach=_NO_SLOWER) for H in (2560, 3072, 5120, 28672)),
    *(row("add_rms_norm", 16384, H, reach=_NO_SLOWER_THAN_COMPILED) for H in (2560, 3072, 5120)),
    *(row("swiglu", 16384, F, reach=_NO_SLOWER_THAN_COMPILED) for F in (6912, 8960, 28672)),
    *(row("cross_entropy", 4096, V, reach=_NO_SLOWER) for V in (50257, 151936, 262144)),
    *(_linear(4096, 2048, V, reach=_NO_SLOWER_THAN_COMPILED) for V in (50257, 151936, 262144)),
    *(row("logprobs", 4096, V, reach=_NO_SLOWER_THAN_COMPILED) for V in (50257, 128256, 262144)),
    *(
        row(op, 1, *rest, reach=_NO_SLOWER if op in ("rms_norm", "layer_norm") else _NO_SLOWER_THAN_COMPILED)
        for op, *rest in (
            ("rms_norm", 4096), ("add_rms_norm", 4096), ("layer_norm", 4096), ("rope", 32, 1, 128), ("swiglu", 14336),
            ("geglu", 14336), ("cross_entropy", 128256), ("linear_cross_entropy", 4096, 128256),
        )
    ),
    row("multi_head_linear_cross_entropy", 2, 2048, 2048, 32000, graph=False, reach=_NO_SLOWER_THAN_COMPILED),
)  # fmt: skip

SMALL = (
    row("rms_norm", 64, 128),
    row("add_rms_norm", 64, 128),
    row("layer_norm", 64, 128),
    row("rope", 1, 4, 32, 32, options={"kv_heads": 2}),
    row("swiglu", 64, 256),
    row("geglu", 64, 256),
    row("cross_entropy", 32, 1000),
    row("cross_entropy", 32, 1000, logits="peaked"),
    _linear(64, 32, 1000),
    _linear(64, 32, 1000, logits="peaked"),
    row("logprobs", 32, 1000),
    _linear_logprobs(64, 32, 1000),
    *_linear_kl(64, 32, 1000),
    row("attention_with_sinks", 1, 4, 32, 16, options={"groups": 2}),
    row("experts", 16, 2, 4, 32, options={"inner": 24}),
    row("topk_softmax", 64, 16, options={"top_k": 2, "normalised": True}),
    row("load_balancing_loss", 64, 16, options={"top_k": 2}),
    row("fp8_linear", 64, 32, 48),
    row("lora_linear", 64, 32, 48, 4, options={"scaling": 2.0}),
    row("lora_linears", 64, 32, 48, 40, 4, options={"scaling_0": 2.0}),
    row("multi_head_linear_cross_entropy", 2, 16, 32, 500, graph=False),
)

SUITES: dict[str, tuple[Row, ...]] = {"targets": TARGETS, "paper": PAPER, "odd": ODD, "small": SMALL}


def select(suite: str, ops: tuple[str, ...], shapes: tuple[str, ...]) -> tuple[Row, ...]:
    """The rows of a suite, only those of `ops` if any are named. `shapes`, e.g. "16384x4096", replace the suite's.

    Raises:
        OptionError: an unknown suite or op, or shapes without exactly one op.
        ShapeError: a shape that does not parse or has the wrong number of dimensions.
    """
    if suite not in SUITES:
        raise OptionError(f"--suite {suite} is not known; choose one of {', '.join(SUITES)}.")
    for op in ops:
        if op not in OPS:
            raise OptionError(f"--op {op} is not known; choose from {', '.join(OPS)}.")
    if shapes:
        if len(ops) != 1:
            raise OptionError("--shape requires exactly one --op.")
        return tuple(_shaped(ops[0], text) for text in shapes)
    rows = tuple(r for r in SUITES[suite] if not ops or r.op in ops)
    if not rows:
        raise OptionError(f"--op {', '.join(ops)} is not in suite {suite}; it has {', '.join(_ops_of(suite))}.")
    return rows


def _ops_of(suite: str) -> list[str]:
    return list(dict.fromkeys(r.op for r in SUITES[suite]))


def _shaped(op: str, text: str) -> Row:
    like = next(r for r in SMALL if r.op == op)
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ShapeError(f"--shape {text!r} must be numbers joined by x, such as 16384x4096.") from None
    if len(shape) != len(like.shape) or min(shape) < 1:
        example = "x".join(map(str, like.shape))
        raise ShapeError(f"--shape {text} does not fit {op}: {len(like.shape)} positive numbers, as in {example}.")
    return row(op, *shape, graph=like.graph)
