"""What importing and patching load: the families of transformers change with every release, and few are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

PRELUDE = """
import sys
def families():
    modeling = [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]
    return {n.split(".")[2] for n in modeling} - {"auto"}
"""


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_the_patcher_imports_a_modeling_file() -> None:
    assert run("import tigon, tigon.models, tigon.nn, tigon.doctor; print(*families())") == []


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_patching_one_family_imports_the_code_of_another(family: str) -> None:
    code = f"""
from tigon.models import MODELS, patch
from tigon.models.tiny import tiny_model
model = tiny_model({family!r}, MODELS[{family!r}].tiny)
before = families()
patch(model)
print(*(families() - before))
"""
    assert run(code) == []
