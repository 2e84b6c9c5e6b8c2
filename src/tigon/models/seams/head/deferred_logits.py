"""`DeferredLogits`: the output of `lm_head` while the loss is fused, and then `outputs.logits`. No logits are computed.

The fused head computes the loss but no logits, and other code handles its output. FSDP2 and ZeRO-3 register the gather
of the head's weight for the backward on the tensors that a module returns. accelerate casts and moves outputs, and a
user may read them. The output is therefore a tensor. Its storage is the scalar loss with its gradient, and hooks on it
fire in the backward of the loss. To Python code it has the shape, dtype and device of the logits. Casts, moves and
`detach` are recorded. Any other use computes the logits once and warns once.

It refuses two uses:

- The gradient of the logits (`retain_grad`, `grad`) does not exist.
- A custom `torch.autograd.Function` is called by PyTorch without `__torch_function__`. It would compute with the
  logits, and its gradient, as large as the logits, would silently be summed into that of the scalar. A gate in front of
  the scalar therefore passes only the gradient that the loss has announced.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tigon.errors import PatchError
from tigon.models.seams.base import is_dtensor
from tigon.models.seams.head.logits import LogitMap, Step, map_of


class MaterializedLogitsWarning(UserWarning):
    """`outputs.logits` of a patched training step was read, so the (tokens, vocab) tensor was computed after all."""


_warned_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class LogitsSource:
    """Everything needed to compute the logits of one forward later."""

    def __init__(self, head: nn.Module, plain_forward: Callable[..., Tensor], hidden: Tensor) -> None:
        weight = head.weight
        assert isinstance(weight, Tensor)
        self.head, self.plain_forward, self.hidden = head, plain_forward, hidden
        device_type = hidden.device.type
        self.dtype = hidden.dtype
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if torch.amp.is_autocast_available(device_type):  # not on the meta device
            on, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
            self.dtype = dtype if on and hidden.dtype != torch.float64 else hidden.dtype
            self._autocast = partial(torch.autocast, device_type, dtype=dtype, enabled=on)
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self._weight_shape, self._versions = weight.shape, self._versions_now()
        self._divided = weight if is_dtensor(weight) else None
        """The weight of a head that is divided by vocabulary, which no framework replaces by a shard of it."""
        self._grad_enabled = torch.is_grad_enabled()
        self.touched = False
        """Whether other code holds the computed logits. A write to them may be invisible (`.data`, numpy), so from then
        on the loss is computed from them."""

    def compute(self) -> Tensor:
        """The logits (..., vocab) as the head's own forward returns them.

        They are attached to the graph if the head's forward would have attached them, whatever the reader's grad mode.
        """
        self.touched = True
        with torch.inference_mode(False), torch.set_grad_enabled(self._grad_enabled), self._autocast():
            logits = self._forward()
        self._warn()
        return logits

    def _versions_now(self) -> tuple[int, ...]:
        """Versions of all that the logits depend on; a head may have a bias, and an adapter."""
        return tuple(version_of(tensor) for tensor in (self.hidden, *self.head.parameters()))

    def _forward(self) -> Tensor:
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        whole = type(weight) in (Tensor, nn.Parameter) and weight.shape == self._weight_shape
        if weight is self._divided:
            self._check_versions()
        if not (whole and weight.untyped_storage().nbytes() > 0):
            return self._forward_sharded()
        self._check_versions()
        return self.plain_forward(self.head, self.hidden)

    def _check_versions(self) -> None:
        if self._versions_now() != self._versions:
            raise PatchError(
                "outputs.logits was first read after lm_head.weight (or the hidden states) had changed, so the logits "
                "of that forward are gone. Read them before optimizer.step(), or patch with linear_cross_entropy=False."
            )

    def _forward_sharded(self) -> Tensor:
        # FSDP or ZeRO-3 has sharded the weight since the forward. Only a call of the module, with hooks, gathers it.
        try:
            return self.head(self.hidden)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise PatchError(
                "outputs.logits cannot be computed any more: lm_head.weight is sharded again, and calling lm_head does "
                f"not gather it ({error}). Read the logits before backward, or call the model with skip_logits=False."
            ) from error

    def _warn(self) -> None:
        if self.head not in _warned_heads:
            _warned_heads.add(self.head)
            warnings.warn(
                f"The logits {tuple(self.shape)} of a patched training step were read, so they are computed and kept "
                "in addition to the fused loss, which does not need them. If you need logits, call the model without "
                "labels, in eval mode, or with skip_logits=False.",
                MaterializedLogitsWarning,
                stacklevel=_frames_to_caller(),
            )


def _frames_to_caller() -> int:
    """The `stacklevel` for a warning of this function's caller, so that it names the line that read the logits."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in {"torch", "tigon"}:
        frame = frame.f_back
        level += 1
    return level


def version_of(value: object) -> int:
    """Autograd's version counter of a tensor; 0 for inference tensors and other values."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@dataclass(frozen=True)
class _View:
    """The recorded steps on the logits since the head, and the dtype and device that the logits would now have."""

    dtype: torch.dtype
    device: torch.device
    steps: tuple[Step, ...] = ()
    sealed: bool = False
    """Whether the object was returned to the user; arithmetic then computes the logits."""

    def on_meta(self, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


class _Memory:
    """The elements of a `DeferredLogits`, shared by its aliases (`detach`, a cast to its own dtype).

    A write through one alias shows in all of them, whatever the grad mode, as with ordinary tensors.
    """

    def __init__(
        self, source: LogitsSource, parent: _Memory | None = None, step: Step = (), attached: bool = True
    ) -> None:
        """parent, step: the memory that was copied, and the copying step; omitted for the head's own output."""
        self._source, self._parent, self._step, self._attached = source, parent, step, attached
        self._tensor: Tensor | None = None
        self._handed_out = False

    def tensor(self) -> Tensor:
        """The single tensor of these elements; the caller may write to it."""
        if self._tensor is None:
            self._tensor = self._computed()
        self._handed_out = True
        return self._tensor

    def _unwritten(self) -> Tensor:
        """The elements at the time of a copying step, before any write."""
        if self._handed_out:
            return self._computed()
        if self._tensor is None:
            self._tensor = self._computed()
        return self._tensor

    def _computed(self) -> Tensor:
        if self._parent is None:
            return self._source.compute()
        before = self._parent._unwritten()
        name, *args = self._step
        with torch.inference_mode(False), torch.set_grad_enabled(self._attached):
            return getattr(before, name)(*args)  # type: ignore[no-any-return]


class DeferredLogits(Tensor):
    """Logits that are not computed; see the module docstring. Only `carry` and `seal` create them."""

    source: LogitsSource
    _view: _View
    _memory: _Memory
    _gate: _Gate
    _real: Tensor | None

    @staticmethod
    def carry(loss: Tensor, source: LogitsSource) -> DeferredLogits:
        """The head's output, backed by the scalar `loss` with its gradient; `source` can compute the logits."""
        return _carry(loss, source, _View(source.dtype, loss.device), _Memory(source), _Gate())

    def seal(self) -> DeferredLogits:
        """The same logits for the user's `outputs.logits`, detached from the loss."""
        with torch._C.DisableTorchFunctionSubclass():
            scalar = self.detach().requires_grad_(self.requires_grad)
        return _carry(scalar, self.source, replace(self._view, sealed=True), self._memory, _Gate())

    def loss(self, earlier: dict[Any, Tensor]) -> Tensor:
        """The fused loss (), as a new tensor whose backward runs the hooks on this one.

        earlier: the losses already taken in the same forward. The gate passes one gradient only. A second request
        therefore returns a copy of the first loss, and autograd sums their gradients before the gate.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            with torch._C.DisableTorchFunctionSubclass():
                return self.detach().clone()
        if self._gate not in earlier:
            earlier[self._gate] = _Take.apply(self, self._gate)
        return earlier[self._gate].clone()  # models add to their loss in place

    def materialize(self) -> Tensor:
        """The logits (..., vocab) as an ordinary tensor."""
        if self._real is None:
            tensor = self._memory.tensor()
            self._real = tensor if self.requires_grad else tensor.detach()
            _hand_over_hooks(self, self._real)
        return self._real

    # The hooks of a head that is divided by vocabulary gather a DTensor of logits. There is nothing to gather here.
    # Logits that are read come from the head and its hooks again (`LogitsSource`).
    placements: ClassVar[None] = None

    def redistribute(self, *_: object, **__: object) -> DeferredLogits:
        return self

    def to_local(self, **_: object) -> DeferredLogits:
        return self

    def logit_map(self) -> LogitMap | None:
        """The scaling and capping of the logits since the head, or None if the steps do not form a `LogitMap`."""
        return map_of(self._view.steps)

    def touched(self) -> bool:
        """Whether other code holds the computed logits, and may have written to them."""
        return self.source.touched

    def _notes_arithmetic(self, operands: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a product with a number, or a tanh, is only recorded, as between the head and the loss.

        With gradients disabled it is not recorded, because the forward of a custom `torch.autograd.Function` runs so.
        """
        on_the_way = not self._view.sealed and not self.source.touched
        followed = torch.is_grad_enabled() or not self.requires_grad
        return on_the_way and followed and not kwargs and all(type(x) in (int, float) for x in operands)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if func in _NATIVE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.register_hook:
                return _register_hook(first, *args[1:], **kwargs)
            if func in _ANSWERED:
                return _ANSWERED[func](first)
            if func in _ON_META:
                return func(first._view.on_meta(first.source.shape), *args[1:], **kwargs)
            if func in _LAZY and not first.source.touched:
                return _LAZY[func](first, *args[1:], **kwargs)
            if func in _ARITHMETIC and first._notes_arithmetic(args[1:], kwargs):
                return _noted(first, (_ARITHMETIC[func], *args[1:]), copies=True)
        args, kwargs = tree_map_only(DeferredLogits, DeferredLogits.materialize, (args, kwargs))
        return func(*args, **kwargs)


class _Gate:
    """The gradient from `_Take` that may pass through `_Carry`."""

    announced: Tensor | None = None


class _Take(torch.autograd.Function):
    """Returns the scalar of a `DeferredLogits` as the loss."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, gate: _Gate) -> Tensor:
        ctx.gate = gate
        with torch._C.DisableTorchFunctionSubclass():
            return carried.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.gate.announced = grad
        return grad, None


class _Carry(torch.autograd.Function):
    """Identity on the scalar; returns a `DeferredLogits` that is not a view, because FSDP2 warns of hooks on views."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor, gate: _Gate) -> Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor._make_subclass(DeferredLogits, scalar.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is not None and grad is not ctx.gate.announced:
            # DistributedDataParallel may send zero gradients through every output.
            if bool(grad.any()):
                raise PatchError(
                    "a gradient reached the logits of a patched training step through a custom autograd function or a "
                    "hook that changed it, but these logits were never computed. Call the model with skip_logits=False."
                )
            return None, None
        return grad, None


def _carry(scalar: Tensor, source: LogitsSource, view: _View, memory: _Memory, gate: _Gate) -> DeferredLogits:
    carried: DeferredLogits = _Carry.apply(scalar, gate)
    carried.source, carried._view, carried._memory, carried._gate = source, view, memory, gate
    carried._real = None
    return carried


def _noted(logits: DeferredLogits, step: Step, *, copies: bool, **changes: Any) -> Tensor:
    """Record a step. copies: whether it allocates memory, instead of returning the same tensor or a view."""
    view, memory = replace(logits._view, steps=(*logits._view.steps, step), **changes), logits._memory
    if copies:
        memory = _Memory(logits.source, memory, step, logits.requires_grad and torch.is_grad_enabled())
    return _carry(logits, logits.source, view, memory, logits._gate)


def _detach(logits: DeferredLogits) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        scalar = logits.detach()
    return _carry(scalar, logits.source, logits._view, logits._memory, logits._gate)


def _view_as(logits: DeferredLogits, other: Tensor) -> Tensor:
    # PyTorch calls x.view_as(x) on an input that an autograd.Function returns; module backward hooks cause this.
    return _detach(logits) if other is logits else logits.materialize().view_as(other)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Tensor:
    copied = bool(kwargs.pop("copy", False))
    if args and isinstance(args[0], Tensor):
        args, kwargs = (args[0].device, args[0].dtype), {}
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    now = logits._view
    dtype, device = dtype or now.dtype, device or now.device
    moved = device.type != now.device.type or device.index not in (None, now.device.index)
    copies = copied or moved or dtype != now.dtype
    return _noted(logits, ("to", device, dtype, False, copied), copies=copies, dtype=dtype, device=device)


def _cast(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda logits: _noted(logits, ("to", dtype), copies=dtype != logits._view.dtype, dtype=dtype)


def _register_hook(logits: DeferredLogits, hook: Callable[[Tensor], Tensor | None]) -> Any:
    if logits._real is not None:
        return logits._real.register_hook(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return logits.register_hook(hook)


def _hand_over_hooks(logits: DeferredLogits, real: Tensor) -> None:
    """Move hooks that were registered before the logits were computed to the computed tensor, if it requires grad."""
    hooks = logits._backward_hooks
    if not hooks or not real.requires_grad:
        return

    def run(key: int, grad: Tensor) -> Tensor | None:
        return hooks[key](grad) if key in hooks else None  # the hook may have been removed since

    for key in list(hooks):
        real.register_hook(partial(run, key))


def _no_gradient(logits: DeferredLogits) -> Any:
    raise PatchError(
        "the gradient of the logits does not exist because the loss is fused with lm_head. Call the model with "
        "skip_logits=False, or patch with linear_cross_entropy=False."
    )


def _describe(logits: DeferredLogits) -> str:
    shape, view = tuple(logits.source.shape), logits._view
    return f"DeferredLogits(shape={shape}, dtype={view.dtype}, device='{view.device}')"


def _getters(names: str) -> set[Any]:
    """The functions that `__torch_function__` receives when these tensor attributes are read."""
    return {getattr(Tensor, name).__get__ for name in names.split()}


# Answered by the scalar: attributes that autograd and the hooks of FSDP, DDP and DeepSpeed read.
_NATIVE = _getters(
    "requires_grad grad_fn is_leaf _base _version _backward_hooks layout is_meta is_sparse is_nested is_quantized"
)
# Answered by an empty meta tensor of the logits' shape and dtype.
_METHODS = "size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex __len__"
_ON_META = {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
    *_getters("shape dtype ndim nbytes itemsize"),
}
# Answered without a tensor.
_ANSWERED: dict[Any, Callable[[DeferredLogits], Any]] = {
    **dict.fromkeys(_getters("device"), lambda logits: logits._view.device),
    **dict.fromkeys(_getters("is_cuda"), lambda logits: logits._view.device.type == "cuda"),
    **dict.fromkeys(_getters("is_cpu"), lambda logits: logits._view.device.type == "cpu"),
    **dict.fromkeys(_getters("grad"), _no_gradient),
    Tensor.retain_grad: _no_gradient,
    Tensor.get_device: lambda logits: -1 if logits._view.device.index is None else logits._view.device.index,
    Tensor.__repr__: _describe,
}
# Recorded, and applied when the logits are computed.
_LAZY: dict[Any, Callable[..., Tensor]] = {
    Tensor.detach: _detach,
    Tensor.view_as: _view_as,
    Tensor.clone: lambda logits, **_: _noted(logits, ("clone",), copies=True),
    Tensor.contiguous: lambda logits, **_: _noted(logits, ("contiguous",), copies=False),
    Tensor.float: _cast(torch.float32),
    Tensor.half: _cast(torch.float16),
    Tensor.bfloat16: _cast(torch.bfloat16),
    Tensor.to: _to,
}
# Recorded between the head and the loss, as the method of that name.
_ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply), "mul"),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide), "div"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
}
