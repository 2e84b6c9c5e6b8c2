"""Measure training steps whose sequences share prompts: padded batches, and one copy of each prompt.

    python -m benchmarks shared-prefix --json RECORD    # on a GPU with 80 GB: about 2 minutes
    python -m benchmarks shared-prefix --tiny           # a small model, also without a GPU

The model has the shape of Qwen3-4B, random bf16 weights and LoRA of rank 16 in fp32, tigon's layers and head, and
activation checkpointing. A step is the forward passes, the loss, the backward pass and AdamW, of a batch that no step
had before. Completions are random tokens, because generating them is another measurement. One more step of each row is
profiled. `operators` is the shared row with PyTorch's operators in place of the kernel that joins both parts of the
attention. `layout_ms` is the time in which the host finds the prefixes.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tigon
from benchmarks.cases.generation import qwen3_4b
from benchmarks.harness import Bench, Case
from tigon.bench import timing
from tigon.integrations.trl.forward import FusedForward
from tigon.integrations.trl.prefix_layout import layout_of
from tigon.integrations.trl.shared_prefix import SharedPrefix
from tigon.planner.gpus import GIB

# Their types are incomplete, and mypy checks this file.
peft, trl_utils = (importlib.import_module(name) for name in ("peft", "trl.trainer.utils"))
attention = importlib.import_module("tigon.ops.shared_prefix_attention")
"""The module; `tigon.ops` has a function of its name."""


def log_probs(model: Any, batch: dict[str, Tensor]) -> Any:
    """TRL's output of the fused head, with one row per sequence."""
    return model(**batch, fused_lm_head=True)


def grpo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of TRL's GRPO with one update per batch and without a reference."""
    output = log_probs(model, batch)
    advantage = torch.linspace(-1, 1, len(output.log_probs), device=output.log_probs.device)[:, None]
    ratio = torch.exp(output.log_probs - output.log_probs.detach())
    loss: Tensor = -(ratio * advantage * output.label_mask).sum() / output.label_mask.sum()
    return loss


def dpo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of pairs, whose reference is the model without its adapters."""
    policy = log_probs(model, batch).log_probs.sum(1)
    with torch.no_grad(), model.disable_adapter():
        reference = log_probs(model, batch).log_probs.sum(1)
    chosen, rejected = (policy - reference).view(-1, 2).unbind(1)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


@dataclass(frozen=True)
class Row:
    """A batch: `prompts` with `completions` each, of `shortest` to `longest` tokens."""

    step: str
    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    prompts: int
    completions: int
    prompt: int = 1024
    shortest: int = 256
    longest: int = 256

    def batch(self, vocab: int, device: torch.device) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(5, vocab, (self.prompts, 1, self.prompt), generator=draw)
        answers = torch.randint(5, vocab, (self.prompts, self.completions, self.longest), generator=draw)
        ids = torch.cat([prompts.expand(-1, self.completions, -1), answers], 2).flatten(0, 1)
        sizes = torch.randint(self.shortest, self.longest + 1, (len(ids), 1), generator=draw)
        mask = (torch.arange(ids.shape[1]) < self.prompt + sizes).long()
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : self.prompt] = -100
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: tensor.to(device) for name, tensor in batch.items()}


ROWS = (Row("GRPO", grpo, 8, 8), Row("GRPO", grpo, 8, 8, shortest=128), Row("GRPO", grpo, 1, 8), Row("DPO", dpo, 8, 2))
LONGEST = 12
"""Kernels that a profile names."""
TINY_ROWS = (Row("GRPO", grpo, 2, 4, 64, 8, 16), Row("DPO", dpo, 2, 2, 64, 16, 16))


def patched(bench: Bench) -> tuple[Any, FusedForward]:
    """The model with adapters and tigon's layers, and its forward with tigon's head."""
    base = qwen3_4b(bench)
    trl_utils.add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    forward = FusedForward(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear"))
    model.enable_input_require_grads()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tigon.patch(base)
    return model.train(), forward


def measured(bench: Bench, row: Row, model: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Seconds, peak and loss of a step of this row."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def step(_number: int) -> Tensor:
        loss = row.loss(model, {name: tensor.clone() for name, tensor in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    bench.free()
    timed = timing.time_steps(step, bench.device, steps=2)
    line = {"seconds": round(timed.median_ms / 1e3, 3), "loss": timed.losses[-1], **profiled(bench, step)}
    return line if timed.peak_bytes is None else {**line, "peak_gib": round(timed.peak_bytes / GIB, 2)}


def profiled(bench: Bench, step: Callable[[int], Tensor]) -> dict[str, Any]:
    """Of one more step: the seconds until the host has launched it, the kernels' sum, and the longest kernels in ms.

    If the sum is far below the step's time, the GPU waits for the host.
    """
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if bench.gpu else activity.CPU]) as profile:
        begin = time.perf_counter()
        step(0)
        launched = time.perf_counter() - begin
        if bench.gpu:
            torch.cuda.synchronize()
    field = "self_device_time_total" if bench.gpu else "self_cpu_time_total"
    times = {event.key[:80]: getattr(event, field) / 1e3 for event in profile.key_averages()}
    longest = sorted(times, key=times.__getitem__, reverse=True)[:LONGEST]
    return {
        "launched_s": round(launched, 3),
        "kernels_s": round(sum(times.values()) / 1e3, 3),
        "longest_ms": {name: round(times[name], 2) for name in longest},
    }


@contextlib.contextmanager
def joined_by_operators() -> Iterator[None]:
    """Both parts of the attention are joined without the kernel."""
    primitive = attention.join_attention
    vars(attention)["join_attention"] = attention._join
    try:
        yield
    finally:
        vars(attention)["join_attention"] = primitive


def layout_ms(batch: dict[str, Tensor]) -> float:
    """The median of five batches with the same tokens."""
    times = []
    for _ in range(5):
        ids, mask = (batch[name].cpu().clone() for name in ("input_ids", "attention_mask"))
        begin = time.perf_counter()
        layout_of(ids, mask)
        times.append(1e3 * (time.perf_counter() - begin))
    return round(statistics.median(times), 2)


def measure(bench: Bench) -> None:
    bench.fields["threads"] = torch.get_num_threads()
    model, forward = patched(bench)
    sharing = SharedPrefix(forward.model)
    for row in TINY_ROWS if bench.tiny else ROWS:
        batch = row.batch(model.config.vocab_size, bench.device)
        layout = layout_of(batch["input_ids"], batch["attention_mask"])
        assert layout is not None, "the completions of a prompt share it"
        forward.shared = None
        padded = measured(bench, row, model, batch)
        forward.shared = sharing
        shared = measured(bench, row, model, batch)
        with joined_by_operators():
            operators = measured(bench, row, model, batch)
        rows = {"padded": padded, "shared": shared, "operators": operators, "layout_ms": layout_ms(batch)}
        sizes = {"prompts": row.prompts, "completions": row.completions, "prompt_tokens": row.prompt}
        answers = {"completion_tokens": [row.shortest, row.longest], "tokens": [layout.row.given, layout.tokens]}
        bench.add("measurements", {"step": row.step, **sizes, **answers, **rows})


CASE = Case(measure=measure, packages=("trl", "peft"))
