"""Sequence classification: one label for each text, by a model of transformers with a classification head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tigon.data import labelled_rows
from tigon.data.document_table import Documents
from tigon.data.documents import BadRows
from tigon.data.labelled_rows import LabelCollator, LabelEncoder, LabelledRows
from tigon.data.packing import Collator
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import RecipeError, UsageError
from tigon.models.loading.classifier import SEQUENCE, as_classifier, labels_of, set_pad_id, task_of
from tigon.objectives.base import Objective, PlannedObjective, Reduce, Rows, TracedModels
from tigon.objectives.rules import classify as classify_rules
from tigon.recipe.keys import DataConfig, Recipe
from tigon.techniques.keys.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# B texts, T tokens, C labels.

UNREAD = ("a", "b")
"""The labels of a plan, and of a run before its rows are read. Their number hardly changes the memory."""


@dataclass(frozen=True)
class PlannedClassify(PlannedObjective):
    """A forward pass with the classification head, and the cross entropy of its labels."""

    next_token: ClassVar[bool] = False
    pads: ClassVar[bool] = True
    objective: str
    """The value of `train.objective`."""

    def attach(self, model: PreTrainedModel) -> Any:
        set_pad_id(model.config, 0)  # a run takes the tokenizer's
        return model

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        return {"input_ids": torch.empty(batch, seq, dtype=torch.int64)}

    def ignored_labels(self, batch: int) -> int:
        return 0

    def head(self, model: PreTrainedModel) -> Any:
        return head_of(model)

    def loss(self, models: TracedModels, inputs: dict[str, Tensor]) -> Tensor:
        logits = models.call(lambda: models.trained(**inputs)).logits.float()
        return F.cross_entropy(logits.flatten(0, -2), logits.new_zeros(logits.shape[:-1], dtype=torch.int64).flatten())

    def refusals(self, settings: Settings) -> tuple[str, ...]:
        return tuple(classify_rules.refusals(self.objective, settings))

    def recipe_keys(self) -> Mapping[str, Any]:
        return {"train.objective": self.objective}

    def notes(self) -> tuple[str, ...]:
        return (
            f"The head has {len(UNREAD)} labels. No GPU run of this objective has been compared with its plan yet.",
        )

    def description(self) -> str:
        return f"objective {self.objective}"


def head_of(model: PreTrainedModel) -> nn.Module:
    """The first module of a classification head: the linear layer of its scores, or the module that holds it.

    Raises:
        UsageError: The model has none under the names that transformers gives it.
    """
    for name in ("score", "classifier"):
        if isinstance(module := getattr(model, name, None), nn.Module):
            return module
    raise UsageError(f"{type(model).__name__} has no classification head called score or classifier")


@dataclass
class Classify(Objective):
    """Trains a classification head and the layers below it."""

    task: ClassVar[str] = SEQUENCE
    packs: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False
    recipe: Recipe = field(kw_only=True)
    labels: tuple[str, ...] = ()
    """The labels' names in the order of the model's outputs; known once the rows are read."""
    counts: dict[bool, Tensor] = field(default_factory=dict)
    """Whether it evaluates -> how often each label (row) was given as another (column), since the last record."""
    last: list[list[int]] | None = None
    """The counts of the last evaluation, over all processes."""

    @classmethod
    def file_name(cls) -> str:
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def config_for(cls, config: PreTrainedConfig) -> Any:
        if task_of(config) == cls.task:
            return config
        try:
            return as_classifier(config, cls.task, UNREAD)
        except UsageError as error:
            raise RecipeError(f"train.objective: {cls.file_name()}: {error}") from None

    @classmethod
    def of_recipe(
        cls, recipe: Recipe, config: PreTrainedConfig, shapes: Callable[[], Mapping[str, tuple[int, ...]]]
    ) -> Classify | None:
        if recipe.train.objective != cls.file_name():
            return None
        if recipe.lora.quantize and not any(name.startswith("score.") for name in shapes()):
            raise RecipeError(
                f"lora.quantize: transformers would keep the new head of {config.model_type} models in 4 bits, which "
                "cannot be trained; set lora.quantize: false"
            )
        own = labels_of(config) if task_of(config) == cls.task else UNREAD
        return cls(recipe.model, recipe=recipe, labels=() if own == UNREAD else own)

    @property
    def name(self) -> str:
        return self.file_name()

    @property
    def announcement(self) -> str:
        what = "text" if self.task == SEQUENCE else "word"
        return f"{self.name:<8} one of {len(self.labels)} labels per {what}: {labelled_rows.listed(self.labels)}"

    def rows(self, data: DataConfig) -> Rows:
        def encoder(tokenizer: Any, documents: Documents, vocab_size: int, bad: BadRows) -> LabelEncoder:
            self.labels = labelled_rows.label_names(documents, self.labels)
            cuts = data.too_long == "truncate"
            return LabelEncoder(tokenizer, self.labels, vocab_size, bad, data.sequence_length, cuts)

        def pack(encoded: Any) -> Any:
            return labelled_rows.samples(encoded, data.sequence_length, too_long=data.too_long)

        def collator(pad_id: int, flatten: bool) -> Collator:
            return LabelCollator(pad_id, packing=False)

        return Rows(layout=LabelledRows(self.task), pack=pack, collator=collator, encoder=encoder)

    def rows_line(self, encoded: Sequence[Any]) -> tuple[str, ...]:
        return (labelled_rows.counts_line(encoded, self.labels),)

    def with_labels(self, config: PreTrainedConfig, pad_id: int) -> Any:
        classified = as_classifier(config, self.task, self.labels)
        set_pad_id(classified, pad_id)
        return classified

    # --- loss and metrics --------------------------------------------------------------------------------------------

    @property
    def labels_part(self) -> Classify:
        return self

    def outputs_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """The cross entropy of the labels. Some models of transformers divide it by the micro-batch alone."""
        logits_C, numbers = _flat(outputs.logits.float(), labels)
        total = F.cross_entropy(logits_C, numbers, ignore_index=IGNORE_INDEX, reduction="sum")
        if torch.is_grad_enabled():
            self._count(logits_C, numbers, evaluates=False)
        return total / ((numbers != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch)

    def begin_evaluation(self) -> None:
        self.counts.pop(True, None)

    def evaluated(self, outputs: Any, labels: Tensor) -> None:
        self._count(*_flat(outputs.logits, labels), evaluates=True)

    def _count(self, logits_C: Tensor, numbers: Tensor, *, evaluates: bool) -> None:
        n_labels, counted = logits_C.shape[-1], (numbers != IGNORE_INDEX)
        places = (numbers.clamp_min(0) * n_labels + logits_C.detach().argmax(-1)).where(counted, n_labels**2)
        own = torch.bincount(places, minlength=n_labels**2 + 1)[:-1].view(n_labels, n_labels)
        self.counts[evaluates] = self.counts[evaluates] + own if evaluates in self.counts else own

    def metrics(self, model: PreTrainedModel, reduce: Reduce) -> dict[str, float]:
        evaluates = True in self.counts
        none = torch.zeros(len(self.labels), len(self.labels), dtype=torch.int64)
        counts = self.counts.pop(evaluates, none.to(next(model.parameters()).device))
        confusion = reduce(counts).tolist()
        if evaluates:
            self.last = confusion
        _, accuracy, macro_f1 = labelled_rows.scores(confusion)
        return {"accuracy": accuracy, "macro_f1": macro_f1} if accuracy == accuracy else {}

    def table(self) -> dict[str, Any] | None:
        return None if self.last is None else {"labels": list(self.labels), "confusion": self.last}

    def planned(self) -> PlannedObjective:
        return PlannedClassify(self.name)


def _flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, C) and numbers (N,) of all texts, or of all tokens."""
    return logits.flatten(0, -2), labels.flatten()


OBJECTIVE = Classify
