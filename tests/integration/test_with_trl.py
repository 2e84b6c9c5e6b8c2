"""TRL's SFTTrainer with a patched model: the same losses, gradient norms, entropies and token accuracies.

TRL 1.8 and 1.16 compute log-probabilities from `lm_head.weight` themselves, in training and evaluation. tigon's ops run
in the layers, and its fused loss is not called. In 1.0 SFTTrainer reads `outputs.logits` after every training step for
these two metrics. They are right. They cost one more product with the head and the logits once, in the model's dtype
and without a gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import model, rows, tokenizer

import tigon
from tigon.models import MaterializedLogitsWarning

trl = pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
datasets = pytest.importorskip("datasets", reason="datasets, which trl needs, is not installed")

LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "eval_loss", "eval_entropy")
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "packing": {"packing": True, "max_length": 32, "packing_strategy": "wrapped"},
    "dft": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "lora": {"lora": True},
}


def train(tmp_path: Any, order: str, lora: bool = False, **options: Any) -> tuple[list[dict[str, float]], Any]:
    """Runs a few steps; returns the logged numbers and the patch report."""
    report = None
    base = model()
    if order == "patched before":
        report = tigon.patch(base)
    if lora:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"])
    config = {key: options.pop(key) for key in list(options) if key != "peft_config"}
    arguments = {
        "output_dir": str(tmp_path / order), "use_cpu": True, "bf16": False, "max_steps": 3, "seed": 5,
        "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, **config,
    }  # fmt: skip
    data = [{name: row[name] for name in ("input_ids", "completion_mask")} for row in rows()]
    trainer = trl.SFTTrainer(
        model=base,
        args=trl.SFTConfig(**arguments),
        train_dataset=datasets.Dataset.from_list(data),
        eval_dataset=datasets.Dataset.from_list(data[:4]),
        processing_class=tokenizer(),
        **options,
    )
    if order == "patched after":
        report = tigon.patch(trainer.model)
    trainer.train()
    trainer.evaluate()
    history = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history]
    return [entry for entry in history if entry], report


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_sft_trainer_logs_the_unpatched_numbers(tmp_path: Any, name: str) -> None:
    """The trainer wraps the model it is given: that it can be patched before and after is tried where it wraps it."""
    options = OPTIONS[name]
    want, _ = train(tmp_path, "unpatched", **options)
    assert len(want) == 4 and {"loss", "entropy", "mean_token_accuracy"} <= want[0].keys() and "eval_loss" in want[3]
    for order in ("patched before", "patched after") if name in ("checkpointing", "lora") else ("patched before",):
        got, report = train(tmp_path, order, **options)
        assert report.counts["rms_norm"] == 5 and report.counts["swiglu"] == report.counts["rope"] == 2
        for one, other in zip(got, want, strict=True):
            assert one == pytest.approx(other, rel=2e-4), order


def test_sft_trainer_still_refuses_an_adapter_on_the_head(tmp_path: Any) -> None:
    """TRL refuses, because its head would pass the adapter by; the refusal must not be lost by patching."""
    peft = pytest.importorskip("peft")
    base = model()
    tigon.patch(base)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
    arguments = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(ValueError, match="lm_head"):
        trl.SFTTrainer(model=wrapped, args=arguments, train_dataset=data, processing_class=tokenizer())


def test_metrics_from_training_logits_allocate_the_logits_once() -> None:
    """What SFTTrainer did until its own head: entropy and accuracy without gradient, beside the loss."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargeTensors(TorchDispatchMode):
        """Counts the tensors made that are as large as the logits, without views of others."""

        def __init__(self, numel: int) -> None:
            super().__init__()
            self.numel = numel
            self.storages: dict[int, Any] = {}  # kept, so that no address is used twice

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.numel:
                    self.storages[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
            return result

    ids = torch.randint(3, 4000, (2, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :16] = -100  # a prompt, so that the loss's chunk is smaller than the logits

    def step(patched: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        made = model(vocab_size=4000)
        if patched:
            tigon.patch(made)
        with LargeTensors(ids.numel() * 4000) as large:
            outputs = made(input_ids=ids, labels=labels)
            with torch.no_grad():
                accuracy = (outputs.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
            outputs.loss.backward()
        return outputs.loss.detach(), accuracy, made.lm_head.weight.grad, len(large.storages)

    want, accuracy, grad, large_unpatched = step(patched=False)
    with pytest.warns(MaterializedLogitsWarning, match=r"\(2, 64, 4000\)"):
        loss, same_accuracy, same_grad, large_patched = step(patched=True)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(same_grad, grad, rtol=1e-4, atol=1e-7)
    assert same_accuracy == accuracy
    assert large_patched == 1 < large_unpatched, (large_patched, large_unpatched)
