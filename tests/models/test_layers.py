"""The layer seams take a module only if it computes what the op computes."""

from __future__ import annotations

import pytest
import torch
from models_helpers import llama
from torch import nn

from tigon.models.seams.base import patched_class
from tigon.models.seams.mlp import GatedMlpSeam
from tigon.models.seams.norm import GatedNormSeam, NormSeam
from tigon.models.seams.rope import RopeSeam


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """The interleaved convention, under the name of the half-split one."""

    def rotate(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


class InterleavedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def apply_rotary_to_last_columns(x, cos, sin, unsqueeze_dim=1):
    """As DeepSeek V4's: tables of half the pairs' width rotate the last columns, and the op rotates the first."""
    cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim) for table in (cos, sin))
    kept, x = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((kept, x * cos + turned * sin), dim=-1)


class LastColumnsAttention(nn.Module):
    def forward(self, x, cos, sin):
        return apply_rotary_to_last_columns(x, cos, sin)


class SwappedMLP(type(llama().model.layers[0].mlp)):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class BiasedRMSNorm(type(llama().model.norm)):
    def __init__(self):
        super().__init__(8)
        self.shift = nn.Parameter(torch.ones(8))

    def forward(self, hidden_states):
        return super().forward(hidden_states) + self.shift


class DetachedRMSNorm(type(llama().model.norm)):
    def forward(self, hidden_states):
        return super().forward(hidden_states.detach()) + 0 * hidden_states


class GatedRMSNorm(type(llama().model.norm)):
    def forward(self, hidden_states, gate=None):
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


class BufferRMSNorm(nn.Module):
    """As FalconMamba's: the buffer is called weight, and its forward does not use it."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("weight", torch.ones(3))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class PerHeadRMSNorm(type(llama().model.norm)):
    def __init__(self):
        super().__init__(8)
        self.weight = nn.Parameter(torch.ones(4, 8))


class DropoutMLP(type(llama().model.layers[0].mlp)):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), p=0.5, training=self.training)


def test_modules_of_a_llama_are_accepted():
    layer = llama().model.layers[0]
    for seam, module in (
        (NormSeam(), layer.input_layernorm),
        (GatedMlpSeam(), layer.mlp),
        (RopeSeam(), layer.self_attn),
    ):
        assert seam.candidate(module) and seam.objection(module) is None


@pytest.mark.parametrize("offset, casting", [(1.0, "gemma"), (0.5, "llama")])
def test_norm_of_another_family_is_refused(offset, casting):
    reason = NormSeam(offset=offset, casting=casting).objection(llama().model.norm)
    assert reason is not None and "differs" in reason


def test_norm_with_a_parameter_of_its_own_is_refused():
    norm = BiasedRMSNorm()
    assert NormSeam().candidate(norm) and "cannot be compared" in str(NormSeam().objection(norm))


def test_norm_whose_gradient_alone_differs_is_refused():
    norm = DetachedRMSNorm(8)
    assert "gradient" in str(NormSeam().objection(norm))


def test_mlp_with_the_activation_on_the_other_projection_is_refused():
    mlp = llama().model.layers[0].mlp
    mlp.__class__ = SwappedMLP
    assert GatedMlpSeam().candidate(mlp) and "differs" in str(GatedMlpSeam().objection(mlp))


def test_rotary_convention_is_found_from_numbers_not_from_the_name():
    attention = InterleavedAttention()
    half, pairs = RopeSeam(styles=("half-split",)), RopeSeam(styles=("half-split", "interleaved"))
    assert half.candidate(attention) and "differs" in str(half.objection(attention))
    assert pairs.objection(attention) is None
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    angle = torch.randn(1, 5, 4).repeat_interleave(2, -1)
    want = attention(q, k, angle.cos(), angle.sin())
    attention.__class__ = patched_class(InterleavedAttention, pairs)
    torch.testing.assert_close(attention(q, k, angle.cos(), angle.sin()), want)


def apply_rotary_pos_emb_vision(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = (x.chunk(2, -1) for x in (q, k))
    turned = [torch.cat((-b, a), -1) for a, b in (first, second)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


class PackedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb_vision(q, k, cos, sin)


def test_rotary_function_of_the_last_columns_is_refused():
    assert "the op's output 0 differs" in RopeSeam().objection(LastColumnsAttention())


def test_rotary_function_of_queries_without_a_batch_is_replaced():
    attention, seam = PackedAttention(), RopeSeam(styles=("half-split",))
    assert seam.objection(attention) is None
    assert "differs" in str(RopeSeam(styles=("interleaved",)).objection(attention))
    q, k, angle = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 8)
    want = attention(q, k, angle.cos(), angle.sin())
    attention.__class__ = patched_class(PackedAttention, seam)
    torch.testing.assert_close(attention(q, k, angle.cos(), angle.sin()), want)


def apply_rotary_emb_to_some(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    """As Qwen4's, which gives the queries alone if there are no keys."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [None if x is None else x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin
              for x in (q, k)]  # fmt: skip
    return turned[0] if k is None else (turned[0], turned[1])


class IndexedAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        alone = apply_rotary_emb_to_some(q.transpose(1, 2), cos=cos, sin=sin, unsqueeze_dim=2)
        return alone, *apply_rotary_emb_to_some(q, k, cos, sin)


def test_rotary_function_whose_keys_may_be_absent_is_replaced():
    attention, seam = IndexedAttention(), RopeSeam(styles=("half-split",))
    assert seam.objection(attention) is None
    q, k, angle = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 7, 8)
    want = attention(q, k, angle.cos(), angle.sin())
    attention.__class__ = patched_class(IndexedAttention, seam)
    torch.testing.assert_close(attention(q, k, angle.cos(), angle.sin()), want)


def hub_module(function):
    """As the decorator of the package kernels, which transformers puts around rotary functions if it is installed."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    return Func()


@pytest.mark.parametrize("package", [None, "kernels"])
def test_rotary_function_that_transformers_offers_to_hub_kernels_is_replaced(package, monkeypatch):
    wrap = hub_module
    if package:
        module = pytest.importorskip(package)
        if module.__file__ is None:
            pytest.skip("kernels is not installed; a folder of that name was found")
        wrap = module.use_kernel_forward_from_hub("rotary_pos_emb")
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", wrap(apply_rotary_pos_emb))
    attention, seam = InterleavedAttention(), RopeSeam(styles=("interleaved",))
    assert isinstance(InterleavedAttention.forward.__globals__["apply_rotary_pos_emb"], nn.Module)
    assert seam.candidate(attention) and seam.objection(attention) is None
    assert "differs" in str(RopeSeam(styles=("half-split",)).objection(attention))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    angle = torch.randn(1, 5, 4).repeat_interleave(2, -1)
    want = attention(q, k, angle.cos(), angle.sin())
    attention.__class__ = patched_class(InterleavedAttention, seam)
    torch.testing.assert_close(attention(q, k, angle.cos(), angle.sin()), want)


class GatedNorm(type(llama().model.norm)):
    def forward(self, hidden_states, gate):
        return super().forward(hidden_states) * self.gated(gate)

    def gated(self, gate):
        return nn.functional.silu(gate)


class SigmoidGatedNorm(GatedNorm):
    def gated(self, gate):
        return gate.sigmoid()


def test_gated_norm_is_replaced_if_its_gate_is_silu():
    seam, norm = GatedNormSeam(), GatedNorm(8)
    # Modules round the norm, the gate or both before the product; the op rounds the result alone, which is more exact.
    assert seam.candidate(norm) and seam.objection(norm) is None
    x, gate = (torch.randn(64, 8, dtype=torch.bfloat16) for _ in range(2))
    exact = GatedNorm(8).double()(x.double(), gate.double())
    plain = norm.bfloat16()(x, gate)
    norm.__class__ = patched_class(GatedNorm, seam)
    assert (norm(x, gate) - exact).norm() < (plain - exact).norm()
    assert "differs" in str(seam.objection(SigmoidGatedNorm(8)))
    assert not seam.candidate(llama().model.norm)


def test_probing_neither_needs_nor_touches_the_weights():
    model = llama()
    layer = model.model.layers[0].to("meta")
    assert GatedMlpSeam().objection(layer.mlp) is None and NormSeam().objection(layer.input_layernorm) is None
    assert all(p.is_meta for p in layer.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert NormSeam().objection(model.model.norm) is None


def test_one_class_is_generated_per_base_and_seam():
    base = type(llama().model.norm)
    assert patched_class(base, NormSeam()) is patched_class(base, NormSeam())
    assert patched_class(base, NormSeam()) is not patched_class(base, NormSeam(eps="eps"))
    assert str(patched_class(base, NormSeam())) == str(base)


def test_norm_with_an_optional_second_argument_is_refused():
    assert "more than the hidden states" in str(NormSeam().objection(GatedRMSNorm(8)))


def test_norm_whose_weight_is_a_buffer_or_has_two_dimensions_is_refused():
    assert "buffer" in str(NormSeam(eps="eps").objection(BufferRMSNorm()))
    assert "2 dimensions" in str(NormSeam().objection(PerHeadRMSNorm()))


@pytest.mark.parametrize("training", [True, False])
def test_mlp_with_dropout_is_refused_even_in_eval_mode(training):
    """A model from from_pretrained is in eval mode when it is patched, and trained afterwards."""
    mlp = llama().model.layers[0].mlp.train(training)
    mlp.__class__ = DropoutMLP
    before = torch.get_rng_state()
    assert "differs" in str(GatedMlpSeam().objection(mlp))
    assert torch.equal(torch.get_rng_state(), before)
