"""Accelerate's plain training loop with a patched model: accumulation, mixed precision, metrics, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import lora, model, padded, rows
from torch import Tensor, nn

import tigon
from tigon.models import DeferredLogits
from tigon.models.seams.base import PatchedModule

accelerate = pytest.importorskip("accelerate")
DATA = rows()


@pytest.fixture(autouse=True)
def fresh_state() -> Any:
    """Accelerate keeps precision and device of the first Accelerator of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def prepare(base: nn.Module, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, **options)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(DATA, batch_size=2, collate_fn=padded)
    return accelerator, *accelerator.prepare(base, optimizer, loader)


def epoch(accelerator: Any, wrapped: Any, optimizer: Any, loader: Any) -> list[Tensor]:
    """One epoch as Accelerate's documentation writes it; the losses."""
    losses = []
    wrapped.train()
    for batch in loader:
        with accelerator.accumulate(wrapped):
            outputs = wrapped(**batch)
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(outputs.loss.detach()))
    return losses


def train(base: nn.Module, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    parts = prepare(base, **options)
    losses = epoch(*parts)
    return torch.stack(losses).double(), {n: p.detach().double() for n, p in base.named_parameters()}


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("wrap", [lambda base: base, lora], ids=["full", "lora"])
@pytest.mark.parametrize("steps", [1, 4])
def test_plain_loop_trains_as_unpatched(steps: int, wrap: Any) -> None:
    losses, weights = train(wrap(model()), gradient_accumulation_steps=steps)
    patched = model()
    tigon.patch(patched)
    got_losses, got_weights = train(wrap(patched), gradient_accumulation_steps=steps)
    assert error(got_losses, losses) < 1e-6
    for name, want in weights.items():
        assert error(got_weights[name], want) < 1e-5, name


def test_bf16_autocast_errs_at_most_double_the_unpatched_error() -> None:
    truth = train(model())[1]
    fresh = accelerate.state.AcceleratorState._reset_state
    fresh(reset_partial_state=True)
    own = train(model(), mixed_precision="bf16")[1]
    fresh(reset_partial_state=True)
    patched = model()
    tigon.patch(patched)
    got = train(patched, mixed_precision="bf16")[1]
    for name, want in truth.items():
        assert error(got[name], want) <= 2 * error(own[name], want), name


def test_training_loop_computes_no_logits() -> None:
    patched = model()
    tigon.patch(patched)
    for precision in ("no", "bf16"):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        _, wrapped, _, loader = prepare(patched, mixed_precision=precision)
        outputs = wrapped(**next(iter(loader)))
        assert type(outputs.logits) is DeferredLogits and not outputs.logits.source.touched


def test_state_saved_in_the_middle_continues_bit_for_bit(tmp_path: Any) -> None:
    """save_state and load_state of a patched model, also into an unpatched one and back, to the last bit."""
    patched = model()
    tigon.patch(patched)
    parts = prepare(patched)
    epoch(*parts)
    parts[0].save_state(str(tmp_path / "state"))
    want = [loss.clone() for loss in epoch(*parts)]

    for resumed in (model(), model()):
        tigon.patch(resumed)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        again = prepare(resumed)
        again[0].load_state(str(tmp_path / "state"))
        assert all(torch.equal(a, b) for a, b in zip(epoch(*again), want, strict=True))


def test_unwrapping_keeps_the_patch_and_saves_an_ordinary_checkpoint(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    patched = model()
    tigon.patch(patched)
    accelerator, wrapped, _, _ = prepare(patched, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert unwrapped is patched and isinstance(unwrapped, PatchedModule)
    batch = padded(DATA[:2])
    assert type(unwrapped(**batch).logits) is DeferredLogits
    unwrapped.save_pretrained(tmp_path, save_function=accelerator.save, state_dict=accelerator.get_state_dict(wrapped))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(loaded, PatchedModule)
    torch.testing.assert_close(loaded.train()(**batch).loss, unwrapped(**batch).loss)
