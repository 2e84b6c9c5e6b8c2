"""The pages of the site that are generated while it is built: the API, the commands, the recipe keys and the ops.

Each page comes from the registry that the program itself uses, so none of them is committed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs runs this file and does not find the tests

import tigon
from tests.ops.cases import cases_of
from tigon.ops import OPS

ROOT = Path(__file__).parents[1]
MODULES = {
    "nn": "Modules that replace those of a model.",
    "losses": "Post-training losses from log-probabilities.",
    "medusa": "Heads that predict several tokens ahead.",
    "errors": "Every error that tigon raises on purpose.",
    "integrations.trl": "TRL's trainers with tigon's head.",
    "integrations.axolotl": "tigon as a plugin of Axolotl.",
    "integrations.hub_kernels": "tigon's layers for transformers' `set_use_kernels`.",
    "integrations.experts": "tigon's experts for transformers' `experts_implementation`.",
    "callback": "A callback of the Hugging Face Trainer that patches, plans and measures.",
    "profiler": "The peak memory of your own code.",
    "compat.liger": "Liger Kernel's names. [Coming from Liger](../../liger.md) lists them.",
}
"""Public module -> what it holds. `tigon` itself has a page of its own."""


def pages() -> dict[str, str]:
    """Path below the site's pages -> Markdown."""
    found = {"reference/commands.md": commands(), "reference/recipe-keys.md": recipe_keys()}
    found |= {f"reference/ops/{name}.md": op(name) for name in OPS}
    found["reference/api/tigon.md"] = top_level()
    for name, about in MODULES.items():
        title = f"# `tigon.{name}`\n\n{about}\n\n"
        found[f"reference/api/{name.replace('.', '-')}.md"] = f"{title}::: tigon.{name}\n"
    return found


def top_level() -> str:
    """The functions and classes of `tigon`, without its modules and its ops, which have pages of their own."""
    lines = ["# `tigon`", "", "The [ops](../../ops.md) are functions of `tigon` too.", ""]
    for name in tigon.__all__:
        value = getattr(tigon, name)
        if name not in OPS and not inspect.ismodule(value) and name != "__version__":
            lines += [f"::: {_home(value)}", ""]
    return "\n".join(lines)


def _home(value: Any) -> str:
    """The dotted name under which a function or class is defined."""
    return f"{value.__module__}.{value.__qualname__}"


def op(name: str) -> str:
    """One op: its function, its measured errors and its maths."""
    row = OPS[name]
    lines = [f"# `{name}`", "", f"::: {_home(getattr(tigon, name))}", ""]
    if row.errors:
        bound = f"it may be at most {row.error_factor:g} times that of the unfused PyTorch op"
        lines += ["## Numerical error", ""]
        lines += [f"The largest relative error against fp64 on an H200, over {len(cases_of(row))} cases; {bound}."]
        lines += ["", "| dtype | error |", "|---|---:|"]
        lines += [*(f"| {dtype} | {error:.1e} |" for dtype, error in row.errors.items()), ""]
    if maths := _maths(name):
        lines += ["## Maths", "", maths, ""]
    return "\n".join(lines)


def _maths(name: str) -> str:
    """The section about an op on one of the pages docs/math*.md, or nothing."""
    for page in (ROOT / "docs").glob("math*.md"):
        text = page.read_text(encoding="utf-8")
        if found := re.search(rf"^## [^\n]*`{name}`[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
            body = re.sub(r"\]\(#", f"](../../{page.name}#", found[1])
            body = re.sub(r"\]\((math[\w-]*\.md)", r"](../../\1", body)
            body = re.sub(r"^#", "##", body, flags=re.MULTILINE).strip()
            return f"From [the mathematics of the ops](../../{page.name}). {body}"
    return ""


def commands() -> str:
    """Every command of the command line with its options."""
    lines = [
        "# Commands", "", "An error that you can fix is one line on stderr, and exit code 2.", "",
    ]  # fmt: skip
    for name, command in _walk(_click_app(), "tigon"):
        lines += [f"## `{name}`", "", (command.help or "").strip(), ""]
        rows = [_option(parameter) for parameter in command.params]
        if rows:
            lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _click_app() -> Any:
    import typer

    from tigon.cli import app

    return typer.main.get_command(app._app())


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, below in getattr(command, "commands", {}).items():
        yield from _walk(below, f"{name} {child}")


def _option(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        words = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        words = ", ".join(f"`{option}`" for option in parameter.opts)
        words += f" `{parameter.metavar}`" if parameter.metavar else ""
    default = parameter.default
    shown = isinstance(default, str | int | float) and default is not False
    about = _cell(getattr(parameter, "help", None) or "")
    return f"| {words} | {about} | {f'`{default}`' if shown else ''} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def recipe_keys() -> str:
    """Every recipe key, one heading each, so that the search finds it."""
    from tigon.recipe.keys import SECTIONS

    lines = ["# Recipe keys", "", "[Recipes](../recipe.md) are explained elsewhere; this page is for the search.", ""]
    for section, form in SECTIONS.items():
        lines += [f"## `{section}`", "", (inspect.getdoc(form) or "").strip(), ""]
        for field in dataclasses.fields(form):
            about = str(field.metadata.get("help", ""))
            lines += [f"### `{section}.{field.name}`", "", about, "", f"Default: {_default(field)}.", ""]
    return "\n".join(lines)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "none" if field.default is None else f"`{field.default!r}`"
