"""Argument orders, names and defaults are Liger's. `liger_signatures.json` has those of liger-kernel 0.8.5."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tigon.compat.liger.offered import OFFERED, resolve

SIGNATURES: dict[str, str] = json.loads((Path(__file__).parent / "liger_signatures.json").read_text(encoding="utf-8"))

# One default differs: nemotron's activation is off by default because no kernel of tigon computes it.
DIFFERS = {"transformers.monkey_patch.apply_liger_kernel_to_nemotron": ("relu_squared=True", "relu_squared=False")}


def _find(dotted: str) -> Any:
    parts = dotted.split(".")
    at = next(n for n in range(len(parts), 0, -1) if ".".join(["liger_kernel", *parts[:n]]) in OFFERED)
    found = resolve(OFFERED[".".join(["liger_kernel", *parts[:at]])][parts[at]], parts[at])
    for attribute in parts[at + 1 :]:
        found = getattr(found, attribute)
    return found


def _as_text(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))[1:-1]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_liger_except_listed_differences(name: str) -> None:
    theirs = SIGNATURES[name].replace(*DIFFERS[name]) if name in DIFFERS else SIGNATURES[name]
    normal = str(inspect.signature(eval(f"lambda {theirs}: None", {"torch": torch})))[1:-1]
    assert _as_text(_find(name)) == normal


def test_every_offered_name_resolves() -> None:
    for module, names in OFFERED.items():
        for name, source in names.items():
            assert resolve(source, name) is not None, module


def test_signatures_of_all_offered_launchers_and_modules_are_compared() -> None:
    compared = {".".join(name.split(".")[:3]) for name in SIGNATURES}
    for module, names in OFFERED.items():
        if module.count(".") == 2 and module.split(".")[2] not in ("auto_model", "trainer_integration", "monkey_patch"):
            for name in names:
                short = f"{module.removeprefix('liger_kernel.')}.{name}"
                assert short in compared or name == "CrossEntropyOutput", short
