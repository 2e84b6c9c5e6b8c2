"""Trainer callbacks that show progress (a live table on a terminal, otherwise plain lines) and write records."""

from __future__ import annotations

import math
import textwrap
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerState

from tigon.objectives.metric_sections import MetricSection
from tigon.trainer.folder.run_folder import RunFolder
from tigon.units import in_clock

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SHOWN_ROWS = 12
INDENT, NO_BREAK = " " * 9, "\xa0"


def format_bytes(n_bytes: float) -> str:
    """Format a size in GiB if it is at least 1 GiB, otherwise in MiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def _format_metric(logs: Mapping[str, Any], name: str, *, is_share: bool) -> str:
    """A metric of a training or evaluation log; empty without a value."""
    value = logs.get(name, logs.get(f"eval_{name}"))
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.1%}" if is_share else f"{value:.4f}"


class MetricsWriter(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Writes each record to metrics.jsonl as {"event": "train" or "eval", "step": ..., ...}, and to TensorBoard.

    transformers' TensorBoardCallback is not used, because it closes its writer when training ends. It would write the
    last evaluation into another folder.
    """

    def __init__(self, folder: RunFolder, writer: SummaryWriter | None) -> None:
        """Make the callback. writer: TensorBoard's SummaryWriter; None: write metrics.jsonl alone."""
        self._folder = folder
        self._writer = writer
        self._resumes = folder.checkpoint is not None

    def on_step_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Drop the records after the checkpoint of a resumed run, once the checkpoint has loaded."""
        if self._resumes:
            self._folder.forget_after(state.global_step)
            self._resumes = False

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        event = "train" if "loss" in (logs or {}) else "eval" if "eval_loss" in (logs or {}) else None
        if event and logs:
            # TRL logs None or NaN for a metric without a value, such as the reward of good answers if there are none.
            logs = {name: value for name, value in logs.items() if value is not None and math.isfinite(value)}
            self._folder.append({"event": event, "step": state.global_step, **logs})
            if self._writer is None:
                return
            for name, value in logs.items():
                self._writer.add_scalar(f"{event}/{name.removeprefix('eval_')}", value, state.global_step)


class ProgressDisplay(TrainerCallback):  # type: ignore[misc]
    """Shows a live table on a terminal, otherwise one line per record."""

    def __init__(self, console: Console, section: MetricSection | None = None) -> None:
        """Make the callback. section: the objective's own metrics, of which the first stand beside the loss."""
        self._console = console
        self._metrics = section.progress if section is not None else ()
        self._details = section.details if section is not None else ()
        self._rows: deque[tuple[str, ...]] = deque(maxlen=SHOWN_ROWS)
        self._eval_loss: float | None = None
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._started_s = 0.0
        self._first_step = 0

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        self._started_s, self._first_step = time.perf_counter(), state.global_step
        if self._console.is_terminal:
            self._bar = Progress(TextColumn("step"), BarColumn(bar_width=None), MofNCompleteColumn(), expand=True)
            self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()

    def on_step_end(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step)

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, Any] | None = None, **kwargs: object
    ) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            self._eval_loss = logs["eval_loss"]
            if self._live is None:
                line = f"step {state.global_step}/{state.max_steps}  eval loss {self._eval_loss:.4f}{self._own(logs)}"
                perplexity = logs.get("eval_perplexity")
                self._line(line if perplexity is None else f"{line}  perplexity {perplexity:,.2f}")
            self._show_details(logs)
        if "loss" not in logs:
            return
        done = state.global_step - self._first_step
        remaining = state.max_steps - state.global_step
        eta = in_clock((time.perf_counter() - self._started_s) / max(done, 1) * remaining)
        now, peak = format_bytes(logs["memory_bytes"]), format_bytes(logs["memory_peak_bytes"])
        eval_loss = "" if self._eval_loss is None else f"{self._eval_loss:.4f}"
        loss, speed = f"{logs['loss']:.4f}", f"{logs['tokens_per_s']:,.0f}"
        own = (_format_metric(logs, name, is_share=is_share) for _, name, is_share in self._metrics)
        self._rows.append((f"{state.global_step:,}", loss, *own, eval_loss, speed, f"{now} / {peak}", eta))
        if self._live is not None:
            self._live.update(self._render())
        else:
            line = f"step {state.global_step}/{state.max_steps}  loss {loss}{self._own(logs)}  {speed} tokens/s  "
            self._line(f"{line}memory {now} (peak {peak})  ETA {eta}")
        self._show_details(logs)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live table, also if the run fails."""
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
            self._live = None

    def _show_details(self, logs: Mapping[str, Any]) -> None:
        # A metric and its value stay on one line: textwrap does not break at a non-breaking space.
        parts = ((title, _format_metric(logs, name, is_share=is_share)) for title, name, is_share in self._details)
        text = "  ".join(f"{title} {value}".replace(" ", NO_BREAK) for title, value in parts if value)
        for line in textwrap.wrap(text, self._console.width - len(INDENT)):
            self._line(f"{INDENT}{line.replace(NO_BREAK, ' ')}")

    def _own(self, logs: Mapping[str, Any]) -> str:
        """The objective's metrics in a line of text. TRL logs None or NaN for a metric that has no value yet."""
        values = ((title, _format_metric(logs, name, is_share=is_share)) for title, name, is_share in self._metrics)
        return "".join(f"  {title} {value}" for title, value in values if value)

    def _line(self, text: str) -> None:
        self._console.out(text)

    def _render(self) -> Group:
        table = Table(expand=True, box=None, header_style="bold")
        own = (title for title, _, _ in self._metrics)
        for title in ("step", "loss", *own, "eval loss", "tokens/s", "memory now / peak", "ETA"):
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, self._bar if self._bar is not None else Text(""))
