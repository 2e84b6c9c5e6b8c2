"""CUDA graphs of the decoder layers (techniques/mechanisms/layer_graphs.py): less host time for small micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques import checkpointing
from tigon.techniques.mechanisms.layer_graphs import KEY, Capture, CudaCapture, LayerGraphs
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, RunInfo, Technique


def graph(model: Any, *, recomputes: bool, new_capture: Callable[[], Capture] = CudaCapture) -> LayerGraphs:
    """Run each decoder layer as CUDA graphs, recomputed in the backward pass or not.

    Raises:
        RecipeError: A decoder layer has no checkpointing function of transformers.
    """
    graphs, layers = LayerGraphs(recomputes=recomputes, new_capture=new_capture), decoder_layers(model)
    if layers and hasattr(model, "gradient_checkpointing_enable"):
        checkpointing.enable(model)  # transformers then calls a function of ours in place of each layer
    if not layers or not all("_gradient_checkpointing_func" in vars(layer) for layer in layers):
        raise RecipeError(
            f"{KEY}: the layers of {type(model).__name__} are not transformers' checkpointed layers; set {KEY}: false"
        )
    for layer in layers:
        vars(layer)["_gradient_checkpointing_func"] = graphs.of(layer)
    return graphs


def _graph(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    graph(model, recomputes=choices.checkpointing == "full")
    return model


_GRAPHS = Condition("cuda_graphs", "is", True)


def _not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(
        when=(_GRAPHS, condition), reason=reason, instead=f"{instead}, or {KEY}: false",
        source="tigon.techniques.mechanisms.layer_graphs",
    )  # fmt: skip


_UNTRIED = "CUDA graphs have not been tried with it"

DECLARATION = Declaration(
    pages={"cuda-graphs": "CUDA graphs"},
    settings=(
        Setting(
            field="cuda_graphs", key=KEY,
            help="Launch each decoder layer as a CUDA graph. Needs one GPU, and `train.checkpointing` "
            "`full` or `none`.",
            flag=Flag(name="cuda-graphs", help="Launch each decoder layer as a CUDA graph."),
            label=lambda choices: "CUDA graphs" if choices.cuda_graphs else "",
        ),
    ),
    techniques=(
        Technique(
            name="cuda-graphs", page="cuda-graphs",
            saves="Host time: two launches per decoder layer and micro-batch instead of one for each kernel.",
            costs="Between steps, the layers' gradients stay in memory. The activations of one layer stay too, or with "
            "`none` those of all layers. Capturing takes seconds in the first step.",
            devices=("cuda",), recipe={"train.checkpointing": "none", KEY: True}, chosen=(_GRAPHS,), model=_graph,
            source="torch.cuda.graph",
        ),
    ),
    exclusions=(
        _not_with(
            Condition("checkpointing", "is not one of", ("full", "none")),
            "a graph holds a whole layer, recomputed or not",
            "train.checkpointing: full or none",
        ),
        _not_with(Condition("gpus", "is at least", 2), f"{_UNTRIED}: several GPUs reduce gradients in hooks",
                  "sharding.gpus: 1"),
        _not_with(Condition("zero", "is at least", 1), "DeepSpeed moves weights and gradients", "sharding.zero: 0"),
        _not_with(Condition("fsdp", "is", True), "FSDP2 moves weights and gradients", "sharding.fsdp: false"),
        _not_with(Condition("attention", "is not", "sdpa"), "the lengths of packed documents differ in each batch",
                  "model.attention: sdpa"),
        _not_with(Condition("lora_rank", "is at least", 1), _UNTRIED, "full fine-tuning"),
        _not_with(Condition("optimizer", "is", "galore-layerwise"), "its hooks free each gradient",
                  "train.optimizer: galore"),
        _not_with(Condition("mlp_tile_tokens", "is at least", 1), _UNTRIED, "train.mlp_tile_tokens: 0"),
        _not_with(Condition("attention_groups", "is at least", 2), _UNTRIED, "train.attention_groups: 1"),
    ),
)  # fmt: skip
