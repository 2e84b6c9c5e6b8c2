"""Writes README.md, the model card, beside saved weights: base model, data, recipe, environment, measured figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from tigon._files import read_text
from tigon.models.loading.config import is_hub_id
from tigon.objectives.base import Objective
from tigon.objectives.metric_sections import section_of
from tigon.recipe.keys import Recipe
from tigon.report.escape import fenced
from tigon.report.table import markdown_table
from tigon.techniques.keys.lora import LOFTQ
from tigon.trainer import model as models
from tigon.trainer.checkpoint.adapter_files import ADAPTERS
from tigon.trainer.folder import run_folder
from tigon.trainer.folder.run_folder import RunFolder
from tigon.trainer.report import report, vllm_rules

FILE = "README.md"
MAX_CARD_BYTES = 2**20
_ADAPTERS_FOR, _MERGED_INTO = "LoRA adapters for", "LoRA adapters merged into"
_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
}
"""The hub's name of a task -> the class that loads a model of it."""
_TASKS = {
    "reward": "text-classification",
    "classify": "text-classification",
    "classify_tokens": "token-classification",
}
"""Objective -> the hub's name of its task, unless the model writes text."""
_OF_WHOLE = (
    "The adapters belong to the base model's own weights. With the weights in 4 bits LoftQ's correction is missing."
)
_LOADING, _SERVING = "## How to load it", "## Serve it with vLLM"
_PACKAGES = ("tigon", "torch", "transformers", "peft", "bitsandbytes", "deepspeed", "trl", "tokenizers", "safetensors")


def write(run: RunFolder, folder: Path, recipe: Recipe, summary: Mapping[str, Any], objective: Objective) -> str | None:
    """Write the model card of the weights in `folder`.

    Args:
        run: The run folder.
        folder: `adapters/` or `model/` of the run.
        recipe: The recipe of the run.
        summary: Its summary.
        objective: Its objective.

    Returns:
        Why vLLM does not load the adapters in `folder`; None if it does, or if they are whole weights.
    """
    adapters = folder.name == ADAPTERS
    verdict = vllm_rules.judge(folder) if adapters else None
    data, environment = run.read_json(run_folder.DATA), run.read_json(run_folder.ENVIRONMENT)
    train = [record for record in run.records() if record["event"] == "train"]
    figures = report.tiles(train, summary, section_of(objective))
    versions = environment["versions"]
    loading = _code(_task(recipe), adapters=adapters)
    if adapters and recipe.lora.init == LOFTQ:
        loading += f"\n\n{_OF_WHOLE}"
    sections = [
        _front_matter(recipe, adapters=adapters),
        f"# {recipe.output.name}\n\n{_lead(recipe, adapters=adapters)}",
        f"{_LOADING}\n\n{loading}",
        *([f"{_SERVING}\n\n{_served(verdict, recipe)}"] if verdict else []),
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
    return verdict.refusal_line if verdict and verdict.refusals else None


def copy(source: Path, folder: Path, *, merged: bool, stored: str = "") -> None:
    """Copy a run's card beside weights that are written elsewhere. Another card is left out, and named on stderr.

    Args:
        source: The folder with the run's weights or adapters.
        folder: The folder of the new weights.
        merged: Whether the adapters in `source` were merged into them.
        stored: In which format and files the new weights are, if not as the run's own; a section of the card.
    """
    card = _read(source / FILE)
    if card is None:
        if (source / FILE).exists():
            print(f"note     {source / FILE} is no model card of tigon and is not copied", file=sys.stderr, flush=True)
        return
    if merged:
        head, *sections = re.split(r"\n\n(?=## )", card.text.strip("\n"))
        loading = f"{_LOADING}\n\n{_code(card.data.get('pipeline_tag', ''), adapters=False)}"
        kept = [section for section in sections if not section.startswith((_LOADING, _SERVING))]
        card.data["library_name"] = "transformers"
        card.text = "\n\n".join(["", head.replace(_ADAPTERS_FOR, _MERGED_INTO), loading, *kept, ""])
    if stored:
        card.text = f"{card.text.rstrip()}\n\n## Format\n\n{stored}\n"
    (folder / FILE).write_text(str(card), encoding="utf-8")


def _read(file: Path) -> ModelCard | None:
    """A card of tigon; None for any other file, or one that somebody has changed so that it cannot be read."""
    try:
        text = read_text(file, MAX_CARD_BYTES)
        if not text.startswith("---"):  # ModelCard would warn
            return None
        card = ModelCard(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    is_ours = "tigon" in (card.data.get("tags") or ()) and isinstance(card.data.get("pipeline_tag", ""), str)
    return card if is_ours else None


def _front_matter(recipe: Recipe, *, adapters: bool) -> str:
    """The metadata that the hub reads."""
    data = ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag=_task(recipe),
        tags=["tigon", *(["lora"] if recipe.lora.used else [])],
        base_model=recipe.model.name if is_hub_id(recipe.model.name) else None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _lead(recipe: Recipe, *, adapters: bool) -> str:
    what = _ADAPTERS_FOR if adapters else _MERGED_INTO if recipe.lora.rank else "A fine-tuned"
    name = f"`{recipe.model.name}`"
    if models.is_preset(recipe.model.name):
        origin = f"{name} is the shape of the model. Its weights were random before `tigon train`."
        return f"{what} {name}, trained by `tigon train`. {origin}"
    if recipe.model.revision is not None:
        name += f" (revision `{recipe.model.revision}`)"
    return f"{what} {name}, trained by `tigon train`."


def _task(recipe: Recipe) -> str:
    """The hub's name of the model's task."""
    if recipe.train.objective in _TASKS:
        return _TASKS[recipe.train.objective]
    return "image-text-to-text" if recipe.data.images else "text-generation"


def _code(task: str, *, adapters: bool) -> str:
    name, folder = _CLASSES.get(task, "AutoModel"), "path/to/this/folder"
    if not adapters:
        lines = [f"from transformers import {name}", "", f'model = {name}.from_pretrained("{folder}", dtype="auto")']
    elif task == "text-generation":
        lines = ["from peft import AutoPeftModelForCausalLM", ""]
        lines.append(f'model = AutoPeftModelForCausalLM.from_pretrained("{folder}", dtype="auto")')
    else:
        classifies = task in _TASKS.values()  # the folder's config.json has the labels
        config = f', config=AutoConfig.from_pretrained("{folder}")' if classifies else ""
        names = f"AutoConfig, {name}" if classifies else name
        lines = ["from peft import PeftModel", f"from transformers import {names}", ""]
        lines.append(f'base = {name}.from_pretrained("path/to/the/base/model"{config}, dtype="auto")')
        lines.append(f'model = PeftModel.from_pretrained(base, "{folder}")')
    return "\n".join(["```python", *lines, "```"])


def _served(verdict: vllm_rules.Verdict, recipe: Recipe) -> str:
    """How vLLM serves the adapters, or why it does not."""
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
    return [(report.data_label(name), value) for name, value in data.items() if value]


def _table(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    return markdown_table((title, ""), [(name, _shown(value)) for name, value in rows])


def _shown(value: object) -> str:
    text = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
