"""The recipe of a run: frozen dataclasses, filled from YAML and `--set`, checked before anything else happens.

A key is declared once, as a dataclass field with its help, limits and choices; the loader, the error messages and the
table in docs/train.md are generated from that declaration. Nothing here imports torch, so a wrong recipe is refused at
once. YAML is read with `yaml.safe_load` after a look at its node tree, which gives every key its line and refuses
repeated keys (YAML itself keeps the last one without a word), deep nesting and alias bombs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tigon.errors import RecipeError

MAX_RECIPE_BYTES = 64 * 1024
MAX_NODES = 4096  # counted with aliases expanded, which is what an alias bomb blows up
MAX_DEPTH = 8
NAME_PATTERN = r"[A-Za-z0-9._-]{1,80}"


def key(default: Any, help: str, *, choices: Sequence[str] = (), minimum: float | None = None,
        maximum: float | None = None, above: float | None = None) -> Any:  # fmt: skip
    """A recipe key. `minimum` and `maximum` are inclusive, `above` is exclusive; a tuple default makes a list key."""
    metadata = {"help": help, "choices": tuple(choices), "minimum": minimum, "maximum": maximum, "above": above}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """What is trained."""

    name: str = key("tigon-demo", "A preset (random weights), a local model folder, or a hub id `owner/model`.")
    config: Mapping[str, Any] | None = key(
        None, "Changes to a preset's shape, in the names of its transformers config, e.g. `{num_hidden_layers: 2}`."
    )
    kernels: str = key(
        "tigon", "`tigon`: every op patched; `no-linear-ce`: all but the linear cross entropy; `none`: unpatched.",
        choices=("tigon", "no-linear-ce", "none"),
    )  # fmt: skip
    attention: str = key(
        "sdpa", "Attention implementation; the flash ones need their package and a GPU.",
        choices=("sdpa", "flash_attention_2", "flash_attention_3", "eager"),
    )  # fmt: skip
    revision: str | None = key(None, "Commit, tag or branch of a hub model.")
    trust_remote_code: bool = key(False, "Run Python code that comes with a checkpoint. Only for authors you trust.")


@dataclass(frozen=True)
class DataConfig:
    """What it is trained on, and how text becomes rows of tokens."""

    source: tuple[str, ...] = key(
        ("python-docs",), "Files or folders (`.txt`, `.md`, `.py`, `.jsonl`), or `python-docs`: the language reference "
        "and the standard library's sources of the running Python.",
    )  # fmt: skip
    format: str = key(
        "auto", "Layout of JSONL rows; `auto` looks at the keys of each file's first row.",
        choices=("auto", "text", "alpaca", "messages", "prompt-completion"),
    )  # fmt: skip
    max_text_mib: float | None = key(None, "Stop reading after this much text (MiB of UTF-8).", above=0)
    eval_source: tuple[str, ...] = key((), "Files for evaluation; empty: whole documents are held out of `source`.")
    eval_fraction: float = key(0.02, "Share of the documents held out when `eval_source` is empty; 0: no evaluation.",
                               minimum=0, maximum=0.5)  # fmt: skip
    tokenizer: str = key(
        "auto", "A tokenizer folder or hub id; `auto`: the checkpoint's own, or for a preset a byte-level BPE trained "
        "on the data.",
    )  # fmt: skip
    vocab_size: int = key(8192, "Size of the BPE that `auto` trains.", minimum=300, maximum=262144)
    sequence_length: int = key(1024, "Tokens in a row.", minimum=8)
    packing: bool = key(True, "Fill rows with several documents; false: one document (or piece of one) a row, padded.")
    cross_document_attention: bool = key(
        False, "Let attention reach into the previous documents of a packed row. Saves the block mask that sdpa needs."
    )
    too_long: str = key(
        "error", "A prompt-and-answer row longer than `sequence_length`: stop, cut its end off, or leave it out "
        "(counted in the report). Plain text is cut into pieces and loses nothing.",
        choices=("error", "truncate", "drop"),
    )  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained."""

    steps: int | None = key(None, "Optimizer steps; give this or `epochs`.", minimum=1)
    epochs: float | None = key(None, "Passes over the rows; give this or `steps`.", above=0)
    batch_size: int = key(8, "Rows in a micro-batch.", minimum=1)
    gradient_accumulation: int = key(1, "Micro-batches in an optimizer step.", minimum=1)
    learning_rate: float = key(3e-4, "Peak learning rate of AdamW.", above=0)
    schedule: str = key("cosine", "Learning rate after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_steps: int = key(0, "Steps of linear warm-up.", minimum=0)
    weight_decay: float = key(0.1, "Decoupled weight decay.", minimum=0)
    adam_beta1: float = key(0.9, "AdamW's decay of the first moment.", minimum=0, maximum=0.9999)
    adam_beta2: float = key(0.95, "AdamW's decay of the second moment.", minimum=0, maximum=0.99999)
    max_grad_norm: float = key(1.0, "Clip the gradient's norm to this; 0: no clipping.", minimum=0)
    precision: str = key(
        "auto", "`bf16`, `fp16`: autocast over fp32 weights; `pure-bf16`: weights and optimizer in bf16 too; `auto`: "
        "bf16 on a GPU that has it, else fp32.",
        choices=("auto", "bf16", "fp16", "fp32", "pure-bf16"),
    )  # fmt: skip
    gradient_checkpointing: bool = key(False, "Recompute each layer in the backward pass instead of keeping it.")
    seed: int = key(1, "Seed of weights, row order and dropout.", minimum=0, maximum=2**32 - 1)
    device: str = key("auto", "`auto`: the GPU when there is one.", choices=("auto", "cpu", "cuda"))
    workers: int = key(0, "Processes that prepare batches; 0: in the training process.", minimum=0, maximum=64)
    log_steps: int = key(10, "Steps between records in metrics.jsonl.", minimum=1)
    eval_steps: int | None = key(None, "Steps between evaluations; none: only at the end.", minimum=1)
    save_steps: int | None = key(None, "Steps between checkpoints; none: only the final model.", minimum=1)
    keep_checkpoints: int = key(2, "Newest checkpoints kept.", minimum=1)


@dataclass(frozen=True)
class ComparisonConfig:
    """A short repeat of the run after training, once per kernel choice: same seed, weights and rows."""

    steps: int = key(0, "Steps of each repeat; 0: no comparison. The last step is the one whose memory is measured.",
                     minimum=0, maximum=1000)  # fmt: skip
    batch_size: int | None = key(None, "Rows in a micro-batch; none: `train.batch_size`.", minimum=1)
    kernels: tuple[str, ...] = key(
        ("none", "no-linear-ce", "tigon"), "What to compare, in the words of `model.kernels`.",
        choices=("tigon", "no-linear-ce", "none"),
    )  # fmt: skip


@dataclass(frozen=True)
class OutputConfig:
    """What is left behind."""

    folder: str = key("runs", "Folder that holds run folders.")
    name: str = key("run", "Name of this run's folder: letters, digits, `.`, `_` and `-`.")
    if_exists: str = key(
        "error", "When that folder exists: `error` stops (and offers --resume), `number` takes name-2, name-3, ...",
        choices=("error", "number"),
    )  # fmt: skip
    save_model: bool = key(True, "Write the final weights (safetensors) and tokenizer to `model/`.")
    sample_prompt: str | None = key(None, "Start of the text sample; none: the start of a held-out document.")
    sample_tokens: int = key(64, "Length of the text sample before and after training; 0: no sample.",
                             minimum=0, maximum=2048)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A whole run. `on_gpu` in a recipe file holds the same sections and wins over them when the run is on a GPU."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    output: OutputConfig = OutputConfig()

    def as_mapping(self) -> dict[str, Any]:
        """Plain mappings and lists, as YAML writes them; `load` of that text gives the recipe back."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: plain(item) for name, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, tuple) else value

        return {name: plain(section) for name, section in dataclasses.asdict(self).items()}


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig, "data": DataConfig, "train": TrainConfig, "comparison": ComparisonConfig,
    "output": OutputConfig,
}  # fmt: skip
ON_GPU = "on_gpu"


def load(path: Path, overrides: Sequence[str] = (), *, gpu_present: Callable[[], bool]) -> Recipe:
    """The recipe in `path` with `--set section.key=value` applied last.

    gpu_present: asked only when `train.device` is auto and the recipe has an `on_gpu` block (importing torch is slow).
    Raises RecipeError naming file, line and key.
    """
    raw, lines = _read_yaml(path)
    _check_keys(raw, path, lines)
    on_gpu = raw.pop(ON_GPU, None)
    assignments = [_parse_override(text) for text in overrides]
    device = _peek_device(raw, assignments)
    if on_gpu and (device == "cuda" or (device == "auto" and gpu_present())):
        _merge(raw, on_gpu)
    for dotted, value in assignments:
        _assign(raw, dotted, value)
    sources = {dotted: "--set" for dotted, _ in assignments}
    recipe = _build(Recipe, raw, "", lambda dotted: _where(path, lines, dotted, sources))
    assert isinstance(recipe, Recipe)
    _check_combinations(recipe, path)
    return recipe


def loads_saved(path: Path) -> Recipe:
    """The resolved recipe that a run wrote into its own folder."""
    return load(path, gpu_present=lambda: False)


def reference_table() -> str:
    """The Markdown tables of docs/train.md, one for each section."""
    parts = []
    for section, cls in SECTIONS.items():
        parts.append(f"### `{section}`\n\n{cls.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            default = "none" if f.default is None else _yaml_scalar(f.default)
            limits = _limits_text(f.metadata)
            meaning = f.metadata["help"] + (f" {limits[0].upper()}{limits[1:]}." if limits else "")
            row = f"| `{section}.{f.name}` | {_type_name(hints[f.name])} | `{default}` | {meaning} |"
            parts.append(row)
        parts.append("")
    return "\n".join(parts)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's mapping and the line of every dotted key."""
    import yaml

    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe file; give the path of a YAML recipe, e.g. recipes/quickstart.yaml")
    size_bytes = path.stat().st_size
    if size_bytes > MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: {size_bytes} bytes is over the {MAX_RECIPE_BYTES} bytes a recipe may have")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}); save the recipe as UTF-8") from None
    lines: dict[str, int] = {}
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _walk(tree, path, "", 0, lines, [0])
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
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
            lines[child] = key_node.start_mark.line + 1
            _walk(value_node, path, child, depth + 1, lines, count)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, path, dotted, depth + 1, lines, count)


def _check_keys(raw: dict[str, Any], path: Path, lines: dict[str, int]) -> None:
    """Refuse unknown sections and keys, those under on_gpu too, even on a machine that will not use them."""
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
    dotted = dotted.strip()
    if not separator or not dotted:
        raise RecipeError(f"--set {text}: expected section.key=value, e.g. --set train.batch_size=8")
    section, _, rest = dotted.partition(".")
    if section not in SECTIONS or not rest:
        raise _unknown(dotted, _all_keys(), "--set")
    try:
        value = yaml.safe_load(value_text)
    except yaml.YAMLError:
        raise RecipeError(f"--set {text}: the value is not valid YAML; quote it") from None
    return dotted, value


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
    """Section by section; a key of `over` replaces the whole value, so `config: {}` there empties the mapping."""
    for section, values in over.items():
        base[section] = {**base.get(section, {}), **values}
        # steps and epochs exclude each other: the block that speaks last decides
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
    if value is None and types.NoneType in options:
        return None
    (target,) = [option for option in options if option is not types.NoneType]
    if typing.get_origin(target) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, typing.get_args(target)[0], limits, dotted, where) for item in items)
    if typing.get_origin(target) is Mapping:
        if not isinstance(value, dict):
            found = _article(_kind(value))
            raise RecipeError(f"{where(dotted)}: {dotted} is a mapping such as {{name: value}}, not {found}")
        return dict(value)
    if target is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3, without a dot, as text
            value = float(value)
    if type(value) is not target:
        found, wanted = _article(_kind(value)), _article(_type_name(target))
        raise RecipeError(f"{where(dotted)}: {dotted} is {value!r}, {found}; it must be {wanted}")
    _check_limits(value, limits, dotted, where)
    return value


def _check_limits(value: Any, limits: Mapping[str, Any], dotted: str, where: Callable[[str], str]) -> None:
    choices, minimum, maximum, above = (limits[name] for name in ("choices", "minimum", "maximum", "above"))
    if choices and value not in choices:
        raise RecipeError(f"{where(dotted)}: {dotted} is {value!r}; it must be one of {', '.join(choices)}")
    too_small = (minimum is not None and not value >= minimum) or (above is not None and not value > above)
    if too_small or (maximum is not None and not value <= maximum) or value in (float("inf"), float("-inf")):
        raise RecipeError(f"{where(dotted)}: {dotted} is {value}; it {_limits_text(limits) or 'must be finite'}")


def _check_combinations(recipe: Recipe, path: Path) -> None:
    import re

    train, output = recipe.train, recipe.output
    if (train.steps is None) == (train.epochs is None):
        said = "both are given" if train.steps is not None else "neither is given"
        raise RecipeError(f"{path}: train.steps and train.epochs: {said}; give exactly one, e.g. train.steps: 200")
    if not re.fullmatch(NAME_PATTERN, output.name) or set(output.name) == {"."}:
        raise RecipeError(
            f"{path}: output.name is {output.name!r}; it may hold up to 80 letters, digits, '.', '_' and '-', "
            "and names one folder inside output.folder"
        )
    if recipe.comparison.steps == 1:
        raise RecipeError(f"{path}: comparison.steps is 1; the first step only warms up, so give 2 or more, or 0")
    if not recipe.data.source:
        raise RecipeError(f"{path}: data.source is empty; name a file, a folder or python-docs")


# --- words -----------------------------------------------------------------------------------------------------------


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


def _unknown(dotted: str, known: Sequence[str], where: str) -> RecipeError:
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.6)
    near = near or [leaves[m] for m in difflib.get_close_matches(dotted.rsplit(".", 1)[-1], list(leaves), n=1)]
    hint = f"the nearest key is {near[0]}" if near else f"known: {', '.join(known[:8])}, ..., see docs/train.md"
    return RecipeError(f"{where}: {dotted} is not a recipe key; {hint}")


def _where(path: Path, lines: Mapping[str, int], dotted: str, sources: Mapping[str, str]) -> str:
    if dotted in sources:
        return sources[dotted]
    if dotted not in lines and f"{ON_GPU}.{dotted}" in lines:
        dotted = f"{ON_GPU}.{dotted}"
    return f"{path}:{lines[dotted]}" if dotted in lines else str(path)


def _limits_text(limits: Mapping[str, Any]) -> str:
    if limits["choices"]:
        return "one of " + ", ".join(f"`{choice}`" for choice in limits["choices"])
    words = [
        f"above {limits['above']:g}" if limits["above"] is not None else "",
        f"at least {limits['minimum']:,}" if limits["minimum"] is not None else "",
        f"at most {limits['maximum']:,}" if limits["maximum"] is not None else "",
    ]
    return "must be " + " and ".join(word for word in words if word) if any(words) else ""


def _type_name(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type_name(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"{_type_name(typing.get_args(hint)[0])} or list"
    names = {str: "text", int: "integer", float: "number", bool: "true/false", types.NoneType: "none"}
    return names.get(hint, "mapping")


def _kind(value: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true/false value", list: "list", dict: "mapping"}
    return names.get(type(value), "empty value" if value is None else type(value).__name__)


def _article(noun: str) -> str:
    return noun if noun == "text" else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml_scalar(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
