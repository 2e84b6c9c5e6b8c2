"""LoRA (arXiv 2106.09685) and QLoRA (arXiv 2305.14314), by PEFT and bitsandbytes."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from tigon._quiet import quiet_peft
from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.lora import DIFFERENCE_INITS, EXPERTS, LOFTQ, SUBSPACE_INITS
from tigon.techniques.keys.model import OF_TIGON
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora import adapter_targets
from tigon.techniques.lora.four_bit_weights import let_fsdp_divide, shown_as_plain
from tigon.techniques.precision import NUMBER_FORMATS, number_format
from tigon.techniques.technique import Declaration, RunInfo, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_RANK = 16


def frozen_dtype(settings: Settings) -> torch.dtype:
    """Returns the dtype in which a run loads and keeps weights, apart from those it trains with adapters.

    Without adapters all weights are trained. Frozen weights need no fp32: they keep the dtype of the matmuls. DeepSpeed
    casts all weights to 16 bits. Under autocast, Accelerate before 1.13 casts all weights of FSDP2 to fp32, unless some
    are in 4 bits; later versions cast only trained ones.
    """
    formats, fsdp = number_format(settings), settings.sharding.fsdp
    keeps = fsdp and (settings.lora.quantize or fsdp_keeps_frozen_dtype())
    engine_chooses = settings.sharding.divides_states and not keeps
    if not settings.lora.used or settings.lora.base == "fp32" or engine_chooses:
        return formats.weights
    return formats.compute_dtype


@functools.cache
def fsdp_keeps_frozen_dtype() -> bool:
    """Returns whether Accelerate divides frozen weights in the dtype that they were loaded in.

    A machine that plans without Accelerate plans for a version that does.
    """
    try:
        major, minor = map(int, version("accelerate").split(".")[:2])
    except PackageNotFoundError:
        return True
    return (major, minor) >= (1, 13)


def adapter_dtype(settings: Settings) -> torch.dtype:
    """Returns the dtype of the adapters while they are trained."""
    if settings.lora.adapter_dtype == "auto":
        return number_format(settings).weights
    return torch.bfloat16 if settings.lora.adapter_dtype == "bf16" else torch.float32


def trained_dtype(settings: Settings, name: str) -> torch.dtype:
    """Returns the dtype of a trained parameter by its name in the model with adapters.

    Modules that are trained whole, and DoRA's magnitudes, whose updates bf16 would round away, keep the run's dtype.
    """
    return adapter_dtype(settings) if is_factor(name) else number_format(settings).weights


_FACTORS = ("lora_A.", "lora_B.", "lora_embedding_A.", "lora_embedding_B.")


def is_factor(name: str) -> bool:
    """Whether a parameter is one of PEFT's two factors, by its name."""
    return any(part in name for part in _FACTORS)


def keeps_mxfp4(settings: Settings) -> bool:
    """Returns whether experts stay in MXFP4, as the checkpoint stores them."""
    return settings.lora.quantize and settings.lora.quantize_to == "mxfp4"


LANGUAGE = "CAUSAL_LM"
"""PEFT's name of the task of a model that predicts the next token."""
_EMBEDDINGS_SCALED_IN_PLACE = frozenset({"ctrl"})


def check_with_peft(model: PreTrainedModel, settings: Settings) -> None:
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
    targets = adapter_targets.targets_of(model, settings.lora.targets)
    modules, parameters = _one_per_name(targets.modules), _one_per_name(targets.parameters)
    config = peft.LoraConfig(
        r=settings.lora.rank, target_modules=modules, target_parameters=parameters or None, task_type=_task(model)
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


def is_saved_as_difference(settings: Settings) -> bool:
    """Returns whether the trained adapter does not belong to the checkpoint's weight.

    It is then saved as the difference from its initial value. The initialisation has subtracted that value from the
    frozen weight, or the value makes up for the rounding of the weight to 4 bits.
    """
    return settings.lora.used and settings.lora.init.startswith(DIFFERENCE_INITS)


def set_trained_dtypes(model: PreTrainedModel, settings: Settings) -> None:
    """Give the trained weights of a model with adapters their dtypes.

    PEFT chooses those of the adapters only. Whole modules, biases and an objective's own modules begin in the dtype of
    the frozen weights, in which most updates would be rounded away. A module that transformers keeps in fp32 stays so.
    """
    if not settings.lora.used:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            wanted = trained_dtype(settings, name)
            if is_factor(name) or wanted.itemsize > parameter.itemsize:
                parameter.data = parameter.data.to(wanted)


def _adapters(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    import peft

    assert settings.lora.rank is not None
    _keep_from_cpu_packing(model)
    if settings.sharding.fsdp:
        let_fsdp_divide(model, number_format(settings).compute_dtype, run_info.device)
    targets = adapter_targets.targets_of(model, settings.lora.targets)
    task = _task(model)
    whole = [] if task == LANGUAGE else adapter_targets.head_modules(model)
    alpha = settings.lora.alpha or 2 * settings.lora.rank
    config = peft.LoraConfig(
        r=settings.lora.rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=settings.lora.dropout,
        bias=settings.lora.bias,
        use_rslora=settings.lora.rslora,
        use_dora=settings.lora.dora,
        init_lora_weights=_peft_init(settings),
        modules_to_save=[*settings.lora.modules_to_save, *whole] or None,
        target_modules=adapter_targets.short_names(model, targets),
        target_parameters=list(targets.parameters) or None,
        task_type=task,
    )
    with quiet_peft(), shown_as_plain(model):
        wrapped = peft.get_peft_model(
            model, config, autocast_adapter_dtype=number_format(settings).weights == torch.float32
        )
    set_trained_dtypes(wrapped, settings)
    # Otherwise no input of a checkpointed layer with frozen weights would require a gradient.
    model.enable_input_require_grads()
    return wrapped


def _task(model: PreTrainedModel) -> str:
    """PEFT's name of the model's task. For a classification it trains the head whole, beside the adapters."""
    tasks = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
    return next((task for ending, task in tasks.items() if type(model).__name__.endswith(ending)), LANGUAGE)


def _peft_init(settings: Settings) -> bool | str:
    return True if settings.lora.init in ("default", LOFTQ) else settings.lora.init


def _quantization(settings: Settings, run_info: RunInfo) -> Mapping[str, Any]:
    from transformers import BitsAndBytesConfig

    from tigon.techniques.lora import expert_quantizer, mxfp4_experts  # loads transformers

    if keeps_mxfp4(settings):
        return {"quantization_config": mxfp4_experts.config(number_format(settings).compute_dtype)}
    if settings.lora.quantize_to == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    on_host = settings.lora.base_offload or settings.sharding.fsdp
    through = run_info.device if on_host else None
    return {"quantization_config": expert_quantizer.config(number_format(settings).compute_dtype, through)}


def _keep_from_cpu_packing(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU with bf16 instructions.

    It repacks them in the first evaluation, and training after that fails at an operator without a derivative
    (0.50.2, nn/modules.py: Linear4bit). A checkpoint may store such weights without `lora.quantize`.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _rank_label(settings: Settings) -> str:
    if not settings.lora.used:
        return ""
    kind = "QLoRA" if settings.lora.quantize else "DoRA" if settings.lora.dora else "LoRA"
    return f"{kind} {settings.lora.rank}"


_EXPERTS = Condition("lora.targets", "includes", EXPERTS)
_SUBSPACE = Condition("lora.init", "starts with", SUBSPACE_INITS)
_LOFTQ = Condition("lora.init", "is", LOFTQ)
_DIFFERENCE = Condition("lora.init", "starts with", DIFFERENCE_INITS)
_BF16_WEIGHTS = tuple(name for name, formats in NUMBER_FORMATS.items() if formats.weights == torch.bfloat16)
_FP32_BASE, _QUANTIZE = Condition("lora.base", "is", "fp32"), Condition("lora.quantize", "is", True)
_FP32_ADAPTERS = Condition("lora.adapter_dtype", "is", "fp32")
_BF16_ADAPTERS = Condition("lora.adapter_dtype", "is", "bf16")
_MXFP4 = Condition("lora.quantize_to", "is", "mxfp4")


_NOT_TIGON = Condition("model.kernels", "is not one of", tuple(sorted(OF_TIGON)))
_PARAM_WRAPPER = "peft 0.21 tuners/lora/layer.py: ParamWrapper"
_CONVERSION = "peft 0.21 tuners/lora/model.py: subtract_mutated_init"
_EXCLUSIONS = (
    Exclusion(
        when=(_QUANTIZE, Condition("lora.quantize_to", "is", "int8"), Condition("sharding.fsdp", "is", True)),
        reason="FSDP2 divides no integers, and bitsandbytes reads 8-bit weights as integers",
        instead="lora.quantize_to: nf4, or sharding.fsdp: false with sharding.gpus, which copies the weights",
        source="bitsandbytes 0.50.2 nn/modules.py: Int8Params",
    ),
    *(
        Exclusion(
            when=(*adapters, divided),
            reason=f"tigon has not tried {what} with it",
            instead=instead,
            source="docs/several-gpus.md",
        )
        for adapters, what in (
            ((_QUANTIZE, Condition("sharding.fsdp", "is", True)), "frozen weights in 4 bits that FSDP2 divides"),
            ((_EXPERTS,), "adapters on experts"),
        )
        for divided, instead in (
            (Condition("sharding.replicas", "is at least", 2), "sharding.replicas: 1"),
            (Condition("sharding.sequence", "is at least", 2), "sharding.sequence: 1"),
        )
    ),
    Exclusion(
        when=(_QUANTIZE, Condition("lora.rank", "is", None)),
        reason="4-bit weights get no gradient, so nothing would be trained",
        instead=f"lora.rank: {DEFAULT_RANK}",
        source="arXiv 2305.14314",
        untraceable=True,
    ),
    Exclusion(
        when=(_FP32_BASE, Condition("train.precision", "is one of", _BF16_WEIGHTS)),
        reason="this precision keeps every weight in bf16",
        instead="train.precision: amp-bf16, or lora.base: auto",
        source="docs/techniques/precision.md",
    ),
    Exclusion(
        when=(
            _FP32_BASE,
            Condition("sharding.zero", "is at least", 1),
            Condition("train.precision", "starts with", "amp"),
        ),
        reason="DeepSpeed keeps every weight in 16 bits, with an fp32 copy of those that are trained",
        instead="lora.base: auto, or sharding.zero: 0",
        source="DeepSpeed's configuration: bf16.enabled, fp16.enabled",
    ),
    Exclusion(
        when=(_FP32_ADAPTERS, Condition("train.precision", "is one of", _BF16_WEIGHTS)),
        reason="this precision keeps every weight in bf16",
        instead="train.precision: amp-bf16, or lora.adapter_dtype: auto",
        source="docs/techniques/precision.md",
    ),
    Exclusion(
        when=(_BF16_ADAPTERS, Condition("train.precision", "is", "amp-fp16")),
        reason="the loss scaling of fp16 has not been tried with gradients in bf16",
        instead="train.precision: amp-bf16, or lora.adapter_dtype: auto",
        source="docs/techniques/lora.md",
    ),
    *(
        Exclusion(
            when=(Condition("lora.adapter_dtype", "is not", "auto"), sharded),
            reason="an engine that shards chooses the dtype of all weights",
            instead=f"lora.adapter_dtype: auto, or {unsharded}",
            source="docs/techniques/lora.md",
        )
        for sharded, unsharded in (
            (Condition("sharding.zero", "is at least", 1), "sharding.zero: 0"),
            (Condition("sharding.fsdp", "is", True), "sharding.fsdp: false"),
        )
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
        instead="model.kernels: tigon, or lora.quantize_to: nf4",
        source="src/tigon/models/seams/experts.py",
    ),
    Exclusion(
        when=(_QUANTIZE, _MXFP4, Condition("sharding.zero", "is at least", 1)),
        reason="DeepSpeed casts the model to 16 bits and shards it, which was never tried with stored bytes",
        instead="sharding.zero: 0 with sharding.gpus, or lora.quantize_to: nf4",
        source="docs/techniques/lora.md",
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora.dropout", "is above", 0)),
        reason="PEFT adds these adapters to the weights, so they see no input that could be dropped",
        instead="lora.dropout: 0",
        source=_PARAM_WRAPPER,
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora.dora", "is", True)),
        reason="PEFT has no DoRA for parameters",
        instead="lora.dora: false",
        source=_PARAM_WRAPPER,
    ),
    Exclusion(
        when=(_EXPERTS, Condition("lora.init", "is not one of", ("default", "gaussian"))),
        reason="PEFT computes this initialisation from the weight of a linear module",
        instead="lora.init: default",
        source=_PARAM_WRAPPER,
    ),
    Exclusion(
        when=(_SUBSPACE, _QUANTIZE),
        reason="what remains of the weight would be quantised, so the adapter would not fit the checkpoint's weight",
        instead="lora.init: default, or lora.quantize: false",
        source="peft 0.21 tuners/lora/layer.py: pissa_init",
    ),
    Exclusion(
        when=(_LOFTQ, Condition("lora.quantize", "is", False)),
        reason="LoftQ makes up for the rounding of 4-bit weights, and these are not rounded",
        instead="lora.quantize: true, or lora.init: default",
        source="arXiv 2310.08659",
    ),
    Exclusion(
        when=(_LOFTQ, Condition("lora.quantize_to", "is one of", ("int8", "mxfp4"))),
        reason="tigon has LoftQ for linear layers in NF4 only",
        instead="lora.quantize_to: nf4, or lora.init: default",
        source="peft 0.21 utils/loftq_utils.py: replace_lora_weights_loftq",
    ),
    Exclusion(
        when=(_DIFFERENCE, Condition("lora.dora", "is", True)),
        reason="the adapter is saved as a sum with the negative of its initial value, and DoRA's is no sum",
        instead="lora.init: default, or lora.dora: false",
        source=_CONVERSION,
    ),
    *(
        Exclusion(
            when=(_DIFFERENCE, trained),
            reason="PEFT converts such an adapter to one for the checkpoint's weights, and drops all else that was "
            "trained",
            instead=f"lora.init: default, or {instead}",
            source=_CONVERSION,
        )
        for trained, instead in (
            (Condition("lora.bias", "is not", "none"), "lora.bias: none"),
            (Condition("lora.modules_to_save", "is not", ()), "lora.modules_to_save: []"),
        )
    ),
    *(
        Exclusion(
            when=(_DIFFERENCE, sharded),
            reason="the adapter is saved as the difference from its initial value, which needs whole fp32 weights",
            instead=f"lora.init: default, or {unsharded}",
            source=_CONVERSION,
        )
        for sharded, unsharded in (
            (Condition("sharding.zero", "is at least", 1), "sharding.zero: 0"),
            (Condition("sharding.fsdp", "is", True), "sharding.fsdp: false"),
        )
    ),
)

DECLARATION = Declaration(
    labels={"lora.rank": _rank_label},
    techniques=(
        Technique(
            name="lora",
            effect_on_result="Another result than full fine-tuning: only the modules in `lora.targets` change, by "
            "an update of rank `lora.rank`. With autocast the frozen weights and the sum of the layers' outputs are "
            "in 16 bits (`lora.base: fp32`: in fp32). Adapters are fp32, or bf16 with `train.precision: bf16` or "
            "`lora.adapter_dtype: bf16`.",
            needs=("peft",),
            recipe={"lora.rank": DEFAULT_RANK},
            chosen=(Condition("lora.rank", "is at least", 1),),
            model=_adapters,
            change_rank=6,
        ),
        Technique(
            name="qlora",
            effect_on_result="As LoRA, and the frozen weights are rounded to 16 levels (NF4, blocks of 64, scales "
            "in 8 bits).",
            needs=("peft", "bitsandbytes"),
            spared={"bitsandbytes": _MXFP4},
            recipe={"lora.rank": DEFAULT_RANK, "lora.quantize": True},
            chosen=(_QUANTIZE,),
            load=_quantization,
            change_rank=7,
        ),
    ),
    exclusions=_EXCLUSIONS,
    switches=(
        Switch(
            (
                "lora.alpha",
                "lora.targets",
                "lora.dropout",
                "lora.rslora",
                "lora.dora",
                "lora.modules_to_save",
                "lora.bias",
                "lora.init",
                "lora.base",
                "lora.adapter_dtype",
                "lora.loraplus_lr_ratio",
                "lora.quantize",
            ),
            "lora.rank",
            lambda settings: settings.lora.used,
            f"lora.rank: {DEFAULT_RANK}",
        ),
        Switch(("lora.quantize_to",), "lora.quantize", _QUANTIZE.holds, "lora.quantize: true"),
    ),
)
