"""`tigon.patch`: decide for every module of a model whether it changes, then change all of them or none.

Deciding only reads: it looks at the structure and compares numbers on stand-ins (`verification/probe.py`). Errors are
therefore raised before anything is changed. `table.py` lists the seams of each family; `seams/` holds the replacements.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tigon.errors import OptionError, PatchError
from tigon.models.hybrid_layers import paths_of, refused_backward, rule_left
from tigon.models.report import LeftAlone, PatchReport, Replaced, SeamsByPath
from tigon.models.seams.attention_sinks import CausalMaskSeam, SinksAttentionSeam
from tigon.models.seams.base import (
    Change,
    PatchedModule,
    Seam,
    instance_objection,
    own_flag,
    package_of,
    replaced_by_package_reason,
    seams_of,
    vendor,
)
from tigon.models.seams.head.lora_head import LoraHeadSeam
from tigon.models.seams.head.loss import CausalLMSeam, HeadSeam, peel
from tigon.models.seams.lora import LoraSeam, find_siblings
from tigon.models.seams.mask import MaskSeam
from tigon.models.seams.norm import mark_finds_amax
from tigon.models.spec import (
    ADAPTER_FLAGS,
    ADAPTER_SEAMS,
    CONVOLUTION_FLAG,
    EXPERT_FLAGS,
    LAYER_FLAGS,
    LOSS_FLAGS,
    OPTIONAL_FLAGS,
    OPTIONAL_SEAMS,
    SINKS_FLAG,
    PatchSpec,
)
from tigon.models.structure import structural_row
from tigon.models.table import MODELS

Flags = Mapping[str, bool | None]
ALL_FLAGS = (*LAYER_FLAGS, *ADAPTER_FLAGS, *OPTIONAL_FLAGS, *LOSS_FLAGS)
REMOVED_FLAGS = {
    "add_rms_norm": "it saved less than 1 % of a step. Leave it out: `rms_norm` patches the norms, and "
    "`tigon.add_rms_norm` is the op for layers of your own.",
}
"""Former flag -> what the caller does without it."""

# Objections that do not name the package that caused them. Another package's kernels often refuse the probe's tensors.
UNTOLD = ("cannot be compared", "overridden on the instance")


@dataclass
class _Decision:
    """The outcome for each candidate of each seam."""

    home: str = ""
    """The package of the model's class."""
    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[str, nn.Module, Seam, str]] = field(default_factory=list)
    patched: int = 0
    """Number of modules that had tigon's ops before this call."""
    notes: list[str] = field(default_factory=list)

    def reasons(self, flag: str) -> str:
        """Why no module got this flag's op."""
        return "; ".join(sorted({reason for _, _, seam, reason in self.refused if seam.flag == flag}))


def patch(
    model: nn.Module,
    *,
    rms_norm: bool | None = None,
    layer_norm: bool | None = None,
    rope: bool | None = None,
    mlp: bool | None = None,
    lora: bool | None = None,
    experts: bool | None = None,
    router: bool | None = None,
    convolution: bool | None = None,
    attention_sinks: bool | None = None,
    cross_entropy: bool | None = None,
    linear_cross_entropy: bool | None = None,
    **unknown: bool | None,
) -> PatchReport:
    """Replace the layers of this model instance with tigon's ops, in place; other models are not affected.

    Every flag is None, True or False. None (the default) uses the op if the model has matching modules. True raises an
    error if it has none. False leaves these modules alone.

    Args:
        model: a transformers model with any head or none, or one inside a wrapper of PEFT, DistributedDataParallel or
            sentence-transformers. A family in
            `tigon.models.MODELS` is patched by its row; any other family is matched by structure. Call `patch` before
            `torch.compile` and before FSDP or DeepSpeed wrap the model.
        rms_norm, layer_norm, rope, mlp: the ops inside the decoder layers; mlp includes mixture-of-experts layers.
        lora: PEFT's LoRA layers, dense or 4-bit, each as one op. Add the adapters before `patch`, or call `patch`
            again.
        experts: the experts of a mixture as one op, with PEFT's adapters on their weights if there are any. Add the
            adapters before `patch`, or call `patch` again.
        router: the router of a mixture and the model's load-balancing loss, each in one kernel per pass.
        convolution: the short convolution of layers with a state, which PyTorch would run.
        attention_sinks: eager attention with sinks, as in GPT-OSS, without its (heads, T, T) scores.
        cross_entropy: the loss if logits exist (eval with labels, or a head that cannot be fused).
        linear_cross_entropy: in training with labels, the loss is computed inside the head, without logits.

    Returns:
        A `PatchReport`: the modules that were replaced, those that were left alone, and why. `report.undo()` restores
        the model. If the model is already patched, the report says so.

    Raises:
        PatchError: no module matches a flag that is True or a flag that the family's row promises; or no module
            matches any flag. The model is unchanged. A module of tigon.nn in the model matches its flag.
        OptionError: a flag is not True, False or None, or its name is unknown.
    """
    for name in unknown:
        if name in REMOVED_FLAGS:
            raise OptionError(f"{name} is not a flag of tigon.patch any more; {REMOVED_FLAGS[name]}")
        near = difflib.get_close_matches(name, ALL_FLAGS, n=1)
        hint = f"the nearest is {near[0]}" if near else f"the flags are {', '.join(ALL_FLAGS)}"
        raise OptionError(f"{name} is not a flag of tigon.patch; {hint}.")
    flags: Flags = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rope": rope,
        "mlp": mlp,
        "lora": lora,
        "experts": experts,
        "router": router,
        "convolution": convolution,
        "attention_sinks": attention_sinks,
        "cross_entropy": cross_entropy,
        "linear_cross_entropy": linear_cross_entropy,
    }
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise OptionError(f"{name}={value!r}: expected True, False or None.")
    model = unwrap(model)
    return apply_row(model, spec_of(model), flags)


def apply_row(model: nn.Module, spec: PatchSpec, flags: Flags | None = None) -> PatchReport:
    """`patch` with a given row; `model` is the transformers model itself, without wrappers."""
    flags = {**dict.fromkeys(ALL_FLAGS), **(flags or {})}
    decision = _Decision(
        home=package_of(type(model)),
        patched=sum(
            m._tigon_seam.reported if isinstance(m, PatchedModule) else own_flag(m) is not None for m in model.modules()
        ),
    )
    # Experts first, so that the seam of their activation leaves these modules to them.
    for flag in (*EXPERT_FLAGS, CONVOLUTION_FLAG, *LAYER_FLAGS, *ADAPTER_FLAGS):
        _decide_layers(model, spec, flag, flags[flag], decision)
    # After rope, whose seam may be below on the same attention.
    if flags[SINKS_FLAG] is not False:
        _decide_sinks(model, flags, decision)
    if any(flags[flag] is not False for flag in LOSS_FLAGS):
        _decide_loss(model, spec, flags, decision)
    # Few models have adapters, so a flag for them that was left out asks for nothing.
    quiet = (*ADAPTER_FLAGS, *OPTIONAL_FLAGS)
    asked = any(on is not False and (on or name not in quiet) for name, on in flags.items())
    if not decision.changes and not decision.patched and asked:
        reasons = sorted({reason for *_, reason in decision.refused})
        raise PatchError(
            f"nothing in this {type(model).__name__} can run an op of tigon"
            f"{': ' if reasons else ''}{'; '.join(reasons)}. Nothing was changed."
        )
    if decision.changes:
        _decide_masks(model, decision)
    changed_ids = {id(change.module) for change in decision.changes}
    # A module that another flag's seam fits is not left alone. The adapter of a head is, as far as the loss goes: the
    # loss is not fused. Attention with sinks is, if only its rotary embedding is patched.
    own_reasons = (*LOSS_FLAGS, SINKS_FLAG)
    decision.refused = [
        entry for entry in decision.refused if id(entry[1]) not in changed_ids or entry[2].flag in own_reasons
    ]
    _apply_all(model, decision.changes)
    return _report(model, spec, decision, flags)


def patch_like(model: nn.Module, seams: SeamsByPath) -> None:
    """Patch a model like an equal one, without comparing its numbers again.

    Args:
        model: a model that was built in the same way as the patched one.
        seams: those of the other model's report.
    """
    model = unwrap(model)
    _apply_all(model, [Change(path, model.get_submodule(path), seam) for path, seam in seams])


def unpatch(model: nn.Module) -> int:
    """Undo every patch of a model without its report, for example on a copy or an unpickled model.

    Args:
        model: any module that may contain patched modules.

    Returns:
        The number of modules restored.

    Raises:
        PatchError: a module was wrapped after the patch. Nothing was undone.
    """
    restored: set[str] = set()  # those that a report names
    while modules := [(path, m) for path, m in model.named_modules() if isinstance(m, PatchedModule)]:
        restored.update(path for path, m in modules if m._tigon_seam.reported)
        PatchReport("", _changes=[Change(path, m, m._tigon_seam) for path, m in modules]).undo()
    mark_finds_amax(model.modules(), False)
    return len(restored)


def flags_of(model: nn.Module) -> set[str]:
    """The flags of `patch` whose ops the model runs."""
    return {seam.flag for m in model.modules() for seam in seams_of(m) if seam.reported}


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper: PEFT, sentence-transformers, DistributedDataParallel, torch.compile."""
    wraps = ("get_base_model", "transformers_model")  # names of PEFT and of sentence-transformers
    while not hasattr(getattr(model, "config", None), "model_type") or any(hasattr(model, name) for name in wraps):
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else None  # type: ignore[operator]
        inner = inner or getattr(model, "transformers_model", None)
        inner = inner or getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            raise PatchError(
                f"{type(model).__name__} is not a transformers model: it lacks config.model_type. Pass the model "
                "itself; for your own modules use tigon.nn."
            )
        model = inner
    return model


def spec_of(model: nn.Module) -> PatchSpec:
    """The row of the model's family, or one made from its structure."""
    model_type: Any = model.config.model_type  # type: ignore[union-attr]
    return MODELS[model_type] if model_type in MODELS else structural_row(model)


def _decide_layers(model: nn.Module, spec: PatchSpec, flag: str, on: bool | None, decision: _Decision) -> None:
    seams = ADAPTER_SEAMS.get(flag) or OPTIONAL_SEAMS.get(flag) or spec.seams.get(flag, ())
    before = [m for m in model.modules() if isinstance(m, PatchedModule)]
    patched = any(seam.flag == flag for m in before for seam in seams_of(m))
    if on is False:
        if patched:
            decision.notes.append(f"{flag}=False, but it was patched before; undo that patch first")
        return
    # Another flag's op may serve the modules, as that of experts does for mlp, or they are tigon's from the start.
    accepted = any(seam.candidate(m) for m in before for seam in seams)
    accepted = accepted or any(own_flag(m) == flag for m in model.modules())
    fitted: dict[type, Seam] = {}
    changed = {id(change.module) for change in decision.changes}
    for path, module in model.named_modules():
        runs_op = isinstance(module, PatchedModule) or own_flag(module) is not None
        candidates = [] if runs_op else [seam for seam in seams if seam.candidate(module)]
        if candidates and id(module) in changed:
            accepted = True
            continue
        # Try first the seam that fitted another module of this class.
        first = fitted.get(type(module))
        candidates = [seam for seam in candidates if seam is first] + [s for s in candidates if s is not first]
        if candidates and _judge(path, module, candidates, decision):
            fitted[type(module)] = decision.changes[-1].seam
            accepted = True
    claims = spec.claims and not spec.towers_of_any_family
    claimed = on or (claims and flag in spec.seams and flag not in spec.keep)
    if claimed and not patched and not accepted:
        reasons = spec.keep.get(flag) or decision.reasons(flag) or "it has no such module"
        raise PatchError(
            f"{flag}: nothing in this {type(model).__name__} can run it: {reasons}. "
            f"Nothing was changed; pass {flag}=False to leave it alone."
        )


def _decide_sinks(model: nn.Module, flags: Flags, decision: _Decision) -> None:
    """Patch every attention with sinks and the module that makes their masks, or none of them."""
    seam, masks = SinksAttentionSeam(), CausalMaskSeam()
    if any(seam.flag == SINKS_FLAG for m in model.modules() for seam in seams_of(m)):
        return
    attentions = seam.claims(model)
    inside = {id(m) for _, m in attentions}
    trunks = [(path, m) for path, m in masks.claims(model) if inside <= {id(each) for each in m.modules()}]
    reason = None if attentions else "it has no eager attention with sinks"
    reason = reason or (None if trunks else "its masks are not made by transformers' functions for causal masks")
    if reason is None:
        judged = _Decision(home=decision.home)
        _judge(*trunks[-1], [masks], judged)
        for path, m in attentions:
            _judge(path, m, [seam], judged)
        if not judged.refused:
            decision.changes += judged.changes
            return
        reason = judged.reasons(SINKS_FLAG)
    decision.refused += [(path, m, seam, reason) for path, m in attentions]
    _insist(flags, (SINKS_FLAG,), reason)


def _decide_masks(model: nn.Module, decision: _Decision) -> None:
    """Let each trunk that makes its own positions make its mask without a wait for the GPU."""
    seam, changed = MaskSeam(), {id(change.module) for change in decision.changes}
    for path, module in model.named_modules():
        free = not isinstance(module, PatchedModule) and id(module) not in changed
        if free and seam.candidate(module) and instance_objection(module) is None:
            decision.changes.append(Change(path, module, seam))


def _judge(path: str, module: nn.Module, candidates: list[Seam], decision: _Decision) -> bool:
    """Give the module the first seam without an objection; if all object, record the last objection."""
    reason = instance_objection(module)
    for seam in candidates:
        objection = (None if seam.goes_around(module) else reason) or seam.objection(module)
        if objection is None:
            decision.changes.append(Change(path, module, seam))
            return True
        if any(words in objection for words in UNTOLD) and (package := vendor(seam.code(module), decision.home)):
            objection = replaced_by_package_reason(package, module)
    decision.refused.append((path, module, seam, objection or ""))
    return False


def _package_of_forward(model: nn.Module, home: str) -> str:
    """The package of the class that defines `model.forward`; `home` if the instance defines it."""
    if "forward" in vars(model):
        return home
    return next(package_of(cls) for cls in type(model).__mro__ if "forward" in vars(cls))


def _decide_loss(model: nn.Module, spec: PatchSpec, flags: Flags, decision: _Decision) -> None:
    head_path = spec.head or output_head(model)
    fused, cross_entropy = flags["linear_cross_entropy"] is not False, flags["cross_entropy"] is not False
    seam = CausalLMSeam(
        head=head_path or "lm_head",
        fused=fused,
        cross_entropy=cross_entropy,
        logits=spec.logits,
        balancing=flags["router"] is not False,
    )
    head = seam.find_head(model)
    if isinstance(model, PatchedModule):
        if model._tigon_seam != seam:
            decision.notes.append("the loss was patched with other flags; undo that patch first to change them")
        elif seam.fused and head is not None and not any(isinstance(m, PatchedModule) for m in peel(head)):
            _decide_head(head, seam.head, decision)  # resize_token_embeddings creates a new head
        return
    if head is None or not seam.candidate(model):
        reason: str | None = f"it has no {spec.head or 'output embeddings'}, so it computes no language-model loss"
    else:
        # A subclass has its own forward, which is fine. A forward assigned to a class may bypass the head.
        package = vendor(seam.code(model), _package_of_forward(model, decision.home))
        reason = (
            replaced_by_package_reason(package, model)
            if package
            else instance_objection(model) or seam.objection(model)
        )
    if reason is not None or head is None:
        decision.refused.append(("", model, seam, reason or ""))
        _insist(flags, LOSS_FLAGS, reason)
        return
    if seam.fused and not _decide_head(head, seam.head, decision):
        _insist(flags, ("linear_cross_entropy",), decision.reasons("linear_cross_entropy"))
        # The model computes logits; without cross_entropy there is nothing left to patch.
        seam = replace(seam, fused=False)
    if seam.fused or seam.cross_entropy:
        decision.changes.append(Change("", model, seam))


def _insist(flags: Flags, names: tuple[str, ...], reason: str | None) -> None:
    for name in names:
        if flags[name]:
            raise PatchError(f"{name}=True, but {reason}. Nothing was changed; leave {name} out, or pass False.")


def output_head(model: nn.Module) -> str | None:
    """The path of the module that the model names as its output embeddings."""
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return next((path for path, module in model.named_modules() if module is head and path), None)


def _decide_head(head: nn.Module, path: str, decision: _Decision) -> bool:
    """Whether a module under the head's path will compute the loss."""
    layer = next((change for change in decision.changes if change.module is head), None)
    with_adapter = LoraHeadSeam(lora_linear=layer is not None)
    if with_adapter.candidate(head):
        if not _judge(path, head, [with_adapter], decision):
            return False
        if layer is not None:
            decision.changes.remove(layer)  # the head's seam does its work too
        return True
    linears = [m for m in peel(head) if isinstance(m, nn.Linear)]
    if not linears:
        reason = f"it is a {type(head).__module__}.{type(head).__name__}; training computes the full logits through it"
        decision.refused.append((path, head, HeadSeam(), reason))
        return False
    names = {id(m): f"{path}.{name}".rstrip(".") for name, m in head.named_modules()}
    judged = [_judge(names[id(m)], m, [HeadSeam()], decision) for m in linears]
    return any(judged)


def _apply_all(model: nn.Module, changes: list[Change]) -> None:
    _apply(changes)
    if any(change.seam.flag == LoraSeam.flag for change in changes):
        find_siblings(model, lambda m: isinstance(m, PatchedModule) and isinstance(m._tigon_seam, LoraSeam))


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


def _report(model: nn.Module, spec: PatchSpec, decision: _Decision, flags: Flags) -> PatchReport:
    title = f"{type(model).__name__} (model_type {spec.model_type})"
    report = PatchReport(title if spec.claims else f"{title}, matched by structure", _changes=decision.changes)
    report.layer_paths = paths_of(model)
    report.notes += [said] if (said := refused_backward(report.layer_paths)) else []
    if flags.get(CONVOLUTION_FLAG) is not False and (said := rule_left(model)):
        report.notes.append(said)
    replaced: dict[tuple[str, str], list[str]] = {}
    for change in (change for change in decision.changes if change.seam.reported):
        for op in change.seam.ops_for(change.module):
            replaced.setdefault((op, type(change.module).__name__), []).append(change.path)
    report.replaced = [Replaced(op, cls, tuple(paths)) for (op, cls), paths in replaced.items()]
    left: dict[tuple[str, str, str], list[str]] = {}
    for path, module, seam, reason in decision.refused:
        left.setdefault((seam.op, type(module).__name__, reason), []).append(path)
    report.left_alone = [LeftAlone(op, cls, tuple(paths), reason) for (op, cls, reason), paths in left.items()]
    for what, reason in spec.keep.items():
        report.notes.append(f"{what} left alone in this family: {reason}")
    off = [name for name, on in flags.items() if on is False]
    if off:
        report.notes.append(f"switched off: {', '.join(off)}")
    if decision.patched:
        what = "partly patched before" if decision.changes else "already patched, nothing changed"
        report.notes.append(f"{what}: {decision.patched} modules had tigon's ops")
    report.notes += decision.notes
    return report
