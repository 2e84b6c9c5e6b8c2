"""`tigon.plan`: the choice of `train.checkpointing: auto` for a model in your own code."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from tigon._trunk import decoder_layers
from tigon.errors import PatchError, UsageError
from tigon.models.fp8 import fp8_options
from tigon.models.patch import flags_of, unwrap
from tigon.models.seams.lora import unfused_layers
from tigon.models.spec import SINKS_FLAG
from tigon.planner.gpus import GIB, Gpu, find_gpu, row_of, size_bytes
from tigon.planner.request import Request, refusals, text_config, ties_embeddings
from tigon.planner.search import space
from tigon.planner.search.checkpointing import Beside, choose
from tigon.planner.search.option import Option
from tigon.profiler.recording.device_memory import host_free_bytes
from tigon.techniques.accumulation import accumulation
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST, OFFLOAD
from tigon.techniques.checkpointing.layer_checkpointing import groups_of, is_by_layer
from tigon.techniques.keys.settings import Settings
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.techniques.precision import NUMBER_FORMATS

# Classes of optimizers -> names of the planner. `adamw` is PyTorch's fused one.
_OPTIMIZER_CLASSES: Mapping[str, str] = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "SGD": "sgd",
    "AdamW8bit": "adamw-8bit",
    "Lion8bit": "lion-8bit",
    "PagedAdamW": "paged-adamw",
    "PagedAdamW8bit": "paged-adamw-8bit",
    "Adafactor": "adafactor",
}
_WORDS = {
    "full": "recompute everything",
    "mlp": "keep attention, recompute the MLP and the norms",
    "elementwise": "keep products and attention, recompute norms and gated units",
    "none": "recompute nothing",
    OFFLOAD: "recompute everything; the layers' inputs wait in host memory",
    KEPT_ON_HOST: "recompute all but attention; its results and the layers' inputs wait in host memory",
}


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """The planner's choice for a model. `print` it, and pass it to `tigon.checkpoint`."""

    model: str
    layers: int
    checkpointing: str
    """A value of `train.checkpointing`: `none`, `full`, `offload`, `offload-attention`, or what each layer recomputes,
    such as `full:7,none:9`."""
    accumulation_fusion: bool
    """Whether micro-batches add to the gradients in their products. `tigon.checkpoint` sets it up."""
    cuda_graphs: bool
    """Whether each layer is launched as CUDA graphs. `tigon.checkpoint` sets them up."""
    batch: int
    """Samples per micro-batch."""
    accumulate: int
    """Micro-batches per optimizer step."""
    seq: int
    peak_allocated_bytes: int
    """Predicts torch.cuda.max_memory_allocated() of the training steps."""
    device_bytes: int
    """Predicts the GPU's memory: the allocator's reserved memory and the CUDA context."""
    memory_bytes: int
    """The memory that the run may take."""
    host_bytes: int
    """Host memory: pinned buffers of `offload` and `offload-attention`, and optimizer state in unified memory."""
    step_s: float
    """Predicted seconds of one optimizer step."""
    tokens_per_s: float
    fits: bool
    compared: tuple[Option, ...]
    """Every choice that was estimated."""
    notes: tuple[str, ...] = ()
    """What about the model costs time or memory, and how to change it."""

    def __str__(self) -> str:
        batches = f"{self.accumulate} x {self.batch} samples of {self.seq:,} tokens"
        verdict = "fits" if self.fits else "does not fit: use fewer or shorter samples, or adapters"
        on_host = f", {_gib(self.host_bytes)} in host memory" if self.host_bytes else ""
        lines = [
            f"{self.model}, {batches}: train.checkpointing {self.checkpointing}",
            *(f"  {words}" for words in self._layer_lines()),
            *(["  gradients: added up in the products (accumulation fusion)"] if self.accumulation_fusion else []),
            *(["  layers: launched as CUDA graphs, in micro-batches of this shape"] if self.cuda_graphs else []),
            f"predicted: peak {_gib(self.peak_allocated_bytes)} allocated, {_gib(self.device_bytes)} on the GPU of "
            f"{_gib(self.memory_bytes)} ({verdict}){on_host}; {self.step_s:.3g} s per step, "
            f"{self.tokens_per_s:,.0f} tokens/s",
            *(f"note: {note}" for note in self.notes),
            "compared, fastest first:",
        ]
        for option in sorted(self.compared, key=lambda one: -one.estimate.tokens_per_s):
            estimate, request, train = option.estimate, option.request, option.request.settings.train
            fits = "fits" if estimate.device_bytes <= self.memory_bytes else "too large"
            lines.append(
                f"  {request.micro_batches:>3} x {request.batch:<4} {train.checkpointing:<28} "
                f"{_gib(estimate.device_bytes):>10} {estimate.step_s:>9.3g} s  {fits}"
            )
        return "\n".join(lines)

    def _layer_lines(self) -> list[str]:
        groups = groups_of(self.checkpointing) if is_by_layer(self.checkpointing) else []
        first, lines = 0, []
        for state, count in groups or [(self.checkpointing, self.layers)]:
            lines.append(f"layers {first} to {first + count - 1}: {_WORDS[state]}")
            first += count
        return lines


def plan(
    model: nn.Module,
    *,
    batch: int,
    seq: int,
    optimizer: str | Optimizer,
    memory: str | int | None,
    precision: str | None,
    accumulate: int | None,
    cuda_graphs: bool | None,
) -> CheckpointPlan:
    """See `tigon.plan`."""
    inner = transformers_model(model, "tigon.plan")
    for name, value in (("batch", batch), ("seq", seq), ("accumulate", 1 if accumulate is None else accumulate)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    if accumulate is not None and batch % accumulate:
        raise UsageError(f"batch is {batch}, which accumulate {accumulate} does not divide; give a multiple of it.")
    attention = str(getattr(inner.config, "_attn_implementation", None) or "sdpa")
    settings = Settings.of(
        {
            "train.precision": _precision(inner, precision),
            "train.optimizer": _optimizer(optimizer),
            "model.kernels": _kernels(inner),
            "model.attention": attention,
            "model.attention_sinks": SINKS_FLAG in flags_of(inner),
            "train.cuda_graphs": cuda_graphs,
            **_adapters(model),
            **_fp8(inner),
        }
    )
    unfused = unfused_layers(inner) if settings.model.patched else 0
    untied = _is_untied(inner)
    request = Request(
        model=type(inner).__name__,
        config=_with_two_weights(inner.config) if untied else inner.config,
        batch=batch,
        seq=seq,
        settings=settings,
        masked=False,
        adapters_fused=not unfused,
    )
    for reason in refusals(request, settings):
        raise UsageError(f"{reason}.")
    gpu = _gpu(memory)
    sizes = [batch // accumulate] if accumulate else [n for n in range(batch, 0, -1) if batch % n == 0]
    splits = [(size, batch // size) for size in sizes]
    found = choose(request, space.with_headroom(gpu), splits, beside=_beside())
    estimate, chosen = found.option.estimate, found.option.request
    return CheckpointPlan(
        model=request.model,
        layers=len(decoder_layers(inner)),
        checkpointing=chosen.settings.train.checkpointing,
        cuda_graphs=bool(chosen.settings.train.cuda_graphs),
        batch=chosen.batch,
        accumulate=chosen.micro_batches,
        accumulation_fusion=accumulation.fuses(chosen.settings),
        seq=seq,
        peak_allocated_bytes=estimate.peak_allocated_bytes,
        device_bytes=estimate.device_bytes,
        memory_bytes=gpu.memory_bytes,
        host_bytes=estimate.host_bytes,
        step_s=estimate.step_s,
        tokens_per_s=estimate.tokens_per_s,
        fits=found.option.fits(gpu),
        compared=tuple(found.seen.values()),
        notes=(*((_UNFUSED.format(unfused),) if unfused else ()), *((_UNTIED,) if untied else ())),
    )


def transformers_model(model: nn.Module, caller: str) -> PreTrainedModel:
    """The transformers model inside a wrapper of PEFT or DistributedDataParallel."""
    try:
        inner = unwrap(model)
    except PatchError as error:
        raise UsageError(f"{caller}: {error}") from None
    if not isinstance(inner, PreTrainedModel):
        raise UsageError(f"{caller}: {type(model).__name__} is not a model of transformers; pass one.")
    return inner


def _is_untied(model: PreTrainedModel) -> bool:
    """Whether head and embeddings have a weight each, although the config says that they share one."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    plain = isinstance(head, nn.Linear) and isinstance(embeddings, nn.Embedding)
    return plain and ties_embeddings(model.config) and head.weight is not embeddings.weight


def _with_two_weights(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.tie_word_embeddings = text_config(config).tie_word_embeddings = False
    return config


def _gpu(memory: str | int | None) -> Gpu:
    """The GPU of this process with that much memory; without a GPU, the one that `memory` names."""
    if not torch.cuda.is_available():
        if memory is None:
            raise UsageError("memory is not given, and PyTorch finds no GPU; give a size such as 24GiB, or a name.")
        return find_gpu(memory if isinstance(memory, str) else f"{memory / GIB:.4f}GiB")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    here = row_of(properties.name, properties.total_memory)
    if memory is None:
        free_bytes, _ = torch.cuda.mem_get_info()
        own_bytes = torch.cuda.memory_reserved() + here.context_bytes
        return replace(here, memory_bytes=min(free_bytes + own_bytes, properties.total_memory))
    nbytes = size_bytes(memory) if isinstance(memory, str) else memory
    return find_gpu(str(memory)) if nbytes is None else replace(here, memory_bytes=nbytes)


def _beside() -> Beside:
    """What a loop may use beside recomputation: with a GPU, the host memory that is free here."""
    known = torch.cuda.is_available() and find_spec("psutil") is not None  # accelerate installs it
    return Beside(host=True, host_bytes=host_free_bytes() if known else None, fusion=True, graphs=True)


def _precision(model: PreTrainedModel, precision: str | None) -> str:
    if precision is not None:
        if precision not in NUMBER_FORMATS:
            raise UsageError(f"precision is {precision!r}; choose one of {', '.join(NUMBER_FORMATS)}.")
        return precision
    if fp8_options(model) is not None:
        return "fp8"
    trained = next((p for p in model.parameters() if p.requires_grad), None)
    return "bf16" if trained is not None and trained.dtype == torch.bfloat16 else "amp-bf16"


def _fp8(model: PreTrainedModel) -> dict[str, Any]:
    """The recipe keys that describe `tigon.patch_fp8`; empty without it."""
    return {f"train.fp8_{name}": value for name, value in (fp8_options(model) or {}).items()}


def _optimizer(optimizer: str | Optimizer) -> str:
    name = optimizer
    if not isinstance(optimizer, str):
        kind = type(optimizer).__name__
        name = _OPTIMIZER_CLASSES.get(kind, kind)
        if name == "adamw" and not any(group.get("fused") for group in optimizer.param_groups):
            name = "adamw-foreach"
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer is {name!r}; choose one of {', '.join(OPTIMIZERS)}, or pass an AdamW or SGD.")
    return str(name)


def _kernels(model: PreTrainedModel) -> str:
    flags = flags_of(model) - {"fp8"}
    if not flags:
        return "none"
    return "tigon" if "linear_cross_entropy" in flags else "no-flce"


def _adapters(model: nn.Module) -> dict[str, Any]:
    """The recipe keys that describe PEFT's adapters; empty without adapters."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return {}
    if len(configs) > 1:
        raise UsageError(f"the model has the adapters {', '.join(configs)}; a plan describes one.")
    (config,) = configs.values()
    targets = getattr(config, "target_modules", None)
    if getattr(config, "r", None) is None or isinstance(targets, str) or not targets:
        raise UsageError("the model's adapters are not LoRA with a list of target_modules; a plan describes only that.")
    frozen = next((p for p in model.parameters() if not p.requires_grad), None)
    return {
        "lora.rank": config.r,
        "lora.targets": tuple(sorted(targets)),
        "lora.dropout": float(config.lora_dropout),
        "lora.dora": bool(config.use_dora),
        "lora.modules_to_save": tuple(config.modules_to_save or ()),
        "lora.quantize": bool(getattr(unwrap(model), "is_loaded_in_4bit", False)),
        "lora.base": "fp32" if frozen is not None and frozen.dtype == torch.float32 else "auto",
    }


_UNTIED = (
    "the config ties the head to the embeddings, and the head has a weight of its own, as after initialization without "
    "weights. The plan counts both. `model.tie_weights()` before `tigon.plan` saves the second."
)
_UNFUSED = (
    "PEFT computes {} layers with adapters that tigon could fuse, and keeps more activations for them. tigon.patch "
    "ran before PEFT added them, or with lora=False; call tigon.patch(model) again."
)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
