"""Simulates the memory of a run: loading, three optimizer steps, a save, and an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tigon.planner.engines.base import Engine, Loading, Placement
from tigon.planner.engines.non_allocator_memory import allocator_budget_bytes
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, ties_embeddings
from tigon.planner.simulate.allocator import CachingAllocator, has_expandable_segments, sets_expandable_segments
from tigon.planner.simulate.collectives import GATHERING, GatheredWeights, ReducedGradients
from tigon.planner.simulate.generation import Completions, generate
from tigon.planner.simulate.ledger import Allocation, Ledger
from tigon.planner.simulate.model_states import ModelWeights, step_tensor_bytes
from tigon.planner.simulate.playback import GradientRules, GraphMemory, StageBytes, replay, replay_evaluation
from tigon.planner.trace.cache.step_tapes import StepTapes
from tigon.planner.trace.dispatch_recorder import rounded

# The third step is the first that reuses cached blocks of a step with optimizer states.
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The result of the simulation."""

    peak_bytes: int
    peak_phase: str
    components: Mapping[str, int]
    """Bytes of each component at the peak."""
    phases: Mapping[str, int]
    """The peak of each phase that was simulated."""
    reserved_bytes: int
    completions: Completions | None
    """How a step writes its completions."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run on one GPU. The stages before the simulation computed its fields."""

    request: Request
    """With the settings that the GPU computes with, which are not always those of the user (Engine.traced_settings)."""
    gpu: Gpu
    engine: Engine
    model: ModelWeights
    placement: Placement
    tapes: StepTapes
    frozen: tuple[ModelWeights, ...] = ()
    """The models that the run holds beside the trained one, whole and without gradients."""
    graphs: GraphMemory | None = None
    """What CUDA graphs of the layers hold, which the tapes then lack."""

    def memory(self) -> RunMemory:
        """Simulate the run."""
        budget_bytes = allocator_budget_bytes(self.gpu, self.engine.settings)
        ledger = Ledger(allocator=CachingAllocator(budget_bytes, expandable=is_expandable(self.request, self.gpu)))
        self._load(ledger)
        completions = None
        for step in range(STEPS):
            completions = self._step(ledger, first=step == 0)
        # This phase holds what stays after a step. The NaN guard reads the largest and the smallest value of each
        # weight before a save, which adds a few KiB: 34 KB for 525 million weights on an H200.
        ledger.enter("save")
        reserved_bytes = ledger.allocator.peak_reserved_bytes
        if self.tapes.evaluation is not None:
            replay_evaluation(ledger, self.tapes.evaluation)
        if self.request.evaluated:
            reserved_bytes = ledger.allocator.peak_reserved_bytes
        phase, peak_bytes, components = ledger.peak(except_phase=None if self.request.evaluated else "eval")
        return RunMemory(
            peak_bytes=peak_bytes,
            peak_phase=phase,
            components=components,
            phases=ledger.phases,
            reserved_bytes=reserved_bytes,
            completions=completions,
        )

    def _load(self, ledger: Ledger) -> None:
        placement = self.placement
        self.engine.load(Loading(ledger=ledger, request=self.request, model=self.model, placement=placement))
        for request, weights in zip(self.request.frozen(), self.frozen, strict=True):
            self.engine.load_frozen(Loading(ledger=ledger, request=request, model=weights, placement=placement))
        ledger.alloc(placement.buffers, "workspace")
        if placement.gradients.allocated == "at the start":
            ledger.alloc(placement.gradients.nbytes, "gradients")

    def _step(self, ledger: Ledger, *, first: bool) -> Completions | None:
        placement = self.placement
        ledger.enter("forward")
        if first:
            ledger.alloc_briefly(*placement.gathered.registered, component="weights")
            # Two cuBLAS handles: one for the thread that runs the forward pass and one for autograd's.
            for _ in range(2):
                ledger.alloc(self.gpu.cublas_workspace_bytes, "workspace")
            if self.graphs is not None:
                self._capture(ledger, self.graphs)
        completions = generate(ledger, self.request, self.model, self.engine.whole_weights)
        gradients = self._micro_batches(ledger)
        ledger.enter("optimizer")
        if first:
            for nbytes in placement.optimizer_tensor_bytes:
                ledger.alloc(nbytes, "optimizer")
        temporaries = [*placement.step_tensor_bytes]
        if self._updates_in_backward and ties_embeddings(self.request.config):
            # A tied weight's hook runs while the second gradient, already added to the first, is still held.
            temporaries.append(sum(weight.grad_bytes for weight in self.model.weights if weight.embedding))
        ledger.alloc_briefly(*temporaries)
        ledger.free_all(gradients)
        return completions

    def _capture(self, ledger: Ledger, graphs: GraphMemory) -> None:
        """Allocate what the graphs hold from the first step on."""
        ledger.alloc(graphs.gradients, "gradients")
        ledger.alloc(graphs.activations, "activations")
        ledger.alloc(graphs.buffers, "workspace")
        for _ in range(2):  # cuBLAS handles of the stream that captures
            ledger.alloc(self.gpu.cublas_workspace_bytes, "workspace")
        if graphs.pool:
            ledger.allocator.allocate(rounded(graphs.pool), stream=0)

    @property
    def _updates_in_backward(self) -> bool:
        return self.request.settings.train.optimizer_row.in_backward

    def _micro_batches(self, ledger: Ledger) -> list[Allocation | None]:
        """The micro-batches of one step; the third and later ones repeat the second. Returns the gradients they
        leave."""
        placement, tapes = self.placement, self.tapes.micro_batches
        gathered_plan, rules = placement.gathered, placement.gradients
        ledger.alloc_briefly(gathered_plan.before_copy, component="weights", stream=GATHERING)
        moving = [ledger.alloc(gathered_plan.both_passes, "weights"), ledger.alloc(placement.buckets, "workspace")]
        gathered = GatheredWeights(ledger, gathered_plan.by_layer) if gathered_plan.by_layer is not None else None
        reduced = self._reduced_gradients(ledger)
        update_bytes = sum(step_tensor_bytes(self.request, self.model.weights)) if self._updates_in_backward else 0
        waits_whole = rules.whole_until_last_micro_batch
        gradients: list[Allocation | None] = []
        for number in range(min(self.request.micro_batches, 2)):
            gradients += replay(
                ledger,
                tapes[min(number, len(tapes) - 1)],
                GradientRules(
                    keep=waits_whole or (rules.kept and not self._updates_in_backward),
                    tied=ties_embeddings(self.request.config),
                    reduced=reduced if number == 0 else None,
                    update_bytes=update_bytes,
                ),
                gathered=gathered,
                gathered_bytes=StageBytes(
                    forward=gathered_plan.forward,
                    loss=gathered_plan.loss,
                    loss_backward=gathered_plan.loss_backward,
                    backward=gathered_plan.backward,
                    first_layer=gathered_plan.first_layer,
                    last=gathered_plan.last,
                    entering=gathered_plan.entering,
                ),
            )
        if gathered is not None:
            gathered.close()
        if waits_whole and reduced is not None:
            gradients = _reduce_all(ledger, gradients, reduced)
        ledger.free_all(moving)
        return gradients + (reduced.allocations if reduced is not None else [])

    def _reduced_gradients(self, ledger: Ledger) -> ReducedGradients | None:
        """The gradients that one step's reductions keep or copy on this GPU; None if there are no such gradients."""
        rules = self.placement.gradients
        if rules.allocated == "at the start" or not rules.nbytes:
            return ReducedGradients(ledger, copies=rules.copies) if rules.copies else None
        tape = self.tapes.micro_batches[0]
        sizes = zip(tape.sizes, tape.components, strict=True)
        made_bytes = sum(size for size, component in sizes if component == "gradients")
        share = rules.nbytes / made_bytes if rules.allocated == "with each" else 0.0
        return ReducedGradients(ledger, rules.nbytes, share=share, copies=rules.copies)


def _reduce_all(
    ledger: Ledger, gradients: Sequence[Allocation | None], reduced: ReducedGradients
) -> list[Allocation | None]:
    """Reduce accumulated gradients after the last micro-batch, then free them."""
    for gradient in gradients:
        reduced.add(gradient.tensor_bytes if gradient is not None else 0)
    ledger.free_all(gradients)
    return []


def is_expandable(request: Request, gpu: Gpu) -> bool:
    """Whether the run has expandable segments: by the environment, or because `tigon train` switches them on."""
    return has_expandable_segments() or (request.by_tigon_train and sets_expandable_segments(request.settings, gpu))
