"""`TracedLogits`: the counterpart of `DeferredLogits` for torch.compile and for fake tensors.

Dynamo cannot trace the tensor subclass of eager mode, which presents one tensor with the shape of another. It can trace
a plain Python object with methods. Operations on the object between the head and the loss are recorded during tracing
and leave nothing in the graph. Any other use makes the logits part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from tigon.errors import PatchError
from tigon.models.seams.head.logits import LogitMap, Step, map_of


class _Memory:
    """Like `deferred_logits._Memory`: the elements of the logits, or of the copy that a recorded step made of them."""

    def __init__(self, compute: Callable[[], Tensor], attached: bool) -> None:
        self._compute, self._attached = compute, attached
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """The one tensor of these elements, which the caller may write to."""
        if self._tensor is None:
            self._tensor = self.unwritten()
        return self._tensor

    def unwritten(self) -> Tensor:
        """The elements before any write, computed again; the compiler removes unused ones from the graph."""
        with torch.inference_mode(False), torch.set_grad_enabled(self._attached):
            return self._compute()


class _Source:
    """One call of the head."""

    def __init__(self) -> None:
        self.touched = False
        """See `LogitsSource.touched`."""


class TracedLogits:
    """Logits that are not computed; see the module docstring."""

    def __init__(
        self,
        loss: Tensor,
        plain_forward: Callable[..., Tensor],
        head: nn.Module,
        hidden: Tensor,
    ) -> None:
        self._loss = loss
        self._steps: tuple[Step, ...] = ()
        self._memory = _Memory(lambda: plain_forward(head, hidden), torch.is_grad_enabled())
        self.source = _Source()
        """The same object for all recorded steps on the output of one call of the head."""

    @classmethod
    def _of(cls, loss: Tensor, steps: tuple[Step, ...], memory: _Memory, source: _Source) -> TracedLogits:
        logits = cls.__new__(cls)
        logits._loss, logits._steps, logits._memory, logits.source = loss, steps, memory, source
        return logits

    def _noted(self, name: str, *args: object) -> TracedLogits:
        before = self._memory
        memory = _Memory(lambda: getattr(before.unwritten(), name)(*args), torch.is_grad_enabled())
        return TracedLogits._of(self._loss, (*self._steps, (name, *args)), memory, self.source)

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
        """See `DeferredLogits.logit_map`."""
        return map_of(self._steps)

    def touched(self) -> bool:
        """See `DeferredLogits.touched`."""
        return self.source.touched

    def loss(self, earlier: dict[Any, Tensor]) -> Tensor:
        """The fused loss ()."""
        return self._loss.clone()

    def materialize(self) -> Tensor:
        """The logits (..., vocab), as part of the graph."""
        self.source.touched = True
        return self._memory.tensor()

    def __getitem__(self, key: Any) -> Tensor:
        return self.materialize()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.materialize()[key] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _METADATA:
            return getattr(self._memory.unwritten(), name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        plain = [arg.materialize() if isinstance(arg, TracedLogits) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


# Attributes and methods that read no elements, so the logits are not needed for them.
_NAMES = (
    "shape dtype device ndim requires_grad is_cuda is_cpu layout size dim numel element_size is_floating_point "
    "is_contiguous stride"
)
_METADATA = frozenset(_NAMES.split())


def _flatten(logits: TracedLogits) -> tuple[list[Any], Any]:
    return [logits._loss], (logits._steps, logits._memory, logits.source)


def _unflatten(children: Any, context: Any) -> TracedLogits:
    (loss,) = children
    return TracedLogits._of(loss, *context)


# Lets FSDP find the tensor in the head's output, on which it registers the all-gather for the backward.
_pytree.register_pytree_node(TracedLogits, _flatten, _unflatten)


class UncomputedLogits:
    """`outputs.logits` of a compiled training step. They cannot be computed any more, so every use raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PatchError(_UNCOMPUTED.format(use=f".{name}"))

    def __getitem__(self, key: object) -> Any:
        raise PatchError(_UNCOMPUTED.format(use="[...]"))

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> Any:
        raise PatchError(_UNCOMPUTED.format(use=f" in {getattr(func, '__name__', func)}"))


_UNCOMPUTED = (
    "outputs.logits{use}: a compiled training step with a fused loss keeps no logits. Call the model with "
    "skip_logits=False, or read them in eval mode."
)
