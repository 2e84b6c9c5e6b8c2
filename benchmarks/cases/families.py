"""Compare the planner's peak with the measured one for every model family, at one odd shape. The limit is 3 %.

    python -m benchmarks families                                    # predictions, on any machine
    python -m benchmarks families --measure --json RECORD            # and the peaks, on a GPU
    python -m benchmarks families --json RECORD --into docs/planner-accuracy.md   # the table, from the record

The models have two layers with random weights. Batches of 3 x 1111 tokens and a vocabulary of 50,257 words are not
multiples of a kernel's block size. Each family takes three optimizer steps under autocast, in a
separate process, so that a failure does not affect the next family. The exit code is 1 if a peak is beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.harness import Bench, Case
from benchmarks.pages.planner_accuracy import percent
from benchmarks.pages.regions import write_between
from tigon.bench import timing
from tigon.errors import TigonError
from tigon.models import MODELS, patch
from tigon.models.verification.tiny import SIZES, tiny_config
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, Gpu, find_gpu
from tigon.planner.request import Request, text_config
from tigon.report.table import markdown_table
from tigon.techniques.keys.settings import Settings

BATCH, SEQ, STEPS = 3, 1111, 3
SECONDS = 240  # for one family, whose kernels are compiled first
LIMIT = 0.03
BEGIN, END = "<!-- families -->", "<!-- /families -->"
WIDE: Mapping[str, Any] = {
    **SIZES, "vocab_size": 50257, "vocab_size_per_layer_input": 50257, "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2048,
    "initializer_range": 0.02, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 1408,
    "intermediate_size_mlp": 5632, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "mamba_d_state": 64, "mamba_d_head": 64,
    "mamba_n_heads": 32, "mamba_d_ssm": 2048, "mamba_chunk_size": 128, "use_cache": False,
}  # fmt: skip
# Values of the table's small configs that do not fit the sizes above.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 16},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}}
    },
}


def config_of(model_type: str) -> Any:
    """The family's config in the sizes above; windows are 512 tokens wide."""
    overrides = {**MODELS[model_type].tiny, **_CHANGES.get(model_type, {})}
    if "sliding_window" in overrides:
        overrides["sliding_window"] = 512
    config = tiny_config(model_type, overrides, WIDE)
    text_config(config).use_cache = False
    return config


def _auto_class(config: Any) -> Any:
    sees = "vision_config" in getattr(config, "sub_configs", {})
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def attention_of(config: Any) -> str:
    """sdpa, and eager for the families whose attention sdpa cannot compute (GPT-OSS has a sink per head)."""
    return "sdpa" if _auto_class(config)._model_mapping[type(config)]._supports_sdpa else "eager"


def predicted(model_type: str, kernels: str, gpu: Gpu) -> int:
    """The planned peak of allocated memory, in bytes. Raises UsageError for a model that cannot be traced."""
    config = config_of(model_type)
    request = Request(
        model=model_type, config=config, batch=BATCH, seq=SEQ,
        settings=Settings.of({"train.precision": "amp-bf16", "model.kernels": kernels,
        "model.attention": attention_of(config)}),
    )  # fmt: skip
    return estimate(request, gpu=gpu, evaluation=False).peak_allocated_bytes


def measured(model_type: str, kernels: str) -> int:
    """The peak of allocated memory of STEPS steps on the GPU, in bytes."""
    config = config_of(model_type)
    with torch.device("cuda"):
        model = _auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention_of(config))
    model.train()
    if kernels == "tigon":
        patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(3, 1000, (BATCH, SEQ), generator=generator).cuda() for _ in range(STEPS)]

    def step(number: int) -> torch.Tensor:
        loss = _backward(model, batches[number])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return timing.time_steps(step, torch.device("cuda"), steps=STEPS, warm_ups=0).peak_bytes or 0


def _backward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Forward and backward. The output is dropped before the backward pass, as the Trainer does: it holds logits."""
    count = torch.tensor(ids.numel() - BATCH, device=ids.device)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=count, use_cache=False).loss
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def row_of(model_type: str, kernels: str, gpu: Gpu, measure: bool) -> dict[str, Any]:
    """One line of the record; `detail` says why a number is missing."""
    row: dict[str, Any] = {"model_type": model_type, "kernels": kernels, "detail": ""}
    if measure:
        return row | _row_alone(model_type, kernels, gpu)
    try:
        row["predicted_bytes"] = predicted(model_type, kernels, gpu)
    except TigonError as error:
        row["detail"] = f"not predicted: {' '.join(str(error).split())[:200]}"
    return row


def _row_alone(model_type: str, kernels: str, gpu: Gpu) -> dict[str, Any]:
    """Predict and measure one family in a separate process."""
    options = ["--kernels", kernels, "--gpu", gpu.name, "--alone", model_type]
    command = [sys.executable, "-m", "benchmarks", "families", *options]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"detail": f"not measured: no answer in {SECONDS} s"}
    if ran.returncode:
        return {"detail": f"not measured: {ran.stderr.strip().splitlines()[-1][:200]}"}
    row: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return row


def error_of(row: Mapping[str, Any]) -> float | None:
    """(predicted - measured) / measured; None where one of them is missing."""
    if "predicted_bytes" not in row or "measured_bytes" not in row:
        return None
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def table(record: Mapping[str, Any]) -> str:
    """Markdown: each family's predicted and measured peak. Rows without a measurement say why."""
    env = record["environment"]
    lines = [
        f"{env['device']}, driver {env['driver']}, torch {env['versions']['torch']}, tigon at commit "
        f"{env['tigon_commit']}, {env['date']}. Two layers, {BATCH} x {SEQ} tokens, amp-bf16, AdamW.",
        "",
    ]
    rows = []
    for row in record["rows"]:
        error = error_of(row)
        sizes = [f"{row[name] / GIB:.2f}" if name in row else "" for name in ("predicted_bytes", "measured_bytes")]
        rows.append([row["model_type"], row["kernels"], *sizes, row["detail"] if error is None else percent(error)])
    titles = ("family", "kernels", "predicted (GiB)", "measured (GiB)", "error")
    return "\n".join([*lines, markdown_table(titles, rows, texts=(0, 1))])


def measure_one(bench: Bench) -> None:
    """Print the line of one family, which this process predicts and measures."""
    given, (kernels,) = bench.given, bench.given.kernels
    peak_bytes = measured(given.alone, kernels)  # first, because planning allocates a few tensors on the GPU
    row = row_of(given.alone, kernels, find_gpu(given.gpu), measure=False)
    print(json.dumps(row | {"measured_bytes": peak_bytes}))


def measure(bench: Bench) -> None:
    given = bench.given
    transformers.utils.logging.set_verbosity_error()
    if given.alone:
        return measure_one(bench)
    if (given.into or given.measure) and given.json is None:
        bench.refuse("--measure and --into require --json RECORD")
    if given.measure and not bench.gpu:
        bench.refuse("--measure requires a GPU; without it the predictions are printed")
    if given.into:
        record = json.loads(given.json.read_text(encoding="utf-8"))
        write_between(table(record), given.into, begin=BEGIN, end=END)
        return None
    gpu = find_gpu(given.gpu)
    pool = ThreadPoolExecutor(given.jobs if given.measure else 1)
    cases = [(name, kernels) for name in given.only for kernels in given.kernels]
    for row in pool.map(lambda case: row_of(case[0], case[1], gpu, given.measure), cases):
        error = error_of(row)
        sizes = {name: f"{row[name] / GIB:.3f}" for name in ("predicted_bytes", "measured_bytes") if name in row}
        end = row["detail"] if error is None else percent(error)
        bench.add("rows", row, f"{row['model_type']} {row['kernels']} {sizes} {end}")
    _judge(bench.fields["rows"], given.measure)
    return None


def _judge(rows: Sequence[Mapping[str, Any]], measured_too: bool) -> None:
    """Exit with 1 if a peak is beyond the limit, or was not compared."""
    errors = {f"{row['model_type']} ({row['kernels']})": error_of(row) for row in rows}
    beyond = [case for case, error in errors.items() if error is not None and abs(error) > LIMIT]
    missing = [case for case, error in errors.items() if measured_too and error is None]
    for words, names in ((f"beyond {LIMIT:.0%}", beyond), ("without a comparison", missing)):
        if names:
            print(f"{words}: {', '.join(names)}", file=sys.stderr)
    if beyond or missing:
        sys.exit(1)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", nargs="+", choices=("tigon", "none"), default=["tigon", "none"])
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="FAMILY")
    parser.add_argument("--gpu", default="h200", help="the GPU of the predictions (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="train each family on this machine's GPU")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; they share the GPU's memory")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="write the table of --json into this document")
    parser.add_argument("--alone", choices=list(MODELS), help=argparse.SUPPRESS)


CASE = Case(measure=measure, options=options, needs_gpu=False)
