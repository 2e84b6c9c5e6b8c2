"""The `tigon` command run in the test's own process. A conftest that wants the fixture imports it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

import pytest


class Outcome(NamedTuple):
    """The exit code of a command and the lines of both streams."""

    code: int
    out: str
    err: str

    def error_line(self) -> str:
        """The one line on stderr, after checking that it is one and that the code is 2."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("tigon: ")
        return lines[0]


@pytest.fixture(autouse=True)  # for the folders that import it
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are saved empty, and their axes take anything: matplotlib takes most of a short run's time.

    The marker `charts` has them drawn.
    """
    if request.node.get_closest_marker("charts") or importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    def save_nothing(figure: object, file: TextIO, *, format: str, **options: object) -> None:
        assert format == "svg"
        file.write('<svg xmlns="http://www.w3.org/2000/svg"></svg>')

    monkeypatch.setattr(Figure, "savefig", save_nothing)
    monkeypatch.setattr(Figure, "add_subplot", lambda self, *place, **options: Blank())
    monkeypatch.setattr(Figure, "legend", lambda self, *arguments, **options: None)


class Blank:
    """Axes that draw nothing: each attribute, item and result is another one of these."""

    def __getattr__(self, name: str) -> Blank:
        return self

    def __getitem__(self, index: object) -> Blank:
        return self

    def __iter__(self) -> Iterator[Blank]:
        return iter(())

    def __call__(self, *arguments: object, **options: object) -> Blank:
        return self

    def get_ylim(self) -> tuple[float, float]:
        return 0.0, 1.0

    def get_legend_handles_labels(self) -> tuple[list[object], list[str]]:
        return [], []


def compile_templates_once() -> None:
    """Each run makes the templates of its two reports, and Jinja compiles them for a tenth of a short run's time."""
    if importlib.util.find_spec("jinja2") is None:
        return
    from jinja2 import Environment

    compile_, compiled = Environment.compile, dict[Any, Any]()

    def compile_once(self: Environment, source: Any, *names: Any, **options: Any) -> Any:
        if type(self) is not Environment or not isinstance(source, str) or names or options:
            return compile_(self, source, *names, **options)
        key = source, self.autoescape, self.finalize, self.trim_blocks, self.keep_trailing_newline, *self.filters
        if key not in compiled:
            compiled[key] = compile_(self, source)
        return compiled[key]

    Environment.compile = compile_once


compile_templates_once()


@functools.cache
def command_line() -> Any:
    """`tigon` as typer reads it from the commands' signatures: once, because that takes longer than many a command."""
    import typer

    from tigon.cli import app

    return typer.main.get_command(app._app())


@pytest.fixture
def tigon(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The `tigon` command in this process: main() with these arguments."""

    def call(*arguments: object) -> Outcome:
        from tigon.cli import app

        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")  # so that what a run sets ends with the test
        monkeypatch.setattr(sys, "argv", ["tigon", *map(str, arguments)])
        line = command_line()
        monkeypatch.setattr(app, "_app", lambda: line)
        capsys.readouterr()
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
