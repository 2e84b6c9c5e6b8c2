"""Starts the processes of one node of a run, by PyTorch's elastic agent, and reports which process or node failed.

The agent (torch.distributed.elastic) starts the processes, watches them and starts them again. Its rendezvous brings
the nodes together. This file adds what a user needs to know: which node is still missing, which process failed first on
which node, and where its log is.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from tigon.errors import ProcessError
from tigon.recipe.keys import OutputConfig
from tigon.trainer.distributed import launch, launch_folder, signals
from tigon.trainer.distributed.failures import (
    NODE,
    Failure,
    first_cause,
    lost_nodes_error,
    message_of,
    process_error,
    sentence,
    tail_of,
)
from tigon.trainer.distributed.node_watch import Member, NodeWatch, as_text, member_from, processes_of
from tigon.trainer.distributed.nodes import Nodes

RUN_ID = "tigon"
JOIN_S = 1800  # wait for all nodes, which a cluster may start one after another
RESOLVE_S = 60  # wait for the host's name, which a cluster may make known late
STOP_S = 5  # from SIGTERM to SIGKILL for processes that have lost a peer
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
STORE_S = 60  # wait of one call of the store


@dataclass(frozen=True)
class NodeLaunch:
    """The processes to start on this node."""

    nodes: Nodes
    arguments: Sequence[str]
    """The words after `python`."""
    processes: int
    output: OutputConfig
    recipe: str
    """A digest of the recipe, which has to be the same on every node."""
    options: str = ""
    """The options of `tigon train` that started this launcher, for the command that continues the run."""
    number_before: int | None = None
    """This node's number in the run to resume, if its files are on the node's own disk."""

    @property
    def logs(self) -> Path:
        """The folder of this node's logs."""
        return launch_folder.logs(self.output) / f"{socket.gethostname()}-{os.getpid()}"


def launch_node(plan: NodeLaunch) -> int:
    """Start the processes of this node, and restart them together with those of the other nodes.

    Returns:
        0; or the exit code of the process that failed first and has printed its error; or after a signal 128 plus its
        number.

    Raises:
        ProcessError: A process was killed, a node was lost, or the nodes did not meet.
        RunFolderError: The folder of the logs cannot be written.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // plan.processes)))
    # The processes report a lost store themselves; PyTorch would add a trace of its C++ code.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[launch.LAUNCHER] = str(os.getpid())
    os.environ[NODE] = plan.options
    sys.stdout.flush()
    logging.disable(logging.CRITICAL)  # the agent's messages; the errors below say what happened
    try:
        with launch_folder.library_messages(plan.logs):
            with _waiting_message(plan.nodes):
                store, is_host = _connect(plan.nodes)
            rendezvous = NodeRendezvous(plan, store, is_host=is_host)
            _choose_interface(plan.nodes, rendezvous.local_address)
            code = _run(_agent(plan, rendezvous), rendezvous)
        if code == 0:
            launch_folder.remove_empty_logs(plan.logs)
        return code
    finally:
        logging.disable(logging.NOTSET)
        for name in (launch.LAUNCHER, NODE, launch_folder.LAUNCH):
            os.environ.pop(name, None)  # other children of this process have no launcher


def _choose_interface(nodes: Nodes, local_address: str) -> None:
    """Have gloo use the network on which the nodes meet.

    Gloo looks up the machine's own name otherwise, which many systems resolve to 127.0.1.1.
    """
    interface = _interface_of(local_address) if nodes.count > 1 else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _run(agent: NodeAgent, rendezvous: NodeRendezvous) -> int:
    nodes = rendezvous.plan.nodes
    try:
        result = agent.run()
    except SignalException as error:
        rendezvous.leave()
        return signals.EXIT_OFFSET + int(error.sigval)
    except RendezvousTimeoutError:
        raise ProcessError(
            f"not all of the {nodes.count} nodes came to {nodes.address} within {JOIN_S} s; start the command on every "
            "node, with the same --nnodes and --rdzv"
        ) from None
    except (RendezvousError, DistError) as error:
        raise _error_without_rendezvous(rendezvous, error) from None
    if not result.is_failed():
        rendezvous.leave()
        return 0
    return _conclude(rendezvous, agent.failures(result))


def _conclude(rendezvous: NodeRendezvous, own: Sequence[Failure]) -> int:
    """The exit code after a failure; or raises the error that names the process or the node."""
    watch = rendezvous.watch
    assert watch is not None
    if not watch.may_hang:
        watch.report(own)
    rendezvous.close()
    others = watch.failures_of_others()
    watch.close()
    _collect(rendezvous.plan.logs, watch, others)
    first, way_on = first_cause([*own, *others]), launch_folder.way_on(rendezvous.plan.output, len(watch.members))
    assert first is not None
    if watch.lost and (first.lost_peer or first.is_stop or watch.has_ended_processes):
        raise _lost(watch, way_on)
    if first.is_stop:
        return first.exit_code if first.exit_code > 0 else signals.EXIT_OFFSET - first.exit_code
    if first in own and first.is_refusal:  # it has printed its line
        return first.exit_code
    raise process_error(first, len(watch.members), way_on)


def _lost(watch: NodeWatch, way_on: str) -> ProcessError:
    members = watch.members
    lost = [(node, members[node].host, processes_of(members, node)) for node in sorted(watch.lost)]
    return lost_nodes_error(lost, len(members), way_on)


def _error_without_rendezvous(rendezvous: NodeRendezvous, error: Exception) -> ProcessError:
    """The error of a node that cannot meet the others: the node with the store is gone, or the others have ended."""
    watch, nodes = rendezvous.watch, rendezvous.plan.nodes
    if watch is None:
        text = " ".join(str(error).split())[:160]
        return ProcessError(
            f"the nodes could not meet at {nodes.address}: {text}; start the command on every node again"
        )
    rendezvous.close()
    others, way_on = watch.failures_of_others(), launch_folder.way_on(rendezvous.plan.output, len(watch.members))
    watch.close()
    if watch.lost:
        return _lost(watch, way_on)
    if first := first_cause(others):
        return process_error(first, len(watch.members), way_on)
    return ProcessError(f"the other nodes have ended the run. {way_on}")


def _collect(logs: Path, watch: NodeWatch, failures: Sequence[Failure]) -> None:
    """On node 0, keep the ends of the logs of processes that failed on other nodes, unless the disk is shared."""
    if watch.node != 0:
        return
    for failure in failures:
        if failure.tail and not Path(failure.log).exists():
            with suppress(OSError):
                target = logs / f"node-{failure.node}-process-{failure.process}.stderr.log"
                target.write_text(failure.tail, encoding="utf-8")


def _say(text: str) -> None:
    print(f"tigon: {text}", file=sys.stderr, flush=True)


class NodeAgent(LocalElasticAgent):
    """PyTorch's agent, which does not start processes again if another attempt would end in the same way."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY) and self._remaining_restarts > 0:
            failures = self.failures(result)
            first = first_cause(failures)  # the agent has ended the others by SIGTERM
            in_vain = first is not None and (first.is_stop or first.is_refusal)
            if in_vain and not self._rendezvous_of().troubled:
                self._remaining_restarts = 0
            else:
                self._announce_restart(failures)
        return result

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """End the processes before another attempt or after a failure, where they have lost a peer.

        They cannot save anything together, and PyTorch's 30 s are long for one that waits in a collective.
        """
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, STOP_S)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Count restarts for the whole run.

        PyTorch counts each node's own. Its processes would then look for each other under different names in the store.
        """
        super()._rendezvous(worker_group)
        self._remaining_restarts = worker_group.spec.max_restarts - self._rendezvous_of().attempt

    def _rendezvous_of(self) -> NodeRendezvous:
        rendezvous = self._worker_group.spec.rdzv_handler
        assert isinstance(rendezvous, NodeRendezvous)
        return rendezvous

    def failures(self, result: RunResult) -> list[Failure]:
        """The failures of this node's processes."""
        watch = self._rendezvous_of().watch
        assert watch is not None
        entries = []
        for process, failure in sorted(result.failures.items()):
            log = self._log(failure.local_rank)
            entries.append(
                Failure(
                    process=int(process),
                    node=watch.node,
                    host=watch.members[watch.node].host,
                    exit_code=int(failure.exitcode),
                    message=message_of(failure),
                    log=log,
                    tail=tail_of(log),
                )
            )
        return entries

    def _log(self, local_rank: int) -> str:
        """The file of a process's stderr."""
        path = self._pcontext.stderrs.get(local_rank, "") if self._pcontext is not None else ""
        return str(Path(path).resolve()) if path else ""

    def _announce_restart(self, failures: Sequence[Failure]) -> None:
        spec = self._worker_group.spec
        number = spec.max_restarts - self._remaining_restarts + 1
        first = first_cause(failures)
        what = sentence(first, self._rendezvous_of().plan.nodes.count) if first else "a process hangs"
        _say(f"{what}; restart {number} of {spec.max_restarts} (--max-restarts) from the last checkpoint")

    def pids(self) -> list[int]:
        """The processes that run now."""
        if self._worker_group.state != WorkerState.HEALTHY:
            return []
        return list(self._pcontext.pids().values()) if self._pcontext is not None else []


def _agent(plan: NodeLaunch, rendezvous: NodeRendezvous) -> NodeAgent:
    spec = WorkerSpec(
        role=RUN_ID, local_world_size=plan.processes, entrypoint=sys.executable, args=tuple(plan.arguments),
        rdzv_handler=rendezvous, max_restarts=plan.nodes.max_restarts, monitor_interval=0.1,
    )  # fmt: skip
    logs = DefaultLogsSpecs(log_dir=str(plan.logs), tee=Std.ERR)
    options: dict[str, Any] = {"exit_barrier_timeout": launch.PATIENCE_S, "log_line_prefix_template": "[${rank}] "}
    if "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters:  # not in PyTorch up to 2.11
        options["shutdown_timeout"] = launch.SHUTDOWN_S
    agent = NodeAgent(spec, logs, **options)
    rendezvous.pids = agent.pids
    return agent


class NodeRendezvous(RendezvousHandler):
    """PyTorch's rendezvous; it also gives the nodes their numbers, and starts a `NodeWatch`."""

    def __init__(self, plan: NodeLaunch, store: TCPStore, *, is_host: bool) -> None:
        self.plan = plan
        self.watch: NodeWatch | None = None
        self.pids: Callable[[], Iterable[int]] = list
        self.attempt = 0
        """The number of restarts, the same on every node."""
        self._address = (plan.nodes.host, store.port)
        self._own = Member(
            host=socket.gethostname(), is_host=is_host, node_rank=plan.nodes.rank, processes=plan.processes,
            token=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}", recipe=plan.recipe,
            number_before=plan.number_before,
        )  # fmt: skip
        self.local_address = _own_address(*self._address)
        self._of_processes: TCPStore | None = None
        count = plan.nodes.count
        self._inner = DynamicRendezvousHandler.from_backend(
            RUN_ID, store, C10dRendezvousBackend(store, RUN_ID), count, count, local_addr=self.local_address,
            timeout=RendezvousTimeout(join=timedelta(seconds=JOIN_S)),
        )  # fmt: skip

    @property
    def troubled(self) -> bool:
        """Whether a node is lost, so that its processes were ended without being asked to."""
        return self.watch is not None and bool(self.watch.lost)

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        with _waiting_message(self.plan.nodes, self._silent):
            info = self._inner.next_rendezvous()
            if self.watch is not None:
                self.watch.close()
            members = _exchange(info.store, info.rank, info.world_size, self._own)
        self.attempt = max(member.next_attempt for member in members)
        self._own = replace(self._own, next_attempt=self.attempt + 1)
        order = _numbered(members)
        node = order.index(info.rank)
        self._own = replace(self._own, number_before=node)
        in_order = [members[place] for place in order]
        os.environ[launch_folder.LAUNCH] = in_order[0].token
        if node == 0:
            self._open_store(info.store)
        opened = json.loads(info.store.get("tigon/opened"))
        self.watch = NodeWatch(
            self._address, opened["round"], node, in_order, lambda: self.pids(), self._end_at_once
        )  # fmt: skip
        address = RendezvousStoreInfo(opened["host"], opened["port"])
        return RendezvousInfo(info.store, node, info.world_size, address)

    def _open_store(self, store: Store) -> None:
        """Open a store for the processes of this attempt; an old one has addresses of processes that ended.

        The host is known to the others by the name in `--rdzv`, while it may know itself as 127.0.1.1.
        """
        host = self.plan.nodes.host if self._own.is_host else self.local_address
        self._of_processes = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        opened = {"round": uuid.uuid4().hex, "host": host, "port": self._of_processes.port}
        store.set("tigon/opened", json.dumps(opened))

    def _silent(self) -> str:
        """The nodes without a sign of life since the last rendezvous, as the end of a sentence."""
        names = self.watch.silent() if self.watch is not None else []
        return f"; {' and '.join(names)} gives no sign of life" if names else ""

    def _end_at_once(self, watch: NodeWatch) -> None:
        """End this process from a thread, because its main thread waits for a store that will not answer."""
        _say(str(_lost(watch, launch_folder.way_on(self.plan.output, len(watch.members)))))
        os._exit(2)

    def leave(self) -> None:
        """Tell the other nodes that this one has ended as it should."""
        self.close()
        if self.watch is not None:
            self.watch.leave()

    def close(self) -> None:
        """No other attempt follows, so the others shall not wait for one. It also stops a thread of PyTorch's.

        At the end of Python, that thread would abort the process in a call of the store.
        """
        if self.watch is not None and self.watch.may_hang:
            return
        with suppress(RendezvousError, DistError):
            self._inner.shutdown()

    def get_backend(self) -> str:
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())


def _exchange(store: Store, place: int, count: int, own: Member) -> list[Member]:
    """What every node says of itself, by its place in PyTorch's rendezvous.

    Raises:
        ProcessError: The nodes have different recipes, or two have the same number.
    """
    store.set(f"tigon/member/{place}", as_text(own))
    members = [member_from(store.get(f"tigon/member/{other}")) for other in range(count)]
    store.set(f"tigon/read/{place}", "yes")
    if problem := _contradiction(members, own):
        if own.is_host:  # the others need its store to read the same
            with suppress(DistError):
                store.wait([f"tigon/read/{other}" for other in range(count)], timedelta(seconds=STORE_S))
        raise ProcessError(problem)
    return members


def _contradiction(members: Sequence[Member], own: Member) -> str | None:
    """Why these nodes cannot train together; None if they can."""
    for member in members:
        if member.recipe != own.recipe:
            return (
                f"the recipe or its --set options on {member.host} differ from those on {own.host}; start the same "
                "command on every node"
            )
    ranks = [member.node_rank for member in members if member.node_rank is not None]
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    return None if twice is None else f"two nodes have --node-rank {twice}; give each node a number of its own"


def _numbered(members: Sequence[Member]) -> list[int]:
    """The places of the members in PyTorch's rendezvous, in the order of their numbers.

    A node without `--node-rank` gets a free number: the host the lowest, another one the number it had before.
    """
    by_number: dict[int, int] = {
        member.node_rank: place for place, member in enumerate(members) if member.node_rank is not None
    }
    host = next((place for place, member in enumerate(members) if member.is_host and member.node_rank is None), None)
    if host is not None:
        by_number[min(set(range(len(members))) - by_number.keys())] = host
    rest = [place for place in range(len(members)) if place not in by_number.values()]
    for place in rest:
        before = members[place].number_before
        if before is not None and before < len(members):
            by_number.setdefault(before, place)
    rest = [place for place in rest if place not in by_number.values()]
    free = [number for number in range(len(members)) if number not in by_number]
    by_number |= dict(zip(free, rest, strict=True))
    return [by_number[number] for number in range(len(members))]


def _connect(nodes: Nodes) -> tuple[TCPStore, bool]:
    """The store of the rendezvous, and whether this node keeps it.

    Node 0 keeps it. Without `--node-rank` it is the first node to which the address belongs.

    Raises:
        ProcessError: The address cannot be used.
    """
    wait = timedelta(seconds=STORE_S)
    if nodes.count == 1 or nodes.rank == 0 or (nodes.rank is None and _is_own(nodes.host)):
        try:
            return TCPStore(nodes.host, nodes.port, is_master=True, wait_for_workers=False, timeout=wait), True
        except DistError as error:
            if nodes.rank == 0:
                text = " ".join(str(error).split())[:160]
                raise ProcessError(
                    f"--rdzv {nodes.address}: node 0 cannot listen there: {text}; choose another port"
                ) from None
    _wait_for_host(nodes)
    try:
        return TCPStore(nodes.host, nodes.port, is_master=False, wait_for_workers=False, timeout=wait), False
    except DistError as error:
        text = " ".join(str(error).split())[:160]
        raise ProcessError(f"--rdzv {nodes.address}: no rendezvous answers there: {text}") from None


def _is_own(host: str) -> bool:
    """Whether an address belongs to this machine."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def _wait_for_host(nodes: Nodes) -> None:
    """Wait until the host accepts connections, which it may do late.

    Raises:
        ProcessError: It does not within `JOIN_S`, or its name is unknown for `RESOLVE_S`.
    """
    started_s = time.monotonic()
    while True:
        try:
            socket.create_connection((nodes.host, nodes.port), timeout=5).close()
            return
        except socket.gaierror as error:
            if time.monotonic() - started_s > RESOLVE_S:
                raise ProcessError(
                    f"--rdzv {nodes.address}: the name {nodes.host} is unknown on this machine: {error.strerror}; give "
                    "its IP address"
                ) from None
        except OSError as error:
            if time.monotonic() - started_s > JOIN_S:
                raise ProcessError(
                    f"--rdzv {nodes.address}: cannot be reached within {JOIN_S} s: {error.strerror or error}; start "
                    "the command on that machine too, and open the port"
                ) from None
        time.sleep(0.5)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the network of the host. The other nodes may not know its name."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return socket.getfqdn()


def _interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if there is none, or the system does not tell."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


@contextmanager
def _waiting_message(nodes: Nodes, addition: Callable[[], str] = str) -> Iterator[None]:
    """Say that nodes are awaited if the block takes longer than `launch.MEETING_S`."""

    def speak() -> None:
        _say(f"waiting at {nodes.address} until all {nodes.count} nodes have started{addition()}")

    timer = threading.Timer(launch.MEETING_S, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
