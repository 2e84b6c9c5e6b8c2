"""Activation checkpointing: what of a layer is kept for the backward pass, and where (arXiv 1604.06174).

All of it goes through the checkpointing of transformers' layers; this file only chooses the function that they call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tigon.errors import RecipeError
from tigon.techniques.choices import Choices, every_n_layers
from tigon.techniques.condition import Condition
from tigon.techniques.recompute import recomputed
from tigon.techniques.technique import Facts, Technique

# Products and attention: what costs time to compute again. Everything else in a layer is bound by memory.
KEPT_OPS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


def enable(model: Any, every: int = 1, **options: Any) -> None:
    """transformers' own switch, which 5.23 calls activation_checkpointing_enable; options: of `checkpoint`.

    Below 5.17 it has no `every_n_layers`.
    """
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    known = inspect.signature(switch).parameters
    name = next(name for name in known if name.endswith("checkpointing_kwargs"))
    switch(**{name: {"use_reentrant": False, **options}}, **({"every_n_layers": every} if every > 1 else {}))


def _recompute(model: Any, choices: Choices, facts: Facts) -> Any:
    enable(model, every=every_n_layers(choices.checkpointing) or 1)
    replace_function(model, recomputed)
    return model


def _selective(model: Any, choices: Choices, facts: Facts) -> Any:
    enable(model, context_fn=selective_contexts)
    return model


def selective_contexts() -> Any:
    """(forward, recompute) contexts that keep the results of `KEPT_OPS`. A function, so that it can be pickled."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = set(KEPT_OPS)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(op, "_schema", None) and op._schema.name
        return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _offload(model: Any, choices: Choices, facts: Facts) -> Any:
    """transformers has an `offload` of its own, which copies on the compute stream; this one copies beside it."""
    from tigon.techniques.host_offload import HostOffload

    enable(model)
    offload = HostOffload()

    def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with offload.saving():
            return recomputed(function, *args, **kwargs)

    if not replace_function(model, offloaded):
        raise RecipeError(
            f"train.checkpointing: offload finds no layer of {type(model).__name__} whose checkpointing can be "
            "replaced; use full"
        )
    return model


def replace_function(model: Any, function: Callable[..., Any]) -> int:
    """Let every layer that is checkpointed call `function(layer, *inputs)`; how many do. None of a model whose own code
    keeps to transformers' old format, which calls PyTorch's `checkpoint`."""
    n_replaced = 0
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("checkpointing_func")]:
            setattr(module, name, function)
            n_replaced += 1
    return n_replaced


_EACH_LAYER = "The layer's input is kept: tokens x hidden x bytes of the autocast dtype, a layer."

TECHNIQUES = (
    Technique(
        name="checkpointing-full", page="checkpointing",
        saves=f"All activations of the layers but one. {_EACH_LAYER}",
        costs="A second forward pass of the layers, beside one forward and a backward of twice its work.",
        recipe={"train.checkpointing": "full"}, chosen=(Condition("checkpointing", "is", "full"),), model=_recompute,
        source="torch.utils.checkpoint; arXiv 1604.06174",
    ),
    Technique(
        name="checkpointing-every-n", page="checkpointing",
        saves="The activations of one layer in N.", costs="The second forward pass of those layers.",
        recipe={"train.checkpointing": "every-2"}, chosen=(Condition("checkpointing", "starts with", "every-"),),
        model=_recompute, source="transformers 5.17 modeling_utils.py: gradient_checkpointing_enable",
    ),
    Technique(
        name="checkpointing-selective", page="checkpointing",
        saves="Activations of norms, gated units and rotations; results of products and of attention are kept.",
        costs="A second pass of the layers without their products.",
        recipe={"train.checkpointing": "selective"}, chosen=(Condition("checkpointing", "is", "selective"),),
        model=_selective, source="torch.utils.checkpoint.create_selective_checkpoint_contexts; arXiv 2205.05198",
    ),
    Technique(
        name="checkpointing-offload", page="checkpointing",
        saves="As `full`, and the layers' inputs wait in pinned host memory.",
        costs="As `full`; the copies run beside the computation, so they cost time only when a layer is shorter than "
        "its copy. Pinned host memory of layers x tokens x hidden.",
        recipe={"train.checkpointing": "offload"}, chosen=(Condition("checkpointing", "is", "offload"),),
        model=_offload, source="torch.autograd.graph.saved_tensors_hooks",
    ),
)  # fmt: skip
