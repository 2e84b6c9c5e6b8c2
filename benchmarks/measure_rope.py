"""Time rotary embeddings at widths such as 192 and 320, with several tile shapes, beside Liger in place and a copy.

    python -m benchmarks.measure_rope --json RECORD      # on a GPU: about 40 s

q has 32 heads and k has 8 of 8192 tokens, in bf16, as a linear layer leaves them. A time is the mean of 20 forward
passes by CUDA graph, in 3 turns; the backward pass is the same kernel with another sign.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import step_record
from tigon.kernels import rope as kernels
from tigon.kernels.layout import outer_order
from tigon.ops.rope import RopeLayout

WIDTHS = (192, 320, 384, 448, 128, 256)
SHAPES = ((1024, 4, 4), (2048, 4, 8), (2048, 4, 4), (512, 4, 4), (1024, 8, 4), (1024, 2, 4), (2048, 8, 8))
"""(pairs of a tile, heads of a program, warps)"""
CALLS, TURNS = 20, 3
_FITS = kernels.fits_flat


def inputs_of(width: int, device: torch.device, tokens: int) -> tuple[Tensor, ...]:
    q, k = (torch.randn(1, tokens, h, width, device=device, dtype=torch.bfloat16).transpose(1, 2) for h in (32, 8))
    cos, sin = (torch.randn(1, tokens, width // 2, device=device, dtype=torch.bfloat16).repeat(1, 1, 2) for _ in "cs")
    return q, k, cos, sin


def tigon_call(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Callable[[], Any]:
    layout = RopeLayout(outer_order(q), outer_order(k), 1, False)
    return lambda: kernels.rope(q, k, cos, sin, layout, False)


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the time of one call, measured on a CUDA graph of CALLS."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(TURNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return float(statistics.median(times[1:]))


def row_of(width: int) -> dict[str, Any]:
    inputs = inputs_of(width, torch.device("cuda"), 8192)
    row: dict[str, Any] = {"width": width, "ms": {}, "equal": True}
    results = {}
    for flat in (False, True):
        for tile, heads, warps in SHAPES:
            kernels.fits_flat = _FITS if flat else (lambda R, D, interleaved: False)
            kernels.TILE, kernels.HEADS, kernels.FLAT_HEADS, kernels.NUM_WARPS = tile, heads, heads, warps
            kernels._plan.cache_clear()
            call = tigon_call(*inputs)
            results[flat, tile] = call()
            name = f"{'flat' if flat else 'rows'} {tile}/{heads}/{warps}"
            row["ms"][name] = milliseconds(call)
    first = next(iter(results.values()))
    row["equal"] = all(torch.equal(a, b) for one in results.values() for a, b in zip(one, first, strict=True))
    q, k, cos, sin = inputs
    from liger_kernel.ops.rope import LigerRopeFunction

    row["ms"]["liger"] = milliseconds(lambda: LigerRopeFunction.apply(q, k, cos, sin))
    both = torch.cat([q.reshape(-1), k.reshape(-1)])
    other = torch.empty_like(both)
    row["ms"]["copy"] = milliseconds(lambda: other.copy_(both))
    return row


def main() -> None:
    given = step_record.options(__doc__)
    if not torch.cuda.is_available():
        sys.exit("the times are of a GPU")
    record = step_record.StepRecord("measure_rope", torch.device("cuda"), ("liger-kernel",))
    rows = []
    for width in WIDTHS:
        rows.append(row_of(width))
        best = min((ms, name) for name, ms in rows[-1]["ms"].items() if name not in ("liger", "copy"))
        shown = {name: round(1000 * ms, 1) for name, ms in rows[-1]["ms"].items()}
        print(width, "best", best[1], "us:", shown, "equal" if rows[-1]["equal"] else "NOT EQUAL", flush=True)
        record.write(given.json, rows=rows)


if __name__ == "__main__":
    main()
