"""Measure what `train.checkpointing: auto` chooses for Llama-3.2-1B under memory limits, beside `full`.

    python -m benchmarks.measure_checkpointing --json RECORD     # on a GPU: about 2 minutes
    python -m benchmarks.measure_checkpointing --tiny            # a small model on the CPU, to see that it runs

A step is 64 x 1024 random tokens: micro-batches through the model, clipping and fused AdamW, all in bf16. The limits
are on the peak of PyTorch's allocator, as in the tables of other libraries. Each choice trains from the same weights on
the same tokens as `full` with the same micro-batch, so the losses of both must be equal.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import transformers

import tigon
from benchmarks import step_record
from tigon.models.loading.config import load_config
from tigon.planner.gpus import GIB, Gpu, find_gpu, row_of
from tigon.planner.request import Request
from tigon.planner.search.checkpointing import choose
from tigon.planner.search.option import Option, estimate_option
from tigon.profiler.recording.peak import PeakMeter, training_state
from tigon.techniques.keys.settings import Settings

LIMITS_GIB = (17.06, 24.0, None)
"""The first is Liger's peak at 64 x 1024 tokens with full checkpointing; None: the whole GPU."""
TINY_SHARES = (0.3, 0.7, None)
"""Limits of the small model: full checkpointing plus this share of what keeping everything adds."""
WARM_UP_STEPS, STEPS = 2, 4


def allocated_bytes(option: Option) -> int:
    return option.estimate.peak_allocated_bytes


def request_of(tiny: bool) -> Request:
    name = "tigon-demo" if tiny else "llama-3.2-1b"
    batch, seq = (4, 32) if tiny else (64, 1024)
    settings, config = Settings.of({"train.precision": "bf16", "train.optimizer": "adamw"}), load_config(name)
    if tiny:
        config.num_hidden_layers, config.vocab_size = 3, 256
    return Request(model=name, config=config, batch=batch, seq=seq, settings=settings)


def gpu_here() -> Gpu:
    if not torch.cuda.is_available():
        return find_gpu("h200")
    properties = torch.cuda.get_device_properties(0)
    return replace(row_of(properties.name, properties.total_memory), memory_bytes=properties.total_memory)


def limits_of(request: Request, gpu: Gpu, tiny: bool) -> list[int | None]:
    if not tiny:
        return [None if gib is None else int(gib * GIB) for gib in LIMITS_GIB]
    full, none = (
        allocated_bytes(
            estimate_option(replace(request, settings=request.settings.having({"train.checkpointing": kind})), gpu)
        )
        for kind in ("full", "none")
    )
    return [None if share is None else int(full + share * (none - full)) for share in TINY_SHARES]


class Training:
    """A model and its data. Every measurement starts from the same weights."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        config = request.config
        config.use_cache = False
        with device:
            self.model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        tigon.patch(self.model)
        self.start = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
        draw = torch.Generator().manual_seed(1)
        shape = (WARM_UP_STEPS + STEPS, request.batch, request.seq)
        self.ids = torch.randint(0, config.vocab_size, shape, generator=draw)

    def measure(self, checkpointing: str, batch: int) -> dict[str, Any]:
        """Milliseconds per step (median), the peak in bytes, and the loss of each step."""
        self.model.load_state_dict(self.start)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        meter = None
        with tigon.checkpoint(self.model, checkpointing):
            times_s, losses = [], []
            for number, step_ids in enumerate(self.ids):
                if number == WARM_UP_STEPS:
                    if self.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    else:
                        meter = PeakMeter(self.device)
                        meter.start(list(training_state(self.model, optimizer)))
                self._wait()
                begin_s = time.perf_counter()
                losses.append(self._step(step_ids.to(self.device), batch, optimizer))
                self._wait()
                times_s.append(time.perf_counter() - begin_s)
            peak_bytes = torch.cuda.max_memory_allocated() if meter is None else meter.stop().peak_bytes
        del optimizer
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {
            "step_ms": 1000 * statistics.median(times_s[WARM_UP_STEPS:]), "peak_bytes": peak_bytes,
            "losses": torch.stack(losses).tolist(),
        }  # fmt: skip

    def _step(self, ids: torch.Tensor, batch: int, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        learned = torch.tensor(ids.shape[0] * (ids.shape[1] - 1), device=self.device)
        total = torch.zeros((), device=self.device)
        for micro in ids.split(batch):
            loss = self.model(input_ids=micro, labels=micro, num_items_in_batch=learned).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def row_for(limit: int | None, request: Request, gpu: Gpu, training: Training) -> dict[str, Any]:
    """One limit: the choice, its prediction, its measurement and that of `full` with the same micro-batch."""
    begin_s = time.perf_counter()
    splits = [(n, request.batch // n) for n in range(request.batch, 0, -1) if request.batch % n == 0]
    memory = gpu.memory_bytes if limit is None else limit
    option = choose(request, replace(gpu, memory_bytes=memory), splits, needs=allocated_bytes).option
    planned_s = time.perf_counter() - begin_s
    chosen, tokens = option.request, request.batch * request.seq
    full_request = replace(chosen, settings=chosen.settings.having({"train.checkpointing": "full"}))
    full = training.measure("full", chosen.batch)
    auto = training.measure(chosen.settings.train.checkpointing, chosen.batch)
    return {
        "limit_bytes": limit, "checkpointing": chosen.settings.train.checkpointing, "batch": chosen.batch,
        "accumulate": chosen.settings.train.gradient_accumulation, "planned_s": planned_s,
        "predicted": {
            "peak_bytes": allocated_bytes(option), "step_ms": 1000 * option.estimate.step_s,
            "full_step_ms": 1000 * estimate_option(full_request, gpu).estimate.step_s,
        },
        "measured": auto, "full": full,
        "tokens_per_s": 1000 * tokens / auto["step_ms"], "full_tokens_per_s": 1000 * tokens / full["step_ms"],
        "first_loss_is_that_of_full": auto["losses"][0] == full["losses"][0],
        "every_loss_is_that_of_full": auto["losses"] == full["losses"],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    limit = "whole GPU" if row["limit_bytes"] is None else f"{row['limit_bytes'] / GIB:.2f} GiB"
    predicted, measured, full = row["predicted"], row["measured"], row["full"]
    furthest = max(abs(a - b) for a, b in zip(measured["losses"], full["losses"], strict=True))
    same = "equal" if row["every_loss_is_that_of_full"] else f"at most {furthest:.2g} from"
    return (
        f"{limit:>10}  {row['accumulate']:>2} x {row['batch']:<2}  {row['checkpointing']:<26}  "
        f"peak {predicted['peak_bytes'] / GIB:.3f} -> {measured['peak_bytes'] / GIB:.3f} GiB  "
        f"step {predicted['step_ms']:.1f} -> {measured['step_ms']:.1f} ms  {row['tokens_per_s']:,.0f} tokens/s  "
        f"(full: {full['peak_bytes'] / GIB:.3f} GiB, {row['full_tokens_per_s']:,.0f} tokens/s)  losses {same} full's"
    )


def main() -> None:
    given = step_record.options(__doc__)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not given.tiny:
        sys.exit("Llama-3.2-1B needs a GPU; add --tiny to measure a small model on the CPU")
    record = step_record.StepRecord("measure_checkpointing", device)
    request, gpu = request_of(given.tiny), gpu_here()
    training = Training(request, device)
    if device.type == "cuda":
        training.measure("full", 8)  # compiles the kernels
    print("limit, micro-batches, choice; predicted -> measured", flush=True)
    rows = []
    for limit in limits_of(request, gpu, given.tiny):
        rows.append(row_for(limit, request, gpu, training))
        print(line(rows[-1]), flush=True)
    record.write(given.json, model=request.model, seq=request.seq, rows=rows)


if __name__ == "__main__":
    main()
