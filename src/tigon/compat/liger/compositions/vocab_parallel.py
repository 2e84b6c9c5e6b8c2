"""The loss per token of logits that are divided evenly by vocabulary over a tensor-parallel group, as in Megatron-LM.

`tigon.logprobs` gives log p(target) and the log-sum-exp of all columns. Label smoothing adds the mean of the logits:

    loss = (1 - α) · -log p(target) + α · (lse - mean z)        α = s, or s · K / (K - 1) for the formula "megatron"

The mean is over all K columns, or over this process's in the mode "partition". There, each process has another loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tigon import ops
from tigon.errors import OptionError, ShapeError

# N tokens, U columns of this process.

_FORMULAS = ("pytorch", "megatron")
_MODES = ("global", "partition")
_NO_ID = -(1 << 31)


class LigerVocabParallelCEFunction:
    """(S, B) losses in fp32 of logits (S, B, U) and targets (S, B) of the whole vocabulary; 0 for ignored targets."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int | None,
        label_smoothing: float, label_smoothing_formula: str, label_smoothing_mode: str,
    ) -> Tensor:  # fmt: skip
        _check_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        if vocab_parallel_logits.ndim != 3:
            raise ShapeError(
                f"vocab_parallel_logits is {tuple(vocab_parallel_logits.shape)}; it must be (sequence, batch, vocab)."
            )
        U, world = vocab_parallel_logits.shape[-1], 1 if tp_group is None else tp_group.size()
        part = None
        if world > 1:
            start = dist.get_rank(tp_group) * U
            part = ops.VocabParallelOptions(start, start + U, tp_group)
        ignored = _NO_ID if ignore_index is None else ignore_index
        found = ops.logprobs(
            vocab_parallel_logits, target, ignore_index=ignored, outputs=("lse",), vocab_parallel=part
        )  # fmt: skip
        assert isinstance(found, ops.Logprobs) and found.lse is not None
        if not label_smoothing:
            return -found.logprob
        whole = label_smoothing_mode == "global"
        columns = U * world if whole else U
        share = label_smoothing * columns / (columns - 1) if label_smoothing_formula == "megatron" else label_smoothing
        sums = vocab_parallel_logits.sum(-1, dtype=found.lse.dtype)
        if whole and world > 1:
            sums = _added_up(sums, tp_group)
        loss = share * (found.lse - sums / columns) - (1.0 - share) * found.logprob
        return torch.where(target == ignored, 0.0, loss)


def _added_up(sums: Tensor, group: Any) -> Tensor:
    """The sum over the group. Its gradient is that of this process's part, because each process has the whole loss."""
    total = sums.detach().clone()
    dist.all_reduce(total, group=group)
    return sums + (total - sums.detach())


def _check_formula_and_mode(formula: str, mode: str) -> None:
    for name, value, known in (("formula", formula, _FORMULAS), ("mode", mode, _MODES)):
        if value not in known:
            raise OptionError(f"label_smoothing_{name}={value!r} is unknown; choose from {', '.join(known)}.")


class LigerVocabParallelCrossEntropy(nn.Module):
    """Cross entropy per token of logits that are divided by vocabulary. Without `tp_group` the logits are whole."""

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "pytorch", label_smoothing_mode: str = "global",
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction != "none":
            raise OptionError(f"reduction={reduction!r} must be 'none': the loss is per token. Reduce the result.")
        if not 0.0 <= label_smoothing < 1.0:
            raise OptionError(f"label_smoothing={label_smoothing} is outside [0, 1).")
        _check_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        return LigerVocabParallelCEFunction.apply(
            vocab_parallel_logits, target, tp_group, self.ignore_index, self.label_smoothing,
            self.label_smoothing_formula, self.label_smoothing_mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("ignore_index", "label_smoothing", "reduction", "label_smoothing_formula", "label_smoothing_mode")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """The same with the label smoothing of Megatron-LM as the default."""

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)
