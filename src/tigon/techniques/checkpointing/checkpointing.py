"""Activation checkpointing: which tensors of a layer are kept for the backward pass, and where (arXiv 1604.06174).

Every kind uses the checkpointing of transformers' layers. This file only chooses the function that they call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques import head_groups
from tigon.techniques.checkpointing import layer_checkpointing
from tigon.techniques.checkpointing.attention_offload import LayersOnHost
from tigon.techniques.checkpointing.host_offload import HostOffload
from tigon.techniques.checkpointing.layer_function import Snapshot, enable, replace_function
from tigon.techniques.checkpointing.recompute import recomputed
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.train import AUTO
from tigon.techniques.technique import Declaration, RunInfo, Search, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Matmuls and attention, which take long to recompute. All other ops in a layer are memory-bound.
KEPT_OPS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "tigon::fp8_product",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "tigon::attention_with_sinks_fwd",
    "tigon::varlen_attention_fwd",
)


def every_n_layers(checkpointing: str) -> int | None:
    """Returns N of `every-N`, or None for the other kinds."""
    match = re.fullmatch(r"every-(\d+)", checkpointing)
    return int(match[1]) if match else None


def layer_states(checkpointing: str, layers: int) -> list[str] | None:
    """The state of each decoder layer for `every-N` and for counts such as `full:8,none:8`; None for other values."""
    if every := every_n_layers(checkpointing):
        return ["none" if at % every else "full" for at in range(layers)]
    by_layer = layer_checkpointing.is_by_layer(checkpointing)
    return layer_checkpointing.states_of(checkpointing, layers) if by_layer else None


def selective_contexts() -> Any:
    """Returns the (forward, recompute) contexts that keep the results of `KEPT_OPS`.

    A top-level function, because it has to be pickled.
    """
    kept = set(KEPT_OPS)

    def policy(context: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        name = getattr(op, "_schema", None) and op._schema.name
        return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def inputs_on_host() -> Callable[..., Any]:
    """Returns a checkpointing function for all layers of a model, which keeps each layer's input on the host.

    transformers' own `offload` copies on the compute stream. This one copies on a second stream.
    """
    offload = HostOffload()

    def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with offload.saving():
            return recomputed(function, *args, **kwargs)

    return offloaded


OFFLOAD = "offload"
KEPT_ON_HOST = "offload-attention"
# Values that recompute every layer -> what makes the function that transformers' layers call.
_WHOLE_LAYERS: Mapping[str, Callable[[], Callable[..., Any]]] = {
    "full": lambda: recomputed,
    "selective": lambda: partial(checkpoint, use_reentrant=False, context_fn=selective_contexts),
    OFFLOAD: inputs_on_host,
    KEPT_ON_HOST: LayersOnHost,
}


def recompute_layers(model: PreTrainedModel, value: str, *, in_groups: bool = False) -> Callable[[], None]:
    """Apply a value of `train.checkpointing` other than `auto` to a model, and return a function that undoes it.

    in_groups: whether `train.attention_groups` replaces the model's attention.

    Raises:
        RecipeError: The value is for another number of layers, the model's layers cannot be recomputed alone, or its
            attention is not the one that `offload-attention` keeps.
    """
    if value == "none":
        return lambda: None
    if states := layer_states(value, len(decoder_layers(model))):
        return layer_checkpointing.apply(model, states)
    attention = model.config._attn_implementation
    own_groups = value == KEPT_ON_HOST and not in_groups
    if own_groups and attention != "sdpa":
        raise RecipeError(
            f"train.checkpointing: {value} keeps the results of sdpa, and the model has {attention!r}; load it with "
            'attn_implementation="sdpa"'
        )
    before = Snapshot(model)
    enable(model)
    if not replace_function(model, _WHOLE_LAYERS[value]()) and value != "full":
        before.undo()
        raise RecipeError(
            f"train.checkpointing: {value} cannot replace the checkpointing function of any layer of "
            f"{type(model).__name__}; use full"
        )
    undo_attention = head_groups.replace_attention(model, 1) if own_groups else lambda: None

    def undo() -> None:
        before.undo()
        undo_attention()

    return undo


def _recompute(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    recompute_layers(model, settings.train.checkpointing, in_groups=settings.train.attention_groups > 1)
    return model


def _keeps_attention_not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(
        when=(Condition("train.checkpointing", "is", KEPT_ON_HOST), condition),
        reason=reason,
        instead=instead,
        source="tigon.techniques.checkpointing",
    )


# Llama's steps took 1.07 (selective), 1.11 (every-2) and 1.21 (full) times as long as without checkpointing; the
# least costs below stay under these. Selective kept 0.55 to 0.68 of Llama's activations; its share stays well under.
DECLARATION = Declaration(
    searches=(
        Search(
            key="train.checkpointing",
            how="recomputation",
            candidates=lambda config: ("none", "auto", "offload"),
        ),
    ),
    labels={
        "train.checkpointing": lambda settings: (
            "no checkpointing"
            if settings.train.checkpointing == "none"
            else f"checkpointing {settings.train.checkpointing}"
        ),
    },
    techniques=(
        Technique(
            name="checkpointing-full",
            recipe={"train.checkpointing": "full"},
            chosen=(Condition("train.checkpointing", "is", "full"),),
            model=_recompute,
            least_cost=1.15,
            kept_share=0.0,
        ),
        Technique(
            name="checkpointing-every-n",
            recipe={"train.checkpointing": "every-2"},
            chosen=(Condition("train.checkpointing", "starts with", "every-"),),
            model=_recompute,
            least_cost=1.07,
            kept_share=0.5,  # of every-2, which the search tries
        ),
        Technique(
            name="checkpointing-selective",
            recipe={"train.checkpointing": "selective"},
            chosen=(Condition("train.checkpointing", "is", "selective"),),
            model=_recompute,
            least_cost=1.02,
            kept_share=0.35,
        ),
        Technique(
            name="checkpointing-offload",
            recipe={"train.checkpointing": "offload"},
            chosen=(Condition("train.checkpointing", "is", "offload"),),
            model=_recompute,
            least_cost=1.15,
            kept_share=0.0,
        ),
        Technique(
            name="checkpointing-offload-attention",
            recipe={"train.checkpointing": KEPT_ON_HOST, "data.cross_document_attention": True},
            chosen=(Condition("train.checkpointing", "is", KEPT_ON_HOST),),
            model=_recompute,
            least_cost=1.05,
            kept_share=0.0,
        ),
        Technique(
            name="checkpointing-auto",
            recipe={"train.checkpointing": "auto"},
            chosen=(Condition("train.checkpointing", "is", AUTO),),
            least_cost=1.01,  # the search tries it only where less than this could win
            kept_share=0.0,
        ),
        Technique(
            name="checkpointing-by-layer",
            recipe={"train.checkpointing": "full:1,mlp:1,elementwise:1,none:1"},
            chosen=(Condition("train.checkpointing", "includes", ":"),),
            model=_recompute,
            fits=layer_checkpointing.fits,
            kept_share=0.0,
        ),
    ),
    exclusions=(
        _keeps_attention_not_with(
            Condition("model.attention", "is not", "sdpa"),
            "it keeps the results of the sdpa function",
            "model.attention: sdpa",
        ),
        _keeps_attention_not_with(
            Condition("sharding.sequence", "is at least", 2),
            "each of them replaces the attention function",
            "train.checkpointing: offload",
        ),
        _keeps_attention_not_with(
            Condition("sharding.tensor", "is at least", 2),
            "tigon has not tried it with divided matrices",
            "train.checkpointing: offload",
        ),
        *layer_checkpointing.EXCLUSIONS,
    ),
)
