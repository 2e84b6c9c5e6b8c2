"""Which kernels and which attention the model runs."""

from __future__ import annotations

import importlib.util

import torch

from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration


def sinks_flag(settings: Settings) -> bool | None:
    """The flag `attention_sinks` of `tigon.patch` for these settings. None leaves models without sinks alone."""
    return None if settings.model.attention_sinks else False


def check_liger(key: str, device: torch.device) -> None:
    """Raise RecipeError, which names `key`, if Liger Kernel cannot run here."""
    if device.type == "cpu":
        raise RecipeError(f"{key} is liger, whose kernels need a GPU; on the CPU use tigon")
    if importlib.util.find_spec("liger_kernel") is None:
        raise RecipeError(f"{key} is liger, but liger-kernel is not installed: pip install liger-kernel")


def check_attention(settings: Settings, device: torch.device) -> None:
    """Raise RecipeError if the run's attention needs a GPU, a package or a precision that is not there."""
    attention = settings.model.attention
    if attention.startswith("flash_attention"):
        import transformers.utils

        probe = f"is_flash_attn_{attention[-1]}_available"
        if device.type == "cpu" or not getattr(transformers.utils, probe)():
            raise RecipeError(f"model.attention is {attention}, which needs a GPU and its package; use sdpa")
        if settings.train.precision == "fp32":
            raise RecipeError(f"model.attention is {attention}, which lacks fp32; set train.precision to amp-bf16")


def _check_machine(settings: Settings, device: torch.device) -> None:
    check_attention(settings, device)
    if settings.model.kernels == "liger":
        check_liger("model.kernels", device)


DECLARATION = Declaration(
    machine=_check_machine,
    labels={"model.kernels": "kernels {}"},
    exclusions=(
        Exclusion(
            when=(Condition("model.kernels", "is", "liger"), Condition("sharding.zero", "is", 3)),
            reason="Liger reads the head's weight directly instead of calling its module, and stage 3 has left that "
            "weight empty",
            instead="model.kernels: tigon, or sharding.zero: 2",
            source="github.com/linkedin/Liger-Kernel/issues/767, issues/1048",
        ),
    ),
)
