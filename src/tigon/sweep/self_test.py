"""Tests the kernels that the points use, once before the first point.

`tigon train` tests its ops on small inputs at the start of a run. An op with wrong results on this machine is left out
of the patch, or the run is refused (`model.self_test`). The test compiles kernels and takes GPU memory. A sweep
therefore runs it once per kind of point, in the process that probes the machine, and passes the results to the points'
processes. Only the first GPU is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tigon.errors import KernelError, RecipeError
from tigon.recipe.keys import Recipe
from tigon.trainer.guards import preflight, self_test


class Kind(NamedTuple):
    """The recipe values that the self-test of a run depends on."""

    kernels: str
    self_test: str
    precision: str
    device: str


def kind_of(recipe: Recipe) -> Kind:
    """The kind of point that a recipe belongs to."""
    return Kind(recipe.model.kernels, recipe.model.self_test, recipe.train.precision, recipe.train.device)


def try_ops(kind: Kind) -> dict[str, Any]:
    """Run the self-test of `tigon train`: {"dtype", "wrong_ops": op -> why, "refused": why, or empty}."""
    default = Recipe()
    model = replace(default.model, kernels=kind.kernels, self_test=kind.self_test)
    train = replace(default.train, precision=kind.precision, device=kind.device)
    recipe = replace(default, model=model, train=train)
    outcome: dict[str, Any] = {"dtype": "", "wrong_ops": {}, "refused": ""}
    try:
        device = preflight.check_device(recipe)
        settings = preflight.settings_here(recipe, device)
        outcome["dtype"] = self_test.DTYPES[settings.train.precision]
        outcome["wrong_ops"] = self_test.wrong_ops(recipe, settings, device)
    except KernelError as error:
        outcome["refused"] = str(error)
    except RecipeError:
        pass  # this machine cannot run such a point; the point's own process reports why
    return outcome


def merged(parts: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """Merge several mappings of dtype -> op -> what is wrong with it."""
    wrong: dict[str, dict[str, str]] = {}
    for part in parts:
        for dtype, ops in part.items():
            wrong.setdefault(dtype, {}).update(ops)
    return wrong


def words(wrong: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Each wrong op as text, with dtype and reason."""
    return [f"{op} in {dtype} ({why})" for dtype, ops in wrong.items() for op, why in ops.items()]
