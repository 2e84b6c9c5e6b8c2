"""Recomputes a function in the backward pass, like `torch.utils.checkpoint(use_reentrant=False)`, in less host time.

The tensors that the function's ops save are not kept. When the backward pass needs the first of them, the function runs
again, until all of them are saved again. PyTorch's version spends as long on bookkeeping as small layers do on kernel
launches. It copies the states of the random number generators, searches all arguments for the kind of device, and calls
a wrapper of the compiler for each tensor. Here the generators are touched only if one has advanced since the forward
pass, and a tensor costs one list entry.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from tigon.ops import recomputation

MakeFrame = Callable[[Callable[..., Any], tuple[Any, ...], torch.device], "Frame"]


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)` and recomputes its saved tensors when the backward pass needs them.

    Gradients, hooks and `retain_graph` behave as with `torch.utils.checkpoint`. That function is called instead if the
    tensors are on several devices or on another kind of device, have another class, or if a dispatch mode is active.
    Tensors among `args` are saved as an op saves its inputs. Tensors that the function reaches in other ways are held.
    If a node reads its saved tensors twice, the function runs once more; PyTorch raises an error. Not for `torch.func`.

    Raises:
        torch.utils.checkpoint.CheckpointError: In the backward pass, if the function saves different tensors the second
            time.
    """
    return run_recomputed(_plain_frame, function, args, kwargs)


def run_recomputed(
    frame: MakeFrame, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As `recomputed(function, *args, **kwargs)`, with a frame of another kind."""
    if kwargs:
        function = functools.partial(function, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args)
    device = _device_of(args, function.keywords if isinstance(function, functools.partial) else {})
    if device is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return checkpoint(function, *args, use_reentrant=False)
    return run_frame(frame(function, args, device), args)


def recomputed_in_a_graph(function: Callable[..., Any], x: Tensor, *others: Tensor) -> Any:
    """As `recomputed(function, x, *others)`, for a backward pass that a CUDA graph captures and repeats.

    The repeated recomputation reads other values than this run, so no results of this run are kept for it. No random
    numbers may be drawn.
    """
    return run_frame(Frame(function, (x, *others), x.device, None), (x, *others))


def run_frame(frame: Frame, args: tuple[Any, ...]) -> Any:
    """The first run of a frame's function."""
    with recomputation.running(frame.first_run()), saved_tensors_hooks(frame.pack, frame.unpack):
        return frame.function(*args)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Returns the one CUDA device of the tensors, or the CPU if all are there.

    Returns None if there are several CUDA devices, another kind of device, or a tensor subclass.
    """
    device = torch.device("cpu")
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type not in ("cpu", "cuda"):
                return None
            if tensor.device != device and tensor.device.type == "cuda":
                if device.type == "cuda":
                    return None
                device = tensor.device
    return device


class Enough(Exception):  # ends the recomputation when all tensors are saved
    pass


class SavedInputs(torch.autograd.Function):
    """A node that saves tensors before a function computes, so that outer hooks (offloading, a recomputation) see them
    like any saved tensor. `anchor` gives it a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


class Frame:
    """One call of the function: its inputs, and the tensors that its ops saved."""

    __slots__ = ("again", "args", "autocast", "function", "inputs", "kept", "recomputed", "rng", "saved", "task")

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], device: torch.device, kept: list[Tensor] | None
    ) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        self.function = function
        self.args = [None if isinstance(a, Tensor) else a for a in args]
        self.again = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.inputs = self.hold(tensors)
        self.autocast = {kind: _autocast(kind) for kind in {device.type, "cpu"}}
        self.rng = self.generators(device)
        self.kept = kept
        """Small results of ops, which the recomputation does not compute again; None: it does."""
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        """Shape and dtype of each tensor that an op saved, in order."""
        self.recomputed: list[Any] = []
        """The recomputed tensors, until they are used."""
        self.task = -1
        """The backward pass in which `recomputed` was filled."""

    def generators(self, device: torch.device) -> Any:
        return Generators(device)

    def hold(self, tensors: list[Tensor]) -> Any:
        """Keep the function's inputs for `held`."""
        # Holds the output, not the node: until PyTorch 2.11 a Python node loses its saved tensors with its last output.
        return SavedInputs.apply(torch.empty(0, requires_grad=True), *tensors)

    def held(self) -> Sequence[Tensor]:
        return self.inputs.grad_fn.saved_tensors  # type: ignore[no-any-return]

    def first_run(self) -> recomputation.Run:
        return recomputation.first_run(self.kept)

    def second_run(self) -> recomputation.Run:
        return recomputation.second_run(self.kept)

    def pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def unpack(self, number: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if self.task != task or task == -1 or self.recomputed[number] is None:
            self.recompute()
            self.task = task
        entry, self.recomputed[number] = self.recomputed[number], None
        assert entry is not None
        return self.take(entry)

    def put(self, tensor: Tensor) -> Any:
        """A recomputed tensor, until `take`."""
        return tensor.detach()

    def take(self, entry: Any) -> Tensor:
        return entry  # type: ignore[no-any-return]

    def look(self, entry: Any) -> Tensor:
        """As `take`, and the entry stays."""
        return entry  # type: ignore[no-any-return]

    def recompute(self) -> None:
        args = list(self.args)
        for i, tensor in zip(self.again, self.held(), strict=True):
            args[i] = tensor
            del tensor  # only `args` holds it, so that the function's end frees it
        got: list[tuple[torch.Size, torch.dtype]] = []
        wanted = len(self.saved)
        self.recomputed = recomputed = []

        def keep(tensor: Tensor) -> int:
            got.append((tensor.shape, tensor.dtype))
            recomputed.append(self.put(tensor))
            if len(got) == wanted:
                raise Enough
            return len(got) - 1

        def look(number: int) -> Tensor:  # for a backward pass inside the function
            return self.look(recomputed[number])

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Enough))
            for kind, state in self.autocast.items():
                if _autocast(kind) != state:
                    enabled, dtype, cached = state
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if not _captures() and self.rng.have_moved():
                stack.enter_context(self.rng.as_before())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, look))
            run = self.second_run()
            run.unsaved = lambda: wanted - len(got)
            stack.enter_context(recomputation.running(run))
            self.function(*args)
        if got != self.saved:
            raise CheckpointError(
                f"{self.function} saved {_summary(self.saved)} in the forward pass and {_summary(got)} when it was "
                "recomputed; it must save the same tensors both times"
            )


def _plain_frame(function: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> Frame:
    return Frame(function, args, device, [])


def _summary(saved: list[tuple[torch.Size, torch.dtype]]) -> str:
    return f"{len(saved)} tensors ({', '.join(f'{tuple(shape)} {dtype}' for shape, dtype in saved[:4])}, ...)"


def _captures() -> bool:
    """Whether a CUDA graph is being captured, in which generators cannot be asked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


class Generators:
    """The present states of the random number generators: the host's, and the device's if it is a GPU."""

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
