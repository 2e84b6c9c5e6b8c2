"""Fully recomputed decoder layers as CUDA graphs: two launches per layer instead of one for each kernel.

A layer has one graph for its forward pass, and one for its recomputation with the backward pass. A graph reads and
writes fixed addresses. All layers share the buffers of their input, and of the gradient of their output:

    forward     hidden buffer := input          replay          output := copy of the hidden buffer
    backward    hidden buffer := saved input    gradient buffer := dout    replay    dx := copy of the gradient buffer

A copy is left out if the buffer already holds the tensor, which is so between neighbouring layers. The weights'
gradients stay in the memory of the graphs. They become `.grad`, and a second micro-batch adds to a copy of them.

The layers' own forward is captured, so results equal those without graphs if the kernels are deterministic.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tigon.errors import RecipeError
from tigon.techniques.mechanisms.recompute import recomputed

KEY = "train.cuda_graphs"
MOST_SHAPES = 4
"""Batches with further shapes run without graphs, because each shape holds a set of gradients."""
WARM_UPS = 2
"""Passes before a capture, so that every kernel is compiled and every library has its handles."""
_NOT_READ = ("num_items_in_batch",)
"""Arguments that transformers passes through the layers to the loss."""

Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Records a function. Returns a function that runs the recorded work again, and the function's result."""


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory. Replay them in any order, but not at the same time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a data loader's, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


class LayerGraphs:
    """The graphs of a model's layers. Set `of(layer)` as the checkpointing function of a layer."""

    def __init__(self, capture: Capture | None = None) -> None:
        self.capture: Capture = CudaCapture() if capture is None else capture
        self.buffers: dict[Any, _Buffers] = {}
        self.layers: list[_GraphedLayer] = []

    def of(self, layer: torch.nn.Module) -> Callable[..., Any]:
        """A checkpointing function that runs `layer` as graphs."""
        graphed = _GraphedLayer(layer, self)
        self.layers.append(graphed)
        return graphed

    def release(self) -> None:
        """Free all graphs. The next step captures again."""
        self.buffers.clear()
        for layer in self.layers:
            layer.passes.clear()


class _Held:
    """A buffer, and which tensor it holds."""

    def __init__(self, like: Tensor) -> None:
        self.buffer = torch.empty_like(like, memory_format=torch.preserve_format, requires_grad=False)
        self._source: Callable[[], Tensor | None] = lambda: None
        self._versions = (-1, -1)

    def fill(self, tensor: Tensor) -> None:
        """Copy the tensor into the buffer, unless it is there already."""
        tensor = tensor.detach()
        source = self._source()
        same = source is not None and source.data_ptr() == tensor.data_ptr() and source.stride() == tensor.stride()
        if not same or (tensor._version, self.buffer._version) != self._versions:
            self.buffer.copy_(tensor)
            self.holds(tensor)

    def holds(self, tensor: Tensor) -> None:
        """Note that the buffer holds the tensor's values. The tensor is kept, so that its address stays its own."""
        tensor = tensor.detach()
        self._source, self._versions = (lambda: tensor), (tensor._version, self.buffer._version)

    def forget(self) -> None:
        """A graph writes to the buffer, which no version counts."""
        self._source = lambda: None


class _Buffers:
    """What the graphs of all layers read and write, for one shape of the arguments."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.arguments = [_Held(tensor) for tensor in tensors]
        """The first is the layer's input, and after the forward graph its output."""
        self.gradient = _Held(tensors[0])
        """The gradient of the output, and after the backward graph that of the input."""

    @property
    def hidden(self) -> _Held:
        return self.arguments[0]


class _Passes:
    """The two graphs of one layer for one shape."""

    def __init__(self, buffers: _Buffers, parameters: list[Tensor]) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.forward: Callable[[], None] = lambda: None
        self.backward: Callable[[], None] = lambda: None
        self.gradients: list[Tensor | None] = []

    def record(self, call: Callable[[list[Tensor]], Tensor], capture: Capture) -> None:
        """Capture both passes. call: runs the layer."""
        hidden, gradient = self.buffers.hidden.buffer, self.buffers.gradient.buffer
        others = [held.buffer for held in self.buffers.arguments[1:]]

        def forward() -> None:
            with torch.no_grad():
                hidden.copy_(call([hidden, *others]))

        def backward() -> list[Tensor | None]:
            with torch.enable_grad():
                x = hidden.detach().requires_grad_()
                y = call([x, *others])
                dx, *gradients = torch.autograd.grad(y, [x, *self.parameters], gradient, allow_unused=True)
            gradient.copy_(dx)
            return [*gradients]

        kept = hidden.clone()
        gradient.zero_()
        for _ in range(WARM_UPS):
            forward()
            backward()
            hidden.copy_(kept)
        self.forward, _ = capture(forward)
        self.backward, self.gradients = capture(backward)
        # A capture on the CPU, as in tests, runs the work.
        hidden.copy_(kept)

    def keep_gradients(self) -> None:
        """Copy each `.grad` that lies in the memory to which the backward graph writes."""
        for parameter, own in zip(self.parameters, self.gradients, strict=True):
            grad = parameter.grad
            if grad is not None and own is not None and grad.data_ptr() == own.data_ptr():
                parameter.grad = grad.clone()


class _GraphedLayer:
    """Stands for one layer's checkpointing function."""

    def __init__(self, layer: torch.nn.Module, graphs: LayerGraphs) -> None:
        self._layer = weakref.ref(layer)
        self._graphs = graphs
        self.passes: dict[Any, _Passes] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            function = functools.partial(function, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args)
        function, keywords = _without_keywords(function)
        leaves, form = pytree.tree_flatten((args, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        layer = self._layer()
        assert layer is not None
        _check(layer, args, leaves)
        key = _key(form, tensors, constants)
        if key not in self.passes:
            if len(self.passes) >= MOST_SHAPES:
                return recomputed(function, *args, **keywords)
            self.passes[key] = self._recorded(key, function, leaves, form, layer)
        parameters = self.passes[key].parameters
        return _Replay.apply(self.passes[key], len(tensors), *tensors, *parameters)

    def _recorded(
        self, key: Any, function: Callable[..., Any], leaves: list[Any], form: Any, layer: torch.nn.Module
    ) -> _Passes:  # fmt: skip
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place].detach() for place in places]
        buffers = self._graphs.buffers.setdefault(key, _Buffers(tensors))
        for held, tensor in zip(buffers.arguments, tensors, strict=True):
            held.forget()
            held.fill(tensor)
        passes = _Passes(buffers, [p for p in layer.parameters() if p.requires_grad])
        kind = tensors[0].device.type
        # Autocast's cache would keep casts that only the graph computes.
        autocast = functools.partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )

        def call(static: list[Tensor]) -> Tensor:
            filled = list(leaves)
            for place, tensor in zip(places, static, strict=True):
                filled[place] = tensor
            args, keywords = pytree.tree_unflatten(filled, form)
            with autocast():
                result = function(*args, **keywords)
            if not isinstance(result, Tensor) or result.shape != static[0].shape or result.dtype != static[0].dtype:
                raise RecipeError(
                    f"{KEY}: {type(layer).__name__} does not return one tensor like its input; set {KEY}: false"
                )
            return result

        try:
            passes.record(call, self._graphs.capture)
        except RuntimeError as error:
            raise RecipeError(
                f"{KEY}: {type(layer).__name__} cannot be captured as a CUDA graph "
                f"({str(error).partition(chr(10))[0]}); set {KEY}: false"
            ) from error
        return passes


def _without_keywords(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function without its bound keywords, and those that a layer reads. transformers binds a layer's arguments."""
    if not isinstance(function, functools.partial):
        return function, {}
    keywords = {name: value for name, value in function.keywords.items() if name not in _NOT_READ}
    return functools.partial(function.func, *function.args), keywords


def _check(layer: torch.nn.Module, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Raise RecipeError for arguments that a graph cannot read."""
    name = type(layer).__name__
    if not args or not isinstance(args[0], Tensor):
        raise RecipeError(f"{KEY}: {name} does not take its input first; set {KEY}: false")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf is not args[0] and leaf.requires_grad:
                raise RecipeError(f"{KEY}: {name} takes a second trained tensor; set {KEY}: false")
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str, torch.dtype)):
            raise RecipeError(
                f"{KEY}: {name} takes a {type(leaf).__name__}, which a CUDA graph cannot read anew; set {KEY}: false"
            )


def _key(form: Any, tensors: list[Tensor], constants: list[Any]) -> Any:
    kind = tensors[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_tensors = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
    return form, of_tensors, tuple(constants), autocast


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, n_tensors: int, *tensors: Tensor) -> Tensor:
        arguments, buffers = tensors[:n_tensors], passes.buffers
        for held, tensor in zip(buffers.arguments, arguments, strict=True):
            held.fill(tensor)
        buffers.hidden.forget()
        passes.forward()
        output = buffers.hidden.buffer.clone()
        buffers.hidden.holds(output)
        ctx.save_for_backward(*arguments)
        ctx.passes, ctx.n_tensors = passes, n_tensors
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        passes: _Passes = ctx.passes
        buffers = passes.buffers
        for held, tensor in zip(buffers.arguments, ctx.saved_tensors, strict=True):
            held.fill(tensor)
        buffers.gradient.fill(dout)
        buffers.gradient.forget()
        passes.keep_gradients()
        passes.backward()
        dx = buffers.gradient.buffer.clone()
        buffers.gradient.holds(dx)
        wanted = ctx.needs_input_grad[2 + ctx.n_tensors :]
        gradients = [
            None if gradient is None or not want else gradient.detach()
            for gradient, want in zip(passes.gradients, wanted, strict=True)
        ]
        first = dx if ctx.needs_input_grad[2] else None
        return None, None, first, *[None] * (ctx.n_tensors - 1), *gradients
