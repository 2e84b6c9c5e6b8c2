"""Which objectives and techniques train under which engine: the table of docs/several-gpus.md.

    python -m benchmarks.pages.engine_pairs

A pair that the recipe's checks refuse gets their words. Every other pair is one of `WORKING`, and
tests/trainer/test_engine_pairs.py trains each of these in two processes. So a pair works only if a test proves it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.report.table import markdown_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "several-gpus.md"
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Engine:
    """A way to train in several processes."""

    title: str
    keys: tuple[str, ...]
    """`--set` assignments that choose it, besides `sharding.gpus`."""


@dataclass(frozen=True)
class Feature:
    """An objective or a technique, as the keys of a recipe."""

    name: str
    title: str
    sections: Sections
    experts: bool = False
    """Whether its model is a mixture of experts."""


def _objective(name: str, **post_training: Any) -> Sections:
    return {"train": {"objective": name}, **({"post_training": post_training} if post_training else {})}


ENGINES = (
    Engine("DDP", ()),
    Engine("FSDP2", ("sharding.fsdp=true",)),
    *(Engine(f"ZeRO-{stage}", (f"sharding.zero={stage}",)) for stage in (1, 2, 3)),
)
_LORA: Sections = {"lora": {"rank": 4}}
_QLORA: Sections = {"lora": {"rank": 4, "quantize": True}}
_FP8: Sections = {"train": {"precision": "fp8", "fp8_bf16_layers": 0, "fp8_scaling": "rowwise"}}
_GRPO = {"rewards": ["my_rewards:short"], "generations": 2, "completion_length": 8}
FEATURES = (
    Feature("dpo", "DPO", _objective("dpo")),
    Feature("dpo-lora", "DPO with LoRA", {**_objective("dpo"), **_LORA}),
    Feature("dpo-qlora", "DPO with QLoRA", {**_objective("dpo"), **_QLORA}),
    Feature("kto", "KTO", _objective("kto")),
    Feature("orpo", "ORPO", _objective("orpo")),
    Feature("grpo", "GRPO", _objective("grpo", **_GRPO)),
    Feature("grpo-lora", "GRPO with LoRA", {**_objective("grpo", **_GRPO), **_LORA}),
    Feature("grpo-qlora", "GRPO with QLoRA", {**_objective("grpo", **_GRPO), **_QLORA}),
    Feature("distill", "Distillation", _objective("distill", teacher="teacher", completion_length=8)),
    Feature("reward", "Reward model", _objective("reward")),
    Feature("reward-lora", "Reward model with LoRA", {**_objective("reward"), **_LORA}),
    Feature("reward-qlora", "Reward model with QLoRA", {**_objective("reward"), **_QLORA}),
    Feature("lora", "LoRA", _LORA),
    Feature("qlora", "QLoRA", _QLORA),
    Feature("fp8", "FP8", _FP8),
    Feature("fp8-lora", "FP8 with LoRA", {**_FP8, **_LORA}),
    Feature("experts", "Mixture of experts", {}, experts=True),
    Feature("experts-lora", "Mixture, LoRA beside the experts", _LORA, experts=True),
    Feature(
        "lora-on-experts",
        "Mixture, LoRA on the experts",
        {"lora": {"rank": 4, "targets": ["linear", "experts"]}},
        experts=True,
    ),
    Feature(
        "qlora-on-experts",
        "Mixture, QLoRA on the experts",
        {"lora": {"rank": 4, "quantize": True, "targets": ["linear", "experts"]}},
        experts=True,
    ),
    Feature("medusa-1", "Medusa heads, stage 1", {"heads": {"stage": 1, "count": 2}}),
    Feature("medusa-2", "Medusa heads, stage 2", {"heads": {"stage": 2, "count": 2}}),
    Feature("medusa-lora", "Medusa heads, stage 2 with LoRA", {"heads": {"stage": 2, "count": 2}, **_LORA}),
    Feature("mtp", "MTP module", {"heads": {"stage": 2, "kind": "mtp", "count": 1}}),
)


def refusal(feature: Feature, engine: Engine) -> str | None:
    """The words with which `tigon train` refuses the pair before it loads anything; None if it does not."""
    import yaml

    sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in feature.sections.items()}
    sections["data"] = {"source": "rows.jsonl"}
    sections["train"] = {"steps": 2, "batch_size": 2, **sections.get("train", {})}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        try:
            recipe_checks.load(path, ("sharding.gpus=2", *engine.keys), gpu_present=lambda: True)
        except RecipeError as error:
            return str(error).removeprefix(f"{path}: ")
    return None


REFUSED: Mapping[tuple[str, str], str] = {
    (feature.name, engine.title): reason
    for feature in FEATURES
    for engine in ENGINES
    if (reason := refusal(feature, engine)) is not None
}
WORKING = tuple(
    (feature, engine) for feature in FEATURES for engine in ENGINES if (feature.name, engine.title) not in REFUSED
)
"""The pairs that tests/trainer/test_engine_pairs.py trains."""


def table() -> str:
    """The table of pairs, and under it each reason once."""
    reasons = list(dict.fromkeys(REFUSED.values()))

    def cell(feature: Feature, engine: Engine) -> str:
        reason = REFUSED.get((feature.name, engine.title))
        return "works" if reason is None else f"refused ({reasons.index(reason) + 1})"

    rows = [[feature.title, *(cell(feature, engine) for engine in ENGINES)] for feature in FEATURES]
    pairs = markdown_table(("", *(engine.title for engine in ENGINES)), rows)
    return "\n".join([pairs, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


PARTS: Mapping[str, Callable[[], str]] = {"table": table}


def written(text: str) -> str:
    """The page with its table written again."""
    return regions.written(text, "engine pairs", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
