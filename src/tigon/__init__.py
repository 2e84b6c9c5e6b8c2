"""tigon: fused training kernels, a reversible patcher and a trainer for Hugging Face language models.

Importing this package imports neither transformers nor triton; each comes with the first call that needs it.
"""

from __future__ import annotations

import typing as _typing

from tigon import errors, losses, nn
from tigon.models import AutoModelForCausalLM, PatchReport, patch, patch_fp8
from tigon.ops import (
    ExpertUnit,
    LoraLayer,
    PrefixGroup,
    PrefixRow,
    VocabParallelOptions,
    add_rms_norm,
    attention_with_sinks,
    causal_conv1d,
    cross_entropy,
    experts,
    fp8_linear,
    gated_delta_rule,
    gated_rms_norm,
    geglu,
    layer_norm,
    linear_cross_entropy,
    linear_kl,
    linear_logprobs,
    load_balancing_loss,
    logprobs,
    lora_linear,
    lora_linears,
    multi_head_linear_cross_entropy,
    prepare_targets,
    rms_norm,
    rope,
    shared_prefix_attention,
    swiglu,
    topk_sigmoid,
    topk_softmax,
)

if _typing.TYPE_CHECKING:
    from tigon.planner.model_checkpoint import Checkpointed
    from tigon.planner.model_plan import CheckpointPlan

__version__ = "0.1.0"

__all__ = [
    "AutoModelForCausalLM",
    "ExpertUnit",
    "LoraLayer",
    "PatchReport",
    "PrefixGroup",
    "PrefixRow",
    "VocabParallelOptions",
    "__version__",
    "add_rms_norm",
    "attention_with_sinks",
    "causal_conv1d",
    "checkpoint",
    "cross_entropy",
    "errors",
    "experts",
    "fp8_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "load_balancing_loss",
    "logprobs",
    "lora_linear",
    "lora_linears",
    "losses",
    "multi_head_linear_cross_entropy",
    "nn",
    "patch",
    "patch_fp8",
    "plan",
    "prepare_targets",
    "rms_norm",
    "rope",
    "shared_prefix_attention",
    "swiglu",
    "topk_sigmoid",
    "topk_softmax",
]


def plan(
    model: _typing.Any,
    *,
    batch: int,
    seq: int,
    optimizer: _typing.Any = "adamw",
    memory: str | int | None = None,
    precision: str | None = None,
    accumulate: int | None = None,
    cuda_graphs: bool | None = None,
) -> CheckpointPlan:
    """Choose what each layer of a model recomputes in the backward pass, and the micro-batch, before any step runs.

    The choice is the fastest whose predicted memory fits. It may keep tensors in host memory, let micro-batches add to
    the gradients in their products, and launch layers as CUDA graphs. Without a GPU it is made for the one that
    `memory` names.

    Args:
        model: a transformers model, or PEFT's LoRA around one; patched or not. Other frozen weights count as trained.
        batch: samples per optimizer step.
        seq: tokens per sample.
        optimizer: a name such as "adamw", "adamw-8bit" or "sgd", or an optimizer of torch.optim or bitsandbytes.
        memory: GPU memory as a size ("24GiB") or in bytes, or the name of a GPU ("h200"). None: what this GPU has free.
        precision: "amp-bf16", "amp-fp16", "bf16" or "fp32". None: "bf16" if the weights are bf16, else "amp-bf16".
        accumulate: micro-batches per optimizer step. None: the plan chooses.
        cuda_graphs: launch each layer as CUDA graphs. Either all layers are then recomputed or none. The first step
            captures them for its shape; batches of other shapes run without. None: the plan chooses, which needs
            batches of one shape to pay. False: never.

    Returns:
        A `CheckpointPlan`: `print` it. Use its `batch` and `accumulate`, and pass it to `tigon.checkpoint`.

    Raises:
        UsageError: a value is out of range or unknown, there is no GPU and no `memory`, or the model is not one of
            transformers or cannot be traced.
    """
    from tigon.planner import model_plan  # loads transformers

    return model_plan.plan(
        model,
        batch=batch,
        seq=seq,
        optimizer=optimizer,
        memory=memory,
        precision=precision,
        accumulate=accumulate,
        cuda_graphs=cuda_graphs,
    )


def checkpoint(model: _typing.Any, plan: CheckpointPlan | str) -> Checkpointed:
    """Let each layer of a model recompute what a plan says, in place. Loss and gradients do not change.

    The Trainer and TRL's trainers keep it, whatever their `gradient_checkpointing` says.

    Args:
        model: the transformers model, or a PEFT wrapper of one. Call this before FSDP or DeepSpeed wrap it.
        plan: the result of `tigon.plan`, or a value of `train.checkpointing` except "auto":
            "full": every layer is recomputed; "every-2": one layer in two; "none": nothing;
            "selective": everything except matrix products and attention;
            "offload": every layer, and the layers' inputs wait in pinned host memory;
            "offload-attention": the results of attention (sdpa) wait there too, which pays with long samples;
            "full:7,none:9": the state of each layer.

    Returns:
        An object whose `undo()` restores the model; in a `with` statement the end of the block does.

    Raises:
        UsageError: the plan is for another number of layers, its layers cannot be recomputed, or activation
            checkpointing is on already.
    """
    from tigon.planner import model_checkpoint  # loads transformers

    return model_checkpoint.checkpoint(model, plan)
