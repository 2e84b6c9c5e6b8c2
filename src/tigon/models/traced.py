"""Logits that a traced head returns: the same promise as `deferred`, for torch.compile and for fake tensors.

Dynamo cannot trace the tensor subclass of eager mode, which hides one tensor under another's shape, but it does trace a
plain Python object with methods: what happens to it between the head and the loss is noted down while tracing and
leaves nothing in the graph. Where something is asked that is not noted, the logits become part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from tigon.errors import PatchError
from tigon.models.logits import LogitMap, Step, map_of


class TracedLogits:
    """See the module's text."""

    def __init__(
        self,
        loss: Tensor,
        plain_forward: Callable[..., Tensor],
        head: nn.Module,
        hidden: Tensor,
        steps: tuple[Step, ...] = (),
        source: object | None = None,
    ) -> None:
        self._loss, self._head, self._hidden = loss, head, hidden
        self._plain_forward = plain_forward
        self._steps = steps
        self.source: object = hidden if source is None else source
        """The same object for every note on the output of one call of the head."""

    def _noted(self, *step: Any) -> TracedLogits:
        return TracedLogits(
            self._loss, self._plain_forward, self._head, self._hidden, (*self._steps, step), self.source
        )

    def __mul__(self, factor: Any) -> Any:
        return self._noted("mul", factor) if type(factor) in (int, float) else self.materialize() * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        return self._noted("div", divisor) if type(divisor) in (int, float) else self.materialize() / divisor

    def tanh(self) -> TracedLogits:
        return self._noted("tanh")

    def contiguous(self) -> TracedLogits:
        return self

    def float(self) -> TracedLogits:
        return self._noted("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return self._noted("to", args[0])
        return self.materialize().to(*args, **kwargs)

    def logit_map(self) -> LogitMap | None:
        """As `DeferredLogits.logit_map`."""
        return map_of(self._steps)

    def written(self) -> bool:
        """Never: what is computed here is computed anew each time."""
        return False

    def loss(self) -> Tensor:
        """The fused loss ()."""
        return self._loss.clone()

    def materialize(self) -> Tensor:
        """The logits (..., vocab), as part of the graph."""
        logits = self._plain_forward(self._head, self._hidden)
        for name, *args in self._steps:
            logits = getattr(logits, name)(*args)
        return logits

    def __getitem__(self, key: Any) -> Tensor:
        return self.materialize()[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        plain = [arg.materialize() if isinstance(arg, TracedLogits) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def _flatten(logits: TracedLogits) -> tuple[list[Any], Any]:
    return [logits._loss], (logits._plain_forward, logits._head, logits._hidden, logits._steps, logits.source)


def _unflatten(children: Any, context: Any) -> TracedLogits:
    (loss,) = children
    return TracedLogits(loss, *context)


# So that FSDP finds the tensor in what the head returns, and hangs the gathering for the backward on it.
_pytree.register_pytree_node(TracedLogits, _flatten, _unflatten)


class UncomputedLogits:
    """`outputs.logits` of a compiled training step: nothing is kept to compute them from, and every use says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PatchError(_UNCOMPUTED.format(use=f".{name}"))

    def __getitem__(self, key: Any) -> Any:
        raise PatchError(_UNCOMPUTED.format(use="[...]"))

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise PatchError(_UNCOMPUTED.format(use=f" in {getattr(func, '__name__', func)}"))


_UNCOMPUTED = (
    "outputs.logits{use}: a compiled training step with a fused loss keeps no logits. Call the model with "
    "skip_logits=False, or read them in eval mode."
)
