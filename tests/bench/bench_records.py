"""Records with invented figures, for what is made from records: tables, charts, verdicts."""

from __future__ import annotations

from tigon.bench.record import Measurement, RowRecord, RunRecord
from tigon.bench.timing import Spread

MIB = 1 << 20


def times(ms: float) -> dict[str, Spread]:
    return {
        "forward": Spread(ms / 3, ms / 3, ms / 3),
        "backward": Spread(2 * ms / 3, 2 * ms / 3, 2 * ms / 3),
        "both": Spread(ms, 0.9 * ms, 1.1 * ms),
    }


def measured(impl: str, role: str, ms: float, mib: float = 100, error: float = 1e-3, **fields) -> Measurement:
    fields = {"graph_ms": times(ms), "eager_ms": times(ms + 0.1), **fields}
    return Measurement(
        impl=impl, role=role, extra_peak_bytes=int(mib * MIB), errors={"output 0": error}, fraction=0.1 / ms,
        gb_per_s=4000.0, **fields,
    )  # fmt: skip


def row(op: str = "rms_norm", shape: tuple[int, ...] = (8, 16), **fields) -> RowRecord:
    measurements = fields.pop("measurements", None) or [
        measured("tigon", "ours", 0.11, host_us=70.0),
        measured("eager", "baseline", 1.0),
        measured("compile", "peer", 0.2),
        measured("liger", "peer", 0.15),
        Measurement(impl="quack", role="peer", status="not installed", detail="No module named 'quack'"),
    ]
    fields = {"flops": 0, "graph": True, "error_shape": list(shape), **fields}
    return RowRecord(
        id=f"{op} {'x'.join(map(str, shape))}", op=op, shape=list(shape), dtype="bf16", options={}, logits="random",
        input_bytes=1000, moved_bytes=10**8, saved_bytes=0, limit_ms=0.1, measurements=measurements, **fields,
    )  # fmt: skip


def run(*rows: RowRecord, **fields) -> RunRecord:
    environment = {
        "device": "Testcard", "driver": "1.2", "threads": None, "versions": {"torch": "2.11.0", "triton": None},
        "tigon_commit": "abc", "date": "2026-11-21",
    }  # fmt: skip
    ceilings = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0, "matmul_size": 8192}
    return RunRecord(
        environment=environment, suite="targets", repetitions=10, ceilings=ceilings, rows=list(rows), **fields
    )
