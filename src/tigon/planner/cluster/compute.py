"""The time that one GPU computes: products at the GPU's measured rate, other operators at its memory's bandwidth.

The shares of the rates are those of the one-GPU roofline (simulate/roofline.py). The memory traffic per saved byte is
that of the trace of Llama-3.1-8B (planner/trace).
"""

from __future__ import annotations

from dataclasses import dataclass

from tigon.planner.cluster.division import Division
from tigon.planner.cluster.shape import ModelShape
from tigon.planner.gpus import Gpu
from tigon.planner.simulate.roofline import COPY_SHARE, PRODUCT_SHARE
from tigon.planner.trace.attention import product_share


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The counts of Llama-3.1-8B's trace with one set of kernels."""

    saved: float
    """Saved bytes, relative to `ModelShape.saved_bytes`."""
    forward: float
    """Bytes that a layer moves beside its products in its forward pass, per byte of `ModelShape.saved_bytes`."""
    backward: float
    host_calls: int
    """Operators of a layer's two passes on the CPU."""
    repeated_host_calls: int
    """Operators that full checkpointing adds."""


FUSED = Kernels(saved=1.0, forward=1.48, backward=2.41, host_calls=483, repeated_host_calls=183)
UNFUSED = Kernels(saved=1.46, forward=4.39, backward=9.56, host_calls=666, repeated_host_calls=243)
_AUTOCAST = {
    FUSED: Kernels(saved=1.40, forward=3.12, backward=5.17, host_calls=586, repeated_host_calls=235),
    UNFUSED: Kernels(saved=1.84, forward=5.90, backward=12.9, host_calls=773, repeated_host_calls=301),
}
"""The same under autocast, which keeps the inputs of the layers in fp32 and casts the weights."""

LOSS_MOVED = {True: 1.2, False: 47.0}
"""Bytes that the loss moves per token and word of the vocabulary, by whether it is fused."""
SCORE_MOVED, SCORE_REPEATED = 32.0, 11.0
"""Bytes that attention with whole score matrices moves per head and pair of tokens: in both passes, and if they are
computed again. It reads and writes 16-bit scores, their softmax, and dropout with its mask."""
FP8_CASTS = 9.0
"""Bytes that casts to FP8 move per element of a product's input or output: read twice, written for both layouts."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training of one step, whatever the division."""

    shape: ModelShape
    seq: int
    samples: int
    """Samples per step over all GPUs."""
    states: str = "amp-bf16"
    """amp-bf16: 16-bit products, fp32 weights and states; bf16: everything in 16 bits."""
    fp8: bool = False
    """Whether the layers' products are FP8."""
    kernels: Kernels = FUSED
    fused_loss: bool = True
    flash: bool = True
    """Whether attention works by blocks and skips masked ones. Otherwise it writes whole score matrices."""
    gather_itemsize: int = 2
    """Bytes per element of gathered weights."""
    reduce_itemsize: int | None = None
    """Bytes per element of reduced gradients; None: as the engine does it in tigon."""
    reduces_each: bool = False
    """Whether FSDP2 reduces gradients after every micro-batch. Accelerate reduces after the last one."""

    @property
    def tokens(self) -> int:
        return self.samples * self.seq


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer and of the head for one micro-batch on one GPU."""

    forward_s: float
    backward_s: float
    """With what checkpointing repeats."""
    head_s: float
    """The head and the loss, both passes."""
    host_s: float
    """CPU time of a layer's operators."""


def under_autocast(work: Workload, division: Division) -> bool:
    """Whether the layers run under autocast. Only DDP does this; the other engines compute in 16 bits."""
    alone = division.tensor * division.pipeline == 1
    return division.sharding == "none" and alone and work.states == "amp-bf16"


def kernels_of(work: Workload, division: Division) -> Kernels:
    """The counts of the trace for the kernels of `work` under this division."""
    return _AUTOCAST.get(work.kernels, work.kernels) if under_autocast(work, division) else work.kernels


def local_tokens(work: Workload, division: Division) -> float:
    """Tokens of a micro-batch on one GPU before tensor parallelism divides them."""
    return division.micro_batch * work.seq / division.sequence


def layer_time(work: Workload, division: Division, gpu: Gpu) -> LayerTime:
    """The time of a layer; `division` divides its work by tensor and sequence."""
    shape, kept, kernels = work.shape, division.kept, kernels_of(work, division)
    tokens = local_tokens(work, division) / division.tensor
    linear_s = tokens * 2 * shape.layer_matrix_numel / _linear_rate(work, gpu)
    attention = tokens * 4 * shape.attention_width * work.seq * (0.5 if work.flash else 1.0)
    attention_s = attention / (gpu.matmul_flops * PRODUCT_SHARE * product_share(shape.head_width, gpu.arch))
    # Attention by blocks computes the scores again, so its backward pass has five products; the other kind has four.
    attention_back = 2.5 if work.flash else 2.0
    saved = tokens * shape.saved_bytes()
    forward_moved, backward_moved = kernels.forward * saved, kernels.backward * saved + _casts(work, tokens)
    repeated_moved = kept.others * forward_moved
    if not work.flash:
        scores = tokens * shape.query_heads * work.seq
        forward_moved += 0.4 * SCORE_MOVED * scores
        backward_moved += 0.6 * SCORE_MOVED * scores
        repeated_moved += SCORE_REPEATED * scores if kept.attention else 0.0
    repeated_s = kept.products(shape) * linear_s + attention_s * _repeated_attention(work, division)
    rate = gpu.copy_bytes_s * COPY_SHARE
    calls = kernels.host_calls + (kernels.repeated_host_calls if kept.others else 0)
    return LayerTime(
        forward_s=linear_s + attention_s + forward_moved / rate,
        backward_s=2 * linear_s + attention_back * attention_s + repeated_s + (backward_moved + repeated_moved) / rate,
        head_s=_head_s(work, tokens, gpu), host_s=calls * gpu.host_s,
    )  # fmt: skip


def _repeated_attention(work: Workload, division: Division) -> float:
    """Share of the forward pass of attention that checkpointing repeats.

    Megatron's selective recomputation repeats one of two products, and attention by blocks has it in its own count.
    """
    if not division.kept.attention:
        return 0.0
    return 1.0 if division.checkpointing == "full" else 0.0 if work.flash else 0.5


def _linear_rate(work: Workload, gpu: Gpu) -> float:
    return (gpu.fp8_flops if work.fp8 else gpu.matmul_flops) * PRODUCT_SHARE


def _casts(work: Workload, tokens: float) -> float:
    """Bytes of the casts of a layer's inputs and gradients to FP8."""
    shape = work.shape
    elements = 3 * shape.hidden + 2 * shape.attention_width + 2 * shape.kv_width + 3 * shape.ffn
    return FP8_CASTS * elements * tokens if work.fp8 else 0.0


def _head_s(work: Workload, tokens: float, gpu: Gpu) -> float:
    products_s = 6 * tokens * work.shape.head_numel / (gpu.matmul_flops * PRODUCT_SHARE)
    return products_s + tokens * work.shape.vocab * LOSS_MOVED[work.fused_loss] / (gpu.copy_bytes_s * COPY_SHARE)


def model_flops(work: Workload) -> float:
    """FLOPs of a step without what is repeated: 6 per parameter of a matrix and token, and half of attention."""
    shape = work.shape
    per_token = 6 * (shape.layers * shape.layer_matrix_numel + shape.head_numel)
    return work.tokens * (per_token + shape.layers * 6 * shape.attention_width * work.seq)
