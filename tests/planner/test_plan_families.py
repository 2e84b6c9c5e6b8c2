"""The model table at one odd shape: traced against recorded on the CPU, predicted against measured on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_helpers import H200
from transformers import AutoModelForCausalLM

from benchmarks.__main__ import main
from tigon.models import MODELS
from tigon.models.verification.tiny import SIZES, tiny_config
from tigon.planner.request import Request, text_config
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, replay
from tigon.planner.trace.trace import trace
from tigon.profiler.recording.peak import PeakMeter, training_state
from tigon.techniques.keys.settings import Settings

BATCH, SEQ = 3, 111
SMALL = {
    **SIZES, "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> Any:
    return importlib.import_module("benchmarks.cases.families")


# One for each kind of layer: capped logits, packed MLP, experts, no gate, sinks. Each takes a second.
@pytest.mark.parametrize("model_type", ["gemma2", "phi3", "qwen3_moe", "gpt2", "gpt_oss"])
def test_traced_peak_of_an_odd_shape_is_the_recorded_one(model_type: str) -> None:
    config = tiny_config(model_type, MODELS[model_type].tiny, SMALL)
    text_config(config).use_cache = False
    settings = Settings.of({"train.precision": "bf16", "model.kernels": "none", "model.attention": "eager"})
    request = Request(model=model_type, config=config, batch=BATCH, seq=SEQ, settings=settings)
    ledger = Ledger()
    replay(ledger, trace(request, H200, evaluating=False).tape, GradientRules(keep=True))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).train()
    ids = torch.randint(3, 900, (BATCH, SEQ))
    meter = PeakMeter(torch.device("cpu"))
    meter.start(training_state(model, torch.optim.SGD(model.parameters())))
    loss = model(input_ids=ids, labels=ids.clone(), num_items_in_batch=torch.tensor(300), use_cache=False).loss
    loss.backward()
    measured = meter.stop().step_bytes
    assert max(ledger.phases.values()) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3"])
def test_experts_in_fp32_and_narrow_values_are_planned(model_type: str, tool: Any) -> None:
    """The product of experts has a fake for bf16 alone; DeepSeek's values are narrower than its keys."""
    assert tool.predicted(model_type, "tigon", H200) > 0


def test_table_shows_measured_rows_and_says_why_others_are_missing(tool: Any) -> None:
    rows = [
        {"model_type": "llama", "detail": "", "predicted_bytes": 103 << 28, "measured_bytes": 100 << 28},
        {"model_type": "gpt2", "detail": "not measured: no kernel", "predicted_bytes": 1 << 30},
    ]
    rows = [{**row, "kernels": "tigon"} for row in rows]
    environment = {
        "device": "X",
        "driver": "1",
        "versions": {"torch": "2"},
        "tigon_commit": "abc",
        "date": "2000-01-01",
    }
    text = tool.table({"environment": environment, "rows": rows})
    assert "| llama | tigon | 25.75 | 25.00 | +3.0% |" in text
    assert "| gpt2 | tigon | 1.00 |  | not measured: no kernel |" in text


def test_command_without_a_gpu_measures_nothing(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "families.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        main(["families", "--measure", "--json", str(record)])
    assert refused.value.code == 2 and "--measure requires a GPU" in capsys.readouterr().err
    assert not record.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODELS)
def test_peak_of_an_odd_shape_is_within_3_percent(model_type: str, tool: Any) -> None:
    from tigon.planner.gpus import find_gpu

    row = tool.row_of(model_type, "tigon", find_gpu(torch.cuda.get_device_name()), True)
    error = tool.error_of(row)
    assert error is not None, row["detail"]
    assert abs(error) <= tool.LIMIT, row
