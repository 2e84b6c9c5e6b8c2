"""One process of one row of `python -m benchmarks several-cards`: `tigon train`, or its model and its Trainer timed.

It takes its order as a process of `tigon sweep` does, and answers with a file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # PyTorch imports it from C
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import plain_fsdp2
from benchmarks.harness import busy_ms, by_name, figures
from tigon._quiet import quiet_loading
from tigon.errors import TigonError
from tigon.objectives import recipe_checks
from tigon.recipe.keys import Recipe
from tigon.sweep import failures
from tigon.sweep.worker import orders
from tigon.sweep.worker.measure import measure
from tigon.trainer.distributed import launch
from tigon.trainer.guards import preflight
from tigon.trainer.run import train

WARM_UPS = 2


def main() -> None:
    order = orders.take_order()
    os.environ.update(order["environment"])
    if threads := order.get("threads"):
        torch.set_num_threads(threads)
    if order["without_cudnn"]:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        result = {"status": failures.OK, "detail": "", **_carry_out(order)}
    except TigonError as error:
        traceback.print_exc()
        room = f"{Path(order['recipe']).parent}/"  # a folder of this row alone
        result = {"status": failures.REFUSED, "detail": failures.line(error).replace(room, "")}
    except BaseException as error:  # any error is the result of this row and must be recorded
        traceback.print_exc()
        status, detail = failures.status_of_exception(error)
        result = {"status": status, "detail": detail}
    orders.write(Path(f"{order['result']}.{launch.rank()}"), result)
    if result["status"] != failures.OK:
        sys.stdout.flush()
        os._exit(1)  # the other processes may wait for this one in a collective
    launch.shutdown_distributed()


def _carry_out(order: dict[str, Any]) -> dict[str, Any]:
    quiet_loading()
    recipe, folder = Path(order["recipe"]), Path(order["folder"])
    if order["plain"]:
        return _plain(recipe_checks.load(recipe, gpu_present=lambda: False))
    if order["post_training"]:
        return _trained(recipe, folder)
    with _profiled(order["profiled"] and launch.rank() == 0) as kernels:
        measured = measure(
            recipe_checks.load(recipe, gpu_present=lambda: False),
            how_rows="random",
            unchecked=False,
            limit_bytes=None,
            folder=folder,
            wrong_ops={},
        )
    steps = measured["step_s"][WARM_UPS:] or measured["step_s"]
    tokens = statistics.median(measured["positions"]) * launch.world_size()
    return {
        "losses": measured["losses"],
        "ms": 1e3 * statistics.median(steps),
        "all_ms": [1e3 * seconds for seconds in measured["step_s"]],
        "tokens_per_s": tokens / statistics.median(steps),
        "peak_bytes": measured["peak_allocated_bytes"],
        "reserved_bytes": measured["peak_reserved_bytes"],
        "phases": measured["phases"],
        "prepare_s": measured["prepare_s"],
        **({"profile": kernels} if kernels else {}),
    }


def _plain(recipe: Recipe) -> dict[str, Any]:
    """FSDP2 without tigon, with the model, the samples and the number of steps of a recipe."""
    device = preflight.check_device(recipe)
    launch.init_distributed(device)
    assert recipe.train.steps is not None, "rows count steps"
    batch, seq = recipe.train.batch_size, recipe.data.sequence_length
    steps = max(1, recipe.train.steps - plain_fsdp2.WARM_UPS)
    timed = plain_fsdp2.trained(recipe.model.name, launch.rank(), device, batch=batch, seq=seq, steps=steps)
    return figures(timed, launch.world_size() * batch * seq)


def _trained(recipe: Path, folder: Path) -> dict[str, Any]:
    """A whole run of `tigon train`. A step ends when its record is written."""
    os.chdir(folder)
    metrics, ended = folder / "runs" / "run" / "metrics.jsonl", threading.Event()
    arrivals: list[float] = []
    watcher = threading.Thread(target=_watch, args=(metrics, arrivals, ended), daemon=True)
    if launch.rank() == 0:
        watcher.start()
    train(recipe)
    ended.set()
    if launch.rank() > 0:
        return {"losses": [], "peak_bytes": _peak()}
    watcher.join()
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["event"] == "train"]
    spans = [1e3 * (after - before) for before, after in itertools.pairwise(arrivals)]
    timed = spans[WARM_UPS - 1 :] or spans or [0.0]
    return {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step.get("grad_norm") for step in steps],
        "ms": statistics.median(timed),
        "all_ms": spans,
        "peak_bytes": _peak(),
        "plan_lines": [line for line in lines if line["event"] == "plan"],
    }


def _peak() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _watch(file: Path, arrivals: list[float], ended: threading.Event) -> None:
    """Note when each record of a step arrives."""
    while not (last := ended.wait(0.002)) or len(arrivals) == 0:
        count = file.read_text(encoding="utf-8").count('"event": "train"') if file.exists() else 0
        arrivals += [time.perf_counter()] * (count - len(arrivals))
        if last:
            return


# --- a profile --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _profiled(wanted: bool) -> Iterator[dict[str, Any]]:
    """Yields a mapping that holds the kernels of the last step, once the block has ended. Needs a GPU."""
    kernels: dict[str, Any] = {}
    if not wanted or not torch.cuda.is_available():
        yield kernels
        return
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        yield kernels
    events = [event for event in recorded.events() or () if event.device_type == DeviceType.CUDA]
    kernels.update(_last_step(events))


def _last_step(events: list[Any]) -> dict[str, Any]:
    """The kernels between the ends of the last two updates, and how long the collectives ran beside nothing else."""
    updates = sorted(event.time_range.end for event in events if "adam" in event.name.lower())
    ends = [end for end, after in zip(updates, [*updates[1:], float("inf")], strict=True) if after - end > 50_000]
    if len(ends) < 2:
        return {}
    begin_us, end_us = ends[-2:]
    step = [event for event in events if begin_us < event.time_range.end <= end_us]
    collectives = [event for event in step if "nccl" in event.name.lower()]
    compute = [event for event in step if "nccl" not in event.name.lower()]
    return {
        "ms": (end_us - begin_us) / 1e3,
        "busy_ms": busy_ms(step),
        "compute_ms": busy_ms(compute),
        "collectives_ms": busy_ms(collectives),
        "exposed_collectives_ms": busy_ms(step) - busy_ms(compute),
        "launches": len(step),
        "kernels": by_name(step, longest=30),
    }


if __name__ == "__main__":
    main()
