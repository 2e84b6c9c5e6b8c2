"""The function that transformers' checkpointed layers call in place of their own forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable(model: PreTrainedModel, **options: Any) -> None:
    """Switch transformers' checkpointing on. options: arguments for `torch.utils.checkpoint.checkpoint`.

    transformers 5.23 renamed the method to activation_checkpointing_enable.
    """
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    known = inspect.signature(switch).parameters
    name = next(name for name in known if name.endswith("checkpointing_kwargs"))
    switch(**{name: {"use_reentrant": False, **options}})


def replace_function(model: PreTrainedModel, function: Callable[..., Any]) -> int:
    """Let every checkpointed layer call `function(layer, *inputs)`, and return the number of these layers.

    Returns 0 for a model whose own code uses transformers' old format, which calls PyTorch's `checkpoint`.
    """
    n_replaced = 0
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("checkpointing_func")]:
            setattr(module, name, function)
            n_replaced += 1
    return n_replaced


_NAMES = ("gradient_checkpointing", "_gradient_checkpointing_func")


class Snapshot:
    """The checkpointing of a model's modules as it is now. A call sets it again. A copy of the model has its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.before = [(module, self._state(module)) for module in model.modules()]
        self.had_hook = bool(getattr(model, "_require_grads_hooks", None))

    @staticmethod
    def _state(module: Any) -> dict[str, Any]:
        return {name: vars(module)[name] for name in _NAMES if name in vars(module)}

    def __call__(self) -> None:
        for module, values in self.before:
            for name in _NAMES:
                if name in values:
                    setattr(module, name, values[name])
                elif name in vars(module):
                    delattr(module, name)

    def undo(self) -> None:
        """Set it again after `enable`, and remove the hook by which transformers gives the embeddings a gradient."""
        self()
        if not self.had_hook:
            self.model.disable_input_require_grads()
