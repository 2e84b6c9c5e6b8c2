"""Techniques in real runs of one-layer models: the same training as without them, and checkpoints that resume."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from trainer_helpers import (
    SMALL,
    TINY_MODEL,
    assert_same_losses,
    cut_back,
    losses,
    losses_of,
    records,
    rows,
    small_setup,
    small_trainer,
    train_keys,
)
from transformers import AutoConfig, AutoModelForCausalLM

from forks import forks, in_forks, need_deepspeed
from second_proofs import one_of_each, proved_by
from tests.short_names import settings_of
from tigon.cli import app
from tigon.models import DeferredLogits
from tigon.models.loading.presets import PRESETS
from tigon.objectives.recipe_checks import load
from tigon.recipe.keys import LoraConfig, ModelConfig, OutputConfig, Recipe, ShardingConfig, TrainConfig
from tigon.techniques import TECHNIQUES
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.techniques.sharding import sharding
from tigon.techniques.technique import RunInfo
from tigon.trainer import engine
from tigon.trainer import model as models
from tigon.trainer import run as run_module
from tigon.trainer.arguments import make_optimizer
from tigon.trainer.checkpoint.final_model import FinalModel
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.run import train

ROOT = Path(__file__).parents[2]


def recipe_of(lora: LoraConfig | None = None, **train: Any) -> Recipe:
    values = {"steps": 4, "batch_size": 8, "learning_rate": 0.01, "log_steps": 1, "galore_rank": 8, "galore_gap": 3}
    return Recipe(model=SMALL, train=TrainConfig(**{**values, **train}), lora=lora or LoraConfig())


def with_kernels(recipe: Recipe, kernels: str) -> Recipe:
    return replace(recipe, model=replace(recipe.model, kernels=kernels))


def need(package: str | None) -> None:
    if package == "deepspeed":
        need_deepspeed()
    elif package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def settings(name: str) -> dict[str, Any]:
    """The settings of a recipe with this optimizer, and a suitable learning rate."""
    rates = {"sgd": 0.5, "lion-8bit": 0.001}
    return {"learning_rate": rates.get(name, 0.01), **train_keys(OPTIMIZERS[name])}


on_cpu = pytest.mark.parametrize("name", [row.name for row in OPTIMIZERS.values() if "cpu" in row.devices])


def resumed_and_whole(
    name: str, folder: Path, device: torch.device, *, at: int = 4, lora: LoraConfig | None = None, **train: Any
) -> tuple[list[float], list[float], bool]:
    """Returns the losses of a run resumed after step `at`, those of the uninterrupted run, and whether both end at the
    same weights bit for bit. A run has six steps, three per epoch."""
    split = {} if OPTIMIZERS[name].in_backward else {"batch_size": 4, "gradient_accumulation": 2}
    recipe = recipe_of(lora, **settings(name), **split, steps=6, save_steps=1, keep_checkpoints=9, **train)
    uncut = small_trainer(folder, recipe, device=device)
    whole = losses_of(uncut)
    cut = small_trainer(folder, recipe, device=device)
    cut.train(resume_from_checkpoint=str(folder / "checkpoints" / f"checkpoint-{at}"))
    resumed = [entry["loss"] for entry in cut.state.log_history if "loss" in entry]
    pairs = zip(uncut.model.parameters(), cut.model.parameters(), strict=True)
    return resumed, whole, all(torch.equal(a, b) for a, b in pairs)


def test_matrices_b_of_lora_plus_learn_as_much_faster_as_in_peft_and_a_resumed_run_equals_the_whole_one(tmp_path):
    by_peft_of = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
    plus = LoraConfig(rank=4, loraplus_lr_ratio=16)
    trainer = small_trainer(tmp_path, recipe_of(plus))
    names = {id(p): name for name, p in trainer.model.named_parameters()}

    def rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
        return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}

    by_peft = by_peft_of(trainer.model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16)
    ours = rates(trainer.create_optimizer())
    assert ours == pytest.approx(rates(by_peft)) and set(ours.values()) == {0.01, 0.16}
    plain = small_trainer(tmp_path / "plain", recipe_of(LoraConfig(rank=4))).create_optimizer()
    assert {group["lr"] for group in plain.param_groups} == {0.01}
    resumed, whole, same = resumed_and_whole("adamw", tmp_path, torch.device("cpu"), lora=plus)
    assert resumed == whole and same


@on_cpu
def test_resumed_optimizer_equals_the_uninterrupted_one(name, tmp_path):
    need(OPTIMIZERS[name].package)
    # torchao compiles a kernel for each shape: seconds, and nothing of it is ours
    with torch.compiler.set_stance("force_eager") if OPTIMIZERS[name].needs_compiler else nullcontext():
        resumed, whole, same = resumed_and_whole(name, tmp_path, torch.device("cpu"))
    assert resumed == whole and same
    assert whole[-1] < whole[0] - 0.05, "it does not learn"


@pytest.mark.parametrize("row", [row for row in OPTIMIZERS.values() if row.needs_compiler], ids=lambda row: row.name)
@pytest.mark.parametrize("fsdp", [False, True])
def test_graph_cache_is_disabled_for_sharded_compiled_optimizers(row, fsdp):
    """PyTorch's graph cache would find the graphs of sharded and plain optimizers by one key."""
    with functorch_config.patch(enable_autograd_cache=True):
        recipe = Recipe(model=SMALL, train=TrainConfig(optimizer=row.name), sharding=ShardingConfig(fsdp=fsdp))
        make_optimizer(small_setup(recipe))
        assert functorch_config.enable_autograd_cache is not fsdp


@pytest.mark.parametrize(("at", "workers"), [(2, 0), (3, 0), (2, 2), (3, 2), (5, 2)])
def test_resumed_run_sees_the_same_sequences(at, workers, tmp_path):
    """Within the first epoch, at its end, within the second; with rows prepared here or by processes."""
    resumed, whole, same = resumed_and_whole("adamw", tmp_path, torch.device("cpu"), at=at, workers=workers)
    assert resumed == whole and same


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_resumed_on_the_gpu_equals_the_uninterrupted_one(name, tmp_path):
    need(OPTIMIZERS[name].package)
    resumed, whole, _ = resumed_and_whole(name, tmp_path, torch.device("cuda", 0))
    assert resumed == pytest.approx(whole, rel=1e-6)
    assert whole[-1] < whole[0] - 0.05, "it does not learn"


@pytest.mark.parametrize("kernels", ["none", "tigon"])
def test_gradient_is_the_same_however_the_batch_is_split(kernels, tmp_path):
    """Rows hold different numbers of learned tokens, so averaging micro-batches would fail this."""
    data, moved = rows(), {}
    for batch_size, accumulate in ((8, 1), (4, 2), (2, 4), (1, 8)):
        recipe = recipe_of(
            steps=1, batch_size=batch_size, gradient_accumulation=accumulate, optimizer="sgd", learning_rate=1.0,
            weight_decay=0.0, max_grad_norm=0.0,
        )  # fmt: skip
        trainer = small_trainer(tmp_path, with_kernels(recipe, kernels), data=data)
        trainer.train()
        moved[accumulate] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for accumulate in (2, 4, 8):
        for name, want in moved[1].items():
            torch.testing.assert_close(moved[accumulate][name], want, rtol=1e-5, atol=1e-6)


PRECISIONS = {"amp-bf16": 0.05, "bf16": 0.05}


@pytest.mark.parametrize(("precision", "tolerance"), PRECISIONS.items())
def test_lower_precision_trains_as_fp32_does(precision, tolerance, tmp_path):
    want = losses_of(small_trainer(tmp_path, recipe_of(precision="fp32")))
    got = losses_of(small_trainer(tmp_path, recipe_of(precision=precision)))
    assert got == pytest.approx(want, abs=tolerance)


# --- adapters --------------------------------------------------------------------------------------------------------

TARGETS = {
    "linear": ("linear",), "head": ("linear", "head"), "embeddings": ("embeddings",),
    "all": ("linear", "head", "embeddings"),
}  # fmt: skip


def adapted(targets: tuple[str, ...], *, quantize: bool = False, **train: Any) -> Recipe:
    return recipe_of(LoraConfig(rank=4, targets=targets, quantize=quantize), precision="fp32", **train)


def one_batch(trainer: Any) -> dict[str, torch.Tensor]:
    return next(iter(trainer.get_train_dataloader()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("quantize", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
def test_adapters_train_as_unpatched_and_without_logits(targets, quantize, tmp_path):
    need("peft")
    need("bitsandbytes" if quantize else None)
    losses = {}
    for kernels in ("none", "tigon"):
        recipe = adapted(targets, quantize=quantize)
        trainer = small_trainer(tmp_path, with_kernels(recipe, kernels))
        outputs = trainer.model.train()(**one_batch(trainer))
        # A 4-bit head with an adapter computes whole logits, with a warning.
        fused = kernels == "tigon" and not (quantize and "head" in targets)
        assert isinstance(outputs.logits, DeferredLogits) == fused
        losses[kernels] = losses_of(trainer)
    assert losses["tigon"] == pytest.approx(losses["none"], rel=2e-5)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("quantize", [False, True], ids=["lora", "qlora"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
def test_merged_checkpoint_computes_what_the_adapters_did(targets, quantize, tmp_path):
    """TINY_MODEL ties its head to its embeddings: an adapter on either must leave the other alone."""
    from transformers import AutoModelForCausalLM

    need("peft")
    need("bitsandbytes" if quantize else None)
    recipe = adapted(targets, quantize=quantize, learning_rate=0.1)
    trainer = small_trainer(tmp_path, recipe)
    trainer.train()
    built, base, batch = trainer.model.eval(), tmp_path / "base", one_batch(trainer)
    if quantize:  # the base of the merged checkpoint is the one before quantisation
        import peft

        trainer.save_model(str(tmp_path / "a"))
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        built = peft.PeftModel.from_pretrained(plain, str(tmp_path / "a")).eval()
    with torch.no_grad():
        want = built(input_ids=batch["input_ids"]).logits
    FinalModel(
        run=tmp_path, model=recipe.model, config=models.load_config(recipe.model), output=OutputConfig(merge=True),
        settings=recipe.settings(precision="fp32"),
    ).save(trainer.model, trainer)  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        got = merged(input_ids=batch["input_ids"]).logits
    tolerance = 0.05 if quantize else 1e-4  # the merged weights of a quantised model are written in bf16
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert list(tmp_path.glob("adapters/*.safetensors"))


def test_evaluation_before_training_leaves_the_losses_of_qlora_unchanged(tmp_path):
    need("bitsandbytes")
    losses = []
    for evaluated in (False, True):
        trainer = small_trainer(tmp_path, adapted(("linear",), quantize=True), evaluate=True)
        if evaluated:
            trainer.evaluate()
        losses.append(losses_of(trainer))
    assert losses[0] == losses[1]


# --- through the command ---------------------------------------------------------------------------------------------


REFUSED = {
    "galore with ZeRO": (
        ("train.optimizer=galore", "sharding.zero=2"),
        r"flat slices of all parameters.*sharding\.zero",
    ),
    "ZeRO with processes on the CPU": (("sharding.zero=2", "sharding.gpus=2"), r"one process in fp32|needs deepspeed"),
    "shared rows in one process": (
        ("sharding.sequence=2",),
        r"gpus 1 is not a multiple of it; set sharding\.gpus to 2",
    ),
}


@pytest.mark.parametrize("sets, message", REFUSED.values(), ids=REFUSED.keys())
def test_excluded_pair_is_refused_and_leaves_nothing(recipe, tigon, here, sets, message):
    path = recipe()
    before = set(here.rglob("*"))
    outcome = tigon("train", path, *(word for text in sets for word in ("--set", text)))
    assert re.search(message, outcome.error_line())
    assert set(here.rglob("*")) == before


@forks
def test_refusal_is_printed_by_one_process_only(recipe, here, monkeypatch):
    """Only the processes can see that a text is too short; the first of them prints one line."""
    monkeypatch.setattr(sys, "argv", ["tigon", "train", str(recipe(train={"batch_size": 1000})), "--gpus", "2"])
    said = here / "stderr"
    statuses = in_forks(lambda rank: app.main(), 2, said=said)
    assert [os.waitstatus_to_exitcode(status) for status in statuses] == [2, 2]
    text = said.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("tigon: ")]
    assert len(lines) == 1 and "fewer than train.batch_size 1000" in lines[0]
    assert "Traceback" not in text
    assert not (here / "runs").exists()


ZERO = {"stage 1": 1, "stage 2": 2, "stage 3": 3}
SAME_STAGES = pytest.mark.second_proof("DeepSpeed's stages 1 and 2 have one optimizer")


def succeeds(action: Callable[[int], Any], here: Path, count: int = 1) -> str:
    """What `action(rank)` wrote to stderr in `count` copies of this process, none of which failed; stdout.txt has the
    rest."""
    said = here / "stderr.txt"
    said.unlink(missing_ok=True)
    statuses = in_forks(action, count, said=said, printed=here / "stdout.txt")
    text = said.read_text(encoding="utf-8")
    assert statuses == [0] * count, text[-3000:]
    return text


@forks
def test_two_processes_train_as_one_with_twice_the_sequences(recipe, tigon, here):
    one = recipe("one.yaml", model={"kernels": "tigon"}, output={"name": "one"})
    assert tigon("train", one).code == 0
    sets = ["train.batch_size=2", "sharding.gpus=2", "output.name=two"]
    succeeds(lambda rank: train(one, sets), here, 2)
    assert losses(here / "runs" / "two") == pytest.approx(losses(here / "runs" / "one"), rel=1e-5)
    assert (here / "runs" / "two" / "report.html").exists()
    held_out = [records(here / "runs" / name, "result")[0]["eval_loss"] for name in ("one", "two")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


def zero_rank(recipe: Path, sets: Sequence[str], *, resume: bool = False) -> None:
    """Accelerate connects DeepSpeed's processes only if it finds an accelerator; here it finds one that uses gloo."""
    import accelerate.state as state

    if launch.world_size() > 1:
        told = "gloo", state.DistributedType.MULTI_GPU
        state.PartialState._prepare_backend = lambda *_, **__: told
        sharding.CPU_ZERO_PROCESSES = launch.world_size()
    train(recipe, sets, resume=resume)


@forks
@pytest.mark.parametrize("count", proved_by([2], [1, 2], "a process that shards with another also loads and saves"))
@pytest.mark.parametrize(
    "stage",
    proved_by([3], ZERO.values(), "skipped steps, below, are trained in stage 2, as in stage 1", "stage {}".format),
)
def test_zero_trains_as_a_plain_run_and_resumes(recipe, tigon, here, stage, count):
    """Two processes: the losses of one with twice the rows."""
    need("deepspeed")
    path = recipe(model={"kernels": "tigon"}, train={"save_steps": 2}, output={"name": "plain"})
    assert tigon("train", path).code == 0
    sets, runs = [f"sharding.zero={stage}", f"train.batch_size={4 // count}"], here / "runs"
    succeeds(lambda rank: zero_rank(path, [*sets, "output.name=zero"]), here, count)
    assert losses(runs / "zero") == pytest.approx(losses(runs / "plain"), rel=1e-5)
    cut_back(runs / "zero", "cut", 4)
    succeeds(lambda rank: zero_rank(path, [*sets, "output.name=cut"], resume=True), here, count)
    assert losses(runs / "cut") == losses(runs / "zero")


@forks
@pytest.mark.parametrize(
    "checkpointing",
    proved_by(["full"], ["full", "selective", "every-2", "full:1,none:2"], "DeepSpeed's hooks stand inside each layer"),
)
def test_zero_3_by_layers_accumulates_and_evaluates_as_one_process(recipe, tigon, here, checkpointing):
    """Two processes, with recomputed layers."""
    need("deepspeed")
    model = {"kernels": "tigon", "config": {**TINY_MODEL, "num_hidden_layers": 3}}
    more = {"eval_steps": 2, "checkpointing": checkpointing}
    path = recipe(model=model, train=more, output={"name": "plain"})
    assert tigon("train", path).code == 0
    sets = ["sharding.zero=3", "train.batch_size=1", "train.gradient_accumulation=2", "output.name=zero"]
    succeeds(lambda rank: zero_rank(path, sets), here, 2)
    runs = here / "runs"
    assert_same_losses(runs / "zero", runs / "plain")
    assert len(records(runs / "zero", "eval")) == 2


def spoilt(rank: int, train_as: Callable[[], None], *, step: int) -> None:
    """Train with a loss that is not a number in the last process's part of one step."""
    original = GuardedTrainer.compute_loss

    def compute_loss(self: GuardedTrainer, model: Any, *arguments: Any, **options: Any) -> Any:
        loss = original(self, model, *arguments, **options)
        now = model.training and self.state.global_step + 1 == step and rank == launch.world_size() - 1
        return self.gate.nan_if_not_finite(loss * math.nan) if now else loss

    GuardedTrainer.compute_loss = compute_loss  # type: ignore[method-assign]  # in a copy of this process
    train_as()


SKIPPING = {"ZeRO-1": "sharding.zero=1", "ZeRO-2": "sharding.zero=2", "ZeRO-3": "sharding.zero=3"}
SKIPPING |= {"FSDP2": "sharding.fsdp=true", "DDP": "sharding.gpus=2"}


@forks
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine, id=name, marks=[SAME_STAGES] if name == "ZeRO-1" else [])
        for name, engine in SKIPPING.items()
    ],
)
def test_step_not_finite_in_one_process_is_skipped_and_the_schedule_goes_on(recipe, here, engine):
    """Two processes: the same losses and learning rates after it as of one that is spoilt in this step."""
    if "zero" in engine:
        need("deepspeed")
    path, runs = recipe(model={"kernels": "tigon"}, train={"steps": 5}), here / "runs"
    rank_of = {"fsdp": fsdp_rank, "zero": zero_rank}.get(engine.split(".")[1].split("=")[0], train)
    succeeds(lambda rank: spoilt(rank, lambda: train(path, ["output.name=one"]), step=3), here)
    sets = ["train.batch_size=2", "output.name=two", engine]
    succeeds(lambda rank: spoilt(rank, lambda: rank_of(path, sets), step=3), here, 2)
    one, two = (records(runs / name, "train") for name in ("one", "two"))
    assert [r["step"] for r in one] == [r["step"] for r in two] and len(one) == 4
    assert [r["learning_rate"] for r in two] == pytest.approx([r["learning_rate"] for r in one], rel=1e-9)
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)


@forks
def test_checkpoint_in_zero_3_is_loaded_in_partitions_and_trains_alike(recipe, tigon, here, monkeypatch):
    """from_pretrained fills partitions: no weight has an element outside of them when the model is handed over."""
    need("deepspeed")
    first = recipe("first.yaml", output={"name": "first", "save_model": True})
    assert tigon("train", first).code == 0
    model = {"name": str(here / "runs" / "first" / "model"), "config": None, "kernels": "tigon"}
    path = recipe(model=model, output={"name": "plain"})
    assert tigon("train", path).code == 0
    build = engine.build

    def watched(*arguments: Any, **options: Any) -> Any:
        built = build(*arguments, **options)
        assert not any(p.numel() for p in built[0].parameters()), "a weight is whole"
        return built

    monkeypatch.setattr(engine, "build", watched)
    succeeds(lambda rank: train(path, ["sharding.zero=3", "output.name=zero", "output.sample_tokens=4"]), here)
    assert "no text sample: the weights are sharded" in (here / "stdout.txt").read_text(encoding="utf-8")
    assert losses(here / "runs" / "zero") == pytest.approx(losses(here / "runs" / "plain"), rel=1e-5)


@forks
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_partitioned_model_keeps_its_buffers_and_heads_get_whole_weights(family, here, tmp_path):
    """In amp-bf16, where deepspeed.zero.Init makes every tensor of a constructor one of 16 bits."""
    need("deepspeed")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 512, "head_dim": 16}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "files")
    recipe = Recipe(model=ModelConfig(name=str(tmp_path / "files")), sharding=ShardingConfig(zero=3))

    def compare(rank: int) -> None:
        launch.init_distributed(torch.device("cpu"))
        setup = replace(small_setup(recipe), settings=recipe.settings(precision="amp-bf16"))
        planned = SimpleNamespace(reads_whole_weights=True, own_parameters="")
        reader = SimpleNamespace(trl=None, planned=lambda: planned, with_head=lambda built: built)
        whole_setup = replace(setup, objective=reader)
        parts, whole = (engine.build(each, tmp_path / "base")[0] for each in (setup, whole_setup))
        assert not any(weight.numel() for weight in parts.parameters())
        assert all(weight.numel() for weight in whole.parameters())
        got, want = dict(parts.named_buffers()), dict(whole.named_buffers())
        assert got.keys() == want.keys() and got
        for name, buffer in want.items():
            assert got[name].dtype == buffer.dtype and torch.equal(got[name], buffer), name

    succeeds(compare, here, 2)


@pytest.mark.parametrize(
    ("settings", "free_bytes", "stays"),
    [
        ({"zero": 3}, 4 * 50, True),
        ({"zero": 3}, 4 * 50 - 1, False),
        ({"zero": 3, "offload": "cpu"}, 10**9, False),
        ({"fsdp": True, "offload": "cpu"}, 10**9, False),
    ],
)
def test_random_weights_are_drawn_on_the_gpu_only_if_they_fit(settings, free_bytes, stays, monkeypatch):
    """fp32: 4 bytes of 40 elements, and of the 10 of a head that is not tied yet."""
    run_info = RunInfo(shapes={"a": (10,), "b": (2, 5), "c": (10,), "d": (10,)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 10**9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert engine._stays_on(torch.device("cuda"), settings_of(settings), run_info, torch.float32) == stays


@pytest.mark.parametrize("name", PRESETS)
def test_weights_drawn_module_by_module_have_the_same_distribution(name):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    latent = "kv_lora_rank" in PRESETS[name]  # its keys and values are computed for each head
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4 if latent else 2}
    small |= {"head_dim": 16} if "head_dim" in PRESETS[name] else {}
    small |= {"layer_types": PRESETS[name]["layer_types"][2:4]} if "layer_types" in PRESETS[name] else {}
    small |= {token: 0 for token in ("pad_token_id", "bos_token_id", "eos_token_id") if token in PRESETS[name]}
    small |= {"pad_token_id": 0} if name.startswith("kimi") else {}  # the config's own is beyond 512
    model = ModelConfig(name=name, config=small, attention="eager")
    config = models.load_config(model)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    whole = dict(plain.named_parameters())
    here, elsewhere = torch.device("cpu"), torch.device("cpu", 0)
    drawn, moved = (
        dict(models.build(model, config, dtype=torch.float32, device=here, seed=3, through=through).named_parameters())
        for through in (None, elsewhere)
    )
    assert all(torch.equal(moved[key], weight) for key, weight in drawn.items())
    assert whole.keys() == drawn.keys()
    for key, want in whole.items():
        got = drawn[key]
        if want.ndim == 1 and want.unique().numel() > 1:  # drawn, but too few numbers for a distribution
            # The decay of a gated delta rule (A_log) is the logarithm of a uniform number, not a normal one.
            most = max(6 * config.initializer_range, 3 * float(want.detach().abs().max()))
            assert 0 < float(got.detach().abs().max()) < most, key
        elif want.ndim == 1:
            assert torch.equal(got, want), key
        else:
            rel = max(0.1, 4 / want.numel() ** 0.5)  # the gate of a shared expert has 64 numbers
            assert float(got.detach().std()) == pytest.approx(float(want.detach().std()), rel=rel), key
            assert torch.equal((got == 0).all(1), (want == 0).all(1)), f"{key}: the padding's row"
            apart = abs(float(got.detach().mean() - want.detach().mean()))
            assert apart < rel * float(want.detach().std()) + 1e-3, key


SMALL_EXPERTS = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1024,
}  # fmt: skip


def fsdp_rank(recipe: Path, sets: Sequence[str], resume: bool = False) -> None:
    """Accelerate takes FSDP2 for accelerators only: here processes on the CPU are one, by another's name."""
    import accelerate.state as state

    class Words:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, "MULTI_CPU" if name == "MULTI_MUSA" else name)

    real, state.DistributedType = state.DistributedType, Words()
    TECHNIQUES.update({name: replace(row, devices=("cpu", "cuda")) for name, row in TECHNIQUES.items()})
    train(recipe, ["sharding.fsdp=true", *sets], resume=resume)


def run_fsdp(here: Path, recipe: Path, name: str, *sets: str, resume: bool = False) -> None:
    words = [f"output.name={name}", *sets]
    said = succeeds(lambda rank: fsdp_rank(recipe, words, resume), here, 2)
    assert "MaterializedLogitsWarning" not in said, "the loss was not fused"


@forks
def test_fsdp2_trains_as_a_plain_run_and_resumes(recipe, tigon, here):
    """Two processes: the losses of one with twice the rows; resumed, the same; and its checkpoint is whole."""
    path = recipe("one.yaml", model={"kernels": "tigon"}, train={"save_steps": 2}, output={"name": "plain"})
    assert tigon("train", path).code == 0
    runs, sets = here / "runs", ("train.batch_size=2", "output.save_model=true")
    run_fsdp(here, path, "fsdp", *sets)
    assert losses(runs / "fsdp") == pytest.approx(losses(runs / "plain"), rel=1e-5)
    cut_back(runs / "fsdp", "cut", 4)
    run_fsdp(here, path, "cut", *sets, resume=True)
    assert losses(runs / "cut") == losses(runs / "fsdp")
    again = recipe("again.yaml", model={"name": str(runs / "fsdp" / "model"), "config": None}, output={"name": "again"})
    assert tigon("train", again).code == 0
    assert losses(runs / "again")[0] < losses(runs / "fsdp")[0] - 0.1, "the gathered weights were not the trained ones"


@forks
@pytest.mark.parametrize("name", ["muon", "schedule-free"])
def test_fsdp2_with_an_optimizer_of_another_algorithm_trains_as_a_plain_run_and_resumes(name, recipe, tigon, here):
    need(OPTIMIZERS[name].package)
    path = recipe(
        "one.yaml", train={"save_steps": 2, "batch_size": 4, **train_keys(OPTIMIZERS[name])}, output={"name": "plain"}
    )
    assert tigon("train", path).code == 0
    run_fsdp(here, path, "fsdp", "train.batch_size=2")
    runs = here / "runs"
    assert losses(runs / "fsdp") == pytest.approx(losses(runs / "plain"), rel=1e-3)
    cut_back(runs / "fsdp", "cut", 4)
    run_fsdp(here, path, "cut", "train.batch_size=2", resume=True)
    assert losses(runs / "cut") == losses(runs / "fsdp")


@forks
@pytest.mark.parametrize("experts", [False, True], ids=["linear", "experts"])
def test_fsdp2_with_adapters_on_random_weights_has_the_losses_of_a_plain_run(recipe, tigon, here, experts):
    """FSDP2 reads the weights from files, in the dtype in which the plain run draws them, and draws equal adapters."""
    need("peft")
    sets = ["lora.rank=8", *(["lora.targets=[linear, experts]"] if experts else [])]
    model = {"name": "qwen3-30b-a3b", "config": SMALL_EXPERTS} if experts else {}
    train = {"steps": 6, "learning_rate": 1e-3}
    path = recipe("one.yaml", model={"kernels": "tigon", **model}, train=train, output={"name": "one"})
    run_fsdp(here, path, "fsdp", "train.batch_size=2", *sets)
    assert tigon("train", path, *(word for text in sets for word in ("--set", text))).code == 0
    assert losses(here / "runs" / "fsdp") == pytest.approx(losses(here / "runs" / "one"), rel=1e-6)


@forks
@pytest.mark.parametrize("experts", [False, True], ids=["linear", "experts"])
def test_fsdp2_divides_frozen_weights_in_the_dtype_of_the_matmuls(recipe, tigon, here, monkeypatch, experts):
    """Beside fp32 adapters, under autocast. The losses are those of one process, and so are those of a resumed run."""
    need("peft")
    sets = ["lora.rank=8", "train.precision=amp-bf16"]
    sets += ["lora.targets=[linear, experts]"] if experts else []
    model = {"name": "qwen3-30b-a3b", "config": SMALL_EXPERTS} if experts else {}
    train = {"steps": 4, "learning_rate": 1e-3, "save_steps": 2}
    path = recipe("one.yaml", model={"kernels": "tigon", **model}, train=train, output={"name": "one"})
    save_model = run_module._save_model

    def look(run: Any, prepared: Any, built: Any, trainer: Any) -> None:
        dtypes = {(p.requires_grad, str(p.dtype), hasattr(p, "to_local")) for p in built.parameters()}
        (here / "dtypes").write_text(repr(sorted(dtypes)), encoding="utf-8")
        save_model(run, prepared, built, trainer)

    monkeypatch.setattr(run_module, "_save_model", look)
    run_fsdp(here, path, "fsdp", "train.batch_size=2", *sets)
    want = [(False, "torch.bfloat16", True), (True, "torch.float32", True)]
    assert ast.literal_eval((here / "dtypes").read_text(encoding="utf-8")) == want
    assert tigon("train", path, *(word for text in sets for word in ("--set", text))).code == 0
    assert losses(here / "runs" / "fsdp") == pytest.approx(losses(here / "runs" / "one"), rel=2e-3)
    cut_back(here / "runs" / "fsdp", "cut", 4)
    run_fsdp(here, path, "cut", "train.batch_size=2", *sets, resume=True)
    assert losses(here / "runs" / "cut") == losses(here / "runs" / "fsdp")


@forks
@pytest.mark.parametrize("precision", ["amp-bf16", "fp8"])
def test_fsdp2_with_autocast_or_fp8_trains_as_a_plain_run(recipe, tigon, here, precision):
    sets = [f"train.precision={precision}", "train.checkpointing=selective"]
    sets += ["train.fp8_bf16_layers=0", "train.fp8_scaling=rowwise"] if precision == "fp8" else []
    path = recipe("one.yaml", model={"kernels": "tigon"}, output={"save_model": True, "name": "one"})
    run_fsdp(here, path, "fsdp", "train.batch_size=2", *sets)
    assert tigon("train", path, *(word for text in sets for word in ("--set", text))).code == 0
    want, got = losses(here / "runs" / "one"), losses(here / "runs" / "fsdp")
    assert got == pytest.approx(want, rel=5e-3)


def test_fp8_run_resumes_with_the_losses_of_the_whole_run(recipe, tigon, here):
    train = {"precision": "fp8", "fp8_bf16_layers": 0, "save_steps": 2}
    path = recipe("one.yaml", model={"kernels": "tigon"}, train=train, output={"name": "whole"})
    assert tigon("train", path).code == 0
    cut_back(here / "runs" / "whole", "cut", 4)
    assert tigon("train", path, "--set", "output.name=cut", "--resume").code == 0
    assert losses(here / "runs" / "cut") == losses(here / "runs" / "whole")


def test_fp8_without_a_layer_that_can_run_in_it_is_refused_in_one_line(recipe, tigon):
    outcome = tigon("train", recipe("one.yaml", train={"precision": "fp8", "fp8_bf16_layers": 8}))
    assert outcome.code == 2
    assert "train.precision is fp8, but nothing in this LlamaForCausalLM can run in FP8" in outcome.err
    assert outcome.err.strip().count("\n") == 0


TECHNIQUE_RECIPES = sorted((ROOT / "recipes" / "techniques").glob("*.yaml"))


@pytest.mark.parametrize("path", TECHNIQUE_RECIPES, ids=lambda path: path.stem)
def test_recipe_of_a_technique_uses_it(path):
    technique = TECHNIQUES[path.stem]
    for gpu in (False, True):
        recipe = load(path, gpu_present=lambda gpu=gpu: gpu)
        # `auto` stands for a choice, so Recipe.settings() has another value.
        settings = recipe.settings().having({"train.checkpointing": recipe.train.checkpointing})
        assert technique.used_by(settings)


def test_every_technique_has_a_recipe():
    assert {path.stem for path in TECHNIQUE_RECIPES} == set(TECHNIQUES)


SMALLER = ("train.device=cpu", "train.steps=3", "train.warmup_steps=1", "data.max_text_mib=0.1", "data.vocab_size=400",
           "data.sequence_length=32", "model.config.num_hidden_layers=1", "output.sample_tokens=0")  # fmt: skip
IN_TWO = {
    "ddp": train, "zero-1": zero_rank, "zero-2": zero_rank, "zero-3": zero_rank, "fsdp2": fsdp_rank,
    "sequence-parallel": train, "ring-attention": train,
}  # fmt: skip
ELSEWHERE = (
    *("zero-offload-cpu", "zero-offload-nvme"),  # DeepSpeed compiles its CPU optimizer for two minutes
    *("fsdp2-hybrid", "tensor-parallel", "zero-3-hpz"),  # four processes: test_mesh_runs.py
    *("zero-3-int8-weights", "zero-3-int4-gradients"),  # CUDA kernels
    *IN_TWO,
)
ON_ONE_CPU = [path for path in TECHNIQUE_RECIPES if path.stem not in ELSEWHERE]


@pytest.mark.parametrize(
    "path",
    proved_by(
        one_of_each(ON_ONE_CPU, lambda path: next(iter(TECHNIQUES[path.stem].recipe))), ON_ONE_CPU,
        "a run proves the first key, and the technique itself is trained by tests of its own", lambda path: path.stem,
    ),
)  # fmt: skip
def test_recipe_of_a_technique_runs_on_the_cpu(path, tigon, here):
    technique = TECHNIQUES[path.stem]
    if technique.devices == ("cuda",):
        pytest.skip("for GPUs")
    for package in technique.needs:
        need(package)
    by_layer = ":" in load(path, gpu_present=lambda: False).train.checkpointing  # for the preset's number of layers
    smaller = [text for text in SMALLER if not (by_layer and "num_hidden_layers" in text)]
    with torch.compiler.set_stance("force_eager"):
        outcome = tigon("train", path, *(word for text in smaller for word in ("--set", text)))
    assert outcome.code == 0, outcome.err
    assert len(records(here / "runs" / path.stem, "train")) >= 1


@pytest.mark.second_proof("each engine trains in two processes above, and the recipe's keys are checked there")
@forks
@pytest.mark.parametrize("name", IN_TWO)
def test_recipe_of_an_engine_runs_in_two_processes(name, here):
    if name.startswith("zero"):
        need("deepspeed")
    path = ROOT / "recipes" / "techniques" / f"{name}.yaml"
    succeeds(lambda rank: IN_TWO[name](path, SMALLER), here, 2)
    assert len(records(here / "runs" / name, "train")) >= 1
