"""The GPUs of a cluster, the links between them, and the time of a collective by the slower of two links.

Every GPU has one link to the GPUs of its node and one to other nodes. A collective over several nodes uses all the
links of its members at once. It takes the longer of its times on the two kinds of links, plus the time of its hops.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tigon.errors import UsageError
from tigon.planner.gpus import Gpu

LINK_SHARE = 0.85
"""Assumed share of a network link's line rate that collectives of large tensors reach."""
NODE_HOP_S, LINK_HOP_S = 2e-6, 6e-6
"""Assumed seconds of one hop of a ring, within a node and between nodes."""
START_S = 1e-5
"""Assumed seconds to start a collective."""
MOST_GPUS = 1 << 17

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)([bB])(?:/s|ps|it/s)?")
_PREFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_LEAST, _MOST = 10**8 / 8, 10**14 / 8


def link_bytes_s(text: str) -> float:
    """Bytes per second of a link such as `400Gb` (bits) or `50GB` (bytes).

    Raises:
        UsageError: `text` is not a rate between 0.1 Gb/s and 100 Tb/s.
    """
    rate = _RATE.fullmatch(text.strip())
    if rate is None:
        raise UsageError(
            f"--link is {text!r}; give each GPU's rate to other nodes in bits (400Gb) or bytes (50GB) per second."
        )
    found = float(rate[1]) * _PREFIX[rate[2]] / (8 if rate[3] == "b" else 1)
    if not _LEAST <= found <= _MOST:
        raise UsageError(f"--link is {text!r}; a GPU's link is between 0.1Gb and 100Tb per second, such as 400Gb.")
    return found


@dataclass(frozen=True)
class Group:
    """The members of a collective: `per_node` GPUs in each of `nodes` nodes."""

    per_node: int
    nodes: int

    @property
    def size(self) -> int:
        return self.per_node * self.nodes


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int = 1
    link_bytes_s: float = 0.0
    """Line rate from one GPU to the other nodes, in one direction; unused for one node."""

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def group(self, size: int, *, inner: int = 1) -> Group:
        """The group of `size` GPUs that are `inner` ranks apart."""
        in_node = max(1, self.gpus_per_node // inner)
        per_node = min(size, in_node)
        return Group(per_node, -(-size // per_node))

    def received(self, collective: Collective, nbytes: float, group: Group) -> float:
        """Bytes that each member receives.

        nbytes: the whole tensor of a gather, a reduce-scatter or an all-reduce; what one member holds in the others.
        """
        if collective == "send":
            return nbytes
        return _rounds(collective) * nbytes * (group.size - 1) / group.size

    def over_link(self, collective: Collective, nbytes: float, group: Group) -> float:
        """The bytes per member that cross nodes, with the traffic of a node spread over its members."""
        if group.nodes == 1:
            return 0.0
        if collective == "send":
            return nbytes
        crossing = _rounds(collective) * nbytes * (group.nodes - 1) / group.nodes
        return crossing if collective == "all-to-all" else crossing / group.per_node

    def seconds(self, collective: Collective, nbytes: float, group: Group) -> float:
        """Seconds of one collective."""
        if group.size == 1 or not nbytes:
            return 0.0
        inside = self.received(collective, nbytes, group) if group.per_node > 1 else 0.0
        node_s = inside / self.gpu.peer_bytes_s
        crossing = self.over_link(collective, nbytes, group)
        link_s = crossing / (self.link_bytes_s * LINK_SHARE) if crossing else 0.0
        return START_S + max(node_s, link_s) + _rounds(collective) * self._hops_s(collective, group)

    def _hops_s(self, collective: Collective, group: Group) -> float:
        """Seconds until the first byte has reached every member: a ring's hops, or one hop of a direct exchange."""
        if collective in ("send", "all-to-all"):
            return LINK_HOP_S if group.nodes > 1 else NODE_HOP_S
        between = group.nodes if group.nodes > 1 else 0
        return group.nodes * (group.per_node - 1) * NODE_HOP_S + between * LINK_HOP_S


def _rounds(collective: Collective) -> int:
    """An all-reduce is a reduce-scatter and an all-gather."""
    return 2 if collective == "all-reduce" else 1
