"""Measure the host time of one eager forward and backward of every op, of PyTorch's own ops and of an empty function.

    python -m benchmarks.measure_host_time --json RECORD                       # on a GPU: about 30 s
    python -m benchmarks.measure_host_time --json RECORD --before OTHER/src    # two versions of tigon in one run
    python -m benchmarks.measure_host_time --device cpu                        # the whole call, on any machine

The shapes are small, so that every call is CPU-bound. Each version runs in its own process. PyTorch's ops and
the empty function are measured in both processes: if they differ, the machine changed and not tigon.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDS, CALLS, WARM_UP_CALLS = 7, 100, 10
SECONDS = 100  # for one version, whose kernels are compiled first
Call = Callable[[], Any]


class Empty(torch.autograd.Function):
    """The minimum cost of an op that is written as an autograd.Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def empty(x: Tensor) -> Any:
    return Empty.apply(x)  # type: ignore[no-untyped-call]


class NormWithoutKernels(torch.autograd.Function):
    """What rms_norm costs without its kernels: its arguments, saved tensors and results, all uninitialised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, fp32_weight: bool) -> Tensor:
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _rstd = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None, None, None


def norm_without_kernels(x: Tensor, weight: Tensor) -> Any:
    return NormWithoutKernels.apply(x, weight, 1e-6, 0.0, False)  # type: ignore[no-untyped-call]


def forward_and_backward(call: Callable[..., Any], inputs: Mapping[str, Any]) -> Call:
    """One call of `call` and the gradients of its floating-point inputs."""
    wanted = [t for t in inputs.values() if isinstance(t, Tensor) and t.requires_grad]
    upstream: list[Tensor] = []

    def run() -> None:
        result = call(**inputs)
        outputs = (result,) if isinstance(result, Tensor) else result
        if not upstream:
            upstream.extend(torch.ones_like(t) for t in outputs)
        torch.autograd.grad(outputs, wanted, upstream)

    return run


def norm_without_launches(x: Tensor, weight: Tensor) -> Call:
    """rms_norm whose kernels are not launched after the first call: what its Python takes, beyond `NormWithoutKernels`.

    Addresses, keys and the stream are still gathered; only the launcher's function does nothing. No other call may
    have x's shape, because calls of one shape share their launches.
    """
    from tigon import ops
    from tigon.kernels import _launch

    def keep_nothing(launch: _launch.Launch, key: Any, compiled: Any) -> None:
        launch._compiled[key] = (lambda *arguments: None), (None,) * 8

    run = forward_and_backward(ops.rms_norm, {"x": x, "weight": weight})
    with patch.object(_launch.Launch, "_keep", keep_nothing):
        run()
    return run


def calls(device: torch.device) -> dict[str, dict[str, Call]]:
    """The timed calls: op -> {"tigon": ..., "torch": ...}. If PyTorch has no fused op, it runs the formula."""
    from tigon import ops

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def pair(ours: Callable[..., Any], theirs: Callable[..., Any], **inputs: Any) -> dict[str, Call]:
        return {"tigon": forward_and_backward(ours, inputs), "torch": forward_and_backward(theirs, inputs)}

    # On a CPU the host computes too, so the tensors are as small as they can be.
    T, H, V = (32, 1024, 4096) if device.type == "cuda" else (4, 16, 32)
    N = 2 * T
    x, residual, weight, bias = leaf(N, H), leaf(N, H), leaf(H), leaf(H)
    gate, up, logits = leaf(N, H), leaf(N, H), leaf(N, V)
    head, hidden_NH, hidden_BTH = leaf(V, H), leaf(N, H), leaf(2, T, H)
    target = torch.randint(0, V, (N,), device=device)
    cos, sin = torch.randn(2, 1, T, 64, device=device).to(torch.bfloat16).unbind()
    q, k = leaf(1, 8, T, 64), leaf(1, 2, T, 64)

    without_launches = {}
    if device.type == "cuda":
        without_launches["rms_norm without launches"] = {"tigon": norm_without_launches(leaf(N - 1, H), weight)}

    def linear_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), target)

    def two_heads(hiddens: Tensor, weights: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hiddens, weights)
        shifted = (logits[:, :-s].flatten(0, 1) for s in (1, 2))
        first, second = (F.cross_entropy(z, target[:, s:].flatten()) for z, s in zip(shifted, (1, 2), strict=True))
        return first + second

    return {
        "rms_norm": pair(ops.rms_norm, lambda x, weight: F.rms_norm(x, (H,), weight, 1e-6), x=x, weight=weight),
        "add_rms_norm": pair(
            ops.add_rms_norm,
            lambda x, residual, weight: (F.rms_norm(s := x + residual, (H,), weight, 1e-6), s),
            x=x, residual=residual, weight=weight,
        ),
        "layer_norm": pair(
            ops.layer_norm, lambda x, weight, bias: F.layer_norm(x, (H,), weight, bias), x=x, weight=weight, bias=bias
        ),
        "rope": pair(ops.rope, ops.OPS["rope"].oracle, q=q, k=k, cos=cos, sin=sin),
        "swiglu": pair(ops.swiglu, lambda gate, up: F.silu(gate) * up, gate=gate, up=up),
        "geglu": pair(ops.geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, gate=gate, up=up),
        "cross_entropy": pair(
            ops.cross_entropy, lambda logits, target: F.cross_entropy(logits, target), logits=logits, target=target
        ),
        "linear_cross_entropy": pair(
            ops.linear_cross_entropy, linear_loss, hidden=hidden_NH, weight=head,
            target=target,
        ),
        "multi_head_linear_cross_entropy": pair(
            functools.partial(ops.multi_head_linear_cross_entropy, shifts=(1, 2)), two_heads,
            hiddens=hidden_BTH, weights=head, target=target.view(2, T),
        ),
        "empty autograd.Function": {"torch": forward_and_backward(empty, {"x": x})},
        "rms_norm without its kernels": {
            "torch": forward_and_backward(norm_without_kernels, {"x": x, "weight": weight})
        },
        **without_launches,
    }  # fmt: skip


def measure(device: torch.device) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds per call: op -> implementation -> median and lowest of the rounds' means."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found: dict[str, dict[str, dict[str, float]]] = {}
    for op, implementations in calls(device).items():
        rounds_us: dict[str, list[float]] = {name: [] for name in implementations}
        for call in implementations.values():
            for _ in range(WARM_UP_CALLS):
                call()
        gc.collect()
        gc.disable()  # its pauses would land in single calls
        for _ in range(ROUNDS):
            for name, call in implementations.items():
                synchronize()
                start_s = time.perf_counter()
                for _ in range(CALLS):
                    call()
                rounds_us[name].append((time.perf_counter() - start_s) / CALLS * 1e6)
        gc.enable()
        found[op] = {
            name: {"median_us": round(statistics.median(times), 1), "lowest_us": round(min(times), 1)}
            for name, times in rounds_us.items()
        }
    return found


def measured_in_a_process(source: Path | None, device: str) -> Any:
    """`measure` of the tigon in `source`, or of the one that this process imports."""
    path = [str(source), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")] if source else None
    environ = os.environ if path is None else {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "benchmarks.measure_host_time", "--device", device, "--here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"The measurement of {source or 'this tigon'} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def table(record: Mapping[str, Any]) -> str:
    """One line per op: median host time of each version and of PyTorch."""
    versions = [name for name in ("before", "after") if name in record]
    lines = [f"{'median us':34}" + "".join(f"{name:>10} {'torch':>10}" for name in versions)]
    for op, times in record["after"]["us"].items():
        cells = ""
        for name in versions:
            both = record[name]["us"].get(op, times)
            cells += "".join(
                f"{both[i]['median_us'] if i in both else '-':>{w}}" for i, w in (("tigon", 10), ("torch", 11))
            )
        lines.append(f"{op:34}{cells}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, metavar="RECORD", help="write the record to this file")
    parser.add_argument("--before", type=Path, metavar="SRC", help="the src folder of another version, measured first")
    parser.add_argument("--before-commit", metavar="COMMIT", help="the commit of --before, for the record")
    parser.add_argument("--here", action="store_true", help="measure in this process and print JSON; used by the above")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.here:
        print(json.dumps({"us": measure(torch.device(options.device))}))
        return
    from tigon.bench.record import environment

    start_s = time.monotonic()
    record: dict[str, Any] = {
        "environment": environment(torch.device(options.device)),
        "command": " ".join(["python -m benchmarks.measure_host_time", *sys.argv[1:]]),
        "rounds": ROUNDS,
        "calls_per_round": CALLS,
    }
    if options.before is not None:
        record["before"] = measured_in_a_process(options.before.resolve(), options.device)
        record["before"]["commit"] = options.before_commit
    record["after"] = measured_in_a_process(None, options.device)
    record["seconds"] = round(time.monotonic() - start_s, 1)
    print(table(record))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
