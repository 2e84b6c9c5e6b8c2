"""The loss per token of a head with a temperature, for policy training, through `tigon.linear_logprobs`.

The head may be whole, or divided by vocabulary over a tensor-parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tigon import ops
from tigon.errors import DtypeError, LabelError, OptionError, ShapeError, ShardingError
from tigon.ops.losses.labels import wants_label_check


class LigerFusedLinearScaledCrossEntropyFunction:
    """-log p(target), then the entropy and the log-probabilities of more ids if requested; 0 for ignored tokens.

    `selected_token_ids` (K,) int64 are the same ids for all tokens.
    """

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if not isinstance(return_entropy, bool):
            raise OptionError(f"return_entropy={return_entropy!r} must be True or False.")
        ids = target[:, None]
        if selected_token_ids is not None:
            selected = _checked(selected_token_ids, weight).to(ids.dtype).expand(len(target), -1)
            ids = torch.cat((ids, selected.masked_fill(ids == ignore_index, ignore_index)), 1)
        found = ops.linear_logprobs(
            _input, weight, ids, temperature=temperature, ignore_index=ignore_index,
            outputs=("entropy",) if return_entropy else (),
        )  # fmt: skip
        logprob = found if isinstance(found, Tensor) else found.logprob
        results = [-logprob[:, 0]]
        if not isinstance(found, Tensor) and found.entropy is not None:
            results.append(found.entropy)
        if selected_token_ids is not None:
            results.append(logprob[:, 1:])
        return results[0] if len(results) == 1 else tuple(results)


def _checked(selected: Any, weight: Tensor) -> Tensor:
    """The ids (K,), those outside the vocabulary as V, whose log-probability is NaN.

    Raises:
        DtypeError: they are not a tensor of int64.
        ShapeError: they do not have one dimension, or are on another device than the head.
        LabelError: an id is outside [0, V), on the CPU or with TIGON_CHECK=1.
    """
    name, limit, V = "selected_token_ids", "pass a tensor (K,) of int64", weight.shape[0]
    if not isinstance(selected, Tensor):
        raise DtypeError(f"{name} is a {type(selected).__name__}; {limit}.")
    if selected.dtype != torch.int64:
        raise DtypeError(f"{name} has the dtype {selected.dtype}; {limit}.")
    if selected.ndim != 1:
        raise ShapeError(f"{name} has the shape {tuple(selected.shape)}; pass (K,), the same ids for all tokens.")
    if selected.device != weight.device:
        raise ShapeError(f"{name} is on {selected.device}, weight is on {weight.device}; move one of them.")
    outside = (selected < 0) | (selected >= V)
    if wants_label_check(weight) and outside.any():
        raise LabelError(f"{name} holds {int(selected[outside][0])}; the ids of this head are in [0, {V}).")
    return selected.masked_fill(outside, V)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """-log p(target), and the entropy if requested, of a head that is divided evenly by vocabulary over `tp_group`.

    The gradient of `_input` is summed over the group, that of `weight` is of this process's rows. `tiles_per_reduce`
    has no effect: the statistics of all tokens are exchanged at once. Unlike Liger's, it also runs on the CPU.
    """

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
        ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    ) -> Any:  # fmt: skip
        if isinstance(tiles_per_reduce, bool) or tiles_per_reduce not in (1, 2, 4):
            raise OptionError(f"tiles_per_reduce={tiles_per_reduce!r} must be 1, 2 or 4.")
        if not isinstance(return_entropy, bool):
            raise OptionError(f"return_entropy={return_entropy!r} must be True or False.")
        if not (dist.is_available() and dist.is_initialized()):
            raise ShardingError("tp_group needs a process group; call torch.distributed.init_process_group first.")
        start = dist.get_rank(tp_group) * weight.shape[0]
        found = ops.linear_logprobs(
            _input, weight, target, temperature=temperature, ignore_index=ignore_index,
            outputs=("entropy",) if return_entropy else (),
            vocab_parallel=ops.VocabParallelOptions(start, start + weight.shape[0], tp_group),
        )  # fmt: skip
        return -found if isinstance(found, Tensor) else (-found.logprob, found.entropy)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0, ignore_index: int = -100,
    tiles_per_reduce: int = 1, return_entropy: bool = False,
) -> Any:  # fmt: skip
    """As `LigerFusedLinearScaledCrossEntropyTPFunction.apply`."""
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )
