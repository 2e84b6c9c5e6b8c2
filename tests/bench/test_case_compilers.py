"""Registers and spills of two compilers are compared launch by launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import main


def binary(kernel: str, registers: int, spills: int, target: str = "sm_90", **flags: Any) -> dict[str, Any]:
    return {
        "target": target, "kernel": kernel, "dtype": "bfloat16", "flags": flags, "num_warps": 4, "aligned": True,
        "error": None, "registers": registers, "spills": spills, "used_by": [["rope", "llama"]],
    }  # fmt: skip


def test_launches_that_both_compiled_are_compared(tmp_path: Path) -> None:
    reports = {
        "old": [binary("a", 40, 0, X=True), binary("a", 50, 8, X=False), binary("b", 64, 0), binary("gone", 9, 9)],
        "new": [binary("a", 48, 0, X=True), binary("a", 44, 0, X=False), binary("b", 64, 120), binary("new", 9, 9)],
    }
    for registers, binaries in enumerate(reports.values()):
        binaries.append({**binary("add", registers, 0), "used_by": [["accumulation fusion", "hidden-20"]]})
    for name, binaries in reports.items():
        (tmp_path / name).write_text(json.dumps({"binaries": binaries}), encoding="utf-8")
    record = tmp_path / "folder" / "record.json"
    words = [f"3.6.0:{tmp_path / 'old'}", f"3.9.0:{tmp_path / 'new'}", "--commit", "abc", "--date", "2026-11-27"]
    main(["compilers", *words, "--json", str(record)])
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["triton"] == ["3.6.0", "3.9.0"] and found["tigon_commit"] == "abc"
    chip = found["chips"]["sm_90"]
    assert chip["launches"] == 3 and (chip["fewer"], chip["more"]) == (1, 1)
    assert chip["registers"] == [154, 156] and chip["spilling"] == [1, 1]
    assert [(spill["kernel"], spill["flags"], spill["bytes"]) for spill in chip["spills"]] == [
        ("a", {}, [8, 0]),
        ("b", {}, [0, 120]),
    ]
    assert found["chips"]["sm_80"]["launches"] == 0
