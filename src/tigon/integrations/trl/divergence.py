"""DistillationTrainer and GKDTrainer: the divergence between student and teacher by `tigon.linear_kl`."""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.errors import PatchError
from tigon.integrations.trl.forward import FusedForward
from tigon.integrations.trl.head import CapturedHead, Divergence, FusedHead, LogitForm
from tigon.integrations.trl.overrides import Override
from tigon.models.patch import unwrap
from tigon.models.seams.base import is_dtensor
from tigon.models.seams.rebind import owner_of, rebind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

LOSS = "_chunked_divergence_loss"
FUNCTION = "ChunkedDivergenceFunction"


def sharded(weight: Tensor) -> bool:
    """Whether the tensor outside its module's forward is not the whole weight (FSDP2, tensor parallel, ZeRO-3)."""
    return is_dtensor(weight) or hasattr(weight, "ds_id") or weight.numel() == 0


SHARDED_TEACHER = "the teacher's head is sharded, and the backward pass needs its weight once more"


class _Divergence:
    """Stands for TRL's ChunkedDivergenceFunction in the loss of one trainer."""

    def __init__(self, original: Any, head: FusedHead) -> None:
        self.original, self.head = original, head
        self.parameters = list(inspect.signature(original.forward).parameters)[1:]

    def apply(self, *args: Any) -> tuple[Tensor, Tensor]:
        """(divergence (N,), entropy of the student (N,)) from hidden states (N, H) and both heads."""
        student, _, _, teacher, weight, bias, beta, temperature, *forms = args
        scale, softcap, teacher_scale, teacher_softcap = forms
        if sharded(weight):
            return self.original.apply(*args)  # type: ignore[no-any-return]
        divergence, entropy = self.head.compute(
            student,
            Divergence(
                teacher,
                weight.detach(),
                None if bias is None else bias.detach(),
                LogitForm(temperature, softcap, scale),
                LogitForm(temperature, teacher_softcap, teacher_scale),
                beta,
                with_entropy=True,
            ),
        )
        return divergence, entropy


class FusedDistillation:
    """DistillationTrainer, whose `_compute_loss` calls `_chunked_divergence_loss`, which calls an autograd function."""

    def __init__(self, trainer: Trainer) -> None:
        """Raises PatchError if the trainer's loss is not the one that tigon knows, or its head cannot be fused."""
        method: Any = type(trainer)._compute_loss
        owner = owner_of(method, LOSS)
        loss = None if owner is None else owner.__globals__[LOSS]
        if owner is None or not isinstance(loss, FunctionType) or FUNCTION not in loss.__globals__:
            raise PatchError(f"{type(trainer).__name__}._compute_loss is not the code of TRL that tigon knows")
        self.head = FusedHead(unwrap(trainer.model))
        self.head.patch()
        self.overrides: list[Override] = []
        try:
            if sharded(unwrap(trainer.teacher_model).get_output_embeddings().weight):  # type: ignore[operator]
                raise PatchError(SHARDED_TEACHER)
            stand_in = _Divergence(loss.__globals__[FUNCTION], self.head)
            fused_loss = rebind(loss, loss, {FUNCTION: stand_in, "_use_triton": lambda _: True})
            fused_method = rebind(method, owner, {LOSS: fused_loss})
            self.overrides.append(Override(trainer, "_compute_loss", MethodType(fused_method, trainer)))
        except Exception:
            self.head.restore()
            raise

    def restore(self) -> None:
        for override in self.overrides:
            override.restore()
        self.head.restore()


class FusedGKD:
    """GKDTrainer's `compute_loss`, whose logits are used for nothing but the divergence.

    An evaluation that returns the outputs runs TRL's own `compute_loss`, because the caller receives the logits.
    """

    def __init__(self, trainer: Trainer, student: FusedForward, teacher: FusedForward) -> None:
        self.trainer, self.student, self.teacher = trainer, student, teacher
        self.override = Override(trainer, "compute_loss", self.compute_loss)
        self._unfused = self.override.original

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        trainer = self.trainer
        weight: Any = unwrap(trainer.teacher_model).get_output_embeddings().weight  # type: ignore[operator]
        if return_outputs or sharded(weight):
            return self._unfused(model, inputs, return_outputs, num_items_in_batch)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        captured = CapturedHead()
        trainer.teacher_model.eval()
        self.teacher.request = lambda form: captured
        try:
            with torch.no_grad():
                trainer.teacher_model(**given, fused_lm_head=True)
        finally:
            self.teacher.request = None
        teacher_form = self.teacher.form
        assert captured.hidden is not None and captured.weight is not None and teacher_form is not None
        teacher_hidden, teacher_weight, teacher_bias = captured.hidden, captured.weight, captured.bias
        self.student.request = lambda form: Divergence(
            teacher_hidden, teacher_weight, teacher_bias, form, teacher_form, float(trainer.beta)
        )
        try:
            outputs = model(**given, fused_lm_head=True)
        finally:
            self.student.request = None
        divergence_BT = outputs.log_probs  # 0 where the label is -100
        if num_items_in_batch is None:
            return divergence_BT.sum() / outputs.label_mask.sum().clamp_min(1)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(divergence_BT.device)
        return divergence_BT.sum() / num_items_in_batch

    def restore(self) -> None:
        self.override.restore()
        self.student.restore()
        self.teacher.restore()
