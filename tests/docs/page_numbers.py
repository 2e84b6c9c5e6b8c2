"""Tables and sentences of the pages that the code computes; hidden blocks of the pages print them."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import planner_accuracy as plan_accuracy
from benchmarks.pages import sweep_accuracy
from benchmarks.pages.planner_accuracy import QUANTITIES, Comparison
from tests.short_names import settings_of
from tigon.models.hybrid_layers import CONVOLUTION, DELTA_RULE, KINDS, counts_of
from tigon.models.loading.config import load_config
from tigon.models.loading.presets import PRESETS
from tigon.models.packed_documents import STATES_APART
from tigon.models.verification.small_models import small_model
from tigon.models.verification.tiny import tiny_model
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.simulate.model_states import model_weights
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
MODELS = ("llama-3.2-1b", "llama-3.1-8b")
# The recipe's words of a placement, and the same in the planner's.
PLACEMENTS = (
    ("`zero: 2, offload: cpu`", {"zero": 2, "offload": "cpu"}),
    ("`zero: 3, offload: cpu`", {"zero": 3, "offload": "cpu"}),
    ("`zero: 3, offload: nvme`", {"zero": 3, "offload": "nvme"}),
    ("`fsdp: true, offload: cpu`", {"fsdp": True, "offload": "cpu"}),
)


def host_memory_table() -> str:
    """The planner's host memory and disk space for the states of full fine-tuning, per model and placement."""
    lines = [
        "| model | `sharding` | host, GiB | host, bytes per parameter | files, GiB |",
        "|---|---|---:|---:|---:|",
    ]
    for model in MODELS:
        for words, keys in PLACEMENTS:
            settings = settings_of({"train.precision": "amp-bf16", **keys})  # type: ignore[arg-type]
            request = Request(model=model, config=load_config(model), batch=1, seq=1024, settings=settings)
            found = estimate(request, gpu=find_gpu("h200"), evaluation=False)
            parameters = sum(weight.numel for weight in model_weights(request).weights)
            lines.append(
                f"| `{model}` | {words} | {found.host_bytes / GIB:.1f} | {found.host_bytes / parameters:.1f} "
                f"| {found.nvme_bytes / GIB:.1f} |"
            )
    return "\n".join(lines)


def preset_sentence() -> str:
    """The names that `model.name` takes without a file or the network."""
    return textwrap.fill(f"The presets are {', '.join(f'`{name}`' for name in PRESETS)}.", 120)


def hybrid_kinds() -> str:
    """The layers without an op of tigon, and the kernels that transformers looks for."""
    rows = [(kind.name, f"`{kind.module}.{kind.function}`", f"`{kind.library}`") for kind in KINDS]
    return markdown_table(("layers", "kernel", "pip installs it as"), rows)


def hybrid_packing() -> str:
    """How the layers with a state of each family keep packed documents apart."""
    rows = []
    for family in sorted(STATES_APART):
        model, fields = small_model(family)
        if not counts_of(model):
            model = tiny_model(family, {**fields, "layer_types": ["conv", "full_attention"]})
        kinds = [kind for kind in KINDS if kind.name in counts_of(model)]
        library = next((kind.library for kind in kinds if kind.bounds), None)
        way = "one by one" if library is None else f"in one call beside {library}, otherwise one by one"
        if DELTA_RULE in kinds:
            way = f"in one call if patched or beside {library}, otherwise one by one"
        if kinds == [CONVOLUTION]:
            way = f"in one call, one by one beside {CONVOLUTION.library}"
        rows.append((f"`{family}`", ", ".join(kind.name for kind in kinds), way))
    return markdown_table(("family", "layers", "packed documents"), rows)


@functools.cache
def every_prediction() -> Sequence[Comparison]:
    """All runs on GPUs whose records are committed, with the predictions in docs/planner-accuracy.md."""
    runs = ROOT / plan_accuracy.MEASUREMENTS
    sweeps = runs.parents[1]
    measured = plan_accuracy.load(runs).measured
    return (
        *plan_accuracy.load_predictions(measured, plan_accuracy.predictions_path(runs)),
        *plan_accuracy.load_predictions(sweep_accuracy.load(sweeps), sweep_accuracy.predictions_path(sweeps)),
    )


def accuracy_sentence() -> str:
    """How well the plan holds over all of them."""
    found = every_prediction()
    two = sum(dict(one.case.get("keys", {})).get("sharding.gpus", 1) == 2 for one in found)
    allocated, _, time = QUANTITIES
    peaks = sorted(abs(one.error(allocated)) for one in found)
    within = sum(abs(one.error(time)) <= time.worst for one in found) / len(found)
    third_quarter = peaks[3 * len(peaks) // 4]
    sentences = (
        f"The plan was compared with {len(found)} runs on H200s, {two} of them on two GPUs.",
        f"The predicted peak is within {peaks[-1]:.1%} of the allocator's peak, "
        f"and within {third_quarter:.1%} for three runs in four.",
        f"The predicted time of a step is within {time.worst:.0%} for {within:.0%} of the runs.",
    )
    return textwrap.fill(" ".join(sentences), 120)
