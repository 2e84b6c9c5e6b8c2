"""A typed program of a user's passes Pyright's strict checks. `make types` and `make release-check` run mypy on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("typed_client.py")


def check(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    checker = shutil.which("basedpyright") or shutil.which("pyright")
    if checker is None:
        pytest.skip("neither basedpyright nor pyright is installed (make release-check brings one)")
    shutil.copy(program, folder / "client.py")
    settings = {"include": ["client.py"], "extraPaths": [str(ROOT / "src")], "typeCheckingMode": "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    return subprocess.run(
        [checker, "--pythonpath", sys.executable, "-p", str(folder)], capture_output=True, text=True, cwd=folder
    )


def test_typed_program_passes(tmp_path: Path) -> None:
    done = check(CLIENT, tmp_path)
    assert done.returncode == 0, done.stdout


def test_wrong_argument_is_found(tmp_path: Path) -> None:
    """Otherwise the checker would know no types, and find nothing in the other test either."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch\nimport tigon\n\ntigon.rms_norm(torch.ones(2), eps='small')\n", encoding="utf-8")
    done = check(wrong, tmp_path)
    assert done.returncode == 1 and "eps" in done.stdout
