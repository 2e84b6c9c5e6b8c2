"""Norms, MLPs, experts and rotations of single families, and what the page recommends instead of refused rotations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.compat.liger import layers, modules
from tigon.errors import ShapeError

CONFIG = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu", num_experts=3)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def test_multimodal_rotation_takes_the_angles_of_time_height_and_width() -> None:
    """Angle i belongs to time if i < 1, to height if i < 3, else to width."""
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (3, 1))
    angle = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    tables = torch.cat((angle, angle), -1)
    turned = layers.liger_qwen2vl_mrope(q, k, tables.cos(), tables.sin(), [1, 2, 1])
    chosen = torch.stack([angle[axis, ..., i] for i, axis in enumerate((0, 1, 1, 2))], -1)[:, None]
    expected = _turned(q, chosen), _turned(k, chosen)
    torch.testing.assert_close(turned, expected)
    upstream = [torch.linspace(-1.0, 1.3, x.numel(), dtype=torch.float64).view(x.shape) for x in expected]
    torch.testing.assert_close(*(torch.autograd.grad(outputs, (q, k), upstream) for outputs in (turned, expected)))
    with pytest.raises(ShapeError, match="whose sum is 4"):
        layers.liger_qwen2vl_mrope(q, k, tables[0], tables[0], [1, 1, 2])


def test_refused_rotations_are_tigons_rope_with_tables_of_their_form() -> None:
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 1, 8)
    freqs_cis = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    cos, sin = (part.repeat_interleave(2, -1) for part in (freqs_cis.real, freqs_cis.imag))
    for x, turned in zip((q, k), tigon.rope(q, k, cos, sin, interleaved=True, unsqueeze_dim=2), strict=True):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis[:, None]
        torch.testing.assert_close(turned, torch.view_as_real(pairs).flatten(-2))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    angle = torch.randn(1, 5, 4)  # GPT-OSS has tables of half the width
    rotated = layers.liger_rotary_pos_emb(q, k, angle.cos(), angle.sin(), rotary_dim=8)
    torch.testing.assert_close(rotated, (_turned(q, angle[:, None]), _turned(k, angle[:, None])))


def test_experts_equal_the_sum_over_each_tokens_experts() -> None:
    module = modules.LigerExperts(CONFIG)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(2, 4, 8, requires_grad=True)
    index = torch.tensor([[[0, 2]] * 4, [[2, 0]] * 4])  # expert 1 gets no token
    weights = torch.rand(2, 4, 2, requires_grad=True)
    out = module(x, index, weights)
    rows = []
    for token, chosen, share in zip(x.reshape(-1, 8), index.reshape(-1, 2), weights.reshape(-1, 2), strict=True):
        parts = []
        for expert, part in zip(chosen.tolist(), share, strict=True):
            gate, up = (module.gate_up_proj[expert] @ token).chunk(2)
            parts.append(part * (module.down_proj[expert] @ (F.silu(gate) * up)))
        rows.append(sum(parts))
    expected = torch.stack(rows).view(2, 4, 8)
    torch.testing.assert_close(out, expected)
    flat = (x.reshape(-1, 8), module.gate_up_proj, module.down_proj, index.reshape(-1, 2), weights.reshape(-1, 2))
    torch.testing.assert_close(layers.LigerFusedMoEFunction.apply(*flat).view(2, 4, 8), out)
    leaves = (x, weights, module.gate_up_proj, module.down_proj)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mlps_of_families_equal_their_formulas() -> None:
    x = torch.randn(3, 8)
    mlp = modules.LigerQwen3MoeSwiGLUMLP(CONFIG)
    torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    expert = modules.LigerBlockSparseTop2MLP(CONFIG)
    torch.testing.assert_close(expert(x), expert.w2(F.silu(expert.w1(x)) * expert.w3(x)))


def test_norms_of_families_have_their_offset_and_start() -> None:
    x = torch.randn(3, 8)
    expected = F.rms_norm(x, (8,), eps=1e-6)
    for name in ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Olmo2", "Glm4", "Qwen3Next"):
        norm = getattr(modules, f"LigerRMSNormFor{name}")(8)
        torch.testing.assert_close(norm(x), expected)
        assert norm.offset == (1.0 if not norm.weight.any() else 0.0)
        assert isinstance(norm, modules.LigerRMSNorm)
    bare = modules.LigerRMSNormForGemma4(8, with_scale=False)
    torch.testing.assert_close(bare(x), expected)
    assert not bare.state_dict()
