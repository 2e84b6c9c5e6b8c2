"""Two gloo processes train each pair that docs/several-gpus.md says works, and are compared with one process."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_technique_runs import cut_back, fsdp_rank, need, succeeds, zero_rank
from tiny_checkpoint import EXPERTS, save
from trainer_helpers import losses, records, words

from benchmarks.pages.engine_pairs import ENGINES, FEATURES, WORKING, Engine, Feature
from forks import forks
from second_proofs import proved_by
from tigon.trainer import run as run_module
from tigon.trainer.run import train

pytest.importorskip("peft")
ENGINE = {engine.title: engine for engine in ENGINES}
FEATURE = {feature.name: feature for feature in FEATURES}
TRAIN: Mapping[str, Callable[..., Any]] = {"DDP": train, "FSDP2": fsdp_rank}
"""How one of two processes trains; the others are DeepSpeed's."""
SAMPLED = ("grpo", "grpo-lora", "grpo-qlora", "distill")
"""Each process writes other completions, so no run of one process is the same. Engines are compared with DDP."""
BY_MICRO_BATCH = ("orpo", "fp8", "fp8-lora")
"""TRL's ORPO averages over the tokens of a micro-batch, and FP8 scales gradients over them. One process accumulates."""
VARIES = ("time", "per_s", "memory", "epoch")
"""Parts of the names of metrics that differ from run to run, or with the samples of a micro-batch."""
LIMITS = {"fp32": (1e-5, 1e-4, 1e-2), "fp8": (5e-3, 1e-2, 0.1)}
"""Precision -> the largest relative difference of losses, of other metrics, and of weights by the norm of what was
learned.

AdamW moves an element whose gradient is nearly 0 by a whole step, and rounding chooses its sign. The norm's limit
allows for a few of them. FP8 runs have bf16 weights and a bf16 norm of gradients.
"""
FIRST = (
    ("dpo", "FSDP2"), ("grpo", "FSDP2"), ("reward", "ZeRO-3"), ("orpo", "DDP"), ("medusa-2", "FSDP2"),
    ("experts", "ZeRO-2"),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense model, a mixture of experts and a teacher, in fp32."""
    folder = tmp_path_factory.mktemp("checkpoints")
    shared: dict[str, Any] = {"dtype": torch.float32, "max_position_embeddings": 256}
    save(folder / "dense", **shared)
    save(folder / "experts", model_type="qwen3_moe", **shared, **EXPERTS)
    save(folder / "teacher", num_hidden_layers=1, **shared)
    return folder


@pytest.fixture
def recipe_for(here: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes one.yaml, a run of a feature of the table with four samples per step, or as `train` says."""
    (here / "text.txt").write_text(words(400), encoding="utf-8")
    rewards = "def short(completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
    (here / "my_rewards.py").write_text(rewards, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    shutil.copytree(checkpoints / "teacher", here / "teacher")

    def write(feature: Feature, **changes: Any) -> Path:
        sections = {name: dict(values) for name, values in feature.sections.items()}
        rows, text = {"source": "toy-answers", "sequence_length": 192, "max_text_mib": 0.01}, {"source": "text.txt"}
        has_rows = "objective" in sections.get("train", {})
        need("trl" if has_rows else None)
        need("bitsandbytes" if sections.get("lora", {}).get("quantize") else None)
        sections["model"] = {"name": str(checkpoints / ("experts" if feature.experts else "dense"))}
        sections["data"] = rows if has_rows else {**text, "sequence_length": 32, "eval_fraction": 0.1}
        steps = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "device": "cpu"}
        sections["train"] = {**steps, **sections.get("train", {}), **changes}
        sections["output"] = {"name": "one", "sample_tokens": 0, "save_model": True}
        (here / "one.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
        return here / "one.yaml"

    return write


def in_two(
    here: Path, recipe: Path, engine: Engine, name: str, *, resume: bool = False, more: Sequence[str] = ()
) -> Path:
    """Train in two processes with two samples each per step; returns the run folder."""
    train_rank = TRAIN.get(engine.title, zero_rank)
    sets = ["train.batch_size=2", "train.gradient_accumulation=1", "sharding.gpus=2", *engine.keys, *more]

    def act(rank: int) -> None:
        save_model = run_module._save_model

        def look(run: Any, prepared: Any, built: Any, trainer: Any) -> None:
            sums = [weight.detach().double().sum().item() for weight in built.parameters()]
            (here / f"weights-{rank}.json").write_text(json.dumps(sums), encoding="utf-8")
            save_model(run, prepared, built, trainer)

        run_module._save_model = look  # in a copy of this process
        train_rank(recipe, [*sets, f"output.name={name}"], resume=resume)

    said = succeeds(act, here, 2)
    assert "MaterializedLogitsWarning" not in said, "the loss was not fused"
    if engine.title not in ("FSDP2", "ZeRO-3"):  # the others hold parts
        first, second = (json.loads((here / f"weights-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
        assert first == second, "the processes ended with different weights"
    return here / "runs" / name


def saved(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model, adapters and heads that a run saved."""
    files = [file for name in ("model", "adapters", "heads") for file in (run / name).glob("*.safetensors")]
    assert files
    return {f"{file.parent.name}/{key}": tensor for file in files for key, tensor in load_file(file).items()}


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The norm of the difference; a tensor that `other` lacks counts as zeros there."""
    parts = (tensor.double() - other[key].double() if key in other else tensor.double() for key, tensor in one.items())
    return float(torch.stack([part.square().sum() for part in parts]).sum().sqrt())


def numbers(run: Path, event: str) -> list[dict[str, float]]:
    """The records of an event, without times and memory."""
    kept = []
    for record in records(run, event):
        values = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        kept.append({name: value for name, value in values.items() if not any(word in name for word in VARIES)})
    return kept


def pair_id(pair: tuple[str, str]) -> str:
    return f"{pair[0]}-{pair[1]}"


PAIRS = [(feature.name, engine.title) for feature, engine in WORKING]


@forks
@pytest.mark.parametrize(
    "pair", proved_by(FIRST, PAIRS, "another engine of the same trainer, or another loss on the same engine", pair_id)
)
def test_two_processes_train_the_pair_as_one_process_does(pair, recipe_for, checkpoints, kept, tigon, here):
    """The same records, and a saved model that is whole and has the same weights."""
    feature, engine = FEATURE[pair[0]], ENGINE[pair[1]]
    need("deepspeed" if "ZeRO" in engine.title else None)
    halves = {"batch_size": 2, "gradient_accumulation": 2} if feature.name in BY_MICRO_BATCH else {}
    path = recipe_for(feature, **halves)

    def train_reference() -> None:
        if feature.name in SAMPLED:
            in_two(here, path, ENGINE["DDP"], "one")
        else:
            assert tigon("train", path).code == 0

    kept(feature.name, here, train_reference)
    one, two = here / "runs" / "one", in_two(here, path, engine, "two")
    assert [record["step"] for record in records(two, "train")] == [1, 2], "each record is written once"
    start = checkpoints / ("experts" if feature.experts else "dense") / "model.safetensors"
    got, want = saved(two), saved(one)
    moved = distance(want, {f"model/{key}": tensor for key, tensor in load_file(start).items()})
    loss_limit, metric_limit, weights_limit = LIMITS[feature.sections.get("train", {}).get("precision", "fp32")]
    assert losses(two) == pytest.approx(losses(one), rel=loss_limit)
    for event in ("train", "eval"):
        close = [pytest.approx(record, rel=metric_limit, abs=1e-4) for record in numbers(one, event)]
        assert numbers(two, event) == close, event
    assert {key: tensor.shape for key, tensor in got.items()} == {key: tensor.shape for key, tensor in want.items()}
    assert moved > 0 and distance(got, want) < weights_limit * moved


GENERATED = (("grpo", "FSDP2"), ("grpo", "ZeRO-3"), ("grpo-lora", "FSDP2"), ("grpo", "ZeRO-2"), ("distill", "FSDP2"),
             ("grpo-lora", "ZeRO-3"))  # fmt: skip


@forks
@pytest.mark.parametrize("pair", proved_by(GENERATED[:2], GENERATED, "the same engine, or a shared trainer", pair_id))
def test_generator_writes_under_an_engine_what_it_writes_with_whole_weights(pair, recipe_for, here):
    """The same completions as under DDP, with the same log-probabilities, and the steps learn the same."""
    feature, engine = FEATURE[pair[0]], ENGINE[pair[1]]
    need("deepspeed" if "ZeRO" in engine.title else None)
    more, path = ["post_training.generator=tigon"], recipe_for(feature)
    one, two = (in_two(here, path, each, each.title, more=more) for each in (ENGINE["DDP"], engine))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    rewards = [[(record["reward"], record["text"]) for record in records(run, "completion")] for run in (one, two)]
    assert rewards[0] == rewards[1] and (rewards[0] or feature.name == "distill")
    close = [pytest.approx(record, rel=1e-4, abs=1e-4) for record in numbers(one, "train")]
    assert numbers(two, "train") == close
    text = (two / "report.md").read_text(encoding="utf-8")
    assert "TRL's generate: tigon's generator" in text
    assert ("gathered once for all completions" in text) == (engine.title == "FSDP2")


@forks
def test_losses_of_trl_under_fsdp2_and_autocast_are_not_rounded_to_bf16(recipe_for, here):
    """Before the first update, model and reference agree, and DPO's loss is ln 2. In bf16 this would be 0.6914."""
    run = in_two(here, recipe_for(FEATURE["dpo"], precision="amp-bf16", steps=1), ENGINE["FSDP2"], "two")
    assert losses(run) == pytest.approx([math.log(2)], rel=1e-6)


RESUMED = (("dpo", "FSDP2"), ("grpo", "FSDP2"), ("grpo", "DDP"), ("distill", "FSDP2"), ("kto", "ZeRO-2"),
           ("dpo-lora", "FSDP2"), ("reward", "ZeRO-3"))  # fmt: skip


@forks
@pytest.mark.parametrize("pair", proved_by(RESUMED[:1], RESUMED, "TRL's trainers share tigon's checkpoints", pair_id))
def test_post_training_in_two_processes_resumes_with_the_losses_of_the_whole_run(pair, recipe_for, here):
    feature, engine = FEATURE[pair[0]], ENGINE[pair[1]]
    need("deepspeed" if "ZeRO" in engine.title else None)
    path = recipe_for(feature, steps=4, save_steps=2)
    in_two(here, path, engine, "two")
    cut_back(here / "runs" / "two", "cut", 4)
    in_two(here, path, engine, "cut", resume=True)
    assert losses(here / "runs" / "cut") == losses(here / "runs" / "two")
