"""The generated parts of docs/techniques:

    python -m benchmarks.pages.techniques

Between the markers of a page, each technique has a section. What it saves, costs and needs, and its source, are written
there by hand. This file adds its effect on the result, its recipe, what was measured, and what is refused beside it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tigon.planner.simulate.optimizer_cost import COSTS, FP32, Parameter
from tigon.recipe.keys import Recipe
from tigon.report.table import markdown_table
from tigon.techniques import EXCLUSIONS, TECHNIQUES
from tigon.techniques.condition import yaml_word
from tigon.techniques.keys.settings import Settings
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.techniques.technique import Technique

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "techniques"
README, OPTIMIZER_PAGE = "README", "optimizers"
SWEEPS = ("techniques", "techniques-two-gpus")  # records of recipes/techniques
# At the 4 x 1024 tokens of those records these techniques do not change the peak. The record `largest-batch` has
# larger batches: technique -> (its variant, the variant without it). None: no record has a run with and without it.
FOR_LONG_SEQUENCES: dict[str, tuple[str, str] | None] = {
    "checkpointing-offload": ("checkpoints on the host", "checkpoints on the GPU"),
    "tiled-mlp": ("tiled MLPs too", "checkpoints on the host"),
    "grouped-attention": None,
}
BEGIN, END = "<!-- from the records -->", "<!-- end of the records -->"
_REGION = re.compile(f"{re.escape(BEGIN)}\\n(.*?)\\n?{re.escape(END)}", re.DOTALL)
WRITTEN = ("Saves", "Costs", "Effect on the result", "Needs", "Source")
"""What a section says about a technique, by hand unless the technique declares its effect on the result."""


# --- what the pages say by hand ---------------------------------------------------------------------------------------


def pages() -> list[str]:
    return [README, *sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != README)]


def region(text: str) -> str:
    found = _REGION.search(text)
    return found[1] if found else ""


def sections(text: str) -> dict[str, dict[str, str]]:
    """Technique -> what its section of a page says, by the words of `WRITTEN`."""
    parts = re.split(r"^## `(.+)`$", region(text), flags=re.MULTILINE)[1:]
    return {
        name: dict(re.findall(r"^- \*\*(.+?)\.\*\* (.*)$", part, re.MULTILINE))
        for name, part in zip(parts[::2], parts[1::2], strict=True)
    }


def rows(text: str) -> dict[str, list[str]]:
    """Optimizer -> the cells of its row in the page's table."""
    found = re.findall(r"^\| `(.+?)` \| (.*) \|$", region(text), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found}


# --- what the techniques say ------------------------------------------------------------------------------------------


def recipe_lines(recipe: Mapping[str, Any]) -> str:
    """Recipe keys, given with dots, as YAML."""
    sections: dict[str, list[str]] = {}
    for dotted, value in recipe.items():
        section, name = dotted.split(".")
        sections.setdefault(section, []).append(f"{name}: {yaml_word(value)}")
    return "\n".join(f"{section}: {{{', '.join(keys)}}}" for section, keys in sections.items())


def excludes(technique: Technique) -> list[str]:
    """The exclusions that name a choice of this technique."""
    own = {condition.key: condition for condition in technique.chosen}
    found = []
    for row in EXCLUSIONS:
        touching = [condition for condition in row.when if condition.key in own]
        if touching and all(condition.holds(_chosen(technique)) for condition in touching):
            others = [str(condition) for condition in row.when if condition.key not in own]
            if others:
                found.append(f"if {' and '.join(others)}: {row.reason}. Instead: {row.instead}.")
    return found


def _chosen(technique: Technique) -> Settings:
    return Recipe().having(technique.recipe).settings()


@functools.cache
def measured() -> dict[str, str]:
    """Technique -> memory, throughput and loss of its recipe, as measured on GPUs."""
    found = {}
    for path in sorted(path for name in SWEEPS for path in ROOT.glob(f"benchmarks/results/*/study/{name}.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["variant"]: row for row in record["points"] if row["status"] == "ok"}
        where = record["environment"]
        base = rows.get(record["baseline"])
        for name, row in rows.items():
            if name in FOR_LONG_SEQUENCES:
                continue
            gpus = row["keys"].get("sharding.gpus", 1)
            commits, dates = (row.get(key) or where[key] for key in ("tigon_commits", "dates"))
            beside = f" (baseline `{record['baseline']}`: {base['last_loss']:.3f})" if base and base is not row else ""
            found[name] = (
                _beside_recipe(name, row["keys"])
                + f"{row['peak_allocated_bytes'] / 2**30:.2f} GiB per GPU, {row['tokens_per_s']:,.0f} tokens/s, a loss "
                f"of {row['last_loss']:.3f} after {record['steps']} steps{beside}: `{record['command']}` on "
                f"{f'{gpus} x ' if gpus > 1 else ''}{where['device']}, tigon at "
                f"{', '.join(commits)}, {', '.join(dates)}; versions and predictions in "
                "[the study](../study.md)"
            )
    for path in ROOT.glob("benchmarks/results/*/study/largest-batch.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        found |= {name: _at_the_largest_batch(record, *pair) for name, pair in FOR_LONG_SEQUENCES.items() if pair}
    return found


def _beside_recipe(name: str, keys: Mapping[str, Any]) -> str:
    """The keys of the technique's section that the measured run had besides those of the technique's own recipe."""
    sections = {key.partition(".")[0] for key in TECHNIQUES[name].recipe} & {"lora"} if name in TECHNIQUES else set()
    more = [
        f"`{key}: {yaml_word(value)}`"
        for key, value in keys.items()
        if key.partition(".")[0] in sections and key not in TECHNIQUES[name].recipe
    ]
    return f"With {', '.join(more)}: " if more else ""


def _at_the_largest_batch(record: Mapping[str, Any], variant: str, without: str) -> str:
    """A variant compared with another at the largest batch that both ran."""
    batches: dict[int, dict[str, Any]] = {}
    for row in record["points"]:
        if row["status"] == "ok":
            batches.setdefault(row["axes"]["train.batch_size"], {})[row["variant"]] = row
    batch = max(batch for batch, rows in batches.items() if variant in rows and without in rows)
    figures = [
        f"{row['peak_allocated_bytes'] / 2**30:.2f} GiB, {row['tokens_per_s']:,.0f} tokens/s"
        for row in (batches[batch][variant], batches[batch][without])
    ]
    rows = (batches[batch][variant], batches[batch][without])
    commits, dates = (sorted({text for row in rows for text in row[key]}) for key in ("tigon_commits", "dates"))
    return (
        f"{figures[0]} at {batch} x 1024 tokens; without it {figures[1]}: `{record['command']}` on "
        f"{record['environment']['device']}, tigon at {', '.join(commits)}, {', '.join(dates)}; settings and versions "
        "in [the study](../study.md)"
    )


# --- the pages --------------------------------------------------------------------------------------------------------


def section(name: str, written: Mapping[str, str]) -> str:
    technique = TECHNIQUES[name]
    said = {**written, "Measured": f"{measured()[name]}." if name in measured() else ""}
    if technique.effect_on_result:
        said["Effect on the result"] = technique.effect_on_result
    bullets = [f"- **{word}.** {said[word]}" for word in (*WRITTEN, "Measured") if said.get(word)]
    return "\n".join([f"## `{name}`", "", *bullets, "", "```yaml", recipe_lines(technique.recipe), "```", ""])


def bytes_per_parameter(name: str) -> float:
    """Returns the bytes of an optimizer's state per element of a large fp32 matrix, at all places."""
    matrix = Parameter((4096, 4096), FP32, projected=True, by_muon=True)
    return sum(tensor.nbytes for tensor in COSTS[name].states(matrix, 128)) / matrix.numel


def optimizer_table(written: Mapping[str, list[str]]) -> str:
    """The table of optimizers. Of a row's cells, the algorithm is written by hand."""
    lines = []
    for name, row in OPTIMIZERS.items():
        algorithm, _, effect, _ = written[name]
        needs = ", ".join(filter(None, (row.package, "a GPU" if row.devices == ("cuda",) else ""))) or "-"
        effect = row.effect_on_result or effect
        lines.append((f"`{name}`", algorithm, f"{bytes_per_parameter(name):.3g}", effect, needs))
    titles = ("`train.optimizer`", "algorithm", "bytes of state per parameter", "effect on the result", "needs")
    notes = [f"- `{name}`: {measured()[name]}." for name in OPTIMIZERS if name in measured()]
    note = "Bytes per parameter are those of a 4096 x 4096 fp32 matrix, with rank 128 for GaLore."
    return "\n".join([markdown_table(titles, lines), "", note, *(["", "Measured:", "", *notes] if notes else [])])


def refused(names: Iterable[str]) -> str:
    """The exclusions of a page's techniques, each once, with the techniques that it holds for."""
    names = list(names)
    found: dict[str, list[str]] = {}
    for name in names:
        for text in excludes(TECHNIQUES[name]):
            found.setdefault(text, []).append(f"`{name}`")
    if not found:
        return ""
    lines = []
    for text, holds_for in found.items():
        if len(names) == 1:
            lines.append(f"- I{text[1:]}")
        else:
            lines.append(f"- {'All' if len(holds_for) == len(names) else ', '.join(holds_for)}, {text}")
    return "\n".join(["## What is refused", "", *lines])


def exclusion_table() -> str:
    rows = ((" and ".join(map(str, row.when)), row.reason, row.instead, row.source) for row in EXCLUSIONS)
    return markdown_table(("these together", "are refused, because", "instead", "source"), rows)


def overview(texts: Mapping[str, str]) -> str:
    """The tables of the README. texts: page -> its text."""
    said = {name: (page, words) for page, text in texts.items() for name, words in sections(text).items()}
    algorithms = rows(texts.get(OPTIMIZER_PAGE, ""))
    listed = []
    for name in TECHNIQUES:
        if name in OPTIMIZERS:
            baseline = "the baseline" if name == "adamw" else "AdamW: 8"
            page, saves = OPTIMIZER_PAGE, f"{bytes_per_parameter(name):.3g} bytes of state per parameter ({baseline})."
            costs = algorithms[name][0]
        else:
            page, words = said[name]
            saves, costs = words["Saves"], words["Costs"]
        listed.append((f"[`{name}`]({page}.md)", saves, costs))
    return markdown_table(("technique", "saves", "costs"), listed)


def generated(page: str, texts: Mapping[str, str]) -> str:
    """The text between the markers of a page. texts: page -> its text."""
    if page == README:
        return overview(texts)
    if page == "refused":
        return exclusion_table()
    if page == OPTIMIZER_PAGE:
        return optimizer_table(rows(texts[page]))
    written = sections(texts[page])
    return "\n".join([*(section(name, words) for name, words in written.items()), refused(written)]).rstrip()


def renewed(page: str) -> str:
    """A page with its generated parts made anew."""
    texts = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in pages()}
    return _REGION.sub(lambda _: f"{BEGIN}\n{generated(page, texts)}\n{END}", texts[page])


if __name__ == "__main__":
    for page in pages():
        (FOLDER / f"{page}.md").write_text(renewed(page), encoding="utf-8")
