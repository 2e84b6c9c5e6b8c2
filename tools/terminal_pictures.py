"""Draw commands and what they print as docs/img/terminal/NAME.svg: `make pictures` runs it.

    python tools/terminal_pictures.py [NAME]...

Each command runs in a terminal of its own. The picture is the screen that it leaves, so a progress bar is shown as it
ended. Times and memory are those of the machine that draws.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "img" / "terminal"
COMMANDS: Mapping[str, str] = {
    "plan": "tigon plan llama-3.1-8b --gpu rtx-4090 --batch 1 --seq 32768 --qlora",
    "train": "tigon train examples/first-run/recipe.yaml",
    "doctor": "tigon doctor smollm2-135m",
}
COLUMNS, MOST_LINES = 110, 200
_KERNEL = re.compile(r" on (Linux)-\S+")
_WEB_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def screen_of(command: str) -> list[Text]:
    """The lines of the screen after the command. It runs in an empty folder beside the examples and the recipes."""
    screen = pyte.Screen(COLUMNS, MOST_LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", MOST_LINES, COLUMNS, 0, 0))
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "recipes"):
            Path(folder, name).symlink_to(ROOT / name)
        child = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
            # An empty cache, whose path a picture would show.
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "XDG_CACHE_HOME": f"{folder}/cache"},
        )  # fmt: skip
        os.close(theirs)
        while piece := _read(ours):
            stream.feed(piece)
        if code := child.wait():
            raise SystemExit(f"{command} ended with exit code {code}:\n" + "\n".join(screen.display).rstrip())
    lines = [_line(screen.buffer[row]) for row in range(MOST_LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _read(ours: int) -> bytes:
    try:
        return os.read(ours, 1 << 16)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def _line(cells: Any) -> Text:
    line = Text()
    for style, run in itertools.groupby((cells[column] for column in range(COLUMNS)), key=_style):
        line.append("".join(cell.data for cell in run), style)
    line.rstrip()
    if kernel := _KERNEL.search(line.plain):  # of tigon doctor: the release of the kernel says nothing to a reader
        line = line[: kernel.end(1)]
    return line


def _style(cell: Any) -> Style:
    return Style(color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, underline=cell.underscore)


def _colour(name: str) -> str | None:
    """pyte's name of a colour as rich's."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    name = {"brown": "yellow", "brightbrown": "brightyellow"}.get(name, name)
    return name.replace("bright", "bright_", 1) if name.startswith("bright") else name


def drawing(command: str, lines: list[Text]) -> str:
    """An SVG that loads nothing from the network."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.assemble(("$ ", "green"), (command, "bold")), soft_wrap=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id="terminal", font_aspect_ratio=0.61)
    title = f"<title>{command}</title>"
    return _WEB_FONT.sub("", svg).replace("<style>", f"{title}\n    <style>", 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="*", choices=[*COMMANDS, []], help="all, if left out")
    FOLDER.mkdir(exist_ok=True)
    for name in parser.parse_args().name or COMMANDS:
        (FOLDER / f"{name}.svg").write_text(drawing(COMMANDS[name], screen_of(COMMANDS[name])), encoding="utf-8")


if __name__ == "__main__":
    main()
