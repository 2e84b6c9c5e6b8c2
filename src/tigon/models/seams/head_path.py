"""What a causal language model does between its trunk's last hidden state and its logits: watched, not looked up.

Whoever computes logits in a model's place (the heads of `tigon.medusa`) has to do the same. The config does not say it:
`logits_scaling` divides logits in Granite, multiplies them in HyperCLOVA X, and divides the hidden state in MiniCPM. So
the model's own forward runs on two tokens, with a trunk that hands out numbers of our own, and a head that looks at
what it is given and returns an object that notes down what is done to it, as under torch.compile (`traced`). No weight
is read: they may be on the meta device, or on other ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.models.seams.logits import LogitMap
from tigon.models.seams.traced_logits import TracedLogits
from tigon.models.verification import probe

# H hidden.


class _NotFollowed(Exception):
    """The reason why a forward has no `LogitMap`."""


def observed_logit_map(model: Any) -> LogitMap | str:
    """The map from trunk's last hidden state times head's weight to the logits, or why there is none.

    model: a transformers causal language model, whose output embeddings are a linear module without a bias.
    """
    try:
        with probe.undisturbed():
            return _observe(model)
    except _NotFollowed as reason:
        return str(reason)
    except Exception as error:  # whatever somebody else's forward raises on the stand-ins is the answer
        return f"its way from trunk to logits cannot be followed ({type(error).__name__}: {probe.first_line(error)})"


def _observe(model: Any) -> LogitMap:
    head, trunk = model.get_output_embeddings(), model.base_model
    # Whole numbers, which every dtype holds: the forward may cast them to the weight's.
    hidden_1TH = torch.arange(2 * head.in_features).remainder(13).sub(6).float().view(1, 2, -1)
    scales: list[float] = []

    def answer(*_: Any, **__: Any) -> Any:
        return _answer_type()(last_hidden_state=hidden_1TH)

    def look(given: Tensor) -> Any:
        scales.append(_ratio(given, hidden_1TH))
        return TracedLogits(hidden_1TH.new_zeros(()), _no_logits, head, given)

    # Some trunks only hold the decoder, which the forward then calls by itself (Bart, OPT).
    trunks = {id(trunk): answer, id(model.get_decoder()): answer}
    double = _with_forwards(model, {**trunks, id(head): look})
    outputs = type(model).forward(double, input_ids=torch.zeros((1, 2), dtype=torch.long))
    logits = outputs[0] if isinstance(outputs, tuple) else outputs.logits
    found = logits.logit_map() if isinstance(logits, TracedLogits) else None
    if found is None or len(scales) != 1:
        raise _NotFollowed("what it does to its logits is not a product with a number, or a tanh cap")
    return LogitMap(found.scale * scales[0], found.softcap)


def _ratio(given: Tensor, hidden: Tensor) -> float:
    """c where given is c · hidden."""
    if given.shape == hidden.shape:
        scale = float((given.double() * hidden.double()).sum() / hidden.double().square().sum())
        if math.isfinite(scale) and torch.allclose(given.double(), scale * hidden.double(), rtol=1e-5, atol=0.0):
            return scale
    raise _NotFollowed("its output head is not given its trunk's last hidden state")


def _no_logits(*_: Any) -> Tensor:
    raise _NotFollowed("it does to its logits what is no product with a number and no tanh cap")


def _answer_type() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Answer(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            """Nothing of what families hand on beside: caches, the logits of routers."""
            if name.startswith("__"):
                raise AttributeError(name)

    return Answer


def _with_forwards(module: nn.Module, forwards: dict[int, Callable[..., Any]]) -> nn.Module:
    """A shallow copy of the modules from `module` down to those with these ids, which get these forwards, and no
    hooks."""
    double: nn.Module = object.__new__(type(module))
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    vars(double).update(state | {name: type(value)() for name, value in state.items() if name.endswith("_hooks")})
    if id(module) in forwards:
        vars(double)["forward"] = forwards[id(module)]
    for name, child in module._modules.items():
        if child is not None and any(id(m) in forwards for m in child.modules()):
            double._modules[name] = _with_forwards(child, forwards)
    return double
