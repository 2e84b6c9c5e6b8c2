"""Models without a language model's head: trunks, classifiers and encoders get the layers that compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tigon.errors import PatchError
from tigon.models import patch
from tigon.models.patch import unwrap

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": ({"num_key_value_heads": 2}, {"rms_norm": 5, "swiglu": 2, "rope": 2}),
    "modernbert": (
        {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        {"layer_norm": 5, "geglu": 2, "rope": 2},
    ),
    "eurobert": ({"num_key_value_heads": 2}, {"rms_norm": 5, "swiglu": 2, "rope": 2}),
    "xlm-roberta": ({}, {"layer_norm": 5}),
    "bert": ({}, {"layer_norm": 5}),
}
"""Family -> what its config needs, and the ops that its layers get. ModernBERT's heads have a norm more."""
HEADS = ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification")


def built(family: str, head: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SHAPE, **FAMILIES[family][0])
    return getattr(transformers, head).from_config(config).eval()


def outputs_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of two padded rows, for a loss that weighs each output differently."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (2, 9), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    out = model(input_ids=ids, attention_mask=mask)[0]
    weight = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
    if out.shape[:2] == mask.shape:
        weight = weight * mask[..., None]
    model.zero_grad()
    (out * weight).sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_layers_below_any_head_are_as_near_to_fp64_as_the_model_itself(family, head):
    model = built(family, head)
    oracle, gradients = outputs_and_gradients(copy.deepcopy(model).double())
    plain, plain_gradients = outputs_and_gradients(copy.deepcopy(model))
    report = patch(model)
    expected = dict(FAMILIES[family][1])
    if family == "modernbert" and head != "AutoModel":
        expected["layer_norm"] += 1
    assert report.counts == expected
    patched, patched_gradients = outputs_and_gradients(model)

    def error(one: torch.Tensor, exact: torch.Tensor) -> float:
        return float((one.double() - exact).norm() / exact.norm().clamp_min(1e-12))

    assert error(patched, oracle) <= 2 * error(plain, oracle) + 1e-6
    for one, other, exact in zip(patched_gradients, plain_gradients, gradients, strict=True):
        assert error(one, exact) <= 2 * error(other, exact) + 1e-5
    report.undo()
    assert torch.equal(outputs_and_gradients(model)[0], plain)


def test_a_head_without_a_language_models_loss_is_named_and_refused_if_it_is_asked_for():
    model = built("bert", "AutoModelForSequenceClassification")
    with pytest.raises(PatchError, match="linear_cross_entropy=True, but it has no output embeddings"):
        patch(model, linear_cross_entropy=True)
    report = patch(model)
    assert any("computes no language-model loss" in row.reason for row in report.left_alone)


def test_a_wrapper_that_names_its_transformers_model_is_unwrapped():
    class Wrapper(nn.Module):
        """As sentence-transformers' models name theirs."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.config = inner, inner.config

        @property
        def transformers_model(self) -> nn.Module:
            return self.inner

    model = built("modernbert", "AutoModel")
    assert unwrap(Wrapper(model)) is model
    assert patch(Wrapper(model)).counts["geglu"] == 2
