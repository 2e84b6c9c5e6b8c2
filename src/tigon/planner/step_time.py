"""The time of one optimizer step: micro-batches, the update, copies to the host and traffic between GPUs."""

from __future__ import annotations

from dataclasses import replace

from tigon.planner.engines.base import Placement
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.simulate import roofline
from tigon.planner.simulate.model_states import ModelWeights
from tigon.planner.simulate.optimizer_cost import cost_of
from tigon.planner.trace.tape import FORWARD, Tape
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST
from tigon.techniques.checkpointing.host_offload import LARGE_BYTES

# Host memory bandwidth of DeepSpeed's AdamW on 16 cores, from Llama-3.2-1B's step on one machine with an H200.
HOST_BYTES_S = 74e9
# Rate of the overflow check of fp16 training on the host, whose gradients are fp32 there. It was computed from the
# extra time over bf16 in the study on an H200.
HOST_OVERFLOW_BYTES_S = 8.4e9
# Collectives overlap with at most this share of a micro-batch's time.
_HIDING_SHARE = 0.5


def step_seconds(
    request: Request, gpu: Gpu, model: ModelWeights, placement: Placement, tape: Tape, *, overlapped_bytes: int
) -> float:
    """Seconds of one optimizer step with all its micro-batches.

    tape: one micro-batch. overlapped_bytes: bytes that a micro-batch copies to the host and back during its passes.
    """
    settings, traffic = request.settings, placement.traffic
    micro_s = roofline.micro_s(tape, gpu, copied_bytes=traffic.copied, engine_calls=traffic.host_calls)
    if traffic.each_pass:
        micro_s = _with_copies_s(tape, gpu, traffic.each_pass / gpu.link_bytes_s)
    if settings.train.checkpointing in ("offload", KEPT_ON_HOST):
        # Copies overlap with computation, so they cost time only if they take longer.
        micro_s = max(micro_s, 2 * overlapped_bytes / gpu.link_bytes_s)
    if settings.train.checkpointing == KEPT_ON_HOST:
        micro_s += tape.fetched_late_bytes(LARGE_BYTES) / gpu.link_bytes_s
    micro_s += traffic.waited / gpu.peer_bytes_s
    # The embeddings' gradient comes last, so no computation hides its traffic.
    hidden_s = _HIDING_SHARE * micro_s
    byte_s = traffic.ring_share / gpu.peer_bytes_s
    peers_s = max(traffic.peers_last * byte_s, traffic.peers * byte_s - hidden_s)
    update_s, link_s = _update_s(request, gpu, model, placement), _link_s(request, gpu, model, placement)
    return micro_s * request.micro_batches + update_s + link_s + peers_s


def _with_copies_s(tape: Tape, gpu: Gpu, copies_s: float) -> float:
    """Seconds of a micro-batch whose forward pass, and again its backward pass, overlaps with copies of `copies_s`."""
    forward = [segment for segment in tape.segments if segment.where.phase == FORWARD]
    others = [segment for segment in tape.segments if segment.where.phase != FORWARD]
    return sum(max(roofline.micro_s(replace(tape, segments=part), gpu), copies_s) for part in (forward, others))


def _update_s(request: Request, gpu: Gpu, model: ModelWeights, placement: Placement) -> float:
    """Clipping and the optimizer's step on the GPU."""
    # Clipping reads the gradients for the norm, then reads and writes them.
    clipped_bytes = 3 * sum(weight.grad_bytes for weight in model.trained) if request.clipped else 0
    work = placement.update
    waits = cost_of(request.settings).waits
    return roofline.update_s(work.moved_bytes + clipped_bytes, work.host_calls, work.sm_s, gpu, waits=waits)


def _link_s(request: Request, gpu: Gpu, model: ModelWeights, placement: Placement) -> float:
    """Copies to and from the host, and the optimizer's step there."""
    settings = request.settings
    seconds = placement.traffic.link / gpu.link_bytes_s
    if settings.sharding.offloads:
        # The CPU's AdamW moves 7 fp32 values per parameter through host memory.
        numel = sum(weight.numel for weight in model.trained) / settings.sharding.gpus
        seconds += 28 * numel / HOST_BYTES_S
        if settings.train.precision == "amp-fp16":
            seconds += 4 * numel / HOST_OVERFLOW_BYTES_S
    return seconds
