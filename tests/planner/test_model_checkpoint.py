"""`tigon.checkpoint` applies every value of `train.checkpointing` to a model, in any loop, and undoes it."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_helpers import config_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tigon
from eager_capture import eager_capture
from tigon.errors import UsageError
from tigon.ops import recomputation
from tigon.planner import model_checkpoint
from tigon.techniques.accumulation.fused_linear import FusedLinear
from tigon.techniques.checkpointing import host_offload
from tigon.techniques.keys.settings import KEYS

SHAPE = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 176, "vocab_size": 256}
MODES = ("none", "full", "selective", "offload", "offload-attention", "every-2", "full:1,mlp:1,elementwise:1,none:1")


def model_of(*, key_heads: int = 2, patched: bool = True, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = config_of("llama", **SHAPE, num_key_value_heads=key_heads, tie_word_embeddings=tied)
    made = AutoModelForCausalLM.from_config(config).train()
    if patched:
        tigon.patch(made)
    return made


def ids_of(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 32), generator=torch.Generator().manual_seed(0))


def gradients(model: Any) -> list[torch.Tensor]:
    ids = ids_of()
    loss = model(input_ids=ids, labels=ids).loss
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def state_of(model: Any) -> list[Any]:
    """All that a module holds beside tensors, and the settings of the config."""
    modules = [
        {name: value for name, value in vars(module).items() if name not in ("_forward_hooks", "_require_grads_hooks")}
        | {"hooks": len(module._forward_hooks)}
        for module in model.modules()
    ]
    return [*modules, model.config.to_dict(), model.config._attn_implementation]


def attentions_of(model: Any) -> list[int]:
    """A list that gets the number of a layer whenever its attention begins to compute."""
    calls: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    return calls


RECOMPUTED_ATTENTION = {
    "none": (), "full": (3, 2, 1, 0), "selective": (3, 2, 1, 0), "offload": (3, 2, 1, 0),
    "offload-attention": (3, 2, 1, 0), "every-2": (2, 0), "full:1,mlp:1,elementwise:1,none:1": (0,),
}  # fmt: skip


def test_every_value_of_the_recipe_is_a_mode() -> None:
    words = set(KEYS["train.checkpointing"]["choices"]) - {"auto"}
    named = {
        "every-N" if mode.startswith("every") else "STATE:N,STATE:N,..." if ":" in mode else mode for mode in MODES
    }
    assert named == words


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "patched", [True, pytest.param(False, marks=pytest.mark.second_proof("the modes do not read it"))]
)
def test_mode_keeps_loss_and_gradients_and_undo_restores_the_model(mode: str, patched: bool) -> None:
    model = model_of(key_heads=4, patched=patched)
    calls = attentions_of(model)
    want, before = gradients(model), state_of(model)
    calls.clear()
    with tigon.checkpoint(model, mode) as applied:
        got = gradients(model)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    assert tuple(calls[SHAPE["num_hidden_layers"] :]) == RECOMPUTED_ATTENTION[mode]
    applied.undo()  # a second time does nothing
    assert state_of(model) == before
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))


def test_selective_keeps_the_results_of_products() -> None:
    model, products = model_of(), []
    ids = ids_of()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(op) if op is torch.ops.aten.mm.default else None
            return op(*args, **(kwargs or {}))

    def n_products(mode: str) -> int:
        products.clear()
        with tigon.checkpoint(model, mode), Count():
            model(input_ids=ids, labels=ids).loss.backward()
        return len(products)

    assert n_products("selective") == n_products("none") < n_products("full")


def test_offload_sends_the_input_of_each_layer_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    sent: list[torch.Size] = []
    send = host_offload.HostOffload.send
    monkeypatch.setattr(host_offload.HostOffload, "send", lambda self, x: sent.append(x.shape) or send(self, x))
    with tigon.checkpoint(model, "offload"):
        gradients(model)
    inputs = [shape for shape in sent if shape == (2, 32, model.config.hidden_size)]
    assert len(inputs) == model.config.num_hidden_layers


@pytest.mark.parametrize("key_heads", [2, 4])
def test_offload_attention_computes_attention_once_and_undo_restores_attention(key_heads: int, monkeypatch) -> None:
    model = model_of(key_heads=key_heads)
    kept, once = [], recomputation.compute_once
    monkeypatch.setattr(recomputation, "compute_once", lambda compute: kept.append(1) or once(compute))
    with tigon.checkpoint(model, "offload-attention"):
        gradients(model)
    shares = key_heads != model.config.num_attention_heads
    assert bool(kept) != shares, "the CPU's kernel takes no shared key heads, so attention is then computed twice"
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with pytest.raises(UsageError, match=r"keeps the results of sdpa, and the model has 'eager'"):
        tigon.checkpoint(model, "offload-attention")
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


@pytest.mark.parametrize("mode", ["none", "full", "every-2"])
def test_checkpoint_twice_is_refused(mode: str) -> None:
    model = model_of()
    applied = tigon.checkpoint(model, mode)
    with pytest.raises(UsageError, match=r"applied to the model already; call its undo\(\)"):
        tigon.checkpoint(model, "full")
    applied.undo()
    tigon.checkpoint(model, "full")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("full:2", "full:2 is for 2 layers, but the model has 4"),
        ("half", "it must be one of auto, none, full"),
        ("auto", r"tigon.checkpoint\(model, tigon.plan\(model, ...\)\)"),
    ],
)
def test_wrong_plan_is_refused(value: str, words: str) -> None:
    model = model_of()
    before = state_of(model)
    with pytest.raises(UsageError, match=words):
        tigon.checkpoint(model, value)
    assert state_of(model) == before


def test_model_without_checkpointing_is_refused() -> None:
    model = model_of()
    model.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match="LlamaForCausalLM has no activation checkpointing; use 'none'"):
        tigon.checkpoint(model, "full")
    with pytest.raises(UsageError, match="Linear is not a transformers model"):
        tigon.checkpoint(torch.nn.Linear(2, 2), "full")


def test_copy_of_a_model_has_its_own_choice() -> None:
    model = model_of()
    with tigon.checkpoint(model, "every-2"):
        other = copy.deepcopy(model)
        other.gradient_checkpointing_disable()
        other.gradient_checkpointing_enable()
        states = [[layer.gradient_checkpointing for layer in one.model.layers] for one in (model, other)]
    assert states == [[True, False, True, False]] * 2


@pytest.mark.parametrize("tied", [False, True])
def test_plan_with_accumulation_fusion_adds_gradients_in_the_products_and_undo_restores_the_model(tied: bool) -> None:
    model = model_of(tied=tied)
    plan = tigon.plan(model, batch=8, seq=32, memory="4GiB", precision="amp-bf16", accumulate=4, cuda_graphs=False)
    assert plan.accumulation_fusion and "gradients: added up in the products" in str(plan)
    assert not tigon.plan(model, batch=8, seq=32, memory="4GiB", precision="amp-bf16", accumulate=1).accumulation_fusion

    def accumulated() -> dict[str, torch.Tensor]:
        model.zero_grad()
        for ids in ids_of(8).chunk(plan.accumulate):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            (loss / plan.accumulate).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    before = state_of(model)
    want = accumulated()
    with tigon.checkpoint(model, plan):
        assert any(isinstance(vars(m).get("forward"), FusedLinear) for m in model.modules())
        got = accumulated()
    exact = exact_gradients(model)
    for name, one in got.items():
        error, plain = ((each.double() - exact[name]).norm() for each in (one, want[name]))
        assert error <= 1.05 * plain + 1e-9, name
    assert any(not torch.equal(got[name], want[name]) for name in got), "the products round once less"
    assert state_of(model) == before
    assert all(torch.equal(one, other) for one, other in zip(accumulated().values(), want.values(), strict=True))


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_plan_with_graphs_keeps_gradients_and_undo_restores_the_model(recomputed: str, monkeypatch: Any) -> None:
    model = model_of()
    plan = replace(tigon.plan(model, batch=2, seq=32, memory="4GiB", cuda_graphs=True), checkpointing=recomputed)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    eager = functools.partial(model_checkpoint.graph, new_capture=lambda: eager_capture)
    monkeypatch.setattr(model_checkpoint, "graph", eager)

    def accumulated() -> list[torch.Tensor]:
        model.zero_grad()
        for _ in range(2):
            model(input_ids=ids_of(), labels=ids_of()).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    want = accumulated()
    model.zero_grad()
    before, started = state_of(model), []
    with tigon.checkpoint(model, plan):
        started += [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers]
        got = accumulated()
    assert all(one.passes == {} for one in started), "undo frees the graphs"
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    model.zero_grad()
    assert state_of(model) == before


def exact_gradients(model: Any) -> dict[str, torch.Tensor]:
    """The same gradients in fp64, by transformers' own code."""
    other = AutoModelForCausalLM.from_config(model.config).double()
    other.load_state_dict(model.state_dict())
    for ids in ids_of(8).chunk(4):
        (other(input_ids=ids, labels=ids).loss / 4).backward()
    return {name: p.grad for name, p in other.named_parameters()}


# --- trainers --------------------------------------------------------------------------------------------------------


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def arguments(make: Any, folder: Any, **more: Any) -> Any:
    return make(
        str(folder), per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, logging_steps=1, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", seed=0, **more,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "every-2", "offload-attention"])
def test_trainer_keeps_the_mode_whatever_its_arguments_say(mode: str, tmp_path: Any) -> None:
    rows = [{"input_ids": row, "labels": row} for row in ids_of(4)]

    def run(mode: str, **more: Any) -> tuple[list[float], list[int]]:
        model = model_of(key_heads=4)
        calls = attentions_of(model)
        with tigon.checkpoint(model, mode):
            return losses(Trainer(model, arguments(TrainingArguments, tmp_path, **more), train_dataset=rows)), calls

    want, want_calls = run(mode)
    with pytest.warns(UserWarning, match=rf"tigon.checkpoint\(model, '{mode}'\) stays in place of the trainer's"):
        got, calls = run(mode, gradient_checkpointing=True)
    assert got == want and calls == want_calls


@pytest.mark.parametrize("adapted", [False, True])
def test_trainer_of_trl_keeps_the_mode_whatever_its_arguments_say(adapted: bool, tmp_path: Any) -> None:
    trl, datasets, peft = (pytest.importorskip(name) for name in ("trl", "datasets", "peft"))
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in ids_of(4)])
    lora = {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"])} if adapted else {}

    def run(mode: str, **more: Any) -> tuple[list[float], list[int]]:
        model = model_of(key_heads=4)
        calls = attentions_of(model)
        with tigon.checkpoint(model, mode):
            torch.manual_seed(0)
            args = arguments(trl.SFTConfig, tmp_path, bf16=False, max_length=None, pad_token="a", **more)
            trainer = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer(), **lora)
            return losses(trainer), calls

    want, want_calls = run("every-2", gradient_checkpointing=False)
    with pytest.warns(UserWarning, match="stays in place of the trainer's"):
        got, calls = run("every-2")  # TRL's default is gradient_checkpointing=True
    assert got == want and calls == want_calls


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {chr(97 + at): at for at in range(26)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), eos_token="b")
