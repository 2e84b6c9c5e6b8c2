"""`python -m benchmarks CASE`: the command line and the record that all cases share."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.__main__ import main, names
from benchmarks.cases import base_offload, exports, qat
from benchmarks.harness import Bench, Case, peaks_bytes, times_ms

CPU = torch.device("cpu")


def bench(tmp_path: Path, *arguments: str, **fields: Any) -> Bench:
    case = Case(measure=lambda bench: None, needs_gpu=False, **fields)
    return Bench("small", case, "Measure nothing.", ["--json", str(tmp_path / "folder" / "record.json"), *arguments])


def record(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "folder" / "record.json").read_text(encoding="utf-8"))


def test_record_names_the_machine_and_the_command_and_is_written_after_every_line(tmp_path, capsys):
    one = bench(tmp_path, "--tiny")
    one.add("rows", {"id": "a", "ms": 1.0})
    found = record(tmp_path)
    assert found["rows"] == [{"id": "a", "ms": 1.0}]
    assert found["command"] == f"python -m benchmarks small --json {tmp_path}/folder/record.json --tiny"
    assert {"device", "driver", "versions", "tigon_commit", "date"} <= found["environment"].keys()
    one.add("rows", {"id": "b", "ms": 2.0}, "b took 2 ms")
    assert [row["id"] for row in record(tmp_path)["rows"]] == ["a", "b"]
    assert capsys.readouterr().out == 'rows {"id": "a", "ms": 1.0}\nb took 2 ms\n'


def test_resumed_record_keeps_its_lines(tmp_path):
    bench(tmp_path).add("cases", {"id": "a"})
    two = bench(tmp_path)
    assert two.resume("cases") == [{"id": "a"}]
    two.add("cases", {"id": "b"})
    assert record(tmp_path)["cases"] == [{"id": "a"}, {"id": "b"}]


def test_record_of_another_machine_is_not_continued(tmp_path):
    bench(tmp_path).add("cases", {"id": "a"})
    path = tmp_path / "folder" / "record.json"
    changed = record(tmp_path)
    changed["environment"]["device"] = "another"
    path.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(SystemExit, match="was measured with another device; move it away"):
        bench(tmp_path).resume("cases")


def test_record_of_another_command_is_not_continued(tmp_path):
    def resume(*arguments: str) -> int:
        options = {"options": lambda parser: [parser.add_argument(name) for name in ("--model", "--rows")]}
        one = bench(tmp_path, *arguments, **options)
        n_lines = len(one.resume("cases", choosing=("rows",)))
        one.add("cases", {"id": "a"})
        return n_lines

    assert resume("--model", "a", "--rows", "x") == 0
    assert resume("--rows", "y", "--model", "a") == 1
    with pytest.raises(SystemExit, match=r"was measured by another command, python -m benchmarks small .*; move it"):
        resume("--model", "b")


def test_calls_are_timed_in_turns_and_a_failing_one_is_raised():
    order = []
    medians = times_ms({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, turns=2, warm_ups=1)
    assert order == ["a", "b"] * 3 and medians.keys() == {"a", "b"}
    with pytest.raises(ZeroDivisionError):
        times_ms({"c": lambda: 1 / 0}, CPU, turns=1)
    assert peaks_bytes({"d": lambda: torch.empty(1000, dtype=torch.float64).sum()}, CPU)["d"] >= 8000


def test_unknown_case_is_refused_with_the_names(capsys):
    with pytest.raises(SystemExit, match=r"usage: python -m benchmarks CASE.*\ncases: base-offload, .*versions"):
        main(["nothing"])


def test_case_that_needs_a_gpu_is_refused_without_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        main(["fp8"])
    assert refused.value.code == 2 and "needs a GPU; add --tiny" in capsys.readouterr().err


def test_every_case_shows_its_command():
    for name in names():
        if name == "trl-step":
            pytest.importorskip("trl")
        module = importlib.import_module(f"benchmarks.cases.{name.replace('-', '_')}")
        assert isinstance(module.CASE, Case) and f"-m benchmarks {name} " in module.__doc__


def test_small_case_runs_on_a_cpu(tmp_path):
    path = tmp_path / "fp8.json"
    main(["fp8", "--tiny", "--part", "errors", "--json", str(path)])
    errors = json.loads(path.read_text(encoding="utf-8"))["errors"]
    assert len(errors) == 12 and all(line["within_the_rule"] for line in errors)


def test_ops_of_hybrid_models_are_measured_beside_pytorch(tmp_path):
    path = tmp_path / "hybrid-ops.json"
    main(["hybrid-ops", "--tiny", "--part", "ops", "--json", str(path)])
    lines = json.loads(path.read_text(encoding="utf-8"))["ops"]
    names = [*["causal_conv1d"] * 2, *["gated_delta_rule"] * 2, "gated_rms_norm", *["topk_sigmoid"] * 2]
    assert [line["op"] for line in lines] == names
    for line in lines:
        assert max(line["errors"]["tigon"].values()) < 0.01
        assert ("PyTorch" in line["median_ms"]) == ("4 documents" not in line["problem"])


def test_each_version_of_a_hybrid_model_begins_with_the_same_adapters(tmp_path):
    pytest.importorskip("peft")
    path = tmp_path / "hybrid-ops.json"
    for version in ("PyTorch", "tigon", "tigon"):
        main(["hybrid-ops", "--tiny", "--part", "steps", "--version", version, "--json", str(path)])
    rows = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert [(row["version"], row["documents"]) for row in rows] == [("PyTorch", 1), ("tigon", 4), ("tigon", 1)]
    assert rows[2]["losses"] == pytest.approx(rows[0]["losses"], rel=1e-3)


def test_an_interrupted_training_of_qat_begins_anew(tmp_path):
    pytest.importorskip("peft")
    model = str(exports.small_model("llama", tmp_path / "small"))
    first = qat._train(model, 1, "none", tmp_path)
    (first / "summary.json").unlink()
    (first / "left.txt").touch()
    assert qat._train(model, 1, "none", tmp_path) == first and not (first / "left.txt").exists()
    written = (first / "summary.json").stat().st_mtime_ns
    qat._train(model, 1, "none", tmp_path)
    assert (first / "summary.json").stat().st_mtime_ns == written, "a finished run is kept"
    assert qat._train(model, 2, "none", tmp_path) != first


def test_layers_on_the_host_are_compared_with_resident_ones(tmp_path, monkeypatch):
    """If a copy does not arrive, the case shows it."""
    pytest.importorskip("peft")
    run = bench(tmp_path, "--tiny")
    line = base_offload.equality(run, "bf16", "full")
    assert line["finite_with_late_copies"] and line["loss"] == line["loss_with_late_copies"] > 1
    assert {name: (found["losses"], found["gradients"]) for name, found in line["differ"].items()} == dict.fromkeys(
        ("on_host", "late_copies", "without_twice"), (0, 0)
    )

    def never(streamed: Any, host: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.fill_(255)

    monkeypatch.setattr(base_offload.LateCopies, "copied_in", never)
    line = base_offload.equality(run, "bf16", "full")
    assert not line["finite_with_late_copies"] and line["differ"]["late_copies"]["losses"] == 6


def test_every_row_of_layers_on_the_host_has_a_plan_and_a_share_of_the_speed(tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    path = tmp_path / "base-offload.json"
    names = ("llama-3.1-8b-offload", "8gb-tiles")
    for name in names:  # the second command adds to the record
        main(["base-offload", "--tiny", "--json", str(path), "--row", name])
    lines = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert [line["row"] for line in lines] == [*names]
    assert all(line["on_host"]["predicted"]["host_bytes"] > line["layers_bytes"] > 0 for line in lines)
    assert lines[0]["speed"] == lines[0]["resident"]["ms"] / lines[0]["on_host"]["ms"] and "resident" not in lines[1]
    assert [len(line["on_host"]["losses"]) for line in lines] == [6, 2], "a warm-up before the timed steps"
    shape = base_offload.config_of("qwen3-32b", tiny=False)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.head_dim, shape.model_type) == (64, 5120, 128, "qwen3")


def test_a_very_long_row_is_measured_once_and_one_that_does_not_fit_has_its_error(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    path = tmp_path / "base-offload.json"
    monkeypatch.setattr(base_offload, "REPEATED_TOKENS", 32)
    main(["base-offload", "--tiny", "--json", str(path), "--row", "48gb"])
    monkeypatch.setattr(base_offload, "steps", lambda *_: raise_(torch.OutOfMemoryError("no room")))
    main(["base-offload", "--tiny", "--json", str(path), "--row", "24gb"])
    long, failed = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert len(long["on_host"]["losses"]) == 1 and "resident" not in long
    assert (failed["row"], failed["error"], "on_host" in failed) == ("24gb", "no room", False)


def raise_(error: Exception) -> None:
    raise error


def test_layers_on_the_host_are_planned_without_bitsandbytes_and_a_gpu(capsys):
    main(["base-offload", "--tiny", "--plan", "--row", "24gb"])
    on_host, resident = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert on_host["lora.base_offload"] and not resident["lora.base_offload"]
    assert on_host["host_bytes"] > resident["host_bytes"] and on_host["peak_bytes"] < resident["peak_bytes"]


@pytest.mark.parametrize("row", ["1b-64x1024-17gib", "8b-lora-512", "8b-qlora-512"])
def test_loop_of_ones_own_is_measured_beside_its_plan(row, tmp_path):
    pytest.importorskip("bitsandbytes" if "qlora" in row else "peft")
    path = tmp_path / "own-loop.json"
    main(["own-loop", "--tiny", "--row", row, "--json", str(path)])
    (line,) = json.loads(path.read_text(encoding="utf-8"))["loops"]
    assert line["losses"][-1] < line["losses"][0] and line["planned"]["peak_bytes"] > 0 and not line["cuda_graphs"]
