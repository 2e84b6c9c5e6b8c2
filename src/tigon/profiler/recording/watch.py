"""Hooks that note in the journal the phase and layer of a running model, and the category of its tensors.

Phases are those of the planner. `loss` lasts from the call of `lm_head` until the gradient of the last layer's output
is computed. It includes forward and backward of the head and the loss. The hooks keep no reference to tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.profiler.recording.journal import Journal


class PhaseHooks:
    """Context manager that installs the hooks around the recorded steps."""

    def __init__(
        self,
        journal: Journal,
        model: nn.Module,
        layers: Sequence[nn.Module],
        *,
        checkpointed: Callable[[nn.Module], bool],
        name_nodes: bool,
    ) -> None:
        """layers: the decoder layers. checkpointed: whether a layer keeps only its input (activation checkpointing).

        name_nodes: note every autograd node in the journal, for recorders that do not know the nodes.
        """
        self._journal, self._model, self._layers = journal, model, layers
        self._checkpointed, self._name_nodes = checkpointed, name_nodes
        self._phase_before: str | None = None
        """The phase to return to after a forward pass without gradients."""
        self._handles: list[Any] = []
        self._bracketed: list[tuple[nn.Module, str, Any]] = []

    def __enter__(self) -> PhaseHooks:
        add, model = self._handles.append, self._model
        self._weights_are_there(model)
        add(model.register_forward_pre_hook(self._enter_model))
        add(model.register_forward_hook(self._leave_model))
        for number, layer in enumerate(self._layers):
            self._bracket_recomputation(number, layer)
            add(layer.register_forward_pre_hook(functools.partial(self._enter_layer, number), with_kwargs=True))
            # always called: a recomputation that stops early does so by raising
            add(layer.register_forward_hook(functools.partial(self._leave_layer, number), always_call=True))
        head = _head(model)
        if head is not None:
            add(head.register_forward_pre_hook(self._enter_head))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch_frozen(self, model: nn.Module) -> None:
        """Note the forward passes of a model that is not trained, such as a reference."""
        self._journal.tag(model.parameters(), "weights")
        self._handles.append(model.register_forward_pre_hook(self._enter_model))
        self._handles.append(model.register_forward_hook(self._leave_model))

    def close(self) -> None:
        """Remove the hooks. Hooks on tensors disappear with their graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer, name, function in self._bracketed:
            setattr(layer, name, function)
        self._bracketed.clear()

    # --- calls from the training loop --------------------------------------------------------------------------------

    def begin_step(self, model: nn.Module) -> None:
        """model: the training loop's model. Its weights may have another form than after loading (ZeRO-3 shards)."""
        self._weights_are_there(model)
        self._journal.step += 1
        self._journal.enter("forward")

    def end_micro_batch(self) -> None:
        self._gradients_are_there()
        self._journal.enter("forward")

    def begin_optimizer(self) -> None:
        self._gradients_are_there()
        self._journal.enter("optimizer")

    def end_optimizer(self, optimizer: object) -> None:
        for state in getattr(optimizer, "state", {}).values():
            if isinstance(state, dict):
                self._journal.tag((value for value in state.values() if isinstance(value, Tensor)), "optimizer")

    def _weights_are_there(self, model: nn.Module) -> None:
        self._journal.tag(model.parameters(), "weights")
        self._journal.tag((p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")), "weights")
        self._journal.tag(model.buffers(), "weights")

    def _gradients_are_there(self) -> None:
        self._journal.tag((p.grad for p in self._model.parameters() if p.grad is not None), "gradients")

    # --- hooks -------------------------------------------------------------------------------------------------------

    def _enter_model(self, *_: object) -> None:
        if _in_backward():
            return
        if not torch.is_grad_enabled():
            self._phase_before = self._journal.phase
        self._journal.enter("forward")

    def _leave_model(self, model: nn.Module, args: object, output: object) -> None:
        if self._phase_before is not None and not _in_backward():
            self._journal.enter(self._phase_before)
            self._phase_before = None
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            return
        if _head(model) is None:
            self._journal.enter("backward")
        if self._name_nodes:
            _hook_nodes(loss.grad_fn, self._journal)

    def _enter_head(self, *_: object) -> None:
        if torch.is_grad_enabled() and not _in_backward():
            self._journal.enter("loss")

    def _bracket_recomputation(self, number: int, layer: nn.Module) -> None:
        """Wrap the function that the layer passes to its checkpointing function.

        From transformers 5.23 on, hooks on a layer do not run again in a recomputation.
        """

        def bracketed(function: Callable[..., Any], *args: Any) -> Any:
            if not _in_backward():
                return function(*args)
            self._journal.enter("backward", number, recomputed=True)
            try:  # an early stop of the recomputation raises
                return function(*args)
            finally:
                self._journal.enter("backward", number)

        def wrapped(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return checkpoint(functools.partial(bracketed, function), *args, **options)

        for name in [name for name in vars(layer) if name.endswith("checkpointing_func")]:
            checkpoint = getattr(layer, name)
            self._bracketed.append((layer, name, checkpoint))
            setattr(layer, name, functools.partial(wrapped, checkpoint))

    def _enter_layer(self, number: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():
            self._journal.enter("backward", number, recomputed=True)
            return
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            if self._checkpointed(layer) and torch.is_grad_enabled():
                self._journal.tag((hidden,), "checkpoints")
            if number == 0 and hidden.requires_grad:
                hidden.register_hook(lambda _: self._journal.enter("backward"))
        self._journal.enter("forward", number)

    def _leave_layer(self, number: int, layer: nn.Module, args: object, output: object) -> None:
        if _in_backward():
            self._journal.enter("backward", number)
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self._journal.enter("backward", number))
        self._journal.enter("forward")


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module):
        head = getattr(model, "score", None)  # of a model for sequence classification
    return head if isinstance(head, nn.Module) else None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _hook_nodes(root: Any, journal: Journal) -> None:
    """Note the name of each node of the graph in the journal before the node is computed.

    AccumulateGrad nodes get no hook. A hook would hold a reference to the gradient, and autograd would then copy it
    into `.grad` instead of moving it.
    """
    seen, todo = {root}, [root]
    while todo:
        node = todo.pop()
        name = node.name()
        if "AccumulateGrad" not in name:
            node.register_prehook(functools.partial(_say, journal, name))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _say(journal: Journal, name: str, gradients: object) -> None:
    journal.node(name)
