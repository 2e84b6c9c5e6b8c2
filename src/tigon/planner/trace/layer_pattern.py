"""Which of a model's layers are equal, so that a trace of a few layers can stand for all.

Layers differ in two ways. A config may hold a value per layer, such as `layer_types`. The model's code may also give
layers other modules: the first layers of many mixtures of experts are dense (`first_k_dense_replace`,
`mlp_only_layers`). The modules and shapes of the model without data show the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from tigon._trunk import decoder_layers
from tigon.planner.request import build, text_config
from tigon.planner.trace.tape import unrollable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Pattern:
    """Layers that repeat every `period` layers after the first `start` layers, except the last `end` layers."""

    start: int
    period: int
    end: int = 1

    def depth(self, layers: int) -> int:
        """How many layers of a model of `layers` layers to trace, at most all."""
        alone = self.start + self.end - 1
        return min(layers, alone + unrollable(layers - alone, self.period))

    def between(self, count: int) -> Pattern:
        """The pattern if the first and the last `count` layers differ from the others."""
        return Pattern(max(self.start, count), self.period, max(self.end, count))


def layer_pattern(name: str, config: PreTrainedConfig, *, every: int = 1) -> Pattern:
    """The pattern that needs the fewest traced layers. every: a period that the run adds, of checkpointing.

    Raises UsageError if the model cannot be built.
    """
    layers = int(text_config(config).num_hidden_layers)
    structures = _structures(name, config)
    if len(structures) != layers:  # it is not known which modules are the layers
        return Pattern(0, layers)
    kinds = list(zip(*per_layer_lists(text_config(config)).values(), structures, strict=True))
    best = Pattern(0, math.lcm(_period(kinds), every))
    for start in range(1, layers):
        if start + 3 >= best.depth(layers):
            break
        pattern = Pattern(start, math.lcm(_period(kinds[start:]), every))
        best = min(best, pattern, key=lambda one: one.depth(layers))
    return best


def per_layer_lists(config: PreTrainedConfig) -> dict[str, list[Any]]:
    """The entries of a config that hold one value for each layer, such as `layer_types`."""
    layers = config.num_hidden_layers
    return {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == layers and layers > 1
    }


def _period(kinds: list[Any]) -> int:
    """The number of layers after which the kinds of layers repeat."""
    return next(
        period
        for period in range(1, len(kinds) + 1)
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds)))
    )


_MAX_BUILT = 64
_built: dict[tuple[str, str], tuple[Any, ...]] = {}


def _structures(name: str, config: PreTrainedConfig) -> tuple[Any, ...]:
    """The modules and shapes of each layer."""
    key = (name, config.to_json_string(use_diff=False))
    if key not in _built:
        while len(_built) >= _MAX_BUILT:
            del _built[next(iter(_built))]
        _built[key] = tuple(map(_structure, decoder_layers(build(name, config))))
    return _built[key]


def _structure(layer: nn.Module) -> Any:
    return tuple(
        (name, type(module), tuple((key, weight.shape) for key, weight in module.named_parameters(recurse=False)))
        for name, module in layer.named_modules()
    )
