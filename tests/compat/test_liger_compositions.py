"""Ops of Liger that tigon composes: forward and every gradient against formulas written another way, in fp64.

In bf16 the error is at most twice that of the formula in bf16, plus one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.compat.liger import functional as short
from tigon.compat.liger.compositions import activations, attention, hyper_connections, mlps, norms, rotary
from tigon.compat.liger.compositions.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction
from tigon.compat.liger.transformers import family_mlps, family_norms, functional
from tigon.errors import DtypeError, LabelError, OptionError, ShapeError

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
"""The composition, the formula, and the inputs: tensors of fp64, shapes of random ones, and options."""


def _group_norm(x: Tensor, w: Tensor, b: Tensor, channels: int, groups: int, eps: float) -> Tensor:
    g = x.reshape(len(x), groups, -1)
    normed = (g - g.mean(-1, keepdim=True)) / (g.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    return normed.reshape(x.shape) * w[:, None] + b[:, None]


def _poly_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    def normed(u: Tensor) -> Tensor:
        return u / (u.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    return w[0] * normed(x**3) + w[1] * normed(x**2) + w[2] * normed(x) + b


def _modulated(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w
    return (1 + scale[:, None]) * normed + shift[:, None]


def _sparsemax(x: Tensor) -> Tensor:
    """Row by row, with the largest support whose entries stay above the threshold."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        ordered = row.sort(descending=True).values
        sizes = [n for n in range(1, len(row) + 1) if 1 + n * ordered[n - 1] > ordered[:n].sum()]
        rows.append((row - (ordered[: sizes[-1]].sum() - 1) / sizes[-1]).clamp(min=0))
    return torch.stack(rows).reshape(x.shape)


def _multi_token(scores: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    T = scores.shape[-1]
    seen = torch.ones(T, T).tril() > 0
    shares = torch.where(seen, scores.exp(), 0.0)
    shares = shares / shares.sum(-1, keepdim=True)
    patches = F.unfold(shares, 3, padding=1)  # (B, C · 9, T · T)
    out = weight.flatten(1) @ patches + bias[:, None]
    return torch.where(seen, out.unflatten(-1, (T, T)), 0.0)


def _neighbourhood(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Five neighbours, every second token."""
    T, rows = q.shape[-2], []
    for t in range(T):
        near = [t + 2 * step for step in range(-2, 3) if 0 <= t + 2 * step < T]
        shares = (k[..., near, :] @ q[..., t, :, None] / math.sqrt(q.shape[-1])).softmax(-2)
        rows.append((shares * v[..., near, :]).sum(-2))
    return torch.stack(rows, -2)


def _attn_res(V: Tensor, query: Tensor, norm: Tensor) -> Tensor:
    keys = V / (V.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    return torch.einsum("nbt,nbtd->btd", torch.einsum("d,nbtd->nbt", query, keys).softmax(0), V)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def _mrope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Angle i belongs to time if i < 1, to height if i < 3, else to width."""
    axis = (0, 1, 1, 2)
    chosen = torch.stack([angle[axis[i], ..., i] for i in range(4)], -1)[:, None]
    return _turned(q, chosen), _turned(k, chosen)


def _of_mrope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    tables = torch.cat((angle, angle), -1)
    return rotary.liger_qwen2vl_mrope(q, k, tables.cos(), tables.sin(), [1, 2, 1])


def _llama4(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    turns = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns for x in (q, k))
    q_out, k_out = (torch.view_as_real(pair).flatten(-2) for pair in pairs)
    return q_out, k_out


def _of_llama4(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    return rotary.liger_llama4_text_rotary_pos_emb(q, k, torch.polar(torch.ones_like(angle), angle))


def _hyper(x: Tensor, phi: Tensor, b: Tensor, f_out: Tensor) -> tuple[Tensor, ...]:
    """All coefficients with three steps of Sinkhorn, then the streams."""
    flat = x.flatten(-2)
    mix = flat @ phi / (flat.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * 0.7 + b
    matrix = mix[..., 4:].unflatten(-1, (2, 2)).softmax(-1) + 1e-6
    matrix = matrix / (matrix.sum(-2, keepdim=True) + 1e-6)
    for dim in (-1, -2, -1, -2):
        matrix = matrix / (matrix.sum(dim, keepdim=True) + 1e-6)
    pre, post = mix[..., :2].sigmoid(), 2 * mix[..., 2:4].sigmoid()
    streams = torch.einsum("...oi,...ic->...oc", matrix, x) + torch.einsum("...o,...c->...oc", post, f_out)
    return torch.einsum("...i,...ic->...c", pre, x), streams


def _of_hyper(x: Tensor, phi: Tensor, b: Tensor, f_out: Tensor) -> tuple[Tensor, ...]:
    alpha = torch.tensor(0.7, dtype=torch.float64)
    coefficients = hyper_connections.liger_mhc_coeffs(x, phi, b, alpha, alpha, alpha, allow_fp32=True, tmax=3)
    x_out, x_in = hyper_connections.liger_mhc_apply(x, f_out, *coefficients, return_x_in=True)
    return x_in, x_out


def _angles(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


CASES: dict[str, Case] = {
    "group_norm": (norms.liger_group_norm, _group_norm, ((2, 6, 5), (6,), (6,), 6, 3, 1e-6)),
    "poly_norm": (norms.liger_poly_norm, _poly_norm, ((3, 7), (3,), ())),
    "dyt": (norms.liger_dyt, lambda x, a, g, b: g * (a * x).tanh() + b, ((3, 7), (1,), (7,), (7,))),
    "modulated": (norms.liger_modulated_rms_norm, _modulated, ((2, 3, 8), (8,), (2, 8), (2, 8))),
    "relu_squared": (activations.liger_relu_squared, lambda x: torch.where(x > 0, x * x, 0.0), ((3, 7),)),
    "softmax": (activations.liger_softmax, lambda x: x.exp() / x.exp().sum(-1, keepdim=True), ((3, 7),)),
    "sparsemax": (activations.liger_sparsemax, _sparsemax, ((2, 4, 7),)),
    "multi_token": (
        lambda s, w, b: attention.liger_multi_token_attention(s, w, b, padding=1),
        _multi_token,
        ((2, 3, 6, 6), (4, 3, 3, 3), (4,)),
    ),
    "neighbourhood": (
        lambda q, k, v: attention.liger_fused_neighborhood_attention(q, k, v, 5, 2),
        _neighbourhood,
        ((2, 2, 9, 4),) * 3,
    ),
    "attn_res": (attention.liger_attn_res, _attn_res, ((3, 2, 4, 6), (6,), (6,))),
    "mrope": (_of_mrope, _mrope, ((2, 3, 5, 8), (2, 1, 5, 8), _angles(3, 2, 5, 4))),
    "llama4": (_of_llama4, _llama4, ((2, 5, 3, 8), (2, 5, 1, 8), _angles(2, 5, 4))),
    "mlp": (
        lambda x, g, u, d: mlps.LigerMLPFunction.apply(x, g, u, d, 0.5, 2.0),
        lambda x, g, u, d: (F.silu(0.5 * (x @ g.T)) * (x @ u.T)) @ d.T * 2.0,
        ((3, 6), (10, 6), (10, 6), (6, 10)),
    ),
    "hyper_connections": (_of_hyper, _hyper, ((3, 2, 4), (8, 8), (8,), (3, 4))),
}  # fmt: skip


def _inputs(case: Case, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for value in case[2]:
        if isinstance(value, tuple):
            random = torch.randn(value, generator=generator, dtype=torch.float64)
            made.append(random.bfloat16().to(dtype).requires_grad_())
        else:
            made.append(value.to(torch.float32) if isinstance(value, Tensor) and dtype == torch.bfloat16 else value)
    return made


def _run(function: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
    """The results and the gradients of the leaves, for upstream gradients that differ by entry."""
    results = function(*inputs)
    results = [results] if isinstance(results, Tensor) else list(results)
    upstream = [torch.linspace(-1.0, 1.3, r.numel()).bfloat16().view(r.shape).to(r.dtype) for r in results]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(results, leaves, upstream)
    return [x.detach().double() for x in (*results, *gradients)]


@pytest.mark.parametrize("name", CASES)
def test_composition_and_its_gradients_equal_the_formula(name: str) -> None:
    case = CASES[name]
    for ours, truth in zip(
        _run(case[0], _inputs(case, torch.float64)), _run(case[1], _inputs(case, torch.float64)), strict=True
    ):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name != "hyper_connections"])
def test_composition_in_bf16_has_at_most_twice_the_error_of_the_formula(name: str) -> None:
    case = CASES[name]
    inputs = _inputs(case, torch.bfloat16)
    truth = _run(case[1], _inputs(case, torch.float64))
    result = case[0](*inputs)
    assert all(r.dtype == torch.bfloat16 for r in ([result] if isinstance(result, Tensor) else result))
    # Complex tables of Llama 4 have no bf16, so its formula runs on the rounded inputs in fp64.
    formula = truth if name == "llama4" else _run(case[1], inputs)
    for ours, theirs, exact in zip(_run(case[0], inputs), formula, truth, strict=True):
        allowed = 2 * (theirs - exact).abs().max() + 2**-8 * exact.abs().max()
        assert (ours - exact).abs().max() <= allowed


def test_residual_mixing_of_hyper_connections_is_doubly_stochastic() -> None:
    torch.manual_seed(0)
    module = hyper_connections.LigerMHC(torch.nn.Linear(4, 4), hc=3, c=4, phi_dtype=torch.float32, allow_fp32=True)
    x = torch.randn(2, 5, 3, 4)
    _, (_, _, h_res) = hyper_connections.liger_mhc_forward(
        x, module.layer, module.phi, module.b, module.alpha_pre, module.alpha_post, module.alpha_res,
        allow_fp32=True, return_coeffs=True,
    )  # fmt: skip
    for dim in (-1, -2):
        torch.testing.assert_close(h_res.sum(dim), torch.ones(2, 5, 3), rtol=1e-4, atol=1e-4)
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    with pytest.raises(AssertionError, match="allow_fp32"):
        hyper_connections.LigerMHC(torch.nn.Linear(4, 4), hc=3, c=4)(x)


def test_sparse_multi_token_attention_projects_each_row_onto_the_simplex() -> None:
    module = attention.LigerMultiTokenAttention(2, 2, 1, groups=2, bias=False, sparse=True)
    torch.nn.init.ones_(module.weight)
    weights = module(3 * torch.randn(1, 2, 6, 6))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 6))
    assert not weights.triu(1).any() and (weights == 0).sum() > 30


def test_neighbourhood_attention_layer_adds_to_its_input_and_refuses_what_liger_refuses() -> None:
    layer = attention.LigerFusedNeighborhoodAttentionLayer(8, 2, kernel_size=3)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x) - x, layer.attention(layer.layer_norm(x)))
    moved = x.clone()
    moved[:, 4] += 1.0
    torch.testing.assert_close(layer(moved)[:, :3], layer(x)[:, :3])  # tokens 0 to 2 do not see token 4
    with pytest.raises(NotImplementedError, match="attention_mask"):
        layer(x, torch.ones(2, 5))
    for options in ({"kernel_size": 4}, {"dilation": 0}, {"num_heads": 3}):
        with pytest.raises(ValueError, match=next(iter(options))):
            attention.LigerFusedNeighborhoodAttention(8, **{"num_heads": 2, **options})


def test_other_rotations_equal_rope_with_tables_of_their_form() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    angle = torch.randn(1, 5, 4)
    for x, turned in zip((q, k), rotary.liger_rotary_pos_emb_gpt_oss(q, k, angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(turned, _turned(x, angle[:, None]))
    full = torch.cat((angle, angle), -1)[0]
    rows = q[0].transpose(0, 1)  # (T, heads, D)
    turned, _ = rotary.liger_rotary_pos_emb_vision(rows, rows, full.cos(), full.sin())
    torch.testing.assert_close(turned, _turned(rows, angle[0][:, None]))


def test_llama4_vision_rotation_takes_every_form_of_its_frequencies() -> None:
    q = torch.randn(2, 5, 3, 8)
    frequencies = torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    expected = rotary.liger_llama4_text_rotary_pos_emb(q, q, frequencies)
    for form in (frequencies[:, None], frequencies[None], frequencies[None, :, None]):
        for ours, theirs in zip(rotary.liger_llama4_vision_rotary_pos_emb(q, q, form), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    real, _ = rotary.liger_llama4_vision_rotary_pos_emb(q, q, frequencies.real.contiguous())
    torch.testing.assert_close(real, q * frequencies.real.repeat_interleave(2, -1)[None, :, None])
    with pytest.raises(DtypeError, match="complex"):
        rotary.liger_llama4_text_rotary_pos_emb(q, q, frequencies.real)
    with pytest.raises(ShapeError, match="5 tokens"):
        rotary.liger_llama4_text_rotary_pos_emb(q, q, frequencies[:3])


def test_embedding_gives_zeros_and_no_gradient_at_the_padding_index() -> None:
    module = activations.LigerEmbedding(5, 3, padding_idx=1)
    ids = torch.tensor([[0, 1], [4, 1]])
    out = module(ids)
    torch.testing.assert_close(out, module.weight[ids] * (ids != 1)[..., None])
    out.sum().backward()
    assert module.weight.grad is not None and not module.weight.grad[1].any()


CONFIG = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="silu", num_experts=3)


@pytest.mark.parametrize("shards", [None, 1, 3])
def test_tiled_mlps_give_the_gradients_of_the_whole_and_run_again_in_backward(shards: int | None) -> None:
    for tiled, config in (
        (family_mlps.LigerTiledSwiGLUMLP(CONFIG, shards), CONFIG),
        (family_mlps.LigerTiledGEGLUMLP(SimpleNamespace(**{**vars(CONFIG), "hidden_act": "gelu"}), shards), None),
    ):
        x = torch.randn(2, 20, 8, requires_grad=True)
        leaves = (x, *tiled.parameters())
        whole = type(tiled).__mro__[1].forward(tiled, x)
        calls: list[int] = []
        hook = tiled.gate_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        split = tiled(x)
        first = len(calls)
        torch.testing.assert_close(split, whole)
        gradients = torch.autograd.grad(split, leaves, whole.detach(), retain_graph=True)
        assert first == (shards or 3) and len(calls) == 2 * first
        for ours, theirs in zip(gradients, torch.autograd.grad(whole, leaves, whole.detach()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        hook.remove()
        assert config is None or tiled.config is config


def test_experts_equal_the_sum_over_each_tokens_experts() -> None:
    module = family_mlps.LigerExperts(CONFIG)
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
    leaves = (x, weights, module.gate_up_proj, module.down_proj)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_mlps_of_families_equal_their_formulas() -> None:
    x = torch.randn(3, 8)
    for cls in (
        family_mlps.LigerQwen3MoeSwiGLUMLP,
        family_mlps.LigerHunyuanV1SwiGLUMLP,
        family_mlps.LigerMLP,
        family_mlps.LigerSwiGLUMLPForMuseGlimmer,
    ):
        mlp = cls(CONFIG)
        torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))
    muse = SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_activation="silu")
    assert family_mlps.LigerSwiGLUMLPForMuseGlimmer(muse)(x).shape == (3, 8)
    expert = family_mlps.LigerBlockSparseTop2MLP(CONFIG)
    torch.testing.assert_close(expert(x), expert.w2(F.silu(expert.w1(x)) * expert.w3(x)))


def test_falcon_mlp_multiplies_the_result_with_its_bias_as_transformers_does() -> None:
    x = torch.randn(3, 8)
    config = SimpleNamespace(**vars(CONFIG), mlp_multipliers=(0.5, 3.0), mlp_bias=True)
    mlp = family_mlps.LigerFalconH1SwiGLUMLP(config)
    torch.testing.assert_close(mlp(x), 3.0 * mlp.down_proj(F.silu(0.5 * mlp.gate_proj(x)) * mlp.up_proj(x)))
    with pytest.raises(ValueError, match="mlp_bias"):
        family_mlps.LigerFalconH1MLP(config)
    assert not family_mlps.LigerFalconH1MLP(SimpleNamespace(**{**vars(config), "mlp_bias": False})).down_proj.bias


def test_gemma4_mlp_is_twice_as_wide_in_layers_that_share_keys_and_values() -> None:
    config = SimpleNamespace(
        hidden_size=8, intermediate_size=12, hidden_act="gelu_pytorch_tanh", use_double_wide_mlp=True,
        num_hidden_layers=4, num_kv_shared_layers=2,
    )  # fmt: skip
    widths = [family_mlps.LigerGEGLUMLPForGemma4(config, layer).gate_proj.out_features for layer in (None, 1, 2, 3)]
    assert widths == [12, 12, 24, 24] and config.intermediate_size == 12


def test_norms_of_families_have_their_offset_and_start() -> None:
    x = torch.randn(3, 8)
    expected = F.rms_norm(x, (8,), eps=1e-6)
    for name in ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Olmo2", "Glm4", "Qwen3Next", "MuseGlimmer"):
        norm = getattr(family_norms, f"LigerRMSNormFor{name}")(8)
        torch.testing.assert_close(norm(x), expected)
        assert norm.offset == (1.0 if not norm.weight.any() else 0.0)
    bare = family_norms.LigerRMSNormForMuseGlimmer(with_scale=False)
    torch.testing.assert_close(bare(x), expected)
    assert not bare.state_dict()


@pytest.mark.parametrize(("entropy", "more"), [(False, False), (True, False), (False, True), (True, True)])
def test_scaled_loss_per_token_equals_log_softmax_and_is_zero_for_ignored_tokens(entropy: bool, more: bool) -> None:
    hidden, head = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target, chosen = torch.tensor([3, -100, 0, 10, 3]), torch.tensor([4, 0, 4])
    keep = (target != -100)[:, None]
    logp = torch.log_softmax(hidden @ head.T / 0.7, -1)
    expected = [-(logp.gather(1, target.clamp(min=0)[:, None]) * keep)[:, 0]]
    expected += [-(logp.exp() * logp).sum(-1) * keep[:, 0]] if entropy else []
    expected += [logp[:, chosen] * keep] if more else []
    found = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, head, target, 0.7, return_entropy=entropy, selected_token_ids=chosen if more else None
    )
    found = [found] if isinstance(found, Tensor) else list(found)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (
        torch.autograd.grad(sum(r.square().sum() for r in results), (hidden, head)) for results in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([4, 0], DtypeError, r"selected_token_ids is a list; pass a tensor \(K,\) of int64"),
        (torch.tensor([4, 0], dtype=torch.int32), DtypeError, "selected_token_ids has the dtype torch.int32; .*int64"),
        (torch.tensor([4.0]), DtypeError, "selected_token_ids has the dtype torch.float32"),
        (torch.tensor([True]), DtypeError, "selected_token_ids has the dtype torch.bool"),
        (torch.tensor([[4, 0]]), ShapeError, r"selected_token_ids has the shape \(1, 2\); pass \(K,\)"),
        (torch.tensor(4), ShapeError, r"selected_token_ids has the shape \(\)"),
        (torch.tensor([4], device="meta"), ShapeError, "selected_token_ids is on meta, weight is on cpu"),
    ],
    ids=["list", "int32", "fp32", "bool", "two dimensions", "no dimension", "device"],
)
def test_wrong_selected_ids_are_refused_by_name(ids: Any, error: type[Exception], words: str) -> None:
    hidden, head, target = torch.randn(5, 8), torch.randn(11, 8), torch.tensor([3, -100, 0, 10, 3])
    with pytest.raises(error, match=words):
        LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, target, selected_token_ids=ids)


def test_selected_ids_outside_the_vocabulary_are_refused_also_in_ignored_rows() -> None:
    hidden, head = torch.randn(2, 8), torch.randn(11, 8)
    for ids in ([11], [-1], [-100]):
        for target in ([3, 4], [-100, -100]):
            with pytest.raises(LabelError, match=rf"selected_token_ids holds {ids[0]}.*\[0, 11\)"):
                LigerFusedLinearScaledCrossEntropyFunction.apply(
                    hidden, head, torch.tensor(target), selected_token_ids=torch.tensor(ids)
                )


@pytest.mark.parametrize("used", range(3), ids=["h_pre", "h_post", "h_res"])
def test_coefficients_that_are_not_used_give_gradients_of_0(used: int) -> None:
    """A None would keep a parameter from the optimizer and from the reduction over processes."""
    S, C = 3, 4
    names = ("x", "phi", "b", "alpha_pre", "alpha_post", "alpha_res")
    shapes = ((2, 5, S, C), (S * C, S * S + 2 * S), (S * S + 2 * S,), (), (), ())
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    coefficients = hyper_connections.liger_mhc_coeffs(*tensors, allow_fp32=True)
    coefficients[used].square().sum().backward()
    zero = {"alpha_pre", "alpha_post", "alpha_res"} - {names[3 + used]}
    for name, tensor in zip(names, tensors, strict=True):
        assert tensor.grad is not None, name
        assert tensor.grad.any() != (name in zero), name
    alone = [tensor.detach().requires_grad_() for tensor in tensors]
    sum(c.square().sum() for c in hyper_connections.liger_mhc_coeffs(*alone, allow_fp32=True)).backward()
    torch.testing.assert_close(tensors[3 + used].grad, alone[3 + used].grad)


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("scale_rows", ["(H,)", "(B, H)", "(B, T, H)"])
def test_gradients_of_the_modulated_norms_parameters_are_sums_in_fp32(mode: str, scale_rows: str) -> None:
    """bf16 inputs, fp32 parameters. A gradient that is rounded to bf16 before the sum is 1e-3 off."""
    B, T, H = 2, 64, 48
    shape = {"(H,)": (H,), "(B, H)": (B, H), "(B, T, H)": (B, T, H)}[scale_rows]
    x, dy = (torch.randn(B, T, H).bfloat16() for _ in range(2))
    weight, scale, shift = torch.rand(H) + 0.5, torch.randn(shape) / 10, torch.randn(shape)

    def formula(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        normed = rounded(normed) if mode != "gemma" else normed  # of a family that rounds before the weight
        scale, shift = (t[:, None] if t.ndim == 2 else t for t in (scale, shift))
        return rounded(normed * w) * (1 + scale) + shift

    def rounded(u: Tensor) -> Tensor:
        return u + (u.detach().float().bfloat16().to(u) - u.detach())

    tensors = [t.requires_grad_() for t in (x, weight, scale, shift)]
    found = torch.autograd.grad(norms.liger_modulated_rms_norm(*tensors, casting_mode=mode), tensors[1:], dy)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(formula(*wide), wide[1:], dy.double())
    for ours, want in zip(found, wanted, strict=True):
        # A value near the middle of two bf16 numbers may round to the other one: few do.
        assert (ours.double() - want).norm() <= 1e-4 * want.norm()


def test_short_names_compute_what_the_long_ones_do_and_refuse_a_backend() -> None:
    x, w = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(short.rms_norm(x, w), functional.liger_rms_norm(x, w, 1e-6))
    torch.testing.assert_close(short.layer_norm(x, w), F.layer_norm(x, (8,), w, eps=1e-6))
    torch.testing.assert_close(short.swiglu(x, x, 0.5, 2.0), 2 * F.silu(0.5 * x) * x)
    torch.testing.assert_close(short.geglu(x, x), F.gelu(x, approximate="tanh") * x)
    torch.testing.assert_close(short.softmax(x), x.softmax(-1))
    assert len(short.fused_add_rms_norm(x, x, w)) == 2
    target, head = torch.tensor([1, 2, 0]), torch.randn(5, 8)
    torch.testing.assert_close(short.cross_entropy(x, target)[0], F.cross_entropy(x, target))
    loss, *rest = short.fused_linear_cross_entropy(x, head, target)
    torch.testing.assert_close(loss, F.cross_entropy(x @ head.T, target))
    assert rest == [None, None, None]
    p, q = x.log_softmax(-1), (2 * x).log_softmax(-1)
    torch.testing.assert_close(short.kl_div(p, q.exp()), F.kl_div(p, q.exp(), reduction="batchmean"))
    torch.testing.assert_close(short.jsd(p, q), functional.liger_jsd(p, q))
    torch.testing.assert_close(
        short.fused_linear_jsd(x, head, 2 * x, head), functional.liger_fused_linear_jsd(x, head, 2 * x, head)
    )
    tables = torch.randn(1, 5, 8)
    heads = torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(
        short.rope(heads, heads, tables, tables), functional.liger_rope(heads, heads, tables, tables)
    )
    with pytest.raises(OptionError, match="impl="):
        short.softmax(x, impl="nvidia-cutile")


def test_wrong_shapes_are_refused_with_the_shape() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.raises(ShapeError, match="6 rows"):
        norms.liger_modulated_rms_norm(x, None, torch.randn(4, 8))
    with pytest.raises(ShapeError, match="shift has the shape"):
        norms.liger_modulated_rms_norm(x, None, torch.randn(2, 8), torch.randn(8))
    with pytest.raises(ShapeError, match="4 channels"):
        norms.LigerGroupNorm(4, 2)(x)
    with pytest.raises(AssertionError, match="num_groups"):
        norms.LigerGroupNorm(4, 3)
    with pytest.raises(ShapeError, match="channels, T, T"):
        attention.liger_multi_token_attention(x, torch.randn(1, 2, 1, 1))
    with pytest.raises(ShapeError, match="whose sum is 4"):
        rotary.liger_qwen2vl_mrope(x[None], x[None], x[None], x[None], [1, 1, 2])
    with pytest.raises(OptionError, match="shards"):
        mlps.LigerTiledMLPFunction.apply(lambda m, x: x, torch.nn.Identity(), x, 0)
