"""Tests the ops of a run on small inputs on its GPU before the run relies on them.

A new version of a compiler, a driver or a GPU can make a kernel wrong without an error. An op that fails is left out of
the patch, so that the model keeps its own code for it, and the run prints and records a warning. On the CPU nothing is
tested, because the ops run PyTorch's own operations there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tigon.errors import KernelError
from tigon.models.spec import CONVOLUTION_FLAG, SINKS_FLAG
from tigon.ops import OPS, dispatch
from tigon.ops.self_test import check_op
from tigon.recipe.keys import Recipe
from tigon.techniques.keys.settings import Settings

# The flag of `tigon.patch` for each op that a patch uses.
FLAGS: Mapping[str, str] = {
    **{name: name for name in ("rms_norm", "layer_norm", "rope", "cross_entropy", "linear_cross_entropy")},
    "gated_rms_norm": "rms_norm",
    "causal_conv1d": CONVOLUTION_FLAG,
    "gated_delta_rule": CONVOLUTION_FLAG,
    "swiglu": "mlp",
    "geglu": "mlp",
    "attention_with_sinks": SINKS_FLAG,
}
DTYPES = {"fp32": "fp32", "amp-bf16": "bf16", "bf16": "bf16", "fp8": "bf16", "amp-fp16": "fp16"}


def wrong_ops(recipe: Recipe, settings: Settings, device: torch.device) -> dict[str, str]:
    """Test the ops that this run uses. Returns the reason for each op that fails.

    Raises:
        KernelError: An op fails and the recipe sets `model.self_test: strict`.
    """
    patched = settings.model.patched
    if recipe.model.self_test == "off" or not patched or not dispatch.uses_kernel(torch.empty(1, device=device)):
        return {}
    failures = {}
    for name in OPS:
        used = name in FLAGS and (FLAGS[name] != SINKS_FLAG or settings.model.attention_sinks)
        if used and not (check := check_op(name, DTYPES[settings.train.precision])).passed:
            failures[name] = check.error or f"{check.worst} is off by {check.share:.3g} times what rounding allows"
    if failures and recipe.model.self_test == "strict":
        reasons = "; ".join(f"{name}: {why}" for name, why in failures.items())
        raise KernelError(
            f"kernels that give wrong results on this device: {reasons}. Run `tigon doctor`, or set model.self_test: "
            "fallback, with which the model keeps its own code for them"
        )
    return failures


def without(wrong: Mapping[str, str]) -> dict[str, bool]:
    """The flags of `tigon.patch` that leave the ops in `wrong` out."""
    return {FLAGS[name]: False for name in wrong}
