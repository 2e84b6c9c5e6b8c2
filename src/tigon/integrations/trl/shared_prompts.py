"""The models of one trainer with shared prefixes: for log-probabilities, and for a reward model's scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.errors import PatchError
from tigon.integrations.trl.forward import FusedForward, restore_forward
from tigon.integrations.trl.overrides import Override
from tigon.integrations.trl.shared_prefix import SharedPrefix, TokenCounts
from tigon.models.seams.rebind import owner_of, rebind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

SHUFFLE, SHUFFLES_IN = "shuffle_sequence_dict", "_prepare_inputs"
"""TRL's function that shuffles the completions of GRPO and RLOO, and the method that calls it."""


class SharedPrompts:
    """The policy and the reference of one trainer. Both share prefixes or none, because both have to round alike."""

    def __init__(self, trainer: Trainer, forwards: Sequence[FusedForward]) -> None:
        """Raises PatchError if a model cannot share prefixes. Nothing was changed then."""
        if getattr(trainer, "aux_loss_enabled", False):
            raise PatchError("the load-balancing loss would count a prompt once; set router_aux_loss_coef=0")
        if getattr(trainer.args, "torch_compile", False):
            raise PatchError("torch.compile would compile the model again for each row; set torch_compile=False")
        self.counts, self.forwards = TokenCounts(), forwards
        self.models: list[SharedPrefix] = []
        self.override: Override | None = None
        try:
            for forward in forwards:
                self.models.append(SharedPrefix(forward.model, self.counts))
                forward.share_prefix(self.models[-1])
        except PatchError:
            self.restore()
            raise
        self._keep_groups_together(trainer)

    def _keep_groups_together(self, trainer: Trainer) -> None:
        """TRL shuffles completions before it divides them into micro-batches. Shuffle whole groups instead."""
        method: Any = getattr(type(trainer), SHUFFLES_IN)
        if (owner := owner_of(method, SHUFFLE)) is not None:
            run = MethodType(rebind(method, owner, {SHUFFLE: shuffled_by_prompt}), trainer)
            self.override = Override(trainer, SHUFFLES_IN, run)

    def restore(self) -> None:
        for forward in self.forwards:
            forward.shared = None
        while self.models:
            self.models.pop().restore()
        if self.override is not None:
            self.override.restore()


def shuffled_by_prompt(rows: Mapping[str, Any]) -> dict[str, Any]:
    """`shuffle_sequence_dict` of TRL, but the rows of a prompt follow the first of them, in the shuffled order."""
    prompts = rows["prompt_ids"].masked_fill(rows["prompt_mask"] == 0, -1)
    order = torch.randperm(len(prompts))
    group_of = torch.unique(prompts[order.to(prompts.device)], dim=0, return_inverse=True)[1].tolist()
    begins = {group: place for place, group in reversed([*enumerate(group_of)])}
    order = order[sorted(range(len(group_of)), key=lambda place: begins[group_of[place]])]

    def take(values: Any) -> Any:
        if values is None or (isinstance(values, Tensor) and values.ndim == 0):
            return values
        return values[order] if isinstance(values, Tensor) else [values[i] for i in order.tolist()]

    return {name: take(values) for name, values in rows.items()}


class SharedScores:
    """A reward model that computes the scores of the sequences from one row."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises PatchError if the model cannot share prefixes, or reads its score in a way that is not known."""
        from transformers.modeling_layers import GenericForSequenceClassification

        if type(model).forward is not GenericForSequenceClassification.forward:
            raise PatchError(f"{type(model).__name__} has a forward of its own")
        self.model, self.before = model, vars(model).get("forward")
        self.shared = SharedPrefix(model)
        original: Any = model.forward

        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            inputs = kwargs if not args else {"input_ids": args[0], **kwargs}
            if len(args) > 1 or inputs.get("labels") is not None or (layout := self.shared.layout(inputs)) is None:
                return original(*args, **kwargs)
            from transformers.modeling_outputs import SequenceClassifierOutputWithPast

            ids_BT = inputs["input_ids"]
            hidden_NH = self.shared.hidden_states(layout, ids_BT)
            row, column = torch.arange(len(ids_BT), device=ids_BT.device), self._scored(ids_BT)
            places = layout.place_BT.view(ids_BT.shape)[row, column]
            return SequenceClassifierOutputWithPast(logits=model.score(hidden_NH[places]))

        self._forward = MethodType(forward, model)
        vars(model)["forward"] = self._forward

    @property
    def counts(self) -> TokenCounts:
        return self.shared.counts

    def _scored(self, ids_BT: Tensor) -> Tensor:
        """The column of the token whose score transformers takes: the last that is not padding."""
        text: Any = self.model.config.get_text_config()
        from_end: Tensor = (ids_BT != text.pad_token_id).int().flip(1).argmax(1)
        return ids_BT.shape[1] - 1 - from_end

    def restore(self) -> None:
        if vars(self.model).get("forward") is self._forward:
            restore_forward(self.model, self.before)
        self.shared.restore()
