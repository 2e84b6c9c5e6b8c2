"""The engine: decide for every module of a model whether it changes, then change them all, or none.

Deciding reads only (structure, and numbers on stand-ins: see `probe`), so whatever is wrong is raised before anything
is touched. Which seams a family has is a row of `table`; how a seam replaces a forward is in `layers` and `loss_seam`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tigon.errors import OptionError, PatchError
from tigon.models.loss_seam import CausalLMSeam, HeadSeam, peel
from tigon.models.report import LeftAlone, PatchReport, Replaced
from tigon.models.seam import Change, PatchedModule, Seam, instance_objection
from tigon.models.spec import PatchSpec
from tigon.models.table import MODELS


@dataclass
class _Decision:
    """What is to become of each candidate of each seam."""

    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[str, nn.Module, Seam, str]] = field(default_factory=list)
    patched: int = 0
    """Modules that had tigon's ops before."""
    notes: list[str] = field(default_factory=list)


def patch(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    rope: bool = True,
    mlp: bool = True,
    cross_entropy: bool = True,
    linear_cross_entropy: bool = True,
) -> PatchReport:
    """Put tigon's ops into this model instance, and into nothing else.

    Args:
        model: a transformers model of a family in `tigon.models.MODELS`, or a PEFT or DistributedDataParallel wrapper
            of one. Patch before `torch.compile` and before FSDP or DeepSpeed wrap it.
        rms_norm, rope, mlp: the ops inside the decoder layers.
        cross_entropy: the loss of logits that exist (eval with labels, or where the head cannot be fused).
        linear_cross_entropy: in training with labels, the loss inside `lm_head`, without logits.

    Returns:
        What was replaced, what was left alone and why; `report.undo()` takes it back. On a model that is patched
        already, a report that says so.

    Raises:
        PatchError: the model is of no supported family, or a seam that is switched on matches nothing in it. Nothing
            was changed. OptionError: a flag is not a bool.
    """
    flags = {
        "rms_norm": rms_norm,
        "rope": rope,
        "mlp": mlp,
        "cross_entropy": cross_entropy,
        "linear_cross_entropy": linear_cross_entropy,
    }
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: expected True or False.")
    model = unwrap(model)
    spec = spec_of(model)
    decision = _Decision(patched=sum(isinstance(m, PatchedModule) for m in model.modules()))
    for seam in spec.layer_seams:
        _decide_layers(model, spec, seam, flags[seam.flag], decision)
    if linear_cross_entropy or cross_entropy:
        _decide_loss(model, spec, flags, decision)
    _apply(decision.changes)
    return _report(model, spec, decision, flags)


def unpatch(model: nn.Module) -> int:
    """Take every tigon seam off a model, such as a copy or an unpickled one, whose report is not at hand.

    Returns the number of modules restored. Raises PatchError, with nothing undone, as `PatchReport.undo` does.
    """
    modules = [(path, m) for path, m in model.named_modules() if isinstance(m, PatchedModule)]
    report = PatchReport("", _changes=[Change(path, m, m._tigon_seam) for path, m in modules])
    report.undo()
    return len(modules)


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside PEFT's, DistributedDataParallel's or torch.compile's wrapper."""
    while not hasattr(getattr(model, "config", None), "model_type") or hasattr(model, "get_base_model"):
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else None  # type: ignore[operator]
        inner = inner or getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            raise PatchError(
                f"{type(model).__name__} is not a transformers model: it has no config.model_type. Pass the model "
                "itself; for your own modules use tigon.nn."
            )
        model = inner
    return model


def spec_of(model: nn.Module) -> PatchSpec:
    """The row of the model's family."""
    model_type = model.config.model_type  # type: ignore[union-attr]
    if model_type not in MODELS:
        raise PatchError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(MODELS))}. For other models "
            "use the modules of tigon.nn and tigon.linear_cross_entropy."
        )
    return MODELS[model_type]  # type: ignore[index]


def _decide_layers(model: nn.Module, spec: PatchSpec, seam: Seam, on: bool, decision: _Decision) -> None:
    patched = any(isinstance(m, PatchedModule) and m._tigon_seam.flag == seam.flag for m in model.modules())
    if not on and patched:
        decision.notes.append(f"{seam.flag}=False, but it was patched before; undo that patch first")
    if not on or seam.flag in spec.keep:
        return
    accepted = []
    first_refusal = len(decision.refused)
    for path, module in model.named_modules():
        if not isinstance(module, PatchedModule) and seam.candidate(module):
            accepted.append(_judge(path, module, seam, decision))
    if not patched and not any(accepted):
        reasons = {reason for *_, reason in decision.refused[first_refusal:]} or {"it has no such module"}
        raise PatchError(
            f"{seam.flag}: nothing in this {type(model).__name__} can run tigon.{seam.op}: "
            f"{'; '.join(sorted(reasons))}. Nothing was changed; pass {seam.flag}=False to leave it alone."
        )


def _judge(path: str, module: nn.Module, seam: Seam, decision: _Decision) -> bool:
    reason = instance_objection(module) or seam.objection(module)
    if reason is None:
        decision.changes.append(Change(path, module, seam))
    else:
        decision.refused.append((path, module, seam, reason))
    return reason is None


def _decide_loss(model: nn.Module, spec: PatchSpec, flags: dict[str, bool], decision: _Decision) -> None:
    seam = CausalLMSeam(head=spec.head, fused=flags["linear_cross_entropy"], cross_entropy=flags["cross_entropy"])
    head = seam.find_head(model)
    if isinstance(model, PatchedModule):
        if model._tigon_seam != seam:
            decision.notes.append("the loss was patched with other flags; undo that patch first to change them")
        elif seam.fused and head is not None and not any(isinstance(m, PatchedModule) for m in peel(head)):
            _decide_head(head, spec.head, decision)  # a new head, as resize_token_embeddings makes
        return
    if head is None or not seam.candidate(model):
        decision.refused.append(("", model, seam, f"it has no {spec.head}, so it computes no language-model loss"))
        return
    reason = instance_objection(model) or seam.objection(model)
    if reason is not None:
        decision.refused.append(("", model, seam, reason))
        return
    if seam.fused and not _decide_head(head, spec.head, decision):
        # The model computes logits; without cross_entropy there is nothing left to do for it.
        seam = CausalLMSeam(head=spec.head, fused=False, cross_entropy=seam.cross_entropy)
    if seam.fused or seam.cross_entropy:
        decision.changes.append(Change("", model, seam))


def _decide_head(head: nn.Module, path: str, decision: _Decision) -> bool:
    """Whether a module under the head's path will compute the loss."""
    linears = [m for m in peel(head) if isinstance(m, nn.Linear)]
    if not linears:
        reason = f"it is a {type(head).__module__}.{type(head).__name__}; training computes the full logits through it"
        decision.refused.append((path, head, HeadSeam(), reason))
        return False
    names = {id(m): f"{path}.{name}".rstrip(".") for name, m in head.named_modules()}
    judged = [_judge(names[id(m)], m, HeadSeam(), decision) for m in linears]
    return any(judged)


def _apply(changes: list[Change]) -> None:
    done: list[Change] = []
    try:
        for change in changes:
            change.apply()
            done.append(change)
    except BaseException:
        for change in reversed(done):
            change.revert()
        raise


def _report(model: nn.Module, spec: PatchSpec, decision: _Decision, flags: dict[str, bool]) -> PatchReport:
    report = PatchReport(f"{type(model).__name__} (model_type {spec.model_type})", _changes=decision.changes)
    replaced: dict[tuple[str, str], list[str]] = {}
    for change in decision.changes:
        replaced.setdefault((change.seam.op_for(change.module), type(change.module).__name__), []).append(change.path)
    report.replaced = [Replaced(op, cls, tuple(paths)) for (op, cls), paths in replaced.items()]
    left: dict[tuple[str, str, str], list[str]] = {}
    for path, module, seam, reason in decision.refused:
        left.setdefault((seam.op, type(module).__name__, reason), []).append(path)
    report.left_alone = [LeftAlone(op, cls, tuple(paths), reason) for (op, cls, reason), paths in left.items()]
    for flag, reason in spec.keep.items():
        report.notes.append(f"{flag} is left alone in this family: {reason}")
    off = [name for name, on in flags.items() if not on]
    if off:
        report.notes.append(f"switched off: {', '.join(off)}")
    if decision.patched:
        what = "partly patched before" if decision.changes else "already patched, nothing changed"
        report.notes.append(f"{what}: {decision.patched} modules had tigon's ops")
    report.notes += decision.notes
    return report
