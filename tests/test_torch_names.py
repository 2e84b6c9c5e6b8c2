"""Each private name of torch that tigon uses exists in the installed release. torch may drop one without notice."""

from __future__ import annotations

import ast
import importlib
from functools import reduce
from pathlib import Path

import pytest
import torch

import tigon

SOURCE = Path(tigon.__file__).parent


def private_names() -> dict[str, str]:
    """Dotted name -> the first place that uses it, of `torch.x._y` and of `from torch.x import _y`."""
    found: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in names_in(node):
                if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
                    found.setdefault(name, f"{path.relative_to(SOURCE)}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def names_in(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    dotted = chain(node)
    return [dotted] if dotted else []


def chain(node: ast.AST) -> str:
    """`torch.a._b` of an attribute's expression; "" of another."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def found_in_torch(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            reduce(getattr, parts[count:], module)
        except AttributeError:
            return False
        return True
    return False


# Builds of torch for CPUs lack them, and tigon calls them with a GPU only.
OF_CUDA = {"torch._C._cuda_endAllocateToPool", "torch._C._cuda_clearCublasWorkspaces"}
NAMES = private_names()


def test_private_names_are_found_in_the_source() -> None:
    assert {"torch._C._current_graph_task_id", "torch._subclasses.fake_tensor.FakeTensor"} <= NAMES.keys()


def test_name_that_torch_lacks_is_noticed() -> None:
    assert not found_in_torch("torch._C._no_such_name") and not found_in_torch("torch._no_such_module.name")


@pytest.mark.parametrize("name", NAMES)
def test_private_name_exists(name: str) -> None:
    if name in OF_CUDA and torch.version.cuda is None:
        pytest.skip("in builds for CUDA alone")
    assert found_in_torch(name), f"{NAMES[name]} uses {name}, which torch {torch.__version__} does not have"
