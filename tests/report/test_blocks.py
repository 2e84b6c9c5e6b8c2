"""A report as data becomes a page and Markdown: every block is in both, and no text of the user's becomes markup."""

from __future__ import annotations

import html.parser
import io
import json
import re

import pytest

pytest.importorskip("jinja2")

from tigon.report import markdown, page
from tigon.report.blocks import (
    ChartImage,
    Code,
    Columns,
    Continuations,
    Folded,
    Heading,
    Items,
    Paragraph,
    Report,
    Scripted,
    Tiles,
    facts,
)
from tigon.report.chart import Drawn
from tigon.report.table import Table

EVIL = "</script><u onclick=x>|`~` [l](javascript:0) {{ 7 * 7 }}"


def everything(text):
    """A report with every block, and `text` in every place for texts. Each place has its own number."""
    numbers = (f"{text} {number}" for number in range(100))
    a = numbers.__next__
    blocks = [
        Heading(a()), Heading(a(), 3), Paragraph(a()), Paragraph(a(), is_note=True), Items([a(), a()]),
        Tiles([(a(), a())]), Code(a()), Continuations(a(), [(a(), a())]), ChartImage("loss", a()),
        Scripted("memory", a()), Columns([[Paragraph(a())], [Heading(a(), 3)]]), Folded(a(), [Paragraph(a())]),
        Table((a(), a()), [(a(), a())], title=a(), note=a()), facts([(a(), a())]),
    ]  # fmt: skip
    return Report(kind="test", title=a(), lead=a(), blocks=blocks), int(a().rpartition(" ")[2])


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


CHARTS = {"loss": Drawn("<svg>wide</svg>", "<svg>phone</svg>")}


def test_page_shows_every_text_of_every_block_as_text():
    report, places = everything(EVIL)
    seen = Page(page.render(report, CHARTS))
    shown = [*seen.text.splitlines(), *(value for _, value in seen.attributes)]
    for number in range(places):
        assert any(f"{EVIL} {number}" in line for line in shown), number
    assert {"script", "u", "link", "img"}.isdisjoint(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "wide" in seen.text and "phone" in seen.text


def test_page_loads_nothing():
    report, _ = everything("http://example.org/x.css url(http://example.org)")
    text = page.render(report, CHARTS)
    seen = Page(text)
    policy = next(value for _, value in seen.attributes if "default-src" in value)
    assert policy.startswith("default-src 'none'") and "script-src" not in policy
    assert not {"src", "href", "xlink:href", "action"} & {name for name, _ in seen.attributes}
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "@import" not in style and "url(" not in style


def test_markdown_shows_every_text_of_every_block_as_text():
    report, places = everything(EVIL)
    text = markdown.render(report)
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<" not in outside and not re.search(r"(?<!\\)\]\(javascript", outside)
    plain = text.replace("\\", "").replace("&lt;", "<").replace("&gt;", ">")
    for number in range(places):
        assert f"{EVIL} {number}" in plain, number
    assert "](charts/loss.svg)" in text


def test_script_is_allowed_by_its_hash_and_its_data_cannot_end_the_element():
    report = Report(kind="test", title="t", lead="", blocks=[], script="run();", data={"label": EVIL})
    text = page.render(report, {})
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in data and json.loads(data) == {"label": EVIL}
    assert "script-src 'sha256-" in text and text.count("<script") == 2


def test_files_of_a_report_are_the_page_the_markdown_and_each_chart():
    written = {}
    page.write(everything("words")[0], CHARTS, written.__setitem__)
    assert list(written) == ["charts/loss.svg", "report.html", "report.md"]
    assert written["charts/loss.svg"] == "<svg>wide</svg>"


def test_table_aligns_numbers_to_the_right_and_escapes_its_cells():
    table = Table(("na|me", "size"), [("a*", "1"), ("b\nc", "2")])
    lines = ["| na\\|me | size |", "| --- | ---: |", "| a\\* | 1 |", "| b c | 2 |"]
    assert table.markdown().splitlines() == lines


def test_table_without_titles_has_no_header_on_a_page():
    assert "<th" not in page.render(Report(kind="test", title="t", lead="", blocks=[facts([("a", "b")])]), {})


def test_table_on_a_terminal_keeps_brackets_as_text():
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    Table(("[b]name", "size"), [("[red]x", "1")], title="[i]title").show(console.Console(file=out, width=60))
    assert "[b]name" in out.getvalue() and "[red]x" in out.getvalue() and "[i]title" in out.getvalue()
