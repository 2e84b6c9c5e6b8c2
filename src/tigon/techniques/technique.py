"""What a technique is: a record that says what it does to memory, time and result, and how it reaches the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tigon.techniques.choices import Choices
from tigon.techniques.condition import Condition

# The extra of tigon that installs a package.
PACKAGE_EXTRAS: Mapping[str, str] = {
    "bitsandbytes": "bnb", "torchao": "torchao", "deepspeed": "deepspeed", "peft": "train",
}  # fmt: skip
SAME = "None: the same numbers to rounding."


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a technique asks about a run besides its choices."""

    device: str = "cuda"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Every parameter of the model by name, tied ones once."""
    hidden_size: int = 0
    processes: int = 1
    tf32: bool = False
    lora_alpha: float | None = None
    nvme_folder: str | None = None

    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((math.prod(shape) for shape in self.shapes.values()), default=0)

    def by_layer(self) -> dict[str, list[int]]:
        """Elements of the parameters of each layer, by the layer's path; those outside every layer under ""."""
        found: dict[str, list[int]] = {}
        for name, shape in self.shapes.items():
            layer = re.match(r".*?\.\d+(?=\.)", name)
            found.setdefault(layer[0] if layer else "", []).append(math.prod(shape))
        return found


def _nothing(choices: Choices, facts: Facts) -> Mapping[str, Any]:
    return {}


def _as_it_is(model: Any, choices: Choices, facts: Facts) -> Any:
    return model


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique. The hooks say how it reaches transformers, PEFT or the Trainer; most need only `arguments`."""

    name: str
    page: str
    """The page of docs/techniques that explains it, without its extension."""
    saves: str
    costs: str
    precision: str = SAME
    needs: tuple[str, ...] = ()
    """Packages beyond PyTorch and transformers."""
    tools: tuple[str, ...] = ()
    """Compilers and libraries, which pip does not install."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    recipe: Mapping[str, Any]
    """The recipe lines that switch it on, as dotted keys."""
    chosen: tuple[Condition, ...]
    """A run uses it when all of these hold."""
    arguments: Callable[[Choices, Facts], Mapping[str, Any]] = _nothing
    """Values of transformers' TrainingArguments."""
    loading: Callable[[Choices, Facts], Mapping[str, Any]] = _nothing
    """Options of from_pretrained."""
    model: Callable[[Any, Choices, Facts], Any] = _as_it_is
    """What is done to the model once it is loaded and patched."""
    source: str

    def used_by(self, choices: Choices) -> bool:
        return all(condition.holds(choices) for condition in self.chosen)
