"""Plans of attention with sinks: no matrix of scores, and the products of the tokens that a query sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planner_helpers import H200

from tigon.models.verification.tiny import SIZES, tiny_config
from tigon.planner.request import Request
from tigon.planner.trace.dispatch_recorder import _FLASH_2_SHARE, _PRODUCTS
from tigon.planner.trace.trace import trace
from tigon.techniques.keys.settings import Settings

SEQ, HEADS = 300, 8
SCORES = HEADS * SEQ * SEQ * 2
"""Bytes of one layer's scores in bf16."""
SHAPE = {
    **SIZES, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
def test_plan_with_sinks_holds_no_matrix_of_scores(masked: bool) -> None:
    config = tiny_config("gpt_oss", {}, SHAPE)
    config.use_cache = False
    settings = Settings.of(
        {
            "train.precision": "bf16",
            "model.kernels": "tigon",
            "model.attention": "eager",
            "model.attention_sinks": False,
        }
    )
    eager = Request(model="gpt_oss", config=config, batch=1, seq=SEQ, settings=settings, masked=masked)
    op = replace(eager, settings=settings.having({"model.attention_sinks": True}))
    sizes = [trace(request, H200, evaluating=False).tape.sizes for request in (eager, op)]
    assert max(sizes[0]) >= SCORES > max(sizes[1])


def test_products_are_those_of_the_tokens_that_a_query_sees() -> None:
    q = torch.empty(1, 4, 100, 16, device="meta")
    for window, seen in ((0, 100 * 101 // 2), (100, 100 * 101 // 2), (10, 10 * 11 // 2 + 90 * 10)):
        for name, products in (("fwd", 2), ("bwd", 5)):
            flops = _PRODUCTS[f"tigon::attention_with_sinks_{name}"]({"q": q, "v": q, "window": window})
            assert flops * _FLASH_2_SHARE == pytest.approx(products * 2 * 4 * seen * 16)
