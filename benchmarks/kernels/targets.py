"""What tigon is to reach on a row, and whether a record reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tigon.bench.record import Measurement, RowRecord
from tigon.bench.table import best_of, median_ms

Quantity = Literal["fraction", "ms", "ratio", "host_us", "kept_bytes"]


@dataclass(frozen=True, kw_only=True)
class PerformanceTarget:
    """One target. `fraction` must be at least `bound`, every other quantity at most `bound`.

    - fraction: the bound's time (the row's `limit_ms`) divided by tigon's time.
    - ms: forward + backward, of the kind that the row is judged by (graph or eager).
    - ratio: that time divided by the time of the implementation `vs`.
    - host_us: host time of one eager forward + backward.
    - kept_bytes: memory that the forward keeps for the backward beyond inputs and outputs, as a share of the inputs.
    """

    quantity: Quantity
    bound: float
    of: str = ""
    """The implementation that must reach it; "" stands for any of tigon's that computes the row's problem."""
    vs: str = ""
    memory_gib: float | None = None
    """The target holds only for implementations with at most this much extra peak memory."""

    def __str__(self) -> str:
        text = {
            "fraction": f">= {100 * self.bound:.0f} % of copy",
            "ms": f"<= {self.bound:g} ms",
            "ratio": f"<= {self.bound:g} x {self.vs}",
            "host_us": f"host <= {self.bound:g} us",
            "kept_bytes": "keeps its inputs only",
        }[self.quantity]
        within = f" within {self.memory_gib:g} GiB" if self.memory_gib is not None else ""
        return f"{self.of + ' ' if self.of else ''}{text}{within}"

    def result(self, row: RowRecord) -> tuple[str, bool | None]:
        """The target and its measured value as text, and whether it was reached (None if it was not measured)."""
        of = self._judged(row)
        value = None if of is None else self._value(row, of)
        if of is None or value is None:
            return f"{self}: not measured", None
        ok = value >= self.bound if self.quantity == "fraction" else value <= self.bound
        by = f" by {of.impl}" if of.impl not in ("tigon", self.of) else ""
        return f"{self}: {self._shown(value)}, {'reached' if ok else 'missed'}{by}", ok

    def _judged(self, row: RowRecord) -> Measurement | None:
        """The measurement that the target judges: the implementation it names, else tigon's fastest in its memory."""
        if not self.of:
            return best_of(row, ("ours",), self.memory_gib)
        return next((m for m in row.measurements if m.impl == self.of and m.judged_ms(row.graph)), None)

    def _value(self, row: RowRecord, of: Measurement) -> float | None:
        if self.quantity == "ratio":
            vs = next((m for m in row.measurements if m.impl == self.vs), None)
            return None if vs is None or vs.judged_ms(row.graph) is None else median_ms(of, row) / median_ms(vs, row)
        if self.quantity == "ms":
            return median_ms(of, row)
        if self.quantity == "kept_bytes":
            return None if of.kept_bytes is None else of.kept_bytes / row.input_bytes
        value = of.fraction if self.quantity == "fraction" else of.host_us
        return None if value is None else float(value)

    def _shown(self, value: float) -> str:
        return {
            "fraction": f"{100 * value:.1f} %",
            "ms": f"{value:.3g} ms",
            "ratio": f"{value:.3f}",
            "host_us": f"{value:.0f} us",
            "kept_bytes": f"{value:.2g} of them",
        }[self.quantity]
