"""The memory that collectives of DeepSpeed and FSDP2 use: gathered weights, and gradients that are reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tigon.planner.simulate.ledger import Allocation, Ledger
from tigon.planner.trace.tape import Where

GATHERING, REDUCING = 1, 2
"""Streams of the engine, in addition to the model's stream 0. Whole weights are allocated on GATHERING, copies of
gradients on REDUCING."""


@dataclass(frozen=True, kw_only=True)
class GradientCopy:
    """A copy that an engine makes of each gradient when it reduces the gradient or moves it to the host."""

    share: float
    """Bytes of the copy per byte of the gradient."""
    most_bytes: float = math.inf
    """The engine copies at most this much at a time."""
    stays: bool = False
    """The copy is kept until the engine has made the later copies too."""


@dataclass
class ReducedGradients:
    """The gradients that reductions leave on this GPU until the step."""

    ledger: Ledger
    nbytes: int = 0
    """Allocated when the first gradient is reduced; unused if `share` is set."""
    share: float = 0.0
    """Bytes that each reduced gradient leaves per byte of the gradient; 0: the first one allocates all."""
    copies: Sequence[GradientCopy] = ()
    """In the order in which the engine makes them."""
    allocations: list[Allocation | None] = field(default_factory=list)

    def add(self, gradient_bytes: int) -> None:
        """Reduce one gradient."""
        if self.share:
            # FSDP2's source allocates this on another stream. With this stream, the predicted reserved peaks of
            # medusa-two-gpus.json are at most 18% too high instead of 25%.
            nbytes = int(gradient_bytes * self.share)
            self.allocations.append(self.ledger.alloc(nbytes, "gradients", stream=GATHERING))
        elif self.nbytes and not self.allocations:
            self.allocations.append(self.ledger.alloc(self.nbytes, "gradients"))
        staying = []
        for copy in self.copies:
            nbytes = int(min(copy.share * gradient_bytes, copy.most_bytes))
            allocation = self.ledger.alloc(nbytes, "gradients", stream=REDUCING)
            if copy.stays:
                staying.append(allocation)
            else:
                self.ledger.free(allocation)
        self.ledger.free_all(staying)


@dataclass(frozen=True, kw_only=True)
class GatheringPlan:
    """Which whole weights ZeRO-3 holds on this GPU in the forward and backward passes. Sizes are bytes per weight."""

    outside: Sequence[int]
    """Weights outside the layers."""
    layer: Sequence[int]
    """Weights of the largest layer."""
    layers: int
    most_bytes: int
    """The engine gathers no further weight ahead of its use beyond this."""
    beyond_bytes: int
    """The last weight that is gathered ahead may exceed `most_bytes` by this much."""
    last: Sequence[int]
    """Weights outside the layers that are gathered when the last gradient is computed."""
    head_stays: bool
    """True: the backward pass keeps all of `outside`. False: the head's module frees them after its backward pass, and
    `last` is gathered again after the backward pass of the last layer."""

    def layers_that_fit(self, most_bytes: int, others: Sequence[int]) -> int:
        """The most layers that are gathered at one time, in addition to `others`."""
        return min(self.layers, max(0, most_bytes - sum(others)) // max(sum(self.layer), 1))


@dataclass
class GatheredWeights:
    """The weights of a GatheringPlan over time, on the stream GATHERING.

    The forward pass gathers one layer after another and keeps as many as fit. The backward pass frees each layer when
    it is done.
    """

    ledger: Ledger
    plan: GatheringPlan
    outside: list[Allocation | None] = field(default_factory=list)
    layers: list[list[Allocation | None]] = field(default_factory=list)

    def enter(self, where: Where) -> None:
        """Gather and free what the start of a segment needs."""
        plan, number = self.plan, 0 if where.layer is None else where.layer + 1
        if where.phase == "forward" or (where.phase == "backward" and number and plan.head_stays):
            fitting = plan.layers_that_fit(plan.most_bytes, plan.outside)
            rest = max(plan.most_bytes - sum(plan.outside) - fitting * sum(plan.layer), 0)
            self._hold([*plan.outside, rest], min(number or len(self.layers), fitting))
        elif where.phase == "backward" and number == plan.layers:
            self._hold([], plan.layers_that_fit(plan.most_bytes, []))
        elif where.phase != "loss":
            most_bytes = plan.most_bytes + plan.beyond_bytes
            self._hold(plan.last, min(number, plan.layers_that_fit(most_bytes, plan.last)))

    def close(self) -> None:
        """Free everything at the end of the backward pass."""
        self._hold([], 0)

    def _hold(self, outside: Sequence[int], layers: int) -> None:
        if len(outside) != len(self.outside):
            self._free(self.outside)
        while len(self.layers) > layers:
            self._free(self.layers.pop())
        while len(self.layers) < layers:
            self.layers.append(self._alloc(self.plan.layer))
        if len(outside) != len(self.outside):
            self.outside = self._alloc(outside)

    def _alloc(self, sizes: Sequence[int]) -> list[Allocation | None]:
        return [self.ledger.alloc(nbytes, "weights", stream=GATHERING) for nbytes in sizes]

    def _free(self, allocations: list[Allocation | None]) -> None:
        while allocations:
            self.ledger.free(allocations.pop())
