"""Loads and patches the model of a run: a preset with random weights, a local folder, or a hub id."""

from __future__ import annotations

import copy
import difflib
import importlib.metadata
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tigon.errors import PatchError, RecipeError, UsageError, one_line
from tigon.models import PatchReport
from tigon.models import patch as patch_model
from tigon.models import patch_fp8 as to_fp8
from tigon.models.kv_cache import without_cache
from tigon.models.loading import weight_files
from tigon.models.loading.auto_class import auto_class, refuse_attention, text_part
from tigon.models.loading.classifier import of_layers, task_of
from tigon.models.loading.config import check_counts, check_folder, checked, declared_in, is_hub_id
from tigon.models.loading.presets import PRESETS
from tigon.models.spec import LAYER_FLAGS
from tigon.recipe.keys import ModelConfig, Recipe
from tigon.techniques.keys.model import OF_TIGON
from tigon.techniques.keys.settings import Settings
from tigon.trainer.random_weights import drawn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Keys that every transformers config has and that do not change a model's shape.
NO_SHAPE = frozenset({
    "_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "transformers_version",
    "use_cache",
})  # fmt: skip

# PyTorch's error when code reads a value of a meta tensor.
_WANTS_NUMBERS = re.compile("meta tensor", re.IGNORECASE)
# How transformers' RuntimeErrors about a checkpoint begin.
_NOT_LOADED = re.compile(r"in loading state_dict|automatic conversion of the weights|ignore_mismatched_sizes")


def is_preset(name: str) -> bool:
    return name in PRESETS


def described(model: ModelConfig) -> str:
    """The model's name for the console and the report, with the origin of a preset's weights."""
    return f"{model.name} (random weights)" if is_preset(model.name) else model.name


def check_name(name: str) -> None:
    """Refuse a name that is neither a preset, nor a model folder, nor shaped like a hub id."""
    if is_preset(name) or is_hub_id(name):
        return
    folder = Path(name)
    if not folder.exists():
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"the nearest preset is {near[0]}" if near else f"presets: {', '.join(PRESETS)}"
        if folder.name == "model":
            hint = f"the run {folder.parent.name!r} writes that folder when it ends; finish that run first"
        raise RecipeError(f"model.name: {name!r} is neither a preset nor a folder nor a hub id; {hint}")
    if not (folder / "config.json").is_file():
        raise RecipeError(f"model.name: {name} has no config.json; give the folder of a Hugging Face checkpoint")
    if not any(folder.glob("*.safetensors*")):  # also matches an index, whose missing files `check_weights` names
        raise RecipeError(f"model.name: {name} has no .safetensors weights; save the model as safetensors there")
    if (folder / "adapter_config.json").exists():
        raise RecipeError(
            f"model.name: {name} holds adapters (adapter_config.json), for which transformers would load another "
            "model's weights; merge them into their base model (output.merge: true in the run that trained them, or "
            "PEFT's merge_and_unload) and give the merged model's folder"
        )


def load_config(model: ModelConfig) -> Any:
    """The transformers config, with `model.config` applied to a preset.

    Raises:
        RecipeError: The model does not exist, `model.revision` or `model.config` does not apply to it, or its config
            cannot be loaded.
    """
    from transformers import AutoConfig

    check_name(model.name)
    if model.revision is not None and not is_hub_id(model.name):
        what = "a preset" if is_preset(model.name) else "a local folder"
        raise RecipeError(
            f"model.revision is {model.revision!r}, but {model.name} is {what}, and only models of the hub have "
            "revisions; leave model.revision out, or name a model of the hub (owner/model)"
        )
    if is_preset(model.name):
        return _preset_config(model)
    if model.config:
        raise RecipeError(
            f"model.config changes the shape of presets only, and {model.name} is a checkpoint; leave model.config out"
        )
    try:
        if not is_hub_id(model.name):
            check_folder(Path(model.name))
            declared_in(Path(model.name) / "config.json")
        config = AutoConfig.from_pretrained(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        checked(config, model.name)
    except UsageError as error:
        raise RecipeError(f"model.name: {error}") from None
    except Exception as error:  # transformers and huggingface_hub raise a dozen types for a config they cannot load
        raise RecipeError(f"model.name: {model.name} cannot be loaded: {one_line(error)}") from None
    try:
        config.get_text_config()
    except ValueError:
        raise RecipeError(
            f"model.name: {model.name} is a {config.model_type} model with several parts that read text, and tigon "
            "trains models with one; save the part to train as a checkpoint of its own, and name that"
        ) from None
    return config


def check_stored_format(name: str, config: PreTrainedConfig, *, keeps_mxfp4: bool = False) -> None:
    """Refuse a checkpoint whose experts are in MXFP4 unless the run keeps them so, and the reverse.

    transformers runs such experts with kernels without a backward, or reads them in 16 bits if it has no kernels.

    Raises:
        RecipeError: The message names the keys.
    """
    from tigon.techniques.lora import mxfp4_experts  # loads transformers

    stored = mxfp4_experts.is_stored(config)
    if stored and not keeps_mxfp4:
        raise RecipeError(
            f"model.name: {name} stores its experts in MXFP4; set lora.quantize: true with lora.quantize_to: mxfp4 to "
            "train adapters over experts that stay so, or name a checkpoint in 16 bits, such as "
            "unsloth/gpt-oss-20b-BF16"
        )
    if keeps_mxfp4 and not stored:
        raise RecipeError(
            f"lora.quantize_to: mxfp4 keeps experts as the checkpoint stores them, and {name} has none in MXFP4; set "
            "lora.quantize_to: nf4, or name a checkpoint such as openai/gpt-oss-20b"
        )


def check_weights(model: ModelConfig, config: PreTrainedConfig) -> tuple[str, ...]:
    """Check, by the headers of its weight files, that a checkpoint has every tensor of the model.

    Returns:
        The names of the tensors in the files that the model lacks; they stay unused.

    Raises:
        RecipeError: A file is missing or damaged, or a tensor of the model is missing or has another shape.
    """
    if is_preset(model.name):
        return ()
    try:
        files = _weight_files(model, config)
        headers = weight_files.read_headers(files)
        if not files or getattr(config, "quantization_config", None):
            return ()  # only the quantiser knows the names and shapes of quantised tensors; `read` checks the report
        report = weight_files.compare(
            config, headers, attention=model.attention, trust_remote_code=model.trust_remote_code
        )
    except UsageError as error:
        if "attention implementation" in str(error):
            raise RecipeError(
                f"model.attention is {model.attention}, which transformers does not have for {config.model_type}; set "
                "model.attention: eager"
            ) from None
        raise RecipeError(f"model.name: {error}") from None
    if gets_head(model, config):
        report = _without_head(config, report)
    _refuse(model, report)
    return report.unexpected


def gets_head(model: ModelConfig, config: PreTrainedConfig) -> bool:
    """Whether the model gets a new classification head, which the checkpoint lacks."""
    return task_of(config) is not None and (is_preset(model.name) or task_of(load_config(model)) is None)


def _without_head(config: PreTrainedConfig, report: weight_files.LoadReport) -> weight_files.LoadReport:
    """The report about the layers alone: the new head is missing on purpose, and the old one stays unused."""
    missing, unexpected = (of_layers(config, names) for names in (report.missing, report.unexpected))
    return replace(report, missing=missing, unexpected=unexpected)


def text_part_warning(model: ModelConfig, config: PreTrainedConfig) -> tuple[str, ...]:
    """A warning if a checkpoint has parts besides the text part that is loaded; transformers drops them silently."""
    if (part := text_part(config)) is None:
        return ()
    return (
        f"model.name: only the text part of {model.name} ({part}) is loaded, trained and saved; its towers for images "
        "or sound are left out",
    )


_SCALES = re.compile(r"_scale(_inv|s)?$|_absmax|quant_")
"""Names of tensors that belong to quantised weights."""


def stored_dtypes(model: ModelConfig, config: PreTrainedConfig) -> dict[str, torch.dtype]:
    """Name -> dtype of each floating-point tensor in a checkpoint's files; {} for a preset.

    Raises:
        RecipeError: A file is missing or damaged.
    """
    if is_preset(model.name):
        return {}
    try:
        headers = weight_files.read_headers(_weight_files(model, config))
    except UsageError as error:
        raise RecipeError(f"model.name: {error}") from None
    dtypes = {name: weight_files.DTYPES.get(header.dtype) for name, header in headers.items()}
    found = {name: dtype for name, dtype in dtypes.items() if dtype is not None and dtype.is_floating_point}
    if getattr(config, "quantization_config", None):  # dense weights get the dtype of those that are not quantised
        found = {name: dtype for name, dtype in found.items() if dtype.itemsize > 1 and not _SCALES.search(name)}
    return found


def unused_line(names: Sequence[str]) -> str:
    """The console's warning about the tensors that `check_weights` returned."""
    listed = weight_files.listed(names, "tensor")
    return f"warning  the checkpoint holds {listed}, which the model lacks; they stay unused"


def _refuse(model: ModelConfig, report: weight_files.LoadReport) -> None:
    if report.problem:
        raise RecipeError(f"model.name: {model.name}: {report.problem}")


def _weight_files(model: ModelConfig, config: PreTrainedConfig) -> tuple[Path, ...]:
    """A checkpoint's weight files, downloaded if they are on the hub; () if only transformers can find them there."""
    named = getattr(config, "transformers_weights", None)
    if not is_hub_id(model.name):
        return weight_files.files_in(Path(model.name), named)
    from transformers.utils import cached_file

    def fetched(name: str) -> Path | None:
        quiet = {
            f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "gated_repo", "connection_errors")
        }
        found = cached_file(model.name, name, revision=model.revision, **quiet)
        return None if found is None else Path(found)

    try:
        if single := fetched(named or weight_files.SINGLE):
            return (single,)
        index = None if named else fetched(weight_files.INDEX)
        found = [fetched(name) for name in weight_files.shards(index)] if index else []
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise RecipeError(f"model.name: {model.name} cannot be downloaded: {one_line(error)}") from None
    return tuple(path for path in found if path is not None) if None not in found else ()


def _preset_config(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    shape = dict(PRESETS[model.name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    known = {*config.to_dict(), *config.attribute_map}
    for name in model.config or {}:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise RecipeError(f"model.config.{name} is not a key of {type(config).__name__}{hint}")
        if name in NO_SHAPE:
            raise RecipeError(
                f"model.config.{name} does not change the model's shape, and model.config accepts only keys that do; "
                "leave it out"
            )
    _check_values(model.config or {}, "model.config")
    try:
        config = type(config)(**{**shape, **(model.config or {})})
    except Exception as error:  # huggingface_hub's strict-dataclass errors are not ValueErrors
        raise RecipeError(f"model.config: {type(config).__name__} refuses it: {' '.join(str(error).split())}") from None
    if model.config:
        _check_shape(model, shape, config)
    return config


def _check_values(values: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that no model can have, in nested mappings. transformers would accept them."""
    try:
        check_counts(values, where)
    except UsageError as error:
        raise RecipeError(str(error)) from None
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_values(value, f"{where}.{name}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise RecipeError(f"{where}.{name} is {number}; set a finite number")
            # -1 stands for "no such token" in some configs
            if isinstance(number, (int, float)) and number < 0 and not name.endswith("token_id"):
                raise RecipeError(f"{where}.{name} is {number}, but must not be negative; set 0 or more")
            if name == "rope_theta" and number == 0:
                raise RecipeError(f"{where}.rope_theta is 0, but angles are divided by it; set a positive number")


def _check_shape(model: ModelConfig, shape: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a shape that cannot be trained, and name each key without which it could."""
    problem, changed = _problem_of(config), model.config or {}
    if problem is None:
        return

    def works_without(name: str) -> bool:
        try:
            rest = type(config)(**{**shape, **{other: value for other, value in changed.items() if other != name}})
        except Exception:  # any type, as in `_preset_config`
            return False
        return _problem_of(rest) is None

    culprits = [name for name in changed if works_without(name)]
    keys_text = ", ".join(f"{name}: {changed[name]}" for name in culprits or changed)
    raise RecipeError(f"model.config: {model.name} cannot be trained with {keys_text}: {problem}; change it")


def _problem_of(config: PreTrainedConfig) -> str | None:
    """Why a preset of this shape cannot be trained; None if it can. Runs one forward pass on the meta device."""
    try:
        built = _on_meta(config)
        if empty := [name for name, parameter in built.named_parameters() if not parameter.numel()]:
            return f"{empty[0]} would be empty"
        if config.get_text_config().num_hidden_layers < 1:
            return "a model has at least one layer"
        tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
        # Pass a mask: without one, transformers makes a mask or reads the positions, and meta tensors lack values.
        mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta")
        built = built.to(torch.bfloat16)  # PyTorch's grouped products of experts take no other dtype on this device
        with torch.no_grad():
            assert built.train()(input_ids=tokens, attention_mask=mask, labels=tokens, use_cache=False).loss.ndim == 0
    except Exception as error:  # models raise any type of error for a wrong shape
        # Some code needs the values of meta tensors, such as dynamic RoPE's positions. That is not a wrong shape.
        return None if _WANTS_NUMBERS.search(str(error)) else one_line(error)
    return None


def _on_meta(config: PreTrainedConfig) -> Any:
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return auto_class(config).from_config(config)


def without_data(config: PreTrainedConfig) -> Any:
    """The model of a config on the meta device, without allocating it.

    Raises:
        RecipeError: The config allows no model.
    """
    try:
        return _on_meta(config)
    except Exception as error:  # models raise any type of error for a wrong config
        raise RecipeError(f"model: cannot be built from its config: {one_line(error)}") from None


def end_ids(recipe: Recipe, config: PreTrainedConfig) -> tuple[int, ...]:
    """The ids that end an answer by the checkpoint's generation config, else by its config.

    There are none if the tokenizer is not the checkpoint's own, because its ids mean other tokens.
    """
    from transformers import GenerationConfig

    if recipe.data.tokenizer != "auto" or is_preset(recipe.model.name):
        return ()
    try:
        declared = GenerationConfig.from_pretrained(recipe.model.name, revision=recipe.model.revision).eos_token_id
    except Exception:  # there is none, or it is damaged, which loading the model reports
        declared = getattr(config.get_text_config(), "eos_token_id", None)
    ids = declared if isinstance(declared, (list, tuple)) else [declared]
    return tuple(i for i in ids if isinstance(i, int))


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by name, tied ones once, without allocating the model."""
    return shapes_of(without_data(config))


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def build(
    model: ModelConfig,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | None,
    seed: int,
    loading: Mapping[str, Any] | None = None,
    through: torch.device | None = None,
) -> Any:
    """Load a checkpoint, or a preset with random weights, without patching it.

    Args:
        model: The `model` section of the recipe.
        config: The transformers config.
        dtype: The dtype of the weights. Without it transformers would keep the dtype of the files, and "bf16 autocast
            over fp32 weights" would silently become pure bf16.
        device: The device of the model; None: a checkpoint stays where it was read to, and a preset is on the CPU.
        seed: The seed of a preset's weights, which are the same on every device that ends up holding them.
        loading: More options of from_pretrained, such as a quantisation config.
        through: The GPU that draws a preset's weights, one module at a time; None: `device` draws them.
    """
    from transformers import set_seed

    set_seed(seed)
    if loading:
        loading = {**loading, "device_map": {"": device}}  # a quantised model cannot be moved afterwards
    if is_preset(model.name):
        home = device or torch.device("cpu")
        built = drawn(model, config, dtype, home, through or home)
    else:
        built = read(model, config, dtype=dtype, attn_implementation=model.attention, **(loading or {}))
    if not loading and device is not None:
        built = built.to(device)
    without_cache(built)
    return built


def read(model: ModelConfig, config: PreTrainedConfig, *, dtype: torch.dtype | str, **loading: Any) -> Any:
    """Load a checkpoint, and check that its files held every tensor.

    Args:
        model: The `model` section of the recipe.
        config: The transformers config, for the class of the model.
        dtype: The dtype of the weights; "auto": that of the files.
        loading: More options of from_pretrained.

    Raises:
        RecipeError: The checkpoint cannot be loaded, holds only adapters, or lacks a tensor of the model.
    """
    from safetensors import SafetensorError

    from tigon.techniques.lora import mxfp4_experts, stored_weights  # loads transformers

    loading |= stored_weights.dense_reading(config)
    if mxfp4_experts.is_stored(config):
        kept = loading.pop("quantization_config", None)
        loading |= (
            mxfp4_experts.dense_reading() if kept is None else {"config": mxfp4_experts.with_config(config, kept)}
        )
    if task_of(config) is not None:  # it has the labels, which the checkpoint's own config may lack
        loading.setdefault("config", copy.deepcopy(config))
    try:
        built, info = auto_class(config).from_pretrained(
            model.name,
            dtype=dtype,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **loading,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not _NOT_LOADED.search(str(error)):
            raise  # a fault of the device or of another process
        refuse_attention(model.name, model.attention, error)
        raise RecipeError(f"model.name: {model.name} cannot be loaded: {one_line(error)}") from None
    if getattr(built, "_hf_peft_config_loaded", False):
        raise RecipeError(
            f"model.name: {model.name} holds adapters instead of a whole model; merge them into their base model first"
        )
    report = weight_files.report_of(info)
    _refuse(model, _without_head(config, report) if gets_head(model, config) else report)
    mxfp4_experts.forget_stored_names(built)
    return built


def patch(model: PreTrainedModel, kernels: str, **ops: bool | None) -> Any:
    """Patch the model with the kernels that `kernels` names, without the ops that are False in `ops`.

    Returns the patch report, Liger's version, or None if `kernels` is "none".

    Raises:
        RecipeError: tigon cannot patch the model.
    """
    if kernels == "liger":
        return _liger(model)
    if kernels not in OF_TIGON:
        return None
    if kernels == "no-flce":
        ops = {"linear_cross_entropy": False, **ops}
    try:
        return patch_model(model, **ops)
    except PatchError as error:
        raise RecipeError(f"model.kernels is tigon, but {str(error).rstrip('.')}; set model.kernels: none") from None


def patch_adapters(model: PreTrainedModel, kernels: str, **ops: bool | None) -> None:
    """Fuse the adapters that a technique added after `patch`, if `kernels` are tigon's; a head's, in its loss.

    ops: as in `patch`.
    """
    if kernels in OF_TIGON:
        patch(model, kernels, **{**ops, **dict.fromkeys(LAYER_FLAGS, False)})


def patch_fp8(model: PreTrainedModel, settings: Settings, report: PatchReport | str | None) -> None:
    """Run the products of the decoder layers in FP8 as the settings say, and add that to the patch report.

    Raises:
        RecipeError: No linear layer can.
    """
    try:
        fp8 = to_fp8(model, scaling=settings.train.fp8_scaling, bf16_layers=settings.train.fp8_bf16_layers)
    except PatchError as error:
        raise RecipeError(f"train.precision is fp8, but {error}") from None
    if isinstance(report, PatchReport):
        report.extend(fp8)


def _liger(model: PreTrainedModel) -> str:
    """Liger's own patcher with its defaults, which include the fused linear cross entropy."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return f"Liger Kernel {importlib.metadata.version('liger-kernel')}, its defaults for {model.config.model_type}"
