"""The protocols: every objective satisfies them, and the trainer and the planner need nothing else of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from transformers import TrainerCallback

from tests.planner.planner_helpers import BARE, request_of
from tests.trainer.trainer_helpers import SMALL, rows, small_trainer
from tigon.data.packing import Sample
from tigon.medusa import HeadsSpec
from tigon.medusa import Objective as HeadLosses
from tigon.objectives.base import AddedModules, FinalSave, Objective, PlannedObjective, Reduce
from tigon.objectives.medusa import PlannedMedusa
from tigon.objectives.metric_sections import MetricColumn, MetricRow, MetricSection, section_of
from tigon.planner.estimate import estimate
from tigon.recipe.keys import Recipe, TrainConfig
from tigon.trainer.guarded import GuardedTrainer
from tigon.trainer.report import charts

PLANNED = (PlannedObjective(), PlannedMedusa(HeadsSpec(count=2), HeadLosses(stage=1)))


@pytest.mark.parametrize("planned", PLANNED, ids=lambda one: type(one).__name__)
def test_planned_objectives_have_a_hash_and_equal_only_their_own_kind(planned: PlannedObjective) -> None:
    assert len({planned, type(planned)(**vars(planned))}) == 1
    assert planned != PLANNED[planned is PLANNED[0]]


# --- an objective that the library does not know ----------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedScaled(PlannedObjective):
    own_parameters = "scale."

    def attach(self, model: Any) -> Any:
        model.scale = nn.Linear(64, 1024, bias=False, device="meta")
        return model

    def recipe_keys(self) -> Mapping[str, Any]:
        return {"train.seed": 7}

    def description(self) -> str:
        return "a scale"


class Scale(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """The trainer's callback of the scale."""

    learning_rates = {"scale": 3.0}
    saved_prefix = None

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["counted"].append(lambda: self.calls.append("counted"))

    def begin_evaluation(self, model: Any) -> None:
        self.calls.append("begin")

    def counted(self, model: Any) -> dict[str, Any]:
        return {"answer": 42}

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        self.calls.append(f"resume {counted['answer']}")

    def save_beside(self, model: Any, folder: Path) -> None:
        (folder / "scale.txt").write_text(str(float(model.scale.detach())))

    def load_beside(self, model: Any, folder: Path) -> None:
        self.calls.append(f"load {(folder / 'scale.txt').is_file()}")

    def save(self, built: Any, final: FinalSave) -> bool:
        raise NotImplementedError

    def sampled(self, built: Any, samples: Sequence[Sample], eos: int | None) -> dict[str, Any]:
        raise NotImplementedError


class Scaled(Objective):
    """The model's loss times a learned scale, which it logs and saves beside the model."""

    name = "scaled"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @property
    def added(self) -> AddedModules:
        return Scale(self.calls)

    def attach(self, built: Any) -> Any:
        built.scale = nn.Parameter(torch.ones(()))
        return built

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        self.calls.append("loss")
        return of_model() * model.scale

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        return {"scale": float(reduce(model.scale.detach()))}


SECTION = MetricSection(
    name="scaled", title="Scale", chart_text="the scale over steps", columns_text="the scale",
    columns=(MetricColumn(title="scale", axis="scale"),),
    rows=(MetricRow(title="the scale", label="scale", metrics=("scale",)),), tile="the scale",
)  # fmt: skip


def trainer_of(folder: Path, objective: Scaled, steps: int) -> GuardedTrainer:
    train = TrainConfig(steps=steps, batch_size=4, learning_rate=0.01, schedule="constant", log_steps=1, save_steps=1)
    return small_trainer(folder, Recipe(model=SMALL, train=train), objective, evaluate=rows(8))


def test_trainer_needs_only_the_members_of_an_objective(tmp_path: Path) -> None:
    objective = Scaled()
    trainer = trainer_of(tmp_path, objective, 2)
    trainer.train()
    logged = [record["scale"] for record in trainer.state.log_history if "loss" in record]
    assert len(logged) == 2 and logged[1] < logged[0] <= 1.0
    assert objective.calls == ["loss", "loss"]
    rates = {len(group["params"]): group["lr"] for group in trainer.optimizer.param_groups}
    assert rates.pop(1) == pytest.approx(0.03) and set(rates.values()) == {0.01}
    trainer.evaluate()
    assert trainer.state.log_history[-1]["scale"] == pytest.approx(float(trainer.model.scale.detach()))
    assert objective.calls == ["loss", "loss", "begin", "counted", "counted"], "in batches of four"
    saved = tmp_path / "checkpoints" / "checkpoint-2"
    assert float((saved / "scale.txt").read_text()) == pytest.approx(logged[1])

    again = Scaled()
    resumed = trainer_of(tmp_path, again, 3)
    resumed.train(resume_from_checkpoint=str(saved))
    assert again.calls == ["resume 42", "load True", "loss"]
    assert float(resumed.model.scale.detach()) < logged[1]


def test_an_objective_has_four_parts_and_facts() -> None:
    own = {name: value for name, value in vars(Objective).items() if not name.startswith("_")}
    methods = {name for name, value in own.items() if inspect.isfunction(value)}
    parts = {"rows", "with_head", "attach", "loss", "metrics", "planned"}
    assert methods == parts, "with_head and attach make the forward of the loss"


def test_report_draws_the_metrics_that_an_objective_declares() -> None:
    records = [
        {"event": "train", "step": step, "loss": 3.0, "scale": 1.0 / step, "tokens_per_s": 1.0, "memory_bytes": 1,
         "memory_peak_bytes": 1}
        for step in (1, 2)
    ]  # fmt: skip
    drawn = charts.draw(records, {"unigram_entropy": 2.0, "comparison": []}, SECTION)
    assert drawn.keys() == {"scaled", "throughput"}
    drawn = charts.draw(records, {"unigram_entropy": 2.0, "comparison": []}, section_of(Objective()))
    assert drawn.keys() == {"loss", "throughput"}


def test_planner_needs_only_the_members_of_an_objective() -> None:
    plain, scaled = (estimate(request_of(objective=one), gpu=BARE) for one in (PlannedObjective(), PlannedScaled()))
    more = scaled.components["weights"] - plain.components["weights"]
    assert more == 4 * 64 * 1024
