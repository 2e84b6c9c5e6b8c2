"""Training with heads: learning rates, evaluation by several processes, saving, the report, and the plan of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from forks import forks, in_forks
from tests.trainer.trainer_helpers import SMALL, rows, small_trainer
from tigon.medusa import HeadsSpec
from tigon.objectives.base import FinalSave
from tigon.objectives.medusa import MedusaTraining
from tigon.objectives.metric_sections import section_of
from tigon.recipe.keys import DataConfig, HeadsConfig, Recipe, TrainConfig
from tigon.trainer.distributed import launch
from tigon.trainer.guarded import GuardedTrainer, split_groups


def heads_of(recipe: Recipe) -> MedusaTraining:
    return MedusaTraining(recipe.model, recipe=recipe, spec=HeadsSpec(count=2, shared=True))


def with_heads(folder: Path, recipe: Recipe, held_out: Any = None) -> GuardedTrainer:
    """A trainer of a model with heads on it."""
    return small_trainer(folder, recipe, heads_of(recipe), evaluate=held_out)


def test_heads_have_their_own_learning_rate(tmp_path: Path) -> None:
    recipe_of = Recipe(
        model=SMALL, train=TrainConfig(steps=2, batch_size=4, learning_rate=0.01), heads=HeadsConfig(stage=2, count=2)
    )
    ours = with_heads(tmp_path, recipe_of)
    model = ours.model
    ours.create_optimizer()
    rates = {
        name: group["lr"]
        for group in ours.optimizer.param_groups
        for p in group["params"]
        for name, own in model.named_parameters()
        if own is p
    }
    assert rates.keys() == {name for name, _ in model.named_parameters()}
    assert {rate for name, rate in rates.items() if name.startswith("draft_heads.")} == {0.04}
    assert {rate for name, rate in rates.items() if not name.startswith("draft_heads.")} == {0.01}


def evaluate_as_rank(rank: int, folder: Path) -> None:
    """What one of two processes says of an evaluation whose three rows all fall to rank 0."""
    torch.distributed.init_process_group("gloo")
    recipe_of = Recipe(model=SMALL, train=TrainConfig(steps=1, batch_size=4), heads=HeadsConfig(stage=1, count=2))
    ours = with_heads(folder / str(rank), recipe_of, rows(3))
    ours.evaluate()
    (folder / f"{rank}.json").write_text(json.dumps(ours.state.log_history[-1]), encoding="utf-8")
    torch.distributed.barrier()


@forks
def test_process_without_sequences_to_evaluate_takes_part_in_evaluation(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    assert in_forks(lambda rank: evaluate_as_rank(rank, tmp_path), 2, said=said) == [0, 0], said.read_text()[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first == second and {"eval_loss", "head1_loss", "head2_top3"} <= first.keys()


def test_batch_that_another_process_could_not_evaluate_counts_once(tmp_path: Path, monkeypatch: Any) -> None:
    recipe_of = Recipe(model=SMALL, train=TrainConfig(steps=1, batch_size=8), heads=HeadsConfig(stage=1, count=2))
    ours = with_heads(tmp_path, recipe_of, rows())
    ours.evaluate()
    others = iter([0, 1])
    monkeypatch.setattr(launch, "all_gather_ints", lambda value, patience_s: [value, next(others, 0)])
    ours.evaluate()
    whole, again = (record for record in ours.state.log_history if "eval_loss" in record)
    assert ours.args.per_device_eval_batch_size == 4
    assert {"head1_loss", "head2_top3"} <= whole.keys() == again.keys()
    assert again == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_process_that_gets_no_weights_saves_nothing_without_an_error(stage: int, tmp_path: Path) -> None:
    """ZeRO-3 gathers them for the first process alone."""
    recipe_of = Recipe(model=SMALL, train=TrainConfig(steps=1, batch_size=4), heads=HeadsConfig(stage=stage, count=2))
    trainer = small_trainer(tmp_path, recipe_of)
    objective = heads_of(recipe_of)
    final = FinalSave(
        folder=tmp_path / "run", sharded=True, is_first=False, gathered_state=lambda: None,
        save_model=lambda: pytest.fail("sharded weights are saved as they were gathered"),
        save_state=lambda state: pytest.fail("only the first process saves"),
    )  # fmt: skip
    assert objective.added.save(objective.attach(trainer.model), final)
    assert not (tmp_path / "run").exists()


def test_split_parameter_group_keeps_its_weight_decay() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.AdamW([{"params": [a, b], "weight_decay": 0.5}, {"params": [c], "weight_decay": 0.0}], lr=1)
    split_groups(optimizer, {id(b)}, 3.0)
    found = [([id(p) for p in g["params"]], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [([id(a)], 1, 0.5), ([id(c)], 1, 0.0), ([id(b)], 3.0, 0.5)]


def test_prediction_of_a_recipe_includes_its_heads() -> None:
    from tigon.planner.gpus import find_gpu
    from tigon.trainer import model
    from tigon.trainer.guards import prediction

    gpu, peaks = find_gpu("h200"), {}
    for name, heads in (("none", {}), ("1", {"stage": 1}), ("2", {"stage": 2})):
        asked = Recipe(
            model=SMALL, data=DataConfig(sequence_length=64), train=TrainConfig(steps=1, batch_size=2),
            heads=HeadsConfig(output="separate", **heads),
        )  # fmt: skip
        config = model.load_config(asked.model)
        found = prediction.predict(asked, config, asked.settings(precision="bf16"), gpu, evaluated=False)
        peaks[name] = found.option.estimate.components["optimizer"]
    heads_alone = 2 * 2 * 3 * (512 * 32 + 32 * 32 + 32)  # two moments of 2 bytes, but for rounding and counters
    assert peaks["1"] == pytest.approx(heads_alone, rel=0.1)
    assert peaks["2"] - peaks["none"] == pytest.approx(heads_alone, rel=0.1)


@pytest.mark.parametrize("stage", [1, 2])
def test_report_shows_the_metrics_that_the_heads_log(stage: int, tmp_path: Path) -> None:
    recipe_of = Recipe(
        model=SMALL, train=TrainConfig(steps=1, batch_size=4, log_steps=1), heads=HeadsConfig(stage=stage, count=2)
    )
    ours = with_heads(tmp_path, recipe_of)
    ours.train()
    section = section_of(heads_of(recipe_of))
    logged = next(record for record in ours.state.log_history if "loss" in record)
    shown = {name for row in section.rows for name in row.metrics}
    assert shown == {name for name in logged if name.startswith(("head", "model"))}
    assert [row.label for row in section.rows if row.is_baseline] == (["model"] if stage == 2 else [])
    assert section.tile_metric == "head1_loss"
