"""Writes README.md, the model card, beside saved weights: base model, data, recipe, environment, measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tigon.models.loading.config import is_hub_id
from tigon.objectives.base import Objective
from tigon.recipe.keys import Recipe
from tigon.trainer import run_folder
from tigon.trainer.checkpoint.adapter_files import ADAPTERS
from tigon.trainer.report import report, vllm_rules
from tigon.trainer.report.report import fenced
from tigon.trainer.run_folder import RunFolder

FILE = "README.md"
_PACKAGES = ("tigon", "torch", "transformers", "peft", "trl", "tokenizers", "safetensors")


def write(run: RunFolder, folder: Path, recipe: Recipe, summary: Mapping[str, Any], objective: Objective) -> None:
    """Write the model card of the weights in `folder`.

    Args:
        run: The run folder.
        folder: `adapters/` or `model/` of the run.
        recipe: The recipe of the run.
        summary: Its summary.
        objective: Its objective.
    """
    adapters, data, environment = folder.name == ADAPTERS, run.read_json(run_folder.DATA), run.read_json(
        run_folder.ENVIRONMENT
    )  # fmt: skip
    train = [record for record in run.records() if record["event"] == "train"]
    figures = [(tile["name"], tile["value"]) for tile in report.tiles(train, summary, objective.metric_section())]
    versions = environment["versions"]
    sections = [
        _front_matter(recipe, adapters=adapters),
        f"# {recipe.output.name}\n\n{_lead(recipe, adapters=adapters)}",
        f"## How to load it\n\n{_code(adapters=adapters)}",
        *([f"## Serve it with vLLM\n\n{_served(folder, recipe)}"] if adapters else []),
        "## Measured figures\n\nMeasured in the training run.\n\n" + _table("figure", figures),
        f"## Training data\n\n`{'`, `'.join(source.name for source in recipe.data.sources())}`\n\n"
        + _table("what", _counts(data)),
        "## Environment\n\n"
        + _table("package", [(name, versions[name]) for name in _PACKAGES if name in versions])
        + "\n\n"
        + _table("machine", [(name.replace("_", " "), value) for name, value in environment["hardware"].items()]),
        "## Recipe\n\n" + fenced((run.path / run_folder.RECIPE).read_text(encoding="utf-8")),
    ]
    (folder / FILE).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _front_matter(recipe: Recipe, *, adapters: bool) -> str:
    """The metadata that the hub reads."""
    import yaml

    values: dict[str, Any] = {
        "library_name": "peft" if adapters else "transformers", "pipeline_tag": "text-generation",
        "tags": ["tigon", *(["lora"] if recipe.lora.rank is not None else [])],
    }  # fmt: skip
    if is_hub_id(recipe.model.name):
        values["base_model"] = recipe.model.name
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _lead(recipe: Recipe, *, adapters: bool) -> str:
    what = "LoRA adapters for" if adapters else "Merged LoRA adapters and" if recipe.lora.rank else "A fine-tuned"
    name = f"`{recipe.model.name}`"
    if recipe.model.revision is not None:
        name += f" (revision `{recipe.model.revision}`)"
    return f"{what} {name}, trained by `tigon train`."


def _code(*, adapters: bool) -> str:
    kind, package = ("AutoPeftModelForCausalLM", "peft") if adapters else ("AutoModelForCausalLM", "transformers")
    return (
        f'```python\nfrom {package} import {kind}\n\nmodel = {kind}.from_pretrained("path/to/this/folder", '
        'dtype="auto")\n```'
    )


def _served(folder: Path, recipe: Recipe) -> str:
    """How vLLM serves the adapters in `folder`, or why it does not."""
    verdict = vllm_rules.judge(folder)
    if verdict.refusals:
        reasons = "\n".join(f"- {reason}" for reason in verdict.refusals)
        merge = "Serve a merged model, which `tigon export RUN FOLDER --merge` writes."
        return f"vLLM does not load these adapters:\n\n{reasons}\n\n{merge}"
    base = recipe.model.name if is_hub_id(recipe.model.name) else "path/to/the/base/model"
    command = (
        f"vllm serve {base} --enable-lora --max-lora-rank {verdict.max_rank} --lora-modules "
        f"{recipe.output.name}=path/to/this/folder"
    )
    lines = [f"```sh\n{command}\n```", "The command follows from names and config. vLLM has not loaded this folder."]
    return "\n\n".join([*lines, *verdict.conditions])


def _counts(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name.replace("_", " "), value) for name, value in data.items() if value]


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    lines = [f"| {title} | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {_shown(value)} |" for name, value in rows)])


def _shown(value: Any) -> str:
    text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
