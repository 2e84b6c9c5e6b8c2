"""Activation checkpointing layer by layer: what each decoder layer recomputes, as `full:7,none:9`.

`auto` leaves this to the planner (planner/search/checkpointing.py), which keeps what saves most milliseconds per byte
of the GPU's memory. The first layers recompute most, because the backward pass needs them last. When it reaches them,
the tensors that the last layers kept are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.techniques.checkpointing.dropped_inputs import DroppedInputs
from tigon.techniques.checkpointing.layer_function import Snapshot, enable, replace_function
from tigon.techniques.checkpointing.recompute import recomputed
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Names of the MLP in a decoder layer of transformers.
MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
Recompute = Callable[..., Any]


def is_by_layer(checkpointing: str) -> bool:
    """Whether a value of `train.checkpointing` says what each layer recomputes."""
    return ":" in checkpointing


def groups_of(checkpointing: str) -> list[tuple[str, int]]:
    """The (state, number of layers) pairs of a value such as `full:7,none:9`, first layers first."""
    return [(state, int(count)) for state, _, count in (part.partition(":") for part in checkpointing.split(","))]


def states_of(checkpointing: str, layers: int) -> list[str]:
    """What each of a model's layers recomputes.

    Raises:
        RecipeError: The value is for another number of layers.
    """
    states = [state for state, count in groups_of(checkpointing) for _ in range(count)]
    if len(states) != layers:
        raise RecipeError(
            f"train.checkpointing: {checkpointing} is for {len(states)} layers, but the model has {layers}; correct "
            "the counts, or use auto"
        )
    return states


def written(states: Iterable[str]) -> str:
    """The value of `train.checkpointing` for these states of the layers; `none` or `full` if all are equal to it."""
    groups = [(state, len([*run])) for state, run in groupby(states)]
    if len(groups) == 1 and groups[0][0] in ("none", "full"):
        return groups[0][0]
    return ",".join(f"{state}:{count}" for state, count in groups)


def apply(model: PreTrainedModel, states: Sequence[str], recompute: Recompute = recomputed) -> Callable[[], None]:
    """Let each decoder layer recompute what its state says.

    Args:
        model: A model of transformers, or one that PEFT has wrapped.
        states: One of `STATES` for each layer.
        recompute: Called as `recompute(function, *inputs)` where a layer or an MLP is recomputed.

    Returns:
        A function that undoes it.

    Raises:
        RecipeError: The number of layers differs, or the model has no layers or MLPs that can be recomputed.
    """
    layers = decoder_layers(model)
    if len(states) != len(layers):
        raise RecipeError(
            f"train.checkpointing names {len(states)} layers, but {type(model).__name__} has {len(layers)}; correct "
            "the counts, or use auto"
        )
    parts = [_PartlyKept(layer, state, recompute) for layer, state in zip(layers, states, strict=True)]
    before = Snapshot(model)
    enable(model)
    replace_function(model, recompute)
    if not all("_gradient_checkpointing_func" in vars(layer) for layer in layers):
        before.undo()
        raise RecipeError(
            f"train.checkpointing by layer needs layers of transformers' GradientCheckpointingLayer, which "
            f"{type(layers[0]).__name__} is not; use full or none"
        )
    for part in parts:
        part.attach()

    def undo() -> None:
        before.undo()
        for part in parts:
            part.detach()

    return undo


class _PartlyKept:
    """A decoder layer in one of the states. Transformers calls it in place of its checkpointing function."""

    def __init__(self, layer: Any, state: str, recompute: Recompute) -> None:
        self.layer, self.state, self.recompute = layer, state, recompute
        self.dropped: DroppedInputs | None = None
        """The dropped inputs of the pass that is running; None outside a training forward."""
        self.replaced: list[tuple[Any, Any]] = []
        """Modules with their own forward, or None."""
        self.mlp: Any = None
        if state == "mlp":
            self.mlp = next((getattr(layer, name) for name in MLPS if hasattr(layer, name)), None)
            if self.mlp is None:
                raise RecipeError(
                    f"train.checkpointing: mlp: {type(layer).__name__} has no module {', '.join(MLPS)}; use full, "
                    "elementwise or none for its layer"
                )

    def attach(self) -> None:
        if self.state == "none":
            self.layer.gradient_checkpointing = False
        elif self.state != "full":
            self.layer._gradient_checkpointing_func = self

    def detach(self) -> None:
        for module, before in self.replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before
        self.replaced.clear()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not self.replaced:
            self._replace()
        self.dropped = DroppedInputs()
        try:
            return function(*args, **kwargs)
        finally:
            self.dropped = None

    def _replace(self) -> None:
        """Replace the forwards of the linear layers and of a recomputed MLP. Adapters are there by the first pass."""
        recomputed_modules = set() if self.mlp is None else {*self.mlp.modules()}
        # A LoRA layer that is one op stands for the linear layers inside it.
        whole = [m for m in self.layer.modules() if getattr(m, "saves_only_inputs", False)]
        inside = {part for module in whole for part in module.modules() if part is not module}
        linears = [
            m
            for m in self.layer.modules()
            if m not in recomputed_modules and (m in whole or (isinstance(m, nn.Linear) and m not in inside))
        ]
        for module in (*linears, *([] if self.mlp is None else [self.mlp])):
            self.replaced.append((module, vars(module).get("forward")))
            module.forward = _InLayer(self, module.forward, recomputes=module is self.mlp)


class _InLayer:
    """The forward of a linear layer or an MLP, which saves its input only if it cannot be computed again."""

    def __init__(self, part: _PartlyKept, whole: Callable[..., Any], *, recomputes: bool) -> None:
        self.part, self.whole, self.recomputes = part, whole, recomputes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dropped = self.part.dropped
        if dropped is None:
            return self.whole(*args, **kwargs)
        with dropped.saving():
            return self.part.recompute(self.whole, *args, **kwargs) if self.recomputes else self.whole(*args, **kwargs)


def fits(config: PreTrainedConfig, settings: Settings) -> None:
    """Raise RecipeError if `train.checkpointing` is for another number of layers than this config has."""
    if is_by_layer(settings.train.checkpointing):
        states_of(settings.train.checkpointing, config.get_text_config().num_hidden_layers)


EXCLUSIONS = tuple(
    Exclusion(
        when=(Condition("train.checkpointing", "includes", f"{state}:"), Condition("sharding.zero", "is", 3)),
        reason="ZeRO-3 gathers the weight of a norm only while the norm itself runs, but its output is recomputed "
        "later",
        instead="train.checkpointing: auto, or only full and none in it",
        source="deepspeed 0.19 parameter_offload.py",
    )
    for state in ("mlp", "elementwise")
)
