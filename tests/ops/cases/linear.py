"""Cases of the linear layers."""

from __future__ import annotations

import torch

from tigon.ops import Case

CASES: dict[str, tuple[Case, ...]] = {
    "lora_linear": (
        Case(id="rank-4", shape=(3, 7, 24, 40, 4), options={"scaling": 2.0}),
        Case(id="bias", shape=(21, 16, 48, 8), options={"scaling": 0.5, "bias": True}),
        Case(id="fp32-adapters", shape=(21, 32, 24, 8), options={"adapter_dtype": torch.float32}),
        Case(id="after-dropout", shape=(2, 9, 24, 40, 4), options={"adapter_x": True, "scaling": 1.5}),
        Case(id="rank-1", shape=(5, 8, 8, 1)),
        Case(id="llama-8b-down", shape=(1024, 14336, 4096, 16), options={"scaling": 2.0}, small=False),
    ),
    "lora_linears": (
        Case(id="two-ranks", shape=(3, 7, 24, 40, 16, 4), options={"scaling_0": 2.0, "scaling_1": 0.5}),
        Case(id="bias", shape=(21, 16, 48, 24, 8), options={"scaling_1": 0.5, "bias": True}),
        Case(id="fp32-adapters", shape=(21, 32, 24, 24, 8), options={"adapter_dtype": torch.float32}),
        Case(id="llama-8b-mlp", shape=(1024, 4096, 14336, 14336, 16), options={"scaling_0": 2.0}, small=False),
    ),
    "fp8_linear": (
        Case(id="tensorwise", shape=(3, 7, 32, 48)),
        Case(id="rowwise-bias", shape=(2, 16, 32, 16), options={"scaling": "rowwise", "bias": True}),
        Case(id="odd-widths", shape=(5, 3, 21, 19), options={"scaling": "rowwise"}),
        Case(id="odd-widths-tensorwise", shape=(37, 21, 19), options={"bias": True}),
        Case(id="llama-8b-down", shape=(1024, 14336, 4096), small=False),
    ),
}
