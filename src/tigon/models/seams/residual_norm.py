"""The seam for a decoder layer's residual additions and norms: one pass instead of two.

Decoder layers of most families contain three statements, which this seam replaces by one:

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)

The two statements below come before them. They add nothing in the forward pass. The backward pass adds the gradients of
`residual` and of the norm, which the norm's backward can do:

    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)

The class's own forward is parsed, these statements are replaced, and the result is compiled again. Everything else in
the layer stays the family's code, in every version of transformers. A layer without the three statements is left alone.
The addition at the end of a layer is left alone, because the norm that follows it belongs to the next layer, which
activation checkpointing runs separately.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tigon import ops
from tigon.models.seams.base import PatchedModule, Seam, is_dtensor
from tigon.models.seams.norm import NormSeam, finds_amax
from tigon.models.seams.rebind import chain, rebind
from tigon.ops.norms.rms_norm import rms_norm_and_input

_FUNCTION, _WITHOUT_ADDITION = "tigon_add_norm", "tigon_norm_and_input"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class ResidualNormSeam(Seam):
    """Residual addition and RMSNorm of a decoder layer. Its norm has to run tigon's op already."""

    op: ClassVar[str] = "add_rms_norm"
    flag: ClassVar[str] = "add_rms_norm"

    def candidate(self, module: nn.Module) -> bool:
        return norm_after_residual(type(module)) is not None

    def objection(self, module: nn.Module) -> str | None:
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        return {"forward": _fused_forward(base.forward)}


def norm_after_residual(cls: type[nn.Module]) -> str | None:
    """The attribute of the norm that follows a residual addition in the class's forward, or None."""
    found = _find(cls.forward)
    return None if found is None else found.norm


def add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + x), residual + x), in one pass unless something has to see the norm's own call."""
    if not _can_fuse(norm, x, residual):
        total = residual + x
        return norm(total), total
    seam = norm._tigon_seam
    weight, eps, fp8 = getattr(norm, "weight", None), seam._eps_of(norm), finds_amax(norm)
    return ops.add_rms_norm(x, residual, weight, eps, offset=seam.offset, casting=seam.casting, **fp8)


def norm_and_input(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x), x), whose gradients are added in one pass unless something has to see the norm's own call."""
    if not torch.is_grad_enabled() or not _can_fuse(norm, x, x):
        return norm(x), x
    seam = norm._tigon_seam
    weight, eps, fp8 = getattr(norm, "weight", None), seam._eps_of(norm), finds_amax(norm)
    return rms_norm_and_input(x, weight, eps, offset=seam.offset, casting=seam.casting, **fp8)


def _can_fuse(norm: Any, x: Tensor, residual: Tensor) -> bool:
    """Whether norm runs tigon's rms_norm, no hook waits for its call (ZeRO-3 gathers its weight in one), and the sum
    has x's dtype and shape."""
    return (
        isinstance(norm, PatchedModule)
        and isinstance(norm._tigon_seam, NormSeam)
        and "forward" not in vars(norm)
        and not any(vars(norm).get(hooks) for hooks in _HOOKS)
        and not torch_module._has_any_global_hook()
        and x.dtype == residual.dtype
        and x.shape == residual.shape
        and x.device == residual.device
        and not (is_dtensor(x) or is_dtensor(residual) or is_dtensor(getattr(norm, "weight", None)))
    )


# --- the layer's forward ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The three statements in a forward."""

    owner: FunctionType
    """The function of the forward's decorator chain that has them."""
    definition: ast.FunctionDef
    at: int
    hidden: str
    residual: str
    norm: str
    """The attribute of the norm."""
    before: tuple[int, str] | None
    """The place of the two statements before them, and the attribute of their norm, if there are such."""


@functools.cache
def _find(forward: Callable[..., Any]) -> _Found | None:
    for function in chain(forward) if isinstance(forward, FunctionType) else ():
        definition = None if function.__closure__ else _parsed(function)
        for at in range(len(definition.body) - 2) if definition else ():
            assert definition is not None
            names = _matched(definition.body[at : at + 3])
            if names is not None:
                return _Found(function, definition, at, *names, _before(definition, at, *names[:2]))
    return None


@functools.cache
def _fused_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward with the three statements replaced by one."""
    found = _find(forward)
    assert found is not None and isinstance(forward, FunctionType), "not a candidate"
    definition = copy.deepcopy(found.definition)
    results = f"{found.hidden}, {found.residual}"
    _replace(definition.body, found.at, 3, f"{results} = {_FUNCTION}(self.{found.norm}, {results})")
    if found.before is not None:
        at, norm = found.before
        _replace(definition.body, at, 2, f"{results} = {_WITHOUT_ADDITION}(self.{norm}, {found.hidden})")
    _without_annotations_and_defaults(definition)
    module = ast.fix_missing_locations(ast.Module([definition], []))
    defined: dict[str, Any] = {}
    exec(compile(module, found.owner.__code__.co_filename, "exec"), {}, defined)
    code = defined[definition.name].__code__
    return rebind(forward, found.owner, {_FUNCTION: add_norm, _WITHOUT_ADDITION: norm_and_input}, code)


def _replace(body: list[ast.stmt], at: int, count: int, call: str) -> None:
    (statement,) = ast.parse(call).body
    body[at : at + count] = [ast.copy_location(statement, body[at])]


def _before(definition: ast.FunctionDef, end: int, hidden: str, residual: str) -> tuple[int, str] | None:
    """The place of `residual = hidden; hidden = self.norm(hidden)` before statement `end`, and the norm's attribute."""
    if any(isinstance(node, ast.AugAssign) for node in ast.walk(definition)):
        return None  # it may write to the residual, which autograd forbids for a function's view of its input
    texts = [ast.unparse(statement) for statement in definition.body[:end]]
    for at in range(len(texts) - 1):
        norm = _norm_of(texts[at + 1], hidden)
        if texts[at] == f"{residual} = {hidden}" and norm is not None:
            return at, norm
    return None


def _norm_of(text: str, hidden: str) -> str | None:
    """The attribute in `hidden = self.attribute(hidden)` if it is a norm's."""
    start, end = f"{hidden} = self.", f"({hidden})"
    norm = text.removeprefix(start).removesuffix(end)
    is_norm = norm.isidentifier() and "norm" in norm.lower()  # OLMo-2's MLP follows the addition
    return norm if is_norm and text == f"{start}{norm}{end}" else None


def _without_annotations_and_defaults(definition: ast.FunctionDef) -> None:
    """They would be evaluated in the definition. The rebuilt function gets those of the original."""
    arguments, definition.returns = definition.args, None
    several = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for argument in several:
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [node and ast.Constant(None) for node in arguments.kw_defaults]


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    # A decorator would run again.
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    return definition


def _matched(statements: list[ast.stmt]) -> tuple[str, str, str] | None:
    """The names of hidden states, residual and norm if these are the three statements, else None."""
    texts = [ast.unparse(statement) for statement in statements]
    hidden, _, total = texts[0].partition(" = ")
    residual, _, copied = texts[1].partition(" = ")
    if not (hidden.isidentifier() and residual.isidentifier() and residual != hidden and copied == hidden):
        return None
    if total not in (f"{residual} + {hidden}", f"{hidden} + {residual}"):
        return None
    norm = _norm_of(texts[2], hidden)
    return None if norm is None else (hidden, residual, norm)
