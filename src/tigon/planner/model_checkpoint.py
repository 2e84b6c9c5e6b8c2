"""`tigon.checkpoint`: applies a value of `train.checkpointing`, or a plan, to a model in your own code.

The Trainer and TRL's trainers switch transformers' checkpointing on by default or by an argument, which would replace
the choice. While the choice is applied, `_KeptChoice` takes this call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tigon.errors import RecipeError, UsageError
from tigon.models.kv_cache import without_cache
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.planner.model_plan import CheckpointPlan, transformers_model
from tigon.techniques.accumulation import accumulation
from tigon.techniques.checkpointing.checkpointing import recompute_layers
from tigon.techniques.checkpointing.layer_function import Snapshot
from tigon.techniques.cuda_graphs.cuda_graphs import graph
from tigon.techniques.keys.settings import complaint_about
from tigon.techniques.keys.train import AUTO

_ENABLE = "gradient_checkpointing_enable"
"""transformers from 5.23 on calls a wrapper of this name too, if it is switched on by the newer one."""


class Checkpointed:
    """The result of `tigon.checkpoint`: `undo()` restores the model, as does the end of a `with` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Restore the model. A second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Checkpointed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _is_on(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


class _KeptChoice:
    """Replaces a model's `gradient_checkpointing_enable`: it switches the choice of `tigon.checkpoint` on again.

    TRL switches checkpointing off while a model writes text, and on afterwards.
    """

    def __init__(self, model: PreTrainedModel, value: str) -> None:
        self.model, self.value, self.switch_on = model, value, Snapshot(model)
        self.was_on = _is_on(model)
        self.told = False

    def __call__(self, *_: object, **options: Any) -> None:
        if not self.told and _is_on(self.model) == self.was_on:
            self.told = True
            warnings.warn(
                f"tigon.checkpoint(model, {self.value!r}) stays in place of the trainer's gradient_checkpointing; set "
                "gradient_checkpointing=False in the trainer's arguments, or call undo() first to have the trainer's.",
                stacklevel=3,
            )
        self.switch_on()


def checkpoint(model: nn.Module, plan: CheckpointPlan | str) -> Checkpointed:
    """See `tigon.checkpoint`."""
    inner = transformers_model(model, "tigon.checkpoint")
    value = plan if isinstance(plan, str) else plan.checkpointing
    if _ENABLE in vars(inner):
        raise UsageError("tigon.checkpoint is applied to the model already; call its undo() first.")
    if _is_on(model):
        raise UsageError(
            "the model has activation checkpointing on already; call model.gradient_checkpointing_disable() first."
        )
    if problem := complaint_about("train.checkpointing", value):
        raise UsageError(f"plan {problem}.")
    if value == AUTO:
        raise UsageError(
            "plan is 'auto'; tigon.plan makes the choice: tigon.checkpoint(model, tigon.plan(model, ...))."
        )
    if value != "none" and not inner.supports_gradient_checkpointing:
        raise UsageError(f"plan is {value!r}, and {type(inner).__name__} has no activation checkpointing; use 'none'.")
    in_graphs = not isinstance(plan, str) and plan.cuda_graphs
    if in_graphs and inner.device.type != "cuda":
        in_graphs = False
        warnings.warn(
            f"plan has CUDA graphs, and the model is on {inner.device.type}: its layers run without. Move the model to "
            "a GPU before tigon.checkpoint.",
            stacklevel=3,
        )
    try:
        undo_layers = (_graphed if in_graphs else recompute_layers)(inner, value)
    except RecipeError as error:
        raise UsageError(f"{error}.") from None
    undo_cache = without_cache(inner) if in_graphs or value != "none" else lambda: None
    fusion = contextlib.ExitStack()
    if not isinstance(plan, str) and plan.accumulation_fusion:
        fusion.callback(accumulation.fuse(inner))
        fusion.enter_context(accumulation_fusion())
    setattr(inner, _ENABLE, _KeptChoice(inner, value))

    def undo() -> None:
        delattr(inner, _ENABLE)
        undo_layers()
        undo_cache()
        fusion.close()

    return Checkpointed(undo)


def _graphed(model: PreTrainedModel, value: str) -> Callable[[], None]:
    """Launch each layer as CUDA graphs, recomputed (`full`) or not. Returns a function that undoes it."""
    before = Snapshot(model)
    graphs = graph(model, recomputes=value == "full")

    def undo() -> None:
        before.undo()
        graphs.release()

    return undo
