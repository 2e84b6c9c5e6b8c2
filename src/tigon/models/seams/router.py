"""Routers of mixtures: a softmax or sigmoids of the logits, the k best experts, and perhaps normalised weights.

A router returns the logits, the weights and the experts of each token. Families differ in whether the weights are
normalised, and in the dtype of weights and logits. Routers with sigmoids choose by scores with a correction, and some
among groups of experts (DeepSeek-V3, GLM, Kimi, MiniMax).

The model's load-balancing loss, if its config asks for one, is also an op. The loss's seam puts it into the forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.rebind import owner_of, rebind
from tigon.models.verification import probe

Call = Callable[..., Any]

_EXPERTS, _TOP_K, _TOKENS = 6, 2, 5


@dataclass(frozen=True)
class RouterSeam(Seam):
    """Computes the weights and the experts in one kernel after the product."""

    op: ClassVar[str] = "topk_softmax"
    flag: ClassVar[str] = "router"

    normalised: bool = True
    fp32_weights: bool = False
    """The weights are fp32; otherwise they have the dtype of the product."""
    fp32_logits: bool = False
    """The logits are cast to fp32 after the product, and the weights to the dtype of the hidden states."""
    index_first: bool = False
    """The forward returns the experts, the weights and the logits. Otherwise the logits are first, the experts last."""

    def candidate(self, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return isinstance(getattr(module, "top_k", None), int) and isinstance(weight, Tensor) and weight.ndim == 2

    def objection(self, module: nn.Module) -> str | None:
        others = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if others := sorted({*others} - {"weight", "bias"}):
            return f"its scores also depend on {', '.join(others)}"
        shapes: dict[str, tuple[int, ...]] = {"weight": (_EXPERTS, probe.WIDTH)}
        if getattr(module, "bias", None) is not None:
            shapes["bias"] = (_EXPERTS,)
        experts = dict.fromkeys(("num_experts", "num_local_experts"), _EXPERTS)
        sizes = experts | dict.fromkeys(("hidden_dim", "hidden_size"), probe.WIDTH) | {"top_k": _TOP_K}
        make = partial(probe.make_stand_in, module, parameters=shapes, attributes=sizes)
        fused, forward = self.namespace(type(module))["forward"], type(module).forward
        return probe.disagreement(make, _inputs, fused, forward) or _dtype_objection(make, fused, forward)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = base.forward

        def forward(self_: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if is_dtensor(hidden_states) or is_dtensor(self_.weight):
                return plain_forward(self_, hidden_states)
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            logits = F.linear(rows, self_.weight, getattr(self_, "bias", None))
            dtype = torch.float32 if self.fp32_weights else logits.dtype
            if self.fp32_logits:  # under autocast the product is bf16 and the hidden states may be fp32
                logits, dtype = logits.float(), hidden_states.dtype
            weights, index = ops.topk_softmax(logits, self_.top_k, normalised=self.normalised, dtype=dtype)
            return (index, weights, logits) if self.index_first else (logits, weights, index)

        return {"forward": forward}


_CORRECTION = "e_score_correction_bias"


@dataclass(frozen=True)
class SigmoidRouterSeam(Seam):
    """Computes the weights and the experts from sigmoids in one kernel after the product.

    The correction of the scores is the module's `e_score_correction_bias`, or the second argument of its forward. The
    groups, the normalisation and the factor are read from the module if it has them.
    """

    op: ClassVar[str] = "topk_sigmoid"
    flag: ClassVar[str] = "router"

    fp32_product: bool = True
    """Hidden states and weight are cast to fp32 before the product."""
    eps: float = 1e-20

    def candidate(self, module: nn.Module) -> bool:
        if not RouterSeam().candidate(module):
            return False
        parameters = list(inspect.signature(type(module).forward).parameters)[2:]
        return parameters == [_CORRECTION] or (not parameters and hasattr(module, _CORRECTION))

    def objection(self, module: nn.Module) -> str | None:
        sizes = dict.fromkeys(("num_experts", "num_local_experts"), 8) | {"hidden_dim": probe.WIDTH, "top_k": 3}
        correction = probe.random(8, seed=3) - 3  # negative scores show what takes the place of the other groups
        attributes = sizes | {"num_group": 4, "topk_group": 2, _CORRECTION: correction}
        make = partial(probe.make_stand_in, module, parameters={"weight": (8, probe.WIDTH)}, attributes=attributes)
        given = () if hasattr(module, _CORRECTION) else (correction,)
        fused = partial(_by_expert, self.namespace(type(module))["forward"], given)
        forward = partial(_by_expert, type(module).forward, given)
        return probe.disagreement(make, _inputs, fused, forward) or _dtype_objection(make, fused, forward)

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Callable[..., tuple[Tensor, Tensor, Tensor]] = base.forward

        def forward(
            self_: Any, hidden_states: Tensor, e_score_correction_bias: Tensor | None = None
        ) -> tuple[Tensor, Tensor, Tensor]:
            given = () if e_score_correction_bias is None else (e_score_correction_bias,)
            if is_dtensor(hidden_states) or is_dtensor(self_.weight):
                return plain_forward(self_, hidden_states, *given)
            rows, weight = hidden_states.reshape(-1, hidden_states.shape[-1]), self_.weight
            if self.fp32_product:
                rows, weight = rows.float(), weight.float()
            logits = F.linear(rows.to(weight.dtype), weight)
            groups = getattr(self_, "num_group", None) or 1
            weights, index = ops.topk_sigmoid(
                logits,
                given[0] if given else getattr(self_, _CORRECTION),
                self_.top_k,
                groups=groups,
                top_groups=self_.topk_group if groups > 1 else 1,
                normalised=getattr(self_, "norm_topk_prob", True),
                scale=getattr(self_, "routed_scaling_factor", getattr(self_, "router_scaling_factor", 1.0)),
                eps=self.eps,
            )
            return logits, weights.to(logits.dtype if self.fp32_product else torch.float32), index

        return {"forward": forward}


def _by_expert(forward: Call, given: tuple[Tensor, ...], module: nn.Module, rows: Tensor) -> tuple[Tensor, ...]:
    """The results of a router with the experts of each token in ascending order; their order has no meaning."""
    logits, weights, index = forward(module, rows, *given)
    order = index.argsort(-1)
    return logits, weights.gather(-1, order), index.gather(-1, order)


ROUTERS: tuple[Seam, ...] = (
    RouterSeam(),
    RouterSeam(normalised=False),
    RouterSeam(fp32_weights=True),
    RouterSeam(fp32_logits=True, index_first=True),
    RouterSeam(fp32_logits=True),
    SigmoidRouterSeam(),
    SigmoidRouterSeam(fp32_product=False, eps=0.0),
)
"""The routers of transformers' families: Qwen3-MoE and GPT-OSS, OLMoE and Qwen2-MoE, Mixtral, Granite-MoE of
transformers 5.17, Granite-MoE of 5.23, DeepSeek-V3, GLM and Kimi, and MiniMax."""


def _inputs() -> tuple[Tensor, ...]:
    return (probe.random(_TOKENS, probe.WIDTH, seed=1).requires_grad_(),)


def _dtype_objection(make: Call, fused: Call, forward: Call) -> str | None:
    """Why the results have other dtypes in bf16 or under autocast, or None."""

    def measure() -> str | None:
        for words, dtype in (("in bf16", torch.bfloat16), ("under autocast", torch.float32)):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
                rows = _inputs()[0].detach().to(dtype)
                got, want = ([t.dtype for t in each(make().to(dtype), rows)] for each in (fused, forward))
            if got != want:
                return f"{words} the op returns {got}, the module {want}"
        return None

    return probe.answered(measure)


# --- the loss that balances the experts ---

_LOSS = "load_balancing_loss_func"


@functools.cache
def with_balancing_loss(forward: FunctionType) -> Any:
    """The forward of a model, with tigon's load-balancing loss if its own function computes the same."""
    owner = owner_of(forward, _LOSS)
    if owner is None:
        return forward
    original = owner.__globals__[_LOSS]
    replacement = functools.partial(_balancing_loss, original)
    return rebind(forward, owner, {_LOSS: replacement}) if _computes_the_same(original, replacement) else forward


def _balancing_loss(
    original: Call,
    gate_logits: tuple[Tensor, ...] | None,
    num_experts: int | None = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
) -> Any:
    """The arguments are those of transformers' function."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return original(gate_logits, num_experts, top_k, attention_mask)
    if any(is_dtensor(one) or one.shape != gate_logits[0].shape for one in gate_logits):
        return original(gate_logits, num_experts, top_k, attention_mask)
    device, (rows, experts) = gate_logits[0].device, gate_logits[0].shape
    if experts != num_experts or (attention_mask is not None and attention_mask.numel() != rows):
        return original(gate_logits, num_experts, top_k, attention_mask)
    mask = None if attention_mask is None else attention_mask.to(device)
    return ops.load_balancing_loss([one.to(device) for one in gate_logits], top_k, mask=mask)


def _computes_the_same(original: Call, replacement: Call) -> bool:
    """Whether both functions give one loss and one gradient, with and without a mask."""

    def measured(function: Call, mask: Tensor | None) -> list[Tensor]:
        layers = tuple(probe.random(_TOKENS, _EXPERTS, seed=seed).requires_grad_() for seed in (1, 2))
        loss = function(layers, _EXPERTS, _TOP_K, mask)
        return [loss.detach(), *torch.autograd.grad(loss, layers)]

    try:
        with probe.undisturbed():
            for mask in (None, torch.tensor([[1, 1, 0, 1, 0]])):
                pairs = zip(measured(original, mask), measured(replacement, mask), strict=True)
                if not all(torch.allclose(a, b, rtol=probe.TOLERANCE, atol=1e-6) for a, b in pairs):
                    return False
    except Exception:  # the model's own function may raise anything; it then stays
        return False
    return True
