"""LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314), by PEFT and bitsandbytes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tigon._quiet import quiet_peft
from tigon.errors import RecipeError
from tigon.techniques import model_kernels
from tigon.techniques.mechanisms import adapter_targets
from tigon.techniques.mechanisms.adapter_targets import EXPERTS, LOFTQ, WORDS
from tigon.techniques.mechanisms.four_bit_experts import shown_as_plain
from tigon.techniques.precision import BF16_WEIGHTS, WEIGHT_DTYPES
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion, KeySwitch
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, RunInfo, Technique

DEFAULT_RANK = 16
# `train.precision` -> the dtype of matmuls, which is also that of quantised weights when they are dequantised.
_COMPUTE_DTYPES: Mapping[str, str] = {
    "fp32": "float32", "amp-bf16": "bfloat16", "amp-fp16": "float16", "bf16": "bfloat16",
    "fp8": "bfloat16",
}  # fmt: skip
# Initialisations of PEFT that tigon does not offer, and why.
_NO_INITS: Mapping[str, str] = {
    "eva": "it needs a pass over the data for activations, which tigon does not make",
    "corda": "it needs a pass over the data for activations, which tigon does not make",
    "lora_ga": "it needs a pass over the data for gradients, which tigon does not make",
}


def frozen_dtype(choices: Choices) -> str:
    """Returns the name of the dtype in which a run loads and keeps weights, apart from those it trains with adapters.

    Without adapters all weights are trained, and have `WEIGHT_DTYPES`. Frozen weights need no fp32: they keep the dtype
    of the matmuls. Engines that shard weights choose the dtype themselves: DeepSpeed casts all weights to 16 bits, and
    Accelerate casts all weights to fp32 for FSDP2 under autocast.
    """
    by_engine = choices.zero > 0 or choices.fsdp
    if choices.lora_rank is None or choices.lora_base == "fp32" or by_engine:
        return WEIGHT_DTYPES[choices.precision]
    return _COMPUTE_DTYPES[choices.precision]


def compute_dtype(choices: Choices) -> torch.dtype:
    """Returns the dtype of matmuls, which is also that of 4-bit weights when they are dequantised."""
    return getattr(torch, _COMPUTE_DTYPES[choices.precision])  # type: ignore[no-any-return]


def keeps_mxfp4(choices: Choices) -> bool:
    """Returns whether experts stay in MXFP4, as the checkpoint stores them."""
    return choices.quantized and choices.quantize_to == "mxfp4"


def check(model: Any, choices: Choices) -> None:
    """Refuse adapters that PEFT cannot make for this model. model: without data, and not quantised.

    Raises:
        RecipeError: The message names the recipe key.
    """
    assert choices.lora_rank is not None
    adapter_targets.check(
        model, rank=choices.lora_rank, targets=choices.lora_targets, init=choices.lora_init,
        saved=choices.lora_modules_to_save, bias=choices.lora_bias, quantized=choices.quantized,
    )  # fmt: skip


_EMBEDDINGS_SCALED_IN_PLACE = frozenset({"ctrl"})


def check_with_peft(model: Any, choices: Choices) -> None:
    """Let PEFT make the adapters, save them and load them again, in a model without data. The model is spoilt.

    Otherwise an adapter that is not found again would be noticed after training. One layer stands for all layers.

    Raises:
        RecipeError: PEFT does not take the model, or does not find an adapter again.
    """
    import peft

    if model.config.model_type in _EMBEDDINGS_SCALED_IN_PLACE:
        raise RecipeError(
            f"lora.rank: {model.config.model_type} scales its embeddings in place, which fails with adapters; set "
            "lora.rank: null to train the whole model"
        )
    targets = adapter_targets.targets_of(model, choices.lora_targets)
    modules, parameters = _one_per_name(targets.modules), _one_per_name(targets.parameters)
    config = peft.LoraConfig(
        r=choices.lora_rank, target_modules=modules, target_parameters=parameters or None, task_type="CAUSAL_LM"
    )
    with quiet_peft():
        warnings.filterwarnings("ignore", message=".*for .*meta|.*meta ")  # a tensor without data cannot be filled
        try:
            wrapped = peft.get_peft_model(model, config)
            loaded = peft.set_peft_model_state_dict(wrapped, peft.get_peft_model_state_dict(wrapped))
        except (AttributeError, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RecipeError(f"lora.targets: PEFT cannot adapt {model.config.model_type}: {reason}") from None
    lost = [name for name in loaded.missing_keys if ".lora_" in name]
    if lost:
        module = lost[0].partition(".lora_")[0].removeprefix("base_model.model.")
        raise RecipeError(
            f"lora.targets: PEFT {peft.__version__} would not find the adapter of {module} again when it loads it, "
            "because transformers renames the weight; name other modules, such as q_proj"
        )


def _one_per_name(paths: Sequence[str]) -> list[str]:
    """The first of the paths that differ in the numbers of layers and experts alone."""
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(re.sub(r"\d+", "N", path), path)
    return list(first.values())


def is_saved_as_difference(choices: Choices) -> bool:
    """Returns whether the trained adapter does not belong to the checkpoint's weight.

    It is then saved as the difference from its initial value. The initialisation has subtracted that value from the
    frozen weight, or the value makes up for the rounding of the weight to 4 bits.
    """
    return choices.lora_rank is not None and choices.lora_init.startswith(adapter_targets.DIFFERENCE_INITS)


def keep_trained_in_fp32(model: Any, choices: Choices) -> None:
    """Widen the trained weights of a model with adapters to fp32, unless the whole run is in bf16.

    PEFT widens the adapters only. Whole modules, biases and an objective's own modules begin in the dtype of the frozen
    weights, in which most updates would be rounded away.
    """
    if choices.lora_rank is None or choices.precision in BF16_WEIGHTS:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _adapters(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    import peft

    assert choices.lora_rank is not None
    targets = adapter_targets.targets_of(model, choices.lora_targets)
    alpha = run_info.lora_alpha or 2 * choices.lora_rank
    config = peft.LoraConfig(
        r=choices.lora_rank, lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=choices.lora_dropout, bias=choices.lora_bias, use_rslora=choices.lora_rslora,
        use_dora=choices.lora_dora, init_lora_weights=_peft_init(choices),
        modules_to_save=list(choices.lora_modules_to_save) or None,
        target_modules=adapter_targets.short_names(model, targets),
        target_parameters=list(targets.parameters) or None, task_type="CAUSAL_LM",
    )  # fmt: skip
    with quiet_peft(), shown_as_plain(model):
        wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=choices.precision not in BF16_WEIGHTS)
    keep_trained_in_fp32(wrapped, choices)
    # Otherwise no input of a checkpointed layer with frozen weights would require a gradient.
    model.enable_input_require_grads()
    return wrapped


def _peft_init(choices: Choices) -> bool | str:
    return True if choices.lora_init in ("default", LOFTQ) else choices.lora_init


def _quantization(choices: Choices, run_info: RunInfo) -> Mapping[str, Any]:
    from transformers import BitsAndBytesConfig

    from tigon.techniques.mechanisms import expert_quantizer, mxfp4_experts  # loads transformers

    if keeps_mxfp4(choices):
        return {"quantization_config": mxfp4_experts.config(compute_dtype(choices))}
    if choices.quantize_to == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    return {"quantization_config": expert_quantizer.config(compute_dtype(choices))}


def _without_cpu_packing(model: Any, choices: Choices, run_info: RunInfo) -> Any:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU with bf16 instructions.

    It repacks them in the first evaluation, and training after that fails at an operator without a derivative
    (0.50.2, nn/modules.py: Linear4bit).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _rank_label(choices: Choices) -> str:
    if choices.lora_rank is None:
        return ""
    kind = "QLoRA" if choices.quantized else "DoRA" if choices.lora_dora else "LoRA"
    return f"{kind} {choices.lora_rank}"


# The planner adds adapters only on request, because they train less than the whole model.
_RANK = Setting(
    field="lora_rank", key="lora.rank", help="Rank of the adapters; none: full fine-tuning.", minimum=1, maximum=4096,
    flag=Flag(name="lora", metavar="R", help="Train LoRA adapters of rank R."), traced=True, label=_rank_label,
)  # fmt: skip
_TARGETS = Setting(
    field="lora_targets", key="lora.targets",
    help="Modules with adapters: `all-linear` or `linear` (every linear module of the language model except "
    "`lm_head`), `head` (`lm_head`), `embeddings`, `experts` (the three-dimensional weights of mixtures of experts), "
    "the name or path of a module such as `q_proj`, or a regular expression for whole paths such as `.*\\.[qv]_proj`.",
    words=(*WORDS, "NAME", "PATTERN"), pattern=".+", invalid=adapter_targets.invalid, traced=True,
)  # fmt: skip
_DROPOUT = Setting(
    field="lora_dropout", key="lora.dropout", help="Probability with which an adapter's input is dropped.",
    minimum=0, maximum=0.9, traced=True,
)  # fmt: skip
_RSLORA = Setting(
    field="lora_rslora", key="lora.rslora",
    help="Rank-stabilised LoRA (arXiv 2312.03732): scale the adapters' output by alpha / sqrt(rank).",
)  # fmt: skip
_DORA = Setting(
    field="lora_dora", key="lora.dora",
    help="DoRA (arXiv 2402.09353): the adapters change the direction of a weight, and a trained vector its magnitude.",
    traced=True,
)  # fmt: skip
_SAVED = Setting(
    field="lora_modules_to_save", key="lora.modules_to_save",
    help="Names of modules that are trained whole and saved beside the adapters, e.g. `[lm_head, embed_tokens]`.",
    traced=True,
)  # fmt: skip
_BIAS = Setting(
    field="lora_bias", key="lora.bias",
    help="Biases to train: `lora_only`: those of modules with adapters; `all`: every bias of the model.",
    words=("none", "lora_only", "all"), traced=True,
)  # fmt: skip
_INIT = Setting(
    field="lora_init", key="lora.init",
    help="Initial adapters, by PEFT's names. `default`: random A, and B = 0; `pissa`, `pissa_niter_N`, `olora`: the "
    "largest part of the weight, which is subtracted from the frozen weight; `loftq`: with `quantize`, that of the "
    "rounding error.",
    words=("default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_N", LOFTQ),
    pattern="default|gaussian|orthogonal|olora|pissa|pissa_niter_[0-9]{1,3}|loftq|" + "|".join(_NO_INITS),
    invalid=_NO_INITS.get,
)  # fmt: skip
_BASE = Setting(
    field="lora_base", key="lora.base",
    help="Dtype of frozen weights. `auto`: that of the matmuls, so bf16 with `amp-bf16`; `fp32`: fp32 with `amp-bf16` "
    "and `amp-fp16` too.",
    words=("auto", "fp32"), traced=True,
)  # fmt: skip
_QUANTIZED = Setting(
    field="quantized", key="lora.quantize",
    help="QLoRA: keep the frozen weights of linear modules except `lm_head` in 4 or 8 bits (`quantize_to`); with 4 "
    "bits also those of experts.",
    flag=Flag(
        name="qlora", help="Keep the base weights in 4 bits; without --lora the rank is 16.",
        implies=(("lora_rank", DEFAULT_RANK),),
    ),
    traced=True,
)  # fmt: skip
_QUANTIZE_TO = Setting(
    field="quantize_to", key="lora.quantize_to",
    help="`nf4`: 4 bits with double quantisation; `int8`: 8 bits (arXiv 2208.07339); `mxfp4`: experts stay in 4 bits "
    "as the checkpoint stores them, and all other weights in 16 bits.",
    words=("nf4", "int8", "mxfp4"), traced=True,
)  # fmt: skip

_EXPERTS = Condition("lora_targets", "includes", EXPERTS)
_SUBSPACE = Condition("lora_init", "starts with", adapter_targets.SUBSPACE_INITS)
_LOFTQ = Condition("lora_init", "is", LOFTQ)
_DIFFERENCE = Condition("lora_init", "starts with", adapter_targets.DIFFERENCE_INITS)
_FP32_BASE, _QUANTIZE = Condition("lora_base", "is", "fp32"), Condition("quantized", "is", True)
_MXFP4 = Condition("quantize_to", "is", "mxfp4")


_NOT_TIGON = Condition("kernels", "is not one of", tuple(sorted(model_kernels.OF_TIGON)))
_PARAM_WRAPPER = "peft 0.21 tuners/lora/layer.py: ParamWrapper"
_CONVERSION = "peft 0.21 tuners/lora/model.py: subtract_mutated_init"
_EXCLUSIONS = (
    Exclusion(
        when=(_QUANTIZE, Condition("fsdp", "is", True)),
        reason="Accelerate leaves 4-bit weights out of the sharding, so FSDP2 would save nothing",
        instead="sharding.fsdp: false with sharding.gpus, which copies the 4-bit weights to each GPU",
        source="accelerate 1.15 utils/fsdp_utils.py: fsdp2_prepare_model",
    ),
    Exclusion(
        when=(_QUANTIZE, Condition("lora_rank", "is", None)),
        reason="4-bit weights get no gradient, so nothing would be trained",
        instead=f"lora.rank: {DEFAULT_RANK}",
        source="arXiv 2305.14314", untraceable=True,
    ),
    Exclusion(
        when=(_FP32_BASE, Condition("precision", "is one of", BF16_WEIGHTS)),
        reason="this precision keeps every weight in bf16",
        instead="train.precision: amp-bf16, or lora.base: auto", source="docs/techniques/precision.md",
    ),
    Exclusion(
        when=(_FP32_BASE, Condition("zero", "is at least", 1), Condition("precision", "starts with", "amp")),
        reason="DeepSpeed keeps every weight in 16 bits, with an fp32 copy of those that are trained",
        instead="lora.base: auto, or sharding.zero: 0", source="DeepSpeed's configuration: bf16.enabled, fp16.enabled",
    ),
    Exclusion(
        when=(_EXPERTS, _QUANTIZE, _NOT_TIGON),
        reason="PEFT leaves the adapter of a 4-bit weight of experts behind after each forward, so that they add up",
        instead="model.kernels: tigon, or lora.targets without experts",
        source="peft 0.21.2 tuners/lora/layer.py: ParamWrapper._remove_parametrizations",
    ),
    Exclusion(
        when=(_QUANTIZE, _MXFP4, _NOT_TIGON),
        reason="without tigon's op the dense weights of all layers would wait for the backward",
        instead="model.kernels: tigon, or lora.quantize_to: nf4", source="src/tigon/models/seams/experts.py",
    ),
    Exclusion(
        when=(_QUANTIZE, _MXFP4, Condition("zero", "is at least", 1)),
        reason="DeepSpeed casts the model to 16 bits and shards it, which was never tried with stored bytes",
        instead="sharding.zero: 0 with sharding.gpus, or lora.quantize_to: nf4", source="docs/techniques/lora.md",
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora_dropout", "is above", 0)),
        reason="PEFT adds these adapters to the weights, so they see no input that could be dropped",
        instead="lora.dropout: 0", source=_PARAM_WRAPPER,
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora_dora", "is", True)),
        reason="PEFT has no DoRA for parameters", instead="lora.dora: false", source=_PARAM_WRAPPER,
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora_init", "is not one of", ("default", "gaussian"))),
        reason="PEFT computes this initialisation from the weight of a linear module",
        instead="lora.init: default", source=_PARAM_WRAPPER,
    ),
    *(
        Exclusion(
            when=(_EXPERTS, sharded),
            reason="PEFT forms the experts' weights anew in each forward pass, which tigon has not tried with shards",
            instead=f"{instead}, or lora.targets without experts", source=_PARAM_WRAPPER,
        )
        for sharded, instead in (
            (Condition("zero", "is", 3), "sharding.zero: 2"), (Condition("fsdp", "is", True), "sharding.fsdp: false"),
        )
    ),
    Exclusion(
        when=(_SUBSPACE, _QUANTIZE),
        reason="what remains of the weight would be quantised, so the adapter would not fit the checkpoint's weight",
        instead="lora.init: default, or lora.quantize: false", source="peft 0.21 tuners/lora/layer.py: pissa_init",
    ),
    Exclusion(
        when=(_LOFTQ, Condition("quantized", "is", False)),
        reason="LoftQ makes up for the rounding of 4-bit weights, and these are not rounded",
        instead="lora.quantize: true, or lora.init: default", source="arXiv 2310.08659",
    ),
    Exclusion(
        when=(_LOFTQ, Condition("quantize_to", "is one of", ("int8", "mxfp4"))),
        reason="tigon has LoftQ for linear layers in NF4 only", instead="lora.quantize_to: nf4, or lora.init: default",
        source="peft 0.21 utils/loftq_utils.py: replace_lora_weights_loftq",
    ),
    Exclusion(
        when=(_DIFFERENCE, Condition("lora_dora", "is", True)),
        reason="the adapter is saved as a sum with the negative of its initial value, and DoRA's is no sum",
        instead="lora.init: default, or lora.dora: false", source=_CONVERSION,
    ),
    *(
        Exclusion(
            when=(_DIFFERENCE, trained),
            reason="PEFT converts such an adapter to one for the checkpoint's weights, and drops all else that was "
            "trained",
            instead=f"lora.init: default, or {instead}", source=_CONVERSION,
        )
        for trained, instead in (
            (Condition("lora_bias", "is not", "none"), "lora.bias: none"),
            (Condition("lora_modules_to_save", "is not", ()), "lora.modules_to_save: []"),
        )
    ),
    *(
        Exclusion(
            when=(_DIFFERENCE, sharded),
            reason="the adapter is saved as the difference from its initial value, which needs whole fp32 weights",
            instead=f"lora.init: default, or {unsharded}", source=_CONVERSION,
        )
        for sharded, unsharded in (
            (Condition("zero", "is at least", 1), "sharding.zero: 0"),
            (Condition("fsdp", "is", True), "sharding.fsdp: false"),
        )
    ),
)  # fmt: skip

DECLARATION = Declaration(
    pages={"lora": "LoRA and QLoRA"},
    settings=(
        _RANK, _TARGETS, _DROPOUT, _RSLORA, _DORA, _SAVED, _BIAS, _INIT, _BASE, _QUANTIZED, _QUANTIZE_TO,
    ),
    techniques=(
        Technique(
            name="lora", page="lora",
            saves="Gradients and optimizer states of all weights except the adapters, and with `amp-bf16` half of each "
            "frozen weight: about 14 of 16 bytes per parameter.",
            costs="Two thin matmuls for each adapted one. Activations are needed as before.",
            effect_on_result="Another result than full fine-tuning: only the modules in `lora.targets` change, by "
            "an update of rank `lora.rank`. With autocast the frozen weights and the sum of the layers' outputs are "
            "in 16 bits (`lora.base: fp32`: in fp32). Adapters are fp32, or bf16 with `train.precision: bf16`.",
            needs=("peft",),
            recipe={"lora.rank": DEFAULT_RANK}, chosen=(Condition("lora_rank", "is at least", 1),), model=_adapters,
            change_rank=6, source="peft; arXiv 2106.09685",
        ),
        Technique(
            name="qlora", page="lora",
            saves="As LoRA, and the frozen weights of experts and of every `nn.Linear` except `lm_head` take 0.516 "
            "bytes per parameter instead of 2 (or 4 in fp32): 4 bits, 1/64 byte for a scale per 64 weights, and 1/4096 "
            "byte for an fp32 scale per 256 of those scales. `lora.quantize_to: int8` takes 1 byte per parameter, and "
            "`mxfp4` 0.531 bytes per parameter of the experts.",
            costs="Weights are dequantised before each matmul.",
            effect_on_result="As LoRA, and the frozen weights are rounded to 16 levels (NF4, blocks of 64, scales "
            "in 8 bits).",
            needs=("peft", "bitsandbytes"), spared={"bitsandbytes": _MXFP4},
            recipe={"lora.rank": DEFAULT_RANK, "lora.quantize": True},
            chosen=(_QUANTIZE,), loading=_quantization, model=_without_cpu_packing,
            change_rank=7, source="bitsandbytes; arXiv 2305.14314",
        ),
    ),
    exclusions=_EXCLUSIONS,
    key_switches=(
        KeySwitch(
            keys=(
                "lora.alpha", "lora.targets", "lora.dropout", "lora.rslora", "lora.dora", "lora.modules_to_save",
                "lora.bias", "lora.init", "lora.base", "lora.quantize",
            ),
            on=Condition("lora_rank", "is at least", 1), instead=f"lora.rank: {DEFAULT_RANK}",
        ),
        KeySwitch(keys=("lora.quantize_to",), on=_QUANTIZE, instead="lora.quantize: true"),
    ),
)  # fmt: skip
