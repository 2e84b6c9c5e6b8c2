"""`tigon.integrations.trl.fuse`: what it changes, what it says, and what is left after `restore`."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from trl_cases import FUSED, cases_of_this_trl, lora
from trl_runs import FUSED_FORWARD_SINCE, build, examples, model, tokenizer, train, trl_version

import tigon
import tigon.integrations.trl as integration
from tigon.errors import UsageError
from tigon.models.patch import unwrap

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
pytestmark = pytest.mark.filterwarnings("ignore")
needs_fused_forward = pytest.mark.skipif(
    trl_version() < FUSED_FORWARD_SINCE, reason="before TRL 1.15 trainers do not give the model a fused forward"
)


def state_of(trainer: Any) -> dict[str, Any]:
    """Everything that `fuse` may change: attributes of the trainer, forwards and classes of the models."""
    found: dict[str, Any] = {"attributes": sorted(vars(trainer))}
    for name in ("model", "ref_model", "teacher_model"):
        part = getattr(trainer, name, None)
        if isinstance(part, nn.Module):
            found[name] = [(path, type(m), vars(m).get("forward")) for path, m in part.named_modules()]
    return found


def globals_of_trl() -> dict[tuple[str, str], int]:
    modules = [(name, module) for name, module in sys.modules.items() if name.split(".")[0] == "trl"]
    return {(name, key): id(value) for name, module in modules for key, value in list(vars(module).items())}


@pytest.mark.parametrize("kind", ["SFT", "DPO", "ORPO", "GKD", "Distillation"])
def test_restore_leaves_trainer_models_and_trl_as_they_were(kind: str) -> None:
    if not any(case.trainer == kind and case.state == FUSED for case in cases_of_this_trl()):
        pytest.skip("this TRL's trainer is not fused")
    trainer = build(kind)
    before, modules = state_of(trainer), globals_of_trl()
    with integration.fuse(trainer) as report:
        assert report.fused and state_of(trainer) != before
        assert integration.fuse(trainer) is report
        changed = {key for key, value in globals_of_trl().items() if modules.get(key, value) != value}
        assert not changed
    assert state_of(trainer) == before
    report.restore()
    assert state_of(trainer) == before


def test_report_names_adapters_that_trl_added_to_a_patched_policy() -> None:
    def patched() -> Any:
        made = model()
        tigon.patch(made)
        return made

    trainer = build("SFT", policy=patched, lora=lora())
    report = integration.fuse(trainer)
    count = 2 * len(unwrap(trainer.model).model.layers)
    assert f"adapters: PEFT computes {count} layers that tigon could fuse" in str(report)
    tigon.patch(trainer.model)
    assert "adapters:" not in str(report)
    assert "adapters:" not in str(integration.fuse(build("SFT", lora=lora()))), "nothing of this policy is patched"


def test_another_trainer_of_the_process_is_not_affected() -> None:
    fused, other = build("SFT"), build("SFT")
    before = state_of(other)
    integration.fuse(fused)
    assert state_of(other) == before


def test_training_after_restore_is_trls() -> None:
    want = train("DPO", fused=False)
    got = train("DPO", fused=False, before=lambda trainer: integration.fuse(trainer).restore())
    assert got.logs == want.logs


@needs_fused_forward
def test_a_forward_that_was_wrapped_since_runs_trls_code_after_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate wraps `model.forward` for mixed precision when training starts."""
    trainer = build("SFT")
    report = integration.fuse(trainer)
    wrapped = trainer.model.forward
    trainer.model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)
    report.restore()
    monkeypatch.setattr(tigon.ops, "linear_logprobs", None)
    ids = torch.tensor([[5, 6, 7]])
    assert trainer.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 2)


@pytest.mark.parametrize("order", ["patched before", "patched after"])
def test_fused_trainer_of_a_patched_model_logs_trls_numbers(order: str) -> None:
    def patched() -> Any:
        made = model()
        assert tigon.patch(made).counts["rms_norm"] == 5
        return made

    def after(trainer: Any) -> None:
        tigon.patch(trainer.model)

    want = train("SFT", fused=False)
    got = (
        train("SFT", fused=True, policy=patched)
        if order == "patched before"
        else train("SFT", fused=True, before=after)
    )
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)


@needs_fused_forward
def test_head_hook_that_changes_logits_takes_part_in_the_loss() -> None:
    """TRL alone multiplies by the head's weight and passes hooks by."""
    trainer = build("SFT")
    policy = trainer.model.eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    policy.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    want = policy(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    integration.fuse(trainer)
    with pytest.warns(integration.UnfusedWarning, match="hook"):
        got = policy(input_ids=ids, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(got.log_probs, want)


def test_reference_of_a_lora_policy_is_the_model_without_the_adapter() -> None:
    got, want = (train("DPO", fused=fused, lora=lora(init_lora_weights=False)) for fused in (True, False))
    assert got.fused == ["model"]
    assert want.logs[0]["rewards/chosen"] != 0
    assert got.logs[0]["rewards/chosen"] == pytest.approx(want.logs[0]["rewards/chosen"], rel=1e-4)


@needs_fused_forward
def test_batch_without_any_label_gives_zero_gradients() -> None:
    trainer = build("SFT")
    integration.fuse(trainer)
    ids = torch.tensor([[5, 6, 7, 8]])
    outputs = trainer.model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert all(not p.grad.any() for p in trainer.model.parameters() if p.grad is not None)


@needs_fused_forward
def test_subclass_with_a_loss_of_its_own_is_left_to_it() -> None:
    trainer = build("ORPO")

    class Mine(type(trainer)):  # type: ignore[misc]
        def concatenated_forward(self, *args: Any) -> Any:
            return super().concatenated_forward(*args)

    trainer.__class__ = Mine
    with pytest.warns(integration.UnfusedWarning, match="Mine overrides concatenated_forward"):
        assert not integration.fuse(trainer).fused


def test_object_that_is_no_trainer_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear is not a trainer of TRL"):
        integration.fuse(nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["1.7.2", "1.17.0", "2.0.0"])
def test_unknown_version_of_trl_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=rf"TRL {version} is installed; .* knows TRL 1.8 to 1.16"):
        integration.fuse(nn.Linear(2, 2))


def test_missing_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"pip install 'trl>=1\.8"):
        integration.fuse(nn.Linear(2, 2))


def test_saved_and_pickled_policy_is_whole() -> None:
    trainer = build("SFT")
    integration.fuse(trainer)
    state = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    head = pickle.loads(pickle.dumps(unwrap(trainer.model).lm_head))
    torch.testing.assert_close(head.weight, state["lm_head.weight"])


def test_fused_trainer_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", integration.UnfusedWarning)
        train("DPO", fused=True)


@needs_fused_forward
@pytest.mark.parametrize(("found", "says"), [("non-None value", False), (lambda outputs, labels: 0.0, True)])
def test_only_a_loss_function_is_named_as_unfused_not_the_text_that_trl_sets(found: Any, says: bool) -> None:
    """TRL sets a text with transformers before 5.19, so that the Trainer does not divide the loss."""
    trainer = build("GRPO")
    trainer.compute_loss_func = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", integration.UnfusedWarning)
        assert ("compute_loss_func" in integration.fuse(trainer).unfused) == says


@needs_fused_forward
def test_reference_that_trl_put_under_autocast_is_fused_there(tmp_path):
    """TRL's constructor lets Accelerate wrap the reference's forward before `fuse` sees it."""
    import trl

    policy, reference = model(), model()
    trainer = trl.DPOTrainer(
        policy, reference.requires_grad_(False),
        args=trl.DPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True, bf16=True, report_to=[],
            gradient_checkpointing=False, max_length=24,
        ),
        train_dataset=examples("preference"), processing_class=tokenizer(),
    )  # fmt: skip
    before, prepared = reference.forward, len(trainer.accelerator._models)
    result = integration.fuse(trainer)
    assert result.fused == ["model", "ref_model"] and not result.unfused
    assert len(trainer.accelerator._models) == prepared
    seen: list[tuple[bool, bool]] = []
    reference.lm_head.register_forward_pre_hook(
        lambda head, args: seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
    )
    wrapped = trainer.accelerator.prepare_model(policy)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(wrapped, inputs)
    assert seen == [(True, False)], "tigon calls the head, and TRL's own function does not"
    assert float(loss) == pytest.approx(0.693147, abs=1e-4), "policy and reference are the same model"
    result.restore()
    assert reference.forward == before
