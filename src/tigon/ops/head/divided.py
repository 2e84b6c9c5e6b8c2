"""This process's part of an lm_head that is divided by vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon.errors import ShapeError, ShardingError
from tigon.ops.dispatch import is_dtensor
from tigon.ops.head.inputs import Head
from tigon.ops.vocab_parallel import ANY_VOCABULARY, VocabParallelOptions, checked_part, part_of_dtensor, replicated

# N tokens, H hidden, U rows of the weight in this process, V vocabulary.


@dataclass(frozen=True)
class DividedHead:
    """Hidden states and this process's part of a divided head, as ordinary tensors."""

    head: Head
    hidden: Tensor
    weight: Tensor
    """As the caller gave them, but ordinary tensors."""
    part: VocabParallelOptions
    vocab: int | None
    """Classes of the whole head; None if only this process's part is known."""

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        vocab_parallel: VocabParallelOptions | None,
        prefix: str = "",
    ) -> DividedHead:
        """This process's part.

        Args:
            hidden: (..., H), the same in each process. Beside a DTensor weight, a DTensor of Replicate() on its mesh.
            weight: (V, H), a DTensor of Shard(0); or (U, H) with `vocab_parallel`.
            bias: divided as the weight, or None.
            prefix: what the arguments' names begin with in the messages.

        Raises:
            ShardingError: a tensor is divided in another way.
            ShapeError, DtypeError, OptionError: the tensors do not fit each other or `vocab_parallel`.
        """
        if vocab_parallel is None:
            part, vocab = part_of_dtensor(weight, f"{prefix}weight"), weight.shape[0]
            _check_same_mesh(hidden, weight, prefix)
            if bias is not None and (not is_dtensor(bias) or part_of_dtensor(bias, f"{prefix}bias") != part):
                raise ShardingError(
                    f"{prefix}bias is not divided as {prefix}weight is; make it a DTensor of Shard(0) too."
                )
            weight, bias = _local(weight), None if bias is None else _local(bias)
        else:
            if is_dtensor(weight) or is_dtensor(bias):
                raise ShardingError(f"vocab_parallel is for ordinary tensors, but {prefix}weight or bias is a DTensor.")
            part, vocab = checked_part(vocab_parallel), None
        hidden = replicated(hidden, f"{prefix}hidden")
        if weight.shape[0] != part.stop - part.start:
            raise ShapeError(
                f"{prefix}weight has {weight.shape[0]} rows; vocab_parallel [{part.start}, {part.stop}) names "
                f"{part.stop - part.start}. Pass this process's rows only."
            )
        return cls(Head.of(hidden, weight, bias, prefix, divided=True), hidden, weight, part, vocab)

    @property
    def most_top_k(self) -> int:
        """The whole vocabulary; a bound of it if the other processes' parts are unknown."""
        return ANY_VOCABULARY if self.vocab is None else self.vocab

    def most_rows(self) -> int:
        """The most rows of the weight that a process of the group holds. All processes call it."""
        if self.vocab is not None:  # a DTensor's first part is the largest
            return -(-self.vocab // dist.get_world_size(self.part.group))
        rows = torch.tensor([self.weight.shape[0]], device=self.weight.device)
        return int(self.part.all_gather(rows).max())


def _check_same_mesh(hidden: Any, weight: Any, prefix: str) -> None:
    """Raise unless hidden is a DTensor: FSDP2's shards are like a divided head's, but the processes' tokens differ."""
    if not is_dtensor(hidden) or hidden.device_mesh != weight.device_mesh:
        raise ShardingError(
            f"{prefix}weight is a DTensor, but {prefix}hidden is not one on its mesh. If FSDP has sharded the weight, "
            "call the head's own module. If all processes have the same hidden states, pass "
            "DTensor.from_local(hidden, mesh, [Replicate()])."
        )


def _local(tensor: Any) -> Tensor:
    """This process's part; its gradient becomes a DTensor of the same placement."""
    return tensor.to_local()  # type: ignore[no-any-return]
