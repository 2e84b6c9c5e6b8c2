"""Run notebooks and keep what they print: `python tools/run_notebooks.py examples/notebooks/*.ipynb`.

Warnings on stderr and times are left out, because they differ between machines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            cell.metadata.clear()
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


for name in sys.argv[1:]:
    run(Path(name))
