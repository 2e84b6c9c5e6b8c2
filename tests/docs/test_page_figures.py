"""Tables that pages hold as text have the figures of the records that they link to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GIB = 1 << 30
Cells = list[list[str]]


def record(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return found


def table(page: str, header: str) -> Cells:
    """The cells of the last table whose first line begins with `header`, without its head and without emphasis."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = [i for i, line in enumerate(lines) if line.startswith(header)][-1]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")])
    return rows


def digits(value: float, count: int = 3) -> str:
    """A number with `count` significant digits, as the pages write it."""
    decimals = max(0, count - len(str(int(abs(value)))))
    return f"{value:,.{decimals}f}"


def trl_steps(path: str, heads: tuple[str, ...]) -> Cells:
    """One row per head with the tokens/s of the four columns, then one per head with the peaks."""
    by_case = {(m["trainer"], m["weights"], m["head"]): m for m in record(path)["measurements"]}
    columns = [("dpo", "lora"), ("dpo", "full"), ("grpo", "lora"), ("grpo", "full")]
    speeds = [[f"{by_case[(*case, head)]['tokens_per_s']:,}" for case in columns] for head in heads]
    return speeds + [[digits(by_case[(*case, head)]["peak_gib"]) for case in columns] for head in heads]


@pytest.mark.parametrize(
    ("header", "path", "words"),
    [
        ("| NVIDIA H100 80GB HBM3 | DPO, LoRA |", "nvidia-h100/post-training/trl-steps.json",
         {"trl": "TRL as it is", "head": "TRL with `fuse`", "tigon": "TRL with `fuse` and `tigon.patch`"}),
        ("| NVIDIA H200 | DPO, LoRA |", "nvidia-h200/post-training/trl-steps-autocast.json",
         {"trl": "TRL as it is", "tigon": "TRL with `fuse` and `tigon.patch`"}),
    ],
)  # fmt: skip
def test_steps_of_trl(header: str, path: str, words: dict[str, str]) -> None:
    named = [row for row in table("docs/post-training-ops.md", header) if row[0].partition(",")[0] in words.values()]
    assert [row[1:] for row in named] == trl_steps(path, tuple(words))


def test_lora_steps_with_4_bit_weights() -> None:
    expected = []
    for one in record("nvidia-h100/lora/steps-4-bit.json")["steps"]:
        peft, tigon = (one["versions"][name] for name in ("peft", "tigon"))
        cells = [f"{of['tokens_per_s']:,.0f}, {of['peak_bytes'] / GIB:.2f}" for of in (peft, tigon)]
        gain = tigon["tokens_per_s"] / peft["tokens_per_s"]
        expected.append([f"4-bit, {one['checkpointing']}", *cells, f"{gain:.2f}"])
    assert table("docs/techniques/lora.md", "| frozen weights, checkpointing | PEFT's")[-2:] == expected


def test_experts_in_mxfp4() -> None:
    rows = table("docs/techniques/lora.md", "| adapters on | attention | tokens/s")
    steps = record("nvidia-h100/experts/mxfp4.json")["steps"]
    measured = [(version, of) for one in steps for version, of in one["versions"].items()]
    for shown, (version, of) in zip(rows, measured, strict=True):
        planned = of["predicted"]
        assert shown[2:] == [
            f"{of['tokens_per_s']:,.0f}", f"{of['peak_bytes'] / GIB:.2f}", f"{planned['peak_bytes'] / GIB:.2f}",
            f"{of['ms']:.0f}", f"{planned['ms']:.0f}",
        ]  # fmt: skip
        assert ("attention_sinks" in shown[1]) == (version == "sinks")


def test_routers() -> None:
    router, loss = ("router", "router by tigon"), ("balance of 48 layers", "balance of 48 layers by tigon")
    expected = [
        [
            f"{one['tokens']:,}", *(f"{one['median_ms'][name]:.2f}" for name in router),
            *(f"{one['host_us'][name] / 1000:.2f}" for name in router),
            *(f"{one['median_ms'][name] / 48:.3f}" for name in loss), digits(one["median_ms"]["experts"]),
        ]
        for one in record("nvidia-h200/experts/router.json")["router"]
    ]  # fmt: skip
    assert [row[1:] for row in table("docs/patching.md", "| layer | tokens | router, ms")] == expected


@pytest.mark.parametrize(
    ("header", "gpu", "columns"),
    [
        ("| step | bf16, ms | FP8 tensorwise, ms | FP8 rowwise, ms | peak", "nvidia-h200",
         ("bf16", "fp8 tensorwise", "fp8 rowwise")),
        ("| step | bf16, ms | FP8 tensorwise, ms | with a search for each amax, ms | FP8 rowwise", "nvidia-h100",
         ("bf16", "fp8 tensorwise", None, "fp8 rowwise")),
    ],
)  # fmt: skip
def test_fp8_steps(header: str, gpu: str, columns: tuple[str | None, ...]) -> None:
    steps = record(f"{gpu}/precision/fp8-steps.json")["steps"]
    for row, run in zip(table("docs/techniques/precision.md", header), ("8b", "1b"), strict=True):
        for cell, precision in zip(row[1:], columns, strict=False):
            turns = [
                f"{s['ms']:.0f}" for s in steps
                if (s["run"], s["precision"], s["cuda_graphs"]) == (run, precision, False)
            ]  # fmt: skip
            assert precision is None or cell.split(", ") == turns, (run, precision)


def test_long_rows() -> None:
    paths = {"H200": "nvidia-h200/planner/long-rows.json", "H100": "nvidia-h100/planner/long-rows-half-million.json"}
    expected = []
    for card, path in paths.items():
        for one in record(path)["rows"]:
            planned, got = one["predicted"], one["measured"]
            expected.append([
                f"{one['tokens']:,}", card, f"`{one['checkpointing']}`",
                f"{digits(planned['step_s'])}, {digits(got['step_s'])}",
                f"{planned['peak_allocated_bytes'] / GIB:.2f}, {got['peak_allocated_bytes'] / GIB:.2f}",
                f"{planned['host_bytes'] / GIB:.1f}",
            ])  # fmt: skip
    shown = table("docs/long-context.md", "| tokens | card | checkpointing | s per step")
    assert shown == expected


def test_two_gpus() -> None:
    cases = {one["name"]: one for one in record("nvidia-h100/several-gpus/two-gpus.json")["cases"]}
    rows = table("docs/several-gpus.md", "| | tokens/s | predicted | GiB per GPU | predicted |")
    names = ("8b-plain-fsdp2", "8b-fsdp2", "8b-zero-3-layers", "8b-zero-3-weights")
    shown = [(row[1], row[3]) for row in rows]
    assert shown == [
        (f"{cases[name]['tokens_per_s']:,.0f}", f"{cases[name]['allocated_bytes'] / GIB:.1f}") for name in names
    ]


def test_whole_layers_under_zero_3() -> None:
    cases = {one["name"]: one for one in record("nvidia-h100/several-gpus/two-gpus.json")["cases"]}
    gain = cases["8b-zero-3-layers"]["tokens_per_s"] / cases["8b-zero-3-weights"]["tokens_per_s"]
    assert f"Llama-3.1-8B {gain:.2f} times as fast" in (ROOT / "docs/techniques/zero.md").read_text(encoding="utf-8")
