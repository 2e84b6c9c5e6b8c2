"""The notebooks run on a CPU, their own checks hold, and they are committed with outputs of a run without errors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install -e '.[train]')", allow_module_level=True)

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LAST_OUTPUT = {
    "fine_tune_your_jsonl": "recipe.yaml",
    "patch_and_train": "LlamaRMSNorm Linear",
    "plan_and_measure": "unpatched ",
}
"""Notebook -> what its last cell with an output shows."""


FAST = "patch_and_train"
"""The notebook that the tests run too. `make check-notebooks` runs each in a kernel, which takes a minute."""


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def shown(cell: dict[str, Any]) -> str:
    """What a cell printed and returned."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "".join("".join(text) for text in texts)


def test_cells_run_in_order_on_a_cpu(tmp_path: Path) -> None:
    (notebook,) = (path for path in NOTEBOOKS if path.stem == FAST)
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells(notebook)), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_the_outputs_of_one_run(notebook: Path) -> None:
    found = cells(notebook)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert not any(output["output_type"] == "error" for cell in found for output in cell["outputs"])
    with_output = [cell for cell in found if cell["outputs"]]
    assert LAST_OUTPUT[notebook.stem] in shown(with_output[-1])
    assert str(ROOT) not in notebook.read_text(encoding="utf-8")


def test_readme_links_every_notebook() -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in NOTEBOOKS} == LAST_OUTPUT.keys()
    assert all(f"(notebooks/{path.name})" in readme for path in NOTEBOOKS)
