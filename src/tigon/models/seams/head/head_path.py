"""Observes the scaling and capping that a causal language model applies between its last hidden state and its logits.

Code that computes logits instead of the model (the heads of `tigon.medusa`) must apply the same map. The config does
not define it: `logits_scaling` divides the logits in Granite, multiplies them in HyperCLOVA X, and divides the hidden
state in MiniCPM. The model's own forward is therefore run on two tokens. The trunk is replaced by known numbers, and
the head by one that checks its input and returns an object that records the operations on it (`traced_logits.py`). No
weight is read, so weights may be on the meta device or on other ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon._trunk import trunk_of
from tigon.models.seams.head.logits import LogitMap
from tigon.models.seams.head.traced_logits import TracedLogits
from tigon.models.verification import probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# H hidden.


class _NotFollowed(Exception):
    """The reason why a forward cannot be described by a `LogitMap`."""


def observed_logit_map(model: PreTrainedModel) -> LogitMap | str:
    """The map from (last hidden state times head weight) to the logits, or the reason why it cannot be found.

    model: a transformers causal language model, whose output embeddings are a linear module without a bias.
    """
    try:
        with probe.undisturbed():
            return _observe(model)
    except _NotFollowed as reason:
        return str(reason)
    except Exception as error:  # a model's forward may raise anything on the stand-ins; report it
        return f"its path from trunk to logits cannot be followed ({type(error).__name__}: {probe.first_line(error)})"


def _observe(model: PreTrainedModel) -> LogitMap:
    head, trunk = model.get_output_embeddings(), trunk_of(model)
    # Small integers, which every dtype represents exactly, because the forward may cast them to the weight's dtype.
    hidden_1TH = torch.arange(2 * head.in_features).remainder(13).sub(6).float().view(1, 2, -1)
    scales: list[float] = []

    def answer(*_: object, **__: object) -> Any:
        return _answer_type()(last_hidden_state=hidden_1TH)

    def look(given: Tensor) -> Any:
        scales.append(_ratio(given, hidden_1TH))
        return TracedLogits(hidden_1TH.new_zeros(()), _no_logits, head, given)

    # Some trunks only contain the decoder, and the forward calls the decoder directly (Bart, OPT).
    trunks = {id(module): answer for module in (trunk, model.get_decoder()) if module is not model}
    double = _with_forwards(model, {**trunks, id(head): look})
    outputs = type(model).forward(double, input_ids=torch.zeros((1, 2), dtype=torch.long))
    logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    logit_map = logits.logit_map() if isinstance(logits, TracedLogits) else None
    if logit_map is None or len(scales) != 1:
        raise _NotFollowed("the operations on its logits are not products with numbers and a tanh cap")
    return LogitMap(logit_map.scale * scales[0], logit_map.softcap)


def _ratio(given: Tensor, hidden: Tensor) -> float:
    """The number c for which given = c · hidden."""
    if given.shape == hidden.shape:
        scale = float((given.double() * hidden.double()).sum() / hidden.double().square().sum())
        if math.isfinite(scale) and torch.allclose(given.double(), scale * hidden.double(), rtol=1e-5, atol=0.0):
            return scale
    raise _NotFollowed("its output head is not given its trunk's last hidden state")


def _no_logits(*_: object) -> Tensor:
    raise _NotFollowed("an operation on its logits is neither a product with a number nor a tanh cap")


def _answer_type() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Answer(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            """Return None for everything else that families pass on: caches, router logits."""
            if name.startswith("__"):
                raise AttributeError(name)

    return Answer


def _with_forwards(module: nn.Module, forwards: dict[int, Callable[..., Any]]) -> nn.Module:
    """A shallow copy, without hooks, of the modules from `module` down to those with these ids, which get these
    forwards."""
    double: nn.Module = object.__new__(type(module))
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    vars(double).update(state | {name: type(value)() for name, value in state.items() if name.endswith("_hooks")})
    if id(module) in forwards:
        vars(double)["forward"] = forwards[id(module)]
    for name, child in module._modules.items():
        if child is not None and any(id(m) in forwards for m in child.modules()):
            double._modules[name] = _with_forwards(child, forwards)
    return double
