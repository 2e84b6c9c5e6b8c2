"""`TigonCallback` in the Hugging Face Trainer: it patches, plans, logs both peaks, and undoes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

from tigon import callback as module  # noqa: E402
from tigon.callback import NotPlanned, TigonCallback, settings_of  # noqa: E402

DATA = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8


def small_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=2, logging_steps=1, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, **changes,
    )  # fmt: skip


def run(folder: Path, callback: TigonCallback | None, *, late: bool = False) -> tuple[Trainer, list[float]]:
    first = [] if late or callback is None else [callback]
    trainer = Trainer(model=small_model(), args=arguments(folder), train_dataset=DATA, callbacks=first)
    if late and callback is not None:
        trainer.add_callback(callback)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("late", [False, True], ids=["in the constructor", "with add_callback"])
def test_training_is_that_of_the_unpatched_model_and_ends_unpatched(tmp_path: Path, late: bool) -> None:
    patched: list[dict[str, int]] = []

    class Spy(TigonCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert self.report is not None
            patched.append(self.report.counts)

    callback = Spy()
    _, expected = run(tmp_path / "a", None)
    trainer, losses = run(tmp_path / "b", callback, late=late)
    assert patched and patched[0]["linear_cross_entropy"] == 1 and patched[0]["rms_norm"] == 3
    assert losses == pytest.approx(expected, rel=1e-5)
    assert callback.report is None
    classes = [type(part) for part in small_model().modules()]
    assert [type(part) for part in trainer.model.modules()] == classes


def test_planned_peak_stands_beside_the_measured_one_in_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = TigonCallback(sequence_length=32, gpu="24GiB")
    trainer, _ = run(tmp_path, callback)
    assert callback.plan is not None and callback.unplanned is None
    gib = callback.plan.peak_allocated_bytes / 2**30
    records = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry[module.PLANNED] for entry in records] == [pytest.approx(gib, abs=1e-3)] * 2
    assert module.PEAK not in records[0]  # a CPU has no peak of PyTorch's allocator


def test_on_a_gpu_the_measured_peak_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    callback, record = TigonCallback(), {"loss": 1.0}
    args = type("Args", (), {"device": torch.device("cuda")})
    callback.on_log(args, type("State", (), {"log_history": [record]}), None, logs={})
    assert record[module.PEAK] == 3.0


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (TigonCallback(gpu="24GiB"), "needs sequence_length"),
        (TigonCallback(sequence_length=32), "plans are for GPUs"),
        (TigonCallback(sequence_length=1000, gpu="24GiB"), "max_position_embeddings 64"),
    ],
    ids=["no length", "no GPU", "beyond the positions"],
)
def test_run_that_cannot_be_planned_trains_and_says_why(tmp_path: Path, callback: TigonCallback, reason: str) -> None:
    _, losses = run(tmp_path, callback)
    assert len(losses) == 2
    assert callback.plan is None and reason in str(callback.unplanned)


def test_arguments_become_settings_of_the_planner(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_accumulation_steps=4, optim="adamw_bnb_8bit")
    settings = settings_of(args, small_model())
    train = settings.train
    assert (train.precision, train.checkpointing, train.gradient_accumulation) == ("fp32", "full", 4)
    assert train.optimizer == "adamw-8bit"
    assert settings_of(args, small_model().bfloat16()).train.precision == "bf16"
    with pytest.raises(NotPlanned, match="optim=adafactor"):
        settings_of(arguments(tmp_path, optim="adafactor"), small_model())


def test_adapters_become_settings_of_the_planner(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    settings = settings_of(arguments(tmp_path), model)
    assert (settings.lora.rank, settings.lora.targets) == (4, ("q_proj", "v_proj"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_reference_that_keeps_its_own_layers_is_named_when_training_begins(
    fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("trl")
    from trl_runs import build, model

    import tigon.integrations.trl

    trainer = build("DPO", max_steps=1, policy=model)
    trainer.add_callback(TigonCallback())
    if fused:
        tigon.integrations.trl.fuse(trainer)
    trainer.train()
    assert ("Call tigon.integrations.trl.fuse(trainer)" in caplog.text) == (not fused)
