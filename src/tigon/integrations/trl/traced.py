"""What TRL's trainers compute with tigon's head, on tensors without values, for the planner. It does not need TRL.

TRL's own code cannot run on such tensors: it selects tokens by their values and writes numbers to its log. These
functions make the same forward passes and the same large tensors. Every token after the first counts as an answer's, so
the head's memory is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.integrations.trl.head import Divergence, FusedHead, LogitForm, Request, TokenStatistics
from tigon.integrations.trl.shared_prefix import mask_of
from tigon.models.patch import unwrap
from tigon.ops import PrefixRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# B sequences, T tokens, N tokens that count, H hidden.

DPO_OUTPUTS = ("entropy", "mean_logits", "is_top1")
"""What TRL's DPOTrainer takes from the head besides log-probabilities, for its log."""
KTO_OUTPUTS = ("entropy", "mean_logits")
GRPO_OUTPUTS = ("entropy",)


@dataclass(frozen=True)
class TracedModel:
    """A model whose head answers requests, as `fuse` leaves it."""

    causal: PreTrainedModel
    """The transformers model, without PEFT's wrapper."""
    head: FusedHead
    form: LogitForm

    @classmethod
    def of(cls, model: PreTrainedModel) -> TracedModel:
        """model: a causal language model, with or without adapters."""
        causal: Any = unwrap(model)
        head = FusedHead(causal)
        head.patch()
        softcap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
        return cls(causal, head, LogitForm(softcap=softcap))

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """The hidden states (B, T, H) before the head."""
        return self.causal.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def compute(self, hidden_NH: Tensor, request: Request) -> tuple[Tensor, ...]:
        return self.head.compute(hidden_NH, request)


def selected(rows_BTx: Tensor, tokens: tuple[Tensor, Tensor]) -> Tensor:
    """The rows (N, ...) of the tokens that count, as `rows[mask]` gathers them."""
    return rows_BTx[tokens]


def _positions(mask_BT: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """The places where the mask is true, as `mask.nonzero()` finds it: at `kept` tokens of each sequence."""
    rows, columns = torch.empty((mask_BT.shape[0] * kept, 2), dtype=torch.int64).unbind(1)
    return rows, columns


def token_logprobs(
    model: TracedModel, ids_BT: Tensor, labels_BT: Tensor, outputs: Sequence[str] = (), kept: int | None = None
) -> tuple[Tensor, ...]:
    """TRL's fused forward: the log-probability of each label (B, T - 1), and each of `outputs` in this shape.

    kept: how many labels of each sequence count; None: all.
    """
    hidden_BTH, labels_BT = model.hidden(ids_BT)[:, :-1], labels_BT[:, 1:]
    mask_BT = labels_BT != -100
    tokens = _positions(mask_BT, mask_BT.shape[1] if kept is None else kept)
    request = TokenStatistics(selected(labels_BT, tokens), model.form, tuple(outputs))
    answers = model.compute(selected(hidden_BTH, tokens), request)
    # The number of values that `masked_scatter` takes in its backward is unknown in a trace; `index_put` takes as many.
    return tuple(answer.new_zeros(mask_BT.shape).index_put(tokens, answer) for answer in answers)


def token_logprobs_of_row(
    model: TracedModel, row: PrefixRow, kept: int, outputs: Sequence[str] = ()
) -> tuple[Tensor, ...]:
    """The same of sequences that share prefixes, computed by one row: (B, `kept`). All B sequences are branches."""
    ids_1N = torch.empty((1, row.tokens), dtype=torch.int64)
    inputs = {"input_ids": ids_1N, "attention_mask": mask_of(row, ids_1N.device), "position_ids": ids_1N}
    hidden_1NH = model.causal.base_model(**inputs, use_cache=False).last_hidden_state
    shape = (sum(len(group.branches) for group in row.groups), kept)
    tokens = _positions(torch.empty(shape), kept)
    request = TokenStatistics(selected(ids_1N, tokens), model.form, tuple(outputs))
    answers = model.compute(selected(hidden_1NH, tokens), request)
    places_N = torch.empty(shape, dtype=torch.int64).flatten()
    rows_1N = (answer.new_zeros(ids_1N.shape).index_put(tokens, answer) for answer in answers)
    return tuple(row_1N[0].index_select(0, places_N).view(shape) for row_1N in rows_1N)


def preference_logprobs(model: TracedModel, ids_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`FusedPreference.concatenated_forward` of ORPO: log-probabilities and mean logits (B, T), every position kept."""
    keep_BT = labels_BT != -100
    hidden_BTH = model.hidden(ids_BT)
    request = TokenStatistics(labels_BT.clamp(min=0).reshape(-1), model.form, ("mean_logits",), keep_BT.reshape(-1))
    logprobs_N, mean_N = model.compute(hidden_BTH.reshape(-1, hidden_BTH.shape[-1]), request)
    shape = labels_BT.shape
    return logprobs_N.view(shape).masked_fill(~keep_BT, 0), mean_N.view(shape).masked_fill(~keep_BT, 0)


def divergence(student: TracedModel, teacher: TracedModel, ids_BT: Tensor, kept: int, beta: float) -> Tensor:
    """`DistillationTrainer._compute_loss`: the divergence (N,) at the last `kept` tokens of each sequence."""
    hidden_BTH = student.hidden(ids_BT)[:, :-1][:, -kept:]
    with torch.no_grad():
        teacher_BTG = teacher.hidden(ids_BT)[:, :-1][:, -kept:]
    mask_N = torch.empty(hidden_BTH.shape[:2].numel(), dtype=torch.bool)
    (index,) = torch.empty((mask_N.numel(), 1), dtype=torch.int64).unbind(1)
    hidden_NH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])[index]
    teacher_NG = teacher_BTG.reshape(-1, teacher_BTG.shape[-1])[index]
    teacher_head = teacher.causal.get_output_embeddings()
    divergence_N, _ = student.compute(
        hidden_NH,
        Divergence(teacher_NG, teacher_head.weight.detach(), None, student.form, teacher.form, beta, with_entropy=True),
    )
    return divergence_N


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Run a model as it is without its adapters, as PEFT's `disable_adapter` does. The trace lacks PEFT's wrapper."""
    layers = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
