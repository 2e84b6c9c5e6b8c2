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
from tigon.techniques import SETTINGS, TECHNIQUES
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import yaml_word

RECIPE_FILE = "recipe.yaml"


def keys(request: Request) -> dict[str, Any]:
    """Dotted recipe keys of a run, in the recipe's order, without those that name the user's data."""
    choices, default = request.choices, Choices()
    values = {
        "model.name": model_name(request.model),
        "data.sequence_length": request.seq,
        "train.batch_size": request.batch,
    }
    for field, setting in SETTINGS.items():
        value = getattr(choices, field)
        if setting.always_written or value != getattr(default, field):
            values[setting.key] = list(value) if isinstance(value, tuple) else value
    values |= request.objective.recipe_keys()
    if space.crosses_documents(request):
        values["data.cross_document_attention"] = True
    if not request.clipped:
        values["train.max_grad_norm"] = 0
    of_choices = {setting.key for setting in SETTINGS.values()}
    for technique in TECHNIQUES.values():
        if technique.used_by(choices):
            values |= {key: value for key, value in technique.recipe.items() if key not in of_choices}
    order = ("model", "data", "train", "lora", *OBJECTIVE_SECTIONS, "sharding")
    return dict(sorted(values.items(), key=lambda item: order.index(item[0].partition(".")[0])))


def changed_keys(before: Request, after: Request) -> dict[str, Any]:
    """The recipe keys that differ in `after`, with their new values, which may be defaults."""
    old, new = keys(before), keys(after)
    default = keys(replace(before, choices=Choices()))
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


def word(value: Any) -> str:
    """Format a value for `--set`."""
    return yaml_word(tuple(value)) if isinstance(value, list) else yaml_word(value)
