"""The modules load the state dicts of what they replace, and compute what it computes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import tigon.nn as tnn

HIDDEN, INTERMEDIATE, VOCAB, TOKENS = 24, 40, 31, 11


def assert_same(ours, theirs, *shape):
    """Outputs and gradients of two modules that share a state dict."""
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    grads = []
    for module in (ours, theirs):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        grads.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def randomised(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def llama_mlp(bias=False, act="silu"):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 1}
    return LlamaMLP(LlamaConfig(**sizes, mlp_bias=bias, hidden_act=act))


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_replaces_torch_rms_norm(affine):
    theirs = randomised(nn.RMSNorm(HIDDEN, eps=1e-3, elementwise_affine=affine))
    assert_same(tnn.RMSNorm(HIDDEN, 1e-3, elementwise_affine=affine), theirs, 3, 5, HIDDEN)


def test_rms_norm_replaces_those_of_llama_and_gemma():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert_same(tnn.RMSNorm(HIDDEN), randomised(LlamaRMSNorm(HIDDEN)), 3, 5, HIDDEN)
    gemma = tnn.RMSNorm(HIDDEN, offset=1.0, casting="gemma")
    assert not gemma.weight.any(), "Gemma's effective weight is 1 + weight, and starts at 1"
    assert_same(gemma, randomised(GemmaRMSNorm(HIDDEN)), 3, 5, HIDDEN)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_replaces_torch_layer_norm(options):
    theirs = randomised(nn.LayerNorm(HIDDEN, **options))
    assert_same(tnn.LayerNorm(HIDDEN, **options), theirs, 2, 7, HIDDEN)


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_mlp_replaces_llama_mlp(bias):
    assert_same(tnn.SwiGLUMLP(HIDDEN, INTERMEDIATE, bias=bias), randomised(llama_mlp(bias)), 2, 5, HIDDEN)


@pytest.mark.parametrize("approximate, act", [("tanh", "gelu_pytorch_tanh"), ("none", "gelu")])
def test_geglu_mlp_replaces_gemma_mlp(approximate, act):
    ours = tnn.GeGLUMLP(HIDDEN, INTERMEDIATE, approximate=approximate)
    assert_same(ours, randomised(llama_mlp(act=act)), 2, 5, HIDDEN)


def loss_inputs():
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    target = torch.randint(0, VOCAB, (TOKENS,))
    target[[1, 4]] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_equal_torch_cross_entropy(reduction, weighted):
    class_weight = torch.rand(VOCAB) if weighted else None
    options = {"reduction": reduction, "label_smoothing": 0.1}
    theirs = nn.CrossEntropyLoss(class_weight, **options)
    ours = tnn.CrossEntropyLoss(class_weight, **options)
    linear = tnn.LinearCrossEntropyLoss(class_weight, chunk_bytes=4 * VOCAB * 3, **options)
    assert list(ours.state_dict()) == list(linear.state_dict()) == list(theirs.state_dict())
    bias = torch.randn(VOCAB)
    results = []
    for run in (
        lambda h, w, t: theirs(h @ w.T + bias, t),
        lambda h, w, t: ours(h @ w.T + bias, t),
        lambda h, w, t: linear(h, w, t, bias),
    ):
        hidden, weight, target = loss_inputs()
        loss = run(hidden, weight, target)
        loss.sum().backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_losses_pass_on_every_option_and_every_call_argument():
    hidden, weight, target = loss_inputs()
    options = {"softcap": 5.0, "logit_scale": 0.5, "z_loss": 1e-2, "outputs": ("accuracy", "entropy")}
    call = {"num_items": 4, "token_weight": torch.rand(TOKENS)}
    a = tnn.CrossEntropyLoss(**options)(hidden @ weight.T, target, **call)
    b = tnn.LinearCrossEntropyLoss(**options)(hidden, weight, target, **call)
    plain = tnn.CrossEntropyLoss()(hidden @ weight.T, target)
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(a.entropy, b.entropy)
    assert a.accuracy == b.accuracy and not torch.isclose(a.loss, plain)


def test_unknown_option_is_a_type_error():
    for cls in (tnn.CrossEntropyLoss, tnn.LinearCrossEntropyLoss):
        with pytest.raises(TypeError, match="lable_smoothing"):
            cls(lable_smoothing=0.1)


def test_modules_pickle_print_and_take_a_device_and_dtype():
    modules = [
        tnn.RMSNorm(8, offset=1.0, casting="gemma", device="meta", dtype=torch.bfloat16),
        tnn.LayerNorm(8, device="meta", dtype=torch.bfloat16),
        tnn.SwiGLUMLP(8, 4, device="meta", dtype=torch.bfloat16),
        tnn.GeGLUMLP(8, 4, device="meta", dtype=torch.bfloat16),
    ]
    for module in modules:
        assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    for module in (tnn.RMSNorm(8), tnn.GeGLUMLP(8, 4), tnn.LinearCrossEntropyLoss(torch.ones(3), softcap=3.0)):
        clone = pickle.loads(pickle.dumps(module))
        assert repr(clone) == repr(module) and clone.state_dict().keys() == module.state_dict().keys()
    assert "softcap=3.0" in repr(tnn.LinearCrossEntropyLoss(softcap=3.0))
    assert "casting='gemma'" in repr(modules[0])
