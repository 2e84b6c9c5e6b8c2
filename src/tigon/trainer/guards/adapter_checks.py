"""Checks of adapters against the run's model, before the run folder exists."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tigon._trunk import language_model
from tigon.errors import RecipeError
from tigon.models.seams.base import PatchedModule
from tigon.models.seams.experts_lora import is_wrapper
from tigon.objectives.base import Objective
from tigon.techniques.keys.lora import EXPERTS, LINEAR, LOFTQ
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import adapter_targets, lora
from tigon.trainer import model as models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def check(objective: Objective, config: PreTrainedConfig, settings: Settings) -> tuple[str, ...]:
    """Refuse adapters that cannot be made, and warn of experts that a run with adapters does not train.

    Args:
        objective: The objective of the run.
        config: The model's transformers config.
        settings: The techniques' keys.

    Returns:
        The warnings, one sentence each.

    Raises:
        RecipeError: The message names the recipe key.
    """
    if not settings.lora.used:
        return ()
    if settings.lora.init == LOFTQ and getattr(config, "quantization_config", None):
        raise RecipeError(
            "lora.init: loftq compares the 4-bit weights with whole ones, and this checkpoint's weights are quantised; "
            "name the checkpoint in 16 bits, or set lora.init: default"
        )
    built = models.without_data(config)
    adapter_targets.check(built, settings.lora)
    if objective.trl is not None or objective.added is not None:  # their losses multiply with lm_head's weight itself
        _check_head(objective, built, settings)
    told = _frozen_experts(built, settings) + _left_out(built, settings)
    lora.check_with_peft(built, settings)
    return told


def check_quantized(name: str, config: PreTrainedConfig, settings: Settings) -> None:
    """Refuse a checkpoint that stores quantised weights which tigon cannot train adapters over.

    Args:
        name: `model.name`.
        config: The model's transformers config.
        settings: The techniques' keys.

    Raises:
        RecipeError: The message names the keys.
    """
    from tigon.techniques.lora import stored_weights  # loads transformers

    stored = stored_weights.of(config)
    method = stored.get("quant_method")
    if method is None:
        return
    method = str(getattr(method, "value", method))
    if method not in stored_weights.KNOWN:
        raise RecipeError(
            f"model.name: {name} stores its weights with {method}, over which tigon does not train; name the "
            "checkpoint in 16 bits, of which lora.quantize: true makes 4-bit weights"
        )
    if words := stored_weights.AS_DENSE.get(method):
        _check_read_as_dense(f"model.name: {name} stores its weights {words}", method, settings)
    if method == stored_weights.BITSANDBYTES and stored.get("load_in_8bit") and settings.sharding.fsdp:
        raise RecipeError(
            f"model.name: {name} stores its weights in 8 bits, and FSDP2 divides no integers; set sharding.fsdp: "
            "false, or name the checkpoint in 4 or 16 bits"
        )
    if method == stored_weights.BITSANDBYTES and not settings.lora.used:
        raise RecipeError(
            f"model.name: {name} stores its weights with {method}, and integers get no gradient; set lora.rank: "
            f"{lora.DEFAULT_RANK}, or name the checkpoint in 16 bits"
        )


def _check_read_as_dense(subject: str, method: str, settings: Settings) -> None:
    """Refuse settings that do not go with a checkpoint read as dense weights. subject: How the message begins."""
    from tigon.techniques.lora import stored_weights  # loads transformers

    if settings.lora.quantize:
        raise RecipeError(
            f"{subject}, and transformers does not quantise them once more; set lora.quantize: false to train adapters "
            "over the same weights in 16 bits, or name the checkpoint in 16 bits"
        )
    if settings.sharding.zero == 3:
        raise RecipeError(
            f"{subject}, and tigon has not tried to read them into the parts of ZeRO-3; set sharding.fsdp: true "
            "instead of sharding.zero, or name the checkpoint in 16 bits"
        )
    if missing := stored_weights.unreadable(method):
        raise RecipeError(f"{subject}, and {missing}, or name the checkpoint in 16 bits")


def read_as_dense_warning(name: str, config: PreTrainedConfig) -> tuple[str, ...]:
    """A warning if quantised weights are read as dense ones, because the run then takes more than their bytes."""
    from tigon.techniques.lora import stored_weights  # loads transformers

    words = stored_weights.AS_DENSE.get(stored_weights.of(config).get("quant_method") or "")
    if words is None:
        return ()
    return (
        f"model.name: {name} stores its weights {words}; they are read in the dtype of a 16-bit checkpoint, and the "
        "plan counts them so",
    )


def check_fused_experts(built: PreTrainedModel, settings: Settings) -> None:
    """Refuse adapters of 4-bit experts that tigon's op does not compute.

    PEFT 0.21.2 leaves such an adapter on the weight after each forward, so that the next forward adds it again.

    Args:
        built: The model with its adapters, after it was patched.
        settings: The techniques' keys.

    Raises:
        RecipeError: The message names the module.
    """
    if not settings.lora.quantize:
        return
    for path, module in built.named_modules():
        if is_wrapper(module) and not isinstance(module, PatchedModule):
            raise RecipeError(
                f"lora.targets includes experts and lora.quantize is true, but tigon's op does not run {path}: "
                f"{type(module.get_base_layer()).__name__}; leave experts out of lora.targets, or set lora.quantize: "
                "false"
            )


def _check_head(objective: Objective, built: PreTrainedModel, settings: Settings) -> None:
    """Refuse a pattern that matches the head. `lora.targets: head` is refused earlier, by name."""
    targets = adapter_targets.targets_of(built, settings.lora.targets).modules
    head = next(path for path, module in built.named_modules() if module is built.get_output_embeddings())
    if head in targets:
        raise RecipeError(
            f"lora.targets: {', '.join(settings.lora.targets)} includes {head}, but the losses of {objective.name} "
            "use its weight without an adapter; use a narrower pattern"
        )


def _frozen_experts(built: PreTrainedModel, settings: Settings) -> tuple[str, ...]:
    parameters = dict(built.named_parameters())
    experts = [parameters[path].shape for path in adapter_targets.expert_parameters(built) if path in parameters]
    if not experts or EXPERTS in settings.lora.targets:
        return ()
    saved = adapter_targets.modules_to_save(built, settings.lora.modules_to_save)
    if any("expert" in path for paths in saved.values() for path in paths):
        return ()
    n_experts = sum(math.prod(shape) for shape in experts)
    share = n_experts / sum(parameter.numel() for parameter in parameters.values())
    return (
        f"lora.targets: the experts get no adapter and stay frozen: {n_experts / 1e6:,.1f} M of the model's parameters "
        f"({share:.0%}); add experts to lora.targets to train them too",
    )


def _left_out(built: PreTrainedModel, settings: Settings) -> tuple[str, ...]:
    """A warning of the linear modules that `all-linear` leaves out because PEFT's adapters do not fit them."""
    if not {LINEAR, "linear"} & set(settings.lora.targets):
        return ()
    of_text, left_out = set(language_model(built).modules()), adapter_targets.left_out(built)
    reasons = [(path.rpartition(".")[2], why) for path, why in left_out.items() if built.get_submodule(path) in of_text]
    if not reasons:
        return ()
    named = "; ".join(f"{name} ({why})" for name, why in dict.fromkeys(reasons))
    return (f"lora.targets: {len(reasons)} linear modules get no adapter and stay frozen: {named}",)
