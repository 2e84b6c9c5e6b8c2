"""Prints the answer to a repeated `tigon plan` from a file, without the search, its traces and transformers.

The file's name is the hash of everything that the output depends on: the options, the model's config, the allocator's
setting, the terminal's width and colours, and the versions in `disk_cache`. Plans of recipes, and those with --images,
--set or --plot, depend on more files. They are computed each time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tigon._files import read_text
from tigon.cli.plan_request import RECIPE_ENDINGS
from tigon.cli.shared import stdout_console
from tigon.models.loading.presets import PRESETS, carried
from tigon.planner.render.terminal import not_installed
from tigon.planner.simulate.allocator import given_settings
from tigon.planner.trace.cache import disk_cache
from tigon.techniques import TECHNIQUES

_READS_FILES = ("images", "assignments", "plot")
"""Options that name files, or read the model's other files."""


def print_once(run: Callable[..., None], model: str, options: Mapping[str, Any]) -> None:
    """Print what `run(model, **options)` prints, from its file if there is one.

    Only an output without a word on stderr is kept.
    """
    question = _question(model, options)
    answer = None if question is None else disk_cache.read("answer", question)
    if isinstance(answer, str):
        sys.stdout.write(answer)
        return
    with _copied("stdout") as printed, _copied("stderr") as warned:
        run(model, **options)
    if question is not None and not any(warned):
        disk_cache.write("answer", question, "".join(printed))


def _question(model: str, options: Mapping[str, Any]) -> str | None:
    """Text that holds everything that the output depends on; None if that is not known."""
    if model.endswith(RECIPE_ENDINGS) or any(options[name] for name in _READS_FILES):
        return None
    config = _config(carried(model) or model)
    if config is None:
        return None
    return json.dumps([model, config, options, given_settings(), _screen(options), _missing()])


def _config(name: str) -> str | None:
    """Text that holds all that a model's config is made of; None if that cannot be known without the network."""
    if name in PRESETS:
        return json.dumps(["preset", name])  # the presets are part of tigon's sources
    path = Path(name)
    try:
        file = path / "config.json" if path.is_dir() else path
        return json.dumps(["file", str(file.absolute()), read_text(file)]) if name and file.exists() else None
    except (OSError, UnicodeDecodeError):  # load_config says what is wrong
        return None


def _missing() -> list[str]:
    """The packages that a recipe may need and this Python lacks, which the output names."""
    return not_installed(sorted({name for technique in TECHNIQUES.values() for name in technique.needs}))


def _screen(options: Mapping[str, Any]) -> str:
    if options["as_json"]:
        return ""
    console = stdout_console()
    return f"{console.options} {console.color_system} {console.no_color}"


@contextlib.contextmanager
def _copied(name: str) -> Iterator[list[str]]:
    """Gives the texts that the block writes to sys.stdout or sys.stderr."""
    stream, written = getattr(sys, name), list[str]()
    setattr(sys, name, _Copying(stream, written))
    try:
        yield written
    finally:
        setattr(sys, name, stream)


class _Copying:
    """A text stream that keeps a copy of what it writes."""

    def __init__(self, stream: TextIO, written: list[str]) -> None:
        self._stream, self._written = stream, written

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._written.append(text)
        return self._stream.write(text)
