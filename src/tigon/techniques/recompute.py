"""Recomputing a function in the backward pass, as `torch.utils.checkpoint(use_reentrant=False)`, with less host time.

What the function's operations save is not kept; the first of them to be asked for runs the function again, which ends
as soon as all of it has been saved again. PyTorch's own spends as long on bookkeeping as small layers on launching
their kernels: it copies the states of the random number generators out and in, asks for the kind of device in a walk
over all arguments, and goes through a wrapper of the compiler's for each tensor. Here the generators are touched only
where one has moved since, and a tensor costs a list entry.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose saved tensors are made again when the backward pass asks for them.

    Gradients, hooks and a graph that is kept behave as with `torch.utils.checkpoint`, which serves where tensors are of
    several or other devices or of other classes, or a mode watches the operators. Tensors among `args` are saved as an
    operator saves its inputs; those that the function reaches in other ways are held. A node that reads its saved
    tensors twice costs another run of the function, where PyTorch refuses. Not for `torch.func`.

    Raises:
        torch.utils.checkpoint.CheckpointError: in the backward pass, if the function saves other tensors the second
            time.
    """
    if kwargs:
        function = functools.partial(function, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args)
    device = _device_of(args, function.keywords if isinstance(function, functools.partial) else {})
    if device is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return checkpoint(function, *args, use_reentrant=False)
    frame = _Frame(function, args, device)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return function(*args)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The one device of the tensors given, but for those on the CPU; None where there are several, or others than
    CUDA's, or a tensor's class is not PyTorch's own."""
    found = torch.device("cpu")
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "cuda"):
                return None
            if tensor.device != found and tensor.device.type == "cuda":
                if found.type == "cuda":
                    return None
                found = tensor.device
    return found


class _Enough(Exception):  # no error: all that is wanted has been saved
    pass


class _Inputs(torch.autograd.Function):
    """A node that saves what it is given, so that hooks around the whole (offloading) see it as any saved tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


class _Frame:
    """One call of the function: how to repeat it, and what its operations saved."""

    __slots__ = ("again", "args", "autocast", "found", "function", "inputs", "rng", "saved", "task")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        self.function = function
        self.args = [None if isinstance(a, Tensor) else a for a in args]
        self.again = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        # the output, not the node: until PyTorch 2.11 a node of Python's loses what it saved with its last output
        self.inputs = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors)
        self.autocast = {kind: _autocast(kind) for kind in {device.type, "cpu"}}
        self.rng = _Generators(device)
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        """Of each tensor that an operation saved, in order."""
        self.found: list[Tensor | None] = []
        """The tensors themselves, from the recomputation to their use."""
        self.task = -1
        """The backward pass that `found` is of."""

    def pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def unpack(self, number: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if self.task != task or task == -1 or self.found[number] is None:
            self._recompute()
            self.task = task
        tensor, self.found[number] = self.found[number], None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        args, tensors = list(self.args), self.inputs.grad_fn.saved_tensors
        for i, tensor in zip(self.again, tensors, strict=True):
            args[i] = tensor
        found: list[Tensor | None] = []
        wanted = len(self.saved)

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor.detach())
            if len(found) == wanted:
                raise _Enough
            return tensor.detach()  # for a backward pass inside the function

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(_Enough))
            for kind, state in self.autocast.items():
                if _autocast(kind) != state:
                    enabled, dtype, cached = state
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if self.rng.have_moved():
                stack.enter_context(self.rng.as_before())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            self.function(*args)
        got = [(tensor.shape, tensor.dtype) for tensor in found if tensor is not None]
        if got != self.saved:
            raise CheckpointError(
                f"{self.function} saved {_told(self.saved)} in the forward pass and {_told(got)} when it was computed "
                "again; it must do the same twice"
            )
        self.found = found


def _told(saved: list[tuple[torch.Size, torch.dtype]]) -> str:
    return f"{len(saved)} tensors ({', '.join(f'{tuple(shape)} {dtype}' for shape, dtype in saved[:4])}, ...)"


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


class _Generators:
    """Where the random number generators stood: the host's, and the device's if it is a GPU."""

    __slots__ = ("generator", "host", "place")

    def __init__(self, device: torch.device) -> None:
        self.host = torch.default_generator.get_state()
        self.generator = None
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]
        self.place = self._place()

    def _place(self) -> tuple[int, int] | None:
        return None if self.generator is None else (self.generator.initial_seed(), self.generator.get_offset())

    def have_moved(self) -> bool:
        return self._place() != self.place or not torch.equal(torch.default_generator.get_state(), self.host)

    @contextlib.contextmanager
    def as_before(self) -> Any:
        host, place = torch.default_generator.get_state(), self._place()
        self._move(self.host, self.place)
        try:
            yield
        finally:
            self._move(host, place)

    def _move(self, host: Tensor, place: tuple[int, int] | None) -> None:
        torch.default_generator.set_state(host)
        if self.generator is not None and place is not None:
            self.generator.manual_seed(place[0])
            self.generator.set_offset(place[1])
