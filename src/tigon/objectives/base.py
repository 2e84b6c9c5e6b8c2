"""The protocols of a training objective: one for the trainer, one for the planner, and the dataclasses they exchange.

The trainer and the planner import this package. No objective imports either of them; an objective gets what it needs as
arguments. A run has one objective object. It keeps no reference to a model, because a comparison builds several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tigon.data.documents import RowReader
from tigon.data.packing import Collator, Packed, Sample
from tigon.data.preferences import RowFormat
from tigon.data.tokenizer import Encoded
from tigon.recipe.keys import DataConfig, ModelConfig, Recipe, TrainConfig
from tigon.techniques.records.choices import Choices

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all processes; all of them call it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A training before the run, with the next token's loss. The objective starts from its model."""

    train: TrainConfig
    choices: Choices
    folder: Path
    """The model is written here when the phase is complete."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The progress of training before a micro-batch."""

    done: int
    """Completed optimizer steps."""
    total: int
    """Optimizer steps of the whole run."""
    log_every: int
    """Optimizer steps between two records of the training log."""


@dataclass(frozen=True, kw_only=True)
class FinalSave:
    """How the trained model of a run is saved. The functions are collective: every process calls them, or none does."""

    folder: Path
    """The run folder."""
    sharded: bool
    """Whether each process holds only a part of each weight, as under ZeRO-3 and FSDP2."""
    is_first: bool
    gathered_state: Callable[[], dict[str, torch.Tensor] | None]
    """Gathers the full state dict of sharded weights; returns None in processes that do not receive it."""
    save_model: Callable[..., None]
    """Writes `model/` for `from_pretrained`; with adapters `adapters/`, and `model/` only if the recipe merges them or
    the caller passes `merges=True`."""
    save_state: Callable[[dict[str, torch.Tensor]], None]
    """Writes a gathered state dict as `model/`; the main process alone calls it."""


@dataclass(frozen=True, kw_only=True)
class MetricColumn:
    """A kind of metric: a column of the report's table and, if it has an axis, a panel of its chart."""

    title: str
    axis: str | None = None
    """The label of the panel's y axis; None: the chart leaves the column out."""
    is_share: bool = False
    """Its values are fractions, shown in percent."""
    is_nats: bool = True
    """Its values, unless fractions, are losses in nats per token. The chart then shows the unigram entropy too."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """A row of the report's table, and a line in each panel of its chart."""

    title: str
    """In the table."""
    label: str
    """In the chart's legend."""
    metrics: tuple[str, ...]
    """The metric's name in the records of metrics.jsonl, for each column."""
    is_baseline: bool = False
    """Drawn in the chart's muted colour."""


@dataclass(frozen=True, kw_only=True)
class MetricSection:
    """The report's section about an objective's own metrics. It stands in place of the chart of the total loss."""

    name: str
    """The name of the chart's file."""
    title: str
    chart_text: str
    """A description of the chart, for readers who do not see it."""
    columns_text: str
    """A sentence about the columns."""
    columns: tuple[MetricColumn, ...]
    rows: tuple[MetricRow, ...]
    tile: str
    """The label of a box at the top of the report. The box shows the first and the last value of one metric: the first
    metric of the first row that is not a baseline."""

    @property
    def tile_metric(self) -> str:
        return next(row.metrics[0] for row in self.rows if not row.is_baseline)

    @property
    def progress(self) -> tuple[tuple[str, str, bool], ...]:
        """What the terminal shows during training beside the loss, as (title, metric, whether it is a fraction).

        The first `PROGRESS_METRICS` metrics of a section with one row, otherwise the metric of the tile.
        """
        if len(self.rows) > 1:
            return ((self.tile, self.tile_metric, False),)
        pairs = zip(self.columns, self.rows[0].metrics, strict=True)
        own = [(column.title, name, column.is_share) for column, name in pairs if name != "loss"]
        return tuple(own[:PROGRESS_METRICS])


PROGRESS_METRICS = 2
"""A line of the terminal has room for two metrics beside loss, speed, memory and remaining time."""


@dataclass(frozen=True, kw_only=True)
class TrlTraining:
    """The trainer of TRL that carries out an objective, and what it takes besides a model, rows and a tokenizer."""

    package: str
    """The package of its classes, such as `trl` or `trl.experimental.orpo`."""
    trainer: str
    config: str
    rows: RowFormat
    options: Mapping[str, Any]
    """Arguments of the config besides those of the recipe's `train` section."""
    takes_reference: bool = False
    """Whether it takes the model before training as `ref_model`, unless adapters are trained."""
    teacher: Callable[[Path], ModelConfig] | None = None
    """Called with the run folder; returns the model to learn from."""
    rewards: tuple[str, ...] = ()
    """Reward functions as `module:function`."""
    writes_text: bool = True
    """Whether the trained model continues text, so that the run can show a sample."""


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model that a run holds beside the one that it trains: a reference or a teacher."""

    name: str
    """The model's name, for messages."""
    config: Any
    """Its transformers config."""


@dataclass(frozen=True, kw_only=True)
class TracedModels:
    """The models of a trace, and how the trainer calls them."""

    trained: Any
    frozen: tuple[Any, ...]
    """The models of `PlannedObjective.frozen_models`, in their order."""
    call: Callable[[Callable[[], Any]], Any]
    """Runs one forward pass as Accelerate wraps a model: under autocast, with 16-bit logits converted to fp32."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The completions that the trained model writes before the micro-batches of a step, one for every sample."""

    prompt_tokens: int
    """Most tokens of a prompt."""
    new_tokens: int
    """Most tokens of a completion."""


class PlannedObjective(Protocol):
    """The facts that the planner needs about an objective.

    Objects are hashable, and two are equal if their traces are: the planner then traces once for both.
    """

    @property
    def next_token(self) -> bool:
        """Whether the loss is that of the next token, of whose logits a fused loss holds a chunk."""
        ...

    @property
    def pads(self) -> bool:
        """Whether samples are padded to one length, so that attention needs a mask."""
        ...

    @property
    def reads_values(self) -> bool:
        """Whether the model reads the values of its integer inputs, such as the places of images."""
        ...

    @property
    def least_batch(self) -> int:
        """The fewest samples of a micro-batch. The search for the largest batch tries multiples of it."""
        ...

    @property
    def most_batch(self) -> int:
        """The most samples of a micro-batch that the planner traces."""
        ...

    @property
    def reads_whole_weights(self) -> bool:
        """Whether the run loads whole weights before ZeRO-3 partitions them; see `Objective.reads_whole_weights`."""
        ...

    @property
    def own_parameters(self) -> str | None:
        """The prefix of the names of the parameters that `attach` adds; None if it adds none.

        By this prefix the planner tells them from the model's own weights.
        """
        ...

    def attach(self, model: Any) -> Any:
        """Add the objective's modules to a model without weights, and return the model that is trained."""
        ...

    def frozen_models(self, trained: FrozenModel, choices: Choices) -> tuple[FrozenModel, ...]:
        """The models that the run holds beside the trained one, such as a reference or a teacher.

        trained: the trained model's name and config, which a reference shares.
        """
        ...

    def sequences(self, batch: int) -> int:
        """How many sequences a micro-batch of `batch` samples has, such as two for a pair of answers."""
        ...

    def sequence_tokens(self, seq: int) -> int:
        """The most tokens of a sequence, if `data.sequence_length` is `seq`."""
        ...

    def inputs(self, batch: int, seq: int) -> dict[str, torch.Tensor]:
        """The inputs of a micro-batch of `batch` samples of `seq` tokens. The planner calls it under a fake mode."""
        ...

    def ignored_labels(self, batch: int) -> int:
        """How many labels of a micro-batch are ignored at least."""
        ...

    def loss(self, models: TracedModels, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, by the forward passes that the run makes. Called under a fake mode."""
        ...

    def head(self, model: Any) -> Any:
        """The module, usually `lm_head`, at whose call the phase `loss` of a forward pass begins.

        model: the trained model, or one of the frozen models.
        """
        ...

    def evaluation_passes(self, model: Any) -> tuple[AbstractContextManager[Any], ...]:
        """Evaluation calls `loss` for a batch once inside each of these contexts."""
        ...

    def generation(self, seq: int) -> Generation | None:
        """The completions that the run writes itself, if `data.sequence_length` is `seq`; None: it writes none."""
        ...

    def batch_refusal(self, batch: int) -> str | None:
        """The reason why a micro-batch cannot have `batch` samples, in one sentence; None if it can."""
        ...

    def refusals(self, choices: Choices) -> tuple[str, ...]:
        """The reasons why no run with these techniques can train this objective, one sentence each."""
        ...

    def recipe_keys(self) -> Mapping[str, Any]:
        """Dotted recipe keys -> values that set the objective."""
        ...

    def notes(self) -> tuple[str, ...]:
        """The estimate's assumptions and omissions, one sentence each."""
        ...

    def description(self) -> str:
        """The objective's part of the line that describes a planned run; empty for causal language modelling."""
        ...


class Objective(Protocol):
    """The loss that a run minimises, and what depends on it: samples, modules, optimizer groups, metrics, files."""

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: Any, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> Objective | None:
        """Make the objective if the recipe sets it; return None otherwise.

        Args:
            recipe: The recipe of the run.
            config: The model's config.
            shapes: Returns the shapes of the model's parameters by name; called only if needed.

        Raises:
            RecipeError: The objective does not fit the model.
        """
        ...

    @property
    def name(self) -> str:
        """A short name. A line for the console about the objective begins with it."""
        ...

    @property
    def trl(self) -> TrlTraining | None:
        """The trainer of TRL that carries out the run; None: tigon's own trainer, which calls the methods below."""
        ...

    # --- before there is a model -------------------------------------------------------------------------------------

    @property
    def reads_whole_weights(self) -> bool:
        """Whether `attach` reads weights of the model, so ZeRO-3 must not partition them while they are loaded."""
        ...

    @property
    def reads_plain_head(self) -> bool:
        """Whether the loss multiplies with the weight of `lm_head` itself, which would leave out an adapter on it."""
        ...

    def planned(self) -> PlannedObjective:
        """The objective as the planner traces it."""
        ...

    def announcement(self) -> str | None:
        """One line for the console before training, or None."""
        ...

    def no_sample_line(self) -> str:
        """Names what the run does not show with sharded weights. The console adds `: the weights are sharded`."""
        ...

    def phase(self, choices: Choices, run: Path) -> Phase | None:
        """The phase before the run; None if there is none, or if it is complete (a resumed run)."""
        ...

    def model(self, run: Path) -> ModelConfig:
        """The `model` section to load: the recipe's, or that of the model which `phase` trained.

        run: the run folder.
        """
        ...

    def attach(self, built: Any) -> Any:
        """Add the objective's modules to `built`, and return it. `built` is patched and has its techniques."""
        ...

    # --- data --------------------------------------------------------------------------------------------------------

    def rows(self, data: DataConfig) -> str | RowReader:
        """The format of the rows, or their reader."""
        ...

    def load_processor(self) -> Any:
        """The processor of a model that reads more than text; None: its tokenizer suffices.

        Raises:
            RecipeError: The model has none.
        """
        ...

    def samples(self, encoded: Sequence[Encoded], data: DataConfig) -> Packed:
        """Make the training samples, or those for evaluation, of encoded documents."""
        ...

    def collator(self, data: DataConfig, *, pad_id: int, flatten: bool) -> Collator:
        """The function that makes a batch of samples.

        Args:
            data: The recipe's `data` section.
            pad_id: The id that fills samples up to one length.
            flatten: Whether a batch is one long packed row, as flash attention takes it.
        """
        ...

    # --- training ----------------------------------------------------------------------------------------------------

    def group(self, model: Any, optimizer: Any) -> None:
        """Change the parameter groups of a new optimizer, for example to give new modules their own learning rate."""
        ...

    def begin_step(self, model: Any, step: Step) -> None:
        """Called before each micro-batch."""
        ...

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        """The loss of a micro-batch.

        Args:
            model: The trained model, as Accelerate has wrapped it.
            inputs: The keyword arguments of its forward.
            of_model: Computes the loss by the model's own forward, as the Trainer of transformers does.
        """
        ...

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        """More metrics for the training log, over the steps since the last log."""
        ...

    def counted(self, model: Any) -> dict[str, Any]:
        """What `metrics` has summed up in this process since the last log; a checkpoint between two logs saves it."""
        ...

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        """Restore, in a resumed run, the sums that `counted` returned."""
        ...

    # --- evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Called before the first batch of an evaluation; the sums for `evaluation_metrics` begin at 0."""
        ...

    def evaluation_sums(
        self, model: Any, inputs: Mapping[str, Any], counts: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """Returns (sum of the losses, number of target tokens) of a batch in fp64.

        The result stays on the device. The host must not wait for it: the wait would not end if another process has
        run out of memory in a collective forward pass.

        Args:
            model: The trained model.
            inputs: The keyword arguments of its forward.
            counts: False for a process without samples left, which only takes part in gathering weights. The result
                is then 0.
            precision: Makes the autocast context of a forward pass.
        """
        ...

    def count_batch(self) -> None:
        """Add the batch of the last `evaluation_sums` to the sums for `evaluation_metrics`.

        Not called for a batch in which a process ran out of memory: all processes evaluate it again, in smaller parts.
        """
        ...

    def evaluation_metrics(self, reduce: Reduce) -> dict[str, float]:
        """More metrics for the evaluation log."""
        ...

    def metric_section(self) -> MetricSection | None:
        """How the report shows the objective's own metrics; None: it draws the training loss and the eval loss."""
        ...

    # --- files -------------------------------------------------------------------------------------------------------

    @property
    def saves_all(self) -> bool:
        """Whether a checkpoint holds all weights of the model; otherwise those of `checkpoint_state`."""
        ...

    def checkpoint_state(self, model: Any, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """The weights that a checkpoint holds; None: all weights of the model.

        state: the state dict that was gathered from sharded weights; None if the model's weights are not sharded.
        """
        ...

    def save_beside(self, model: Any, folder: Path) -> None:
        """Write the objective's own files of a checkpoint."""
        ...

    def load_beside(self, model: Any, folder: Path) -> None:
        """Read the files of `save_beside`, if the checkpoint has them."""
        ...

    def save(self, built: Any, final: FinalSave) -> bool:
        """Save the final weights. Every process calls it. Returns whether a model was written."""
        ...

    # --- after training ----------------------------------------------------------------------------------------------

    def sampled(self, built: Any, samples: Sequence[Sample], eos: int | None) -> dict[str, Any] | None:
        """Decode from prompts of eval samples, for the summary's `decoded`; None if the objective decodes nothing."""
        ...

    def sampled_line(self, decoded: Mapping[str, Any]) -> str:
        """One line for the console and the report about the result of `sampled`, without the objective's name."""
        ...
