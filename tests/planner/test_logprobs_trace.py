"""The trace of a linear_logprobs call: memory and operations equal what its blocks need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_helpers import H200
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.ops import linear_cross_entropy, linear_logprobs
from tigon.ops.head.block_loop import BlockPlan
from tigon.ops.head.plan import LogitBytes, plan_blocks, plan_kept, plan_whole_rows
from tigon.planner.trace.cuda_scratch import planned_for_cuda, scratch_bytes
from tigon.planner.trace.dispatch_recorder import TraceRecorder

MIB = 1 << 20
H, V = 1024, 32000
SIZE = LogitBytes(logits=4, gradients=2)
"""fp32 logits, and their gradient in bf16."""
SMALL_BYTES = 16 * 4
"""Bytes per token of everything but logits, hidden states and gradients: less than 16 fp32 numbers."""


def traced(tokens: int, *, ignored: int = 0, frozen: bool = False, **options: Any) -> tuple[int, float]:
    """(peak bytes, FLOPs) of a forward and a backward in bf16, without the inputs."""
    recorder = TraceRecorder(scratch_bytes(H200.sm_count), {})
    with FakeTensorMode(), planned_for_cuda(recorder, arch=H200.arch, ignored=ignored):
        hidden = torch.empty(tokens, H, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(V, H, dtype=torch.bfloat16, requires_grad=not frozen)
        ids, mask = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)
        recorder.exclude(iter((hidden, weight, ids, mask)))
        with recorder:
            found = linear_logprobs(hidden, weight, ids, mask=mask if ignored else None, **options)
            torch.autograd.backward(list(found[:2]) if options.get("outputs") else found, _upstream(found, options))
    live = peak = 0
    for segment in recorder.tape.segments:
        for event in segment.events:
            live += recorder.tape.sizes[event] if event >= 0 else -recorder.tape.sizes[~event]
            peak = max(peak, live)
    return peak, sum(segment.cost.flops for segment in recorder.tape.segments)


def _upstream(found: Any, options: Any) -> Any:
    return [torch.empty_like(t) for t in found[:2]] if options.get("outputs") else torch.empty_like(found)


def block_bytes(plan: BlockPlan) -> int:
    """Bytes of the logits that exist at once, and of the gradient of a block."""
    return plan.columns * (plan.logit_tokens * SIZE.logits + plan.tokens * SIZE.gradients)


@pytest.mark.parametrize("options", [{}, {"outputs": ("lse", "entropy")}], ids=["plain", "outputs"])
def test_kept_logits_take_three_products_and_blocks_of_their_gradient(options: Any) -> None:
    tokens = 7000
    plan = plan_kept(tokens, V, SIZE, 1024 * MIB)
    assert tokens * V * SIZE.logits < 1024 * MIB and plan.columns < V
    peak, flops = traced(tokens, **options)
    assert flops == 3 * 2 * tokens * H * V
    # Beside the logits: a block of the gradient, the copy of hidden, the gradient of hidden and its sum in fp32.
    exact = tokens * (V * SIZE.logits + plan.columns * SIZE.gradients) + tokens * H * (4 + 2 + 2) + V * H * 2
    assert exact <= peak <= exact + tokens * SMALL_BYTES


@pytest.mark.parametrize("options", [{}, {"outputs": ("lse", "entropy")}], ids=["plain", "outputs"])
def test_blocks_take_four_products_their_buffers_a_copy_of_hidden_and_a_sum_in_fp32(options: Any) -> None:
    tokens, chunk_bytes = 8192, 64 * MIB
    plan = plan_blocks(tokens, V, SIZE, chunk_bytes)
    assert plan.tokens == tokens and plan.columns < V and plan.logit_tokens < tokens
    peak, flops = traced(tokens, chunk_bytes=chunk_bytes, **options)
    assert flops == 4 * 2 * tokens * H * V
    exact = block_bytes(plan) + tokens * H * (4 + 2 + 2) + V * H * 2
    assert exact <= peak <= exact + tokens * SMALL_BYTES


def test_frozen_head_takes_two_products_and_no_gradient_of_the_weight() -> None:
    tokens, chunk_bytes = 8192, 64 * MIB
    peak, flops = traced(tokens, chunk_bytes=chunk_bytes, frozen=True)
    assert flops == 2 * 2 * tokens * H * V
    exact = block_bytes(plan_whole_rows(tokens, V, SIZE, chunk_bytes)) + tokens * H * 2
    assert exact <= peak <= exact + tokens * SMALL_BYTES


@pytest.mark.parametrize("tokens", [1024, 16384], ids=["kept", "in chunks"])
def test_cross_entropy_takes_three_products_whether_the_backward_makes_two_of_them_or_none(tokens: int) -> None:
    recorder = TraceRecorder(scratch_bytes(H200.sm_count), {})
    with FakeTensorMode(), planned_for_cuda(recorder, arch=H200.arch, ignored=0), recorder:
        hidden, weight = (torch.empty(n, H, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, V))
        linear_cross_entropy(hidden, weight, torch.empty(tokens, dtype=torch.int64)).backward()
    flops = [segment.cost.flops for segment in recorder.tape.segments]
    assert sum(flops) == 3 * 2 * tokens * H * V


def test_masked_tokens_are_gathered_only_if_the_host_should_wait_for_their_number() -> None:
    """6 · 8192 · 1024 · 32000 operations take longer than the wait; those of 512 tokens do not."""
    peak, flops = traced(8192, ignored=4096)
    assert flops == 3 * 2 * 4096 * H * V
    # The logits and their gradient, the gathered hidden states and their gradient, and that one at all positions.
    exact = 4096 * V * (4 + 2) + 2 * 4096 * H * 2 + V * H * 2
    assert exact <= peak <= exact + 8192 * H * 2 + 8192 * SMALL_BYTES
    assert traced(512, ignored=256)[1] == 3 * 2 * 512 * H * V
    assert traced(7000, ignored=8)[1] == 3 * 2 * 7000 * H * V
