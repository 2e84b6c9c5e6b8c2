"""A plan as a recipe for `tigon train`: YAML to save, and the command that sets the same keys on any recipe."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tigon.models.loading.presets import checkpoint_of
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.recipe.keys import OBJECTIVE_SECTIONS
from tigon.techniques import TECHNIQUES
from tigon.techniques.condition import yaml_word
from tigon.techniques.keys.settings import DEFAULT, KEYS

RECIPE_FILE = "recipe.yaml"
ALWAYS_WRITTEN = (
    "train.precision",
    "train.optimizer",
    "train.checkpointing",
    "train.gradient_accumulation",
    "model.kernels",
)
"""Keys that a plan's recipe names with their defaults too, to replace the values of the recipe it is applied to."""


def keys(request: Request) -> dict[str, Any]:
    """Dotted recipe keys of a run, in the recipe's order, without those that name the user's data."""
    settings = request.settings
    values = {
        "model.name": model_name(request.model),
        "data.sequence_length": request.seq,
        "train.batch_size": request.batch,
    }
    planned = [key for key in KEYS if settings.knows(key)]
    for key in planned:
        value = settings.value(key)
        if key in ALWAYS_WRITTEN or value != DEFAULT.value(key):
            values[key] = list(value) if isinstance(value, tuple) else value
    values |= request.objective.recipe_keys()
    if space.crosses_documents(request):
        values["data.cross_document_attention"] = True
    if not request.clipped:
        values["train.max_grad_norm"] = 0
    for technique in TECHNIQUES.values():
        if technique.used_by(settings):
            values |= {key: value for key, value in technique.recipe.items() if key not in planned}
    order = ("model", "data", "train", "lora", *OBJECTIVE_SECTIONS, "sharding")
    return dict(sorted(values.items(), key=lambda item: order.index(item[0].partition(".")[0])))


def changed_keys(before: Request, after: Request) -> dict[str, Any]:
    """The recipe keys that differ in `after`, with their new values, which may be defaults."""
    old, new = keys(before), keys(after)
    default = keys(replace(before, settings=DEFAULT))
    changed = {key: value for key, value in new.items() if old.get(key, default.get(key)) != value}
    return {key: value for key, value in changed.items() if key != "model.name"}


def model_name(name: str) -> str:
    """The value for `model.name`: a preset becomes the checkpoint of its shape, a config.json its folder."""
    if (checkpoint := checkpoint_of(name)) is not None:
        return checkpoint
    path = Path(name)
    return str(path.parent) if path.is_file() else name


def command(request: Request, asked: Request | None = None, base: Sequence[str] = ()) -> str:
    """The `tigon train` command of a run; data and steps come from the recipe it names.

    Args:
        request: the run.
        asked: the run of the recipe that `base` trains; the command then sets only the keys that differ from it.
        base: the words of that command.
    """
    values = keys(request) if asked is None else changed_keys(asked, request)
    words = (f"{key}={word(value)}" for key, value in values.items())
    start = base or ("tigon", "train", RECIPE_FILE)
    return shlex.join([*start, *(part for word in words for part in ("--set", word))])


def yaml_text(request: Request) -> str:
    """A complete recipe with the same keys, for 100 steps on the default text, which every Python includes."""
    import yaml

    tree: dict[str, dict[str, Any]] = {}
    for key, value in (keys(request) | {"train.steps": 100}).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def word(value: object) -> str:
    """Format a value for `--set`."""
    return yaml_word(tuple(value)) if isinstance(value, list) else yaml_word(value)
