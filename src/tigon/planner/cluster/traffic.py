"""What each collective of a division moves in one step.

Weights and gradients move between the data-parallel GPUs, activations between those that divide a layer, and the
inputs of a stage between pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from tigon.planner.cluster.compute import Workload, local_tokens
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.memory import FP32, shard_ranks, stage_numel
from tigon.planner.cluster.shape import BF16
from tigon.planner.cluster.topology import Cluster, Collective, Group


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Equal collectives of one step on one GPU."""

    what: str
    collective: Collective
    nbytes: float
    """The tensor of one collective (Cluster.received)."""
    count: float
    group: Group

    def received(self, cluster: Cluster) -> float:
        """Bytes that a GPU receives in a step."""
        return self.count * cluster.received(self.collective, self.nbytes, self.group)

    def over_link(self, cluster: Cluster) -> float:
        """The bytes per GPU that cross nodes in a step."""
        return self.count * cluster.over_link(self.collective, self.nbytes, self.group)

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of all of them, one after another."""
        return self.count * cluster.seconds(self.collective, self.nbytes, self.group)


def shard_group(division: Division, cluster: Cluster) -> Group:
    """The GPUs that share weights, gradients or optimizer states."""
    ranks = division.data * division.sequence if division.sharding == "none" else shard_ranks(division, cluster)
    return cluster.group(ranks, inner=division.tensor)


def weight_gathers(division: Division) -> int:
    """Gathers of each weight per step: for both passes of a micro-batch, once before the step, or once after it."""
    if division.sharding == "none":
        return 0
    if division.sharding != "weights" or division.pipeline > 1:
        return 1
    return 2 * division.accumulate


def gradient_reductions(work: Workload, division: Division) -> int:
    """Reductions of each gradient per step.

    DeepSpeed's stages 2 and 3 reduce in every micro-batch, the others after the last one.
    """
    every = division.engine == "DeepSpeed" and division.sharding in ("gradients", "weights")
    return division.accumulate if every or (work.reduces_each and division.sharding == "weights") else 1


def reduced_itemsize(work: Workload, division: Division) -> int:
    """Bytes per element of gradients as they are reduced.

    With fp32 weights, DDP's gradients are fp32 and FSDP2 sums in fp32 (trainer/trainer.py). Megatron-LM's layout keeps
    fp32 gradients. DeepSpeed reduces 16-bit gradients.
    """
    if work.reduce_itemsize is not None:
        return work.reduce_itemsize
    if division.engine == "DeepSpeed" or (work.states == "bf16" and division.tensor * division.pipeline == 1):
        return BF16
    return BF16 if work.states == "bf16" and division.sharding == "weights" else FP32


def data_transfers(work: Workload, division: Division, cluster: Cluster) -> list[Transfer]:
    """Weights and gradients."""
    numel, group = stage_numel(work, division), shard_group(division, cluster)
    units = -(-work.shape.layers // division.pipeline) + 1  # one collective per layer, and one for the rest
    reductions, itemsize = gradient_reductions(work, division), reduced_itemsize(work, division)
    gradients: Collective = "all-reduce" if division.sharding == "none" else "reduce-scatter"
    found = [
        Transfer(
            what="gradients", collective=gradients, nbytes=itemsize * numel / units,
            count=reductions * units, group=group,
        )
    ]  # fmt: skip
    if gathers := weight_gathers(division):
        found.append(
            Transfer(
                what="weights", collective="all-gather", nbytes=work.gather_itemsize * numel / units,
                count=gathers * units, group=group,
            )
        )  # fmt: skip
    copies = division.data * division.sequence // group.size
    if division.within_node and copies > 1:
        found.append(
            Transfer(
                what="gradients between nodes", collective="all-reduce",
                nbytes=itemsize * numel / units / group.size, count=reductions * units,
                group=cluster.group(copies, inner=division.tensor * group.size),
            )
        )  # fmt: skip
    return found


def activation_transfers(work: Workload, division: Division, cluster: Cluster) -> list[Transfer]:
    """Activations between GPUs that divide a layer or the layers. No computation hides them."""
    shape, tokens = work.shape, local_tokens(work, division)
    layers, found = -(-shape.layers // division.pipeline) * division.accumulate, []
    repeated = 2 if division.checkpointing == "full" else 0
    if division.tensor > 1:
        # two blocks per layer: gathered before, reduced after, in each pass
        group = cluster.group(division.tensor)
        both: tuple[Collective, ...] = ("all-gather", "reduce-scatter")
        found += [
            Transfer(
                what="activations (TP)", collective=collective, nbytes=BF16 * tokens * shape.hidden,
                count=(4 + repeated) * layers, group=group,
            )
            for collective in both
        ]  # fmt: skip
    if division.sequence > 1:
        group = cluster.group(division.sequence, inner=division.tensor)
        # queries, keys and values to the GPUs of their heads, and attention's output back
        width = 2 * shape.attention_width + 2 * shape.kv_width
        found.append(
            Transfer(
                what="activations (SP)", collective="all-to-all", nbytes=BF16 * tokens * width / division.tensor / 2,
                count=(4 + repeated) * layers, group=group,
            )
        )  # fmt: skip
    if division.pipeline > 1:
        # If stages are on several nodes, the slowest pair of neighbours is on two.
        group = Group(1, 2) if division.gpus > cluster.gpus_per_node else Group(2, 1)
        found.append(
            Transfer(
                what="activations (PP)", collective="send", nbytes=BF16 * tokens * shape.hidden / division.tensor,
                count=2 * division.chunks * division.accumulate, group=group,
            )
        )  # fmt: skip
    return found
