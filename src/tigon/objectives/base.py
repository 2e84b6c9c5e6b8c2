"""The protocol of a training objective, and the dataclasses that the trainer passes to it.

The trainer imports this package. No objective imports the trainer; an objective gets what it needs as arguments. A run
has one objective. It stores no reference to a model, because a comparison builds several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tigon.data.packing import Sample
from tigon.recipe.keys import ModelConfig, TrainConfig
from tigon.techniques.choices import Choices

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over all processes; all of them call it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Ordinary training before the run, which makes the model that the objective starts from."""

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
    log_every: int


@dataclass(frozen=True, kw_only=True)
class FinalSave:
    """How the trained model of a run is saved. The functions are collective: every process calls them, or none does."""

    folder: Path
    """The run folder."""
    sharded: bool
    """Whether the weights are sharded over the processes."""
    is_first: bool
    gathered_state: Callable[[], dict[str, torch.Tensor] | None]
    """Gathers the full state dict of sharded weights; returns None in processes that do not receive it."""
    save_model: Callable[[], None]
    """Writes `model/` for `from_pretrained`, with merged adapters."""


class Objective(Protocol):
    """The loss that a run minimises, and what depends on it: modules, optimizer groups, metrics, files, samples."""

    # --- before there is a model -------------------------------------------------------------------------------------

    @property
    def reads_whole_weights(self) -> bool:
        """Whether `attach` reads weights of the model, so ZeRO-3 must not partition them while they are loaded."""
        ...

    def attachment(self) -> Any:
        """The modules that the planner adds to the traced model (`planner.request.Heads`), or None."""
        ...

    def announcement(self) -> str | None:
        """One line for the console before training, or None."""
        ...

    def no_sample_line(self) -> str:
        """One line that names the samples which are skipped if weights are sharded."""
        ...

    def phase(self, choices: Choices, run: Path) -> Phase | None:
        """The phase before the run; None if there is none, or if it is complete (a resumed run)."""
        ...

    def model(self, run: Path) -> ModelConfig:
        """The model to load: the recipe's, or the one that `phase` trained. run: the run folder."""
        ...

    def attach(self, built: Any) -> Any:
        """Add the objective's modules to `built`, a patched model with its techniques, and return it."""
        ...

    # --- training ----------------------------------------------------------------------------------------------------

    def group(self, model: Any, optimizer: Any) -> None:
        """Change the parameter groups of a new optimizer."""
        ...

    def begin_step(self, model: Any, step: Step) -> None:
        """Called before each micro-batch."""
        ...

    def loss(self, model: Any, inputs: Mapping[str, Any], of_model: Callable[[], Any]) -> Any:
        """The loss of a micro-batch. of_model: computes the loss of the model's own forward, as transformers does."""
        ...

    def metrics(self, model: Any, reduce: Reduce) -> dict[str, float]:
        """More metrics for the training log, over the steps since the last log."""
        ...

    def counted(self, model: Any) -> dict[str, Any]:
        """The sums of this process since the last log, for a checkpoint between two logs."""
        ...

    def resume_counting(self, model: Any, counted: Mapping[str, Any], device: torch.device) -> None:
        """Restore the sums that `counted` returned."""
        ...

    # --- evaluation --------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None: ...

    def evaluation_sums(
        self, model: Any, inputs: Mapping[str, Any], counts: bool, precision: Callable[[], AbstractContextManager[Any]]
    ) -> torch.Tensor:
        """Returns (sum of the losses, number of target tokens) of a batch in fp64; zeros if `counts` is false.

        The result stays on the device. The host must not wait for it: the wait would not end if another process has
        run out of memory in a collective forward pass.

        precision: Makes the autocast context of a forward pass.
        """
        ...

    def count_batch(self) -> None:
        """Add the last batch to the metrics. It did not run out of memory in any process, so none repeats it."""
        ...

    def evaluation_metrics(self, reduce: Reduce) -> dict[str, float]:
        """More metrics for the evaluation log."""
        ...

    # --- files -------------------------------------------------------------------------------------------------------

    def checkpoint_state(self, model: Any, state: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
        """The weights that a checkpoint holds. state: the gathered state dict; None: the model has full weights."""
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

    def sampled_line(self, found: Mapping[str, Any]) -> str:
        """One line for the console and the report about the result of `sampled`."""
        ...
