"""The launchers of the nodes tell each other that they are alive, which processes failed, and that they ended.

They use the store of the rendezvous, through a second connection, because a call that waits would hold up the others of
its connection.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tigon.trainer.distributed.failures import Failure

BEAT_S = 1.0
SILENT_S = 6.0  # without a sign of life after a failure, a node counts as lost
LOST_S = 30.0  # without a sign of life while everything works here: the network or the machine may only be slow
GRACE_S = 3.0  # for processes to notice that a peer has gone, before they are ended
FORCE_S = 60.0  # from SIGTERM to SIGKILL, for a checkpoint if only the launcher of the other node is gone
STUCK_S = 10.0  # for the launcher to notice that its processes were killed
ANSWER_S = 3.0  # for other nodes to read what is in the store that this node keeps


@dataclass(frozen=True)
class Member:
    """A node of the run, as the others know it."""

    host: str
    """Its name, for messages."""
    is_host: bool
    """Whether it keeps the store."""
    node_rank: int | None
    processes: int
    token: str
    """A name that no other launcher has."""
    recipe: str
    """A digest of the resolved recipe and the options."""
    number_before: int | None = None
    """The number it had in an earlier attempt or run, whose files are on its own disk."""
    next_attempt: int = 0
    """How often it has started its processes."""


def processes_of(members: Sequence[Member], node: int) -> range:
    """The numbers of a node's processes."""
    before = sum(member.processes for member in members[:node])
    return range(before, before + members[node].processes)


class NodeWatch:
    """Two threads that show and watch signs of life, from one rendezvous to the next."""

    def __init__(
        self, address: tuple[str, int], round_name: str, node: int, members: Sequence[Member],
        pids: Callable[[], Iterable[int]], on_stuck: Callable[[NodeWatch], None],
    ) -> None:  # fmt: skip
        """Start the threads.

        Args:
            address: Host and port of the store.
            round_name: The name of this rendezvous, the same on every node.
            node: The number of this node.
            members: All nodes, by number.
            pids: Gives the processes of this node, which are ended if another node is lost or its processes failed.
            on_stuck: Called in a thread if the network is gone and nobody has called `close` after the processes were
                ended: then the main thread waits for an answer of the store, which may take hours.
        """
        self.node, self.members, self._pids, self._on_stuck = node, members, pids, on_stuck
        self.lost: set[int] = set()
        self.has_ended_processes = False
        """Whether it has sent signals to the processes of this node."""
        self.reports: dict[int, list[Failure]] = {}
        """The failures that other nodes have reported."""
        self._left: set[int] = set()
        self._others = [other for other in range(len(members)) if other != node]
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        self._store = PrefixStore(f"tigon/nodes/{round_name}", store)
        self._beat, self._seen = 0, {other: (0, time.monotonic()) for other in self._others}
        self._trouble_since: float | None = None
        self._n_signals = 0
        self._reading = threading.Lock()
        self._answered_s = time.monotonic()
        self._refused = False
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange, self._judge)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. The node then gives no more signs of life."""
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def leave(self) -> None:
        """Tell the others that this node has ended as it should."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self.node}", "yes")
            self._await_readers()
        self.close()

    def report(self, failures: Sequence[Failure]) -> None:
        """Tell the others which processes of this node failed."""
        with suppress(RuntimeError):
            self._store.set(f"failed/{self.node}", json.dumps([asdict(failure) for failure in failures]))

    def failures_of_others(self) -> list[Failure]:
        """Wait until each other node has reported, ended, or given no sign of life, and return the failures.

        Those without a sign of life are in `lost` afterwards.
        """
        deadline_s = time.monotonic() + SILENT_S + 2 * BEAT_S
        while time.monotonic() < deadline_s and self._open() and not self.has_lost_host:
            try:
                self._read()
            except RuntimeError:
                self._lose_the_host()
                break
            self.lost |= {other for other in self._open() if self._silence_s(other) > SILENT_S}
            time.sleep(0.1)
        if not self.has_lost_host:
            with suppress(RuntimeError):
                self._await_readers()
        return [failure for entries in self.reports.values() for failure in entries]

    @property
    def has_lost_host(self) -> bool:
        """Whether the node with the store is lost."""
        return any(self.members[other].is_host for other in self.lost)

    @property
    def may_hang(self) -> bool:
        """Whether a call of the store may never return, because its node is silent instead of gone."""
        return self.has_lost_host and not self._refused

    def silent(self) -> list[str]:
        """Names of the nodes without a sign of life for `SILENT_S`."""
        silent = sorted(self.lost | {other for other in self._open() if self._silence_s(other) > SILENT_S})
        return [f"node {node} ({self.members[node].host})" for node in silent]

    def _open(self) -> set[int]:
        """The other nodes of which it is not known whether they failed, ended or are lost."""
        return set(self._others) - self.reports.keys() - self._left - self.lost

    def _await_readers(self) -> None:
        """Wait until the others have read what is in the store, if this node keeps it."""
        deadline_s = time.monotonic() + (ANSWER_S if self.members[self.node].is_host else 0)
        while time.monotonic() < deadline_s:
            self._read()
            writers = {self.node, *self.reports}
            readers = set(self._others) - self._left - self.lost
            if all(
                self._store.check([f"read/{writer}/{reader}"]) for reader in readers for writer in writers - {reader}
            ):
                return
            time.sleep(0.05)

    def _read(self) -> None:
        """Read what the others have written since, and confirm it."""
        with self._reading:
            for other in self._others:
                if other in self._left or other in self.reports:
                    continue
                if self._store.check([f"left/{other}"]):
                    self._left.add(other)
                elif self._store.check([f"failed/{other}"]):
                    entries = json.loads(self._store.get(f"failed/{other}"))
                    self.reports[other] = [Failure(**entry) for entry in entries]
                else:
                    continue
                self._store.set(f"read/{other}/{self.node}", "yes")

    def _silence_s(self, other: int) -> float:
        """Time without a sign of life, up to the last answer of the store; without answers nothing can be seen."""
        if self.members[other].is_host:
            return time.monotonic() - min(self._seen[other][1], self._answered_s)
        return self._answered_s - self._seen[other][1]

    def _lose_the_host(self) -> None:
        """The connection to the store is closed, so its node is gone, unless it has said goodbye."""
        self._refused = True
        self.lost |= {other for other in self._open() if self.members[other].is_host}

    def _exchange(self) -> None:
        """The thread that talks to the store. A call may hang if the network is gone."""
        while not self._closing.wait(BEAT_S):
            try:
                self._exchange_beats()
                self._read()
                self._answered_s = time.monotonic()
            except RuntimeError:
                if not self._closing.is_set():
                    self._lose_the_host()
                return

    def _judge(self) -> None:
        """The thread that finds lost nodes, and ends the processes of this one."""
        while not self._closing.wait(BEAT_S):
            self.lost |= {other for other in self._open() if self._silence_s(other) > LOST_S}
            if not self.lost and not self.reports:
                continue
            self._trouble_since = self._trouble_since or time.monotonic()
            trouble_s = time.monotonic() - self._trouble_since
            self._end_processes(trouble_s)
            if self.has_lost_host and trouble_s > GRACE_S + FORCE_S + STUCK_S:
                self._on_stuck(self)

    def _exchange_beats(self) -> None:
        self._beat += 1
        self._store.set(f"alive/{self.node}", str(self._beat))
        for other in self._open():
            if self._store.check([f"alive/{other}"]):
                beat = int(self._store.get(f"alive/{other}"))
                if beat != self._seen[other][0]:
                    self._seen[other] = (beat, time.monotonic())

    def _end_processes(self, trouble_s: float) -> None:
        """End the processes of this node, which may hang in a collective with a process that is gone.

        They have `GRACE_S` to notice by themselves. If processes elsewhere have failed, nothing can be saved, so a
        second SIGTERM follows, which ends a process at once.
        """
        n_signals = int(trouble_s // GRACE_S)
        forced = trouble_s > GRACE_S + FORCE_S
        if not forced and (self._n_signals >= n_signals or self._n_signals >= (2 if self.reports else 1)):
            return
        self._n_signals += 1
        self.has_ended_processes = True
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if forced else signal.SIGTERM)


def member_from(text: bytes) -> Member:
    return Member(**json.loads(text))


def as_text(member: Member) -> str:
    fields: Mapping[str, Any] = asdict(member)
    return json.dumps(fields)
