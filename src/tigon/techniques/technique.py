"""What a technique's file declares: techniques, what they answer, and what the planner searches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tigon.techniques.condition import Condition, Exclusion, Switch
from tigon.techniques.keys.settings import Settings

# The extra of tigon that installs a package.
PACKAGE_EXTRAS: Mapping[str, str] = {
    "bitsandbytes": "bnb",
    "torchao": "torchao",
    "schedulefree": "schedulefree",
    "deepspeed": "deepspeed",
    "peft": "train",
}


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Properties of a run, besides its settings, that techniques use."""

    device: str = "cuda"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter name -> shape. A tied weight is listed once."""
    hidden_size: int = 0
    processes: int = 1
    runs_layers_once: bool = False
    """Whether a micro-batch runs each layer once forward and once backward, and trains all weights."""

    def largest(self) -> int:
        """Returns the number of elements of the largest parameter."""
        return max((math.prod(shape) for shape in self.shapes.values()), default=0)

    def by_layer(self) -> dict[str, list[int]]:
        """Returns layer path -> element count of each parameter. Parameters outside every layer are under ""."""
        sizes: dict[str, list[int]] = {}
        for name, shape in self.shapes.items():
            layer = re.match(r".*?\.\d+(?=\.)", name)
            sizes.setdefault(layer[0] if layer else "", []).append(math.prod(shape))
        return sizes

    def largest_layer(self) -> int:
        """Returns the number of elements of the largest layer; 0 without layers."""
        return max((sum(sizes) for layer, sizes in self.by_layer().items() if layer), default=0)


Spans = Callable[[int, int], Iterator[slice]]
"""(tokens, tokens of a tile) -> the tiles to compute."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique, and what it answers to the trainer and the planner. Most need only `arguments`.

    Its page in docs/techniques says what it saves and costs.
    """

    name: str
    effect_on_result: str = ""
    """How the results of a run with it differ from those of AdamW under autocast; empty if only by rounding."""
    change_rank: int = 0
    """How much they differ. 0: not at all.

    The ranks were set by hand, not measured. The run with the smaller sum of ranks changes less."""
    needs: tuple[str, ...] = ()
    """Packages beyond PyTorch and transformers."""
    spared: Mapping[str, Condition] = field(default_factory=dict)
    """Packages of `needs` that a run for which the condition holds does without."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    recipe: Mapping[str, Any]
    """The recipe lines that switch it on, as dotted keys."""
    chosen: tuple[Condition, ...]
    """A run uses it when all of these hold."""
    arguments: Callable[[Settings, RunInfo], Mapping[str, Any]] = lambda settings, run_info: {}
    """Values for transformers' TrainingArguments."""
    load: Callable[[Settings, RunInfo], Mapping[str, Any]] = lambda settings, run_info: {}
    """Options for from_pretrained."""
    model: Callable[[Any, Settings, RunInfo], Any] = lambda model, settings, run_info: model
    """Changes the model after it is loaded and patched."""
    fits: Callable[[Any, Settings], None] = lambda config, settings: None
    """(transformers config, settings): raises RecipeError if the model cannot run with it. Called for every run."""
    trace: Callable[[Any, Settings, Spans], None] = lambda model, settings, spans: None
    """Changes the planner's model, which has no data. Called for every trace, whose `Spans` leave out equal tiles. It
    reads only keys that say `traced`."""

    rough_time: bool = False
    """The planner models its time only roughly, so it counts as one more rank."""
    last_resort: bool = False
    """The planner tries it only if nothing that changes less fits: its trace takes seconds, its time is rough."""
    searched_with: tuple[Condition, ...] = ()
    """The planner tries it only if these hold, because elsewhere another technique does the same for less."""
    least_cost: float = 1.0
    """With it, a step takes at least this many times as long as without recomputation."""
    kept_share: float = 1.0
    """With it, at least this share of the layers' activations stays in memory. It rules out runs without a trace, so it
    may be too low, but never too high."""

    def used_by(self, settings: Settings) -> bool:
        return all(condition.holds(settings) for condition in self.chosen)

    def packages(self, settings: Settings) -> tuple[str, ...]:
        """The packages that a run with these settings needs."""
        return tuple(name for name in self.needs if name not in self.spared or not self.spared[name].holds(settings))


How = Literal["run", "placement", "recomputation", "long samples", "split"]
"""How the planner treats a key that was left free.

run             tries every candidate with every candidate of the other `run` keys
placement       tries the rows of `sharding.PLACEMENTS`, which set several such keys together
recomputation   tries the candidates within one run, fastest first, until a batch fits
long samples    takes the first candidate after the last recomputation, if samples are long
split           divides the batch into micro-batches
"""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A key that the planner may choose if the user has not given it."""

    key: str
    how: How
    candidates: Callable[[Any], tuple[Any, ...]] = lambda config: ()
    """(transformers config) -> the values that the search tries, best first."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """All that one file of this folder declares. A module offers it under the name `DECLARATION`."""

    techniques: tuple[Technique, ...] = ()
    searches: tuple[Search, ...] = ()
    labels: Mapping[str, str | Callable[[Settings], str]] = field(default_factory=dict)
    """Key -> its part of the few words that describe a run: a text that stands there if the value, `{}` in it, is not
    the default, or a function."""
    exclusions: tuple[Exclusion, ...] = ()
    switches: tuple[Switch, ...] = ()
    machine: Callable[[Settings, torch.device], None] = lambda settings, device: None
    """Raises RecipeError if this machine, with the device of the run, cannot run these settings."""
    last: bool = False
    """It comes after the others in lists and in descriptions of a run."""
