"""`fuse(trainer)`: decide what of a trainer runs on tigon's head, replace it on this instance, and say what does not.

The line stands after the trainer's construction. TRL loads models, adds adapters and reference models, and gives them
its own forward while it builds a trainer. Before that there is nothing to replace, unless TRL's modules were changed
for every trainer of the process.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from tigon.errors import PatchError, UsageError
from tigon.integrations.trl.divergence import SHARDED_TEACHER, FusedDistillation, FusedGKD, sharded
from tigon.integrations.trl.forward import (
    WITHOUT_AUTOCAST,
    FusedForward,
    FusedInsideAutocast,
    forwards_of,
    has_trl_forward,
    restore_forward,
)
from tigon.integrations.trl.head import UnfusedWarning
from tigon.integrations.trl.orpo_cpo import FusedPreference
from tigon.integrations.trl.shared_prompts import SharedPrompts, SharedScores
from tigon.integrations.trl.unread_logits import UnreadLogitsTrainer
from tigon.models.patch import flags_of, unwrap
from tigon.models.report import PatchReport
from tigon.models.seams.lora import unfused_layers
from tigon.models.spec import LAYER_FLAGS

if TYPE_CHECKING:
    from transformers import Trainer

OLDEST, NEWEST = (1, 8), (1, 16)
"""The versions of TRL whose code tigon knows."""
MARK = "_tigon_fused"
"""The attribute of a fused trainer that holds its `FusedTrainer`."""


@dataclass
class FusedTrainer:
    """What `fuse` replaced in a trainer, and what it left to TRL. Also a context manager that restores at its end."""

    trainer: Trainer
    fused: list[str] = field(default_factory=list)
    """What runs on tigon's head: `model`, `ref_model`, or the name of a method of the trainer."""
    unfused: dict[str, str] = field(default_factory=dict)
    """What TRL computes itself, with the reason."""
    layers: dict[str, PatchReport] = field(default_factory=dict)
    """`ref_model` or `teacher_model` -> the report of its patch, if it got the layers of a patched policy."""
    shared_prompts: SharedPrompts | SharedScores | None = None
    """What computes prompts once, and how many tokens it left out; None if that is off."""
    _parts: list[Any] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        computed = ", ".join(self.fused) or "nothing"
        lines = [f"{type(self.trainer).__name__}: tigon's head computes {computed}"]
        for name, report in self.layers.items():
            lines.append(f"layers of {name}, as in the policy: {len(report.replaced)} kinds replaced")
        if not self.layers:
            lines.append("layers: none patched here; tigon.patch(model) replaces the policy's")
        if self.shared_prompts is not None:
            lines.append(f"shared prefix: {self.shared_prompts.counts}")
        policy = unwrap(self.trainer.model)
        if flags_of(policy) & {*LAYER_FLAGS} and (count := unfused_layers(policy)):
            lines.append(
                f"adapters: PEFT computes {count} layers that tigon could fuse; call tigon.patch(trainer.model) again, "
                "unless you passed lora=False"
            )
        return "\n".join([*lines, *(f"left to TRL: {what}: {reason}" for what, reason in self.unfused.items())])

    def restore(self) -> None:
        """Undo `fuse`. A second call does nothing."""
        while self._parts:
            self._parts.pop().restore()
        vars(self.trainer).pop(MARK, None)

    def __enter__(self) -> FusedTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.restore()

    def _match(self) -> None:
        """Give the second models the policy's layers again, and warn of those that cannot have them."""
        for part in self._parts:
            if hasattr(part, "match"):
                part.match()

    def _add(self, name: str, make: Callable[[], Any]) -> Any:
        """The part that `make` returns, or None if it objects; the objection is noted."""
        try:
            part = make()
        except PatchError as objection:
            self.unfused[name] = str(objection)
            return None
        self._parts.append(part)
        self.fused.append(name)
        return part


def fuse(trainer: Trainer, *, shared_prefix: bool = False) -> FusedTrainer:
    """Let a TRL trainer compute its log-probabilities with tigon's fused head, without logits.

    If `tigon.patch` has replaced layers of the policy, the trainer's reference and teacher get the same layers.

    Args:
        trainer: a trainer of TRL 1.8 to 1.16, before `trainer.train()`. Only this instance and its models change.
        shared_prefix: whether sequences of a batch that begin alike go through the models with one copy of the
            beginning: the prompt of a group in GRPO and RLOO, and of a pair in DPO, ORPO, CPO and reward models. It
            takes TRL 1.15 or later. If it cannot hold, `unfused["shared_prefix"]` gives the reason.

    Returns:
        A `FusedTrainer`: what was replaced, what was not and why, and `restore()`. TRL's own code runs the
        rest, and one `UnfusedWarning` names it.

    Raises:
        UsageError: TRL is not installed, its version is not one that tigon knows, or this is not one of its trainers.
    """
    _check_version()
    if not _is_trainer(trainer):
        raise UsageError(
            f"{type(trainer).__name__} is not a trainer of TRL; pass the trainer itself, after it is built."
        )
    if isinstance(before := vars(trainer).get(MARK), FusedTrainer):
        before._match()  # the policy may have been patched since
        if shared_prefix and before.shared_prompts is None:
            _share_prefix(before)
            _warn(before, before.unfused.keys() & {"shared_prefix"})
        return before
    result = FusedTrainer(trainer)
    name = _trl_class(trainer).__name__
    if name == "DistillationTrainer":
        result._add("_compute_loss", lambda: _distillation(trainer))
    elif name in _OVERRIDES:
        _OVERRIDES[name](result)
    elif name == "RewardTrainer":
        result.unfused["model"] = "a reward model has no head over a vocabulary"
    else:
        _fuse_models(result)
    _note_options(result)
    _match_layers(result)
    if shared_prefix:
        _share_prefix(result)
    setattr(trainer, MARK, result)
    _warn(result, result.unfused)
    return result


def _warn(result: FusedTrainer, parts: Iterable[str]) -> None:
    """Warn, at the line that called `fuse`, of parts that are left to TRL."""
    if listed := "; ".join(f"{part}: {result.unfused[part]}" for part in parts):
        name = type(result.trainer).__name__
        warnings.warn(f"tigon leaves parts of {name} to TRL. {listed}.", UnfusedWarning, stacklevel=3)


def _share_prefix(result: FusedTrainer) -> None:
    """Let the trainer's models compute prompts once that several sequences share."""
    trainer, name = result.trainer, _trl_class(result.trainer).__name__

    def make() -> SharedPrompts | SharedScores:
        if name == "RewardTrainer":
            return SharedScores(unwrap(trainer.model))
        if name in ("DistillationTrainer", "GKDTrainer", "SFTTrainer"):
            raise PatchError(f"the sequences of {name} have prompts of their own")
        if reason := next((result.unfused[part] for part in ("model", "ref_model") if part in result.unfused), None):
            raise PatchError(f"TRL computes the log-probabilities ({reason})")
        forwards = [forward for part in result._parts for forward in forwards_of(part)]
        if not forwards:
            raise PatchError("it needs TRL 1.15, whose forward takes shift_labels")
        return SharedPrompts(trainer, forwards)

    try:
        result.shared_prompts = make()
    except PatchError as objection:
        result.unfused["shared_prefix"] = str(objection)
    else:
        result._parts.append(result.shared_prompts)


def _check_version() -> None:
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("tigon.integrations.trl needs TRL: pip install 'trl>=1.8,<1.17'.") from None
    known = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= known <= NEWEST:
        lowest, highest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise UsageError(
            f"TRL {version} is installed; tigon.integrations.trl knows TRL {lowest} to {highest}. "
            "Install one of these, or train without tigon.integrations.trl.fuse."
        )


def _is_trainer(trainer: Trainer) -> bool:
    return any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__) and hasattr(trainer, "model")


def _trl_class(trainer: Trainer) -> type[Any]:
    """TRL's own class of which this trainer is an instance; a script may subclass it."""
    return next(cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl")


READ_BEFORE = (
    "precompute_ref_log_probs: TRL's own head computed the reference while the trainer was built, and the policy's has "
    "to round alike"
)


def _fuse_models(result: FusedTrainer) -> None:
    """The policy and the reference model, to which TRL's trainer has given its fused forward."""
    if getattr(result.trainer, "precompute_ref_logps", False) and has_trl_forward(unwrap(result.trainer.model)):
        result.unfused["model"] = READ_BEFORE
        return
    for name in ("model", "ref_model"):
        model = getattr(result.trainer, name, None)
        if not isinstance(model, nn.Module):
            continue
        model = unwrap(model)
        if has_trl_forward(model):
            result._add(name, lambda model=model: _fused(model, result.trainer))  # type: ignore[misc]
    if result.fused and result.unfused:
        (left,) = result.unfused
        result._parts.pop().restore()
        result.unfused[result.fused.pop()] = f"the head of {left} cannot be fused, and both have to round alike"
    if not result.fused and not result.unfused:
        _fuse_unread(result)


def _match_layers(result: FusedTrainer) -> None:
    """Give the reference and the teacher the layers of the policy."""
    from tigon.integrations.trl.layers import SameLayers  # loads transformers

    same = SameLayers(result.trainer)
    result.trainer.add_callback(same)
    result.layers = same.reports
    result.unfused |= {f"layers of {name}": reason for name, reason in same.differences.items()}
    result._parts.append(same)


def _fused(model: nn.Module, trainer: Trainer) -> Any:
    if WITHOUT_AUTOCAST in vars(model):
        return FusedInsideAutocast(model, trainer.accelerator)
    return FusedForward(model)


def _fuse_unread(result: FusedTrainer) -> None:
    """A trainer that reads the model's logits: fused in TRL 1.8 to 1.14, whose trainers all read them in one way."""
    trainer = result.trainer
    models = {
        name: unwrap(m) for name in ("model", "ref_model") if isinstance(m := getattr(trainer, name, None), nn.Module)
    }
    if _trl_class(trainer).__name__ in ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"):
        result._add("model", lambda: UnreadLogitsTrainer(trainer, models))
    else:
        result.unfused["model"] = f"this {type(trainer).__name__} computes its loss from the model's logits"


def _distillation(trainer: Trainer) -> FusedDistillation:
    _check_methods(trainer, "_compute_loss")
    return FusedDistillation(trainer)


def _with_trl_forward(model: nn.Module) -> FusedForward:
    """tigon's head in a model whose trainer uses logits: TRL's fused forward is added to it first."""
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        raise PatchError("TRL before 1.15 computes its loss from logits")
    before = vars(model).get("forward")
    if not has_trl_forward(model):
        utils.add_fused_lm_head(model, outputs=("log_probs", "mean_logits"))
    try:
        return FusedForward(model, before)
    except PatchError:
        restore_forward(model, before)
        raise


def _fuse_preference(result: FusedTrainer, *, orpo: bool) -> None:
    trainer = result.trainer

    def make() -> Any:
        _check_methods(trainer, "concatenated_forward", "get_batch_logps")
        if trainer.is_encoder_decoder:
            raise PatchError("an encoder-decoder model's labels are not its next tokens")
        return FusedPreference(trainer, _with_trl_forward(unwrap(trainer.model)), orpo=orpo)

    result._add("concatenated_forward", make)


def _fuse_gkd(result: FusedTrainer) -> None:
    trainer = result.trainer

    def make() -> Any:
        _check_methods(trainer, "compute_loss", "generalized_jsd_loss")
        teacher = unwrap(trainer.teacher_model)
        if sharded(teacher.get_output_embeddings().weight):  # type: ignore[operator]
            raise PatchError(SHARDED_TEACHER)
        student = _with_trl_forward(unwrap(trainer.model))
        try:
            return FusedGKD(trainer, student, _with_trl_forward(teacher))
        except PatchError:
            student.restore()
            raise

    if result._add("compute_loss", make):
        result.unfused["evaluation"] = "the Trainer asks compute_loss for the logits too"


def _check_methods(trainer: Trainer, *names: str) -> None:
    """Raise PatchError if TRL's trainer lacks one of these methods, or a subclass of it replaces one."""
    cls = _trl_class(trainer)
    for name in names:
        if not hasattr(cls, name):
            raise PatchError(f"this {cls.__name__} of TRL has no {name}, and computes its loss from logits")
        if getattr(type(trainer), name) is not getattr(cls, name) or name in vars(trainer):
            raise PatchError(f"{type(trainer).__name__} overrides {name}")


def _note_options(result: FusedTrainer) -> None:
    """Options whose loss TRL computes from full logits although the model is fused."""
    trainer, args = result.trainer, result.trainer.args
    if not isinstance(next(iter(result._parts), None), FusedForward):
        return
    if getattr(trainer, "label_smoother", None) is not None and getattr(args, "loss_type", "nll") == "nll":
        result.unfused["label_smoothing_factor"] = "TRL computes this loss from all logits; its metrics are fused"
    # Before transformers 5.19, TRL sets it to a string, so that the Trainer does not divide the loss.
    if callable(getattr(trainer, "compute_loss_func", None)):
        result.unfused["compute_loss_func"] = "it is given the model's logits; the metrics are fused"


_OVERRIDES: dict[str, Callable[[FusedTrainer], None]] = {
    "ORPOTrainer": lambda result: _fuse_preference(result, orpo=True),
    "CPOTrainer": lambda result: _fuse_preference(result, orpo=False),
    "GKDTrainer": _fuse_gkd,
}
