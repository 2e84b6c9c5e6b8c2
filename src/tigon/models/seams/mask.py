"""The seam for the causal mask: a trunk that need not ask the GPU whether its positions are consecutive.

transformers' `create_causal_mask` looks for the documents of a packed sample: it asks whether the positions of each row
are consecutive, and the host waits for the GPU's answer (5.17 and 5.23: `find_packed_sequence_indices`). A trunk whose
caller gives no positions makes consecutive ones itself, so the answer is known. The forward is rebuilt with globals in
which the mask functions get no positions (`rebind.py`). It runs only if the caller gave none.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from tigon.models.seams.base import Seam, imitate
from tigon.models.seams.rebind import names_of, owner_of, rebind

_MASKS = "transformers.masking_utils"
# How the trunks of transformers make positions; with a cache they begin after its tokens. OPT counts the tokens of its
# mask instead, so its positions are not known.
_CONSECUTIVE = re.compile(
    r"if position_ids is None:\n(?:[^\n]*\bpast_\w+ = [^\n]*\n)*?"
    r"\s*position_ids = torch\.arange\(\s*\w+\.shape\[1\], device=\w+\.device\)( \+ past_\w+)?\n"
)


@dataclass(frozen=True)
class MaskSeam(Seam):
    """A trunk whose forward makes consecutive positions if it is given none, and a causal mask from them."""

    op: ClassVar[str] = "mask"
    flag: ClassVar[str] = "mask"
    reported: ClassVar[bool] = False

    def candidate(self, module: nn.Module) -> bool:
        forward: Any = type(module).forward
        return bool(_mask_functions(forward)) and _makes_consecutive_positions(forward)

    def objection(self, module: nn.Module) -> str | None:
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Any = base.forward
        rebuilt = plain_forward
        for name, function in _mask_functions(plain_forward):
            owner = owner_of(rebuilt, name)
            assert owner is not None
            rebuilt = rebind(rebuilt, owner, {name: _without_positions(function)})
        at = _position(plain_forward)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = args[at] if len(args) > at else kwargs.get("position_ids")
            # Under torch.compile the question is part of the graph, and nothing waits.
            known = given is None and not torch.compiler.is_compiling()
            return (rebuilt if known else plain_forward)(self, *args, **kwargs)

        imitate(plain_forward, forward)
        return {"forward": forward}


@functools.cache
def _mask_functions(forward: FunctionType) -> tuple[tuple[str, FunctionType], ...]:
    """Name and value of every mask function of transformers with positions that a class's forward calls."""
    found = []
    for name in names_of(forward):
        owner = owner_of(forward, name) if "mask" in name else None
        function = None if owner is None else owner.__globals__[name]
        if not isinstance(function, FunctionType) or function.__module__ != _MASKS:
            continue
        if "position_ids" in inspect.signature(function).parameters:
            found.append((name, function))
    return tuple(found)


@functools.cache
def _makes_consecutive_positions(forward: FunctionType) -> bool:
    """Whether the source of a class's forward makes 0, 1, 2 ... for each row if it is given no positions."""
    owner: Any = owner_of(forward, _mask_functions(forward)[0][0])
    if "position_ids" not in inspect.signature(forward).parameters:
        return False
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):
        return False
    assignments = re.findall(r"\bposition_ids = (?!position_ids\.(?:unsqueeze|view|expand|to))", source)
    return bool(_CONSECUTIVE.search(source)) and len(assignments) == 1


@functools.cache
def _without_positions(function: FunctionType) -> Callable[..., Any]:
    """`function` as if `position_ids` were None."""
    at = list(inspect.signature(function).parameters).index("position_ids")

    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], None, *args[at + 1 :])
        elif "position_ids" in kwargs:
            kwargs["position_ids"] = None
        return function(*args, **kwargs)

    return make


def _position(forward: Callable[..., Any]) -> int:
    """The index of `position_ids` among the arguments after self."""
    return list(inspect.signature(forward).parameters).index("position_ids") - 1
