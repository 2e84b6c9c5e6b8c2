"""A copy of a function that sees other globals.

Hugging Face's attention calls `apply_rotary_pos_emb` as a global of its modeling module. Assigning to that global would
change every model of the family in the process. A copy of the forward's source would be outdated with each release. The
function object is rebuilt instead, with the same code object, defaults and closure, but a new globals dict in which
this one name is tigon's. Decorated forwards hold the inner function in a closure cell, so the chain is rebuilt cell by
cell.

The new dict holds the names that the code mentions, with their current values. Later assignments to these globals of
the modeling module are not seen, so make them before patching. A dict subclass with live lookup would see them in plain
Python, but Dynamo guards globals as items of an exact dict. The dict deliberately lacks `__name__`: with it, Dynamo
resolves every global through the module of that name and finds the original again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

Forward = Callable[..., Any]
"""A function that a module's class has for its forward."""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def inner_functions(function: FunctionType) -> Iterator[FunctionType]:
    """The functions in the closure cells of `function`, such as the one that it decorates."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a cell that is still empty
            continue
        if isinstance(content, FunctionType):
            yield content


def _chain(function: FunctionType) -> Iterator[FunctionType]:
    """`function` and every function reachable through closure cells, which are the functions that decorators wrap."""
    seen: set[int] = set()
    queue = [function]
    while queue:
        f = queue.pop()
        if id(f) not in seen:
            seen.add(id(f))
            yield f
            queue.extend(inner_functions(f))


def names_of(function: object) -> list[str]:
    """The distinct names in the code of `function` and of the functions in its decorator chain."""
    if not isinstance(function, FunctionType):
        return []
    return list(dict.fromkeys(name for f in _chain(function) for name in _names(f.__code__)))


def owner_of(function: object, name: str) -> FunctionType | None:
    """The function of the decorator chain under `function` whose code reads the global `name`, or None."""
    if not isinstance(function, FunctionType):
        return None
    return next((f for f in _chain(function) if name in f.__globals__ and name in _names(f.__code__)), None)


def rebind(function: Forward, owner: FunctionType, replacements: Mapping[str, Any]) -> FunctionType:
    """`function`, rebuilt so that `owner`, somewhere in its decorator chain, sees `replacements` as globals."""
    assert isinstance(function, FunctionType), "its code cannot be rebuilt"
    if function is owner:
        mentioned = {name: owner.__globals__[name] for name in _names(owner.__code__) if name in owner.__globals__}
        scope = {"__builtins__": owner.__globals__["__builtins__"], **mentioned, **replacements}
        cells = function.__closure__
    else:
        scope = function.__globals__
        cells = tuple(_rebound_cell(function, cell, owner, replacements) for cell in function.__closure__ or ())
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = dict(function.__annotations__)
    copy.__qualname__, copy.__doc__, copy.__module__ = function.__qualname__, function.__doc__, function.__module__
    vars(copy).update(vars(function))
    return copy


def rebind_each(function: Forward, replacements: Mapping[str, Any]) -> Forward:
    """`function`, rebuilt so that the first reader of each name in its decorator chain sees the replacement."""
    for name, replacement in replacements.items():
        owner = owner_of(function, name)
        assert owner is not None, f"nothing reads {name}"
        function = rebind(function, owner, {name: replacement})
    return function


def _rebound_cell(
    function: FunctionType, cell: CellType, owner: FunctionType, replacements: Mapping[str, Any]
) -> CellType:
    """The cell of `function` with its content rebuilt, if it leads to the owner.

    A function that refers to itself keeps the reference. The wrapper of transformers' checkpointed layers compares
    itself with the class's forward, and the class that tigon generates gets a wrapper of its own.
    """
    try:
        content = cell.cell_contents
    except ValueError:
        return cell
    reaches = content is not function and isinstance(content, FunctionType) and any(f is owner for f in _chain(content))
    return CellType(rebind(content, owner, replacements)) if reaches else cell
