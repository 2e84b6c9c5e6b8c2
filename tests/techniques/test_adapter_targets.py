"""Adapters go to the modules whose product they can add to, and to no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tigon.errors import RecipeError
from tigon.models.verification.small_models import small_model
from tigon.techniques.keys.lora import LINEAR, LoraConfig
from tigon.techniques.lora.adapter_targets import check, left_out, short_names, targets_of

LEFT_OUT = {
    "bloom": set(),  # it reads weights for a setting of its pretraining
    "llama4_text": {"router"},
    "phimoe": {"router"},
    "deepseek_v4": {"o_a_proj"},
    "falcon_h1": {"out_proj"},
    "nemotron_h": {"out_proj"},
    "mamba": {"x_proj", "dt_proj", "out_proj"},
    "jamba": {"dt_proj"},
    "falcon": set(),
    "gpt2": set(),
    "llama": set(),
}
"""Routers that return tuples, a weight in groups, and weights that Mamba's kernels read. Falcon's linear class has a
forward of its own, which computes the same."""


@pytest.mark.parametrize("family", LEFT_OUT)
def test_modules_that_adapters_do_not_fit_are_left_out(family: str) -> None:
    model, _ = small_model(family)
    unfit = left_out(model)
    assert {path.rpartition(".")[2] for path in unfit} == LEFT_OUT[family]
    chosen = targets_of(model, (LINEAR,)).modules
    assert chosen and not set(chosen) & set(unfit)
    assert all(why.split(" ")[0] for why in unfit.values())


def test_model_on_the_meta_device_is_judged_as_one_with_data() -> None:
    """A run is refused before its weights are loaded."""
    model, _ = small_model("llama4_text")
    assert left_out(model.to("meta")) == left_out(small_model("llama4_text")[0])


@pytest.mark.parametrize(
    ("family", "target", "reason"),
    [
        ("falcon_h1", "out_proj", "FalconH1Mixer reads its weight itself"),
        ("llama4_text", "router", "more than a linear"),
    ],
)
def test_naming_such_a_module_is_refused_with_the_reason(family: str, target: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=rf"lora\.targets: '{target}' names .*{target}, a .*{reason}"):
        targets_of(small_model(family)[0], (target,))


# DeepSeek-V4's indexer chooses tokens, which gives it no gradient in full fine-tuning either.
@pytest.mark.parametrize("family", [family for family, names in LEFT_OUT.items() if names and family != "deepseek_v4"])
def test_peft_adapts_the_default_targets_and_every_adapter_gets_a_gradient(family: str) -> None:
    peft = pytest.importorskip("peft")
    model, _ = small_model(family)
    names = short_names(model, targets_of(model, (LINEAR,)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM"))
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if "lora_B" in name}
    assert trained and all(p.grad is not None and bool(p.grad.any()) for p in trained.values())


class NoLinear(nn.Module):
    """A model without a linear module besides its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.head = nn.Embedding(4, 2), nn.Linear(2, 4)

    def get_output_embeddings(self) -> Any:
        return self.head

    def get_input_embeddings(self) -> Any:
        return self.embeddings


def test_targets_that_name_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"lora\.targets: all-linear names no module"):
        check(NoLinear(), LoraConfig(rank=2, targets=(LINEAR,)))
