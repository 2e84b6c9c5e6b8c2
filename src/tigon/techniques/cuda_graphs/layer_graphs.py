"""Decoder layers as CUDA graphs: two launches per layer instead of one for each kernel.

A layer has one graph for its forward pass and one for its backward pass, with the recomputation if the layer is
recomputed. A graph reads and writes fixed addresses. All layers share the buffer of the gradient of their output, and
recomputed layers share the buffer of their input:

    forward     hidden buffer := input          replay          output := copy of the hidden buffer
    backward    hidden buffer := saved input    gradient buffer := dout    replay    dx := copy of the gradient buffer

A copy is left out if the buffer already holds the tensor, which is so between neighbouring layers.

A layer that is not recomputed reads the output of the layer before it where that layer's graph writes it, and keeps it
there for its backward pass. A changed input, for example after a hook, is copied to that place. The first layer has a
buffer for its input, and so has a layer whose predecessor needs its own output in its backward pass.

The weights' gradients have buffers outside the graphs' memory, which become `.grad`. A second backward graph of each
layer adds to them, for the further micro-batches of a step. Linear layers with gradient accumulation fusion write to
these buffers in their products. All other gradients are copied or added when the layer's backward pass is over.

Graphs of one shape share the memory of their other tensors, so a graph may overwrite the memory of one that ran before.
Both graphs of layer i write to the memory of layer i + 1. Its forward pass comes later, and its backward pass is over
by then. A layer that is not recomputed keeps its activations there, so it has one forward pass at a time. A further
forward pass before the backward pass runs without graphs. A backward pass whose activations are overwritten, such as
the second one of `retain_graph`, is refused.

The layers' own forward is captured, so results equal those without graphs if the kernels are deterministic.

If a layer cannot be captured, all layers run without graphs, and a warning says why.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tigon.errors import RecipeError
from tigon.ops.accumulation_fusion import GradientBuffers, gradients_into
from tigon.techniques.checkpointing.recompute import recomputed, recomputed_in_a_graph

KEY = "train.cuda_graphs"
WARM_UPS = (False, False, True)
"""Passes before a capture, so that every kernel is compiled and every library has its handles: whether each adds to the
gradients. The first one makes the gradients' buffers."""
_NOT_READ = ("num_items_in_batch",)
"""Arguments that transformers passes through the layers to the loss."""


class _NotCaptured(Exception):
    """Why a layer cannot be captured, as the end of a sentence."""


class Capture(Protocol):
    """Records `work(prepare())`, of which `prepare` runs once, before. Returns a function that runs the recorded work
    again, and what `work` returned."""

    def __call__(self, work: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[Callable[[], None], Any]: ...


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, work: Callable[[Any], Any], prepare: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        # A backward pass runs on the stream of its forward pass, which has to be the stream of the capture.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            prepared = prepare()
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads, such as a data loader's, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work(prepared)
        return graph.replay, result


class LayerGraphs:
    """The graphs of a model's layers. Set `of(layer)` as the checkpointing function of a layer.

    recomputes: whether the layers are recomputed, or keep their activations. new_capture: makes the capture of a shape.
    """

    def __init__(self, *, recomputes: bool, new_capture: Callable[[], Capture] = CudaCapture) -> None:
        self.recomputes, self.new_capture = recomputes, new_capture
        self.buffers: dict[Any, _Buffers] = {}
        self.layers: list[_GraphedLayer] = []
        self.latest: _Passes | None = None
        """The layer and shape whose forward graph ran last, unless the layers are recomputed."""
        self.gave_up = False
        """Whether a layer could not be captured."""

    def of(self, layer: torch.nn.Module) -> Callable[..., Any]:
        """A checkpointing function that runs `layer` as graphs."""
        graphed = _GraphedLayer(layer, self)
        self.layers.append(graphed)
        return graphed

    def ran(self, passes: _Passes) -> None:
        """Note whose forward graph ran last. Earlier inputs and outputs are forgotten, so that their memory is free."""
        passes.input.forget()
        if self.latest is not None and self.latest is not passes:
            self.latest.output.forget()
        self.latest = passes

    def give_up(self, reason: str) -> None:
        """Run all layers without graphs from now on. Backward passes that wait keep their own graphs."""
        warnings.warn(f"{KEY}: {reason}; the layers run without CUDA graphs, with the same results.", stacklevel=4)
        self.gave_up = True
        self._forget()

    def _forget(self) -> None:
        self.buffers.clear()
        self.latest = None
        for layer in self.layers:
            layer.passes.clear()

    def release(self) -> None:
        """Free all graphs, and cuBLAS's workspaces. The next step captures again.

        Each stream of a capture has workspaces of 32 MiB. Other CUDA graphs may use a workspace: do not call it while
        they are in use.
        """
        for layer in self.layers:
            for passes in layer.passes.values():
                passes.free()
        self._forget()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()


class _Held:
    """A buffer, and which tensor it holds."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._held: Any = None
        self._storage: Any = None
        """That of the held tensor, so that no other tensor gets its address. A tensor would keep autograd's graph."""

    @classmethod
    def like(cls, tensor: Tensor) -> _Held:
        """A new buffer for tensors like this one."""
        return cls(torch.empty_like(tensor, memory_format=torch.preserve_format, requires_grad=False))

    def has(self, tensor: Tensor) -> bool:
        """Whether the buffer holds the tensor's values."""
        return bool(self._held == self._state(tensor))

    def fill(self, tensor: Tensor) -> None:
        """Copy the tensor into the buffer, unless it is there already."""
        if not self.has(tensor):
            self.buffer.copy_(tensor.detach())
            self.holds(tensor)

    def holds(self, tensor: Tensor) -> None:
        """Note that the buffer holds the tensor's values."""
        self._held, self._storage = self._state(tensor), tensor.untyped_storage()

    def forget(self) -> None:
        """Note that a graph writes to the buffer without a change of its version."""
        self._held = self._storage = None

    def _state(self, tensor: Tensor) -> Any:
        return tensor.data_ptr(), tensor._version, tensor.stride(), self.buffer._version


class _Buffers:
    """The tensors that the graphs of all layers read and write, for one shape of the arguments."""

    def __init__(self, tensors: list[Tensor], capture: Capture, *, recomputes: bool) -> None:
        self.capture = capture
        self.latest_layer = -1
        """The position of the last layer whose graphs share the memory of `capture`."""
        self.sharing: list[_Passes] = []
        """Those of layers that are not recomputed and share it."""
        self.hidden = _Held.like(tensors[0]) if recomputes else None
        """The input of a recomputed layer, and after the forward graph its output."""
        self.others = [_Held.like(tensor) for tensor in tensors[1:]]
        """The arguments after the input."""
        self.gradient = _Held.like(tensors[0])
        """The gradient of the output, and after the backward graph that of the input."""


class _Passes:
    """The two graphs of one layer for one shape."""

    def __init__(self, buffers: _Buffers, parameters: list[Tensor], input: _Held) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.input = input
        """The buffer that the graphs read."""
        self.output = input
        """The buffer that the forward graph writes. That of a recomputed layer is its input's."""
        self.later: list[_Passes] = []
        """Those whose activations or input the graphs overwrite."""
        self.is_followed = False
        """Whether another layer's input is this output."""
        self.keeps_output = True
        """Whether the output must stay as it is until the backward pass is over."""
        self.forward: Callable[[], None] = lambda: None
        self.backward: Callable[[], None] = lambda: None
        self.adding_backward: Callable[[], None] = lambda: None
        """Adds to `gradients`, where `backward` writes them."""
        self.gradients: list[Tensor | None] = []
        self.activations: Any = None
        """The output of a layer that is not recomputed; autograd's graph behind it holds its activations."""
        self.last: Callable[[], Any] = _no_pass
        """The pass to which the activations belong, if it is still in use."""
        self.waits = False
        """Whether that pass has not run its backward."""

    def free(self) -> None:
        """Drop the graphs and activations. Passes and their buffers name each other, so that the garbage collector
        would free them some time later."""
        self.buffers.sharing.clear()
        self.later.clear()
        self.forward = self.backward = self.adding_backward = lambda: None
        self.activations = None

    def record(self, call: Callable[[list[Tensor]], Tensor], capture: Capture, *, recomputes: bool) -> None:
        """Capture both passes. call: runs the layer."""
        gradient = self.buffers.gradient.buffer
        others = [held.buffer for held in self.buffers.others]

        def leaf(x: Tensor) -> Tensor:
            return x.detach().requires_grad_()

        def forward(_: object) -> Any:
            if recomputes:
                with torch.no_grad():
                    self.input.buffer.copy_(call([self.input.buffer, *others]))
                return None
            x = leaf(self.input.buffer)
            with torch.enable_grad(), gradients_into(GradientBuffers()):
                return [x, call([x, *others])]

        def to_recompute() -> Any:
            x = leaf(self.input.buffer)
            with torch.enable_grad(), gradients_into(GradientBuffers()):
                return [x, recomputed_in_a_graph(lambda *static: call([*static]), x, *others)]

        def backward(kept: Any, *, adds: bool = False) -> None:
            x, y = kept
            inputs = [x, *self.parameters]
            buffers = GradientBuffers(zip(self.parameters, self.gradients, strict=False), adds=adds)
            with gradients_into(buffers):
                dx, *gradients = torch.autograd.grad(
                    y, inputs, gradient, allow_unused=True, retain_graph=not recomputes
                )
            gradient.copy_(dx)
            if not self.gradients:
                # Not in the memory of the graphs, to which the other layers' graphs write.
                self.gradients = [None if g is None else torch.empty_like(g) for g in gradients]
            added, copied = _Pairs(), _Pairs()
            for parameter, own, fresh in zip(self.parameters, self.gradients, gradients, strict=True):
                if own is not None and fresh is not None:
                    (added if adds or buffers.holds(parameter) else copied).put(own, fresh)
            if added.own:
                torch._foreach_add_(added.own, added.fresh)
            if copied.own:
                torch._foreach_copy_(copied.own, copied.fresh)

        start = self.input.buffer.clone() if recomputes else None

        def restart() -> None:
            if start is not None:
                self.input.buffer.copy_(start)

        gradient.zero_()
        for adds in WARM_UPS:
            kept = forward(None)
            restart()
            backward(to_recompute() if recomputes else kept, adds=adds)
        del kept
        self.forward, self.activations = capture(forward, lambda: None)
        restart()
        prepare = to_recompute if recomputes else lambda: self.activations
        self.backward, _ = capture(backward, prepare)
        self.adding_backward, _ = capture(functools.partial(backward, adds=True), prepare)
        if not recomputes:
            self.output = _Held(self.activations[1].detach())
            self.keeps_output = not _is_unshared(self.activations[1], self.output.buffer)

    def fill(self, arguments: Sequence[Tensor]) -> None:
        """Copy the arguments that the buffers lack."""
        for held, tensor in zip((self.input, *self.buffers.others), arguments, strict=True):
            held.fill(tensor)

    def may_be_followed_by(self, argument: Tensor) -> bool:
        """Whether a layer with this input may take the output's buffer for it."""
        return not self.is_followed and not self.keeps_output and self.output.has(argument)

    def run_forward(self) -> Tensor:
        """Run the forward graph. Returns a copy of the output."""
        self.output.forget()
        self.forward()
        if self.activations is not None:
            self.output.buffer = self.activations[1].detach()  # a graph's own stays where it is
        output = self.output.buffer.clone()
        self.output.holds(output)
        return output

    def begins(self) -> Any:
        """Note a new forward pass, and return what stands for it."""
        token = _Token()
        self.last, self.waits = weakref.ref(token), True
        self.overwrite()
        return token

    def overwrite(self) -> None:
        """Note that the graphs have overwritten the activations of the later layers."""
        for one in self.later:
            one.last, one.waits = _no_pass, False

    def is_free(self) -> bool:
        """Whether no earlier forward pass needs what the forward graph overwrites."""
        return not any(one.waits and one.last() is not None for one in (self, *self.later))

    def adds(self, nodes: list[Any]) -> bool:
        """Whether the running backward pass may add to all gradients in place.

        It may if each is `.grad` already, no hook wants to see its share, and the pass accumulates. nodes: autograd's
        nodes that accumulate into the parameters.
        """
        for parameter, own, node in zip(self.parameters, self.gradients, nodes, strict=True):
            if own is None:
                continue
            grad = parameter.grad
            hooks: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            if grad is None or grad.data_ptr() != own.data_ptr() or any(hooks) or not _accumulates(node):
                return False
        return True

    def keep_gradients(self) -> None:
        """Copy each `.grad` that lies in the memory to which the backward graph writes."""
        for parameter, own in zip(self.parameters, self.gradients, strict=True):
            grad = parameter.grad
            if grad is not None and own is not None and grad.data_ptr() == own.data_ptr():
                parameter.grad = grad.clone()


def _is_unshared(output: Tensor, alias: Tensor) -> bool:
    """Whether these two tensors alone use the memory of the output. An output that its backward pass needs is saved."""
    unshared = torch.empty(0)
    shares = [unshared, unshared.detach()]
    of_two, of_output = (torch._C._storage_Use_Count(x.untyped_storage()._cdata) for x in (shares[0], output))
    return of_output == of_two and alias.data_ptr() == output.data_ptr()


def _accumulates(node: Any) -> bool:
    """Whether the running backward pass adds to the `.grad` of a parameter. node: autograd's node of the parameter."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which must leave `.grad` alone
        return False


class _Pairs:
    """Gradients that one launch copies or adds to their buffers."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.fresh: list[Tensor] = []

    def put(self, own: Tensor, fresh: Tensor) -> None:
        self.own.append(own)
        self.fresh.append(fresh)


def _no_pass() -> Any:
    return None


class _Token:
    """Stands for one forward pass, while its backward may still run."""

    __slots__ = ("__weakref__",)


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
        if self._graphs.gave_up or _records_outputs():
            return self._without_graphs(function, args, {})
        function, keywords = _without_keywords(function)
        leaves, form = pytree.tree_flatten((args, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        layer = self._layer()
        assert layer is not None
        try:
            _check(layer, args, leaves)
            key = _key(form, tensors, constants)
            if key not in self.passes:
                if self.passes:  # each shape would hold a set of gradients, and a plan counts one
                    return self._without_graphs(function, args, keywords)
                self.passes[key] = self._recorded(key, function, leaves, form, layer)
        except _NotCaptured as error:
            self._graphs.give_up(str(error))
            return self._without_graphs(function, args, keywords)
        passes = self.passes[key]
        if not self._graphs.recomputes and not passes.is_free():
            return self._without_graphs(function, args, keywords)
        return _Replay.apply(passes, self._graphs, len(tensors), *tensors, *passes.parameters)

    def _without_graphs(self, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._graphs.recomputes:
            return recomputed(function, *args, **keywords)
        return function(*args, **keywords)

    def _recorded(
        self, key: Any, function: Callable[..., Any], leaves: list[Any], form: Any, layer: torch.nn.Module
    ) -> _Passes:
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place].detach() for place in places]
        buffers = self._graphs.buffers.get(key)
        recomputes, latest = self._graphs.recomputes, self._graphs.latest
        if buffers is None:
            capture = self._graphs.new_capture()
            buffers = self._graphs.buffers[key] = _Buffers(tensors, capture, recomputes=recomputes)
        before = latest if latest is not None and latest.may_be_followed_by(tensors[0]) else None
        input = (buffers.hidden or _Held.like(tensors[0])) if before is None else before.output
        passes = _Passes(buffers, [p for p in layer.parameters() if p.requires_grad], input)
        passes.fill(tensors)
        if any(parameter._backward_hooks for parameter in passes.parameters):
            raise _NotCaptured(f"a weight of {type(layer).__name__} has a hook, which the graph would contain")
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kind = tensors[0].device.type
        # Autocast's cache would keep casts that only the graph computes.
        autocast = functools.partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )

        def call(static: list[Tensor]) -> Tensor:
            filled = list(constants)
            for place, tensor in zip(places, static, strict=True):
                filled[place] = tensor
            args, keywords = pytree.tree_unflatten(filled, form)
            with autocast():
                result = function(*args, **keywords)
            if not isinstance(result, Tensor) or result.shape != static[0].shape or result.dtype != static[0].dtype:
                raise _NotCaptured(f"{type(layer).__name__} does not return one tensor like its input")
            return result

        try:
            passes.record(call, self._capture(buffers, passes), recomputes=recomputes)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise _NotCaptured(f"{type(layer).__name__} cannot be captured ({first_line})") from error
        if before is not None:
            before.is_followed = True
            if passes not in before.later:
                before.later.append(passes)
        return passes

    def _capture(self, buffers: _Buffers, passes: _Passes) -> Capture:
        """The capture whose memory the layer's graphs may use.

        A graph overwrites memory that was free when it was captured. Activations of later layers lie there, which is
        right as long as their forward pass comes after it, and their backward pass before it. If this layer was skipped
        when the later ones were captured, its activations must not lie there.
        """
        if self._graphs.recomputes:
            return buffers.capture
        position = self._graphs.layers.index(self)
        if position < buffers.latest_layer:
            return self._graphs.new_capture()
        for earlier in buffers.sharing:
            earlier.later.append(passes)
        buffers.sharing.append(passes)
        buffers.latest_layer = position
        return buffers.capture


def _records_outputs() -> bool:
    """Whether transformers records outputs of modules in this forward pass, such as hidden states or attentions.

    It does so in hooks of modules inside the layer, or of the layer itself before 5.23. A replay does not run them.
    """
    module: Any = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return collector is not None and bool(collector.get())


def _without_keywords(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function without its bound keywords, and those that a layer reads. transformers binds a layer's arguments."""
    if not isinstance(function, functools.partial):
        return function, {}
    keywords = {name: value for name, value in function.keywords.items() if name not in _NOT_READ}
    return functools.partial(function.func, *function.args), keywords


def _check(layer: torch.nn.Module, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Raise _NotCaptured for arguments that a graph cannot read."""
    name = type(layer).__name__
    if not args or not isinstance(args[0], Tensor):
        raise _NotCaptured(f"{name} does not take its input first")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf is not args[0] and leaf.requires_grad:
                raise _NotCaptured(f"{name} takes a second trained tensor")
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str, torch.dtype)):
            raise _NotCaptured(f"{name} takes a {type(leaf).__name__}, which a CUDA graph cannot read anew")


def _key(form: Any, tensors: list[Tensor], constants: list[Any]) -> Any:
    kind = tensors[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    of_tensors = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
    return form, of_tensors, tuple(constants), autocast


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: _Passes, graphs: LayerGraphs, n_tensors: int, *tensors: Tensor) -> Tensor:
        arguments = tensors[:n_tensors]
        passes.fill(arguments)
        output = passes.run_forward()
        if graphs.recomputes:
            ctx.save_for_backward(*arguments)
        else:
            graphs.ran(passes)
        ctx.token = None if graphs.recomputes else passes.begins()
        ctx.passes, ctx.n_tensors = passes, n_tensors
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        passes: _Passes = ctx.passes
        buffers = passes.buffers
        if ctx.token is None:
            passes.fill(ctx.saved_tensors)
        elif ctx.token is not passes.last():
            raise RecipeError(
                f"{KEY}: a backward pass needs activations that another pass has overwritten; run the backward pass "
                f"of all layers once, before the next forward pass, or set {KEY}: false"
            )
        passes.waits = False
        passes.overwrite()
        buffers.gradient.fill(dout)
        buffers.gradient.forget()
        n_parameters = len(passes.parameters)
        nodes = [node for node, _ in ctx.next_functions[len(ctx.next_functions) - n_parameters :]]
        adds = n_parameters > 0 and passes.adds(nodes)
        if adds:
            passes.adding_backward()
        else:
            passes.keep_gradients()
            passes.backward()
        dx = buffers.gradient.buffer.clone()
        buffers.gradient.holds(dx)
        wanted = ctx.needs_input_grad[3 + ctx.n_tensors :]
        # torch.autograd.grad gives the tensors to its caller, but the next backward pass overwrites the buffers.
        gradients = [
            None
            if adds or gradient is None or not want
            else gradient.detach()
            if _accumulates(node)
            else gradient.clone()
            for gradient, want, node in zip(passes.gradients, wanted, nodes, strict=True)
        ]
        first = dx if ctx.needs_input_grad[3] else None
        return None, None, None, first, *[None] * (ctx.n_tensors - 1), *gradients
