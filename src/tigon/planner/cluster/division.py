"""How a run is divided over a cluster, and how much each kind of activation checkpointing keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tigon.planner.cluster.shape import BF16, ModelShape

Sharding = Literal["none", "optimizer", "gradients", "weights"]
Engine = Literal["PyTorch", "DeepSpeed"]


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The tensors that a layer keeps for its backward pass, and the work that it repeats."""

    name: str
    kept_bytes: Callable[[ModelShape], float]
    """Bytes per token and layer."""
    products: Callable[[ModelShape], float]
    """Share of the forward pass's products of weights that are computed again."""
    attention: bool
    """Whether attention is computed again."""
    others: float
    """Share of the forward pass's other memory traffic that is repeated."""


def _half_of_the_products(shape: ModelShape) -> float:
    """torchtitan saves every second matrix product; those of keys, attention's output and `up` are repeated."""
    repeated = shape.kv_width + shape.attention_width + shape.ffn
    return repeated * shape.hidden / shape.layer_matrix_numel


def _ops_kept(shape: ModelShape) -> float:
    elements = 2 * shape.hidden + 2 * shape.attention_width + shape.kv_width + shape.ffn
    return BF16 * elements


CHECKPOINTING: Mapping[str, Checkpointing] = {
    one.name: one
    for one in (
        Checkpointing(
            name="none", kept_bytes=lambda shape: shape.saved_bytes(), products=lambda _: 0.0, attention=False,
            others=0.0,
        ),
        # The trace of Llama-3.1-8B repeats 0.88 of the forward pass's other traffic.
        Checkpointing(
            name="full", kept_bytes=lambda shape: BF16 * shape.hidden, products=lambda _: 1.0, attention=True,
            others=0.88,
        ),
        # torchtitan's `selective_ac_option = "op"`; described for published runs, not searched
        Checkpointing(
            name="ops", kept_bytes=_ops_kept, products=_half_of_the_products, attention=False, others=0.88,
        ),
        # Megatron's selective recomputation: the scores of attention, which attention by blocks never saves
        Checkpointing(
            name="core", kept_bytes=lambda shape: shape.saved_bytes(), products=lambda _: 0.0, attention=True,
            others=0.0,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Division:
    """One way to spread a run over the GPUs of a cluster.

    Ranks are ordered from the closest: tensor, sequence, data, pipeline.
    """

    sharding: Sharding = "none"
    engine: Engine = "PyTorch"
    whole_layers: bool = True
    """Whether ZeRO-3 gathers the weights of a layer together, as in runs of tigon, and not one by one."""
    data: int = 1
    """Replicas that read different samples."""
    within_node: bool = False
    """Hybrid sharding: `sharding` divides within a node, and nodes hold copies."""
    tensor: int = 1
    """GPUs that divide each matrix, and the tokens of the norms (Megatron's sequence parallelism)."""
    sequence: int = 1
    """GPUs that divide the tokens of a sample, with all-to-alls around attention (Ulysses)."""
    pipeline: int = 1
    chunks: int = 1
    """Groups of layers per pipeline stage (the interleaved schedule)."""
    checkpointing: str = "none"
    offload: bool = False
    """Whether states are on the host between their uses."""
    micro_batch: int = 1
    accumulate: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.sequence * self.pipeline

    @property
    def runs(self) -> bool:
        """Whether `tigon train` can run it. The others are arithmetic only."""
        fsdp = self.sharding == "weights" and self.engine == "PyTorch"
        if self.pipeline > 1 or (self.within_node and not fsdp):
            return False
        plain = not (self.within_node or self.offload) and self.sequence == 1
        return self.tensor == 1 or (fsdp and plain and self.data > 1)

    @property
    def family(self) -> str:
        """What divides what, without the numbers that the search chooses."""
        zero = {"optimizer": 1, "gradients": 2, "weights": 3}
        if self.sharding == "none":
            name = "DDP"
        elif self.engine == "DeepSpeed" or self.sharding != "weights":
            name = f"ZeRO-{zero[self.sharding]}"
        else:
            name = "FSDP2 within nodes" if self.within_node else "FSDP2"
        for word, size in (("TP", self.tensor), ("SP", self.sequence), ("PP", self.pipeline)):
            name += f" + {word} {size}" if size > 1 else ""
        return name + (" + CPU offload" if self.offload else "")

    @property
    def kept(self) -> Checkpointing:
        return CHECKPOINTING[self.checkpointing]
