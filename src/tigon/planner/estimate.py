"""Estimates the memory and time of a training run before it runs.

One estimate is a pipeline. `_run_pipeline` calls each stage:

    engine_of         the engine that the run trains with             engines/
    model_weights     weights of the model at full depth              simulate/model_states.py
    step_tapes        what a micro-batch allocates and computes       trace/
    placement         what one rank holds                             engines/
    SimulatedRun      memory over three steps                         simulated_run.py
    step_seconds      the time of a step                              step_time.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from tigon.models.hybrid_layers import PYTORCH, TIGON, paths_of_counts, refused_backward, slow_layers
from tigon.planner.engines import model_parallel
from tigon.planner.engines.base import Engine
from tigon.planner.engines.choose import engine_of
from tigon.planner.engines.deepspeed_host_memory import pinned
from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.generation_time import completions_s
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, check, text_config
from tigon.planner.simulate.generation import Completions
from tigon.planner.simulate.ledger import COMPONENTS
from tigon.planner.simulate.model_states import ModelWeights, model_weights
from tigon.planner.simulate.playback import GraphMemory, in_graphs, offloaded
from tigon.planner.simulated_run import SimulatedRun
from tigon.planner.step_time import step_seconds
from tigon.planner.trace.cache.step_tapes import StepTapes, step_tapes
from tigon.planner.trace.tape import FORWARD
from tigon.techniques.accumulation.accumulation import fuses
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST
from tigon.techniques.checkpointing.host_offload import MAX_LEAVING
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.lora import keeps_mxfp4
from tigon.techniques.sequence_parallel import method
from tigon.units import in_bytes, in_ms

PHASES = ("load", "forward", "loss", "backward", "optimizer", "eval", "save")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One configuration's memory and time, per GPU."""

    peak_allocated_bytes: int
    """Predicts torch.cuda.max_memory_allocated()."""
    peak_reserved_bytes: int
    """Predicts torch.cuda.max_memory_reserved(): allocated, plus memory that the caching allocator could not reuse."""
    device_bytes: int
    """Predicts nvidia-smi: reserved, plus memory outside the allocator (engines/non_allocator_memory.py)."""
    host_bytes: int
    """Host memory: pinned buffers, and optimizer state in unified memory."""
    nvme_bytes: int
    step_s: float
    """One optimizer step, including all its micro-batches and the completions that the run writes for them."""
    completions_s: float
    """The part of a step in which the run writes completions."""
    tokens_per_s: float
    """All GPUs together."""
    phases: Mapping[str, int]
    """The allocated peak of each of PHASES, bytes."""
    peak_phase: str
    components: Mapping[str, int]
    """Bytes of each of COMPONENTS at the peak; they sum to peak_allocated_bytes."""
    notes: tuple[str, ...]


def estimate(request: Request, *, gpu: Gpu, evaluation: bool = True) -> Estimate:
    """The memory and time of `request` on one of its GPUs.

    Args:
        request: the run.
        gpu: the GPU of each rank.
        evaluation: if False and the request does not evaluate, skips that phase: its peak is 0, and planning takes a
            fifth less time.

    Raises:
        UsageError: `check` rejects the request, or the model cannot be traced.
    """
    check(request)
    model_parallel.check(request)
    return _run_pipeline(request, gpu, evaluation or request.evaluated)


def _run_pipeline(request: Request, gpu: Gpu, evaluating: bool) -> Estimate:
    engine = engine_of(request.settings)
    per_rank_request = model_parallel.of_process(dataclasses.replace(request, settings=engine.traced_settings()))
    model = model_parallel.divided_head(model_weights(per_rank_request), request)
    tapes = step_tapes(model_parallel.with_part_of_head(per_rank_request), gpu, evaluating=evaluating)
    offloaded_bytes = 0
    if request.settings.train.checkpointing == "offload":
        frozen_embeddings = not any(weight.trained for weight in model.weights if weight.embedding)
        tapes, offloaded_bytes = _offload_activation_checkpoints(tapes, first_stays=frozen_embeddings)
    elif request.settings.train.checkpointing == KEPT_ON_HOST:
        offloaded_bytes = _activation_checkpoint_bytes(tapes)
    graphs = None
    if request.settings.train.cuda_graphs:
        tapes, graphs = _move_to_cuda_graphs(tapes, request.settings)
    frozen = tuple(model_weights(frozen_request) for frozen_request in per_rank_request.frozen())
    placement = engine.with_frozen(engine.placement(request, model), frozen)
    memory = SimulatedRun(
        request=per_rank_request,
        gpu=gpu,
        engine=engine,
        model=model,
        placement=placement,
        tapes=tapes,
        frozen=frozen,
        graphs=graphs,
    ).memory()
    overlapped_bytes = placement.managed + offloaded_bytes
    update_s = step_seconds(request, gpu, model, placement, tapes.micro_batches[-1], overlapped_bytes=overlapped_bytes)
    written, written_s = memory.completions, 0.0
    if written is not None:
        written_s = completions_s(written, per_rank_request, gpu, model)
    step_s = update_s + written_s
    groups = request.gpus // request.settings.sharding.processes_per_sample
    tokens = request.tokens * request.micro_batches * groups
    return Estimate(
        peak_allocated_bytes=memory.peak_bytes,
        peak_reserved_bytes=memory.reserved_bytes,
        device_bytes=memory.reserved_bytes + non_allocator_bytes(gpu, request.settings),
        host_bytes=overlapped_bytes + placement.host,
        nvme_bytes=placement.nvme,
        step_s=step_s,
        completions_s=written_s,
        tokens_per_s=tokens / step_s,
        phases={name: memory.phases.get(name, 0) for name in PHASES},
        peak_phase=memory.peak_phase,
        components={name: memory.components[name] for name in COMPONENTS},
        notes=(*_notes(request, gpu, engine, model), *_completions_notes(written, written_s, step_s)),
    )


def _offload_activation_checkpoints(tapes: StepTapes, *, first_stays: bool) -> tuple[StepTapes, int]:
    """Returns (the tapes with the layers' inputs on the host between their uses, pinned host bytes)."""
    host_bytes = _activation_checkpoint_bytes(tapes)
    moved = tuple(offloaded(tape, leaving=MAX_LEAVING, first_stays=first_stays) for tape in tapes.micro_batches)
    return StepTapes(moved, tapes.evaluation), host_bytes


def _activation_checkpoint_bytes(tapes: StepTapes) -> int:
    """Pinned host memory of what the forward pass keeps for the backward pass."""
    first = tapes.micro_batches[0]
    forward = (segment.events for segment in first.segments if segment.where.phase == FORWARD)
    made = (event for events in forward for event in events if event >= 0)
    return sum(pinned(first.sizes[block]) for block in made if first.components[block] == "checkpoints")


def _move_to_cuda_graphs(tapes: StepTapes, settings: Settings) -> tuple[StepTapes, GraphMemory]:
    """Returns the tapes without the layers' CUDA-graph memory, and that memory."""
    moved = [in_graphs(tape, recomputes=settings.train.checkpointing == "full") for tape in tapes.micro_batches]
    memory = moved[0][1]
    if fuses(settings):
        # With gradient accumulation fusion, CUDA graphs also write the first micro-batch's gradients in the matmul.
        # Without graphs only later micro-batches do.
        memory = dataclasses.replace(memory, pool=moved[-1][1].pool)
    return StepTapes(tuple(tape for tape, _ in moved), tapes.evaluation), memory


def _notes(request: Request, gpu: Gpu, engine: Engine, model: ModelWeights) -> tuple[str, ...]:
    settings = request.settings
    notes = []
    if settings.model.kernels == "liger":
        notes.append("Liger Kernel 0.8.5: allocations follow its source code; ops inside layers use tigon's timings.")
    width = getattr(text_config(request.config), "linear_key_head_dim", 0)
    if paths := paths_of_counts(model.hybrid_layers, fused=settings.model.patched, width=width, arch=gpu.arch):
        notes.append(f"With what is installed here, {slow_layers(paths) or '; '.join(map(str, paths))}.")
        if refused := refused_backward(paths, gpu.arch):
            notes.append(f"With what is installed here, {refused}.")
        if libraries := sorted({path.runs for path in paths} - {PYTORCH, TIGON}):
            notes.append(
                f"The plan counts the memory of {' and '.join(libraries)}; no GPU has measured their times here."
            )
    if settings.sharding.sequence > 1:
        notes.append(method.note(settings, request.config))
    notes += engine.notes(request, model)
    for frozen_request in request.frozen():
        size = in_bytes(model_weights(frozen_request).weight_bytes)
        notes.append(f"The run holds a second, frozen model: {frozen_request.model}, {size}.")
    notes += request.objective.notes()
    if gpu.source.startswith(("data sheet", "rates of")):
        notes.append(f"Times on {gpu.name} are not measured: {gpu.source}.")
    if settings.sharding.offload == "nvme":
        notes.append("The step time does not include the disk: NVMe files are read and written in every step.")
    if keeps_mxfp4(settings):
        notes.append("Experts stay in MXFP4, half a byte per weight, and are copied to 16 bits for each product.")
    elif settings.lora.quantize:
        notes.append("Weights are stored in NF4, half a byte each, and copied to 16 bits for each matrix product.")
    if settings.lora.quantize and "train.objective" in request.objective.recipe_keys():
        notes.append("No GPU has measured this objective over 4-bit weights.")
    return tuple(notes)


def _completions_notes(written: Completions | None, written_s: float, step_s: float) -> tuple[str, ...]:
    """What writes the completions, and its part of the step's time and memory."""
    if written is None:
        return ()
    writer = "tigon's generator" if written.by_generator else "transformers' generate"
    reason = f", {written.why_transformers}" if written.why_transformers else ""
    gathered = f", with {in_bytes(written.gathered_bytes)} of gathered weights" if written.gathered_bytes else ""
    share = f"{in_ms(1e3 * written_s)} of the step's {in_ms(1e3 * step_s)}"
    counted = f"{share}, and the GPU then holds {in_bytes(written.peak_bytes)}{gathered}"
    if other := written.generation.other_writer:
        return (
            f"Completions: {other} writes them. The plan counts them as transformers' generate would take them: "
            f"{counted}. The step is shorter, and the memory is another.",
        )
    return (f"Completions: {writer}{reason}. At full length they take {counted}.",)
