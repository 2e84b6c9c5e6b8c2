"""Groups of GPUs, and what a collective moves on which link."""

from __future__ import annotations

import pytest

from tigon.errors import UsageError
from tigon.planner.cluster.topology import LINK_SHARE, Cluster, Group, link_bytes_s
from tigon.planner.gpus import GPUS

FOUR_NODES = Cluster(gpu=GPUS["h100"], gpus_per_node=8, nodes=4, link_bytes_s=50e9)
LARGE = 1e12
"""Bytes of a tensor for which hops and starts take no noticeable time."""


@pytest.mark.parametrize(
    ("text", "rate"), [("400Gb", 50e9), ("400Gb/s", 50e9), ("400 Gbps", 50e9), ("50GB", 50e9), ("3.2Tb", 400e9)]
)
def test_link_is_a_rate_in_bits_or_bytes(text, rate):
    assert link_bytes_s(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "400", "400G", "-1Gb", "0Gb", "1b", "200Tb", "400gb"])
def test_other_words_and_rates_that_no_link_has_are_refused(text):
    with pytest.raises(UsageError, match="--link is") as caught:
        link_bytes_s(text)
    assert "\n" not in str(caught.value) and "400Gb" in str(caught.value)


def test_groups_fill_a_node_before_they_leave_it():
    assert FOUR_NODES.group(8) == Group(8, 1)
    assert FOUR_NODES.group(32) == Group(8, 4)
    assert FOUR_NODES.group(4, inner=8) == Group(1, 4), "one GPU of each node: behind tensor parallelism of a node"
    assert FOUR_NODES.group(8, inner=4) == Group(2, 4)


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_all_reduce_moves_as_much_as_a_reduce_scatter_and_an_all_gather(size):
    group = FOUR_NODES.group(size)
    parts = [FOUR_NODES.received(kind, LARGE, group) for kind in ("reduce-scatter", "all-gather")]
    assert FOUR_NODES.received("all-reduce", LARGE, group) == sum(parts)
    assert parts[0] == LARGE * (size - 1) / size


def test_nothing_crosses_nodes_within_a_node():
    assert FOUR_NODES.over_link("all-gather", LARGE, Group(8, 1)) == 0
    assert FOUR_NODES.seconds("all-gather", LARGE, Group(1, 1)) == 0


def test_collective_over_nodes_shares_the_links_of_its_members():
    """A node receives the three quarters that it lacks through as many links as it has members."""
    whole, alone = FOUR_NODES.group(32), FOUR_NODES.group(4, inner=8)
    assert FOUR_NODES.over_link("all-gather", LARGE, whole) == LARGE * 3 / 4 / 8
    assert FOUR_NODES.over_link("all-gather", LARGE, alone) == LARGE * 3 / 4
    assert FOUR_NODES.seconds("all-gather", LARGE, alone) == pytest.approx(LARGE * 3 / 4 / 50e9 / LINK_SHARE, rel=1e-3)


def test_slower_link_decides():
    group = FOUR_NODES.group(32)
    inside = LARGE * 31 / 32 / GPUS["h100"].peer_bytes_s
    outside = LARGE * 3 / 4 / 8 / (50e9 * LINK_SHARE)
    assert outside < inside
    assert FOUR_NODES.seconds("all-gather", LARGE, group) == pytest.approx(inside, rel=1e-3)
    slow = Cluster(gpu=GPUS["h100"], gpus_per_node=8, nodes=4, link_bytes_s=5e9)
    assert slow.seconds("all-gather", LARGE, group) == pytest.approx(10 * outside, rel=1e-3)


def test_all_to_all_sends_each_other_node_its_part():
    group = FOUR_NODES.group(4, inner=8)
    assert FOUR_NODES.over_link("all-to-all", LARGE, group) == FOUR_NODES.received("all-to-all", LARGE, group)
