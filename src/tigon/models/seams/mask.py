"""The seam for the causal mask: a trunk that need not ask the GPU whether its positions are consecutive.

transformers' `create_causal_mask` looks for the documents of a packed sample: it asks whether the positions of each row
are consecutive, and the host waits for the GPU's answer (5.17 to 5.24: `find_packed_sequence_indices`). A trunk whose
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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from tigon.models.seams.base import Seam, imitate
from tigon.models.seams.rebind import Forward, names_of, owner_of, rebind_each

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        return makes_consecutive_positions(type(module).forward)

    def objection(self, module: nn.Module) -> str | None:
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward: Forward = base.forward
        functions = _mask_functions(plain_forward)
        known = rebind_each(
            plain_forward, {name: without_positions(function, function) for name, function in functions}
        )
        # Under torch.compile the question is part of the graph, and nothing waits.
        return {"forward": choose_by_positions(plain_forward, plain_forward, known, compiles_known=False)}


def choose_by_positions(
    original: Callable[..., Any], asking: Callable[..., Any], known: Callable[..., Any], *, compiles_known: bool
) -> Callable[..., Any]:
    """A forward in the place of `original`, which makes consecutive positions if it is given none.

    The forward runs `known` if the caller gives no positions, and `asking` if the caller does. compiles_known: whether
    torch.compile records `known` too.
    """
    at = list(inspect.signature(original).parameters).index("position_ids") - 1

    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> Any:
        given = args[at] if len(args) > at else kwargs.get("position_ids")
        are_known = given is None and (compiles_known or not torch.compiler.is_compiling())
        return (known if are_known else asking)(self, *args, **kwargs)

    imitate(original, forward)
    return forward


@functools.cache
def _mask_functions(forward: Forward) -> tuple[tuple[str, FunctionType], ...]:
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
def makes_consecutive_positions(forward: Forward) -> bool:
    """Whether the source of a class's forward makes 0, 1, 2 ... for each row if it is given no positions."""
    functions = _mask_functions(forward)
    if not functions or "position_ids" not in inspect.signature(forward).parameters:
        return False
    try:
        source = inspect.getsource(owner_of(forward, functions[0][0]))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return False
    assignments = re.findall(r"\bposition_ids = (?!position_ids\.(?:unsqueeze|view|expand|to))", source)
    return bool(_CONSECUTIVE.search(source)) and len(assignments) == 1


def without_positions(function: FunctionType, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which takes the arguments of the mask function, as if `position_ids` were None."""
    at = list(inspect.signature(function).parameters).index("position_ids")

    def make(*args: object, **kwargs: object) -> Any:
        if len(args) > at:
            args = (*args[:at], None, *args[at + 1 :])
        elif "position_ids" in kwargs:
            kwargs["position_ids"] = None
        return run(*args, **kwargs)

    return make
