"""Write recipes/models/ and the table of docs/model-recipes.md: recipes per model, method and class of GPU memory.

    python -m benchmarks.pages.model_recipes                 # plan every model again, and write recipes and table
    python -m benchmarks.pages.model_recipes --only qwen3    # of models whose name contains this
    python -m benchmarks.pages.model_recipes --check         # print what differs from a new plan, and write nothing

A recipe is named by the smallest class of GPU memory that it fits. A GPU of the planner's table with little usable
memory stands for each class. A larger class gets another recipe if its memory allows one that changes the numbers less,
that recomputes no layer, or that keeps no layer on the host. A step has 16 rows of 2,048 tokens, one at a time. QLoRA
keeps frozen layers in memory of the host if nothing else fits. No other recipe uses memory of the host.

Hybrid models are planned with the kernels of flash-linear-attention, which must be installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.pages import regions
from tigon.cli.plan_request import Flags, problem_of
from tigon.models.hybrid_layers import DELTA_RULE, found_libraries
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.planner.search.option import Option, estimate_option
from tigon.planner.search.space import SearchProblem
from tigon.report.table import markdown_table
from tigon.techniques.base_offload import base_offload

FOLDER, PAGE = Path("recipes/models"), Path("docs/model-recipes.md")
BEGIN, END = "<!-- model recipes -->", "<!-- /model recipes -->"
CLASSES: Mapping[int, str] = {
    8: "rtx-4060-ti-8gb",
    12: "rtx-4070",
    16: "rtx-5080",
    24: "a10",
    48: "l40s",
    80: "a100-80gb",
}
"""GB that the maker names -> the GPU of the planner's table that stands for the class."""
SEQUENCE, EFFECTIVE_BATCH = 2048, 16
SETTINGS: tuple[Mapping[str, str], ...] = (
    {"train.precision": "amp-bf16", "train.optimizer": "adamw"},
    {"train.precision": "bf16", "train.optimizer": "adamw"},
    {"train.precision": "bf16", "train.optimizer": "adamw-8bit"},
)
"""Smallest change of the numbers first. With adapters only the first is tried, because their states are small."""
KINDS: tuple[Mapping[str, object], ...] = ({"train.checkpointing": "none"}, {"train.checkpointing": "full"})
ON_HOST: tuple[Mapping[str, object], ...] = (
    {"train.checkpointing": "full", base_offload.KEY: True},
    {"train.checkpointing": "offload", base_offload.KEY: True},
)
"""The last kinds of QLoRA."""


@dataclass(frozen=True)
class Model:
    """A model of the hub."""

    name: str
    """Its folder under recipes/models."""
    hub_id: str
    methods: tuple[str, ...] = ("full", "lora", "qlora")
    attention: str = "sdpa"
    """The value of `model.attention`."""
    least_gb: int = 12
    """The smallest class that is tried."""
    hybrid: bool = False
    """Whether its plan counts on flash-linear-attention."""


MODELS = (
    Model("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", ("full", "lora")),
    Model("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
    Model("gemma-3-1b", "google/gemma-3-1b-it"),
    Model("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct"),
    Model("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    Model("qwen3-1.7b", "Qwen/Qwen3-1.7B"),
    Model("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct"),
    Model("phi-4-mini", "microsoft/Phi-4-mini-instruct"),
    Model("qwen3-4b", "Qwen/Qwen3-4B"),
    Model("gemma-3-4b", "google/gemma-3-4b-it"),
    Model("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
    Model("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", least_gb=8),
    Model("qwen3-8b", "Qwen/Qwen3-8B"),
    Model("qwen3-32b", "Qwen/Qwen3-32B", ("qlora",), least_gb=8),
    Model("llama-3.1-70b", "meta-llama/Llama-3.1-70B-Instruct", ("qlora",), least_gb=8),
    # transformers' sdpa cannot compute its attention sinks.
    Model("gpt-oss-20b", "unsloth/gpt-oss-20b-BF16", ("lora", "qlora", "qlora-experts"), attention="eager"),
    Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", ("lora", "lora-experts", "qlora", "qlora-experts")),
    Model("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", hybrid=True),
    Model("qwen3.5-2b", "Qwen/Qwen3.5-2B", hybrid=True),
    Model("qwen3.5-4b", "Qwen/Qwen3.5-4B", hybrid=True, least_gb=8),
    Model("qwen3.5-9b", "Qwen/Qwen3.5-9B", hybrid=True, least_gb=8),
    Model("qwen3.5-27b", "Qwen/Qwen3.5-27B", ("qlora",), hybrid=True, least_gb=8),
    Model("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", ("qlora", "qlora-experts"), hybrid=True),
    Model("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", ("qlora",), hybrid=True),
    Model("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", ("qlora",), hybrid=True),
    Model("gemma-4-e2b", "google/gemma-4-E2B-it", ("lora", "qlora"), least_gb=8),
    Model("gemma-4-e4b", "google/gemma-4-E4B-it", ("lora", "qlora"), least_gb=8),
    Model("gemma-4-12b", "google/gemma-4-12B-it", ("lora", "qlora"), least_gb=8),
    Model("gemma-4-26b-a4b", "google/gemma-4-26B-A4B-it", ("lora", "qlora")),
    Model("gemma-4-31b", "google/gemma-4-31B-it", ("qlora",)),
    Model("glm-4.5-air", "zai-org/GLM-4.5-Air", ("qlora",)),
    Model("glm-4.7-flash", "zai-org/GLM-4.7-Flash", ("lora", "qlora")),
)
_ADAPTERS = "2.0e-4"
LEARNING_RATES: Mapping[str, str] = {
    "full": "1.0e-5", "lora": _ADAPTERS, "lora-experts": _ADAPTERS, "qlora": _ADAPTERS, "qlora-experts": _ADAPTERS,
}  # fmt: skip
TITLES: Mapping[str, str] = {
    "full": "Full fine-tuning", "lora": "LoRA", "lora-experts": "LoRA, experts included,", "qlora": "QLoRA",
    "qlora-experts": "QLoRA, experts included,",
}  # fmt: skip
WITH_EXPERTS = "-experts"
"""The end of a method whose adapters are on the experts too."""


@dataclass(frozen=True)
class Row:
    """A recipe and its plan."""

    model: Model
    method: str
    gb: int
    option: Option

    @property
    def path(self) -> Path:
        return FOLDER / self.model.name / f"{self.method}-{self.gb}gb.yaml"


def asked(model: Model, method: str, gb: int, given: Mapping[str, object]) -> SearchProblem:
    """The question for the run of a model and method on a GPU of this class, with these settings."""
    on_host = base_offload.KEY in given
    given = {key: value for key, value in given.items() if key != base_offload.KEY}
    found = problem_of(
        Flags(
            target=model.hub_id, gpu=find_gpu(CLASSES[gb]), method=method.removesuffix(WITH_EXPERTS),
            given={
                "train.batch_size": 1, "data.sequence_length": SEQUENCE, "model.attention": model.attention,
                "train.gradient_accumulation": EFFECTIVE_BATCH, **given,
            },
        )
    )  # fmt: skip
    targets = ("all-linear", "experts") if method.endswith(WITH_EXPERTS) else found.request.settings.lora.targets
    more = {"lora.targets": targets, base_offload.KEY: on_host}  # `tigon plan` has no options for them
    request = replace(found.request, settings=found.request.settings.having(more))
    return replace(found, request=request, gpu=space.with_headroom(found.gpu))


def chosen(model: Model, method: str) -> list[Row]:
    """The recipes by class of memory: the first of SETTINGS that fits with a kind of checkpointing, and the first kind.

    A class whose recipe is that of the smaller class has none.
    """
    rows: list[Row] = []
    kinds = (*KINDS, *ON_HOST) if method == "qlora" else KINDS
    combinations = [{**kind, **s} for s in (SETTINGS if method == "full" else SETTINGS[:1]) for kind in kinds]
    largest: list[Option] = []
    for given in combinations:
        problem = asked(model, method, max(CLASSES), given)
        largest.append(estimate_option(problem.request, problem.gpu))
    best = len(combinations)
    for gb, name in ((gb, name) for gb, name in CLASSES.items() if gb >= model.least_gb):
        room = space.with_headroom(find_gpu(name)).memory_bytes
        for place, given in enumerate(combinations[:best]):
            if largest[place].estimate.device_bytes > room:
                continue
            problem = asked(model, method, gb, given)
            option = estimate_option(problem.request, problem.gpu)
            if option.fits(problem.gpu):
                rows.append(Row(model, method, gb, option))
                best = place
                break
    return rows


def memory_class(path: Path) -> int:
    """The GB in the name of a recipe."""
    found = re.search(r"-(\d+)gb\.yaml$", path.name)
    assert found is not None, path
    return int(found[1])


def replanned(model: Model, method: str, path: Path) -> Row:
    """The plan of a recipe as it stands in its file."""
    gb = memory_class(path)
    problem = problem_of(Flags(target=str(path), gpu=find_gpu(CLASSES[gb])))
    option = estimate_option(problem.request, problem.gpu)
    return Row(model, method, gb, option)


def text(model: Model, method: str, gb: int, request: Request) -> str:
    """The recipe file."""
    settings, path = request.settings, FOLDER / model.name / f"{method}-{gb}gb.yaml"
    lines = [
        f"# {TITLES[method]} of {model.hub_id} on a GPU with {gb} GB; docs/model-recipes.md has the plan.",
        "# The text is what every Python carries, to try the recipe; name your own rows.",
        *["# The plan counts on `pip install flash-linear-attention`; without it the run is slow, and says so."]
        * model.hybrid,
        "#",
        f"#     tigon train {path} --set data.source=rows.jsonl",
        "model:", f"  name: {model.hub_id}", *(f"  attention: {a}" for a in [model.attention] if a != "sdpa"),
        "data:", "  source: python-docs", f"  sequence_length: {request.seq}",
        "train:", "  epochs: 1", f"  batch_size: {request.batch}",
        f"  gradient_accumulation: {settings.train.gradient_accumulation}",
        f"  learning_rate: {LEARNING_RATES[method]}", "  warmup_steps: 10", f"  precision: {settings.train.precision}",
        f"  optimizer: {settings.train.optimizer}", f"  checkpointing: {settings.train.checkpointing}",
    ]  # fmt: skip
    if method != "full":
        targets = "[all-linear, experts]" if method.endswith(WITH_EXPERTS) else "all-linear"
        lines += ["lora:", "  rank: 16", f"  targets: {targets}"]
    if method.startswith("qlora"):
        lines += ["  quantize: true", *["  base_offload: true"] * settings.lora.base_offload]
    lines += ["output:", f"  name: {model.name}-{method}", "  if_exists: number"]
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    shown = []
    for row in rows:
        gpu, request, result = find_gpu(CLASSES[row.gb]), row.option.request, row.option.estimate
        link = f"[{row.model.name}/{row.path.name}](../{row.path})"
        changes = ", ".join(name for name in space.change_names(request) if name not in TITLES) or "nothing"
        split = (
            f"{request.batch} x {request.settings.train.gradient_accumulation}, {request.settings.train.checkpointing}"
        )
        sizes = [f"{nbytes / GIB:.1f}" for nbytes in (result.device_bytes, gpu.memory_bytes)]
        host = f"{result.host_bytes / GIB:.1f}" if result.host_bytes else "–"
        shown.append([link, gpu.name, *sizes, host, split, f"{result.tokens_per_s:,.0f}", changes])
    memory = ("needs (GiB)", "of (GiB)", "host (GiB)")
    titles = ("recipe", "GPU of the plan", *memory, "micro-batch", "tokens/s", "changes")
    return markdown_table(titles, shown, texts=(0, 1, 5, 7))


def recipe_files() -> Iterator[tuple[Model, str, Path]]:
    """The models' recipes that exist, in the order of MODELS."""
    for model in MODELS:
        for method in model.methods:
            for path in sorted((FOLDER / model.name).glob(f"{method}-[0-9]*gb.yaml"), key=memory_class):
                yield model, method, path


def in_page() -> dict[str, str]:
    """The lines of the page's table by recipe."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    return {found[1]: line for line in lines if (found := re.match(r"\| \[[^]]+\]\(\.\./([^)]+)\)", line))}


def write_table(new: Mapping[Path, Row]) -> None:
    """Write the lines of `new` into the page's table, and leave those of other recipes as they are."""
    old = in_page()
    heading, rule, *_ = table([]).splitlines()
    lines = [table([new[path]]).splitlines()[2] if path in new else old[str(path)] for _, _, path in recipe_files()]
    regions.write_between("\n".join([heading, rule, *lines]), PAGE, begin=BEGIN, end=END)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="choose recipes again only for models whose name contains this")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a new plan differs")
    arguments = parser.parse_args()
    hybrids = any(model.hybrid and arguments.only in model.name for model in MODELS)
    if hybrids and DELTA_RULE.library not in found_libraries():
        parser.error("hybrid models are planned with flash-linear-attention; pip install flash-linear-attention")
    new: dict[Path, Row] = {}
    for model in MODELS if not arguments.check else ():
        for method in model.methods if arguments.only in model.name else ():
            found = chosen(model, method)
            for old in (FOLDER / model.name).glob(f"{method}-[0-9]*gb.yaml"):
                old.unlink()
            if not found:
                print(f"{model.name} {method}: fits no class", file=sys.stderr)
            for row in found:
                row.path.parent.mkdir(parents=True, exist_ok=True)
                row.path.write_text(text(model, method, row.gb, row.option.request), encoding="utf-8")
                new[row.path] = row
                print(f"{row.path}: {row.option.estimate.device_bytes / GIB:.1f} GiB", file=sys.stderr, flush=True)
            write_table(new)
    if arguments.check:
        shown = table([replanned(model, method, path) for model, method, path in recipe_files()])
        if shown not in PAGE.read_text(encoding="utf-8"):
            print(shown)
            sys.exit(1)


if __name__ == "__main__":
    main()
