"""Formats a plan of a cluster as a mapping for JSON and as text for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tigon.planner.cluster.search import ClusterPlan, PlannedDivision
from tigon.planner.cluster.topology import Cluster
from tigon.planner.cluster.traffic import shard_group
from tigon.planner.gpus import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RUN_BY = {True: "tigon", False: "others"}
"""The mark of a division by whether `tigon train` runs it."""
WIDE_NODES = 16
"""On so many nodes a published run of FSDP was 3% slower than on one; ZeRO-3 on more nodes was much slower than planned
(docs/cluster-plans.md)."""
_SHOWN_OTHERS = 8


def as_mapping(plan: ClusterPlan) -> dict[str, Any]:
    """The whole plan as JSON values, in bytes and seconds."""
    work, cluster = plan.work, plan.cluster
    return {
        "model": work.shape.name, "parameters": work.shape.numel, "seq": work.seq, "samples": work.samples,
        "states": work.states, "fp8": work.fp8,
        "cluster": {
            "gpu": cluster.gpu.name, "gpus_per_node": cluster.gpus_per_node, "nodes": cluster.nodes,
            "gpus": cluster.gpus, "peer_bytes_s": cluster.gpu.peer_bytes_s, "link_bytes_s": cluster.link_bytes_s,
            "memory_bytes": cluster.gpu.memory_bytes,
        },
        "divisions": [_division(one, cluster) for one in plan.divisions],
    }  # fmt: skip


def _division(one: PlannedDivision, cluster: Cluster) -> dict[str, Any]:
    return {
        "division": one.division.family, "runs": one.division.runs, "fits": one.fits, **asdict(one.division),
        "memory": dict(one.memory.components), "device_bytes": one.memory.device,
        "host_loading_bytes": one.memory.host_loading, "host_training_bytes": one.memory.host_training,
        "step_s": one.time.seconds, "step_parts_s": dict(one.time.parts), "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu, "traffic": traffic(one, cluster),
    }  # fmt: skip


def traffic(one: PlannedDivision, cluster: Cluster) -> list[dict[str, Any]]:
    """Per collective and what it moves: bytes per GPU and step, and how many of them cross nodes."""
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(
        lambda: {"received_bytes": 0.0, "over_link_bytes": 0.0, "seconds": 0.0}
    )
    for transfer in one.time.transfers:
        row = rows[transfer.collective, transfer.what]
        row["received_bytes"] += transfer.received(cluster)
        row["over_link_bytes"] += transfer.over_link(cluster)
        row["seconds"] += transfer.seconds(cluster)
    return [{"collective": collective, "what": what, **row} for (collective, what), row in rows.items()]


def show(plan: ClusterPlan, console: Console) -> None:
    """Print the divisions, and the memory, the time and the traffic of the first."""
    work, cluster = plan.work, plan.cluster
    link = f", {8 * cluster.link_bytes_s / 1e9:,.0f} Gb/s per GPU between nodes" if cluster.nodes > 1 else ""
    console.print(
        f"[bold]{work.shape.name}[/bold] ({work.shape.numel / 1e9:.1f} B parameters), {work.samples:,} samples of "
        f"{work.seq:,} tokens per step, on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name} "
        f"({cluster.gpu.memory_bytes / GIB:.1f} GiB{link})", soft_wrap=True,
    )  # fmt: skip
    fitting = [one for one in plan.divisions if one.fits]
    others = [one for one in plan.divisions if not one.fits]
    if fitting:
        console.print("\n[bold]Divisions that fit[/bold], fastest first")
        console.print(_table(fitting, cluster))
        _details(fitting[0], cluster, console)
    else:
        console.print("\n[bold]No division fits.[/bold] Add nodes, or lower --seq or --batch.", soft_wrap=True)
    if others:
        console.print("\n[bold]Divisions that do not fit[/bold], least memory first")
        console.print(_table(others[:_SHOWN_OTHERS], cluster))
    _notes(plan, fitting, console)


def _table(rows: list[PlannedDivision], cluster: Cluster) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("#", "division", "run by", "batch", "checkpointing", "GPU GiB", "host GiB", "step", "tokens/s",
                  "MFU", "GB moved", "on links"):  # fmt: skip
        table.add_column(title, justify="left" if title in ("division", "run by", "checkpointing") else "right")
    for number, one in enumerate(rows, 1):
        division, moved = one.division, traffic(one, cluster)
        table.add_row(
            str(number), division.family, RUN_BY[division.runs],
            f"{division.micro_batch} x {division.accumulate}", division.checkpointing,
            f"{one.memory.device / GIB:.1f}", f"{one.memory.host / GIB:,.0f}", _seconds(one.time.seconds),
            f"{one.tokens_per_s:,.0f}", f"{one.mfu:.0%}", _gigabytes(sum(row["received_bytes"] for row in moved)),
            _gigabytes(sum(row["over_link_bytes"] for row in moved)),
        )  # fmt: skip
    return table


def _details(one: PlannedDivision, cluster: Cluster, console: Console) -> None:
    """The parts of one division's memory, time and traffic."""
    console.print(f"\n[bold]{one.division.family}[/bold]", highlight=False)
    memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.memory.components.items() if size)
    console.print(f"GiB per GPU: {memory}", soft_wrap=True)
    parts = ", ".join(f"{name} {_seconds(part)}" for name, part in one.time.parts.items() if part >= 5e-4)
    console.print(f"step: {parts}", soft_wrap=True)
    for row in traffic(one, cluster):
        console.print(
            f"{row['collective']} of {row['what']}: {_gigabytes(row['received_bytes'])} GB per GPU and step, "
            f"{_gigabytes(row['over_link_bytes'])} GB over links, {_seconds(row['seconds'])}", soft_wrap=True,
        )  # fmt: skip


def _notes(plan: ClusterPlan, fitting: list[PlannedDivision], console: Console) -> None:
    found = [
        "Arithmetic, not measured. docs/cluster-plans.md compares it with published runs.",
        "run by others: `tigon train` does not run this division. The plan shows what it would take.",
        "batch: samples of a replica's micro-batch x micro-batches per step. host GiB: per node, while a checkpoint is "
        "read or for offloaded states. GB moved: received by a GPU per step; on links: from other nodes.",
    ]
    if any(_sharded_widely(one, plan.cluster) for one in fitting):
        found.append(
            f"Weights sharded over more than {WIDE_NODES} nodes: the published runs of ZeRO-3 on 48 to 280 nodes took "
            "1.3 to 4 times as long as planned."
        )
    first = next((one for one in fitting if one.division.runs), None)
    if first is not None:
        found.append(f"The fastest that tigon runs: {first.division.family} ({_recipe(first, plan.cluster)}).")
    if any(one.division.runs and one.division.tensor > 1 for one in fitting):
        found.append(
            "With TP, the plan divides the tokens of norms too. tigon does not, so its layers keep more activations."
        )
    for note in found:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _sharded_widely(one: PlannedDivision, cluster: Cluster) -> bool:
    return one.division.sharding == "weights" and shard_group(one.division, cluster).nodes > WIDE_NODES


def _recipe(one: PlannedDivision, cluster: Cluster) -> str:
    """The recipe's keys of a division that tigon trains."""
    division = one.division
    zero: Mapping[str, int] = {"optimizer": 1, "gradients": 2, "weights": 3}
    keys = [f"train.batch_size={division.micro_batch}", f"train.gradient_accumulation={division.accumulate}"]
    if division.sequence > 1:
        keys.append(f"sharding.sequence={division.sequence}")
    if division.tensor > 1:
        keys.append(f"sharding.tensor={division.tensor}")
    if division.within_node:
        keys.append(f"sharding.replicas={cluster.nodes}")
    if division.engine == "DeepSpeed":
        keys.append(f"sharding.zero={zero[division.sharding]}")
    elif division.sharding == "weights":
        keys.append("sharding.fsdp=true")
    if division.offload:
        keys.append("sharding.offload=cpu")
    if division.checkpointing != "none":
        keys.append(f"train.checkpointing={division.checkpointing}")
    return ", ".join(keys)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _gigabytes(nbytes: float) -> str:
    gigabytes = nbytes / 1e9
    return f"{gigabytes:,.0f}" if gigabytes >= 100 else f"{gigabytes:.1f}"
