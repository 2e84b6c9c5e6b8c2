"""Eager attention with a sink per head, as in GPT-OSS, as an op without the scores of all pairs of tokens.

transformers has no scaled-dot-product attention for such models. Their forward calls `eager_attention_forward` of the
modeling module, so it is rebuilt with the op under this name (`rebind.py`). A call keeps the module's function if it
has a cache of keys, values of another width, dropout, or asks for the weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tigon import ops
from tigon.models.seams.base import Seam, is_dtensor
from tigon.models.seams.rebind import owner_of, rebind
from tigon.models.verification import probe
from tigon.ops.lm_head import may_wait
from tigon.ops.sink_attention import MASKED, causal_mask

_FUNCTION = "eager_attention_forward"
_HEADS, _KEY_HEADS, _TOKENS, _SCALE = 4, 2, 6, 0.3


@dataclass(frozen=True)
class SinkAttentionSeam(Seam):
    """Calls the op instead of the eager attention of the modeling module."""

    op: ClassVar[str] = "sink_attention"
    flag: ClassVar[str] = "sink_attention"

    def candidate(self, module: nn.Module) -> bool:
        sinks = getattr(module, "sinks", None)
        return isinstance(sinks, Tensor) and sinks.ndim == 1 and owner_of(type(module).forward, _FUNCTION) is not None

    def objection(self, module: nn.Module) -> str | None:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation != "eager":
            return f"its attention is {implementation}, and the op replaces eager attention"
        return _disagreement(_eager(type(module).forward))

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        forward: Any = base.forward
        owner = owner_of(forward, _FUNCTION)
        assert owner is not None  # `candidate` has seen it
        attend = functools.partial(_attend, owner.__globals__[_FUNCTION])
        return {"forward": rebind(forward, owner, {_FUNCTION: attend})}


def _eager(forward: Any) -> Any:
    owner = owner_of(forward, _FUNCTION)
    return None if owner is None else owner.__globals__[_FUNCTION]


def _attend(
    original: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **more: Any,
) -> Any:  # fmt: skip
    """The arguments are those of transformers' function."""
    tensors = (query, key, value, module.sinks)
    served = attention_mask is not None and attention_mask.is_floating_point()
    served = served and key.shape == value.shape == (query.shape[0], key.shape[1], *query.shape[2:])
    if not served or dropout or more.get("output_attentions") or any(map(is_dtensor, tensors)):
        return original(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more)
    assert attention_mask is not None
    window = more.get("sliding_window") or 0
    mask = None if is_causal(attention_mask, window) else attention_mask
    return ops.sink_attention(query, key, value, module.sinks, scale=scaling, mask=mask, window=window), None


_causal: Any = WeakTensorKeyDictionary()
"""Mask -> (its version, window, whether it is causal). The layers of a model share their masks."""


def is_causal(mask: Tensor, window: int) -> bool:
    """Whether the mask hides later tokens, and those outside of the window if there is one, and nothing else.

    The host waits for the GPU once per mask.
    """
    if not may_wait(mask):
        return False
    known = _causal.get(mask)
    if known is None or known[:2] != (mask._version, window):
        seen = causal_mask(mask.shape[-1], window, mask.device)
        expected = torch.zeros(seen.shape, dtype=mask.dtype, device=mask.device).masked_fill_(~seen, MASKED)
        same = torch.equal(mask.clamp(min=MASKED), expected.expand_as(mask))
        _causal[mask] = known = (mask._version, window, same)
    return bool(known[2])


@functools.cache
def _disagreement(original: Any) -> str | None:
    """How the op's results differ from the eager function's, with and without a mask of its own; None if equal."""

    def measured(function: Any, mask: Tensor, window: int) -> dict[str, Tensor]:
        shapes = [(2, heads, _TOKENS, probe.WIDTH) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)]
        inputs = [probe.random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([*shapes, (_HEADS,)])]
        module = SimpleNamespace(
            sinks=inputs[3], num_key_value_groups=_HEADS // _KEY_HEADS, training=True, head_dim=probe.WIDTH,
            sliding_window=window,
        )  # fmt: skip
        out = function(module, *inputs[:3], mask, scaling=_SCALE, dropout=0.0, sliding_window=window)[0]
        grads = torch.autograd.grad((out * probe.random(*out.shape, seed=5)).sum(), inputs)
        return {"output": out.detach(), **{f"gradient {i}": grad for i, grad in enumerate(grads)}}

    def measure() -> str | None:
        for window in (0, 2):
            seen = causal_mask(_TOKENS, window, torch.device("cpu")).expand(2, 1, -1, -1).clone()
            for padded in (False, True):
                seen[1, :, :, 0] &= not padded
                mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
                got, want = (measured(f, mask, window) for f in (functools.partial(_attend, original), original))
                if found := probe.difference(got, want):
                    return found
        return None

    return probe.answered(measure)
