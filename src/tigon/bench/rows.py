"""What is measured: a row is an op, a shape and options.

Shapes are those of the op's `make`:

- norms: rows x H
- short convolution: batch x tokens x channels
- gated delta rule: B x T x heads of k x heads of v x width
- rope: (B, heads, T, D)
- gated units: rows x F
- cross entropy: N x V
- linear cross entropy: N x H x V, with several heads B x T x H x V
- LoRA linear: rows x H x F x rank
- logprobs: N x V; linear logprobs and linear KL: N x H x V
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tigon.errors import OptionError, ShapeError
from tigon.ops import OPS

Logits = Literal["random", "peaked"]
SMALL, USUAL = "small", "usual"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a suite."""

    op: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    logits: Logits = "random"
    graph: bool = True
    """Judge by CUDA-graph replay. False for rows of tens of milliseconds, where launches do not matter."""
    impls: tuple[str, ...] = ()
    """Measure only these implementations; () means all."""
    limits: tuple[str, ...] = ()
    """Measure only these limits; () means all of the op's. The first one is the row's bound."""
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


@dataclass(frozen=True)
class Sizes:
    """How an op is measured if no suite says otherwise."""

    small: tuple[int, ...]
    """For a CPU."""
    usual: tuple[int, ...]
    """Of a layer of an 8B model in training."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of a training step."""
    small_options: Mapping[str, Any] = field(default_factory=dict)
    graph: bool = True


_LABELS: Mapping[str, Any] = {"ignored": 0.0}
_HEADS = {"hiddens": 3, "weights": 3, "shifts": (2, 3, 4), "head_weights": (1.0, 0.8, 0.64)}
_SIZES: Mapping[str, Sizes] = {
    "rms_norm": Sizes((64, 128), (16384, 4096)),
    "add_rms_norm": Sizes((64, 128), (16384, 4096)),
    "layer_norm": Sizes((64, 128), (16384, 4096)),
    "gated_rms_norm": Sizes((64, 128), (262144, 128)),
    "causal_conv1d": Sizes((1, 64, 128), (1, 8192, 8192), {"activation": "silu"}),
    "gated_delta_rule": Sizes((1, 100, 1, 2, 32), (1, 8192, 16, 32, 128)),
    "rope": Sizes((1, 4, 32, 32), (4, 32, 4096, 128), {"kv_heads": 8}, {"kv_heads": 2}),
    "swiglu": Sizes((64, 256), (16384, 14336)),
    "geglu": Sizes((64, 256), (16384, 14336)),
    "cross_entropy": Sizes((32, 1000), (8192, 128256), {**_LABELS, "inplace": True}),
    "linear_cross_entropy": Sizes((64, 32, 1000), (8192, 4096, 128256), _LABELS, graph=False),
    "logprobs": Sizes((32, 1000), (4096, 128256), _LABELS),
    "linear_logprobs": Sizes((64, 32, 1000), (8192, 4096, 128256), _LABELS, graph=False),
    "linear_kl": Sizes((64, 32, 1000), (8192, 4096, 128256), {"kind": "jsd"}, graph=False),
    "multi_head_linear_cross_entropy": Sizes((2, 16, 32, 500), (2, 2048, 2048, 32000), _HEADS, graph=False),
    "attention_with_sinks": Sizes((1, 4, 32, 16), (1, 64, 4096, 64), {"groups": 8}, {"groups": 2}),
    "shared_prefix_attention": Sizes((1, 4, 37, 16), (1, 32, 3072, 128), {"groups": 4, "branches": 8}, {"groups": 2}),
    "experts": Sizes((16, 2, 4, 32), (8192, 8, 128, 2048), {"inner": 768}, {"inner": 24}, graph=False),
    "topk_sigmoid": Sizes((64, 16), (16384, 256), {"top_k": 8, "groups": 8, "top_groups": 4}, {"top_k": 2}),
    "topk_softmax": Sizes((64, 16), (16384, 128), {"top_k": 8, "normalised": True}, {"top_k": 2}),
    "load_balancing_loss": Sizes((64, 16), (16384, 128), {"top_k": 8}, {"top_k": 2}),
    "fp8_linear": Sizes((64, 32, 48), (8192, 4096, 14336)),
    "lora_linear": Sizes((64, 32, 48, 4), (8192, 4096, 14336, 16), {"scaling": 2.0}),
    "lora_linears": Sizes((64, 32, 48, 40, 4), (8192, 4096, 4096, 1024, 16), {"scaling_0": 2.0}),
}
"""An op that is not listed is measured on its own small case."""


def _sizes(op: str) -> Sizes:
    case = OPS[op].case
    return _SIZES.get(op) or Sizes(case.shape, case.shape, case.options)


def row(op: str, *shape: int, options: Mapping[str, Any] = {}, **fields: Any) -> Row:  # read only
    """A row with the op's usual options, overridden by `options`."""
    sizes = _sizes(op)
    return Row(op=op, shape=shape, options={**sizes.options, **options}, **{"graph": sizes.graph, **fields})


def small_row(op: str, **fields: Any) -> Row:
    """The op's row for a CPU."""
    sizes = _sizes(op)
    options = {**sizes.small_options, **fields.pop("options", {})}
    return row(op, *sizes.small, options=options, **fields)


SUITES: Mapping[str, tuple[Row, ...]] = {
    USUAL: tuple(row(op, *_sizes(op).usual) for op in OPS),
    SMALL: tuple(small_row(op) for op in OPS),
}


def select(
    suites: Mapping[str, tuple[Row, ...]], suite: str, ops: Collection[str], shapes: Collection[str]
) -> tuple[Row, ...]:
    """The rows of a suite, only those of `ops` if any are named. `shapes`, e.g. "16384x4096", replace the suite's.

    Raises:
        OptionError: an unknown suite or op, or shapes without exactly one op.
        ShapeError: a shape that does not parse or has the wrong number of dimensions.
    """
    if suite not in suites:
        raise OptionError(f"--suite {suite} is not known; choose one of {', '.join(suites)}.")
    for op in ops:
        if op not in OPS:
            raise OptionError(f"--op {op} is not known; choose from {', '.join(OPS)}.")
    if shapes:
        if len(ops) != 1:
            raise OptionError("--shape requires exactly one --op.")
        return tuple(_shaped(op, text) for op in ops for text in shapes)
    rows = tuple(r for r in suites[suite] if not ops or r.op in ops)
    if not rows:
        known = dict.fromkeys(r.op for r in suites[suite])
        raise OptionError(f"--op {', '.join(ops)} is not in suite {suite}; it has {', '.join(known)}.")
    return rows


def _shaped(op: str, text: str) -> Row:
    example = _sizes(op).small
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ShapeError(f"--shape {text!r} must be numbers joined by x, such as 16384x4096.") from None
    if len(shape) != len(example) or min(shape) < 1:
        raise ShapeError(
            f"--shape {text} does not fit {op}: {len(example)} positive numbers, as in {'x'.join(map(str, example))}."
        )
    return row(op, *shape)
