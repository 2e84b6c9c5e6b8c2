"""`tigon.patch(model, add_rms_norm=True)`: the residual addition and the norm after it, in one pass."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

import tigon
from tigon import ops
from tigon.errors import PatchError
from tigon.models.seams import residual_norm
from tigon.models.seams.base import Change
from tigon.models.seams.residual_norm import ResidualNormSeam, norm_after_residual
from tigon.ops.norms import rms_norm
from tigon.techniques.checkpointing import enable
from tigon.techniques.mechanisms.dropped_inputs import DroppedInputs, _Dropped

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 2},
}
IDS = torch.arange(24).reshape(2, 12) % 61 + 3


def build(family: str, dtype: torch.dtype = torch.float32):
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {})})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def train(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def fused_calls(monkeypatch) -> list[torch.Size]:
    calls: list[torch.Size] = []

    def counted(x, *args, **options):
        calls.append(x.shape)
        return tigon.add_rms_norm(x, *args, **options)

    monkeypatch.setattr(residual_norm.ops, "add_rms_norm", counted)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_train_as_without_the_fusion(family, fused_calls):
    model = build(family)
    tigon.patch(model)
    loss, gradients = train(model)
    assert not fused_calls, "off by default"
    report = tigon.patch(model, add_rms_norm=True)
    assert sum(len(entry.paths) for entry in report.replaced if entry.op == "add_rms_norm") == 2
    fused_loss, fused_gradients = train(model)
    assert len(fused_calls) == 2, "one call per layer"
    torch.testing.assert_close(fused_loss, loss, rtol=1e-6, atol=0)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_norms_of_a_fused_layer_add_the_residuals_gradient(monkeypatch):
    added: list[bool] = []

    def watched(dy, ds, *args):
        added.append(ds is not None)
        return plain(dy, ds, *args)

    model = build("llama")
    tigon.patch(model, add_rms_norm=True)
    plain = rms_norm.norm.norm_bwd
    monkeypatch.setattr(rms_norm.norm, "norm_bwd", watched)
    train(model)
    assert added == [False, *[True] * 4], "the last norm, and two of each layer"


class InPlaceLayer(nn.Module):
    """A layer that adds to its residual in place, which autograd forbids if a norm has returned it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm, copy.deepcopy(norm)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        residual += 1
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return residual * hidden_states


def test_layer_that_writes_to_its_residual_keeps_its_first_norm(fused_calls):
    model = build("llama")
    tigon.patch(model)
    layer, x = InPlaceLayer(model.model.norm), torch.randn(3, 16)
    want = layer(x.clone())
    Change("", layer, ResidualNormSeam()).apply()
    got = layer(x.clone())
    torch.testing.assert_close(got, want)
    assert len(fused_calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["transformers", "full", "elementwise:2", "mlp:1,none:1"])
def test_fused_layers_give_the_same_bits_when_they_are_recomputed(how, dtype, fused_calls):
    model = build("llama", dtype)
    tigon.patch(model, add_rms_norm=True)
    expected_loss, expected = train(model)
    assert len(fused_calls) == 2
    if how == "transformers":
        enable(model)
    else:
        tigon.checkpoint(model, how)
    loss, gradients = train(model)
    assert len(fused_calls) == (6 if how in ("transformers", "full") else 4), "each layer runs once more, not twice"
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_undo_restores_the_layers_and_their_results():
    model = build("llama")
    before = [type(module) for module in model.modules()]
    loss, gradients = train(model)
    report = tigon.patch(model, add_rms_norm=True)
    layer = model.model.layers[0]
    assert type(layer) is not before[3] and type(layer).__name__ == "LlamaDecoderLayer"
    report.undo()
    assert [type(module) for module in model.modules()] == before
    again, same = train(model)
    assert torch.equal(again, loss) and all(torch.equal(same[name], gradient) for name, gradient in gradients.items())


def test_other_models_of_the_family_are_not_affected(fused_calls):
    fused, other = build("llama"), build("llama")
    tigon.patch(fused, add_rms_norm=True)
    tigon.patch(other)
    train(other)
    assert not fused_calls


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_norm_with_a_hook_is_called_itself(register, fused_calls):
    """ZeRO-3 gathers a norm's weight in such a hook."""
    model = build("llama")
    tigon.patch(model, add_rms_norm=True)
    expected, _ = train(model)
    fused_calls.clear()
    seen = []
    handle = getattr(model.model.layers[0].post_attention_layernorm, register)(lambda *_: seen.append(1) or None)
    loss, _ = train(model)
    assert seen == [1] and len(fused_calls) == 1, "the other layer stays fused"
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    handle.remove()
    train(model)
    assert len(fused_calls) == 3


def test_copies_and_pickles_stay_fused(fused_calls):
    model = build("llama")
    tigon.patch(model, add_rms_norm=True)
    expected, _ = train(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fused_calls.clear()
        assert torch.equal(train(twin)[0], expected) and len(fused_calls) == 2


def test_fused_layer_compiles_into_one_graph():
    model = build("llama")
    tigon.patch(model, add_rms_norm=True)
    layer, x = model.model.layers[0], torch.randn(2, 12, 16)
    tables = model.model.rotary_emb(x, torch.arange(12)[None])
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x, position_embeddings=tables), layer(x, position_embeddings=tables))
    assert "tigon.add_rms_norm.default" in targets


def test_second_patch_changes_nothing():
    model = build("llama")
    tigon.patch(model, add_rms_norm=True)
    kinds = [type(module) for module in model.modules()]
    assert not tigon.patch(model, add_rms_norm=True).replaced
    assert [type(module) for module in model.modules()] == kinds


def test_layer_without_such_statements_is_refused_and_unchanged():
    model = build("olmo2")
    before = [type(module) for module in model.modules()]
    with pytest.raises(PatchError, match="add_rms_norm=True, but no layer adds the residual right before a norm"):
        tigon.patch(model, add_rms_norm=True)
    assert [type(module) for module in model.modules()] == before


def test_layer_whose_norm_is_not_tigons_is_refused_and_unchanged():
    model = build("llama")
    before = [type(module) for module in model.modules()]
    with pytest.raises(PatchError, match="its post_attention_layernorm does not run rms_norm"):
        tigon.patch(model, rms_norm=False, add_rms_norm=True)
    assert [type(module) for module in model.modules()] == before


class _Plain(nn.Module):
    def forward(self, x, skip: int = 3, *, scale: float = 2.0):
        residual = x
        x = x * skip
        x = x + residual
        residual = x
        x = self.last_norm(x)
        return x * scale + residual


class _NotANorm(nn.Module):
    def forward(self, x):
        residual = x
        x = residual + x
        residual = x
        x = self.mlp(x)
        return x + residual


class _OtherResidual(nn.Module):
    def forward(self, x, skip):
        residual = x
        x = skip + x
        residual = x
        x = self.norm(x)
        return x + residual


def test_statements_are_found_by_their_form_only():
    assert norm_after_residual(_Plain) == "last_norm"
    assert norm_after_residual(_NotANorm) is None
    assert norm_after_residual(_OtherResidual) is None
    assert norm_after_residual(nn.Linear) is None


def test_rebuilt_forward_keeps_arguments_and_defaults():
    seam = residual_norm.ResidualNormSeam()
    module = _Plain()
    module.last_norm = nn.Identity()
    x = torch.randn(2, 4)
    expected = module(x), module(x, 5, scale=1.0)
    fused = seam.namespace(_Plain)["forward"]
    assert torch.equal(fused(module, x), expected[0]) and torch.equal(fused(module, x, 5, scale=1.0), expected[1])


def test_input_of_a_linear_layer_after_the_fused_norm_is_dropped_and_recomputed():
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    weight, linear = torch.rand(8, requires_grad=True), nn.Linear(8, 4, bias=False)

    def run(dropped: DroppedInputs | None) -> list[torch.Tensor]:
        normed, total = ops.add_rms_norm(x, residual, weight)
        if dropped is None:
            out = linear(normed)
        else:
            assert isinstance(dropped._pack(normed), _Dropped) and dropped._pack(total) is total
            with dropped.saving():
                out = linear(normed)
        return list(torch.autograd.grad(out.square().sum() + total.sum(), [x, residual, weight, linear.weight]))

    assert all(torch.equal(a, b) for a, b in zip(run(DroppedInputs()), run(None), strict=True))
