"""Cases of attention with sinks, and of attention with shared prefixes."""

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
    "shared_prefix_attention": (
        Case(id="plain", shape=(1, 4, 37, 16), options={"groups": 2}, product_orders=4),
        Case(id="window", shape=(1, 4, 41, 8), options={"window": 5, "branches": 4}, product_orders=4),
        Case(id="one-branch", shape=(1, 2, 19, 8), options={"branches": 1, "scale": 0.2}, product_orders=4),
        Case(id="group-of-8", shape=(1, 32, 3072, 128), options={"groups": 4, "branches": 8}, small=False),
        Case(id="group-of-8-window", shape=(1, 32, 3072, 128), options={"branches": 8, "window": 200}, small=False),
    ),
}
