"""`tigon.patch_fp8`: the products of the decoder layers' linear modules in FP8, on this model instance only."""

from __future__ import annotations

from typing import Any

from torch import nn

from tigon._trunk import decoder_stack
from tigon.errors import OptionError, PatchError
from tigon.models.patch import unwrap
from tigon.models.report import LeftAlone, PatchReport, Replaced
from tigon.models.seams.base import Change, PatchedModule, instance_objection
from tigon.models.seams.fp8 import Fp8Seam, fp8_scaling, is_router
from tigon.models.seams.norm import NormSeam, mark_finds_amax
from tigon.ops.dispatch import check_whole
from tigon.ops.linear.fp8_linear import check_scaling


def patch_fp8(model: nn.Module, *, scaling: str = "tensorwise", bf16_layers: int = 1) -> PatchReport:
    """Run the products of the decoder layers' linear modules in FP8, in place; weights and state dict stay as they are.

    The embeddings, the head, routers and adapters keep their products.

    Args:
        model: a transformers model, or a PEFT or DistributedDataParallel wrapper of one, with bf16 weights or under
            autocast. Call it after `patch`, and before `torch.compile` and before FSDP wraps the model.
        scaling: "tensorwise" or "rowwise", as in `tigon.fp8_linear`.
        bf16_layers: how many decoder layers at each end keep their products.

    Returns:
        A `PatchReport`: the modules that were replaced, those that were left alone, and why. `report.undo()` restores
        the model.

    Raises:
        PatchError: no module can run in FP8. The model is unchanged.
        OptionError: scaling is another word, or bf16_layers is not a whole number of at least 0.
    """
    check_scaling(scaling)
    check_whole("bf16_layers", bf16_layers)
    if bf16_layers < 0:
        raise OptionError(f"bf16_layers={bf16_layers} must be at least 0.")
    inner = unwrap(model)
    layers = _layers(inner)
    seam, report = Fp8Seam(scaling=scaling), PatchReport(f"{type(inner).__name__}, FP8 matmuls ({scaling})")
    inside = range(bf16_layers, len(layers) - bf16_layers)
    left: dict[str, list[str]] = {}
    for number, (layer_path, layer) in enumerate(layers):
        for name, module in layer.named_modules():
            path = f"{layer_path}.{name}"
            if not seam.candidate(module) or any(part.startswith("lora_") for part in name.split(".")):
                continue
            reason = None if number in inside else f"the first and last {bf16_layers} layers keep their products"
            reason = reason or ("it chooses experts" if is_router(path) else None)
            reason = reason or instance_objection(module) or seam.objection(module)
            if reason is None:
                report._changes.append(Change(path, module, seam))
            else:
                left.setdefault(reason, []).append(path)
    if not report._changes:
        raise PatchError(
            f"nothing in this {type(inner).__name__} can run in FP8: "
            f"{'; '.join(left) or 'its decoder layers have no linear modules'}. Nothing was changed."
        )
    for change in report._changes:
        change.apply()
    if scaling == "tensorwise":
        report._finding_amax = [norm for _, layer in layers for norm in _norms_before_fp8(layer)]
        mark_finds_amax(report._finding_amax, True)
    report.replaced = [Replaced(seam.op, "Linear", tuple(change.path for change in report._changes))]
    report.left_alone = [LeftAlone(seam.op, "Linear", tuple(paths), reason) for reason, paths in left.items()]
    return report


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each decoder layer: the longest list of modules, outside a vision tower."""
    stack = decoder_stack(model)
    path = next((path for path, module in model.named_modules() if module is stack), "")
    return [(f"{path}.{number}", layer) for number, layer in enumerate(stack)]


# A decoder layer's norms whose results linear layers read, if it has no norm of the second list. In layers with such a
# norm, and in layers without any of the first, the other norms precede additions.
_BEFORE_ATTENTION, _BEFORE_MLP = "input_layernorm", ("pre_feedforward_layernorm", "post_attention_layernorm")


def _norms_before_fp8(layer: nn.Module) -> list[nn.Module]:
    """The layer's norms that run tigon's op and whose results FP8 layers read."""
    children = dict(layer.named_children())
    if _BEFORE_ATTENTION not in children:  # OLMo-2 has norms after attention and MLP only
        return []
    before_mlp = next((name for name in _BEFORE_MLP if name in children), None)
    found: list[nn.Module] = []
    for name, reads_attention in ((_BEFORE_ATTENTION, True), (before_mlp, False)):
        norm = children.get(name or "")
        if not isinstance(norm, PatchedModule) or not isinstance(norm._tigon_seam, NormSeam):
            continue
        readers = (m for child, m in children.items() if ("attn" in child or "attention" in child) == reads_attention)
        width = getattr(getattr(norm, "weight", None), "numel", int)()
        inside = (linear for reader in readers for linear in reader.modules())
        if any(fp8_scaling(linear) and linear.in_features == width for linear in inside):
            found.append(norm)
    return found


def fp8_options(model: nn.Module) -> dict[str, Any] | None:
    """The options with which `patch_fp8` was called; None if no layer runs in FP8."""
    for number, (_, layer) in enumerate(_layers(unwrap(model))):
        for module in layer.modules():
            if isinstance(module, PatchedModule) and (scaling := fp8_scaling(module)) is not None:
                return {"scaling": scaling, "bf16_layers": number}
    return None
