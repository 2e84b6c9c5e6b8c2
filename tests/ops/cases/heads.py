"""Cases of the ops over hidden states and an lm_head."""

from __future__ import annotations

from typing import Any

import torch

from tests.ops.cases.losses import LOSS_OPTIONS
from tigon.ops import Case

_ALL = {"outputs": ("lse", "entropy")}
_BLOCKS = {"chunk_bytes": 42 * 30 * 8}
_HEADS = {"shifts": (1, 2, 3), "head_weights": (1.0, 0.8, 0.64), "chunk_bytes": 11 * 100 * 4}
MIB = 1 << 20

LORA_OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"scaling": 2.0, "adapter_dtype": torch.float32},
    "chunks": {"scaling": 2.0, "adapter_hidden": True, "chunk_bytes": 11 * 100 * 4},
    "each-token": {"scaling": 0.75, "reduction": "none", "bias": True, "chunk_bytes": 11 * 100 * 4},
}

CASES: dict[str, tuple[Case, ...]] = {
    "linear_cross_entropy": (
        # One chunk, or chunks of 11 tokens (fp32) or 22 with a smaller last one. There are enough tokens that no single
        # rounding of a logit decides the error of a gradient.
        *(
            Case(id=f"{name}-{mode}", shape=(2, 21, 24, 100), options={**options, "bias": bias, "chunk_bytes": chunk})
            for name, options in LOSS_OPTIONS.items()
            for mode, bias, chunk in (("keep", False, 1 << 20), ("chunks-bias", True, 11 * 100 * 4))
        ),
        Case(id="fp32-weight", shape=(2, 21, 24, 100), options={"weight_dtype": torch.float32}),
        # A head with a LoRA adapter. Its factors are rounded too, and the loss may be exact by luck in one order.
        *(
            Case(id=f"lora-{mode}", shape=(2, 21, 24, 100), options={"rank": 4, **options}, product_orders=8)
            for mode, options in LORA_OPTIONS.items()
        ),
        Case(id="odd-vocab", shape=(9, 16, 4099), options={"chunk_bytes": 40_000}),
        Case(id="nothing-ignored", shape=(12, 16, 64), options={"ignored": 0.0, "chunk_bytes": 500}),
        Case(id="within-memory", shape=(2, 21, 24, 100), options={"memory_bytes": (24 + 10) * 100 * 2}),
        Case(id="16-chunks", shape=(2048, 64, 4000), options={"chunk_bytes": 1 << 20}, small=False),
        Case(id="llama-1b-head", shape=(4, 512, 2048, 128256), options={"chunk_bytes": 128 * MIB}, small=False),
    ),
    "linear_logprobs": (
        # Kept logits, or blocks of some tokens and some columns.
        Case(id="one-id-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
        Case(id="one-id-blocks-bias", shape=(2, 21, 24, 100), options={"chunk_bytes": 42 * 30 * 4, "bias": True}),
        Case(id="all-outputs-keep", shape=(2, 21, 24, 100), options={**_ALL, "chunk_bytes": 1 << 20}),
        Case(id="all-outputs-blocks", shape=(42, 24, 100), options={**_ALL, "bias": True, "chunk_bytes": 42 * 30 * 4}),
        Case(id="several-ids", shape=(42, 24, 100), options={**_ALL, "ids": 5, "chunk_bytes": 42 * 40 * 4}),
        Case(
            id="temperature-softcap-scale",
            shape=(42, 24, 100),
            options={**_ALL, "temperature": 0.7, "softcap": 3.0, "logit_scale": 0.5, "chunk_bytes": 42 * 40 * 4},
        ),
        Case(id="temperature", shape=(42, 24, 100), options={**_ALL, "temperature": 1.5, "chunk_bytes": 42 * 40 * 4}),
        Case(id="peaked", shape=(42, 24, 100), options={**_ALL, "peaked": True, "chunk_bytes": 42 * 40 * 4}),
        Case(id="half-masked", shape=(42, 24, 100), options={**_ALL, "masked": 0.5, "chunk_bytes": 42 * 40 * 4}),
        Case(id="odd-vocab", shape=(9, 16, 4099), options={"chunk_bytes": 40_000}, product_orders=8),
        # Several blocks of columns, which need more than 1,024 columns.
        Case(id="odd-vocab-softcap", shape=(9, 16, 4099), options={**_ALL, "softcap": 3.0, "chunk_bytes": 40_000}),
        Case(id="llama-1b-head", shape=(4, 512, 2048, 128256), options={"chunk_bytes": 128 * MIB}, small=False),
        Case(id="qwen-head", shape=(2048, 1024, 151936), options={**_ALL, "chunk_bytes": 128 * MIB}, small=False),
        Case(id="gemma-3-head", shape=(512, 640, 262144), options=_ALL, small=False),
    ),
    "linear_kl": (
        # Kept logits, or blocks of some tokens in the forward and of some columns in the backward.
        Case(id="forward-keep", shape=(2, 21, 24, 100), options={"chunk_bytes": 1 << 20}),
        Case(id="forward-blocks-bias", shape=(2, 21, 24, 100), options={**_BLOCKS, "bias": True, "teacher_bias": True}),
        Case(id="reverse-blocks", shape=(42, 24, 100), options={"kind": "reverse", **_BLOCKS}),
        Case(id="jsd-keep", shape=(42, 24, 100), options={"kind": "jsd", "chunk_bytes": 1 << 20}),
        Case(id="jsd-beta-blocks", shape=(42, 24, 100), options={"kind": "jsd", "beta": 0.3, "bias": True, **_BLOCKS}),
        Case(
            id="hidden-sizes",
            shape=(42, 24, 100),
            options={"teacher_hidden_size": 40, "teacher_bias": True, "temperature": 1.5, **_BLOCKS},
        ),
        Case(
            id="teacher-softcap-scale",
            shape=(42, 24, 100),
            options={
                "kind": "jsd",
                "beta": 0.3,
                "teacher_softcap": 3.0,
                "logit_scale": 0.5,
                "temperature": 0.7,
                **_BLOCKS,
            },
        ),
        Case(id="student-softcap", shape=(42, 24, 100), options={"softcap": 3.0, "temperature": 0.7, **_BLOCKS}),
        Case(id="peaked", shape=(42, 24, 100), options={"peaked": 6.0, **_BLOCKS}),
        Case(id="near", shape=(42, 24, 100), options={"near": 0.1, **_BLOCKS}),
        Case(
            id="near-peaked-jsd",
            shape=(42, 24, 100),
            options={"kind": "jsd", "near": 0.1, "peaked": 6.0, **_BLOCKS},
            product_orders=8,
        ),
        Case(
            id="near-peaked-exact-products",
            shape=(42, 24, 100),
            options={"kind": "jsd", "near": 0.1, "peaked": 6.0, "grid": 1 / 64, **_BLOCKS},
        ),
        Case(id="half-masked", shape=(42, 24, 100), options={"kind": "reverse", "masked": 0.5, **_BLOCKS}),
        Case(id="odd-vocab", shape=(42, 16, 4099), options={"kind": "jsd", "chunk_bytes": 300_000}),
        Case(
            id="qwen-head",
            shape=(2048, 1024, 151936),
            options={"kind": "jsd", "teacher_hidden_size": 2048, "chunk_bytes": 256 * MIB},
            small=False,
        ),
        Case(id="gemma-3-head", shape=(512, 640, 262144), options={"teacher_softcap": 30.0}, small=False),
    ),
    "multi_head_linear_cross_entropy": (
        Case(id="own-heads", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 3, **_HEADS}),
        Case(id="shared-trunk", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 3, **_HEADS}),
        Case(id="shared-lm-head", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 1, **_HEADS}),
        Case(id="medusa", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 3, "blocks": 3, **_HEADS}),
        Case(id="medusa-shared", shape=(2, 21, 24, 100), options={"hiddens": 1, "weights": 1, "blocks": 3, **_HEADS}),
        Case(
            id="sum-softcap",
            shape=(2, 21, 24, 100),
            options={"hiddens": 3, "weights": 3, **_HEADS, "reduction": "sum", "softcap": 5.0, "label_smoothing": 0.1},
        ),
        Case(id="num-items", shape=(2, 21, 24, 100), options={"hiddens": 3, "weights": 1, **_HEADS, "num_items": 13}),
        Case(
            id="medusa-1b",
            shape=(2, 512, 2048, 128256),
            small=False,
            options={"hiddens": 1, "weights": 1, "blocks": 3, **_HEADS, "chunk_bytes": 1 << 27},
        ),
    ),
}
