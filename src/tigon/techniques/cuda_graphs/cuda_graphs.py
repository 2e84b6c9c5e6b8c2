"""CUDA graphs of the decoder layers (layer_graphs.py): less host time for small micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tigon._trunk import decoder_layers
from tigon.techniques.checkpointing import layer_function
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.cuda_graphs.layer_graphs import KEY, Capture, CudaCapture, LayerGraphs
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def graph(model: PreTrainedModel, *, recomputes: bool, new_capture: Callable[[], Capture] = CudaCapture) -> LayerGraphs:
    """Run each decoder layer as CUDA graphs, recomputed in the backward pass or not.

    A model whose layers have no checkpointing function of transformers runs without, and a warning says so.
    """
    graphs, layers = LayerGraphs(recomputes=recomputes, new_capture=new_capture), decoder_layers(model)
    if layers and hasattr(model, "gradient_checkpointing_enable"):
        layer_function.enable(model)  # transformers then calls a function of ours in place of each layer
    if not layers or not all("_gradient_checkpointing_func" in vars(layer) for layer in layers):
        graphs.give_up(f"the layers of {type(model).__name__} are not transformers' checkpointed layers")
        return graphs
    for layer in layers:
        vars(layer)["_gradient_checkpointing_func"] = graphs.of(layer)
    return graphs


def _graph(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    graph(model, recomputes=settings.train.checkpointing == "full")
    return model


_GRAPHS = Condition("train.cuda_graphs", "is", True)


def _not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(
        when=(_GRAPHS, condition),
        reason=reason,
        instead=f"{instead}, or {KEY}: false",
        source="tigon.techniques.cuda_graphs.layer_graphs",
    )


_UNTRIED = "CUDA graphs have not been tried with it"

DECLARATION = Declaration(
    last=True,
    labels={KEY: "CUDA graphs"},
    techniques=(
        Technique(
            name="cuda-graphs",
            devices=("cuda",),
            recipe={"train.checkpointing": "none", KEY: True},
            chosen=(_GRAPHS,),
            model=_graph,
        ),
    ),
    exclusions=(
        _not_with(
            Condition("train.checkpointing", "is not one of", ("full", "none")),
            "a graph holds a whole layer, recomputed or not",
            "train.checkpointing: full or none",
        ),
        _not_with(
            Condition("sharding.gpus", "is at least", 2),
            f"{_UNTRIED}: several GPUs reduce gradients in hooks",
            "sharding.gpus: 1",
        ),
        _not_with(
            Condition("sharding.zero", "is at least", 1), "DeepSpeed moves weights and gradients", "sharding.zero: 0"
        ),
        _not_with(Condition("sharding.fsdp", "is", True), "FSDP2 moves weights and gradients", "sharding.fsdp: false"),
        _not_with(
            Condition("model.attention", "is not", "sdpa"),
            "the lengths of packed documents differ in each batch",
            "model.attention: sdpa",
        ),
        _not_with(Condition("lora.quantize_to", "is one of", ("int8", "mxfp4")), _UNTRIED, "lora.quantize_to: nf4"),
        _not_with(
            Condition("lora.base_offload", "is", True),
            "hooks copy the frozen layers to the GPU",
            "lora.base_offload: false",
        ),
        _not_with(Condition("lora.dora", "is", True), _UNTRIED, "lora.dora: false"),
        _not_with(Condition("lora.dropout", "is above", 0), _UNTRIED, "lora.dropout: 0"),
        _not_with(
            Condition("train.optimizer", "is", "galore-layerwise"),
            "its hooks free each gradient",
            "train.optimizer: galore",
        ),
        _not_with(Condition("train.mlp_tile_tokens", "is at least", 1), _UNTRIED, "train.mlp_tile_tokens: 0"),
        _not_with(Condition("train.attention_groups", "is at least", 2), _UNTRIED, "train.attention_groups: 1"),
    ),
)
