"""The timed steps: in a plain loop, or in TRL's SFTTrainer as the process has it."""

from __future__ import annotations

import importlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.duel import turns
from benchmarks.duel.inputs import SEED
from tigon.bench import timing

WARM_UP_STEPS, TIMED_STEPS = 4, 7
STEPS = WARM_UP_STEPS + TIMED_STEPS
LONG_TOKENS, LONG_WARM_UP_STEPS, LONG_STEPS = 65536, 1, 2
"""A longer sample takes fewer steps, because each takes about half a minute."""
GIB = 1 << 30


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def dtypes(model: Any) -> list[str]:
    return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained(model)})


def new_clock(device: torch.device, warm_ups: int = WARM_UP_STEPS) -> timing.StepClock:
    timing.release(device)
    clock = timing.StepClock(device, warm_ups)
    clock.begin()
    return clock


def next_step(clock: timing.StepClock, done: int, warm_ups: int) -> None:
    """End a step and begin the next. The last warm-up step, or that after the only one, is the first of the row's turn.

    done: steps that have ended, with this one.
    """
    clock.end()
    if done == max(warm_ups - 1, 1):
        turns.wait()
    clock.begin()


def measured(clock: timing.StepClock, tokens: int) -> dict[str, Any]:
    """Tokens per second of the median step, its milliseconds, and the peaks in GiB. Ends the row's turn."""
    turns.end()
    median_ms = statistics.median(clock.ms)
    reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {
        "tokens_per_s": round(1e3 * tokens / median_ms),
        "step_ms": [round(ms, 1) for ms in (min(clock.ms), median_ms, max(clock.ms))],
        "peak_gib": round((clock.peak_bytes or 0) / GIB, 2),
        "reserved_gib": round(reserved / GIB, 2),
        "warm_up_peak_gib": round((clock.warm_up_peak_bytes or 0) / GIB, 2),
        "warm_up_s": round(sum(clock.warm_up_ms) / 1e3, 1),
    }


def in_loop(model: Any, ids: torch.Tensor, learning_rate: float, autocast: bool) -> dict[str, Any]:
    """Steps of a plain loop: forward with labels, backward, AdamW.

    Args:
        model: in training mode.
        ids: (batch, seq), int64, also the labels.
        autocast: whether the forward runs under autocast to bf16.
    """
    device = next(model.parameters()).device
    ids = ids.to(device)
    optimizer = torch.optim.AdamW(trained(model), lr=learning_rate, weight_decay=0.0, fused=device.type == "cuda")
    losses = []
    warm_ups, steps = (LONG_WARM_UP_STEPS, LONG_STEPS) if ids.numel() > LONG_TOKENS else (WARM_UP_STEPS, STEPS)
    clock = new_clock(device, warm_ups)
    for done in range(1, steps + 1):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        next_step(clock, done, warm_ups)
    return {**measured(clock, ids.numel()), "losses": [round(float(one), 5) for one in losses]}


def in_trainer(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    learning_rate: float,
    built: Callable[[Any], None] = lambda trainer: None,
    **config: Any,
) -> dict[str, Any]:
    """The same steps in SFTTrainer. Import it after Unsloth, which replaces it.

    Args:
        built: called with the trainer before it trains.
        config: more arguments of SFTConfig.
    """
    datasets, transformers, trl = (importlib.import_module(name) for name in ("datasets", "transformers", "trl"))
    device = next(model.parameters()).device
    gpu = device.type == "cuda"
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in ids] * STEPS)
    arguments = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=len(ids), max_steps=STEPS, max_length=ids.shape[1],
        gradient_accumulation_steps=1,  # Unsloth's default is 2
        learning_rate=learning_rate, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=0.0,
        optim="adamw_torch_fused" if gpu else "adamw_torch", bf16=gpu, use_cpu=not gpu, logging_steps=1,
        save_strategy="no", report_to="none", seed=SEED, packing=False, disable_tqdm=True, dataset_num_proc=1,
        train_sampling_strategy="sequential", **config,
    )  # fmt: skip
    whole = [(p, p.detach().to("cpu", copy=True)) for p in trained(model) if p.dtype == torch.float32]
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    # TRL casts the adapters of a 4-bit model to bf16, where most of a small step is rounded away. Unsloth does not.
    recast = [(parameter, values) for parameter, values in whole if parameter.dtype != values.dtype]
    for parameter, values in recast:
        parameter.data = values.to(device)
    built(trainer)
    clock: list[timing.StepClock] = []

    class Timer(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.append(new_clock(device))

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            next_step(clock[0], state.global_step, WARM_UP_STEPS)

    trainer.add_callback(Timer())
    trainer.train()
    losses = [round(float(entry["loss"]), 5) for entry in trainer.state.log_history if "loss" in entry]
    return {
        **measured(clock[0], ids.numel()), "losses": losses[:STEPS], "recast_to_fp32": len(recast),
        "trainer": f"{type(trainer).__module__}.{type(trainer).__name__}",
    }  # fmt: skip
