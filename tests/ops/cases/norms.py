"""Cases of the norms."""

from __future__ import annotations

import torch

from tigon.ops import Case

_CASES = (
    Case(id="llama", shape=(3, 37, 64)),
    Case(id="gemma", shape=(5, 100), options={"casting": "gemma", "offset": 1.0}),
    Case(id="fp32-order", shape=(2, 3, 192), options={"casting": "fp32"}),
    Case(id="no-weight", shape=(7, 80), options={"weighted": False}),
    Case(id="fp32-weight", shape=(6, 128), options={"weight_dtype": torch.float32}),
    Case(id="width-1", shape=(9, 1), options={"eps": 1e-3}),
    Case(id="width-7", shape=(11, 7)),
    Case(id="qk-norm", shape=(2, 33, 4, 128)),
    Case(id="odd-wide", shape=(5, 4097)),
    Case(id="wider-than-a-tile", shape=(3, 20000)),
    Case(id="wide-65537", shape=(3, 65537), options={"casting": "gemma", "offset": 1.0}, small=False),
    Case(id="llama-1b", shape=(4, 512, 2048), small=False),
)

CASES: dict[str, tuple[Case, ...]] = {
    "rms_norm": _CASES,
    "add_rms_norm": tuple(c for c in _CASES if c.id != "fp32-weight"),
    "layer_norm": (
        Case(id="plain", shape=(3, 37, 64)),
        Case(id="mean-10", shape=(5, 192), options={"mean": 10.0}),
        Case(id="mean-100", shape=(5, 192), options={"mean": 100.0}),
        Case(id="no-bias", shape=(7, 80), options={"bias": False}),
        Case(id="no-affine", shape=(7, 100), options={"weight": False, "bias": False}),
        Case(id="fp32-parameters", shape=(6, 128), options={"weight_dtype": torch.float32}),
        Case(id="width-7", shape=(11, 7)),
        Case(id="odd-wide", shape=(5, 4097)),
        Case(id="wider-than-a-tile", shape=(3, 20000), options={"mean": 3.0}),
        Case(id="wide-65537", shape=(3, 65537), small=False),
        Case(id="gpt2-xl", shape=(4, 512, 1600), small=False),
    ),
    "gated_rms_norm": (
        Case(id="sigmoid", shape=(7, 33), options={"activation": "sigmoid"}),
        Case(id="mamba-2-groups", shape=(2, 5, 96), options={"gate_first": True, "groups": 3}),
        Case(id="fp32-weight", shape=(6, 128), options={"weight_dtype": torch.float32}),
        Case(id="width-1", shape=(9, 1), options={"eps": 1e-3}),
        Case(id="odd-wide", shape=(5, 4097), options={"gate_first": True}),
        Case(id="qwen3.5-9b", shape=(1, 2048, 32, 128), small=False),
        Case(id="granite-4-small", shape=(2048, 8192), options={"gate_first": True}, small=False),
    ),
}
