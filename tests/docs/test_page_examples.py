"""The documentation against the code: examples print what stands below them, and what a page names exists."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers")
pytest.importorskip("typer")

import page_examples
import torch
from page_examples import (
    ROOT,
    Block,
    pages,
    read_blocks,
    rewrite,
    run_command,
    run_python,
    text_of,
    versions,
)

from tigon import __version__
from tigon.errors import TigonError
from tigon.recipe.aliases import key_of
from tigon.recipe.keys import SECTIONS

BLOCKS = {page: read_blocks(page) for page in pages()}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]
CONSOLE = [block for block in EVERY if block.kind == "console"]
SLOW = ["docs/profile.md"]
"""Pages with examples that only `make pages` runs; each names its versions, commit and date."""
NO_KEYS = {"data.json", "output.register_hook"}
"""Files and attributes that look like a key of a recipe."""
OTHERS_FLAGS = {
    "--speculative-config", "--external_plugins", "--enable-lora", "--max-lora-rank", "--lora-modules",
    "--nproc-per-node",
}  # fmt: skip
"""Options of vLLM, ms-swift, PyTorch's launcher and others that pages name."""
WITHOUT_OUTPUT = {"docs/architecture.md": "src/tigon/"}
"""Blocks of plain text: the page, and how the block begins."""


COMPARED_ELSEWHERE = {
    "$ tigon plan llama-3.2-1b --gpu 24GiB --batch 4 --seq 8192":
        "test_plan_command.py compares the page's numbers without a search",
    "$ tigon doctor": "test_doctor_command.py runs the command and its self-test",
}  # fmt: skip
"""First lines of commands that take seconds -> the reason why another test shows it."""


def by_id(blocks: list[Block]) -> list[Any]:
    def marks(block: Block) -> list[Any]:
        why = [why for command, why in COMPARED_ELSEWHERE.items() if block.body.startswith(command)]
        return [pytest.mark.second_proof(why[0])] if why else []

    return [pytest.param(block, id=block.id, marks=marks(block)) for block in blocks]


# --- examples with output --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", by_id([block for block in CONSOLE if block.mark("slow") is None]))
def test_page_shows_what_the_command_prints(block: Block) -> None:
    if block.mark("no-gpu") is not None and torch.cuda.is_available():
        pytest.skip("the page shows the output of a machine without a GPU")
    difference = block.difference(run_command(block.command, block.mark("shown")))
    assert not difference, difference


@pytest.mark.parametrize("page", [page for page in BLOCKS if any(b.kind in ("python", "hidden") for b in BLOCKS[page])])
def test_python_of_the_page_runs_and_prints_what_stands_below_it(page: str) -> None:
    if page == "docs/liger.md" and importlib.util.find_spec("liger_kernel"):
        pytest.skip("Liger itself is installed, and may have been imported by another test")
    differences = [block.difference(output) for block, output in run_python(BLOCKS[page])]
    assert not any(differences), "\n".join(differences)


def test_every_example_left_out_here_is_listed_and_says_when_it_was_made() -> None:
    left_out = [block for block in CONSOLE if block.mark("slow") is not None]
    assert [block.page for block in left_out] == SLOW
    for block in left_out:
        assert block.mark("slow"), f"{block.id} gives no reason"
        below = text_of(block.page).partition(block.whole)[2][:300]
        assert re.search(r"torch \d.* commit [0-9a-f]{7,}.* \d{4}-\d\d-\d\d", below, re.DOTALL), block.id


@pytest.mark.parametrize("page", BLOCKS)
def test_every_block_of_the_page_is_of_a_kind_that_is_checked(page: str) -> None:
    fenced = [block for block in BLOCKS[page] if block.kind not in ("hidden", "printed")]
    shown = re.sub(r"^<!-- prints -->.*?^<!-- /prints -->$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^ *```", shown, re.MULTILINE)) == 2 * len(fenced)
    assert not re.search(r"\n\n {4}(?:tigon|make|python|pip) ", text_of(page)), "a command that is not in a ```sh block"
    for block in BLOCKS[page]:
        if block.kind == "text":
            assert block.body.startswith(WITHOUT_OUTPUT[page]), f"{block.id}: text that nothing checks"
        else:
            assert block.kind in ("console", "python", "output", "hidden", "printed", "sh", "yaml"), block.id
        if block.kind == "console":
            assert block.body.startswith("$ "), f"{block.id} begins with no `$ command`"
        if block.kind in ("sh", "python", "yaml"):
            assert not re.search(r"^\$ ", block.body, re.MULTILINE), f"{block.id}: an output belongs into ```console"


@pytest.mark.parametrize("block", by_id([block for block in EVERY if block.kind == "yaml"]))
def test_yaml_of_the_page_is_part_of_a_recipe(block: Block) -> None:
    tree = yaml.safe_load(block.body)
    assert tree.keys() <= SECTIONS.keys(), block.id
    for section, values in tree.items():
        assert {key_of(f"{section}.{name}") for name in values} <= {f"{section}.{name}" for name in keys_of(section)}, (
            f"{block.id}: {section}"
        )


# --- what pages name -------------------------------------------------------------------------------------------------


def code_of(page: str) -> Iterator[str]:
    """Code in the text of a page, line by line."""
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)):
        yield " ".join(found[1].split())


def commands_of(page: str) -> list[str]:
    """Commands of tigon's, make's and Python's that a page names, with or without their output."""
    found = [code for code in code_of(page) if re.match(r"(?:tigon [a-z]|make |python -m tigon|tigon --)", code)]
    for block in BLOCKS[page]:
        if block.kind == "sh":
            joined = re.sub(r"\n +(?=\[)", " ", block.body)
            found += [line.partition("  #")[0].strip() for line in joined.splitlines()]
        if block.kind == "console":
            found.append(block.command)
    return found


@cache
def options() -> dict[str, set[str]]:
    """The options of each command of tigon's, as typed."""
    import typer

    from tigon.cli import app

    def of(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        yield name, {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        for child, below in getattr(command, "commands", {}).items():
            yield from of(below, f"{name} {child}".strip())

    return dict(of(typer.main.get_command(app._app()), ""))


def wrong_in(command: str) -> str:
    """The names in a command that do not exist; empty if all exist."""
    program, _, rest = command.partition(" ")
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        named = re.sub(r"[A-Z]+=\S+", "", rest).split()
        return ", ".join(sorted({*named} - {*targets}))
    if program == "python" and rest.startswith("-m tigon"):
        return "" if importlib.util.find_spec(rest.split()[1]) else rest
    missing = [
        path for path in re.findall(r"\b(?:recipes|benchmarks|tools|examples)/[\w./-]+", rest) if not exists(path)
    ]
    missing = [path for path in missing if "NAME" not in path and "GPU" not in path]
    if program == "tigon":
        words = rest.split()
        name = " ".join(words[:2]) if words[0] == "bench" else "" if words[0].startswith("-") else words[0]
        if name not in options():
            return f"tigon {name}"
        missing += sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) - options()[name])
        keys = set(re.findall(r"--(?:beside-)?set (\w+\.[\w.]+)=", rest)) - {"section.key"}
        missing += sorted(key for key in keys if not is_key(key))
    return ", ".join(missing)


def exists(path: str) -> bool:
    return any((base / path).exists() for base in (ROOT, ROOT / "src" / "tigon", ROOT / "docs", ROOT / "tests"))


def keys_of(section: str) -> set[str]:
    return {field.name for field in dataclasses.fields(SECTIONS[section])}


def is_key(dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    field, _, rest = key.partition(".")
    return field in keys_of(section) and (not rest or field == "config")


@pytest.mark.parametrize("page", BLOCKS)
def test_every_command_flag_and_file_in_a_command_exists(page: str) -> None:
    wrong = {command: missing for command in commands_of(page) if (missing := wrong_in(command))}
    assert not wrong


@pytest.mark.parametrize("page", sorted(BLOCKS.keys() - {"CHANGELOG.md"}))
def test_every_recipe_key_exists(page: str) -> None:
    """But for `model.`, which is the name of a variable on many pages."""
    sections = "|".join(sorted(SECTIONS.keys() - {"model"}))
    keys = {key for code in code_of(page) for key in re.findall(rf"^(?:{sections})\.[a-z_]+(?=$|:| )", code)}
    assert not sorted(key for key in keys - NO_KEYS if not is_key(key))


@pytest.mark.parametrize("page", BLOCKS)
def test_every_name_of_the_package_exists(page: str) -> None:
    names = {name for code in code_of(page) for name in re.findall(r"(?<![\w.])tigon(?:\.[A-Za-z_]\w*)+", code)}
    assert not sorted(name for name in names if not resolves(name))


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    found: Any = importlib.import_module("tigon")
    path = "tigon"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            try:
                found = importlib.import_module(path)
            except (ImportError, TigonError):
                return False
        else:
            found = getattr(found, part)
    return True


def test_every_flag_in_the_text_is_an_option_of_a_command() -> None:
    shim = importlib.import_module("tigon.compat.liger.loss_dtype").LOSS_DTYPE_OPTION
    known = set().union(*options().values()) | {shim}
    named = {
        page: {found[0] for code in code_of(page) for found in re.finditer(r"^--[a-z][\w-]*", code)} for page in BLOCKS
    }
    assert {page: flags - known - OTHERS_FLAGS for page, flags in named.items() if flags - known - OTHERS_FLAGS} == {}


@pytest.mark.parametrize("page", BLOCKS)
def test_every_file_that_the_page_names_exists(page: str) -> None:
    folder = r"(?:src|tests|recipes|docs|tools|memory|techniques|models|sweep|train|kernels|doctor|bench|profile)"
    form = re.compile(rf"({folder}/[\w./-]+\.\w+)(?:::\w+)?")
    named = {found[1] for code in code_of(page) if (found := form.fullmatch(code))}
    assert not sorted(name for name in named if not exists(name) and Path(name).stem != "x")


@pytest.mark.parametrize("page", BLOCKS)
def test_every_link_inside_the_documentation_leads_somewhere(page: str) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    assert not dead


def anchors(file: Path) -> set[str]:
    """Anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_another() -> None:
    linked = {
        ((ROOT / page).parent / link.partition("#")[0]).resolve()
        for page in BLOCKS
        for link in re.findall(r"\]\(([^)\s]+\.md[^)\s]*)\)", text_of(page))
        if not link.startswith("http")
    }
    lost = {page for page in BLOCKS if page.startswith("docs/") and (ROOT / page).resolve() not in linked}
    assert not lost - {"docs/index.md"}


# --- the check itself ------------------------------------------------------------------------------------------------


def console(output: str, marks: str = "") -> Block:
    page = f"{marks}```console\n$ tigon --version\n{output}```"
    (block,) = read_blocks("page.md", page)
    assert block.whole == page
    return block


def test_a_changed_number_is_a_difference() -> None:
    made = f"<!-- made with {versions()} -->\n"
    assert not console("peak 100 GiB\n", made).difference("peak 100 GiB\n")
    assert "make pages" in console("peak 100 GiB\n", made).difference("peak 101 GiB\n")


def test_with_other_versions_numbers_may_differ_a_little_and_words_may_not() -> None:
    made = "<!-- made with torch 1.0, transformers 1.0 -->\n"
    assert not console("peak 100 GiB\n", made).difference("peak 104 GiB\n")
    assert console("peak 100 GiB\n", made).difference("peak 106 GiB\n")
    assert console("peak 100 GiB\n", made).difference("largest 100 GiB\n")


def test_what_varies_is_not_compared_and_the_rest_is() -> None:
    block = console("self-test, 3.1 s: 9 ops\n", "<!-- varies: \\d\\.\\d s -->\n")
    assert not block.difference("self-test, 5.0 s: 9 ops\n")
    assert block.difference("self-test, 5.0 s: 8 ops\n")


def test_a_command_that_fails_is_no_example() -> None:
    with pytest.raises(AssertionError, match="exit code 2: tigon: "):
        run_command("tigon plan nowhere --gpu 24GiB")
    with pytest.raises(AssertionError, match="not a command of tigon"):
        run_command("rm -r docs")


def test_python_prints_into_the_region_below_it() -> None:
    text = "<!-- python\nx = 2\n-->\n```python\nprint(x + 1)\n```\n<!-- prints -->\n4\n<!-- /prints -->\n"
    ((block, output),) = run_python(read_blocks("page.md", text))
    assert output == "3\n"
    assert block.difference(output)
    assert block.written(output) == "<!-- prints -->\n3\n<!-- /prints -->"


def test_rewriting_mends_the_page_and_a_second_time_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n```console\n$ tigon --version\ntigon 0\n```\n\nAfter.\n", encoding="utf-8")
    monkeypatch.setattr(page_examples, "ROOT", tmp_path)
    monkeypatch.setattr(page_examples, "workspace", contextlib.nullcontext)
    assert rewrite("page.md")
    written = page.read_text(encoding="utf-8")
    assert f"$ tigon --version\ntigon {__version__}\n```\n\nAfter.\n" in written
    assert f"<!-- made with {versions()} -->" in written
    assert not rewrite("page.md")


def test_wrong_flags_keys_and_files_are_found() -> None:
    assert wrong_in("tigon plan llama-3.2-1b --gpus 2 --gpu h200 --colour red") == "--colour"
    assert wrong_in("tigon train recipes/no.yaml --set train.stepz=3") == "recipes/no.yaml, train.stepz"
    assert wrong_in("tigon fly") == "tigon fly"
    assert wrong_in("make pages demos") == "demos"
    assert not wrong_in("tigon bench kernels --op rope --json ops.json")
