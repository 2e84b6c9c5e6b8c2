"""Loads a recipe from a YAML file and `--set`, and checks it before anything else happens.

Before the file's values are made, its node tree is checked. The tree gives the line of every key. Repeated keys
(of which YAML silently keeps the last), deep nesting and alias bombs are refused.

pydantic checks types and limits (tigon.techniques.keys.section). This file turns its errors into one sentence with the
line and the nearest key.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tigon._files import read_text
from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS
from tigon.recipe.aliases import ALIASES, instead_of, key_of, translate, value_of
from tigon.recipe.keys import SECTIONS, ModelConfig, Recipe, TrainConfig, fields_of
from tigon.recipe.rules import Rules, check_combinations, check_effects
from tigon.techniques.keys.section import Section, article, complaint, kind

ON_GPU = "on_gpu"
MAX_RECIPE_BYTES = 64 * 1024
MAX_NODES = 4096  # counted with aliases expanded, as an alias bomb would expand them
MAX_DEPTH = 8
MERGE = "tag:yaml.org,2002:merge"  # of the key <<
# Errors that PyYAML does not wrap: invalid dates, tags on values of another type, huge numbers, deep nesting.
OF_VALUES = (ValueError, KeyError, AttributeError, RecursionError)


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    gpu_present: Callable[[], bool],
    objective_rules: Rules,
    checked: bool = True,
) -> Recipe:
    """Load the recipe in `path`, with `--set section.key=value` applied last.

    Packages above the objectives call `objectives.recipe_checks.load` instead, which adds the objectives' rules.

    Args:
        path: The recipe file.
        overrides: `section.key=value` texts.
        gpu_present: Called only if `train.device` is auto and the recipe has an `on_gpu` block, because importing
            torch is slow.
        objective_rules: The rules of the objectives' sections.
        checked: False skips the checks for keys that exclude each other or do nothing.

    Raises:
        RecipeError: The file cannot be read, or a key or value is wrong; the message names file, line and key.
    """
    raw, lines = read_yaml(
        path, "recipe", f"a mapping of the sections {', '.join(SECTIONS)}", "recipes/quickstart.yaml"
    )
    raw = _without_aliases(raw, path, lines)
    _check_keys(raw, path, lines)
    on_gpu = raw.pop(ON_GPU, None)
    assignments = [_parse_override(text) for text in overrides]
    # Keys under on_gpu count as given on every machine, so a recipe is accepted or refused alike on all of them.
    given_keys = {f"{name}.{key}" for block in (raw, on_gpu or {}) for name, keys in block.items() for key in keys}
    given_keys |= {".".join(dotted.split(".")[:2]) for dotted, _ in assignments}
    device = _peek_device(raw, assignments)
    if on_gpu and (device == "cuda" or (device == "auto" and gpu_present())):
        _merge(raw, on_gpu)
    set_keys = [dotted for dotted, _ in assignments]
    # steps and epochs exclude each other: the one in --set replaces the file's
    if ("train.steps" in set_keys) != ("train.epochs" in set_keys):
        raw.get("train", {}).pop("epochs" if "train.steps" in set_keys else "steps", None)
    given_keys -= _drop_keys_of_preset(raw, dict(assignments))
    for dotted, value in assignments:
        _assign(raw, dotted, value)
    sources = {dotted: "--set" for dotted, _ in assignments}

    def where(dotted: str) -> str:
        return _where(path, lines, dotted, sources)

    recipe = _build(raw, "", where)
    if checked:
        check_combinations(recipe, path, objective_rules)
        check_effects(recipe, given_keys, where, objective_rules)
    return recipe


OF_PRESETS = ("model.config", "data.vocab_size", "post_training.base_steps")
"""Keys that shape a preset, its tokenizer, or its training before the objective. A checkpoint has all three."""


def _drop_keys_of_preset(raw: dict[str, Any], assignments: Mapping[str, Any]) -> set[str]:
    """Remove the file's keys for its preset if `--set model.name` names a checkpoint; one line on stderr names them.

    Returns the removed keys. A key that `--set` gives too is kept, and is refused as anywhere else.
    """
    name = assignments.get("model.name")
    in_file = raw.get("model", {}).get("name", ModelConfig.name)
    if not isinstance(name, str) or name in PRESETS or not isinstance(in_file, str) or in_file not in PRESETS:
        return set()
    found = {dotted: raw.get(dotted.partition(".")[0], {}) for dotted in OF_PRESETS if dotted not in assignments}
    gone = {dotted for dotted, section in found.items() if section.pop(dotted.partition(".")[2], None) is not None}
    if gone and os.environ.get("RANK", "0") == "0":
        listed = ", ".join(dotted for dotted in OF_PRESETS if dotted in gone)
        line = f"tigon: --set model.name={name}: left out {listed}, which only the preset {in_file} takes"
        print(line, file=sys.stderr)
    return gone


def of_assignments(overrides: Sequence[str]) -> Recipe:
    """A recipe of defaults with `--set section.key=value` applied. Keys that exclude each other are not checked.

    Raises:
        RecipeError: A key or value is wrong; the message names the key.
    """
    raw: dict[str, Any] = {}
    for dotted, value in map(_parse_override, overrides):
        _assign(raw, dotted, value)
    return _build(raw, "", lambda _: "--set")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_yaml(path: Path, noun: str, form: str, example: str) -> tuple[dict[str, Any], dict[str, int]]:
    """(the file's mapping, the line of every dotted key). The others are words for messages.

    Args:
        path: The file.
        noun: What the file is: a recipe, a sweep.
        form: What its YAML must be.
        example: The path of such a file.

    Raises:
        RecipeError: The file cannot be read, or it has a repeated key, deep nesting or too many values.
    """
    import yaml

    try:
        text = read_text(path, MAX_RECIPE_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such {noun} file; give the path of a YAML {noun}, e.g. {example}") from None
    except OSError as error:
        raise RecipeError(f"{path}: the {noun} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); save the {noun} as UTF-8") from None
    lines: dict[str, int] = {}
    try:
        loader = yaml.SafeLoader(text)
        tree = loader.get_single_node()
        raw = None
        if tree is not None:
            _walk(tree, path, "", 0, lines, [0])
            raw = loader.construct_document(tree)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, *OF_VALUES) as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: a {noun} is {form}, not {article(kind(raw))}")
    return raw, lines


def _walk(node: Any, path: Path, dotted: str, depth: int, lines: dict[str, int], count: list[int]) -> None:
    """Record the line of every key; refuse repeated keys, deep nesting and expanded aliases."""
    import yaml

    count[0] += 1
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH or count[0] > MAX_NODES:
        raise RecipeError(f"{path}:{line}: nested deeper than {MAX_DEPTH} or more than {MAX_NODES} values; simplify it")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            name = str(key_node.value)
            child = f"{dotted}.{name}" if dotted else name
            if name in seen:
                raise RecipeError(f"{path}:{key_node.start_mark.line + 1}: {child} is given twice; keep one of them")
            seen.add(name)
            if key_node.tag == MERGE and isinstance(value_node, yaml.SequenceNode):
                raise RecipeError(
                    f"{path}:{key_node.start_mark.line + 1}: << takes one mapping, because YAML would silently keep "
                    "one of two equal keys in a list; merge one mapping, and write the other keys out"
                )
            lines[child] = key_node.start_mark.line + 1
            _walk(value_node, path, child, depth + 1, lines, count)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, path, dotted, depth + 1, lines, count)


def _without_aliases(raw: dict[str, Any], path: Path, lines: dict[str, int]) -> dict[str, Any]:
    """The file's mapping with recipe keys in place of other libraries' names, under on_gpu too."""

    def where(dotted: str) -> str:
        return _where(path, lines, dotted, {})

    on_gpu = raw.get(ON_GPU)
    raw = translate({name: value for name, value in raw.items() if name != ON_GPU}, "", lines, where)
    if on_gpu is not None:
        raw[ON_GPU] = translate(on_gpu, f"{ON_GPU}.", lines, where) if isinstance(on_gpu, dict) else on_gpu
    return raw


def _check_keys(raw: dict[str, Any], path: Path, lines: dict[str, int]) -> None:
    """Refuse unknown sections and keys. Keys under on_gpu are checked even on a machine without a GPU."""
    for section, value in raw.items():
        known = [*SECTIONS, ON_GPU]
        if section not in known:
            raise _unknown(str(section), known, _where(path, lines, str(section), {}))
        if value is None:
            raw[section] = value = {}
        if not isinstance(value, dict):
            where = _where(path, lines, section, {})
            raise RecipeError(f"{where}: {section} is a section of keys, not {article(kind(value))}")
    if ON_GPU in raw:
        for section, keys in raw[ON_GPU].items():
            dotted = f"{ON_GPU}.{section}"
            where = _where(path, lines, dotted, {})
            if section not in SECTIONS:
                raise _unknown(dotted, [f"{ON_GPU}.{name}" for name in SECTIONS], where)
            if not isinstance(keys, dict):
                raise RecipeError(f"{where}: {dotted} is a section of keys, not {article(kind(keys))}")
        _build(raw[ON_GPU], f"{ON_GPU}.", lambda dotted: _where(path, lines, dotted, {}))


def _parse_override(text: str) -> tuple[str, Any]:
    import yaml

    dotted, separator, value_text = text.partition("=")
    written = dotted.strip()
    dotted = key_of(written)
    if not separator or not dotted:
        raise RecipeError(f"--set {text}: expected section.key=value, e.g. --set train.batch_size=8")
    section, _, rest = dotted.partition(".")
    if section not in SECTIONS or not rest:
        raise _unknown(dotted, _all_keys(), "--set")
    try:
        value = yaml.safe_load(value_text)
    except (yaml.YAMLError, *OF_VALUES):
        raise RecipeError(f"--set {text[:200]}: the value is not valid YAML; quote it") from None
    return dotted, value if dotted == written else value_of(written.rpartition(".")[2], value, "--set")


def _assign(raw: dict[str, Any], dotted: str, value: object) -> None:
    section, name, *rest = dotted.split(".")
    target = raw.setdefault(section, {})
    if rest:  # model.config.num_hidden_layers=2
        inner = target.get(name) or {}
        if not isinstance(inner, dict) or len(rest) > 1:
            raise _unknown(dotted, _all_keys(), "--set")
        target[name] = {**inner, rest[0]: value}
    else:
        target[name] = value


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Merge by section; a key of `over` replaces the whole value, so `config: {}` there empties the mapping."""
    for section, values in over.items():
        base[section] = {**base.get(section, {}), **values}
        # steps and epochs exclude each other: the key in `over` replaces the other one
        if section == "train" and ("steps" in values) != ("epochs" in values):
            base[section].pop("epochs" if "steps" in values else "steps", None)


def _peek_device(raw: dict[str, Any], assignments: Sequence[tuple[str, Any]]) -> Any:
    device = raw.get("train", {}).get("device", TrainConfig.device)
    for dotted, value in assignments:
        device = value if dotted == "train.device" else device
    return device


# --- typed construction ----------------------------------------------------------------------------------------------


def _build(raw: Mapping[str, Any], prefix: str, where: Callable[[str], str]) -> Recipe:
    """The recipe of these sections. prefix: "" or "on_gpu.", for the names in messages."""
    sections: dict[str, Section] = {}
    for section, given in raw.items():
        cls = SECTIONS[section]
        for dotted in (f"{prefix}{section}.{name}" for name in given if not isinstance(name, str)):
            raise _unknown(dotted, [prefix + known for known in _all_keys()], where(dotted))
        try:
            sections[section] = cls(**given)
        except ValidationError as error:
            errors = {str(one["loc"][0]): one for one in reversed(error.errors(include_url=False))}
            name = next(name for name in map(str, given) if name in errors)  # the first in the file
            dotted = f"{prefix}{section}.{name}"
            if errors[name]["type"] == "unexpected_keyword_argument":
                raise _unknown(dotted, [prefix + known for known in _all_keys()], where(dotted)) from None
            raise RecipeError(f"{where(dotted)}: {dotted} {complaint(cls, errors[name])}") from None
    return Recipe(**sections)  # type: ignore[arg-type]


# --- words ---------------------------------------------------------------------------------------------------------


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in fields_of(cls)]


def _unknown(dotted: str, known: Sequence[str], where: str) -> RecipeError:
    if instead := instead_of(dotted):
        return RecipeError(f"{where}: {dotted} is not a recipe key; use {instead}")
    every = _all_keys()
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed([*known, *every])}
    leaves |= {name: f"{name}, another name of {alias.key}" for name, alias in ALIASES.items() if name not in leaves}
    # A key of this name in another section, then lora_rank for lora.rank, then a key that looks like it, then another
    # name of a key.
    near = [name for name in known if name.rsplit(".", 1)[-1] == dotted.rsplit(".", 1)[-1]][:1]
    near = near or [name for name in every if dotted.rsplit(".", 1)[-1] == name.replace(".", "_", 1)]
    near = near or difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    near = near or [leaves[m] for m in difflib.get_close_matches(dotted.rsplit(".", 1)[-1], list(leaves), n=1)]
    hint = f"the nearest key is {near[0]}" if near else f"known: {', '.join(known[:8])}, ..., see docs/recipe.md"
    others = {alias.name: alias.of for alias in ALIASES.values() if near and alias.key == near[0]}
    for name in difflib.get_close_matches(dotted.rsplit(".", 1)[-1], list(others), n=1):
        hint += f", which is {name} in {others[name]}"
    return RecipeError(f"{where}: {dotted} is not a recipe key; {hint}")


def _where(path: Path, lines: Mapping[str, int], dotted: str, sources: Mapping[str, str]) -> str:
    if dotted in sources:
        return sources[dotted]
    if dotted not in lines and f"{ON_GPU}.{dotted}" in lines:
        dotted = f"{ON_GPU}.{dotted}"
    return f"{path}:{lines[dotted]}" if dotted in lines else str(path)
