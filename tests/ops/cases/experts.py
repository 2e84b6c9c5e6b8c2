"""Cases of mixtures of experts."""

from __future__ import annotations

import dataclasses

import torch

from tigon.ops import Case, ExpertUnit

GPT_OSS_UNIT = ExpertUnit(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)

CASES: dict[str, tuple[Case, ...]] = {
    "experts": tuple(
        # The weights' gradient has two numbers a token: one order of summation may err little on so few by luck. Cases
        # with biases stay at few tokens, because Triton's interpreter cuts fp32 off to bf16 and a bias sums all of it.
        dataclasses.replace(case, product_orders=8) if case.small else case
        for case in (
            Case(id="mixture", shape=(45, 2, 4, 24), options={"inner": 20}),
            Case(
                id="gpt-oss",
                shape=(7, 2, 3, 16),
                options={"inner": 6, "biased": True, "transposed": True, "unit": GPT_OSS_UNIT, "scale": 5.0},
            ),
            Case(id="no-tokens-for-some", shape=(48, 2, 6, 16), options={"route": "half"}),
            Case(id="one-expert-has-all", shape=(70, 1, 3, 16), options={"route": "one"}),
            Case(id="outside", shape=(9, 2, 3, 16), options={"route": "outside", "biased": True}),
            Case(id="gelu", shape=(42, 2, 3, 16), options={"unit": ExpertUnit(activation="gelu")}),
            Case(
                id="gelu-tanh",
                shape=(42, 2, 3, 16),
                options={"unit": ExpertUnit(activation="gelu_tanh"), "weights_dtype": torch.float32},
            ),
            Case(id="lora", shape=(45, 2, 4, 24), options={"rank": 4, "gate_up_scaling": 2.0, "down_scaling": 0.5}),
            Case(
                id="lora-fp32-adapters",
                shape=(45, 2, 3, 16),
                options={"rank": 3, "adapter_dtype": torch.float32, "gate_up_scaling": 1.5},
            ),
            Case(
                id="lora-gpt-oss",
                shape=(42, 2, 3, 16),
                options={"inner": 6, "biased": True, "transposed": True, "unit": GPT_OSS_UNIT, "rank": 20},
            ),
            Case(id="lora-outside", shape=(9, 2, 3, 16), options={"route": "outside", "rank": 2}),
            Case(id="qwen3-30b-lora", shape=(512, 8, 128, 2048), options={"inner": 768, "rank": 16}, small=False),
            Case(id="qwen3-30b", shape=(512, 8, 128, 2048), options={"inner": 768}, small=False),
        )
    ),
    "topk_softmax": (
        Case(id="normalised", shape=(37, 16), options={"top_k": 4, "normalised": True}),
        Case(id="probabilities", shape=(19, 12), options={"top_k": 3}),
        Case(id="one", shape=(5, 8), options={"top_k": 1, "scale": 4.0}),
        Case(id="all", shape=(9, 6), options={"top_k": 6, "normalised": True}),
        Case(id="wide-weights", shape=(19, 8), options={"top_k": 2, "normalised": True, "wide_weights": True}),
        Case(id="large-logits", shape=(19, 60), options={"top_k": 4, "scale": 30.0}),
        Case(id="qwen3-30b", shape=(4096, 128), options={"top_k": 8, "normalised": True}, small=False),
        Case(id="qwen3-next", shape=(4096, 512), options={"top_k": 10, "normalised": True}, small=False),
    ),
    "topk_sigmoid": (
        Case(id="one-group", shape=(19, 12), options={"top_k": 3, "eps": 1e-20}),
        Case(id="scores", shape=(19, 12), options={"top_k": 3, "normalised": False, "biased": False}),
        Case(id="one", shape=(5, 8), options={"top_k": 1, "spread": 4.0, "normalised": False}),
        Case(id="three-groups", shape=(9, 15), options={"top_k": 5, "groups": 3, "top_groups": 1, "scale": 1.5}),
        Case(
            id="deepseek-v3",
            shape=(2048, 256),
            options={"top_k": 8, "groups": 8, "top_groups": 4, "scale": 2.5, "eps": 1e-20},
            small=False,
        ),
        Case(id="glm-4.5-air", shape=(2048, 128), options={"top_k": 8}, small=False),
    ),
    "load_balancing_loss": (
        Case(id="plain", shape=(37, 16), options={"top_k": 4}),
        Case(id="masked", shape=(19, 12), options={"top_k": 3, "masked": True}),
        Case(id="one", shape=(21, 8), options={"top_k": 1}),
        Case(id="qwen3-30b", shape=(4096, 128), options={"top_k": 8}, small=False),
    ),
}
