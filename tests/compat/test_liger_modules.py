"""Liger's modules and functional names: constructors that mean what Liger's mean, results that are PyTorch's."""

from __future__ import annotations

import abc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tigon.compat.liger import layers, modules
from tigon.compat.liger.losses import cross_entropy
from tigon.errors import OptionError

CONFIG = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu")


def test_norms_start_and_compute_as_their_pytorch_formulas() -> None:
    x = torch.randn(3, 8)
    gemma = modules.LigerRMSNorm(8, offset=1.0, casting_mode="gemma", init_fn="zeros")
    torch.testing.assert_close(gemma(x), F.rms_norm(x, (8,), eps=1e-6))
    assert set(gemma.state_dict()) == {"weight"} and not gemma.weight.any()
    assert not modules.LigerRMSNorm(8, elementwise_affine=False).state_dict()
    normed, total = modules.LigerFusedAddRMSNorm(8)(x, 2 * x)
    torch.testing.assert_close(normed, F.rms_norm(3 * x, (8,), eps=1e-6))
    torch.testing.assert_close(total, 3 * x)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_with_bias_starts_as_the_plain_layer_norm(bias: bool) -> None:
    """Liger draws the bias from a normal distribution."""
    norm, x = modules.LigerLayerNorm(8, bias=bias), torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), eps=1e-6))
    assert set(norm.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize(
    "build",
    [
        lambda: modules.LigerRMSNorm(8, init_fn="one"),
        lambda: modules.LigerLayerNorm(8, init_fn="one"),
        lambda: cross_entropy.LigerCrossEntropyLoss(reduction="average"),
        lambda: cross_entropy.LigerCrossEntropyLoss(label_smoothing=1.5),
        lambda: cross_entropy.LigerFusedLinearCrossEntropyLoss(softcap=0.0),
    ],
)
def test_wrong_value_raises_an_assertion_error_as_in_liger(build: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        build()
    assert isinstance(caught.value, OptionError)


def test_backend_choice_of_layer_norm_is_refused() -> None:
    with pytest.raises(OptionError, match="impl="):
        modules.LigerLayerNorm(8, impl="nvidia-cutile")


def test_swiglu_mlps_equal_their_formula_and_refuse_other_activations() -> None:
    mlp, x = modules.LigerSwiGLUMLP(CONFIG, intermediate_size=10), torch.randn(3, 8)
    assert mlp.gate_proj.out_features == 10
    torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    packed = modules.LigerPhi3SwiGLUMLP(CONFIG)
    gate, up = packed.gate_up_proj(x).chunk(2, -1)
    torch.testing.assert_close(packed(x), packed.down_proj(F.silu(gate) * up))
    for cls in (modules.LigerSwiGLUMLP, modules.LigerPhi3SwiGLUMLP):
        with pytest.raises(ValueError, match="relu"):
            cls(SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="relu"))


@pytest.mark.parametrize(
    ("config", "approximate"),
    [
        ({}, "tanh"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "tanh"),
        ({"hidden_act": "gelu"}, "none"),  # Liger: tanh
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "tanh"),  # as Gemma's configs have it
    ],
)
def test_geglu_mlp_uses_the_gelu_of_its_config(config: dict[str, str], approximate: str) -> None:
    mlp, x = (
        modules.LigerGEGLUMLP(SimpleNamespace(hidden_size=8, intermediate_size=12, **config)),
        torch.randn(3, 8) * 3,
    )
    want = mlp.down_proj(F.gelu(mlp.gate_proj(x), approximate=approximate) * mlp.up_proj(x))
    torch.testing.assert_close(mlp(x), want)


def test_geglu_mlp_refuses_an_activation_that_is_no_gelu() -> None:
    with pytest.raises(OptionError, match="silu"):
        modules.LigerGEGLUMLP(CONFIG)


def test_own_model_with_the_fused_loss_gets_pytorchs_gradients() -> None:
    """Liger's third quick-start: the loss takes the head's weight, the hidden states and the labels."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
    x, target = torch.randn(12, 8), torch.randint(0, 20, (12,))
    target[:4] = -100
    loss = cross_entropy.LigerFusedLinearCrossEntropyLoss()(head.weight, trunk(x), target)
    loss.backward()
    got = [p.grad.clone() for m in (trunk, head) for p in m.parameters()]
    trunk.zero_grad(), head.zero_grad()
    want = F.cross_entropy(head(trunk(x)), target)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, [p.grad for m in (trunk, head) for p in m.parameters()], rtol=1e-4, atol=1e-6)


def test_losses_return_exactly_the_requested_outputs() -> None:
    logits, target = torch.randn(6, 20), torch.tensor([1, 2, -100, 3, 4, 5])
    assert isinstance(cross_entropy.LigerCrossEntropyLoss()(logits, target), torch.Tensor)
    full = cross_entropy.LigerCrossEntropyLoss(
        torch.rand(20), lse_square_scale=1e-3, softcap=5.0, return_z_loss=True, return_token_accuracy=True,
        return_predicted_tokens=True,
    )  # fmt: skip
    out = full(logits, target)
    assert isinstance(out, cross_entropy.CrossEntropyOutput)
    assert out.predicted_tokens.tolist()[2] == -1 and out.token_accuracy.ndim == out.z_loss.ndim == 0
    head, hidden = torch.randn(20, 8), torch.randn(6, 8)
    scaled = cross_entropy.LigerFusedLinearCrossEntropyLoss(use_token_scaling=True, return_token_accuracy=True)
    out = scaled(head, hidden, target, torch.randn(20))
    assert out.z_loss is None and out.token_accuracy is not None


def test_functional_names_compute_their_pytorch_formulas() -> None:
    logits, target = torch.randn(6, 20), torch.tensor([1, 2, -100, 3, 4, 5])
    torch.testing.assert_close(cross_entropy.liger_cross_entropy(logits, target), F.cross_entropy(logits, target))
    few = target.masked_fill(target == -100, 0)
    out = cross_entropy.liger_cross_entropy(logits, few, ignore_index=0, return_predicted_tokens=True, reduction="sum")
    assert isinstance(out, cross_entropy.CrossEntropyOutput) and out.predicted_tokens.tolist()[2] == -1
    torch.testing.assert_close(out.loss, F.cross_entropy(logits, few, ignore_index=0, reduction="sum"))
    hidden, head = torch.randn(6, 8), torch.randn(20, 8)
    loss = cross_entropy.liger_fused_linear_cross_entropy(hidden, head, target)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ head.T, target))
    x, w, b = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    torch.testing.assert_close(layers.liger_rms_norm(x, w, 1e-6), F.rms_norm(x, (8,), w, 1e-6))
    normed, total = layers.liger_fused_add_rms_norm(x, x, w, 1e-6)
    torch.testing.assert_close((normed, total), (F.rms_norm(2 * x, (8,), w, 1e-6), 2 * x))
    torch.testing.assert_close(layers.liger_layer_norm(x, w, b, 1e-6), F.layer_norm(x, (8,), w, b, 1e-6))
    torch.testing.assert_close(layers.liger_swiglu(x, 2 * x), F.silu(x) * 2 * x)
    torch.testing.assert_close(layers.liger_geglu(x, 2 * x), F.gelu(x, approximate="tanh") * 2 * x)
    q, angle = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    rotated = layers.liger_rope(q, q, cos, sin)[0]
    torch.testing.assert_close(rotated, layers.liger_rotary_pos_emb(q, q, cos, sin)[1])
    torch.testing.assert_close(rotated.norm(dim=-1), q.norm(dim=-1))


def test_deprecated_argument_of_cross_entropy_is_refused() -> None:
    with pytest.raises(OptionError, match="size_average"):
        cross_entropy.liger_cross_entropy(torch.randn(2, 5), torch.tensor([1, 2]), size_average=False)


def test_user_class_may_inherit_from_a_module_and_an_abstract_class() -> None:
    class Abstract(abc.ABC):  # noqa: B024  # ABCMeta is what matters
        pass

    class Norm(modules.LigerRMSNorm, Abstract):
        pass

    assert isinstance(Norm(8), modules.LigerRMSNorm) and isinstance(Norm(8), Abstract)


def test_modules_of_a_line_print_their_options_survive_a_pickle_and_refuse_what_python_refuses() -> None:
    loss = cross_entropy.LigerCrossEntropyLoss(torch.ones(5), label_smoothing=0.1)
    assert "label_smoothing=0.1" in repr(loss) and "tensor" not in repr(loss) and not loss.state_dict()
    logits, target = torch.randn(2, 5), torch.tensor([1, 2])
    torch.testing.assert_close(pickle.loads(pickle.dumps(loss))(logits, target=target), loss(logits, target))
    for wrong in (
        lambda: cross_entropy.LigerCrossEntropyLoss(smoothing=0.1),
        lambda: loss(logits),
        lambda: loss(logits, target, target),
        lambda: loss(logits, target, _input=logits),
        lambda: cross_entropy.liger_cross_entropy(logits, target, smoothing=0.1),
    ):
        with pytest.raises(TypeError):
            wrong()
