"""The bases of training objectives: one for the trainer, one for the planner, and the dataclasses that they exchange.

The trainer and the planner import this package. No objective imports either of them; an objective gets what it needs as
arguments. A run has one objective object. It keeps no reference to a model, because a comparison builds several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from tigon.data.document_table import Documents
from tigon.data.documents import BadRows, RowReader
from tigon.data.packing import Collator, Packed, Sample, pack
from tigon.data.preferences import RowFormat
from tigon.data.tokenizer import Encoded
from tigon.models.seams.head.loss import without_logits
from tigon.objectives.post_training.reward_entries import RewardEntry
from tigon.recipe.keys import DataConfig, ModelConfig, Recipe, TrainConfig
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all processes; all of them call it."""


@dataclass(frozen=True, kw_only=True)
class BaseTraining:
    """Ordinary training of a preset before the run, with the next token's loss, into `base/` of the run folder."""

    train: TrainConfig
    makes_teacher: bool = False
    """Whether its model is the teacher; otherwise the run starts from it."""

    def trained(self, model: ModelConfig, run: Path) -> ModelConfig:
        """The `model` section of its result; the given one if the training is not complete."""
        base = run / "base"
        return replace(model, name=str(base), config=None) if (base / "config.json").is_file() else model


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
    shared_prefix: bool = False
    """Whether sequences that begin alike go through the model with one copy of the beginning."""
    rewards: tuple[RewardEntry, ...] = ()
    """The reward functions."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, as `module:function`."""
    environment: str | None = None
    """The class of TRL's environments, as `module:Class`."""

    @property
    def scores(self) -> bool:
        """Whether the trainer has completions scored, so that a sample is a completion."""
        return bool(self.rewards) or self.environment is not None


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model that a run holds beside the one that it trains: a reference or a teacher."""

    name: str
    """The model's name, for messages."""
    config: PreTrainedConfig
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
    per_prompt: int
    """Completions of a prompt."""
    generator: str
    """What writes them, as `post_training.generator` says."""
    other_writer: str = ""
    """What writes them instead of the model's `generate`, such as vLLM; empty if `generate` does."""


@dataclass(frozen=True)
class PlannedObjective:
    """What the planner needs to know about an objective. The defaults are those of the next token's loss.

    Objects are hashable, and two are equal if their traces are: the planner then traces once for both.
    """

    next_token: ClassVar[bool] = True
    """Whether the loss is that of the next token, of whose logits a fused loss holds a chunk."""
    pads: ClassVar[bool] = False
    """Whether samples are padded to one length, so that attention needs a mask."""
    reads_values: ClassVar[bool] = False
    """Whether the model reads the values of its integer inputs, such as the places of images."""
    reads_whole_weights: ClassVar[bool] = False
    """Whether `attach` reads weights of the model, so that ZeRO-3 must not partition them while they are loaded."""
    own_parameters: ClassVar[str | None] = None
    """The prefix of the names of the parameters that `attach` adds; None if it adds none.

    By this prefix the planner tells them from the model's own weights."""

    @property
    def least_batch(self) -> int:
        """The fewest samples of a micro-batch. The search for the largest batch tries multiples of it."""
        return 1

    @property
    def most_batch(self) -> int:
        """The most samples of a micro-batch that the planner traces."""
        return 1 << 16

    def attach(self, model: PreTrainedModel) -> Any:
        """Add the objective's modules to a model without weights, and return the model that is trained."""
        return model

    def frozen_models(self, trained: FrozenModel, settings: Settings) -> tuple[FrozenModel, ...]:
        """The models that the run holds beside the trained one, such as a reference or a teacher.

        trained: the trained model's name and config, which a reference shares.
        """
        return ()

    def sequences(self, batch: int) -> int:
        """How many sequences a micro-batch of `batch` samples has, such as two for a pair of answers."""
        return batch

    def sequence_tokens(self, seq: int) -> int:
        """The most tokens of a sequence, if `data.sequence_length` is `seq`."""
        return seq

    def inputs(self, batch: int, seq: int) -> dict[str, torch.Tensor]:
        """The inputs of a micro-batch of `batch` samples of `seq` tokens. The planner calls it under a fake mode."""
        return {name: torch.empty(batch, seq, dtype=torch.int64) for name in ("input_ids", "labels")}

    def ignored_labels(self, batch: int) -> int:
        """How many labels of a micro-batch are ignored at least."""
        return batch

    def loss(self, models: TracedModels, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch, by the forward passes that the run makes. Called under a fake mode."""
        count = torch.empty((), dtype=torch.int64)
        outputs = models.call(lambda: models.trained(**inputs, num_items_in_batch=count, use_cache=False))
        return outputs.loss  # type: ignore[no-any-return]

    def head(self, model: PreTrainedModel) -> Any:
        """The module, usually `lm_head`, at whose call the phase `loss` of a forward pass begins.

        model: the trained model, or one of the frozen models.
        """
        return model.get_output_embeddings()

    def evaluation_passes(self, model: PreTrainedModel) -> tuple[AbstractContextManager[Any], ...]:
        """Evaluation calls `loss` for a batch once inside each of these contexts."""
        return (without_logits(),)

    def generation(self, seq: int) -> Generation | None:
        """The completions that the run writes itself, if `data.sequence_length` is `seq`; None: it writes none."""
        return None

    def batch_refusal(self, batch: int) -> str | None:
        """The reason why a micro-batch cannot have `batch` samples, in one sentence; None if it can."""
        return None

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        """The reasons why no run with these techniques can train this objective, one sentence each."""
        return ()

    def recipe_keys(self) -> Mapping[str, Any]:
        """Dotted recipe keys -> values that set the objective."""
        return {}

    def notes(self) -> tuple[str, ...]:
        """The estimate's assumptions and omissions, one sentence each."""
        return ()

    def description(self) -> str:
        """The objective's part of the line that describes a planned run; empty for the next token's loss."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How an objective reads the rows of `data.source`, and makes batches of them."""

    layout: str | RowReader
    """The format of the rows, or their reader."""
    pack: Callable[[Sequence[Encoded]], Packed]
    """Makes the samples of encoded documents."""
    collator: Callable[[int, bool], Collator]
    """Makes the function that makes a batch of samples. Called with the id that fills samples up to one length, and
    whether a batch is one long packed row, as flash attention takes it."""
    load_processor: Callable[[], Any] = lambda: None
    """Loads the processor of a model that reads more than text; None: its tokenizer suffices."""
    encoder: Callable[[Any, Documents, int, BadRows], RowEncoder] | None = None
    """Makes what turns rows into tokens, of the tokenizer, the rows to train on, the model's vocabulary and the policy
    for rows that cannot be used; None: rows are text or chats to continue."""


class RowEncoder(Protocol):
    """Turns rows of an objective's own layout into tokens."""

    def encode(self, documents: Documents) -> Sequence[Encoded]:
        """The rows as tokens. Raises DataError if a row cannot be used and the policy does not skip it."""
        ...


class AddedModules(Protocol):
    """The modules that an objective adds to a model: a TrainerCallback with the members below.

    Its event `on_prediction_step` also gets `inputs`, `precision` and `counted` of a batch of an evaluation; see
    trainer/evaluation/token_mean.py.
    """

    @property
    def learning_rates(self) -> Mapping[str, float]:
        """Prefixes of parameter names -> factors of the learning rate."""
        ...

    @property
    def saved_prefix(self) -> str | None:
        """A checkpoint holds only the weights whose names begin with it; None: all of them."""
        ...

    def begin_evaluation(self, model: PreTrainedModel) -> None:
        """Forget what an earlier evaluation has summed up that ended without metrics."""
        ...

    def counted(self, model: PreTrainedModel) -> dict[str, Any]:
        """What this process has summed up since the last record; a checkpoint between two records saves it."""
        ...

    def resume_counting(self, model: PreTrainedModel, counted: Mapping[str, Any], device: torch.device) -> None:
        """Restore, in a resumed run, the sums that `counted` returned."""
        ...

    def save_beside(self, model: PreTrainedModel, folder: Path) -> None:
        """Write the weights that a checkpoint would leave out."""
        ...

    def load_beside(self, model: PreTrainedModel, folder: Path) -> None:
        """Read the files of `save_beside`, if the checkpoint has them."""
        ...

    def save(self, built: PreTrainedModel, final: FinalSave) -> bool:
        """Save the final weights. Every process calls it. Returns whether a model was written."""
        ...

    def sampled(self, built: PreTrainedModel, samples: Sequence[Sample], eos: int | None) -> dict[str, Any]:
        """Decode from prompts of eval samples, for the summary's `decoded`; `line` describes the result."""
        ...


class LabelsPart(Protocol):
    """What an objective does that trains labels, by the outputs of a model with a classification head."""

    def outputs_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss of the model's outputs, as the Trainer's `compute_loss_func`.

        The sum of the labels' losses is divided by `num_items_in_batch`.
        """
        ...

    def begin_evaluation(self) -> None:
        """Forget what an earlier evaluation has counted that ended without metrics."""
        ...

    def evaluated(self, outputs: Any, labels: torch.Tensor) -> None:
        """Count a batch of an evaluation."""
        ...

    def with_labels(self, config: PreTrainedConfig, pad_id: int) -> Any:
        """The config of the trained model, after the rows are read. pad_id: the token that fills samples."""
        ...

    def rows_line(self, encoded: Sequence[Any]) -> tuple[str, ...]:
        """A line for the console about the rows to train on."""
        ...

    def table(self) -> dict[str, Any] | None:
        """The labels and the confusion table of the last evaluation, as JSON; None before one."""
        ...


@dataclass
class Objective:
    """The loss that a run minimises: its rows, its forward and loss, its metrics, and its plan.

    The defaults are those of an ordinary run: the model's own loss, and nothing added to model, records or files.
    """

    packs: ClassVar[bool] = True
    """Whether a sample may hold several documents."""
    writes_text: ClassVar[bool] = True
    """Whether the trained model continues text, so that the run can show a sample."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The recipe's model."""

    @classmethod
    def config_for(cls, config: PreTrainedConfig) -> Any:
        """The config of the model that is trained, before the rows are read. config: that of the recipe's model.

        Raises:
            RecipeError: The objective does not fit the model.
        """
        return config

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> Objective | None:
        """Make the objective if the recipe sets it; return None otherwise.

        Args:
            recipe: The recipe of the run.
            config: The model's config.
            shapes: Returns the shapes of the model's parameters by name; called only if needed.

        Raises:
            RecipeError: The objective does not fit the model.
        """
        return cls(recipe.model)

    # --- facts -------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """A short name. A line for the console about the objective begins with it."""
        return "causal LM"

    @property
    def announcement(self) -> str | None:
        """One line for the console before training, or None."""
        return None

    @property
    def trl(self) -> TrlTraining | None:
        """The trainer of TRL that carries out the run; None: tigon's own."""
        return None

    @property
    def base(self) -> BaseTraining | None:
        """The ordinary training of a preset before the run, or None."""
        return None

    @property
    def added(self) -> AddedModules | None:
        """The modules that `attach` adds, for the trainer; None if it adds none."""
        return None

    @property
    def labels_part(self) -> LabelsPart | None:
        """How labels are trained in place of the next token; None for any other objective."""
        return None

    # --- the four parts ----------------------------------------------------------------------------------------------

    def rows(self, data: DataConfig) -> Rows:
        """How the rows of the recipe's `data` section are read and packed."""
        packed = partial(
            pack,
            length=data.sequence_length,
            packing=data.packs,
            cross_document=data.cross_document_attention,
            too_long=data.too_long,
        )

        def collator(pad_id: int, flatten: bool) -> Collator:
            return Collator(pad_id, data.packs, flatten, data.cross_document_attention)

        return Rows(layout=data.format, pack=packed, collator=collator)

    def with_head(self, built: PreTrainedModel) -> Any:
        """Return `built`, patched but without its techniques, with the head that the objective trains.

        Adapters are added afterwards, so that PEFT saves a new head beside them.
        """
        return built

    def attach(self, built: PreTrainedModel) -> Any:
        """Return the model whose forward is trained: `built`, patched and with its techniques, and added modules."""
        return built

    def loss(self, model: PreTrainedModel, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        """The loss of a micro-batch.

        Args:
            model: The trained model, as Accelerate has wrapped it.
            inputs: The keyword arguments of its forward.
            of_model: Computes the loss by the model's own forward, as the Trainer of transformers does.
        """
        return of_model()

    def metrics(self, model: PreTrainedModel, reduce: Reduce) -> dict[str, float]:
        """More metrics for a record: of the evaluation that has ended, or else of the steps since the last record."""
        return {}

    def planned(self) -> PlannedObjective:
        """The objective as the planner traces it."""
        return PlannedObjective()
