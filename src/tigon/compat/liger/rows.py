"""Makes Liger's functions, Functions and modules from lines that list their parameters in Liger's order.

    liger_jsd = form(jsd, "input:_input target shift_labels beta=0.5")
    LigerJSDFunction = function("LigerJSDFunction", jsd)
    LigerJSD = module("LigerJSD", jsd, holds="beta ignore_index", takes="log_q:_input log_p:target shift_labels")

An entry is `name`, or `name:parameter` if the function of tigon calls the parameter otherwise, then optionally
`=default`. `name!` is required. The default is otherwise the function's own.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Call = Callable[..., Any]
_EMPTY = inspect.Parameter.empty


def function(name: str, apply: Call) -> type:
    """A class whose `apply` is the function. Liger's scripts call its `torch.autograd.Function`s like this.

    It is not a subclass of `torch.autograd.Function`, in which Dynamo would look for a `forward`.
    """
    return type(name, (), {"apply": staticmethod(apply), "__doc__": apply.__doc__, "__module__": apply.__module__})


class _Line:
    """The parameters of a line, for a function."""

    def __init__(self, line: str, call: Call) -> None:
        known = inspect.signature(call).parameters
        parameters = []
        self.renamed: dict[str, str] = {}
        for entry in line.split():
            names, has_default, text = entry.partition("=")
            name, _, parameter = names.removesuffix("!").partition(":")
            self.renamed[name] = parameter or name
            default = ast.literal_eval(text) if has_default else _EMPTY
            if not has_default and not names.endswith("!"):
                default = known[self.renamed[name]].default
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
        self.signature = inspect.Signature(parameters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.renamed)

    def defaults(self) -> dict[str, Any]:
        """The function's parameter -> the default of the line."""
        return {
            self.renamed[name]: parameter.default
            for name, parameter in self.signature.parameters.items()
            if parameter.default is not _EMPTY
        }


def form(call: Call, line: str) -> Call:
    """The function with the parameters of the line."""
    parameters = _Line(line, call)
    names, renamed, defaults = parameters.names, parameters.renamed, parameters.defaults()

    def run(*args: object, **kwargs: object) -> Any:
        if len(args) > len(names) or any(name not in renamed or name in names[: len(args)] for name in kwargs):
            parameters.signature.bind(*args, **kwargs)  # raises Python's TypeError
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return call(**{**defaults, **{renamed[name]: value for name, value in given.items()}})

    run.__doc__, run.__module__ = call.__doc__, call.__module__
    vars(run)["__signature__"] = parameters.signature
    return run


def module(name: str, call: Call, *, holds: str, takes: str, check: Call | None = None) -> type[nn.Module]:
    """A module that holds options of a function, and calls it in forward.

    Args:
        name: the name of the class.
        call: the function.
        holds: the line of the constructor. The options become attributes.
        takes: the line of forward.
        check: called with the options by keyword when the module is made; it raises for wrong values.
    """
    options, run = _Line(holds, call), form(call, f"{takes} {holds}")
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def __init__(module: nn.Module, *args: object, **kwargs: object) -> None:
        nn.Module.__init__(module)
        bound = options.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if check is not None:
            check(**bound.arguments)
        # Tensors are no buffers, as in Liger: the state dict does not contain them, and `to` does not move them.
        vars(module).update(bound.arguments)

    def forward(module: nn.Module, *args: object, **kwargs: object) -> Any:
        return run(*args, **kwargs, **{option: getattr(module, option) for option in options.names})

    def extra_repr(module: nn.Module) -> str:
        values = {option: getattr(module, option) for option in options.names}
        return ", ".join(f"{option}={value!r}" for option, value in values.items() if not isinstance(value, Tensor))

    vars(__init__)["__signature__"] = inspect.Signature([self, *options.signature.parameters.values()])
    vars(forward)["__signature__"] = inspect.Signature([self, *_Line(takes, call).signature.parameters.values()])
    body = {"__init__": __init__, "forward": forward, "extra_repr": extra_repr, "__doc__": call.__doc__}
    return type(name, (nn.Module,), {**body, "__module__": call.__module__})
