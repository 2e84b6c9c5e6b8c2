"""The pictures of the documentation show what tigon prints and draws, and load nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="matplotlib brings it")

import page_pictures
from PIL import Image

from browser import needs_chromium
from tigon.ops import OPS

IMAGES = page_pictures.ROOT / "docs" / "img"
WORDS = {
    "plan": ("tigon plan llama-3.1-8b", "Recipes that fit", "Train with the first:", "QLoRA"),
    "train": ("tigon train", "60/60", "runs/first/report.html"),
    "doctor": ("tigon doctor", "0 problems", *OPS),
}
each_terminal = pytest.mark.parametrize("name", WORDS)


@each_terminal
def test_terminal_shows_what_the_command_prints_today(name: str) -> None:
    root = ElementTree.parse(IMAGES / "terminal" / f"{name}.svg").getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    shown = " ".join(texts).replace("\xa0", " ")
    assert not [word for word in WORDS[name] if word not in shown], "make pictures draws it again"


@each_terminal
def test_terminal_loads_nothing_and_names_no_machine(name: str) -> None:
    text = (IMAGES / "terminal" / f"{name}.svg").read_text(encoding="utf-8")
    assert "url(http" not in text and "@font-face" not in text
    assert not re.search(r"Linux-\d|/home/|/root/|/tmp/", text)


def brightness(picture: Path) -> int:
    """That of the lower left corner, where a page shows its paper."""
    with Image.open(picture) as image:
        return int(image.convert("L").getpixel((2, image.height - 3)))


@pytest.mark.parametrize("way", page_pictures.WAYS)
@pytest.mark.parametrize("name", ["report", "profile", "sweep"])
def test_picture_of_a_page_has_its_size_and_paper(name: str, way: str) -> None:
    picture, wanted = IMAGES / "pages" / f"{name}-{way}.png", page_pictures.WAYS[way]
    with Image.open(picture) as image:
        assert image.size == (wanted.width, wanted.height)
    assert (brightness(picture) < 80) == wanted.dark


@needs_chromium
def test_pictures_are_taken_of_a_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<style>body{margin:0;background:white} @media (prefers-color-scheme: dark) {body{background:black}}</style>"
        '<p style="background:#c2410c;margin:0;width:20px;height:20px"></p>',
        encoding="utf-8",
    )
    page_pictures.take(page, "page", tmp_path)
    bright = {way: brightness(tmp_path / f"page-{way}.png") > 128 for way in page_pictures.WAYS}
    assert bright == {"light": True, "dark": False, "phone": True}
    with Image.open(tmp_path / "page-light.png") as image:
        mark = image.convert("RGB").getpixel((10, 10))
    assert max(abs(a - b) for a, b in zip(mark, (0xC2, 0x41, 0x0C), strict=True)) < 8, "a small mark keeps its colour"


def test_page_that_is_missing_gives_an_error_instead_of_a_picture(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"gone\.html is not a file"):
        page_pictures.take(tmp_path / "gone.html", "page", tmp_path)
    assert not [*tmp_path.iterdir()]
