"""The install commands of messages and pages work today: tigon is on no index, so they name a checkout or an origin."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import tigon
from tigon._install import install_command
from tigon.cli import app

ROOT = Path(__file__).parents[2]
TEXTS = [
    *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir(), *(ROOT / "src").rglob("*.py"),
    *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").iterdir(),
]  # fmt: skip
COMMAND = re.compile(r"pip install[^`\n]*?'?(\.|tigon)\[([a-z,]+)\]")
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))


class Installed:
    def __init__(self, origin: object) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/tigon", "dir_info": {"editable": True}},
            "pip install -e '/home/me/tigon[train]'",
        ),
        ({"url": "file:///home/me/tigon", "dir_info": {}}, "pip install '/home/me/tigon[train]'"),
        (
            {"url": "file:///tmp/a%20b/tigon-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/a b/tigon-0.1.0-py3-none-any.whl[train]'",
        ),
        (
            {"url": "https://example.org/tigon.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'tigon[train] @ git+https://example.org/tigon.git@abc'",
        ),
        (
            {"url": "https://example.org/tigon-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'tigon[train] @ https://example.org/tigon-0.1.0-py3-none-any.whl'",
        ),
        (None, "pip install 'tigon[train]'"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="the paths are POSIX's")
def test_command_names_where_tigon_came_from(origin: object, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    assert install_command("train") == command


def test_command_names_the_checkout_of_a_package_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("bnb") == f"pip install -e '{ROOT}[bnb]'"


def test_written_install_commands_name_a_checkout_and_existing_extras() -> None:
    wrong = {}
    for path in TEXTS:
        if path != Path(__file__) and path.is_file() and (found := wrong_commands(path.read_text(encoding="utf-8"))):
            wrong[path.relative_to(ROOT).as_posix()] = found
    assert not wrong


def wrong_commands(text: str) -> list[str]:
    """The commands that install tigon from an index, or with an extra that it does not have."""
    return [f"{origin}[{named}]" for origin, named in COMMAND.findall(text)
            if origin == "tigon" or not {*named.split(",")} <= EXTRAS]  # fmt: skip


def test_command_that_cannot_work_is_found() -> None:
    assert wrong_commands("run pip install -U 'tigon[train]'") == ["tigon[train]"]
    assert wrong_commands("pip install -e '.[train,peft]'") == [".[train,peft]"]
    assert not wrong_commands("pip install -e '.[train,trl]' 'liger-kernel[cutedsl]'")


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "r.yaml"], 2), ([], 2)])
def test_without_typer_only_the_version_is_answered(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["tigon", *arguments])
    with pytest.raises(SystemExit) as stop:
        app.main()
    printed = capsys.readouterr()
    assert stop.value.code == code
    if code:
        assert printed.out == "" and printed.err.count("\n") == 1 and install_command("train") in printed.err
    else:
        assert printed.out == f"tigon {tigon.__version__}\n" and printed.err == ""
