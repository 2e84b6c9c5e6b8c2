"""Cases of the rotary embedding."""

from __future__ import annotations

import torch

from tigon.ops import Case

CASES: dict[str, tuple[Case, ...]] = {
    "rope": (
        Case(id="llama", shape=(2, 8, 9, 64), options={"kv_heads": 2}),
        Case(id="contiguous-heads", shape=(2, 4, 17, 64), options={"kv_heads": 1, "in_memory": "BHTD"}),
        Case(id="heads-last", shape=(2, 3, 11, 128), options={"kv_heads": 3, "unsqueeze_dim": 2}),
        Case(
            id="interleaved",
            shape=(2, 5, 7, 64),
            options={"kv_heads": 2, "interleaved": True, "table_dtype": torch.float32},
        ),
        Case(id="partial", shape=(1, 4, 13, 80), options={"kv_heads": 2, "rotary": 32}),
        Case(id="partial-interleaved", shape=(1, 2, 13, 128), options={"rotary": 64, "interleaved": True}),
        Case(id="odd-width", shape=(2, 2, 5, 7), options={"rotary": 6}),
        Case(id="width-96", shape=(1, 6, 10, 96), options={"kv_heads": 3, "interleaved": True}),
        Case(id="width-192", shape=(2, 5, 21, 192), options={"kv_heads": 3}),
        Case(id="width-48-heads-last", shape=(3, 3, 50, 48), options={"kv_heads": 1, "unsqueeze_dim": 2}),
        Case(id="width-256", shape=(1, 2, 9, 256), options={"kv_heads": 1, "unsqueeze_dim": 2, "in_memory": "BHTD"}),
        Case(id="own-positions", shape=(3, 2, 6, 64), options={"table_batch": 3, "table_dtype": torch.float32}),
        Case(id="table-without-batch", shape=(2, 2, 6, 32), options={"table_batch": 0}),
        Case(id="decoding-step", shape=(5, 4, 1, 64), options={"kv_heads": 1, "table_batch": 5}),
        Case(id="arbitrary-table", shape=(2, 3, 8, 16), options={"arbitrary_table": True}),
        Case(id="arbitrary-interleaved", shape=(2, 3, 8, 12), options={"arbitrary_table": True, "interleaved": True}),
        Case(id="llama-1b", shape=(2, 32, 1024, 64), options={"kv_heads": 8}, small=False),
    ),
}
