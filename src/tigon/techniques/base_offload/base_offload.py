"""`lora.base_offload`: the frozen weights of decoder layers wait in host memory, and two layers are on the GPU."""

from __future__ import annotations

from typing import Any

from tigon._trunk import decoder_layers
from tigon.techniques.base_offload.streamed_layers import StreamedLayers
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.lora import DIFFERENCE_INITS
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.four_bit_weights import compute_on
from tigon.techniques.technique import Declaration, RunInfo, Technique

KEY = "lora.base_offload"


def _stream(model: Any, settings: Settings, run_info: RunInfo) -> Any:
    StreamedLayers(model, decoder_layers(model), compute_on(model.get_base_model(), run_info.device))
    return model


def _not_with(condition: Condition, reason: str, instead: str, source: str = "docs/techniques/lora.md") -> Exclusion:
    return Exclusion(when=(Condition(KEY, "is", True), condition), reason=reason, instead=instead, source=source)


_EACH_HOLDS_ALL = "each process would hold all layers in host memory, which tigon has not tried"
_MOVES_WEIGHTS = "the engine moves the weights itself"

DECLARATION = Declaration(
    labels={KEY: "frozen layers on the host"},
    techniques=(
        Technique(
            name="base-offload",
            recipe={"lora.rank": 16, KEY: True},
            chosen=(Condition(KEY, "is", True),),
            model=_stream,
        ),
    ),
    exclusions=(
        _not_with(
            Condition("lora.rank", "is", None),
            "full fine-tuning changes every weight, and these layers are never copied back to the host",
            "lora.rank: 16, or sharding.zero: 3 with sharding.offload: cpu",
        ),
        _not_with(Condition("sharding.zero", "is at least", 1), _MOVES_WEIGHTS, "sharding.zero: 0"),
        _not_with(Condition("sharding.fsdp", "is", True), _MOVES_WEIGHTS, "sharding.fsdp: false"),
        _not_with(Condition("sharding.gpus", "is at least", 2), _EACH_HOLDS_ALL, "sharding.gpus: 1"),
        _not_with(
            Condition("train.precision", "is", "fp8"),
            "tigon has not tried FP8 products of weights that are replaced during a step",
            "train.precision: amp-bf16",
        ),
        _not_with(
            Condition("lora.quantize_to", "is one of", ("int8", "mxfp4")),
            "tigon has tried frozen weights in 16 bits, fp32 and NF4 only",
            "lora.quantize_to: nf4",
        ),
        _not_with(
            Condition("lora.init", "starts with", DIFFERENCE_INITS),
            "this initialisation is computed from weights on the GPU",
            "lora.init: default",
        ),
    ),
)
