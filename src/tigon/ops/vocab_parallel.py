"""A head divided by vocabulary (tensor parallelism): which rows of its weight a process holds, and the group's sums.

Each process computes its own rows' logits and their statistics per token. One all-gather per call exchanges the
statistics. Nothing of the vocabulary's width leaves a process. The gradient of hidden is a sum over all rows, so the
backward adds it up over the group. `by_vocabulary` takes the calls of a divided head to the functions that do this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.errors import OptionError, ShapeError, ShardingError
from tigon.ops.dispatch import check_whole, is_dtensor

# N tokens, K columns.

ANY_VOCABULARY = 1 << 31
"""Bounds `top_k` if a process knows only its own part of the vocabulary."""


@dataclass(frozen=True)
class VocabParallelOptions:
    """The rows of a divided head's weight that this process holds.

    start, stop: they are the rows [start, stop) of the whole weight. The processes' rows must not overlap.
    group: the process group that holds the whole weight; None for the default group.
    reduce_hidden_grad: whether backward sums the gradient of hidden over the group. False if other code does.

    Every process of the group makes the same calls with the same hidden states, labels and options, and weighs the
    result alike. Otherwise gradients are wrong, or the processes wait for each other.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
    reduce_hidden_grad: bool = True

    @classmethod
    def for_vocab(
        cls, vocab_size: int, group: dist.ProcessGroup | None = None, *, reduce_hidden_grad: bool = True
    ) -> VocabParallelOptions:
        """The rows of this process if the first processes of the group hold one row more than the others."""
        check_whole("vocab_size", vocab_size)
        each, more = divmod(vocab_size, dist.get_world_size(group))
        rank = dist.get_rank(group)
        start = rank * each + min(rank, more)
        return cls(start, start + each + (rank < more), group, reduce_hidden_grad)

    @classmethod
    def of_dtensor(cls, weight: Tensor) -> VocabParallelOptions:
        """The rows of this process of a DTensor of Shard(0), for `weight.to_local()`.

        Raises:
            ShardingError: it has other placements.
        """
        return part_of_dtensor(weight, "weight")

    @property
    def rank(self) -> int:
        """The place of this process in `all_gather`'s result."""
        return dist.get_rank(self.group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(processes of the group, *shape of `tensor`), in the order of ranks."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.stack(parts)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up a tensor over the group, in place."""
        dist.all_reduce(tensor, group=self.group)

    def sum_hidden_grad(self, gradient: Tensor) -> None:
        """Add up the gradient of hidden over the group, in place."""
        if self.reduce_hidden_grad:
            self.all_reduce(gradient)


def checked_part(options: object) -> VocabParallelOptions:
    if not isinstance(options, VocabParallelOptions):
        raise OptionError(f"vocab_parallel={options!r} must be tigon.VocabParallelOptions, or None for a whole head.")
    check_whole("vocab_parallel.start", options.start)
    check_whole("vocab_parallel.stop", options.stop)
    if not 0 <= options.start <= options.stop:
        raise OptionError(f"vocab_parallel=[{options.start}, {options.stop}) must be 0 <= start <= stop.")
    if not (dist.is_available() and dist.is_initialized()):
        raise ShardingError("vocab_parallel needs a process group; call torch.distributed.init_process_group first.")
    return options


def check_columns(options: VocabParallelOptions, columns: int) -> VocabParallelOptions:
    """The options of logits; raises unless they name as many columns as the logits have."""
    if checked_part(options).stop - options.start != columns:
        raise ShapeError(
            f"logits have {columns} columns; vocab_parallel [{options.start}, {options.stop}) names "
            f"{options.stop - options.start}. Pass this process's columns only."
        )
    return options


def part_of_dtensor(tensor: Any, name: str) -> VocabParallelOptions:
    """The rows of a DTensor that this process holds; Shard(0) gives each rank ceil(V / ranks) rows, the last fewer."""
    placements, mesh = tensor.placements, tensor.device_mesh
    kinds = [type(placement).__name__ for placement in placements]
    if kinds != ["Shard"] or placements[0].dim % tensor.ndim != 0:
        raise ShardingError(
            f"{name} has the placements {tuple(placements)}; a divided head must be Shard(0) on a mesh of one "
            "dimension. Redistribute it, or call full_tensor() for a whole head."
        )
    rows = tensor.shape[0]
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    return VocabParallelOptions(start, min(start + each, rows), mesh.get_group())


def replicated(tensor: Any, name: str) -> Any:
    """A tensor that is the same in each process, as an ordinary one.

    Raises:
        ShardingError: it is a DTensor that is not Replicate().
    """
    if not is_dtensor(tensor):
        return tensor
    if any(type(placement).__name__ != "Replicate" for placement in tensor.placements):
        raise ShardingError(
            f"{name} has the placements {tuple(tensor.placements)}; a divided head needs Replicate(). Redistribute it."
        )
    return tensor.to_local()


def refuse_options(**given: bool) -> None:
    """Raise `ShardingError` for the first option that is given and that a divided head does not have."""
    for name, is_given in given.items():
        if is_given:
            raise ShardingError(f"{name} is not available for a head divided by vocabulary. Leave it out.")


def exchange(part: VocabParallelOptions, columns: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each process's columns, (processes, N, K) each, by one all-gather.

    columns: (N, K), the same sizes in each process. Ids are exact in fp32 up to 2^24.
    """
    gathered = part.all_gather(torch.cat([column.to(dtype) for column in columns], 1))
    return list(gathered.split([column.shape[1] for column in columns], 2))
