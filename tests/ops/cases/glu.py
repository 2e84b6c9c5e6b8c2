"""Cases of the gated units."""

from __future__ import annotations

import torch

from tigon.ops import Case

_CASES = (
    Case(id="separate", shape=(3, 5, 64)),
    Case(id="packed", shape=(3, 5, 128), options={"packed": True}),
    Case(id="packed-odd-half", shape=(7, 14), options={"packed": True}),
    Case(id="width-1", shape=(9, 1)),
    Case(id="width-100", shape=(11, 100)),
    Case(id="odd-wide", shape=(3, 4097)),
    Case(id="saturated", shape=(4, 192), options={"scale": 30.0}),
    Case(id="fp32-up", shape=(5, 96), options={"up_dtype": torch.float32}),
    Case(id="fp32-gate", shape=(5, 96), options={"gate_dtype": torch.float32}),
    Case(id="llama-8b", shape=(2, 256, 14336), small=False),
    Case(id="packed-llama-8b", shape=(512, 28672), options={"packed": True}, small=False),
)

_EXACT = (
    Case(id="exact", shape=(3, 5, 64), options={"approximate": "none"}),
    Case(id="exact-packed", shape=(5, 200), options={"approximate": "none", "packed": True}),
    Case(id="exact-saturated", shape=(4, 192), options={"approximate": "none", "scale": 30.0}),
)

CASES: dict[str, tuple[Case, ...]] = {
    "swiglu": _CASES,
    "geglu": _CASES + _EXACT,
}
