"""A recipe small enough to train in a second, and the real command run in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import TINY_MODEL, words

from commands import tigon, undrawn  # noqa: F401
from wrong_ops import wrong  # noqa: F401

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


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path, Callable[[], None]], None]:
    """kept(name, here, make): fill the folder `here` by make(), or with a copy of what it once made of this name."""
    store = tmp_path_factory.mktemp("kept")

    def fill(name: str, here: Path, make: Callable[[], None]) -> None:
        if (store / name).exists():
            shutil.copytree(store / name, here, dirs_exist_ok=True)
        else:
            make()
            shutil.copytree(here, store / name)

    return fill


@pytest.fixture
def cut(recipe: Any, tigon: Any, here: Path, kept: Any) -> tuple[Path, Path, Path]:  # noqa: F811
    """(recipe, folder of a run cut back to checkpoint-2 of 4, its whole twin)"""
    whole, run = here / "runs" / "whole", here / "runs" / "r"

    def make() -> None:
        assert tigon("train", recipe(train={"save_steps": 2}), "--set", "output.name=whole").code == 0
        shutil.copytree(whole, run)
        (run / "summary.json").unlink()
        shutil.rmtree(run / "checkpoints" / "checkpoint-4")

    kept("two of four steps", here, make)
    return here / "recipe.yaml", run, whole
