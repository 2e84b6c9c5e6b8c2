"""Cases of the short convolution."""

from __future__ import annotations

import torch

from tigon.ops import Case

CASES: dict[str, tuple[Case, ...]] = {
    "causal_conv1d": (
        Case(id="bias", shape=(1, 37, 33), options={"activation": "silu", "bias": True}),
        Case(id="lfm2", shape=(2, 9, 40), options={"taps": 3}),
        Case(id="two-taps", shape=(2, 9, 5), options={"taps": 2, "activation": "silu", "state": True}),
        Case(id="one-tap", shape=(1, 6, 7), options={"taps": 1, "bias": True}),
        Case(id="one-token", shape=(3, 1, 40), options={"activation": "silu", "state": True}),
        Case(id="state", shape=(2, 41, 40), options={"activation": "silu", "bias": True, "state": True}),
        Case(id="fp32-weight", shape=(2, 11, 40), options={"activation": "silu", "weight_dtype": torch.float32}),
        Case(
            id="documents",
            shape=(2, 75, 40),
            options={"activation": "silu", "bias": True, "documents": (1, 2, 3, 29, 30, 4)},
        ),
        Case(
            id="documents-state",
            shape=(1, 40, 24),
            options={"activation": "silu", "documents": (2, 31), "state": True},
        ),
        Case(id="qwen3.5-9b", shape=(1, 2048, 8192), options={"activation": "silu"}, small=False),
    ),
}
