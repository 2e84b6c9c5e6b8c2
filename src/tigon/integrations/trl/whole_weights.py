"""The whole weights of a model that several processes divide, while one of them writes completions.

FSDP2 gathers each layer for each pass and frees it again, so a completion of 256 tokens gathers the model 256 times.
Its hooks also wait for streams that a CUDA graph cannot capture. A twin of the model has the same modules without these
hooks and without weights. Before the completions FSDP2 gathers all weights once, and the twin borrows them. Afterwards
every process holds its part again.

DeepSpeed needs no twin: TRL gathers ZeRO-3's weights around `generate` and removes the hooks meanwhile.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tigon.errors import PatchError, one_line
from tigon.integrations.trl.forward import TRL_FUNCTION
from tigon.models.patch import unwrap
from tigon.models.seams.base import is_dtensor, seams_of
from tigon.models.seams.rebind import owner_of
from tigon.models.spec import ADAPTER_FLAGS, LAYER_FLAGS, OPTIONAL_FLAGS

FLAGS = (*LAYER_FLAGS, *ADAPTER_FLAGS, *OPTIONAL_FLAGS)
WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
"""The names under which wrappers hold a module: activation checkpointing of Accelerate's FSDP2, and torch.compile."""


class BorrowingTwin:
    """A copy of a model's modules that holds weights only inside `borrowed`.

    Hooks of the modules run in the copy too. They keep the objects to which they are bound, such as a trainer.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: as it is before FSDP2 divides it.

        Raises:
            PatchError: FSDP2 has divided it already, or its modules cannot be copied.
        """
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise PatchError("FSDP2 has divided the model before the generator could see its modules")
        # deepcopy takes what the memo holds for an object: weights without memory, and the buffers themselves.
        memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for weight in model.parameters():
            memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        originals = {id(module) for module in model.modules()}
        for owner in _owners_of_hooks(model):
            if id(owner) not in originals:
                memo.setdefault(id(owner), owner)
        try:
            twin = copy.deepcopy(model, memo)
        except Exception as error:  # a module may hold anything
            raise PatchError(f"its modules cannot be copied ({one_line(error)})") from None
        _drop_trls_forward(unwrap(twin))
        _refuse_references(originals, twin)
        self.divided, self.twin = model, twin.eval()
        self._modules = {unwrapped(name): module for name, module in twin.named_modules(remove_duplicate=False)}
        self._without_memory = by_unwrapped_name(twin.named_parameters(remove_duplicate=False))

    @contextmanager
    def borrowed(self) -> Iterator[nn.Module]:
        """The twin with the whole weights, in the dtype in which FSDP2 computes. All processes have to enter.

        Raises:
            PatchError: FSDP2 does not gather a weight, or the model has other weights than the twin.
        """
        units = [module for module in self.divided.modules() if isinstance(module, FSDPModule)]
        try:
            for unit in units:
                unit.unshard()
            weights = by_unwrapped_name(self.divided.named_parameters(remove_duplicate=False))
            if other := weights.keys() ^ self._without_memory.keys():
                raise PatchError(f"weights were added or removed after decode_in_graphs, such as {min(other)}")
            self._set(weights)
            # The Trainer has moved the buffers.
            self._set(by_unwrapped_name(self.divided.named_buffers(remove_duplicate=False)))
            yield self.twin
        finally:
            try:
                self._set(self._without_memory)
            finally:
                for unit in units:
                    unit.reshard()

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                raise PatchError(f"FSDP2 does not gather {name}")
            module, _, leaf = name.rpartition(".")
            if module not in self._modules:
                raise PatchError(f"{module} was added after decode_in_graphs")
            setattr(self._modules[module], leaf, tensor)

    def patched_since(self) -> str | None:
        """A module whose ops `tigon.patch` has changed since the twin was made; None if there is none."""
        now, then = _ops_of(self.divided), _ops_of(self.twin)
        return next((name for name in now if now[name] != then.get(name, now[name])), None)

    def whole_bytes(self, dtype: torch.dtype | None) -> int:
        """The size of the whole weights. dtype: that in which FSDP2 gathers them; None: their own."""
        weights = {id(weight): weight for weight in self._without_memory.values()}.values()
        return sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in weights)


def unwrapped(name: str) -> str:
    """The name of a module or weight without those of the wrappers around modules."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def by_unwrapped_name(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {unwrapped(name): tensor for name, tensor in named}


def _ops_of(model: nn.Module) -> dict[str, list[Any]]:
    """The seams of each module by its name, without those of head and loss, which completions do not compute."""
    return {
        unwrapped(name): [seam for seam in seams_of(module) if seam.reported and seam.flag in FLAGS]
        for name, module in model.named_modules()
    }


def _owners_of_hooks(model: nn.Module) -> Iterator[object]:
    """The objects that hooks of a model's modules are bound to. deepcopy would copy them: a trainer with its data."""
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for hook in hooks.values():
                    yield from _bound_to(hook)


def _bound_to(hook: object) -> Iterator[object]:
    if isinstance(hook, MethodType):
        yield hook.__self__
    elif isinstance(hook, functools.partial):
        yield from (*_bound_to(hook.func), *hook.args, *hook.keywords.values())
    elif not isinstance(hook, FunctionType):  # an object that can be called
        yield hook


def _drop_trls_forward(twin: nn.Module) -> None:
    """Take TRL's forward away, which without `fused_lm_head` calls that of the class, on the divided model."""
    function = getattr(vars(twin).get("forward"), "__func__", None)
    if owner := owner_of(function, TRL_FUNCTION):
        original = _cells(owner).get("original_forward")
        called = getattr(original, "__func__", None)
        if any(vars(base).get("forward") is called for base in type(twin).__mro__):
            vars(twin).pop("forward")


def _refuse_references(originals: set[int], twin: nn.Module) -> None:
    """Raise PatchError if the forward of a module calls the model of which the twin is a copy."""
    for name, module in twin.named_modules():
        own = vars(module).get("forward")
        for value in _cells(getattr(own, "__func__", own)).values():
            owner = value.__self__ if isinstance(value, MethodType) else value
            if id(owner) in originals:
                raise PatchError(f"the forward of {name or 'the model'} was replaced by one that calls other modules")


def _cells(function: object) -> dict[str, Any]:
    """The variables of enclosing functions that a function uses, by name."""
    if not isinstance(function, FunctionType):
        return {}
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
    return found
