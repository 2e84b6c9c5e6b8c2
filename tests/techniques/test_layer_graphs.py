"""Layers as CUDA graphs: what a step computes, and what is refused. On the CPU a replay runs the work again."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
import weakref
from typing import Any

import pytest
import torch
from graphed_layers import graphed, graphs_of, ids_of, model_of, on_each_device, recomputed_or_not, train
from torch import Tensor, nn

import tigon
from eager_capture import eager_capture
from tigon.errors import RecipeError
from tigon.techniques.cuda_graphs import cuda_graphs
from tigon.techniques.cuda_graphs.layer_graphs import Capture, CudaCapture, LayerGraphs, _Held


@on_each_device
@recomputed_or_not
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_with_graphs_equal_steps_without_bit_for_bit(device: str, recomputes: bool, micro_batches: int) -> None:
    want = train(model_of(device, recomputes), device, micro_batches=micro_batches)
    model, graphs = graphed(device, recomputes)
    got = train(model, device, micro_batches=micro_batches)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [len(layer.passes) for layer in graphs.layers] == [1, 1, 1]


@on_each_device
@recomputed_or_not
def test_forwards_before_their_backwards_keep_their_own_inputs(device: str, recomputes: bool) -> None:
    results = []
    for model in (model_of(device, recomputes), graphed(device, recomputes)[0]):
        losses = [model(input_ids=ids, labels=ids).loss for ids in (ids_of(2, 16, n, device) for n in range(2))]
        losses[0].backward()
        losses[1].backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _between(model: Any, change: Any, place: int = 1) -> None:
    """Change the input of the layer at this place."""
    layer = model.model.layers[place]
    function = vars(layer).get("_gradient_checkpointing_func")
    if function is None:
        layer.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    else:
        layer._gradient_checkpointing_func = lambda run, x, *args: function(run, change(x), *args)


@on_each_device
@recomputed_or_not
@pytest.mark.parametrize("change", [lambda x: 2 * x, lambda x: x.mul_(2)], ids=["another tensor", "in place"])
@pytest.mark.parametrize("captured", [False, True])
def test_input_that_changes_between_layers_is_read(device: str, recomputes: bool, change: Any, captured: bool) -> None:
    got, want = graphed(device, recomputes)[0], model_of(device, recomputes)
    if captured:
        train(got, device, steps=1)
        got.load_state_dict(want.state_dict())
        got.zero_grad()
    for model in (got, want):
        _between(model, change)
    pairs = zip(train(got, device), train(want, device), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@on_each_device
def test_layers_read_the_output_of_the_layer_before_without_a_copy(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[bool] = []
    plain = _Held.fill

    def watched(self: _Held, tensor: Tensor) -> None:
        copies.append(tensor.ndim == 3 and tensor.shape[-1] == 32 and not self.has(tensor))
        plain(self, tensor)

    model, graphs = graphed(device, recomputes=False)
    train(model, device, steps=1)
    passes = [next(iter(layer.passes.values())) for layer in graphs.layers]
    assert all(after.input is before.output for before, after in itertools.pairwise(passes))
    monkeypatch.setattr(_Held, "fill", watched)
    ids = ids_of(2, 16, 0, device)
    model(input_ids=ids, labels=ids)
    assert sum(copies) == 1  # the embeddings


def _ends_in_tanh(model: Any) -> None:
    """Let the first layer return the tanh of its output, within its graphs if it has any."""
    layer = model.model.layers[0]
    function = vars(layer).get("_gradient_checkpointing_func")
    if function is None:
        layer.register_forward_hook(lambda _, args, output: output.tanh())
        return

    def ending(run: Any, x: Tensor) -> Any:
        work = functools.partial(lambda *args, **options: run.func(*run.args, *args, **options).tanh(), **run.keywords)
        return function(work, x)

    layer._gradient_checkpointing_func = ending


@on_each_device
def test_output_that_its_layer_needs_is_not_the_input_of_the_next_layer(device: str) -> None:
    """The backward pass of tanh reads the result of tanh."""
    got, graphs = graphed(device, recomputes=False)
    want = model_of(device, recomputes=False)
    for model in (got, want):
        _ends_in_tanh(model)
    train(got, device, steps=1)
    passes = [next(iter(layer.passes.values())) for layer in graphs.layers]
    assert [one.keeps_output for one in passes] == [True, False, False]
    assert [after.input is before.output for before, after in itertools.pairwise(passes)] == [False, True]
    got.load_state_dict(want.state_dict())
    got.zero_grad()
    for model in (got, want):
        _between(model, lambda x: 2 * x)
    pairs = zip(train(got, device), train(want, device), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@on_each_device
@pytest.mark.parametrize("place", [1, 2])
def test_forward_pass_overwrites_nothing_that_later_layers_need(device: str, place: int) -> None:
    """The first layers are free, because nothing needs their backward pass. The later ones wait for theirs."""
    results = []
    for model in (graphed(device, recomputes=False)[0], model_of(device, recomputes=False)):
        _between(model, lambda x: x.detach(), place)
        for _ in range(2):  # the first one captures
            model.zero_grad()
            losses = [model(input_ids=ids, labels=ids).loss for ids in (ids_of(2, 16, n, device) for n in range(2))]
            for loss in losses:
                loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_each_device
def test_backward_pass_after_that_of_an_earlier_layer_is_refused(device: str) -> None:
    """Its activations lie where the earlier layer's graph writes."""
    model, _ = graphed(device, recomputes=False)
    states: list[Tensor] = []
    _between(model, lambda x: states.append(x) or x)
    weight = model.model.layers[0].mlp.up_proj.weight
    shares = []
    for number in range(2):
        ids = ids_of(2, 16, number, device)
        loss = model(input_ids=ids, labels=ids).loss
        shares += torch.autograd.grad(states[-1].sin().sum(), [weight], retain_graph=True)
        with pytest.raises(RecipeError, match="run the backward pass of all layers once"):
            loss.backward()
    assert not torch.equal(*shares), "the second pass overwrote what the first one returned"
    ids = ids_of(2, 16, 0, device)
    model(input_ids=ids, labels=ids).loss.backward()


def test_second_backward_pass_over_a_retained_graph_is_refused_without_recomputation() -> None:
    model, _ = graphed(recomputes=False)
    ids = ids_of(2, 16, 0, "cpu")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RecipeError, match="another pass has overwritten"):
        loss.backward()


def _skip(model: Any) -> Any:
    """Skip the second layer. Returns what undoes it."""
    layer = model.model.layers[1]
    function = vars(layer).get("_gradient_checkpointing_func")
    if function is None:
        return layer.register_forward_hook(lambda _, args, output: args[0]).remove
    layer._gradient_checkpointing_func = lambda run, x, *args: x
    return lambda: setattr(layer, "_gradient_checkpointing_func", function)


@on_each_device
@pytest.mark.parametrize("recomputes", [True, False])
def test_layer_that_the_first_step_skips_gets_memory_of_its_own(device: str, recomputes: bool) -> None:
    """The backward graph of the last layer overwrites memory that was free when it was captured."""
    captures: list[Capture] = []

    def new_capture() -> Capture:
        captures.append(CudaCapture() if device == "cuda" else eager_capture)
        return captures[-1]

    got, want = (model_of(device, recomputes) for _ in range(2))
    cuda_graphs.graph(got, recomputes=recomputes, new_capture=new_capture)
    for model in (got, want):
        undo = _skip(model)
        train(model, device, steps=1)
        undo()
    pairs = zip(train(got, device), train(want, device), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len(captures) == (1 if recomputes else 2)


@on_each_device
@recomputed_or_not
def test_recorded_hidden_states_are_those_without_graphs(device: str, recomputes: bool) -> None:
    got, graphs = graphed(device, recomputes)
    want = model_of(device, recomputes)
    for number in range(3):
        ids = ids_of(2, 16, number, device)
        results = []
        for model in (got, want):
            out = model(input_ids=ids, labels=ids, output_hidden_states=number != 1)
            (out.loss if number == 1 else out.loss + out.hidden_states[1].square().mean()).backward()
            results.append([*(out.hidden_states or ()), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert bool(graphs.buffers) == (number > 0)


@on_each_device
@recomputed_or_not
def test_fp8_steps_with_graphs_equal_steps_without_bit_for_bit(device: str, recomputes: bool) -> None:
    got, want = graphed(device, recomputes)[0], model_of(device, recomputes)
    for model in (got, want):
        tigon.patch_fp8(model.bfloat16(), bf16_layers=0)
    pairs = zip(train(got, device), train(want, device), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@on_each_device
def test_micro_batches_add_to_grad_in_place_and_autograd_grad_leaves_it_alone(device: str) -> None:
    want, got = model_of(device), graphed(device)[0]
    weight = got.model.layers[1].mlp.up_proj.weight
    addresses = []
    for number in range(3):
        ids = ids_of(2, 16, number, device)
        for model in (want, got):
            model(input_ids=ids, labels=ids).loss.backward()
        addresses.append(weight.grad.data_ptr())
    assert len(set(addresses)) == 1
    ids = ids_of(2, 16, 3, device)
    shares = [torch.autograd.grad(m(input_ids=ids, labels=ids).loss, [*m.parameters()]) for m in (want, got)]
    assert all(torch.equal(a, b) for a, b in zip(*shares, strict=True))
    pairs = zip(want.parameters(), got.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@on_each_device
def test_hook_after_accumulation_sees_each_micro_batchs_sum(device: str) -> None:
    seen: list[list[Tensor]] = []
    for model in (model_of(device), graphed(device)[0]):
        seen.append([])
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.register_post_accumulate_grad_hook(lambda p, into=seen[-1]: into.append(p.grad.clone()))
        for number in range(3):
            ids = ids_of(2, 16, number, device)
            model(input_ids=ids, labels=ids).loss.backward()
    assert len(seen[0]) == 3 and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def trains_without_graphs(model: Any, graphs: LayerGraphs, reason: str, **inputs: Any) -> None:
    """Asserts that the model says once why it runs without graphs, and has the gradients of a model without."""
    plain = model_of()
    for one in (plain, model):
        for name, weight in model.named_parameters():
            if weight._backward_hooks and one is plain:
                plain.get_parameter(name).register_hook(lambda grad: 2 * grad)
    ids = ids_of(2, 16, 0, "cpu")
    plain(input_ids=ids, labels=ids).loss.backward()
    with pytest.warns(UserWarning, match=rf"train.cuda_graphs: {reason}; the layers run without CUDA graphs"):
        model(input_ids=ids, labels=ids, **inputs).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids, labels=ids, **inputs).loss.backward()
    assert not graphs.buffers and not any(layer.passes for layer in graphs.layers)


@pytest.mark.parametrize("place", [0, 1])
def test_layers_whose_weight_has_a_hook_before_the_capture_run_without_graphs(place: int) -> None:
    model, graphs = graphed()
    model.model.layers[place].mlp.up_proj.weight.register_hook(lambda grad: 2 * grad)
    trains_without_graphs(model, graphs, "a weight of LlamaDecoderLayer has a hook, which the graph would contain")


@on_each_device
def test_forward_without_a_backward_leaves_the_graphs_free(device: str) -> None:
    model, graphs = graphed(device, recomputes=False)
    ids = ids_of(2, 16, 0, device)
    loss = model(input_ids=ids, labels=ids).loss
    passes = [next(iter(layer.passes.values())) for layer in graphs.layers]
    assert not any(one.is_free() for one in passes)
    del loss
    assert all(one.is_free() for one in passes)


@on_each_device
def test_second_backward_after_another_forward_is_refused_without_recomputation(device: str) -> None:
    model, _ = graphed(device, recomputes=False)
    ids = ids_of(2, 16, 0, device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(RecipeError, match="another pass has overwritten"):
        loss.backward()


@on_each_device
def test_released_graphs_are_captured_again(device: str) -> None:
    want = train(model_of(device), device)
    model, graphs = graphed(device)
    train(model, device, steps=1)
    graphs.release()
    assert not graphs.buffers
    model.load_state_dict(model_of(device).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(train(model, device), want, strict=True))


@on_each_device
@recomputed_or_not
def test_release_frees_the_memory_of_the_graphs_at_once(device: str, recomputes: bool) -> None:
    model, graphs = graphed(device, recomputes=recomputes)
    train(model, device, steps=1)
    passes = [weakref.ref(one) for layer in graphs.layers for one in layer.passes.values()]
    assert len(passes) == 3 and all(one() is not None for one in passes)
    gc.disable()
    try:
        graphs.release()
        assert not any(one() for one in passes)
    finally:
        gc.enable()


@on_each_device
def test_a_mask_is_read_anew_by_each_batch(device: str) -> None:
    results = []
    for model in (model_of(device), graphed(device)[0]):
        for padding in (3, 5):
            ids, mask = ids_of(2, 16, padding, device), torch.ones(2, 16, dtype=torch.long, device=device)
            mask[1, -padding:] = 0
            model(input_ids=ids, labels=ids, attention_mask=mask).loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_each_device
def test_frozen_weights_get_no_gradient_and_evaluation_uses_no_graph(device: str) -> None:
    model, graphs = graphed(device)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    ids = ids_of(2, 16, 0, device)
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    model.eval()(input_ids=ids, labels=ids)
    assert not graphs.buffers
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@on_each_device
@recomputed_or_not
def test_adapters_in_graphs_train_as_without_bit_for_bit(device: str, recomputes: bool) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    results = []
    for in_graphs in (False, True):
        model = model_of(device, recomputes)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        tigon.patch(adapted)
        if in_graphs:
            graphs_of(model, recomputes)
        trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(1)
        for weight in trained.values():
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        results.append([*train(model, device), *(weight.detach() for weight in trained.values())])
    assert len(results[0]) > 42 and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_batches_of_another_shape_than_the_first_run_without_graphs() -> None:
    model, graphs = graphed()
    for tokens in (8, 9, 9, 9, 10, 8):
        ids = ids_of(1, tokens, tokens, "cpu")
        loss = model(input_ids=ids, labels=ids).loss
        assert torch.equal(loss, model_of()(input_ids=ids, labels=ids).loss)
        loss.backward()
    assert {len(layer.passes) for layer in graphs.layers} == {1} and len(graphs.buffers) == 1


@on_each_device
def test_autocast_steps_equal_those_without_graphs(device: str) -> None:
    got, want = (train(model, device, autocast=True) for model in (graphed(device)[0], model_of(device)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_layers_with_an_argument_that_a_graph_cannot_read_run_without_graphs() -> None:
    model, graphs = graphed()
    reason = "LlamaDecoderLayer takes a object, which a CUDA graph cannot read anew"
    trains_without_graphs(model, graphs, reason, something=object())


@pytest.mark.parametrize("captured", [0, 3], ids=["at the first layer", "at a later layer"])
def test_layers_that_cannot_be_captured_run_without_graphs(captured: int) -> None:
    """captured: the passes that are captured before one fails; a layer has three."""
    count = itertools.count()

    def refuses(work: Any, prepare: Any) -> Any:
        if next(count) >= captured:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return eager_capture(work, prepare)

    model = model_of()
    graphs = cuda_graphs.graph(model, recomputes=True, new_capture=lambda: refuses)
    reason = r"LlamaDecoderLayer cannot be captured \(operation not permitted when stream is capturing\)"
    trains_without_graphs(model, graphs, reason)


def test_model_without_checkpointed_layers_runs_without_graphs() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="Sequential are not transformers' checkpointed layers"):
        assert cuda_graphs.graph(model, recomputes=True).gave_up
