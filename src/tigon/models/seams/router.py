"""Routers of mixtures whose weights are a softmax over the experts, its k largest values, and perhaps their quotients.

A router returns the logits, the weights and the experts of each token. Families differ in whether the weights are
normalised, and in the dtype of weights and logits. Routers with sigmoids, groups or a correction of the scores are
other formulas, and keep their own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.verification import probe

_EXPERTS, _TOP_K, _TOKENS = 6, 2, 5


@dataclass(frozen=True)
class RouterSeam(Seam):
    """Computes the weights and the experts in one kernel after the product."""

    op: ClassVar[str] = "topk_softmax"
    flag: ClassVar[str] = "experts"

    normalised: bool = True
    fp32_weights: bool = False
    """The weights are fp32; otherwise they have the dtype of the hidden states."""
    fp32_logits: bool = False
    """The logits are cast to fp32 after the product."""

    def candidate(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        own = dict(module.named_parameters())
        if not isinstance(getattr(module, "top_k", None), int) or weight is None or weight.ndim != 2:
            return False
        return own.keys() <= {"weight", "bias"} and not any(True for _ in module.buffers())

    def objection(self, module: nn.Module) -> str | None:
        shapes: dict[str, tuple[int, ...]] = {"weight": (_EXPERTS, probe.WIDTH)}
        if getattr(module, "bias", None) is not None:
            shapes["bias"] = (_EXPERTS,)
        sizes = {
            "top_k": _TOP_K, "num_experts": _EXPERTS, "num_local_experts": _EXPERTS, "hidden_dim": probe.WIDTH,
            "hidden_size": probe.WIDTH,
        }  # fmt: skip
        make = partial(probe.make_stand_in, module, parameters=shapes, attributes=sizes)
        fused, forward = self.namespace(type(module))["forward"], type(module).forward
        return probe.disagreement(make, _inputs, fused, forward) or _dtype_objection(make, fused, forward)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Any = base.forward

        def forward(self_: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if is_dtensor(hidden_states) or is_dtensor(self_.weight):
                return plain_forward(self_, hidden_states)  # type: ignore[no-any-return]
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            logits = F.linear(rows, self_.weight, getattr(self_, "bias", None))
            dtype = torch.float32 if self.fp32_weights else logits.dtype
            if self.fp32_logits:
                logits = logits.float()
            weights, index = ops.topk_softmax(logits, self_.top_k, normalised=self.normalised, dtype=dtype)
            return logits, weights, index

        return {"forward": forward}


ROUTERS: tuple[Seam, ...] = (
    RouterSeam(),
    RouterSeam(normalised=False),
    RouterSeam(fp32_weights=True),
    RouterSeam(fp32_logits=True),
)
"""The routers of transformers' families: Qwen3-MoE and GPT-OSS, OLMoE and Qwen2-MoE, Mixtral, Granite-MoE."""


def _inputs() -> tuple[Tensor, ...]:
    return (probe.random(_TOKENS, probe.WIDTH, seed=1).requires_grad_(),)


def _dtype_objection(make: Any, fused: Any, forward: Any) -> str | None:
    """Why the results have other dtypes in bf16, or None."""
    with probe.undisturbed():
        rows = _inputs()[0].detach().bfloat16()
        got, want = ([t.dtype for t in each(make().bfloat16(), rows)] for each in (fused, forward))
    return None if got == want else f"in bf16 the op returns {got}, the module {want}"
