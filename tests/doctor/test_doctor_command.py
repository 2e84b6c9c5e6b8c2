"""`tigon doctor` as it is typed: what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from forks import forks, python
from tigon.cli import app
from tigon.doctor import diagnose, diagnosis
from tigon.doctor.self_test import CHECKS
from tigon.errors import UsageError
from tigon.models import hybrid_layers
from tigon.ops.self_test import OpCheck

SRC = Path(__file__).parents[2] / "src"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
PASSED = [OpCheck(op=op, dtype=dtype, share=0.5, worst="output 0 of case plain") for op, dtype in CHECKS]


def config_file(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**LLAMA, **changes}))
    return file


def type_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[Any, str, str]:
    """(exit code, stdout, stderr) of `tigon doctor ...` in this process."""
    monkeypatch.setattr(sys, "argv", ["tigon", "doctor", *arguments])
    with pytest.raises(SystemExit) as exit_:
        app.main()
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that has passed."""
    monkeypatch.setattr(diagnosis, "run_self_test", lambda: PASSED)


@forks
def test_command_ends_with_zero_and_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test that runs the command in a process of its own, with the command's children."""
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    done = python("doctor", str(config_file(tmp_path)), "--json", module="tigon")
    found = json.loads(done.stdout)
    assert found["ok"], found["findings"]
    assert done.returncode == 0 and not done.stderr
    assert {(c["op"], c["dtype"]) for c in found["self_test"]} == set(CHECKS)
    assert all(c["passed"] and 0 <= c["share"] <= 1 for c in found["self_test"])
    assert found["model"]["patch"]["counts"]["rms_norm"] == 7
    assert found["model"]["proof"]["passed"] and len(found["model"]["proof"]["checks"]) > 8
    assert found["environment"]["packages"]["torch"]


def test_text_names_versions_device_self_test_and_patched_modules(
    quick: None, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    code, out, _ = type_in(monkeypatch, capsys, str(config_file(tmp_path)))
    assert code == 0
    for line in ("versions", "device", "self-test", "rms_norm", "0.50", "model.layers.*.mlp", "linear_cross_entropy"):
        assert line in out
    assert max(len(line) for line in out.splitlines()) < 200 or "rms_norm" in out


def test_folder_and_its_config_file_name_the_same_model_and_presets_work(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    by_file, by_folder = (diagnosis.check_model(str(name)) for name in (file, tmp_path))
    assert by_file.report is not None and by_folder.report is not None
    assert by_file.report.to_dict() == by_folder.report.to_dict()
    preset = diagnosis.check_model("tigon-demo")
    assert preset.report is not None and preset.report.counts["rms_norm"] == 9


def test_large_model_is_examined_without_its_weights() -> None:
    """8 billion parameters, without any of them."""
    check = diagnosis.check_model("llama-3.1-8b")
    assert check.report is not None and check.report.counts["rms_norm"] == 65


def test_text_gives_the_reason_for_modules_left_alone(
    quick: None, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    code, out, _ = type_in(monkeypatch, capsys, str(config_file(tmp_path, architectures=["LlamaModel"])))
    assert code == 0 and "left alone" in out and "because" in out


def test_wrong_op_is_a_problem_and_ends_with_one(monkeypatch: Any, capsys: Any) -> None:
    wrong = [c if c.op != "rope" else OpCheck(op="rope", dtype=c.dtype, share=31.0, worst="output 1") for c in PASSED]
    monkeypatch.setattr(diagnosis, "run_self_test", lambda: wrong)
    code, out, _ = type_in(monkeypatch, capsys)
    assert code == 1
    text = " ".join(out.split())
    assert (
        "rope in fp32, bf16, fp16: the error is 31 times the allowed error, in output 1" in text and "1 problem" in text
    )
    code, out, _ = type_in(monkeypatch, capsys, "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def test_sigill_in_bf16_products_is_explained(monkeypatch: Any, capsys: Any) -> None:
    died = [
        c if c.dtype != "bf16" or "rms" in c.op else OpCheck(op=c.op, dtype="bf16", error="the process died of SIGILL")
        for c in PASSED
    ]
    monkeypatch.setattr(diagnosis, "run_self_test", lambda: died)
    code, out, _ = type_in(monkeypatch, capsys)
    assert code == 1 and "ONEDNN_MAX_CPU_ISA" in out and "2 problems" in out
    named = ", ".join(c.op for c in died if c.error is not None)
    assert f"{named} in bf16" in " ".join(out.split())


def test_warning_alone_ends_with_zero(quick: None, monkeypatch: Any, capsys: Any) -> None:
    here = diagnosis.current_environment()
    newer = {**here.packages, "transformers": "6.1.0"}
    monkeypatch.setattr(diagnosis, "current_environment", lambda: type(here)(**{**vars(here), "packages": newer}))
    code, out, _ = type_in(monkeypatch, capsys)
    assert code == 0 and "WARNING transformers-newer-than-tested" in out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-3.2-1bb", "llama-3.2-1b"),
        ("{folder}", "no config.json"),
        ("{folder}/none.json", "neither a file"),
        ("{folder}/text.json", "not a JSON file"),
        ("{folder}/list.json", "holds a list, not an object"),
        ("{folder}/unknown.json", "transformers cannot read it"),
        ("{folder}/remote.json", "does not run it"),
        ("{folder}/impossible.json", "LlamaConfig|cannot build|cannot read"),
    ],
)
def test_wrong_name_is_refused_in_one_line(name: str, says: str, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    files = {
        "text.json": "hello",
        "list.json": "[1]",
        "unknown.json": json.dumps({**LLAMA, "model_type": "no-such-model"}),
        "remote.json": json.dumps({**LLAMA, "model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}),
        "impossible.json": json.dumps({**LLAMA, "num_attention_heads": 0}),
    }
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    code, out, err = type_in(monkeypatch, capsys, name.format(folder=tmp_path))
    assert code == 2 and not out and err.count("\n") == 1
    with pytest.raises(UsageError, match=says):
        diagnose(name.format(folder=tmp_path))


def test_hub_id_without_a_connection_is_a_usage_error(monkeypatch: Any) -> None:
    from transformers import AutoConfig

    def offline(*args: Any, **kwargs: Any) -> Any:
        raise OSError("We could not connect. Check your internet connection.\nA page of advice.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(UsageError, match=r"owner/model: its config cannot be loaded from the hub: OSError: We"):
        diagnose("owner/model")


def test_family_that_is_computed_wrong_is_a_problem(quick: None, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    from tigon import ops

    right = ops.linear_cross_entropy
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *args, **options: right(*args, **options) * 1.001)
    code, out, _ = type_in(monkeypatch, capsys, str(config_file(tmp_path)))
    assert code == 1 and "PROBLEM not-proved: a small llama differs from its unpatched twin in" in " ".join(out.split())


def test_quantised_checkpoint_is_noted(tmp_path: Path) -> None:
    file = config_file(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    check = diagnosis.check_model(str(file))
    assert [finding.id for finding in check.findings] == ["quantised"]


def test_layers_that_pytorch_runs_slowly_are_noted_with_the_command_that_mends_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba2", "num_hidden_layers": 2}))
    (finding,) = diagnosis.check_model(str(file)).findings
    assert (finding.id, finding.level) == ("slow-layers", "warning" if torch.cuda.is_available() else "note")
    assert finding.what == "PyTorch runs Mamba 2 scan (2 layers), which is slow"
    assert finding.fix == "pip install mamba-ssm --no-build-isolation"


def test_layers_whose_backward_the_library_refuses_are_a_problem(tmp_path: Path, monkeypatch: Any) -> None:
    rule = hybrid_layers.DELTA_RULE
    monkeypatch.setattr(hybrid_layers, "_installed", lambda kind: kind.library)
    monkeypatch.setattr(hybrid_layers, "arch_here", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")
    file = tmp_path / "config.json"
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 2}
    file.write_text(json.dumps(config))
    assert not diagnosis.check_model(str(file)).findings, "tigon's op runs them"
    file.write_text(json.dumps({**config, "linear_key_head_dim": 256}))
    (finding,) = diagnosis.check_model(str(file)).findings
    assert (finding.id, finding.level) == ("refused-backward", "problem")
    assert finding.what.startswith(f"{rule.name} (2 layers) cannot train") and "Triton 3.6.0" in finding.what
    assert finding.fix.startswith("install Triton 3.7.1 or newer, or tilelang")


def test_model_without_a_patched_module_is_a_problem(
    quick: None, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet", "architectures": ["ResNetModel"]}))
    code, out, _ = type_in(monkeypatch, capsys, str(tmp_path))
    assert code == 1 and "PROBLEM not-patched" in out and "ResNetModel: not patched" in out
