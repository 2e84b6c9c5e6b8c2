"""Explains the terms of each number of an estimate; `tigon plan --explain`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.render.terminal import gib, seconds
from tigon.planner.request import Request, text_config
from tigon.planner.search import space
from tigon.planner.search.recommend import Plan
from tigon.planner.simulate.model_states import ModelWeights, model_weights, state_tensor_bytes
from tigon.planner.simulate.roofline import COPY_SHARE, MATMUL_EFFICIENCY
from tigon.planner.simulated_run import is_expandable
from tigon.techniques.precision import number_format

_WIDTH = 100


def wrapped_text(plan: Plan) -> str:
    """The explanation as wrapped text, one paragraph per number."""
    return "\n" + "\n".join(
        textwrap.fill(paragraph, _WIDTH, initial_indent="", subsequent_indent="    ", break_on_hyphens=False)
        for paragraph in paragraphs(plan)
    )


def paragraphs(plan: Plan) -> list[str]:
    """The explanation as a list, one unwrapped paragraph per number."""
    return list(_paragraphs(plan))


def _paragraphs(plan: Plan) -> Iterator[str]:
    request, result, gpu = plan.option.request, plan.option.estimate, plan.gpu
    model, config = model_weights(request), text_config(request.config)
    parts = result.components
    yield f"The parts of the memory peak, which is in the {result.peak_phase} phase."
    yield f"weights      {gib(parts['weights'])}: {_weights(request, model)}"
    for frozen_request in request.frozen():
        frozen = model_weights(frozen_request)
        yield (
            f"frozen       {gib(frozen.weight_bytes)} of these weights are {frozen_request.model}'s, which is not "
            "trained."
        )
    trained = sum(weight.grad_bytes for weight in model.trained)
    yield (
        f"gradients    {gib(parts['gradients'])}: {gib(trained)} at the end of the backward pass, each in its weight's "
        "dtype. They are set to None after the step, so they count only if the peak comes late."
    )
    optimizer = request.settings.train.optimizer
    numel = sum(weight.numel for weight in model.trained)
    states = sum(state_tensor_bytes(request, model.weights))
    yield (
        f"optimizer    {gib(parts['optimizer'])}: {optimizer}'s states, {states / max(numel, 1):.2f} bytes for each of "
        f"{numel:,} trained parameters ({gib(states)} in all before sharding and offload), allocated in the first step."
    )
    tokens = request.tokens
    sequences, length = request.objective.sequences(request.batch), request.objective.sequence_tokens(request.seq)
    yield (
        f"checkpoints  {gib(parts['checkpoints'])}: activation checkpoints, the inputs of layers that are "
        f"recomputed. Formula: batch x seq x hidden x bytes x layers = {sequences} x {length} x "
        f"{config.hidden_size} x 2 or 4 x {config.num_hidden_layers}. Bytes are 4 under autocast, which keeps "
        "fp32 between layers."
    )
    layers, per_token = config.num_hidden_layers, parts["activations"] / tokens
    yield (
        f"activations  {gib(parts['activations'])}: tensors that the layers keep for the backward pass (traced): "
        f"{per_token / 1024:,.1f} KiB per token in all {layers} layers. With checkpointing, only one layer's "
        "tensors are held at a time."
    )
    vocab = model.lm_head_shape[0]
    logits_note = "The fused loss holds one chunk of them and the sum of lm_head's gradient."
    if not request.objective.next_token:
        logits_note = (
            "No pass holds them: log-probabilities and divergences are computed in blocks, and a score needs none."
        )
    yield (
        f"logits       {gib(parts['logits'])}: the loss and its logits. Whole logits of {tokens:,} tokens x {vocab:,} "
        f"would be {gib(2 * tokens * vocab)} in 16 bits and {gib(4 * tokens * vocab)} per fp32 copy. {logits_note}"
    )
    yield f"workspace    {gib(parts['workspace'])}: temporaries of the backward pass, and cuBLAS's two workspaces."
    excess = "cached blocks that could not be reused."
    if is_expandable(request, gpu):
        excess = (
            "pages that are partly in use. With expandable segments, which the run has, PyTorch returns the others."
        )
    yield (
        f"reserved     {gib(result.peak_reserved_bytes)}: memory that PyTorch's caching allocator takes from the "
        f"device for these allocations in this order. The excess over allocated is {excess}"
    )
    if request.evaluated:
        yield (
            f"evaluation   {gib(result.phases['eval'])}: the peak of an evaluation batch. The fused loss evaluates "
            "without logits; kernels none, no-flce and liger evaluate with all logits of the batch. It counts in the "
            "peak because a recipe evaluates unless it sets data.eval_fraction to 0."
        )
    non_allocator = non_allocator_bytes(gpu, request.settings)
    yield (
        f"device       {gib(result.device_bytes)} = reserved + {gib(non_allocator)} outside the allocator (CUDA's "
        f"context, kernels, NCCL). It fits if this is at most {gib(gpu.memory_bytes)}. Recommended recipes must fit in "
        f"{space.HEADROOM:.0%} less memory."
    )
    yield (
        f"step         {seconds(result.step_s)}: matmuls at {MATMUL_EFFICIENCY:.0%} of {gpu.matmul_flops / 1e12:.0f} "
        f"TFLOP/s and other bytes at {COPY_SHARE:.0%} of {gpu.copy_bytes_s / 1e9:.0f} GB/s, or "
        f"{gpu.host_s * 1e6:.0f} µs of host time per operator if that is longer. Clipping and the update are added. "
        f"Rates: {gpu.source}."
    )


def _weights(request: Request, model: ModelWeights) -> str:
    sizes = sorted({weight.itemsize for weight in model.weights if weight.stored_as is None})
    bytes_each = " or ".join(str(size) for size in sizes)
    text = f"{model.numel:,} parameters (tied ones counted once), {bytes_each} bytes each"
    if any(weight.stored_as == "mxfp4" for weight in model.weights):
        text += "; those of experts are in MXFP4: half a byte each, plus scales"
    elif any(weight.stored_as for weight in model.weights):
        text += "; those of linear layers are in NF4: half a byte each, plus scales"
    if number_format(request.settings).autocast is not None:
        text += "; autocast's 16-bit copies count as activations"
    return text + "."
