"""Cases of attention with sinks."""

from __future__ import annotations

from tigon.ops import Case

CASES: dict[str, tuple[Case, ...]] = {
    "attention_with_sinks": (
        Case(id="plain", shape=(2, 4, 37, 16), options={"groups": 2}, product_orders=4),
        Case(id="window", shape=(2, 8, 29, 8), options={"window": 5}, product_orders=4),
        Case(id="documents", shape=(2, 4, 24, 8), options={"groups": 4, "documents": 3}, product_orders=4),
        Case(
            id="window-in-documents",
            shape=(2, 2, 31, 8),
            options={"window": 4, "documents": 2, "scale": 0.2},
            product_orders=4,
        ),
        Case(id="gpt-oss", shape=(1, 64, 2048, 64), options={"groups": 8}, small=False),
        Case(id="gpt-oss-window", shape=(1, 64, 2048, 64), options={"groups": 8, "window": 128}, small=False),
    ),
}
