"""Cases of the gated delta rule. Shapes are (B, T, H, G, K)."""

from __future__ import annotations

from tigon.ops import Case

CASES: dict[str, tuple[Case, ...]] = {
    "gated_delta_rule": (
        Case(id="rows", shape=(2, 66, 1, 1, 16), options={"output_final_state": True}),
        Case(id="one-token", shape=(2, 1, 1, 2, 8), options={"values": 12, "state": True, "output_final_state": True}),
        Case(id="state", shape=(1, 130, 2, 2, 20), options={"values": 33, "state": True, "output_final_state": True}),
        Case(id="documents", shape=(1, 100, 1, 2, 16), options={"values": 24, "documents": (1, 65, 0, 34)}),
        Case(
            id="documents-state",
            shape=(1, 80, 1, 1, 17),
            options={"documents": (64, 16), "state": True, "output_final_state": True, "scale": 0.3},
        ),
        Case(id="qwen3.5-9b", shape=(1, 1024, 16, 32, 128), small=False),
    ),
}
