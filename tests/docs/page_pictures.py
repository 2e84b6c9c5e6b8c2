"""Screenshots of tigon's HTML pages in a real browser, as docs/img/pages/NAME-WAY.png: `make pictures` makes them.

    python tests/docs/page_pictures.py report=runs/quickstart/report.html profile=runs/quickstart-profile/profile.html

The sweep's page is written from a committed record. Each page is taken light, dark and at a phone's width.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from browser import look
from tigon.sweep import report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "img" / "pages"
SWEEP = ROOT / "benchmarks" / "results" / "nvidia-h200" / "study" / "batch.json"
COLOURS = 256
"""A palette halves the files. It is chosen to cover the range of colours, so that small coloured marks keep theirs."""


@dataclass(frozen=True)
class Way:
    """How a page is looked at."""

    width: int
    height: int
    dark: bool = False


# Chromium's window has at least 500 points, so a phone's page is in a frame of its own width.
WAYS = {"light": Way(1200, 1000), "dark": Way(1200, 1000, dark=True), "phone": Way(390, 844)}


def take(page: Path, name: str, folder: Path) -> None:
    """Write the pictures of a page."""
    if not page.is_file():
        raise SystemExit(f"{page} is not a file")  # a browser shows an error page instead, and reports success
    for title, way in WAYS.items():
        picture = folder / f"{name}-{title}.png"
        visited = _framed(page, way) if title == "phone" else page
        look(visited, width=max(way.width, 500), height=way.height, dark=way.dark, picture=picture)
        with Image.open(picture) as image:
            small = (
                image.convert("RGB")
                .crop((0, 0, way.width, way.height))
                .quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
            )
        small.save(picture, optimize=True)


def _framed(page: Path, way: Way) -> Path:
    """A page that shows another as a phone of that width does."""
    frame = page.with_name(f"framed-{page.name}")
    style = f"border:0;width:{way.width}px;height:{way.height}px"
    frame.write_text(f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe>', encoding="utf-8")
    return frame


def sweep_page(folder: Path) -> Path:
    """The page of the study's batches, from the committed record."""
    (folder / "charts").mkdir()
    report.write(json.loads(SWEEP.read_text(encoding="utf-8")), folder)
    return folder / "report.html"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, page in (argument.split("=", 1) for argument in sys.argv[1:]):
        take(Path(page).resolve(), name, FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        take(sweep_page(Path(folder).resolve()), "sweep", FOLDER)


if __name__ == "__main__":
    main()
