"""The command line as typed: quick help, version, and both ways in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forks import forks, in_forks, python

pytest.importorskip("typer")
SRC = Path(__file__).parents[1] / "src"


@forks
def test_version_is_printed():
    import tigon as package

    done = python("--version", module="tigon")
    assert (done.returncode, done.stdout.strip()) == (0, f"tigon {package.__version__}")


def test_help_imports_nothing_heavy_and_lists_the_verbs():
    code = (
        "import sys; from tigon.cli import app\n"
        "try: app.main()\n"
        "finally: print('HEAVY', [n for n in ('transformers', 'matplotlib', 'triton', 'yaml') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(SRC)})  # fmt: skip
    assert "HEAVY []" in done.stdout and "train" in done.stdout


def test_a_wrong_verb_or_flag_exits_with_two(monkeypatch, capsys):
    from tigon.cli import app

    for arguments in (("trian",), ("train", "--nope", "r.yaml"), ("train",)):
        monkeypatch.setattr(sys, "argv", ["tigon", *arguments])
        with pytest.raises(SystemExit) as stop:
            app.main()
        said = capsys.readouterr()
        assert stop.value.code == 2 and said.out == "" and said.err.startswith("tigon: ")
        assert said.err.count("\n") == 1 and "--help" in said.err


def test_no_verb_prints_the_help(monkeypatch, capsys):
    from tigon.cli import app

    monkeypatch.setattr(sys, "argv", ["tigon"])
    with pytest.raises(SystemExit) as stop:
        app.main()
    said = capsys.readouterr()
    assert stop.value.code == 2 and "Commands:" in said.out + said.err


def ends_without_a_reader(*arguments):
    """The exit code and stderr of a command whose reader has gone before it prints."""
    read, write = os.pipe()
    os.close(read)
    code = f"import sys; sys.argv = ['tigon', *{arguments!r}]; from tigon.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(SRC)})  # fmt: skip
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "argument", ["--version", pytest.param("--help", marks=pytest.mark.second_proof("it is printed as the version is"))]
)
def test_a_reader_that_has_gone_ends_a_command_with_141(argument):
    """typer would end it with 1."""
    assert ends_without_a_reader(argument) == (141, "")


@forks
def test_a_reader_that_has_gone_ends_a_plan_with_141():
    """rich would end it with 1."""
    from tigon.cli import app

    read, write = os.pipe()
    os.close(read)

    def plan(_):
        os.dup2(write, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = [
            "tigon",
            "plan",
            "tigon-demo",
            *["--gpu", "4090", "--batch", "1", "--seq", "64", "--method", "full"],
        ]
        app.main()

    (status,) = in_forks(plan)
    os.close(write)
    assert os.waitstatus_to_exitcode(status) == 141


def test_a_bug_keeps_its_traceback(monkeypatch):
    from tigon.cli import app

    monkeypatch.setattr(sys, "argv", ["tigon", "train", "r.yaml"])
    monkeypatch.setattr("tigon.trainer.run.train", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app.main()


def test_a_path_that_the_system_refuses_ends_in_one_line(monkeypatch, capsys):
    """An error of the system that no typed path is to blame for keeps its traceback."""
    from tigon.cli import app

    monkeypatch.setattr(sys, "argv", ["tigon", "train", "a" * 300])
    with pytest.raises(SystemExit) as stop:
        app.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "File name too long" in said
    monkeypatch.setattr("tigon.trainer.run.train", lambda *a, **k: Path("/nowhere/at/all").read_text())
    with pytest.raises(FileNotFoundError):
        app.main()
