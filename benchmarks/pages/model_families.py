"""The tables of docs/models.md, models-by-structure.md and models-trained.md, from the installed transformers.

python -m benchmarks.pages.model_families rows             # seconds
python -m benchmarks.pages.model_families others           # minutes
python -m benchmarks.pages.model_families trained          # ten minutes
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import transformers

from benchmarks.pages import regions
from tigon.errors import PatchError
from tigon.models.structure import structural_row
from tigon.models.verification import listing
from tigon.models.verification.small_models import NotBuilt, families_without_a_row, small_model
from tigon.models.verification.verify import NO_LOGITS, Verification, verify
from tigon.trainer.family_training import TRAINS, TrainedFamily, trained_families

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"rows": "models.md", "others": "models-by-structure.md", "trained": "models-trained.md"}
"""Table -> its page."""


def rows() -> str:
    """The families with a row; every cell comes from a patched model."""
    titles = ("family", "norm", "MLP", "router", "rope", "loss in training", "left alone")
    return _table(titles, ([*listing.cells(f), "; ".join(map(": ".join, f.left_alone))] for f in listing.families()))


def _table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heading = list(titles)
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, *lines)).replace(
        " |\n", f" |\n|{'---|' * len(heading)}\n", 1
    )


# --- families without a row ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Surveyed:
    """What matching by structure does with a small model of a family without a row."""

    model_type: str
    outcome: str
    """"verified", "with logits" (equal, but its loss needs all logits), "differs", "left alone" (nothing matched), or
    "not built" (no small model could be built)."""
    reason: str = ""
    verification: Verification | None = None


def surveyed(model_type: str) -> Surveyed:
    """Build, patch and verify a small model of a family, on the CPU in fp32."""
    try:
        model, overrides = small_model(model_type)
    except NotBuilt as error:
        return Surveyed(model_type, "not built", str(error))
    try:
        verification = verify(replace(structural_row(model), model_type=model_type, tiny=overrides))
    except PatchError as error:
        return Surveyed(model_type, "left alone", str(error))
    if verification.passed:
        return Surveyed(model_type, "verified", verification=verification)
    if all(check.name == NO_LOGITS for check in verification.failures):
        return Surveyed(model_type, "with logits", "its results are equal; its loss needs all logits", verification)
    failed = "; ".join(f"{check.name}: {check.note or check.error}" for check in verification.failures)
    return Surveyed(model_type, "differs", failed, verification)


def others() -> str:
    """The results of matching by structure for every other causal language model of the installed transformers."""
    outcomes = [surveyed(model_type) for model_type in families_without_a_row()]
    counts = Counter(o.outcome for o in outcomes)
    summary = ", ".join(f"{counts[name]} {name}" for name in sorted(counts, reverse=True))
    titles = ("family", "outcome", "gets", "what was left alone, or why there is no outcome")
    heading = f"transformers {transformers.__version__}: {len(outcomes)} families without a row, {summary}."
    return f"{heading}\n\n{_table(titles, map(_survey_line, outcomes))}"


def _survey_line(o: Surveyed) -> tuple[str, ...]:
    left: list[tuple[str, str]] = []
    if o.verification:
        left = list(dict(o.verification.left_alone).items())
        left += listing.columns_without_op(o.verification.counts, left)
    gets = ", ".join(sorted(o.verification.counts)) if o.verification else ""
    reason = re.sub(r"\s+", " ", o.reason or "; ".join(map(": ".join, left))).replace("|", "/")
    return o.model_type, o.outcome, gets, reason if len(reason) <= 300 else f"{reason[:297]}..."


# --- training ---------------------------------------------------------------------------------------------------------


def trained() -> str:
    """What `tigon train` does with a small model of each family."""
    return training_table(trained_families())


def training_table(families: Iterable[TrainedFamily]) -> str:
    """`trained` for given families."""
    listed = list(families)
    both = sum(family.outcome("full") == family.outcome("lora") == TRAINS for family in listed)
    built = sum(family.full is not None for family in listed)
    counts = f"{len(listed)} families, {built} built small, {both} train both ways"
    titles = ("family", "full", "LoRA, merged", "recipe keys", "why not")
    return f"transformers {transformers.__version__}: {counts}.\n\n{_table(titles, map(_training_line, listed))}"


def _training_line(family: TrainedFamily) -> tuple[str, ...]:
    why = " ".join(family.why.replace("|", "/").split())
    keys = f"`{family.keys}`" if family.keys else ""
    return family.model_type, family.outcome("full"), family.outcome("lora"), keys, why


def main(names: Iterator[str]) -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    tables = {"rows": rows, "others": others, "trained": trained}
    for name in names:
        regions.write_between(tables[name](), DOCS / PAGES[name], begin=f"<!-- {name} -->", end=f"<!-- /{name} -->")


if __name__ == "__main__":
    main(iter(sys.argv[1:]))
