"""The install commands of messages and pages work today: tigon is on no index, so they name a checkout or an origin."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tigon._install import install_command

ROOT = Path(__file__).parents[2]
TEXTS = [
    *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir(), *(ROOT / "src").rglob("*.py"),
    *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").iterdir(),
]  # fmt: skip
COMMAND = re.compile(r"pip install[^`\n]*?'?([^\s'`]*)\[([a-z,]+)\]")


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


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_written_install_commands_name_a_checkout_and_existing_extras(path: Path) -> None:
    if path == Path(__file__) or path.is_dir():
        return
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    for origin, named in COMMAND.findall(path.read_text(encoding="utf-8")):
        assert origin == "." or origin.endswith("}"), f"{path}: {origin}[{named}] is on no index"
        assert "{" in named or {*named.split(",")} <= extras


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["train", "r.yaml"], 2), ([], 2)])
def test_without_typer_only_the_version_is_answered(arguments: list[str], code: int) -> None:
    run = f"import sys; sys.modules['typer'] = None; sys.argv = {['tigon', *arguments]!r}\n"
    run += "from tigon.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == "" and done.stderr.count("\n") == 1 and install_command("train") in done.stderr
    else:
        assert re.fullmatch(r"tigon \d+\.\d+\.\d+\n", done.stdout) and done.stderr == ""
