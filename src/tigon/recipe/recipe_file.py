"""Loads a recipe from a YAML file and `--set`, and checks it before anything else happens.

Before the file's values are made, its node tree is checked. The tree gives the line of every key. Repeated keys
(of which YAML silently keeps the last), deep nesting and alias bombs are refused.

pydantic is not used. It would check types and limits, but its errors know neither the line in the file nor the nearest
key, and each of its error types would have to be translated into the messages below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon._files import read_text
from tigon.errors import RecipeError
from tigon.models.loading.presets import PRESETS
from tigon.recipe.aliases import ALIASES, instead_of, key_of, translate, value_of
from tigon.recipe.keys import SECTIONS, ModelConfig, Recipe, TrainConfig, limits_text, type_name
from tigon.recipe.rules import Rules, check_combinations, check_effects

ON_GPU = "on_gpu"
MAX_RECIPE_BYTES = 64 * 1024
FP32_RANGE = (1.2e-38, 3.4e38)
MAX_NAME = 1024  # characters in a path or another name; Linux allows paths of 4,096 bytes
MAX_NODES = 4096  # counted with aliases expanded, as an alias bomb would expand them
MAX_DEPTH = 8
MERGE = "tag:yaml.org,2002:merge"  # of the key <<
# Errors that PyYAML does not wrap: invalid dates, tags on values of another type, huge numbers, deep nesting.
OF_VALUES = (ValueError, KeyError, AttributeError, RecursionError)


def load(
    path: Path, overrides: Sequence[str] = (), *, gpu_present: Callable[[], bool], objective_rules: Rules,
    checked: bool = True,
) -> Recipe:  # fmt: skip
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
    raw, lines = _read_yaml(path)
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

    recipe = _build(Recipe, raw, "", where)
    assert isinstance(recipe, Recipe)
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
    recipe = _build(Recipe, raw, "", lambda _: "--set")
    assert isinstance(recipe, Recipe)
    return recipe


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """(the file's mapping, the line of every dotted key)"""
    import yaml

    try:
        text = read_text(path, MAX_RECIPE_BYTES)
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe file; give the path of a YAML recipe, e.g. recipes/quickstart.yaml"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path}: the recipe cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); save the recipe as UTF-8") from None
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
        sections = ", ".join(SECTIONS)
        raise RecipeError(f"{path}: a recipe is a mapping of the sections {sections}, not {_article(_kind(raw))}")
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
                _refuse_repeated(value_node, path, dotted)
            lines[child] = key_node.start_mark.line + 1
            _walk(value_node, path, child, depth + 1, lines, count)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, path, dotted, depth + 1, lines, count)


def _refuse_repeated(merged: Any, path: Path, dotted: str) -> None:
    """Refuse a key that two mappings of a merge list have. YAML would silently keep one of them."""
    seen: set[str] = set()
    for mapping in merged.value:
        own = _merged_keys(mapping)
        for name in own:
            if name in seen:
                child = f"{dotted}.{name}" if dotted else name
                raise RecipeError(f"{path}:{own[name]}: {child} is given twice in the list of <<; keep one of them")
        seen |= own.keys()


def _merged_keys(node: Any) -> dict[str, int]:
    """The keys that a mapping has, its own and those that it merges in, with their lines."""
    import yaml

    keys: dict[str, int] = {}
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            keys |= _merged_keys(part)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            keys |= _merged_keys(value) if key.tag == MERGE else {str(key.value): key.start_mark.line + 1}
    return keys


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
            raise RecipeError(f"{where}: {section} is a section of keys, not {_article(_kind(value))}")
    if ON_GPU in raw:
        for section, keys in raw[ON_GPU].items():
            dotted = f"{ON_GPU}.{section}"
            where = _where(path, lines, dotted, {})
            if section not in SECTIONS:
                raise _unknown(dotted, [f"{ON_GPU}.{name}" for name in SECTIONS], where)
            if not isinstance(keys, dict):
                raise RecipeError(f"{where}: {dotted} is a section of keys, not {_article(_kind(keys))}")
        _build(Recipe, raw[ON_GPU], f"{ON_GPU}.", lambda dotted: _where(path, lines, dotted, {}))


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


def _assign(raw: dict[str, Any], dotted: str, value: Any) -> None:
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


def _build(cls: type[Any], raw: Mapping[str, Any], prefix: str, where: Callable[[str], str]) -> Any:
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        dotted = f"{prefix}{name}"
        if name not in fields:
            root = f"{ON_GPU}." if prefix.startswith(ON_GPU) else ""
            raise _unknown(dotted, [root + known for known in _all_keys()], where(dotted))
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _build(typing.cast("type[Any]", hint), value, f"{dotted}.", where)
        else:
            values[name] = _convert(value, hint, fields[name].metadata, dotted, where)
    return cls(**values)


def _convert(value: Any, hint: Any, limits: Mapping[str, Any], dotted: str, where: Callable[[str], str]) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    targets = [option for option in options if option is not types.NoneType]
    # YAML's word is null. A number cannot be called "none", as a text can.
    if types.NoneType in options and (value is None or (value in ("none", "None") and str not in targets)):
        return None
    # only entries of data.source have two types: text, or a mapping
    target = targets[0] if len(targets) == 1 or not isinstance(value, dict) else targets[1]
    if typing.get_origin(target) is tuple:
        items = value if isinstance(value, list) else [value]
        if not items and limits["choices"]:
            raise RecipeError(f"{where(dotted)}: {dotted} is empty; name one or more of {', '.join(limits['choices'])}")
        return tuple(_convert(item, typing.get_args(target)[0], limits, dotted, where) for item in items)
    if typing.get_origin(target) is Mapping:
        if not isinstance(value, dict):
            actual = _article(_kind(value))
            raise RecipeError(f"{where(dotted)}: {dotted} is a mapping such as {{name: value}}, not {actual}")
        return dict(value)
    if target is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 (without a dot) as text; an integer may be too large for a float
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)
    if type(value) is not target:
        actual, wanted = _article(_kind(value)), _article(type_name(target))
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}, {actual}; it must be {wanted}")
    if isinstance(value, str):
        _check_text(value, limits["prose"], dotted, where)
    _check_limits(value, limits, dotted, where)
    return value


def _check_text(value: str, prose: bool, dotted: str, where: Callable[[str], str]) -> None:
    """Refuse text that is not a valid file name or that the run's files cannot store."""
    if not value.strip():
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}, empty; leave the key out, or give it a value")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}; remove the NUL or half character")
    if not prose and any(character < " " for character in value):
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}; remove its line breaks and tabs")
    if not prose and len(value) > MAX_NAME:
        raise RecipeError(f"{where(dotted)}: {dotted} has {len(value)} characters; the limit is {MAX_NAME}")


def _check_limits(value: Any, limits: Mapping[str, Any], dotted: str, where: Callable[[str], str]) -> None:
    choices, pattern, minimum, maximum, above = (
        limits[name] for name in ("choices", "pattern", "minimum", "maximum", "above")
    )
    if not re.fullmatch(pattern, value) if pattern else choices and value not in choices:
        wanted = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}; it must be {wanted}")
    if isinstance(value, str) and (why := limits["invalid"](value)) is not None:
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}; {why}")
    too_small = (minimum is not None and not value >= minimum) or (above is not None and not value > above)
    if too_small or (maximum is not None and not value <= maximum):
        raise RecipeError(f"{where(dotted)}: {dotted} is {_shown(value)}; it {limits_text(limits)}")
    # Training uses fp32 at most. Smaller numbers would become 0 and larger ones infinite.
    if isinstance(value, float) and value != 0 and not FP32_RANGE[0] <= abs(value) <= FP32_RANGE[1]:
        raise RecipeError(
            f"{where(dotted)}: {dotted} is {_shown(value)}; fp32 holds numbers from {FP32_RANGE[0]} to {FP32_RANGE[1]}"
        )


# --- words ---------------------------------------------------------------------------------------------------------


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


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
    hint = f"the nearest key is {near[0]}" if near else f"known: {', '.join(known[:8])}, ..., see docs/train.md"
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


def _shown(value: Any) -> str:
    """A value as text for a message, at most 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _kind(value: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true/false value", list: "list", dict: "mapping"}
    return names.get(type(value), "empty value" if value is None else type(value).__name__)


def _article(noun: str) -> str:
    return noun if noun == "text" else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
