"""Frozen layers that wait on the host: the same loss and gradients to the bit, and the memory of two layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon import patch
from tigon._trunk import decoder_layers
from tigon.techniques import TECHNIQUES
from tigon.techniques.base_offload.streamed_layers import BUFFERS, StreamedLayers
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
N_LAYERS = 5  # odd, so that the first and the last layer share a buffer
KINDS = ("none", "full", "every-2", "selective", "offload", "offload-attention", "full:2,mlp:1,elementwise:1,none:1")
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": N_LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "use_cache": False, "attn_implementation": "sdpa",
}  # fmt: skip


class LateCopies(StreamedLayers):
    """As strict as a GPU: a buffer is garbage from the start of its copy until something waits for it, and nothing
    computes with a layer on the host."""

    def __init__(self, model: Any, layers: Sequence[Any], device: torch.device) -> None:
        super().__init__(model, layers, device)
        self.held = [layer.on_host for layer in self.layers]
        for layer in self.layers:
            layer.on_host = [torch.full_like(t, 255 if t.dtype == torch.uint8 else math.nan) for t in layer.on_host]
            layer.put(layer.on_host)

    def undo(self) -> None:
        for layer, held in zip(self.layers, self.held, strict=True):
            layer.on_host = held
        super().undo()

    def copied_in(self, host: Tensor, buffer: Tensor) -> Callable[[], object]:
        self.n_copies = getattr(self, "n_copies", 0) + 1
        buffer.fill_(255)  # a NaN in each floating-point dtype
        return lambda: buffer.copy_(host)

    def wait_for(self, arrived: Any) -> None:
        arrived()


def llama(*, tied: bool = False) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=tied, **SHAPE))


def mixture() -> Any:
    """A model whose layers differ in size: the first has an MLP, the others have experts."""
    shape = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=32, **shape))


def four_bit(model: Any) -> Any:
    """The model with its linear layers in NF4, as bitsandbytes stores them."""
    bnb = pytest.importorskip("bitsandbytes")
    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, linear in list(parent.named_children()):
                if type(linear) is torch.nn.Linear:
                    made = bnb.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, quant_type="nf4", compress_statistics=True
                    )
                    made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4").to(CPU)
                    setattr(parent, name, made)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "tied": lambda: llama(tied=True),
    "experts": mixture,
    "4-bit": lambda: four_bit(llama()),
}


def adapted(make: Callable[[], Any], checkpointing: str = "none", *, kernels: bool = True) -> Any:
    torch.manual_seed(0)
    settings = Settings.of({"train.checkpointing": checkpointing, "lora.rank": 4})
    model = make().train()
    if kernels:
        patch(model)
    for technique in TECHNIQUES.values():
        if technique.used_by(settings):
            model = technique.model(model, settings, RunInfo(device="cpu"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that A would have no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    if kernels:
        patch(model)
    return model


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 128, (2, 48), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def two_micro_batches(model: Any) -> dict[str, Tensor]:
    """Losses of two accumulated micro-batches with an evaluation between them, and the adapters' gradients."""
    results = {}
    for number in range(2):
        loss = model(**batch(number)).loss
        loss.backward()
        results[f"loss {number}"] = loss.detach()
        with torch.no_grad():
            results[f"evaluated {number}"] = model.eval()(**batch(9)).loss
        model.train()
    return results | {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("checkpointing", KINDS)
def test_loss_and_gradients_are_equal_to_the_bit(make, checkpointing):
    want = two_micro_batches(adapted(MODELS[make], checkpointing))
    model = adapted(MODELS[make], checkpointing)
    LateCopies(model, decoder_layers(model), CPU)
    assert_equal(two_micro_batches(model), want)


def test_peft_s_own_layers_are_equal_to_the_bit():
    want = two_micro_batches(adapted(MODELS["4-bit"], "full", kernels=False))
    model = adapted(MODELS["4-bit"], "full", kernels=False)
    LateCopies(model, decoder_layers(model), CPU)
    assert_equal(two_micro_batches(model), want)


def test_a_micro_batch_copies_each_layer_twice_but_for_those_that_stay():
    model = adapted(llama, "full")
    streamed = LateCopies(model, decoder_layers(model), CPU)
    for number in range(3):
        before = getattr(streamed, "n_copies", 0)
        model(**batch(number)).loss.backward()
    assert streamed.n_copies - before == 2 * (N_LAYERS - BUFFERS)


@pytest.mark.parametrize("make", MODELS)
def test_the_device_holds_two_layers_and_the_host_the_others(make):
    model = adapted(MODELS[make])
    layers = decoder_layers(model)
    frozen = [sum(p.nbytes for p in layer.parameters() if not p.requires_grad) for layer in layers]
    streamed = StreamedLayers(model, layers, CPU)
    assert len(streamed.buffers) == BUFFERS == 2
    tables = 4096 * 7 * (make == "4-bit")  # the tables and scales of seven small 4-bit weights
    assert all(buffer.nbytes < 1.1 * max(frozen) + tables for buffer in streamed.buffers)
    model(**batch(0)).loss.backward()
    memory = {buffer.untyped_storage().data_ptr() for buffer in streamed.buffers}
    at_buffers = [
        sum(p.untyped_storage().data_ptr() in memory for p in layer.parameters() if not p.requires_grad)
        for layer in layers
    ]
    assert [count > 0 for count in at_buffers] == [True, True, False, False, False]
    assert not any(p.untyped_storage().data_ptr() in memory for p in model.parameters() if p.requires_grad)


def test_only_packed_weights_and_their_scales_move_with_a_4_bit_layer():
    """Each tensor costs host time when its layer arrives and leaves: on an H100's host it was a fifth of a step."""
    model = adapted(MODELS["4-bit"])
    streamed = StreamedLayers(model, decoder_layers(model), CPU)
    assert [len(layer.places) for layer in streamed.layers] == [2 * 7] * N_LAYERS


def test_parameters_read_right_at_any_time():
    want = {name: p.detach().clone() for name, p in adapted(llama).named_parameters()}
    model = adapted(llama)
    StreamedLayers(model, decoder_layers(model), CPU)
    for step in (lambda: None, lambda: model(**batch(0)), lambda: model(**batch(0)).loss.backward()):
        step()
        assert_equal(dict(model.state_dict(keep_vars=True)), dict(adapted(llama).state_dict(keep_vars=True)))
        assert_equal({name: p.detach() for name, p in model.named_parameters()}, want)


def test_moving_the_model_leaves_the_layers_on_the_host():
    model = adapted(llama)
    streamed = StreamedLayers(model, decoder_layers(model), CPU)
    held = [layer.host.data_ptr() for layer in streamed.layers]
    assert model.to(CPU) is model
    frozen = [p for p in decoder_layers(model)[2].parameters() if not p.requires_grad and p.ndim > 1]
    addresses = [p.untyped_storage().data_ptr() for p in frozen]
    assert set(addresses) == {held[2]}


@pytest.mark.parametrize("make", MODELS)
def test_undo_restores_weights_and_hooks(make):
    want = two_micro_batches(adapted(MODELS[make], "full"))
    model = adapted(MODELS[make], "full")
    streamed = LateCopies(model, decoder_layers(model), CPU)
    two_micro_batches(model)
    model.zero_grad()
    streamed.undo()
    assert "to" not in vars(model)
    assert_equal(two_micro_batches(model), want)


def test_a_model_of_one_layer_has_one_buffer():
    make = lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}))  # noqa: E731
    want = two_micro_batches(adapted(make, "full"))
    model = adapted(make, "full")
    streamed = LateCopies(model, decoder_layers(model), CPU)
    assert_equal(two_micro_batches(model), want)
    assert len(streamed.buffers) == 1


def test_generation_is_the_same():
    prompt = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    want = adapted(llama).eval().generate(input_ids=prompt, **options)
    model = adapted(llama).eval()
    LateCopies(model, decoder_layers(model), CPU)
    assert torch.equal(model.generate(input_ids=prompt, **options), want)
