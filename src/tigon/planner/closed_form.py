"""The Liger study's formulas (docs/study.md), for comparison with the trace.

They hold for full fine-tuning with fp32 states and checkpointing:

states       16 bytes per parameter: weight, gradient and two moments in fp32
    checkpoints  batch x seq x hidden x 2 x layers
    logits       batch x seq x vocab x 4 x 3: logits, probabilities and their gradient in fp32
"""

from __future__ import annotations

from tigon.planner.request import Request, text_config
from tigon.planner.simulate.model_states import ModelWeights
from tigon.techniques.precision import BF16_WEIGHTS

BYTES_PER_PARAMETER = 16


def components(request: Request, model: ModelWeights) -> dict[str, int]:
    """Returns bytes by component; logits are 0 with a fused loss."""
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
        "logits": 0 if fused else tokens * model.lm_head_shape[0] * 4 * 3,
        "workspace": 0,
    }


def step_flops(request: Request, model: ModelWeights) -> float:
    """FLOPs of an optimizer step without a trace: 6 per parameter and token, 8 if layers are recomputed."""
    tokens = request.batch * request.seq * request.choices.accumulate
    return (6.0 if request.choices.checkpointing == "none" else 8.0) * model.numel * tokens


def differences(request: Request, ours: dict[str, int], theirs: dict[str, int]) -> tuple[str, ...]:
    """One sentence per component whose formula and trace differ by over 0.01 GiB: both sizes in GiB, and the reason."""
    gib = 2**30
    choices = request.choices
    why = {
        "weights": f"{choices.precision} holds weights in {2 if choices.precision in BF16_WEIGHTS else 4} bytes",
        "gradients": "gradients have the weights' dtype, and at some peaks not all of them exist",
        "optimizer": f"{choices.optimizer} has another state size than AdamW",
        "checkpoints": f"checkpointing is {choices.checkpointing}; under autocast the layers' inputs are fp32",
        "activations": "the trace keeps one layer's activations with checkpointing and every layer's without",
        "logits": "the formula omits the 16-bit copy, and a fused loss holds a chunk of logits and the sums of dW",
        "workspace": "the formula omits temporaries of the backward pass and cuBLAS",
    }
    return tuple(
        f"{name}: {theirs[name] / gib:.2f} GiB by the study's formula, {ours[name] / gib:.2f} traced; {why[name]}."
        for name in theirs
        if abs(theirs[name] - ours[name]) > gib / 100
    )
