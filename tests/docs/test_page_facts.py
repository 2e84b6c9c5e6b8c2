"""Facts that pages name and code decides: counts, defaults, lists of ops, examples and packages, the public API."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tigon
from tigon.models import MODELS
from tigon.ops import OPS
from tigon.recipe.keys import Recipe

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md")
    if "docs/log/" not in path.as_posix()
}
MOST_LINES = 100
"""Of the changelog until a second version is released."""


MOST_WORDS = 4_200


def test_no_page_is_too_long_to_be_read() -> None:
    """A longer page is split by what a reader looks for. The log is a diary, and nobody reads it whole."""
    words = {page: sum(bool(re.search(r"\w", word)) for word in text.split()) for page, text in PAGES.items()}
    assert not {page: number for page, number in words.items() if number > MOST_WORDS}


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level."""
    level = heading.partition(" ")[0]
    return re.split(rf"^{level} ", PAGES[page].partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def scripts() -> list[str]:
    return sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "tiny.py")


def test_changelog_says_what_the_first_release_is_and_no_history() -> None:
    text = PAGES["CHANGELOG.md"]
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == ["Added"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("fused ops", len(OPS)),
        ("model families have a row", len(MODELS)),
        ("models for GPUs of 8 to 80 GB", sum(path.is_dir() for path in (ROOT / "recipes" / "models").iterdir())),
        ("scripts that train in seconds", len(scripts())),
        ("notebooks", len([*(ROOT / "examples" / "notebooks").glob("*.ipynb")])),
    ],
)
def test_counts_of_the_changelog_are_those_of_the_tree(words: str, count: int) -> None:
    text = " ".join(PAGES["CHANGELOG.md"].split())
    assert re.findall(rf"(\d+) {words}", text) == [str(count)]


def test_table_of_ops_has_every_op() -> None:
    first_cells = [line.split("|")[1] for line in PAGES["docs/ops.md"].splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(OPS)


def test_table_of_examples_has_every_script_and_notebook() -> None:
    linked = re.findall(r"^\| \[[\w.]+\]\(([\w./]+)\)", PAGES["examples/README.md"], re.MULTILINE)
    notebooks = sorted(f"notebooks/{path.name}" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
    assert sorted(linked) == sorted([*scripts(), *notebooks])


def test_tree_of_the_architecture_has_every_package_and_public_file() -> None:
    tree = PAGES["docs/architecture.md"].partition("src/tigon/\n")[2].partition("```")[0]
    package = ROOT / "src" / "tigon"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py") if not path.name.startswith("_")}
    listed = re.findall(r"^  (\w+/|\w+\.py) ", tree, re.MULTILINE)
    assert len(listed) == len({*listed}) and folders | files == {*listed}


def test_modules_of_the_public_api_list_their_names() -> None:
    """CONTRIBUTING.md promises them to users, so each says which names it promises."""
    sentence = section("CONTRIBUTING.md", "## Versions").partition("The public API is")[2].partition("commands")[0]
    modules = re.findall(r"`(tigon(?:\.\w+)*)`", sentence.replace("tigon.__all__", "tigon"))
    assert {"tigon", "tigon.nn", "tigon.profiler"} <= {*modules}
    for name in modules:
        module = importlib.import_module(name)
        promised = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        assert promised and all(hasattr(module, one) for one in promised), name


def test_table_of_flags_has_every_flag_of_patch() -> None:
    rows = section("docs/patching.md", "## Flags").partition("| value of a flag |")[0]
    flags = [*inspect.signature(tigon.patch).parameters.values()]
    named = {flag.name for flag in flags if flag.kind is inspect.Parameter.KEYWORD_ONLY}
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) and {*re.findall(r"^\| `(\w+)` \|", rows, re.M)} == named


def test_every_record_is_listed_with_the_command_that_writes_it() -> None:
    """A name in capitals stands for any name, and `*` for the rest of one."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"`([^`]+\.json)`", " ".join(rows))
    forms = [re.sub(r"<suite>|NAME|\*", lambda _: "[\\w.-]*", name) for name in named]
    records = sorted((ROOT / "benchmarks" / "results").glob("*/**/*.json"))
    paths = {path.relative_to(ROOT / "benchmarks" / "results").as_posix().partition("/")[2] for path in records}
    assert not {path for path in paths if not any(re.fullmatch(form, path) for form in forms)}
    assert not [name for name, form in zip(named, forms, strict=True) if not any(re.fullmatch(form, p) for p in paths)]


# --- defaults --------------------------------------------------------------------------------------------------------


def default_of(dotted: str) -> Any:
    """The default of a recipe key."""
    name, _, key = dotted.partition(".")
    (part,) = (field for field in fields(Recipe) if field.name == name)
    return getattr(part.default, key)


_KEY = r"`((?:data|train|model|lora|output|eval|sharding|heads|comparison|post_training)\.\w+)"
_FORMS = (
    rf"{_KEY}: ?([^`]+)`, (?:which is )?the default",  # `train.checkpointing: auto`, the default
    rf"the default of a recipe: {_KEY}: ?([^`]+)`",
    rf"^\| {_KEY}` \| `?([\w.-]+)`? \(the default\)",  # a row of a table
)


def named_defaults() -> list[tuple[str, str, str]]:
    """(page, key, value) of each default that a page names."""
    return [
        (page, key, value)
        for page, text in PAGES.items()
        for form in _FORMS
        for key, value in re.findall(form, text, re.MULTILINE)
    ]


def test_defaults_that_pages_name_are_those_of_the_recipe() -> None:
    named = named_defaults()
    assert len(named) >= 6
    wrong = [(page, key, value) for page, key, value in named if str(default_of(key)) != value]
    assert not wrong
