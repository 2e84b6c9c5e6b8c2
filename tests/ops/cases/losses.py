"""Cases of the ops over logits."""

from __future__ import annotations

from typing import Any

from tigon.ops import Case

_ALL = {"outputs": ("lse", "entropy")}

LOSS_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "class-weight": {"class_weight": True},
    "class-weight-smoothing": {"class_weight": True, "label_smoothing": 0.2},
    "token-weight": {"token_weight": True},
    "softcap": {"softcap": 3.0},
    "softcap-scale": {"softcap": 30.0, "logit_scale": 4.0},
    "scale": {"logit_scale": 0.0625},
    "z-loss": {"z_loss": 1e-2},
    "num-items": {"num_items": 17.0},
    "ignore-0": {"ignore_index": 0},
    "everything": {
        "reduction": "none", "class_weight": True, "token_weight": True, "label_smoothing": 0.1, "softcap": 5.0,
        "logit_scale": 2.0, "z_loss": 1e-3,
    },
}  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {
    "cross_entropy": (
        *(Case(id=name, shape=(2, 9, 50), options=options) for name, options in LOSS_OPTIONS.items()),
        Case(id="vocab-1", shape=(5, 1)),
        Case(id="vocab-7", shape=(5, 7)),
        Case(id="vocab-above-a-tile", shape=(6, 4097), options={"label_smoothing": 0.1}),
        Case(id="peaked", shape=(6, 1000), options={"magnitude": 30.0}),
        Case(id="gpt2-vocab", shape=(9, 50257)),
        *(
            Case(id=f"few-rows-{name}", shape=(3, 4099), options=options)
            for name, options in LOSS_OPTIONS.items()
            if "label_smoothing" not in options
        ),
        Case(id="llama-vocab", shape=(64, 128256), small=False),
        Case(id="gemma-vocab", shape=(16, 262144), options={"softcap": 30.0}, small=False),
    ),
    "logprobs": (
        Case(id="one-id", shape=(2, 21, 100)),
        Case(id="all-outputs", shape=(42, 100), options=_ALL),
        Case(id="several-ids", shape=(42, 100), options={**_ALL, "ids": 5}),
        Case(
            id="temperature-softcap-scale",
            shape=(42, 100),
            options={**_ALL, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5},
        ),
        Case(id="half-masked", shape=(42, 100), options={**_ALL, "masked": 0.5}),
        Case(id="odd-vocab", shape=(9, 4099)),
        Case(id="several-tiles", shape=(3, 9000), options=_ALL),
        Case(id="llama-logits", shape=(2048, 128256), options=_ALL, small=False),
    ),
}
