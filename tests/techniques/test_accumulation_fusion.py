"""Linear layers and embeddings with gradient accumulation fusion: ordinary gradients, in the tensors that exist."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tigon
from helpers import relative_error
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques import TECHNIQUES
from tigon.techniques.accumulation.fused_embedding import FusedEmbedding, fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears, has_fused_linears
from tigon.techniques.checkpointing.layer_checkpointing import apply
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo
from tigon.techniques.tiling import tile

pytest.importorskip("transformers")

CPU = torch.device("cpu")


IDS = torch.tensor([[3, 1, 1, 7], [2, 3, 3, 1]])


def model_of(dtype: torch.dtype = torch.float32, *, patched: bool = True, family: str = "llama", **config: Any) -> Any:
    model = tiny_model(family, config).train().to(dtype)
    if patched:
        tigon.patch(model)
    return model


def micro_batch(number: int) -> dict[str, Tensor]:
    batch = tiny_batch(CPU)
    ids = batch["input_ids"].roll(number, dims=1)
    return {**batch, "input_ids": ids, "labels": batch["labels"].roll(number, dims=1)}


def gradients(
    model: Any, *, fused: bool, autocast: bool = False, tables: bool = False, batches: int = 2
) -> dict[str, Tensor]:
    """Gradients of some micro-batches, as fp64. tables: fuse the embeddings too."""
    if fused:
        fuse_linears(model)
        assert not tables or fuse_embeddings(model)
    for number in range(batches):
        with accumulation_fusion() if fused else torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**micro_batch(number)).loss
            loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "tied embeddings in bf16": {"tie_word_embeddings": True, "dtype": torch.bfloat16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "unpatched": {"patched": False},
    "unpatched under autocast": {"patched": False, "autocast": True},
}
WITH_TABLES: dict[str, dict[str, Any]] = {
    "untied in bf16": {"tie_word_embeddings": False, "dtype": torch.bfloat16},
    "tied": {"tie_word_embeddings": True},
    "tied in bf16": {"tie_word_embeddings": True, "dtype": torch.bfloat16},
    "autocast": {"tie_word_embeddings": True, "autocast": True},
    "padding and positions": {"family": "gpt2"},
    "scaled": {"family": "gemma3_text", "dtype": torch.bfloat16, "tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    ("case", "tables"), [*((case, False) for case in CASES), *((case, True) for case in WITH_TABLES)]
)
def test_gradients_err_at_most_twice_the_usual_error(case: str, tables: bool, written: list[tuple[int, ...]]) -> None:
    options = dict((WITH_TABLES if tables else CASES)[case])
    autocast, batches = options.pop("autocast", False), 3 if tables else 2
    exact = {**options, "dtype": torch.float64}
    # the weights of the exact model are those that the others have rounded
    reference = model_of(**exact)
    reference.load_state_dict(model_of(**options).state_dict())
    want = gradients(reference, fused=False, batches=batches)
    usual = gradients(model_of(**options), fused=False, autocast=autocast, batches=batches)
    assert not written
    model = model_of(**options)
    got = gradients(model, fused=True, autocast=autocast, tables=tables, batches=batches)
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    embeddings = sum(isinstance(m, nn.Embedding) for m in model.modules()) if tables else 0
    assert len(written) == (batches - 1) * (linears + embeddings)
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error, before = relative_error(got[name], expected), relative_error(usual[name], expected)
        assert error <= 2 * before + 1e-7, f"{name}: {error:.2e}, usually {before:.2e}"


@pytest.mark.parametrize("states", [("full", "full"), ("elementwise", "mlp")])
def test_recomputed_layers_keep_their_gradients(states: tuple[str, str], written: list[Any]) -> None:
    want = gradients(model_of(), fused=False)
    model = model_of()
    apply(model, states)
    got = gradients(model, fused=True)
    assert written
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)


def test_checkpoint_that_runs_the_backward_of_its_recomputation_keeps_its_gradients(written: list[Any]) -> None:
    def checkpointed() -> Any:
        model = model_of()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        return model

    want, got = gradients(checkpointed(), fused=False), gradients(checkpointed(), fused=True)
    assert len(written) == sum(isinstance(m, nn.Linear) for m in model_of().modules())
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)


def test_recomputation_does_not_repeat_the_product_of_the_last_layer() -> None:
    layer = nn.Linear(4, 4, bias=False)
    fuse_linears(nn.ModuleList([layer]))
    x = torch.ones(2, 4, requires_grad=True)
    with accumulation_fusion(), torch.profiler.profile() as profile:
        checkpoint(lambda x: layer(x.tanh()), x, use_reentrant=False).sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("aten::tanh") == 2  # recomputed, because the layer saves it
    assert names.count("aten::mm") == 3  # y, dx and dW


def test_mlps_in_tiles_accumulate_as_before_and_the_rest_is_fused(written: list[tuple[int, ...]]) -> None:
    want = gradients(model_of(), fused=False)
    model = model_of()
    tile(model, 8)
    got = gradients(model, fused=True)
    widths = {tuple(m.weight.shape) for layer in model.model.layers for m in (layer.mlp.up_proj, layer.mlp.down_proj)}
    assert written and not widths & set(written)
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)


def test_frozen_layers_and_adapters_are_left_alone(written: list[tuple[int, ...]]) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(model_of(), LoraConfig(r=4, target_modules="all-linear"))

    want = gradients(adapted(), fused=False)
    assert not fuse_linears(adapted())
    got = gradients(adapted(), fused=True)
    assert not written and got.keys() == want.keys()
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected)


def test_partly_frozen_model_fuses_the_layers_that_are_trained(written: list[tuple[int, ...]]) -> None:
    def partly() -> Any:
        model = model_of()
        model.model.layers[0].requires_grad_(False)
        return model

    want, got = gradients(partly(), fused=False), gradients(partly(), fused=True)
    assert len(written) == 1 + sum(isinstance(m, nn.Linear) for m in partly().model.layers[1].modules())
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-5, atol=1e-6)


class _Projections(nn.Module):
    """Three layers that read one input, and one layer that is not fused."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(6, width, bias=False).double() for width in (4, 2, 2))
        self.plain = nn.Linear(6, 3).double()
        self.leaf = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
        if fused:
            fuse_linears(nn.ModuleList([self.q, self.k, self.v]))

    def outputs(self) -> tuple[Tensor, ...]:
        """x, and what each layer makes of it."""
        x = self.leaf.sin()
        return x, self.q(x), self.k(x), self.v(x), self.plain(x)


def _hooked(one: _Projections) -> list[Tensor]:
    seen: list[Tensor] = []
    x, *outputs = one.outputs()

    def doubled(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return 2 * grad

    x.register_hook(doubled)
    torch.cat([y.tanh().flatten() for y in outputs]).sum().backward()
    return seen


def _in_any_order(one: _Projections) -> list[Tensor]:
    _, q, k, v, plain = one.outputs()
    loss = (k * (q.sum() * plain.sum()).tanh()).sum() + v.cos().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def _some_outputs(one: _Projections) -> list[Tensor]:
    x, q, k, v, plain = one.outputs()
    (v.tanh().sum() + plain.sum()).backward(retain_graph=True)
    grads = [*torch.autograd.grad(q.sin().sum() + k.sum(), [x], retain_graph=True)]
    grads += torch.autograd.grad(q.sin().sum() + v.sin().sum(), [q, one.v.weight], retain_graph=True)
    grads += torch.autograd.grad(q.sin().sum() + v.sin().sum(), [q, x], retain_graph=True)
    (q.sum() + k.sum() + v.sum()).backward()
    return grads


def _changed_input(one: _Projections) -> list[Tensor]:
    x = one.leaf.sin()
    q = one.q(x.detach().requires_grad_())
    k = one.k(x)
    x = x.mul(1.0)
    v = one.v(x)
    other = x.clone()
    second = one.q(other)
    other.add_(one.leaf)  # the products saved the former values
    third = one.k(other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()
    (q.sum() + k.sum() + v.tanh().sum() + third.sum()).backward()
    return []


def _failed(one: _Projections) -> list[Tensor]:
    """A pass that stops between two layers, and another one over the same graph."""
    _, q, k, v, _ = one.outputs()
    stop = [True]

    def refuses(_: Tensor) -> None:
        if stop:
            raise ValueError(stop.pop())

    q.register_hook(refuses)
    loss = q.sum() + k.sum() + v.sum()
    with pytest.raises(ValueError, match="True"):
        loss.backward(retain_graph=True)
    one.zero_grad()
    loss.backward()
    return []


def _recomputed(one: _Projections) -> list[Tensor]:
    x = one.leaf.sin()
    q, k, v = checkpoint(lambda x: (one.q(x), one.k(x), one.v(x)), x, use_reentrant=False)
    (q.sum() + k.tanh().sum() + v.sum()).backward()
    return []


def _second_derivative(one: _Projections) -> list[Tensor]:
    _, q, k, v, _ = one.outputs()
    (slope,) = torch.autograd.grad((q.tanh().sum() + k.tanh().sum()) * v.sum(), [one.leaf], create_graph=True)
    slope.square().sum().backward()
    return [slope.detach()]


@pytest.mark.parametrize(
    "use", [_hooked, _in_any_order, _some_outputs, _changed_input, _failed, _recomputed, _second_derivative]
)
def test_layers_that_share_an_input_pass_on_the_sum_of_their_gradients(use: Any) -> None:
    results: list[list[Tensor]] = []
    for fused in (False, True):
        one = _Projections(fused=fused)
        with accumulation_fusion():
            grads = use(one)
        results.append([one.leaf.grad, *grads, *(p.grad for p in one.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 2
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_second_micro_batch_adds_neither_weights_gradients_nor_those_of_a_shared_input() -> None:
    added = []
    for fused in (False, True):
        model = model_of()
        if fused:
            fuse_linears(model)
        for _ in range(2):
            with accumulation_fusion(), torch.profiler.profile() as profile:
                model(**micro_batch(0)).loss.backward()
        added.append(sum(event.name in ("aten::add", "aten::add_") for event in profile.events()))
    layers = model.model.layers
    weights = sum(isinstance(module, nn.Linear) for module in layers.modules())
    sums = 3 * len(layers)  # q + k + v, and gate + up
    assert added[0] - added[1] == weights + sums


LAYERS: dict[str, tuple[Callable[..., nn.Module], Any, Tensor]] = {
    "linear": (lambda **options: nn.Linear(5, 3, **options), fuse_linears, torch.arange(20.0).view(4, 5).sin()),
    "embedding": (lambda **options: nn.Embedding(9, 4, **options), fuse_embeddings, IDS),
}
"""Kind -> (makes a layer, fuses it, an input)."""


@pytest.mark.parametrize("kind", LAYERS)
def test_second_derivatives_are_those_of_the_ordinary_layer(kind: str) -> None:
    make, fuse, given = LAYERS[kind]

    def penalty(fused: bool) -> Tensor:
        torch.manual_seed(0)
        layer: Any = make(dtype=torch.float64)
        layer.weight.grad = torch.zeros_like(layer.weight)
        if fused:
            fuse(nn.ModuleList([layer]))
        x = given.double().requires_grad_() if given.is_floating_point() else given
        with accumulation_fusion():
            of = x if x.requires_grad else layer.weight
            (slope,) = torch.autograd.grad(layer(x).tanh().sum(), [of], create_graph=True)
            slope.square().sum().backward()
        return layer.weight.grad

    torch.testing.assert_close(penalty(True), penalty(False))


def test_dtypes_that_differ_are_refused_as_before() -> None:
    layer = nn.Linear(4, 4)
    fuse_linears(nn.ModuleList([layer]))
    with accumulation_fusion(), pytest.raises(RuntimeError, match="dtype"):
        layer(torch.ones(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_and_pickles_of_a_fused_model_use_their_own_weights(kind: str) -> None:
    make, fuse, given = LAYERS[kind]
    model: Any = nn.Sequential(make())
    fuse(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert has_fused_linears(other) or isinstance(vars(other[0])["forward"], FusedEmbedding)
        with torch.no_grad():
            other[0].weight.zero_()
        with accumulation_fusion():
            zeros = other(given) - getattr(other[0], "bias", torch.zeros(()))
        assert not zeros.any()
    assert model[0].weight.any()


@pytest.mark.parametrize("kind", LAYERS)
def test_second_micro_batch_makes_no_gradient_of_its_weights(kind: str) -> None:
    make, fuse, given = {
        "linear": (lambda: nn.Linear(512, 512, bias=False), fuse_linears, torch.randn(8, 512)),
        "embedding": (lambda: nn.Embedding(4096, 64), fuse_embeddings, IDS),
    }[kind]

    def step_bytes(fused: bool) -> int:
        layer: Any = make()
        if fused:
            fuse(nn.ModuleList([layer]))
        layer.weight.grad = torch.zeros_like(layer.weight)
        meter = PeakMeter(CPU)
        with accumulation_fusion():
            meter.start([layer.weight, layer.weight.grad])
            layer(given).sum().backward()
            return meter.stop().step_bytes

    whole = 4 * 512 * 512
    assert step_bytes(False) >= whole > 8 * step_bytes(True)


def test_run_with_one_micro_batch_leaves_its_layers_alone() -> None:
    technique = TECHNIQUES["accumulation-fusion"]
    assert not technique.used_by(Settings.of({"train.gradient_accumulation_fusion": True}))
    assert technique.used_by(
        Settings.of({"train.gradient_accumulation_fusion": True, "train.gradient_accumulation": 2})
    )
    model = model_of(patched=False)
    technique.model(
        model, Settings.of({"train.gradient_accumulation_fusion": True, "train.gradient_accumulation": 2}), RunInfo()
    )
    assert has_fused_linears(model)


def test_padding_token_gets_no_gradient() -> None:
    def gradient(fused: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, padding_idx=3)
        table.weight.grad = torch.ones_like(table.weight)
        if fused:
            assert fuse_embeddings(nn.ModuleList([table])) == [table]
        with accumulation_fusion():
            table(IDS).square().sum().backward()
        return table.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))
    assert torch.equal(gradient(True)[3], torch.ones(4))


def test_embeddings_that_pytorch_treats_in_its_own_way_are_left_alone() -> None:
    class Doubled(nn.Embedding):
        def forward(self, input_ids: Tensor) -> Tensor:
            return 2 * super().forward(input_ids)

    frozen = nn.Embedding(9, 4).requires_grad_(False)
    others = [
        nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, scale_grad_by_freq=True),
    ]  # fmt: skip
    assert not fuse_embeddings(nn.ModuleList([frozen, *others, Doubled(9, 4)]))


def test_hooks_of_the_table_see_the_gradient_of_one_micro_batch() -> None:
    table = nn.Embedding(9, 4)
    fuse_embeddings(nn.ModuleList([table]))
    table.weight.grad = torch.ones_like(table.weight)
    seen: list[Tensor] = []
    table.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with accumulation_fusion():
        table(IDS).sum().backward()
    assert len(seen) == 1 and seen[0].sum() == 4 * IDS.numel()
    assert torch.equal(table.weight.grad, 1 + seen[0])
