"""The study's formulas, beside the trace: three terms, for full fine-tuning with fp32 states and checkpointing.

states       16 bytes a parameter: weight, gradient and two moments in fp32
    checkpoints  batch x seq x hidden x 2 x layers
    logits       batch x seq x vocab x 4 x 3: logits, probabilities and their gradient in fp32
"""

from __future__ import annotations

from tigon.planner.request import Request, text_config
from tigon.planner.simulate.statics import Statics

BYTES_PER_PARAMETER = 16


def components(request: Request, model: Statics) -> dict[str, int]:
    """Bytes by component; a fused loss has no logits."""
    config = text_config(request.config)
    tokens = request.batch * request.seq
    states = BYTES_PER_PARAMETER * model.numel
    fused = request.choices.kernels in ("tigon", "liger")
    return {
        "weights": states // 4,
        "gradients": states // 4,
        "optimizer": states // 2,
        "checkpoints": tokens * config.hidden_size * 2 * config.num_hidden_layers,
        "activations": 0,
        "logits": 0 if fused else tokens * model.head_shape[0] * 4 * 3,
        "workspace": 0,
    }


def step_flops(request: Request, model: Statics) -> float:
    """Of an optimizer step, for want of a trace: 6 a parameter and token, 8 where layers are recomputed."""
    tokens = request.batch * request.seq * request.choices.accumulate
    return (6.0 if request.choices.checkpointing == "none" else 8.0) * model.numel * tokens


def differences(request: Request, ours: dict[str, int], theirs: dict[str, int]) -> tuple[str, ...]:
    """What the formulas leave out of, or put into, this configuration: GiB of the trace against theirs."""
    gib = 2**30
    choices = request.choices
    why = {
        "weights": f"{choices.precision} holds weights in {2 if choices.precision == 'bf16' else 4} bytes",
        "gradients": "gradients have the weights' dtype, and are gone or not yet there at some peaks",
        "optimizer": f"{choices.optimizer} has its own size of state",
        "checkpoints": f"checkpointing is {choices.checkpointing}; under autocast the layers' inputs are fp32",
        "activations": "one layer's activations are recomputed at a time, and without checkpointing all are kept",
        "logits": "the copy in 16 bits is missing, and a fused loss has a chunk of logits and its sums of dW",
        "workspace": "temporaries of the backward and cuBLAS are missing",
    }
    return tuple(
        f"{name}: {theirs[name] / gib:.2f} GiB by the study's formula, {ours[name] / gib:.2f} traced; {why[name]}."
        for name in theirs
        if abs(theirs[name] - ours[name]) > gib / 100
    )
