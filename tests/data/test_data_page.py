"""The tables of sources and formats in docs/data.md: their examples are what tigon reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tigon.data.source.formats import FORMATS, check_source, detect, read_row
from tigon.data.source.rows import READERS
from tigon.recipe.keys import DataConfig

yaml = pytest.importorskip("yaml")
PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def table(header):
    body = PAGE.partition(header)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines()[2:]]


def test_every_format_has_an_example_that_is_recognised_as_it():
    rows = {name.strip("`"): example.strip("`") for name, example, _ in table("| `data.format` | example of a row |")}
    assert set(rows) == set(FORMATS)
    for name, example in rows.items():
        row = json.loads(example)
        assert detect(row, "page:1", {}) == name
        assert read_row(name, row, "page:1").format == name


def test_every_source_of_the_page_is_one_that_a_recipe_takes():
    examples = [re.findall(r"`([^`]+)`", cell) for _, cell, _ in table("| source | in a recipe | notes |")]
    named = []
    for example in (text for texts in examples for text in texts):
        value = yaml.safe_load(example)
        for source in DataConfig(source=tuple(value if isinstance(value, list) else [value])).sources():
            check_source(source)
            named.append(source.name)
    assert set(READERS) <= {Path(name).suffix for name in named} and "owner/name" in named
