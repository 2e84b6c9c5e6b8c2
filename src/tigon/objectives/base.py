"""The protocol of an objective, and what the trainer hands to it.

The trainer imports this package and no objective imports the trainer: whatever an objective needs of a run comes as an
argument. One object serves one training; of a model it keeps nothing, as a comparison builds several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tigon.data.packing import Row
from tigon.recipe.keys import ModelConfig, TrainConfig
from tigon.techniques.choices import Choices

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all processes; all of them call it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Ordinary training that makes the model which the objective starts from."""

    train: TrainConfig
    choices: Choices
    folder: Path
    """Gets the model, once it is complete."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where training is before a micro-batch."""

    done: int
    """Optimizer steps taken."""
    total: int
    log_every: int


@dataclass(frozen=True, kw_only=True)
class FinalSave:
    """How the trained model of a run is saved. Every process calls each of these functions, or none does."""

    folder: Path
    """The run's."""
    sharded: bool
    """Whether the weights are divided among processes."""
    is_first: bool
    gathered_state: Callable[[], dict[str, torch.Tensor] | None]
    """Of sharded weights the whole; None in processes that do not get it."""
    save_model: Callable[[], None]
    """Writes `model/` as transformers loads it, adapters merged."""


class Objective(Protocol):
    """What a run minimises, and what belongs to it: on the model, in the optimizer, in records, files and samples."""

    # --- before there is a model -------------------------------------------------------------------------------------

    @property
    def reads_whole_weights(self) -> bool:
        """Whether `put_on` reads weights of the model, so that they are not loaded into an engine's partitions."""
        ...

    def attachment(self) -> Any:
        """What the planner puts on the model that it traces (`planner.request.Heads`); None: nothing."""
        ...

    def announcement(self) -> str | None:
        """A line for the console before training."""
        ...

    def no_sample_line(self) -> str:
        """What is not drawn where weights are sharded."""
        ...

    def phase(self, choices: Choices, run: Path) -> Phase | None:
        """Training that comes first; None where there is none, or it is done (a resumed run)."""
        ...

    def model(self, run: Path) -> ModelConfig:
        """Where the model comes from: the recipe's, or what `phase` has made. run: the run folder."""
        ...

    def put_on(self, built: Any) -> Any:
        """`built`, patched and with its techniques, with what the objective adds to it."""
        ...

    # --- training ----------------------------------------------------------------------------------------------------

    def group(self, model: Any, optimizer: Any) -> None:
        """Change the groups of a new optimizer."""
        ...

    def begin_step(self, model: Any, step: Step) -> None:
        """Before each micro-batch."""
        ...

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        """The loss of a micro-batch. of_model: computes that of the model's own forward pass, as transformers does."""
        ...

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        """What a record of training says beside the loss, of the steps since the last record."""
        ...

    def counted(self, model: Any) -> dict[str, Any]:
        """What has been summed since the last record, in this process, for a checkpoint between two records."""
        ...

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `counted` returned."""
        ...

    # --- evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None: ...

    def evaluation_sums(
        self, model: Any, inputs: Mapping[str, Any], counts: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """(sum of the losses, learned tokens) of a batch, in fp64; zeros where it does not count. precision: gives the
        context of a forward pass.

        On the device, and not waited for: where another process has run out of memory in a pass that takes all, this
        one's would never end.
        """
        ...

    def count_batch(self) -> None:
        """The batch that was evaluated last has fit everywhere, and is not tried again."""
        ...

    def evaluation_metrics(self, reduce: Reduce) -> dict[str, float]:
        """What a record of evaluation says beside the loss."""
        ...

    # --- files -------------------------------------------------------------------------------------------------------

    def checkpoint_state(self, model: Any, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """What a checkpoint holds of the weights. state: gathered already; None: they are the model's."""
        ...

    def save_beside(self, model: Any, folder: Path) -> None:
        """Write what a checkpoint has beside them."""
        ...

    def load_beside(self, model: Any, folder: Path) -> None:
        """Read what `save_beside` wrote, if it is there."""
        ...

    def save(self, built: Any, final: FinalSave) -> bool:
        """The final weights. Every process calls it. Returns whether a model was written."""
        ...

    # --- after training ----------------------------------------------------------------------------------------------

    def sampled(self, built: Any, rows: Sequence[Row], eos: int | None) -> dict[str, Any] | None:
        """What is decoded at the end beside the text sample, for the summary's `decoded`; None: nothing."""
        ...

    def sampled_line(self, found: Mapping[str, Any]) -> str:
        """What `sampled` found, as one line for the console and the report."""
        ...
