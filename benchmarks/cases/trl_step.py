"""One DPO and one GRPO step of Llama-3.2-1B in TRL: tokens per second and peak memory with and without tigon's head.

    python -m benchmarks trl-step --json RECORD      # on the GPU: about 3 minutes
    python -m benchmarks trl-step --tiny             # a small model on the CPU, to see that it runs
    python -m benchmarks trl-step --plan RECORD      # adds the planner's peaks; on any machine, without a GPU

A step is the trainer's own `compute_loss`, the backward pass and AdamW. GRPO's completions are random tokens, because
generating them would take most of the time. A model that runs out of memory is a result too. Each line is one
measurement:

    logits   TRL with the log-probabilities of all logits
    trl      TRL as it is
    head     TRL with `tigon.integrations.trl.fuse`
    tigon    `head`, and the layers patched by `tigon.patch`

The planner predicts runs of tigon, so `--plan` adds `planned_gib` to the lines of `tigon`. The number of layers whose
LoRA adapter is fused is recorded, because each layer of PEFT's own keeps copies of its input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tigon
from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.bench.record import save
from tigon.integrations.trl import fuse
from tigon.objectives.choose import planned_objective
from tigon.objectives.recipe_checks import of_assignments
from tigon.planner.estimate import estimate
from tigon.planner.gpus import find_gpu
from tigon.planner.request import Request
from tigon.techniques.keys.settings import Settings

# Their types are incomplete, and mypy checks this file.
datasets, peft, tokenizers, transformers, trl, trl_utils = (
    importlib.import_module(name)
    for name in ("datasets", "peft", "tokenizers", "transformers", "trl", "trl.trainer.utils")
)

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 900
PAIRS, SEQ = 8, 64 if TINY else 1024
COMPLETIONS = 4 if TINY else 64
GIB = 1 << 30
CHUNKED = trl_utils._ChunkedLogProbFunction
HEADS = ("trl", "tigon", "logits", "head")
Made = tuple[Any, dict[str, Any], int]
"""(trainer, a batch, tokens of the batch)"""


class AllLogits:
    """TRL's chunked function with all logits at once."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        ids: Any,
        temperature: float,
        _chunk: int,
        softcap: Any,
        scale: float,
        _: Any,
    ) -> tuple[Any, ...]:
        z = nn.functional.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        log_p = torch.log_softmax(z / temperature, -1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
            metrics = entropy, torch.logsumexp(2 * log_p, -1), z.mean(-1), z.argmax(-1) == ids
        return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), *metrics


def tokenizer() -> Any:
    """A tokenizer of words w0 to w899, so that nothing is downloaded."""
    words = {f"w{i}": i for i in range(WORDS)} | {"<pad>": WORDS, "<eos>": WORDS + 1, "<unk>": WORDS + 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def text(words: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(WORDS, (words,), generator=generator))


def policy() -> Any:
    """A model of `config()` with random weights in bf16."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config()).to(torch.bfloat16)


def config() -> Any:
    """The config of Llama-3.2-1B, or of a tiny Llama."""
    sizes: dict[str, Any] = (
        {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        if TINY else
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    )  # fmt: skip
    return transformers.LlamaConfig(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=WORDS, eos_token_id=WORDS + 1,
        bos_token_id=WORDS + 1, attn_implementation="sdpa",
    )  # fmt: skip


def adapters(kind: str) -> Any:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(r=16, target_modules=modules) if kind == "lora" else None


USUAL = {
    "output_dir": tempfile.mkdtemp(), "bf16": DEVICE == "cuda", "use_cpu": DEVICE == "cpu", "report_to": [],
    "gradient_checkpointing": True, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def dpo(kind: str) -> Made:
    half = SEQ // 2
    rows = [
        {"prompt": text(half, i), "chosen": " " + text(half - 2, 100 + i), "rejected": " " + text(half - 2, 200 + i)}
        for i in range(PAIRS)
    ]
    trainer = trl.DPOTrainer(
        policy(), ref_model=None if kind == "lora" else policy(), peft_config=adapters(kind),
        args=trl.DPOConfig(per_device_train_batch_size=PAIRS, max_length=SEQ, **USUAL),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip
    return trainer, next(iter(trainer.get_train_dataloader())), 2 * PAIRS * SEQ


def grpo(kind: str) -> Made:
    trainer = trl.GRPOTrainer(
        policy(), reward_funcs=lambda completions, **_: [0.0] * len(completions), peft_config=adapters(kind),
        args=trl.GRPOConfig(
            per_device_train_batch_size=64, num_generations=8, max_completion_length=SEQ // 2, beta=0.0, **USUAL
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": text(8, i)} for i in range(64)]),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    half = SEQ // 2
    ids = torch.randint(WORDS, (COMPLETIONS, 2 * half), device=DEVICE)
    mask = torch.ones(COMPLETIONS, half, dtype=torch.long, device=DEVICE)
    batch = {
        "prompt_ids": ids[:, :half], "prompt_mask": mask, "completion_ids": ids[:, half:], "completion_mask": mask,
        "advantages": torch.randn(COMPLETIONS, device=DEVICE),
        "num_items_in_batch": torch.tensor(COMPLETIONS * half, device=DEVICE),
    }  # fmt: skip
    return trainer, batch, ids.numel()


def measure(make: Callable[[str], Made], kind: str, how: str) -> dict[str, Any]:
    """Tokens per second (median of four steps after two) and the peak."""
    vars(trl_utils)["_ChunkedLogProbFunction"] = AllLogits if how == "logits" else CHUNKED
    trainer, batch, tokens = make(kind)
    model = trainer.model.to(DEVICE).train()
    fused_adapters = 0
    if how == "tigon":
        report = tigon.patch(model.base_model.model if kind == "lora" else model)
        fused_adapters = report.counts.get("lora_linear", 0)
    if how in ("head", "tigon") and not fuse(trainer).fused:
        raise RuntimeError("nothing was fused")
    # As `Trainer.train` does. Accelerate adds autocast to the forward. Without it fp32 adapters compute in fp32.
    model = trainer.accelerator.prepare_model(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=DEVICE == "cuda")

    def step(_number: int) -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, dict(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    timed = timing.time_steps(step, torch.device(DEVICE), steps=4, warm_ups=2)
    return {
        "trainer": make.__name__, "weights": kind, "head": how, "tokens_per_s": round(1e3 * tokens / timed.median_ms),
        "peak_gib": round((timed.peak_bytes or 0) / GIB, 2), "loss": timed.losses[-1], "fused_adapters": fused_adapters,
    }  # fmt: skip


def one_line(make: Callable[[str], Made], kind: str, how: str) -> dict[str, Any]:
    """`measure`, or what it could not allocate."""
    try:
        return measure(make, kind, how)
    except torch.OutOfMemoryError as error:
        return {"trainer": make.__name__, "weights": kind, "head": how, "out_of_memory": str(error).split(". ")[0]}


def planned_gib(trainer: str, kind: str) -> float:
    """The planner's peak of such a step on an H200. GRPO's sequences are half prompt and half completion."""
    batch, seq, keys = (PAIRS, SEQ, []) if trainer == "dpo" else (
        COMPLETIONS, SEQ // 2, [f"post_training.completion_length={SEQ // 2}", "post_training.generator=transformers"]
    )  # fmt: skip
    # Frozen weights in bf16 under autocast for LoRA; bf16 weights and states otherwise, as in `policy` and AdamW.
    settings = Settings.of({
        "train.precision": "amp-bf16" if kind == "lora" else "bf16", "train.checkpointing": "full",
        "lora.rank": 16 if kind == "lora" else None,
    })  # fmt: skip
    objective = planned_objective(of_assignments([f"train.objective={trainer}", *keys]))
    request = Request(
        model="llama", config=config(), batch=batch, seq=seq, settings=settings, objective=objective, masked=True,
        clipped=False,
    )  # fmt: skip
    return estimate(request, gpu=find_gpu("h200"), evaluation=False).peak_allocated_bytes / GIB


def add_plans(record: Path) -> None:
    """Add `planned_gib` to the lines of `tigon` in a record."""
    fields = json.loads(record.read_text(encoding="utf-8"))
    for line in fields["measurements"]:
        if line["head"] == "tigon":
            line["planned_gib"] = round(planned_gib(line["trainer"], line["weights"]), 2)
            print(json.dumps(line), flush=True)
    save(fields, record)


def measure_all(bench: Bench) -> None:
    if bench.given.plan:
        return add_plans(bench.given.plan)
    bench.fields |= {"pairs": PAIRS, "completions": COMPLETIONS, "tokens_per_sequence": SEQ}
    for how in bench.given.head or HEADS:
        for make in (dpo, grpo):
            for kind in ("lora", "full"):
                bench.add("measurements", one_line(make, kind, how))
                bench.free()
    return None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", action="append", choices=HEADS, help="measure only these lines")
    parser.add_argument("--plan", type=Path, metavar="RECORD", help="only add the planner's peaks to this record")


CASE = Case(measure=measure_all, options=options, packages=("trl", "peft"), needs_gpu=False)
