"""Several processes: who starts them, and which one this is.

`tigon train` starts one process a GPU itself, by PyTorch's own launcher (torch.distributed.run); started by a launcher,
it joins in. A lone process needs none, but for DeepSpeed and FSDP2 it names itself the only rank of one.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from tigon.errors import ProcessError
from tigon.trainer.distributed import signals

T = TypeVar("T")
_rounds = itertools.count()
SHUTDOWN_S = 180  # for a checkpoint, once the processes have been told to stop
LOOK_S = 1  # between two looks for the launcher
LAUNCHER = "TIGON_LAUNCHER"  # the variable that tells its processes its number
PATIENCE_S = 1800  # for the others, who may be writing tens of GB; the default of gloo's collectives
NAMED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what every launcher sets
OF_ONE_MACHINE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
ACCELERATES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
# Those that a recipe says otherwise; the rest only describes them.
ASKS = (
    "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_TORCH_DEVICE",
)  # fmt: skip
ASKS_NOTHING = ("", "0", "1.0", "false", "no", "none", "off")
MEETING_S = 10  # after which a process says for whom it waits
ALONE_S = 60  # for the others by a process that has failed, for which they may be waiting in a collective


def check_environment() -> None:
    """Refuse a launcher's variables that no launcher would leave, such as `RANK` from another job's shell.

    Raises ProcessError naming the variable and what to do.
    """
    there = [name for name in (*NAMED, *OF_ONE_MACHINE) if name in os.environ]
    # An address alone is read by nobody: cluster images and shell profiles set one.
    stray = [name for name in there if name not in ("MASTER_ADDR", "MASTER_PORT")]
    for name in stray:
        if not re.fullmatch(r"\d{1,9}", os.environ[name]):
            raise _stray(f"{name} is {os.environ[name]!r} in the environment, and a launcher sets a whole number", name)
    missing = [name for name in NAMED if name not in os.environ]
    if stray and missing:
        raise _stray(f"{stray[0]} is set in the environment, and {missing[0]} is not", *stray)
    for part, whole in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if part in there and whole in there and int(os.environ[part]) >= int(os.environ[whole]):
            problem = f"{part} is {os.environ[part]} in the environment, and {whole} is {os.environ[whole]}"
            raise _stray(f"{problem}; it must be less", part, whole)


def _stray(what: str, *names: str) -> ProcessError:
    return ProcessError(f"{what}; `unset {' '.join(names)}` for a run of one process, or start it with torchrun")


def ignore_accelerate_variables() -> list[str]:
    """Remove the variables by which Accelerate would change what the recipe says, and return warnings that name them.

    `accelerate launch` sets them from its own configuration. A run in a mixed precision or with an engine of which
    its recipe, its report and its checkpoints know nothing could not be repeated.
    """
    names = sorted(name for name in os.environ if name.startswith(ACCELERATES))
    values = {name: os.environ.pop(name) for name in names}
    ignored = [
        f"{name}={value}" for name, value in values.items() if name in ASKS and value.lower() not in ASKS_NOTHING
    ]
    return [f"{text} in the environment is ignored: the recipe decides" for text in ignored]


def started_by_launcher() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def reserved_address() -> Iterator[dict[str, str]]:
    """Where processes of this machine can meet, in a launcher's words. Until the block ends the port is theirs: the
    system gives away none to which a socket is bound, and lets one listen there as long as that does not."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}


def init_distributed(device: torch.device, *, alone: bool = False) -> None:
    """Meet the other processes, if a launcher started this one. alone: else be the only rank of one, as DeepSpeed and
    FSDP2 want it."""
    if started_by_launcher():
        _init_process_group(device)
    elif alone:
        with reserved_address() as meeting:
            os.environ.update(meeting, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
            _init_process_group(device)


def _init_process_group(device: torch.device) -> None:
    """Gloo carries what is on the CPU, FSDP2's offloaded states among it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:  # Accelerate's name for it would be cpu:0, for which torch.load knows no place
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    if not distributed.is_initialized():
        with _waiting_is_said():
            distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


@contextmanager
def _waiting_is_said() -> Iterator[None]:
    """Say for whom a process waits that has met nobody for a while: its launcher's variables may be another job's.

    Raises ProcessError where the others have not come within PyTorch's limit of time, or the address is not usable.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    who = f"process {rank()} of {world_size()} (RANK, WORLD_SIZE)"
    way = "`unset RANK WORLD_SIZE` if this run is of one process"
    message = f"{who} is waiting for the others at {where} (MASTER_ADDR, MASTER_PORT); {way}"
    timer = threading.Timer(MEETING_S, signals.say, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except distributed.DistError as error:
        text = " ".join(str(error).split())[:160]
        raise ProcessError(f"{who} has not met the others at {where}: {text}; {way}") from None
    finally:
        timer.cancel()


@contextmanager
def main_process_first() -> Iterator[None]:
    """The first process runs the block, then the others: what the first leaves in a cache is made once."""
    if rank() > 0:
        distributed.barrier()
    try:
        yield
    finally:  # also when the first refuses the run: the others then refuse it too, instead of losing a peer
        if world_size() > 1 and rank() == 0:
            distributed.barrier()


def end_with_launcher() -> None:
    """When the process that started this one is gone, have this one end: by SIGTERM, and by force where that does not
    do within the time that a launcher gives.

    A launcher that was killed would leave its processes to train on, unseen, or to keep a GPU busy in a collective that
    never ends. Of another launcher than `launch` nothing tells whether it is gone already.
    """
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


def _end_with(launcher: int) -> None:
    """A thread. The system would send a signal too (PR_SET_PDEATHSIG), but one for each thread that the launcher had,
    and the second ends the process at once, without a checkpoint."""
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    # The system's clock, for where this thread gets no further: while Python exits, or where nobody reads stderr.
    signal.setitimer(signal.ITIMER_REAL, SHUTDOWN_S + signals.NOTING_S)
    if not signals.is_ending():  # as where another process, which has looked before, has told this one to stop
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_S)
    signals.say(
        f"process {rank()} of {world_size()}: its launcher is gone, and it has not come to its end within "
        f"{SHUTDOWN_S} s of being told to: ended"
    )
    os._exit(signals.EXIT_OFFSET + signal.SIGTERM)


def shutdown_distributed(*, together: bool = False) -> None:
    """Say goodbye to the other processes, and so to PyTorch's warning about those who do not.

    together: wait for all of them before, where the first to go would have a launcher end the others.
    """
    if distributed.is_initialized():
        if together:
            distributed.barrier()
        distributed.destroy_process_group()


def broadcast(value: T) -> T:
    """The first process's `value`, everywhere."""
    if world_size() == 1:
        return value
    words = [value]
    distributed.broadcast_object_list(words, src=0)
    return words[0]


def all_gather_ints(value: int, *, patience_s: float = PATIENCE_S) -> list[int] | None:
    """What all processes say, by rank; they are asked at once. None: one has said nothing within `patience_s`.

    By the store over which they met, not by a collective: a process that waits in vain for one cannot end either.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    n, rank, world = next(_rounds), distributed.get_rank(), distributed.get_world_size()
    keys = [f"tigon/{n}/{i}" for i in range(world)]
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(keys[rank], str(value))
        store.wait(keys, timedelta(seconds=patience_s))
        values = [int(word) for word in store.multi_get(keys)]
        store.delete_key(f"tigon/{n - 2}/{rank}")  # all have read it, as all have come to this round
    except distributed.DistNetworkError:  # the store was the launcher's, and is gone with it
        return _all_gather_by_collective(value)
    except distributed.DistError:
        return None
    return values


def _all_gather_by_collective(value: int) -> list[int] | None:
    """What all processes say, where it is no matter if it is waited for in vain: without a launcher a process ends in
    time whatever it does."""
    values = [torch.zeros(1, dtype=torch.long) for _ in range(distributed.get_world_size())]
    try:
        distributed.all_gather(values, torch.tensor([value]))
    except RuntimeError:  # a process is gone
        return None
    return [int(word) for word in values]


def launch(path: Path, overrides: Sequence[str], n_processes: int, *, resume: bool) -> int:
    """Run the same command in `n_processes` processes; the exit code of the first that failed, or 0.

    A signal is passed on to them, and its exit code returned when they have saved. Raises ProcessError for one that was
    killed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun sets it to 1 with a warning
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n_processes)))
    words = [word for text in overrides for word in ("--set", text)]
    options = ["--standalone", f"--nproc-per-node={n_processes}"]  # SIGTERM and SIGINT are passed on by default
    known = {option for action in run.get_args_parser()._actions for option in action.option_strings}
    if "--shutdown-timeout" in known:  # PyTorch up to 2.11 has 30 s and no option
        options.append(f"--shutdown-timeout={SHUTDOWN_S}")
    arguments = [*options, "-m", "tigon", "train", str(path), *words, *(["--resume"] if resume else [])]
    os.environ[LAUNCHER] = str(os.getpid())
    sys.stdout.flush()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes have said it themselves
    try:
        run.run(run.parse_args(arguments))
    except SignalException as error:
        return signals.EXIT_OFFSET + int(error.sigval)
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda item: (item[1].timestamp, not _was_killed(item[1])))
        code = int(first.exitcode)
        if code < 0:
            raise ProcessError(
                f"process {rank} of {n_processes} was killed ({signals.signal_name(-code)}), and the others were "
                "ended; the kernel's log names the cause if memory was short. Continue from the last checkpoint with "
                "--resume"
            ) from None
        return code
    finally:
        del os.environ[LAUNCHER]  # for what else this process starts it is none
    return 0


def _was_killed(failure: Any) -> bool:
    """Not by the launcher. Of those that ended in the same second it is the cause, and the others have missed it."""
    return bool(failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM)
