"""The machines (nodes) of a run: from `--nnodes` and `--rdzv`, or from the variables of SLURM or a PyTorchJob.

| started by | each node's process | source |
|---|---|---|
| `tigon train --nnodes N --rdzv HOST:PORT` | starts its node's processes | the options |
| `srun` with one task per node | starts its node's processes | SLURM_STEP_* |
| a PyTorchJob | starts its pod's processes | PET_*, or RANK and WORLD_SIZE without LOCAL_RANK |
| `srun` with one task per GPU | is one process of the run | SLURM_STEP_*, which `join_slurm_step` translates |
| torchrun, `accelerate launch` | is one process of the run | RANK, LOCAL_RANK, WORLD_SIZE |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tigon.errors import ProcessError

LAST_PORT = 65535
POD_PORT = 23456  # the default of the PyTorchJob operator
SLURM_PORTS = (20_000, 10_000)  # the first port, and the number of ports that jobs share


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as one of them sees them."""

    count: int
    host: str
    """The node that keeps the store of the rendezvous."""
    port: int
    rank: int | None = None
    """The number of this node; node 0 is the host. None: the rendezvous gives each node its number."""
    max_restarts: int = 0
    """How often the processes are started again after one of them failed."""
    typed: bool = False
    """Whether the options of `tigon train` name them, instead of the environment."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def options(self) -> str:
        """The options for every node; empty if the environment names the nodes."""
        if not self.typed:
            return ""
        meeting = f"--nnodes {self.count} --rdzv {self.address} " if self.count > 1 else ""
        return f"{meeting}{f'--max-restarts {self.max_restarts}' if self.max_restarts else ''}".strip()


def from_options(nnodes: int | None, rdzv: str | None, node_rank: int | None, max_restarts: int | None) -> Nodes | None:
    """The nodes that the options of `tigon train` name; None without `--nnodes` and `--max-restarts`.

    Raises:
        ProcessError: A value is out of its range, or `--rdzv` is missing or malformed.
    """
    if max_restarts is not None and max_restarts < 0:
        raise ProcessError(f"--max-restarts is {max_restarts}, but must be at least 0")
    if nnodes is None:
        for option, value in (("--rdzv", rdzv), ("--node-rank", node_rank)):
            if value is not None:
                raise ProcessError(f"{option} {value} requires --nnodes N, the number of machines")
        if max_restarts is None:
            return None
        nnodes = 1
    if nnodes < 1:
        raise ProcessError(f"--nnodes is {nnodes}, but must be at least 1")
    if node_rank is not None and not 0 <= node_rank < nnodes:
        raise ProcessError(f"--node-rank is {node_rank}, but must be from 0 to {nnodes - 1} (--nnodes {nnodes})")
    if rdzv is None:
        if nnodes > 1:
            raise ProcessError(
                f"--nnodes {nnodes} requires --rdzv HOST:PORT: the address of one of the machines and a free port "
                "there, the same on every machine"
            )
        return Nodes(1, "127.0.0.1", 0, 0, max_restarts or 0, typed=True)
    host, port = parse_address(rdzv, "--rdzv")
    return Nodes(nnodes, host, port, node_rank, max_restarts or 0, typed=True)


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address stands in brackets. name: The option, for the message."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):(\d+)", text)
    if match is None:
        raise ProcessError(f"{name} is {text!r}, but must be HOST:PORT, such as node-1:29500")
    port = int(match[2])
    if not 1 <= port <= LAST_PORT:
        raise ProcessError(f"{name} is {text!r}, but its port must be from 1 to {LAST_PORT}")
    return match[1].strip("[]"), port


def nodes_of_run(
    options: Nodes | None, processes: int, environment: MutableMapping[str, str] = os.environ
) -> Nodes | None:
    """The nodes of this run; None if it has one machine, or if this process is one of those that a launcher started.

    A task of `srun` that stands for one GPU gets the variables of such a process here.

    Args:
        options: The nodes that the options name.
        processes: The number of processes per node, `sharding.gpus`.
        environment: The variables of this process, which are changed.

    Raises:
        ProcessError: Options and variables contradict each other, or a variable is malformed.
    """
    if "LOCAL_RANK" in environment:
        if options is not None:
            raise ProcessError(
                "--nnodes and --max-restarts start processes, but another launcher has started this one (LOCAL_RANK is "
                "set); leave these options out, or `unset RANK LOCAL_RANK WORLD_SIZE`"
            )
        return None
    if options is not None:
        _forget_pod(environment)
        return options
    pod = _of_pod(environment, processes)
    if pod is not None:
        _forget_pod(environment)
        return pod if pod.count > 1 else None
    if "RANK" in environment or _number(environment, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    return _of_slurm_step(environment, processes)


def _forget_pod(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that number the pods, because this process starts others and numbers them."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)


def _of_pod(environment: Mapping[str, str], processes: int) -> Nodes | None:
    """The nodes of a PyTorchJob, whose pods have RANK but not LOCAL_RANK; None for anything else."""
    count = environment.get("PET_NNODES")
    if count is None:
        # Operators without PET_* number the pods by RANK. A pod with one process is a process of the run.
        if processes == 1 or not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
            return None
        count = environment["WORLD_SIZE"]
    low, _, high = count.partition(":")
    if high and high != low:
        raise ProcessError(
            f"PET_NNODES is {count} in the environment, but the number of nodes is fixed; set minReplicas and "
            "maxReplicas of the PyTorchJob's elasticPolicy to one number"
        )
    n_nodes = _whole(low, "PET_NNODES" if "PET_NNODES" in environment else "WORLD_SIZE")
    per_pod = environment.get("PET_NPROC_PER_NODE", "auto")
    if per_pod not in ("auto", "1", "gpu", "cpu") and per_pod != str(processes):
        raise ProcessError(
            f"PET_NPROC_PER_NODE is {per_pod} in the environment (nprocPerNode of the PyTorchJob), but sharding.gpus "
            f"is {processes}; use --gpus {per_pod}"
        )
    restarts = _number(environment, "PET_MAX_RESTARTS", 0)
    rank = environment.get("PET_NODE_RANK") or environment.get("RANK")
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        host, port = parse_address(endpoint if ":" in endpoint else f"{endpoint}:{POD_PORT}", "PET_RDZV_ENDPOINT")
    else:
        host = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR", "")
        text = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or str(POD_PORT)
        if not host and n_nodes > 1:
            raise ProcessError(
                "PET_NNODES is set in the environment, but MASTER_ADDR and PET_RDZV_ENDPOINT are not; name the "
                "machines with --nnodes and --rdzv HOST:PORT"
            )
        host, port = parse_address(f"{host or 'localhost'}:{text}", "MASTER_ADDR:MASTER_PORT")
    return Nodes(n_nodes, host, port, None if rank is None else _whole(rank, "RANK"), restarts)


def _of_slurm_step(environment: MutableMapping[str, str], processes: int) -> Nodes | None:
    """The nodes of a step of SLURM with one task per node; for one task per GPU None, after its variables are set."""
    tasks, count = (_number(environment, f"SLURM_STEP_NUM_{what}", 1) for what in ("TASKS", "NODES"))
    host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    first, n_ports = SLURM_PORTS
    port = first + (31 * _number(environment, "SLURM_JOB_ID", 0) + _number(environment, "SLURM_STEP_ID", 0)) % n_ports
    if tasks == count:
        return Nodes(count, host, port, _number(environment, "SLURM_NODEID", 0))
    if processes > 1 and tasks % processes:
        raise ProcessError(
            f"srun started {tasks} tasks on {count} nodes (SLURM_STEP_NUM_TASKS), but sharding.gpus is {processes}; "
            "start one task per node (--ntasks-per-node=1), or one per GPU"
        )
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks // max(1, count)))
    sizes = [
        _whole(size, "SLURM_STEP_TASKS_PER_NODE")
        for size, times in re.findall(r"([^,()]+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    node = min(_number(environment, "SLURM_NODEID", 0), len(sizes) - 1)
    environment.update(
        RANK=str(_number(environment, "SLURM_PROCID", 0)), WORLD_SIZE=str(tasks),
        LOCAL_RANK=str(_number(environment, "SLURM_LOCALID", 0)), LOCAL_WORLD_SIZE=str(sizes[node]),
        MASTER_ADDR=host, MASTER_PORT=str(port),
    )  # fmt: skip
    return None


def first_host(node_list: str) -> str:
    """The first host of SLURM's list of nodes, such as `gpu[07-09,12]`, without a call of scontrol."""
    match = re.match(r"([^,\[\s]+)(?:\[(\w+)[^\]]*\]([^,\s]*))?", node_list)
    if match is None:
        raise ProcessError(
            f"SLURM_STEP_NODELIST is {node_list!r} in the environment, but must name the nodes of the step; name the "
            "machines with --nnodes and --rdzv HOST:PORT"
        )
    return "".join(part or "" for part in match.groups())


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    return _whole(environment[name], name) if environment.get(name) else default


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ProcessError(f"{name} is {text!r} in the environment, but must be a whole number")
    return int(text)
