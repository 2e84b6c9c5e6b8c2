"""The processes of a run, seen from one of them: rank, world size, broadcast and all-gather.

A launcher names the processes by environment variables (see torchrun.py). A single process needs no process group,
except with DeepSpeed and FSDP2, for which it creates one of world size 1.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tigon.errors import ProcessError
from tigon.trainer.distributed import signals

T = TypeVar("T")
_rounds = itertools.count()
SHUTDOWN_S = 180  # time for a checkpoint after the processes were told to stop
LOOK_S = 1  # between two checks that the launcher is alive
LAUNCHER = "TIGON_LAUNCHER"  # the environment variable with the launcher's pid
PATIENCE_S = 1800  # wait for other processes, which may be writing tens of GB; the default of gloo's collectives
MEETING_S = 10  # wait for the other processes before a message about it
ROLL_CALL_S = 2  # wait for the other survivors of a lost process
ALONE_S = 60  # wait of a process that has failed, because the others may be blocked in a collective with it


def started_by_launcher() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    """The number of this process; the main process has 0."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def reserved_address() -> Iterator[dict[str, str]]:
    """A free address on this machine for a process group, as MASTER_ADDR and MASTER_PORT.

    A bound socket reserves the port until the block ends. Another socket can listen on it, because this one does not.
    """
    with socket.socket() as reserving:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserving.getsockname()[1])}


def init_distributed(device: torch.device, *, alone: bool = False) -> None:
    """Connect to the other processes if a launcher started this one.

    Args:
        device: The device of this process.
        alone: Without a launcher, create a process group of world size 1, which DeepSpeed and FSDP2 need.
    """
    if started_by_launcher():
        _init_process_group(device)
    elif alone:
        with reserved_address() as address:
            os.environ.update(address, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
            _init_process_group(device)


def _init_process_group(device: torch.device) -> None:
    """Create the process group: NCCL for CUDA tensors, gloo for CPU tensors such as FSDP2's offloaded states."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:  # Accelerate's default, cpu:0, is a device that torch.load does not accept
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    if not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _waiting_message():
            store = _store_of_restart()
            if store is None:
                distributed.init_process_group(backend)
            else:
                distributed.init_process_group(backend, store=store, rank=rank(), world_size=world_size())


def _store_of_restart() -> Store | None:
    """The store of torchrun's launcher, without what the processes before a restart wrote; None: PyTorch's choice.

    torchrun (2.13) keeps one store through its restarts. There a process may find the address of one that is gone
    instead of the new one. With several nodes the count of restarts may differ from node to node: no common prefix.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or has_several_nodes():
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"restart-{restarts}", store)


@contextmanager
def _waiting_message() -> Iterator[None]:
    """Print a message if the block waits longer than `MEETING_S`: the launcher's variables may be of another job.

    Raises:
        ProcessError: The other processes did not connect within PyTorch's time limit, or the address is not usable.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    who = f"process {rank()} of {world_size()} (RANK, WORLD_SIZE)"
    fix = "for a run of one process, `unset RANK WORLD_SIZE`"
    message = f"{who} is waiting for the others at {where} (MASTER_ADDR, MASTER_PORT); {fix}"
    timer = threading.Timer(MEETING_S, signals.write_stderr, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except distributed.DistError as error:
        text = " ".join(str(error).split())[:160]
        raise ProcessError(f"{who} could not connect to the others at {where}: {text}; {fix}") from None
    finally:
        timer.cancel()


def has_several_nodes() -> bool:
    """Whether other processes of the run are on other machines."""
    return world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first_of_node() -> bool:
    """Whether this process is the first of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


@contextmanager
def main_process_first() -> Iterator[None]:
    """The main process runs the block first, then one process of each other node, then all others.

    So the files in a cache are made once per node, or once if the nodes share the cache.
    """
    if world_size() == 1:
        yield
        return
    n_turns = 3 if has_several_nodes() else 2
    turn = 0 if rank() == 0 else 1 if n_turns == 3 and is_first_of_node() else n_turns - 1
    for _ in range(turn):
        distributed.barrier()
    try:
        yield
    finally:  # also if the main process refuses the run, so that the others refuse it too instead of losing a peer
        for _ in range(n_turns - 1 - turn):
            distributed.barrier()


def end_with_launcher() -> None:
    """Start a thread that ends this process when its launcher is gone: by SIGTERM, and by force after `SHUTDOWN_S`.

    Otherwise the processes of a killed launcher would continue to train, or keep a GPU busy in a collective that never
    ends. For a launcher other than `launch`, the thread cannot notice that it was gone before the thread started.
    """
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    """The thread of `end_with_launcher`.

    PR_SET_PDEATHSIG was rejected: the system sends one signal per thread of the launcher, and the second signal ends
    the process without a checkpoint.
    """
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    # A system timer, in case this thread cannot continue: while Python exits, or if nothing reads stderr.
    signal.setitimer(signal.ITIMER_REAL, SHUTDOWN_S + signals.HANDLER_GRACE_S)
    # Another process may have noticed first, and stopped this one through the all-reduce.
    if not signals.stop_requested():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_S)
    signals.write_stderr(
        f"process {rank()} of {world_size()}: ended, because its launcher is gone and it did not end within "
        f"{SHUTDOWN_S} s of SIGTERM"
    )
    os._exit(signals.EXIT_OFFSET + signal.SIGTERM)


def shutdown_distributed(*, on_every_rank: bool = False) -> None:
    """Destroy the process group, which avoids PyTorch's warning at exit.

    on_every_rank: Every process calls this, so wait for all of them first. Otherwise a launcher would end the others
        when the first one exits.
    """
    if distributed.is_initialized():
        if on_every_rank:
            distributed.barrier()
        distributed.destroy_process_group()


def broadcast(value: T) -> T:
    """The main process's `value`, in every process."""
    if world_size() == 1:
        return value
    objects = [value]
    distributed.broadcast_object_list(objects, src=0)
    return objects[0]


def gather(value: T) -> list[T]:
    """The `value` of every process, by rank, in every process. It has to be something that pickle can copy."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def all_gather_ints(value: int, *, patience_s: float = PATIENCE_S) -> list[int] | None:
    """The `value` of every process, by rank. None if a process gives none within `patience_s` seconds.

    Every process has to call it at the same point. It uses the store of the rendezvous instead of a collective, because
    a process that waits in a collective for a dead process cannot end.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    n, rank, world = next(_rounds), distributed.get_rank(), distributed.get_world_size()
    keys = [f"tigon/{n}/{i}" for i in range(world)]
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(keys[rank], str(value))
        store.wait(keys, timedelta(seconds=patience_s))
        values = [int(text) for text in store.multi_get(keys)]
        store.delete_key(f"tigon/{n - 2}/{rank}")  # every process has read it before it came to this round
    except distributed.DistNetworkError:  # the store was in the launcher, which is gone
        return _all_gather_by_collective(value)
    except distributed.DistError:
        return None
    return values


def silent_processes() -> list[int] | None:
    """The processes that do not say within `ROLL_CALL_S` that they have lost a peer too; None if the store is gone.

    A process calls it after it has lost a peer.
    """
    others = [other for other in range(world_size()) if other != rank()]
    deadline_s = time.monotonic() + ROLL_CALL_S
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"tigon/survivor/{rank()}", "yes")
        while others and time.monotonic() < deadline_s:
            others = [other for other in others if not store.check([f"tigon/survivor/{other}"])]
            time.sleep(0.05)
    except (RuntimeError, ValueError):  # ValueError: there is no process group
        return None
    return others


def _all_gather_by_collective(value: int) -> list[int] | None:
    """`all_gather_ints` by a collective, without a launcher: `end_with_launcher` ends a process that hangs in it."""
    values = [torch.zeros(1, dtype=torch.long) for _ in range(distributed.get_world_size())]
    try:
        distributed.all_gather(values, torch.tensor([value]))
    except RuntimeError:  # a process is gone
        return None
    return [int(tensor) for tensor in values]
