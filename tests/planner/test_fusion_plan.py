"""The memory of a later micro-batch with and without gradient accumulation fusion: traced against recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_helpers import H200
from transformers import AutoModelForCausalLM

from tests.short_names import settings_of
from tigon.models import MODELS
from tigon.models.verification.tiny import SIZES, tiny_config
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.planner.estimate import estimate
from tigon.planner.request import Request, text_config
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, replay
from tigon.planner.trace.trace import trace
from tigon.profiler.recording.peak import PeakMeter, training_state
from tigon.techniques.accumulation.fused_embedding import fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears

BATCH, SEQ = 1, 12
# Weights are large and samples short, so that gradients decide the peak.
SMALL = {
    **SIZES, "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def request_of(*, tied: bool, **settings: Any) -> Request:
    config = tiny_config("llama", MODELS["llama"].tiny, {**SMALL, "tie_word_embeddings": tied})
    text_config(config).use_cache = False
    own = settings_of(
        {
            "train.precision": "fp32",
            "model.kernels": "none",
            "model.attention": "eager",
            "train.gradient_accumulation": 2,
            **settings,
        }
    )
    return Request(model="llama", config=config, batch=BATCH, seq=SEQ, settings=own)


def recorded_bytes(request: Request) -> int:
    """The peak of the second micro-batch beyond weights and gradients, on the CPU."""
    model = AutoModelForCausalLM.from_config(request.config, attn_implementation="eager").train()
    if request.settings.train.gradient_accumulation_fusion:
        fuse_linears(model)
        fuse_embeddings(model)
    ids = torch.randint(3, 900, (BATCH, SEQ))

    def backward() -> None:
        with accumulation_fusion():
            model(input_ids=ids, labels=ids.clone(), num_items_in_batch=torch.tensor(300)).loss.backward()

    backward()
    meter = PeakMeter(torch.device("cpu"))
    meter.start(training_state(model, torch.optim.SGD(model.parameters())))
    backward()
    return meter.stop().step_bytes


@pytest.mark.parametrize(
    ("tied", "fused"), [(False, False), (False, True), (True, True)], ids=["usual", "fused", "fused and tied"]
)
def test_traced_peak_of_a_later_micro_batch_is_the_recorded_one(tied: bool, fused: bool) -> None:
    request, ledger = request_of(tied=tied, accumulation_fusion=fused), Ledger()
    replay(ledger, trace(request, H200, accumulating=True, evaluating=False).tape, GradientRules(keep=True))
    # Without gradients the peak is a few hundred KB of activations, and the plan rounds each tensor to 512 bytes.
    assert max(ledger.phases.values()) == pytest.approx(recorded_bytes(request), rel=0.02 if fused else 0.01)


def test_fusion_saves_the_gradient_of_the_head() -> None:
    usual, fused = (recorded_bytes(request_of(tied=False, accumulation_fusion=on)) for on in (False, True))
    head_bytes = 4 * SMALL["vocab_size"] * SMALL["hidden_size"]
    # What is left at the peak are logits and activations.
    assert usual - fused > 0.5 * head_bytes


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16", "amp-fp16"])
def test_fusion_is_planned_with_less_memory_in_the_backward_pass(precision: str) -> None:
    plain, fused = (
        estimate(request_of(tied=True, precision=precision, kernels="tigon", attention="sdpa",
                            accumulation_fusion=on), gpu=H200, evaluation=False)
        for on in (False, True)
    )  # fmt: skip
    assert fused.phases["backward"] < plain.phases["backward"]
    assert fused.peak_allocated_bytes <= plain.peak_allocated_bytes


def test_one_micro_batch_is_planned_as_without_fusion() -> None:
    plain, fused = (
        estimate(request_of(tied=False, accumulate=1, accumulation_fusion=on), gpu=H200, evaluation=False)
        for on in (False, True)
    )
    assert plain.phases == fused.phases and plain.step_s == fused.step_s
