"""The generated parts of docs/techniques, from the records: run this file to rewrite them.

    python tests/techniques/technique_pages.py

This file generates the text between the markers of each page. The rest is written by hand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tigon.techniques import EXCLUSIONS, PAGES, TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.matrix import exclusion_table
from tigon.techniques.optimizers import OPTIMIZERS, bytes_per_parameter
from tigon.techniques.records.condition import yaml_word
from tigon.techniques.records.technique import Technique

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "techniques"
SWEEPS = ("techniques", "techniques-two-gpus")  # records of recipes/techniques
# At the 4 x 1024 tokens of those records these techniques do not change the peak. The record `largest-batch` has
# larger batches: technique -> (its variant, the variant without it). None: no record has a run with and without it.
FOR_LONG_SEQUENCES: dict[str, tuple[str, str] | None] = {
    "checkpointing-offload": ("checkpoints on the host", "checkpoints on the GPU"),
    "tiled-mlp": ("tiled MLPs too", "checkpoints on the host"),
    "grouped-attention": None,
}
BEGIN, END = "<!-- from the records -->", "<!-- end of the records -->"


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
    from tigon.recipe.keys import SECTIONS, Recipe

    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in technique.recipe.items():
        section, name = dotted.split(".")
        sections.setdefault(section, {})[name] = value
    return Recipe(**{section: SECTIONS[section](**values) for section, values in sections.items()}).settings()


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


def section(technique: Technique) -> str:
    needs = ", ".join((*technique.needs, *technique.tools)) or "no other package"
    if technique.devices == ("cuda",):
        needs += "; a GPU"
    lines = [
        f"## `{technique.name}`", "",
        f"- **Saves.** {technique.saves}", f"- **Costs.** {technique.costs}",
        f"- **Effect on the result.** {technique.effect_on_result}",
        f"- **Needs.** {needs}.", f"- **Source.** {technique.source}.",
    ]  # fmt: skip
    if technique.name in measured():
        lines.append(f"- **Measured.** {measured()[technique.name]}.")
    lines += ["", "```yaml", recipe_lines(technique.recipe), "```", ""]
    return "\n".join(lines)


def optimizer_table() -> str:
    lines = [
        "| `train.optimizer` | algorithm | bytes of state per parameter | effect on the result | needs |",
        "|---|---|---|---|---|",
    ]
    for row in OPTIMIZERS.values():
        needs = ", ".join(filter(None, (row.package, "a GPU" if row.devices == ("cuda",) else ""))) or "-"
        lines.append(
            f"| `{row.name}` | {row.help} | {bytes_per_parameter(row):.3g} | {row.effect_on_result} | {needs} |"
        )
    notes = [f"- `{name}`: {measured()[name]}." for name in OPTIMIZERS if name in measured()]
    note = "Bytes per parameter are those of a 4096 x 4096 fp32 matrix, with rank 128 for GaLore."
    return "\n".join([*lines, "", note, *(["", "Measured:", "", *notes] if notes else [])])


def generated(page: str) -> str:
    """The text between the markers of a page."""
    if page == "README":
        listed = ["| technique | saves | costs |", "|---|---|---|"]
        for name, technique in TECHNIQUES.items():
            listed.append(f"| [`{name}`]({technique.page}.md) | {technique.saves} | {technique.costs} |")
        return "\n".join(listed)
    if page == "refused":
        return exclusion_table()
    if page == "optimizers":
        return optimizer_table()
    techniques = [technique for technique in TECHNIQUES.values() if technique.page == page]
    return "\n".join([*map(section, techniques), refusals(techniques)]).rstrip()


def refusals(techniques: list[Technique]) -> str:
    """The page's exclusions, each once, with the techniques that it holds for."""
    found: dict[str, list[str]] = {}
    for technique in techniques:
        for text in excludes(technique):
            found.setdefault(text, []).append(f"`{technique.name}`")
    if not found:
        return ""
    lines = []
    for text, names in found.items():
        if len(techniques) == 1:
            lines.append(f"- I{text[1:]}")
        else:
            lines.append(f"- {'All' if len(names) == len(techniques) else ', '.join(names)}, {text}")
    return "\n".join(["## What is refused", "", *lines])


def with_generated(page: str, text: str) -> str:
    pattern = re.escape(BEGIN) + r".*?" + re.escape(END)
    return re.sub(pattern, lambda match: f"{BEGIN}\n{generated(page)}\n{END}", text, flags=re.DOTALL)


def pages() -> list[str]:
    return ["README", "refused", *PAGES]


def written(page: str, folder: Path = FOLDER) -> str:
    """A page with its generated part renewed; a new page has only its title and that part."""
    path = folder / f"{page}.md"
    text = path.read_text(encoding="utf-8") if path.exists() else f"# {PAGES[page]}\n\n{BEGIN}\n{END}\n"
    return with_generated(page, text)


if __name__ == "__main__":
    for page in pages():
        (FOLDER / f"{page}.md").write_text(written(page), encoding="utf-8")
