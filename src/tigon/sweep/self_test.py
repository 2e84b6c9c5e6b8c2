"""The kernels that the points are going to use, tried before the first of them, as `tigon train` tries its own.

A run tries its ops on small inputs: one that is wrong on this machine is left out of the patch, or the run is refused
(`model.self_test`). Trying them compiles kernels and takes GPU memory; a sweep has it done once, in the process that
looks at the machine, for every kind of point, and tells each point's processes what was found. The first GPU answers
for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tigon.errors import KernelError, RecipeError
from tigon.recipe.keys import Recipe


class Kind(NamedTuple):
    """What the self-test of a run depends on, in the recipe's words."""

    kernels: str
    self_test: str
    precision: str
    device: str


def kind_of(recipe: Recipe) -> Kind:
    """The kind of point that a recipe makes."""
    return Kind(recipe.model.kernels, recipe.model.self_test, recipe.train.precision, recipe.train.device)


def try_ops(kind: Kind) -> dict[str, Any]:
    """What `tigon train` finds for runs of this kind: {"dtype", "wrong_ops": op -> why, "refused": why, or empty}."""
    from tigon.trainer.guards import preflight, self_test

    default = Recipe()
    recipe = replace(
        default, model=replace(default.model, kernels=kind.kernels, self_test=kind.self_test),
        train=replace(default.train, precision=kind.precision, device=kind.device),
    )  # fmt: skip
    found: dict[str, Any] = {"dtype": "", "wrong_ops": {}, "refused": ""}
    try:
        device = preflight.check_device(recipe)
        choices = recipe.choices(precision=preflight.resolve_precision(kind.precision, device))
        found["dtype"] = self_test.DTYPES[choices.precision]
        found["wrong_ops"] = self_test.wrong_ops(recipe, choices, device)
    except KernelError as error:
        found["refused"] = str(error)
    except RecipeError:
        pass  # this machine cannot run such a point, which its own process will say
    return found


def merged(parts: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """dtype -> op -> what is wrong with it, of several."""
    wrong: dict[str, dict[str, str]] = {}
    for part in parts:
        for dtype, ops in part.items():
            wrong.setdefault(dtype, {}).update(ops)
    return wrong


def words(wrong: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Each op that is wrong, with why."""
    return [f"{op} in {dtype} ({why})" for dtype, ops in wrong.items() for op, why in ops.items()]
