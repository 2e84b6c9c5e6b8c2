"""`AutoLigerKernelForCausalLM`: loads a model with transformers' AutoModelForCausalLM, then patches that model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from tigon.compat.liger.patching.apply import _apply_liger_kernel_to_instance
from tigon.compat.liger.patching.families import LIGER_FLAGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):  # type: ignore[misc]  # transformers is not typed here
    """Loads a causal language model and patches it; flags of its family's function are accepted as keywords.

    Only the returned model is patched. Liger patches the model's class for the rest of the process.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: object, *model_args: object, **kwargs: object) -> Any:
        """`AutoModelForCausalLM.from_pretrained`, patched."""
        flags = _take_flags(kwargs)
        # Not super(): a repository's auto_map is looked up by the name of the class, and names transformers' own.
        built = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        # output_loading_info=True returns a pair.
        _apply_liger_kernel_to_instance(built[0] if isinstance(built, tuple) else built, **flags)
        return built

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: object) -> Any:
        """`AutoModelForCausalLM.from_config`, patched."""
        flags = _take_flags(kwargs)
        model = AutoModelForCausalLM.from_config(config, **kwargs)
        _apply_liger_kernel_to_instance(model, **flags)
        return model


def _take_flags(keywords: dict[str, Any]) -> dict[str, Any]:
    """Take the patch's flags out of `keywords`."""
    return {name: keywords.pop(name) for name in sorted(LIGER_FLAGS) if name in keywords}
