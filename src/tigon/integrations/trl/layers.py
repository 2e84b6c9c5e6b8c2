"""The reference and the teacher of a trainer run the layers that its policy runs.

tigon's layers round otherwise than the code that they replace. If the policy alone had them, its log-probabilities
would differ from the reference's before the first step. In bf16 that is hundredths of a nat per answer, which DPO takes
for a margin. TRL makes the reference itself, from the model's files, so `tigon.patch` cannot have patched it.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback

from tigon.errors import PatchError
from tigon.integrations.trl.head import UnfusedWarning
from tigon.models.fp8 import fp8_options, patch_fp8
from tigon.models.patch import flags_of, patch, unwrap
from tigon.models.report import PatchReport
from tigon.models.seams.base import seams_of
from tigon.models.spec import LAYER_FLAGS, LOSS_FLAGS, OPTIONAL_FLAGS

SECOND_MODELS = ("ref_model", "teacher_model")
"""The attributes of TRL's trainers that hold a model whose log-probabilities the policy's are compared with."""
FLAGS = (*LAYER_FLAGS, *OPTIONAL_FLAGS)
"""The flags of `tigon.patch` that change layers. Adapters and the loss are the policy's alone."""


def second_models(trainer: Trainer) -> dict[str, nn.Module]:
    """The reference and the teacher of a trainer by attribute, without those that are the policy itself."""
    models = {name: getattr(trainer, name, None) for name in SECOND_MODELS}
    policy = unwrap(trainer.model)
    held = {name: _inner(model) for name, model in models.items() if isinstance(model, nn.Module)}
    return {name: model for name, model in held.items() if model is not policy}


def _inner(model: PreTrainedModel) -> nn.Module:
    """The transformers model, also inside DeepSpeed's engine, which answers for its model's attributes."""
    while "module" in model._modules:
        model = model.module
    return unwrap(model)


class SameLayers(TrainerCallback):  # type: ignore[misc]  # transformers is not checked
    """Patches the second models of one trainer like its policy, now, and again when the training begins."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reports: dict[str, PatchReport] = {}
        """Attribute of the trainer -> what was patched there."""
        self.differences: dict[str, str] = {}
        """Attribute of the trainer -> why its layers are not the policy's."""
        _matched.add(unwrap(trainer.model))
        self.match()

    def match(self) -> None:
        """Patch each second model whose layers are not those of the policy."""
        self.differences.clear()
        for name, model in second_models(self.trainer).items():
            if difference := self._match(name, model, unwrap(self.trainer.model)):
                self.differences[name] = difference

    def _match(self, name: str, model: nn.Module, policy: nn.Module) -> str | None:
        """Returns why the layers of `model` are not those of the policy, or None."""
        wanted = layer_kinds(policy)
        same_family = model.config.model_type == policy.config.model_type  # type: ignore[union-attr]
        # A teacher's distribution is not to be rounded to FP8. The reference is the policy, which is.
        fp8 = fp8_options(policy) if name == "ref_model" else None
        try:
            if wanted != layer_kinds(model) and name in self.reports:
                self.reports.pop(name).undo()
            if wanted - layer_kinds(model):
                self.reports[name] = patch(model, **_flags_like(policy, same_family))
            if fp8 is not None and fp8_options(model) is None:
                report = patch_fp8(model, **fp8)
                self.reports.setdefault(name, PatchReport(report.model)).extend(report)
        except PatchError as reason:
            return str(reason)
        odd = {flag for _, flag in wanted ^ layer_kinds(model)} if same_family else set()
        if not odd:
            return None
        who = "the policy" if wanted - layer_kinds(model) else "it"
        return f"only {who} runs tigon's {', '.join(sorted(odd))}, so its log-probabilities are rounded otherwise"

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Match again, because the policy may have been patched, or its patch undone, after `fuse`."""
        known = dict(self.differences)
        self.match()
        new = {name: why for name, why in self.differences.items() if name not in known}
        if new:
            listed = "; ".join(f"layers of {name}: {why}" for name, why in new.items())
            warnings.warn(f"tigon leaves parts of {type(self.trainer).__name__} to TRL. {listed}.", UnfusedWarning, 2)

    def restore(self) -> None:
        """Undo what was patched. A model that was wrapped since keeps its layers."""
        self.trainer.remove_callback(self)
        _matched.discard(unwrap(self.trainer.model))
        while self.reports:
            with contextlib.suppress(PatchError):
                self.reports.popitem()[1].undo()


_matched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_matched(policy: nn.Module) -> bool:
    """Whether the second models of this model's trainer get its layers."""
    return unwrap(policy) in _matched


def layer_kinds(model: nn.Module) -> set[tuple[str, str]]:
    """(path without layer numbers, flag) of the layers that run tigon's ops."""
    return {
        (re.sub(r"\.\d+(?=\.|$)", ".*", path), seam.flag)
        for path, module in model.named_modules()
        for seam in seams_of(module)
        if seam.reported and seam.flag in FLAGS
    }


def _flags_like(policy: nn.Module, same_family: bool) -> dict[str, bool | None]:
    """Flags of `tigon.patch` that give another model the layers of the policy."""
    off: dict[str, bool | None] = dict.fromkeys(("lora", *LOSS_FLAGS), False)
    if not same_family:
        return off
    used = flags_of(policy)
    layers: dict[str, bool | None] = {flag: None if flag in used else False for flag in FLAGS}
    return {**layers, **off}
