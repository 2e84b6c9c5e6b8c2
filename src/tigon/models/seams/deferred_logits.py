"""Logits that nobody computed: what `lm_head` returns while the loss is fused, and what `outputs.logits` is then.

The fused head knows the loss and not the logits, yet its output passes through other people's hands. FSDP2 and ZeRO-3
hang the gathering of the head's weight for the backward on the tensors a module returns, accelerate casts and moves
outputs, a user may read them. So the output is a tensor: underneath it is the scalar loss, with its gradient, and hooks
on it fire when the loss's backward passes; to Python it has the shape, dtype and device of the logits. Casts, moves and
`detach` are noted down. Everything else computes the logits, once, and says so once.

Two things it cannot do, and refuses: give the gradient of the logits (`retain_grad`, `grad`), and lend itself to
somebody's `torch.autograd.Function`, which PyTorch calls without asking subclasses. Such a function computes with the
logits, and its gradient, as large as the logits, would be summed into that of the scalar, without an error and wrong.
So the scalar stands behind a gate that lets through only the gradient that taking the loss has announced.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tigon.errors import PatchError
from tigon.models.seams.logits import LogitMap, Step, map_of


class MaterializedLogitsWarning(UserWarning):
    """`outputs.logits` of a patched training step was read, which computed the (tokens, vocab) tensor after all."""


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
        self._weight_shape, self._versions = weight.shape, (version_of(weight), version_of(hidden))
        self._grad_enabled = torch.is_grad_enabled()
        self.touched = False
        """Whether somebody holds these logits as numbers. A write to numbers may show nowhere (`.data`, numpy), so the
        loss is computed from them from then on."""

    def compute(self) -> Tensor:
        """The logits (..., vocab) as the head's own forward returns them, attached to the graph if it would have
        attached them. The grad mode of the reader does not matter."""
        self.touched = True
        with torch.inference_mode(False), torch.set_grad_enabled(self._grad_enabled), self._autocast():
            logits = self._forward()
        self._warn()
        return logits

    def _forward(self) -> Tensor:
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        whole = type(weight) in (Tensor, nn.Parameter) and weight.shape == self._weight_shape
        if not (whole and weight.untyped_storage().nbytes() > 0):
            return self._forward_sharded()
        if (version_of(weight), version_of(self.hidden)) != self._versions:
            raise PatchError(
                "outputs.logits was first read after lm_head.weight (or the hidden states) had changed, so the logits "
                "of that forward are gone. Read them before optimizer.step(), or patch with linear_cross_entropy=False."
            )
        return self.plain_forward(self.head, self.hidden)

    def _forward_sharded(self) -> Tensor:
        # Since the forward, FSDP or ZeRO-3 took the weight away: only a call of the module gathers it, hooks and all.
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
                f"The logits {tuple(self.shape)} of a patched training step were read, so they are computed and kept, "
                "beside the fused loss that does without them. Call the model without labels, in eval mode, or with "
                "skip_logits=False where you need them.",
                MaterializedLogitsWarning,
                stacklevel=_frames_to_caller(),
            )


def _frames_to_caller() -> int:
    """`stacklevel` for a warning raised by the caller of this, so that it names the line that read the logits."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in {"torch", "tigon"}:
        frame = frame.f_back
        level += 1
    return level


def version_of(value: Any) -> int:
    """How often a tensor was written to, as autograd counts it; 0 for what has no count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@dataclass(frozen=True)
class _View:
    """What was done with the logits since the head, and the dtype and device they would have by now."""

    dtype: torch.dtype
    device: torch.device
    steps: tuple[Step, ...] = ()
    sealed: bool = False
    """In the user's hands, where arithmetic gives numbers."""

    def on_meta(self, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


class _Memory:
    """The elements that a `DeferredLogits` stands for; its aliases (`detach`, a cast to the dtype it has) share them.

    A write through one alias therefore shows in all of them, whatever the grad mode, as it does with ordinary tensors.
    """

    def __init__(
        self, source: LogitsSource, parent: _Memory | None = None, step: Step = (), attached: bool = True
    ) -> None:
        """parent, step: the memory that was copied and what the copy did to it; neither for the head's own output."""
        self._source, self._parent, self._step, self._attached = source, parent, step, attached
        self._tensor: Tensor | None = None
        self._handed_out = False

    def tensor(self) -> Tensor:
        """The one tensor of these elements, which the caller may write to."""
        if self._tensor is None:
            self._tensor = self._computed()
        self._handed_out = True
        return self._tensor

    def _unwritten(self) -> Tensor:
        """The elements as they were when the step of a copy read them, before anybody could write to them."""
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
    """See the module's text. Made by `carry` and `seal` only."""

    source: LogitsSource
    _view: _View
    _memory: _Memory
    _gate: _Gate
    _real: Tensor | None

    @staticmethod
    def carry(loss: Tensor, source: LogitsSource) -> DeferredLogits:
        """The head's output: `loss` () underneath, gradient included; `source` says what logits it stands for."""
        return _carry(loss, source, _View(source.dtype, loss.device), _Memory(source), _Gate())

    def seal(self) -> DeferredLogits:
        """The same logits for the user's `outputs.logits`, cut off from the loss."""
        with torch._C.DisableTorchFunctionSubclass():
            scalar = self.detach().requires_grad_(self.requires_grad)
        return _carry(scalar, self.source, replace(self._view, sealed=True), self._memory, _Gate())

    def loss(self, earlier: dict[Any, Tensor]) -> Tensor:
        """The fused loss (), a fresh tensor behind whatever hooks were put on this one.

        earlier: the losses that were taken before in the same forward. The gate lets one gradient through, so a loss
        that is asked for again is a copy of the first, and autograd adds their gradients up before the gate.
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

    def logit_map(self) -> LogitMap | None:
        """What was done to the logits since the head, if it is of that form."""
        return map_of(self._view.steps)

    def touched(self) -> bool:
        """Whether somebody holds the logits as numbers, and may have written to them."""
        return self.source.touched

    def _notes_arithmetic(self, operands: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a product with a number, or a tanh, is only noted: on the way from the head to the loss it is.

        Not without gradients: that is what the forward of somebody's `torch.autograd.Function` looks like.
        """
        on_the_way = not self._view.sealed and not self.source.touched
        followed = torch.is_grad_enabled() or not self.requires_grad
        return on_the_way and followed and not kwargs and all(type(x) in (int, float) for x in operands)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
    """Between `_Take` and `_Carry`: the gradient that may pass."""

    announced: Tensor | None = None


class _Take(torch.autograd.Function):
    """The scalar under a `DeferredLogits`, as the loss."""

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
    """Identity on the scalar whose output is a `DeferredLogits`, and no view: FSDP2 warns of hooks on views."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor, gate: _Gate) -> Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor._make_subclass(DeferredLogits, scalar.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is not None and grad is not ctx.gate.announced:
            # DistributedDataParallel may route zeros through every output it was given.
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
    """copies: whether the step gives new memory, rather than the same tensor or a view of it."""
    view, memory = replace(logits._view, steps=(*logits._view.steps, step), **changes), logits._memory
    if copies:
        memory = _Memory(logits.source, memory, step, logits.requires_grad and torch.is_grad_enabled())
    return _carry(logits, logits.source, view, memory, logits._gate)


def _detach(logits: DeferredLogits) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        scalar = logits.detach()
    return _carry(scalar, logits.source, logits._view, logits._memory, logits._gate)


def _view_as(logits: DeferredLogits, other: Tensor) -> Tensor:
    # PyTorch calls x.view_as(x) on an input that an autograd.Function returns, as module backward hooks do.
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
    """Hooks that were put on the logits before anybody read them get the gradient of the numbers, if they have one."""
    hooks = logits._backward_hooks
    if not hooks or not real.requires_grad:
        return

    def run(key: int, grad: Tensor) -> Tensor | None:
        return hooks[key](grad) if key in hooks else None  # its handle may have removed it since

    for key in list(hooks):
        real.register_hook(partial(run, key))


def _no_gradient(logits: DeferredLogits) -> Any:
    raise PatchError(
        "the gradient of the logits does not exist where the loss is fused with lm_head. Call the model with "
        "skip_logits=False, or patch with linear_cross_entropy=False."
    )


def _describe(logits: DeferredLogits) -> str:
    shape, view = tuple(logits.source.shape), logits._view
    return f"DeferredLogits(shape={shape}, dtype={view.dtype}, device='{view.device}')"


def _getters(*names: str) -> set[Any]:
    """The functions that `__torch_function__` is given when these attributes of a tensor are read."""
    return {getattr(Tensor, name).__get__ for name in names}


# Answered by the scalar underneath: what autograd and the hooks of FSDP, DDP and DeepSpeed ask.
_NATIVE = _getters(
    "requires_grad", "grad_fn", "is_leaf", "_base", "_version", "_backward_hooks", "layout",
    "is_meta", "is_sparse", "is_nested", "is_quantized",
)  # fmt: skip
# Answered by an empty meta tensor of the logits' shape and dtype.
_ON_META = {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
    torch.numel, torch.is_floating_point, torch.is_complex,
} | _getters("shape", "dtype", "ndim", "nbytes", "itemsize")  # fmt: skip
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
# Noted down for later.
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
# Noted down on the way to the loss, as the method of that name.
_ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply), "mul"),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide), "div"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
}
