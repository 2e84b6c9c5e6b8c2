"""What importing and patching load: the families of transformers change with every release, and few are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forks import forks

pytest.importorskip("transformers")
pytestmark = forks

PRELUDE = """
import sys
def families():
    modeling = [n for n in sys.modules if n.startswith("transformers.models.") and ".modeling_" in n]
    return {n.split(".")[2] for n in modeling} - {"auto"}
"""


FAMILIES = ("llama", "gemma2", "gpt2")
CODE = """
import os
import tigon, tigon.models, tigon.nn, tigon.doctor
print("importing", *families())
import transformers.modeling_utils  # once for all copies; of no family
from tigon.models import MODELS, patch
from tigon.models.verification.tiny import tiny_model
for family in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork():  # each in a copy, which has imported no other
        os.wait()
        continue
    model = tiny_model(family, MODELS[family].tiny)
    before = families()
    patch(model)
    print(family, *(families() - before))
    break
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """The families whose code was imported by importing tigon, and by patching a model of each of FAMILIES."""
    command = [sys.executable, "-c", PRELUDE + CODE, *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {first: rest for first, *rest in lines}


def test_importing_the_patcher_imports_no_modeling_file(imported: dict[str, list[str]]) -> None:
    assert imported["importing"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_one_family_imports_no_code_of_another(family: str, imported: dict[str, list[str]]) -> None:
    assert imported[family] == []
