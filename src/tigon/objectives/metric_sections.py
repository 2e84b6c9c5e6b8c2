"""How reports and the terminal show the metrics of an objective: the columns, the rows, and their titles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tigon.objectives.base import Objective
from tigon.objectives.medusa import HEADS, MedusaTraining

RANKS = 5  # accuracies among the first 1 to 5 guesses (ops/head/multi_head.py)


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
    """The metric's name in the records of metrics.jsonl, for each column that the row has, from the first on."""
    is_baseline: bool = False
    """Drawn in the chart's muted colour."""
    is_part: bool = False
    """It has the first column only, of whose metric it is a part: one reward function of several."""


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
        if len([row for row in self.rows if not row.is_part]) > 1:
            return ((self.tile, self.tile_metric, False),)
        return tuple(self._of_model()[:PROGRESS_METRICS])

    @property
    def details(self) -> tuple[tuple[str, str, bool], ...]:
        """A second line of the terminal, in the form of `progress`: the parts, and the columns after its metrics."""
        parts = [(row.label, row.metrics[0], False) for row in self.rows if row.is_part]
        return (*parts, *self._of_model()[PROGRESS_METRICS:]) if parts else ()

    def _of_model(self) -> list[tuple[str, str, bool]]:
        pairs = zip(self.columns, self.rows[0].metrics, strict=True)
        return [(column.title, name, column.is_share) for column, name in pairs if name != "loss"]


PROGRESS_METRICS = 2
"""A line of the terminal has room for two metrics beside loss, speed, memory and remaining time."""


def section(title: str, chart_text: str, columns_text: str, *metrics: tuple[str, MetricColumn]) -> MetricSection:
    """A section with one row. metrics: (name in metrics.jsonl, column); the first is also a tile of the report."""
    return MetricSection(
        name=title.lower().replace(" ", "-"),
        title=title,
        chart_text=chart_text,
        columns_text=columns_text,
        columns=tuple(column for _, column in metrics),
        rows=(MetricRow(title="the model", label="training", metrics=tuple(name for name, _ in metrics)),),
        tile=metrics[0][1].title,
    )


def column(title: str, axis: str | None = None, *, is_share: bool = False) -> MetricColumn:
    return MetricColumn(title=title, axis=axis or title, is_share=is_share, is_nats=False)


SECTIONS = {
    "dpo": section(
        "Preferences",
        "reward margin, accuracy and loss over steps",
        "The reward of an answer is beta times the change of its log-probability. The margin is the reward of the "
        "chosen answer minus that of the rejected one. The accuracy is the share of pairs with a positive margin.",
        ("rewards/margins", column("reward margin")),
        ("rewards/accuracies", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
        ("loss", column("loss")),
    ),
    "kto": section(
        "Preferences",
        "reward margin, rewards and loss over steps",
        "The reward of an answer is beta times the change of its log-probability. The margin is the mean reward of "
        "the good answers minus that of the bad ones.",
        ("rewards/margins", column("reward margin")),
        ("rewards/chosen", column("reward of good answers")),
        ("rewards/rejected", column("reward of bad answers")),
        ("loss", column("loss")),
    ),
    "orpo": section(
        "Preferences",
        "accuracy, reward margin and loss over steps",
        "The reward of an answer is beta times its mean log-probability per token. The accuracy is the share of "
        "pairs whose chosen answer has the larger reward.",
        ("rewards/margins", column("reward margin")),
        ("rewards/accuracies", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
        ("loss", column("loss")),
    ),
    "grpo": section(
        "Rewards",
        "reward, completion length, completions at the limit, entropy and KL over steps",
        "The reward is the weighted sum of the reward functions, its mean over completions. At the limit: the "
        "completions that were cut off at post_training.completion_length. The entropy is per token, in nats. The KL "
        "to the reference is drawn with beta above 0.",
        ("reward", column("reward", "mean reward")),
        ("completions/mean_length", column("completion length", "tokens per completion")),
        ("completions/clipped_ratio", column("at the limit", "completions at the limit (%)", is_share=True)),
        ("entropy", column("entropy", "entropy (nats)")),
        ("kl", column("KL", "KL to the reference (nats)")),
    ),
    "distill": section(
        "Distillation",
        "divergence from the teacher and entropy over steps",
        "The divergence from the teacher and the model's entropy are means per token, in nats.",
        ("loss", column("divergence", "divergence (nats)")),
        ("entropy", column("entropy", "entropy (nats)")),
    ),
    **dict.fromkeys(
        ("classify", "classify_tokens"),
        section(
            "Labels",
            "accuracy, macro F1 and loss over steps",
            "Macro F1 is the mean of the labels' F1, so rare labels count as much as frequent ones.",
            ("accuracy", column("accuracy", "accuracy (%)", is_share=True)),
            ("macro_f1", column("macro F1", "macro F1 (%)", is_share=True)),
            ("loss", column("loss")),
        ),
    ),
    "reward": section(
        "Scores",
        "margin, accuracy and loss over steps",
        "The margin is the score of the chosen answer minus that of the rejected one. The accuracy is the share of "
        "pairs with a positive margin.",
        ("margin", column("margin")),
        ("accuracy", column("accuracy", "pairs with a positive margin (%)", is_share=True)),
        ("loss", column("loss")),
    ),
}
"""The section of each objective of TRL's trainers and of classification, by its name."""


def section_of(objective: Objective) -> MetricSection | None:
    """The report's section about the metrics of an objective; None: it draws the training loss and the eval loss."""
    if isinstance(objective, MedusaTraining):
        return heads_section(objective.spec.count, objective.heads.stage)
    found = SECTIONS.get(objective.name)
    rewards = objective.trl.rewards if objective.trl is not None else ()
    return found if found is None or not rewards else _with_parts(found, [entry.title for entry in rewards])


def _with_parts(section: MetricSection, rewards: Sequence[str]) -> MetricSection:
    """The section with a line for each reward function, in the panel of the reward."""
    parts = (MetricRow(title=name, label=name, metrics=(f"rewards/{name}/mean",), is_part=True) for name in rewards)
    return replace(section, rows=(*section.rows, *parts))


def heads_section(count: int, stage: int | None) -> MetricSection:
    """One row for each head and, in stage 2, one for the model. The total loss, a weighted sum, says little."""
    own = [("model", "the model", "model")] if stage == 2 else []
    own += [(f"head{k}", f"head {k}, {k + 1} tokens ahead", f"head {k}") for k in range(1, count + 1)]
    accuracy = "first guess correct (%)"
    return MetricSection(
        name=HEADS,
        title="Heads",
        chart_text="losses and accuracies of the heads over steps",
        columns_text="Columns 1 to 5: how often the token was among the head's first 1 to 5 guesses.",
        columns=(
            MetricColumn(title="loss", axis="loss (nats per token)"),
            *(
                MetricColumn(title=str(k), axis=accuracy if k == 1 else None, is_share=True)
                for k in range(1, RANKS + 1)
            ),
        ),
        rows=tuple(
            MetricRow(
                title=title,
                label=label,
                is_baseline=name == "model",
                metrics=(f"{name}_loss", *(f"{name}_top{k}" for k in range(1, RANKS + 1))),
            )
            for name, title, label in own
        ),
        tile="head 1's training loss",
    )
