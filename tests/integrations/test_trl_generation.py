"""TRL's trainers with tigon's generator: the same completions, and the log-probabilities with which they were drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("trl")
pytest.importorskip("datasets")

from torch import nn
from trl_cases import lora, of
from trl_runs import build, four_bits, model, trl_version

from tigon.errors import UsageError
from tigon.integrations.trl import UnfusedWarning, decode_in_graphs, fuse
from tigon.integrations.trl.generation import DIFFERENCE, GraphGeneration
from tigon.integrations.trl.whole_weights import BorrowingTwin, by_unwrapped_name
from tigon.models.decoding.rows import Limits

pytestmark = pytest.mark.skipif(trl_version() < (1, 16), reason="tigon.integrations.trl.generation is for TRL 1.16")


def greedy(trainer: Any) -> list[Any]:
    """Let the trainer take the likeliest tokens, and return the list that its generations are added to."""
    trainer.generation_config.do_sample = False
    written = []
    generate = trainer.model.generate

    def noted(*args: Any, **given: Any) -> torch.Tensor:
        written.append(generate(*args, **given))
        return written[-1]

    trainer.model.generate = noted
    return written


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "Distillation"])
@pytest.mark.parametrize("adapters", [None, lora()], ids=["full", "LoRA"])
def test_trainer_trains_on_the_completions_of_transformers(kind: str, adapters: Callable[[], Any] | None) -> None:
    runs = []
    for ours in (True, False):
        trainer = build(kind, lora=adapters, max_steps=2)
        if ours:
            decode_in_graphs(trainer)
        runs.append(greedy(trainer))
        trainer.train()
    assert len(runs[0]) == len(runs[1]) > 0
    for ours, theirs in zip(*runs, strict=True):
        width = min(ours.shape[1], theirs.shape[1])
        assert torch.equal(ours[:, :width], theirs[:, :width])
        assert not ours[:, width:].any() and not theirs[:, width:].any(), "only padding is longer"


@pytest.mark.parametrize(
    ("head", "policy"),
    [(head, policy) for head in ("tigon", "TRL") for policy in ("llama", "gemma2")] + [("shared prefix", "llama")],
)
def test_difference_from_the_trainers_logprobs_is_rounding(head: str, policy: str) -> None:
    trainer = build("GRPO", policy=of(policy), gradient_accumulation_steps=2, steps_per_generation=2)
    generation = decode_in_graphs(trainer)
    fused = None if head == "TRL" else fuse(trainer, shared_prefix=head == "shared prefix")
    trainer.train()
    if head == "shared prefix":
        assert fused is not None and fused.shared_prompts.counts.computed < fused.shared_prompts.counts.given
    assert "importance ratio is within" in str(generation)
    logs = [log for log in trainer.state.log_history if f"{DIFFERENCE}/max" in log]
    assert len(logs) == 2, "each step measures its completions before the update"
    assert all(0 < log[f"{DIFFERENCE}/mean"] <= log[f"{DIFFERENCE}/max"] < 1e-5 for log in logs)


@pytest.mark.parametrize("policy", ["qwen3", "gemma2"])
def test_autocast_draws_with_the_trainers_logprobs_and_casts_weights_once_for_all_steps(policy: str) -> None:
    trainer = build("GRPO", policy=of(policy), bf16=True, max_steps=1)
    decode_in_graphs(trainer)
    fuse(trainer)
    generate, casts = trainer.model.generate, _Casts(trainer.model.model.layers[0].mlp.up_proj.weight.shape)

    def counted(*args: Any, **given: Any) -> torch.Tensor:
        with casts:
            return generate(*args, **given)

    trainer.model.generate = counted
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if f"{DIFFERENCE}/max" in log]
    assert 1e-4 < log[f"{DIFFERENCE}/max"] < 0.05, "rounding of bf16"
    weights = 2 * trainer.model.config.num_hidden_layers  # up_proj and gate_proj have this shape
    assert casts.count == 2 * weights, "once for the prompts, and once for all steps"


class _Casts(TorchDispatchMode):
    """Counts casts of fp32 tensors of one shape to bf16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


def test_difference_is_found_if_the_generator_draws_from_another_model() -> None:
    trainer = build("GRPO", max_steps=1)
    generation = decode_in_graphs(trainer)
    generation.model = model(seed=1)
    trainer.train()
    assert trainer.state.log_history[0][f"{DIFFERENCE}/max"] > 0.1


def test_restore_gives_the_model_its_own_generate() -> None:
    trainer = build("GRPO")
    own = trainer.model.generate
    decode_in_graphs(trainer).restore()
    assert trainer.model.generate == own and not trainer.model._forward_hooks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"use_transformers_continuous_batching": True}, "does not call"),
    ],
)
def test_what_the_generator_does_not_know_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        decode_in_graphs(build("GRPO", **options))


def test_options_of_the_models_own_config_are_refused_too() -> None:
    trainer = build("GRPO")
    trainer.model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(UsageError, match="sets no_repeat_ngram_size"):
        decode_in_graphs(trainer)


def test_other_inputs_are_left_to_transformers_with_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    trainer = build("GRPO")
    decode_in_graphs(trainer)
    ids = torch.tensor([[5, 6]])
    own = trainer.model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)  # not the trainer's call
    assert own.shape[1] <= 5 and not [one for one in recwarn if one.category is UnfusedWarning]
    config = trainer.generation_config
    with pytest.warns(UnfusedWarning, match="num_beams"):
        trainer.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, num_beams=2
        )


# --- engines that divide weights; test_trl_sharded_generation.py trains with them ------------------------------------


def trainer_with(policy: Any, *, zero: Any = None, fsdp: bool = False, on_host: bool = False, tensor: int = 1) -> Any:
    """What `decode_in_graphs` reads of a trainer before the training begins."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    class Mesh(dict[str, Any]):
        mesh_dim_names = ("dp_shard", "tp")

    state = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config={"zero_optimization": zero or {}}),
        fsdp_plugin=SimpleNamespace(cpu_offload=CPUOffloadPolicy() if on_host else OffloadPolicy()),
    )
    mesh = None if tensor == 1 else Mesh(tp=SimpleNamespace(size=lambda: tensor))
    return SimpleNamespace(
        model=policy,
        generation_config=policy.generation_config,
        accelerator=SimpleNamespace(state=state, torch_device_mesh=mesh, is_fsdp2=fsdp),
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=zero is not None,
        args=SimpleNamespace(),
    )


ON_HOST = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"fsdp": True, "on_host": True}, "states in host memory"),
        ({"zero": {"stage": 2, **ON_HOST}}, "states in host memory"),
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "states in host memory"),
        ({"fsdp": True, "tensor": 2}, "tensor parallelism"),
    ],
    ids=str,
)
def test_engines_that_recipes_refuse_are_refused_in_the_same_words(engine: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"it does not go with {reason}"):
        decode_in_graphs(trainer_with(model(), **engine))
    harmless = {"zero": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    assert isinstance(decode_in_graphs(trainer_with(model(), **harmless)), GraphGeneration)
    assert isinstance(decode_in_graphs(trainer_with(model(), fsdp=True)), GraphGeneration)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [({"fsdp": True}, "4-bit weights under FSDP2"), ({"zero": {"stage": 3}}, "4-bit weights under ZeRO-3")],
    ids=str,
)
def test_quantized_weights_are_refused_under_engines_that_divide_weights(engine: Any, reason: str) -> None:
    pytest.importorskip("bitsandbytes")
    policy = four_bits(torch.float32)
    with pytest.raises(UsageError, match=f"it does not go with {reason}"):
        decode_in_graphs(trainer_with(policy, **engine))
    assert isinstance(decode_in_graphs(trainer_with(policy, zero={"stage": 2})), GraphGeneration)


class Witness:
    """Stands for a trainer: it must not be copied."""

    def __init__(self) -> None:
        self.seen: list[nn.Module] = []

    def __deepcopy__(self, memo: object) -> Witness:
        raise AssertionError("the object that a hook is bound to was copied")

    def note(self, module: nn.Module, *_: object) -> None:
        self.seen.append(module)


def test_hooks_run_in_the_copy_of_the_modules_and_keep_what_they_are_bound_to() -> None:
    policy, witness = model(), Witness()
    policy.model.norm.register_forward_hook(witness.note)
    policy.lm_head.register_forward_pre_hook(partial(Witness.note, witness))
    twin = BorrowingTwin(policy)
    with twin.borrowed() as whole:
        whole(input_ids=torch.tensor([[5, 6]]))
    assert witness.seen == [whole.model.norm, whole.lm_head]
    assert all(weight.is_meta for weight in whole.parameters())


def test_names_of_wrapped_modules_are_those_of_the_copy() -> None:
    """Wrappers may come before the copy and after it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    policy = model()
    plain = by_unwrapped_name(policy.named_parameters()).keys()
    policy.model.layers[0] = torch.compile(policy.model.layers[0])
    twin = BorrowingTwin(policy)
    policy.model.layers[1] = torch.compile(checkpoint_wrapper(policy.model.layers[1]))
    policy.model.layers[1].register_buffer("later", torch.ones(1))
    assert by_unwrapped_name(policy.named_parameters()).keys() == plain
    with twin.borrowed() as whole:
        assert not any(weight.is_meta for weight in whole.parameters())
        assert (
            whole.model.layers[1].mlp.up_proj.weight
            is dict(policy.named_parameters())["model.layers.1._orig_mod._checkpoint_wrapped_module.mlp.up_proj.weight"]
        )


def test_memory_for_whole_weights_is_compared_with_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = decode_in_graphs(trainer_with(model(), fsdp=True))
    twin = generation._twin
    assert twin is not None
    generation.trainer.args.device = torch.device("cuda")
    prompts, limits = [[5, 6, 7]] * 2, Limits(new_tokens=4)
    config = generation.model.config
    tokens = 3 + 2 * 4  # the prompt of the group once, and two completions
    cache = 4 * tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    logits = 4 * 2 * config.vocab_size * 4  # the model's, and three copies in fp32
    needed = 4 * sum(weight.numel() for weight in generation.model.parameters()) + cache + logits
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    found = []
    for spare in (1, 0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, spare=spare: (int(1.1 * needed) - 600 + spare, 0))
        found.append(generation._missing_memory(twin, prompts, limits))
    assert found[0] is None and found[1] is not None
    assert found[1].startswith("whole weights, keys and values take")
