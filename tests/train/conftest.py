"""A recipe small enough to train in a second, and the real command run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_helpers import TINY_MODEL, Outcome, words

yaml = pytest.importorskip("yaml")
for package in ("transformers", "tokenizers", "typer", "rich", "tensorboard", "matplotlib"):
    pytest.importorskip(package)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one, with the tokenizer cache kept inside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def recipe(here: Path) -> Callable[..., Path]:
    """Writes recipe.yaml: a tiny run on text.txt, with sections updated by keyword."""

    def write(name: str = "recipe.yaml", **sections: dict[str, Any]) -> Path:
        text = here / "text.txt"
        if not text.exists():
            text.write_text(words(2000), encoding="utf-8")
        mapping: dict[str, dict[str, Any]] = {
            "model": {"name": "tigon-demo", "kernels": "none", "config": TINY_MODEL},
            "data": {"source": "text.txt", "vocab_size": 400, "sequence_length": 32, "eval_fraction": 0.1},
            "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "device": "cpu"},
            "output": {"name": "r", "sample_tokens": 4, "save_model": False},
        }
        for section, values in sections.items():
            mapping[section] = {**mapping.get(section, {}), **values}
        path = here / name
        path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
        return path

    return write


@pytest.fixture
def tigon(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The `tigon` command in this process: main() with these arguments."""

    def call(*arguments: object) -> Outcome:
        from tigon import cli

        monkeypatch.setattr(sys, "argv", ["tigon", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
