"""Finds the recipes that fit a GPU.

The search starts with the classes of recipes that change a run's numbers least. Within a class and a placement of its
states it tries the kinds of checkpointing from the fastest on. It tries each kind with the whole batch, then with
micro-batches, and keeps the first configuration that fits. `auto` starts from the micro-batch that fits without
recomputation, and tries larger ones as long as they are faster. It leaves a class when the class is slower than a
recipe with fewer changes, so a recommendation that changes more is also faster. A micro-batch is traced only if a lower
bound from the trace of the whole batch leaves open whether it fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tigon.errors import RecipeError, UsageError
from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, Gpu
from tigon.planner.request import Request, refusals
from tigon.planner.search import space
from tigon.planner.search.checkpointing import Beside, choose, fastest
from tigon.planner.search.largest_batch import MaxSizes, max_sizes
from tigon.planner.search.option import Option, estimate_option
from tigon.planner.search.pool import ForkedCall
from tigon.planner.search.space import SearchProblem
from tigon.planner.simulate.model_states import model_weights
from tigon.techniques import LABELS, SEARCHES, matrix
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST, OFFLOAD
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.train import AUTO

WORTH = 1.05
"""A recipe that changes the numbers more must make a step this many times faster. A smaller gain may be an artefact: an
optimizer with smaller states moves fewer bytes, but the time of its extra arithmetic is not modelled."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A configuration that does not fit."""

    settings: Settings
    batch: int
    device_bytes: int
    """The memory that it needs, or a lower bound if `reason` says "more than"."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recipe that fits, and the cheaper configurations that do not."""

    option: Option
    cheaper: tuple[Rejected, ...]
    """The same precision, optimizer and placement with less recomputation or larger micro-batches."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer to a `SearchProblem`."""

    problem: SearchProblem
    """Its GPU has the memory of `gpu` minus the headroom."""
    gpu: Gpu
    option: Option
    """The requested configuration and its estimate."""
    recommended: tuple[Recommendation, ...]
    """Smallest change of the run's numbers first."""
    fallback: str
    """The name of the change without which nothing fits; empty if there is none."""
    refused: tuple[str, ...]
    """The reasons why combinations were not tried."""
    max_sizes: MaxSizes
    """The largest sizes of the requested configuration."""
    best_max_sizes: MaxSizes | None
    """The largest sizes of the first recommendation."""


def plan(problem: SearchProblem) -> Plan:
    """Predict the requested configuration, and find recipes that fit.

    Args:
        problem: the requested run, its GPU, and the settings that the search may change.

    Raises:
        UsageError: the request cannot run, is out of range, or its model cannot be traced.
    """
    for reason in refusals(problem.request, problem.request.settings):
        raise UsageError(f"{reason}.")
    asked = _with_auto(problem) if problem.auto else problem.request
    option = Option(request=asked, estimate=estimate(asked, gpu=problem.gpu))
    gpu, problem = problem.gpu, replace(problem, gpu=space.with_headroom(problem.gpu))
    reach = ForkedCall(max_sizes, _for_reach(problem, asked), problem.gpu)
    recommended, refused, fallback = recommendations(problem)
    best_max_sizes = max_sizes(recommended[0].option.request, problem.gpu) if recommended else None
    return Plan(
        problem=problem,
        gpu=gpu,
        option=option,
        recommended=tuple(recommended),
        fallback=fallback,
        refused=refused,
        max_sizes=reach.result(),
        best_max_sizes=best_max_sizes,
    )


def _with_auto(problem: SearchProblem) -> Request:
    """The requested run with what `train.checkpointing: auto` chooses for the GPU, as `tigon train` would choose."""
    splits = space.splits(problem) if problem.auto_divides else ()
    gpu = space.with_headroom(problem.gpu)
    beside = Beside(host=True, host_bytes=problem.host_bytes, fusion=problem.auto_divides, graphs=problem.one_shape)
    return choose(problem.request, gpu, splits, beside=beside).option.request


def _for_reach(problem: SearchProblem, asked: Request) -> Request:
    """The run whose largest sizes are looked for. `auto` recomputes every layer before it gives up."""
    if not problem.auto or asked.settings.train.checkpointing in (OFFLOAD, KEPT_ON_HOST):
        return asked
    most = asked.settings.having({"train.checkpointing": "full"})
    return asked if refusals(asked, most) else replace(asked, settings=most)


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    problem: SearchProblem
    fitting: list[Recommendation]
    refused: dict[str, None]

    def walk(self, settings: Settings) -> None:
        """Look for the fastest checkpointing and split of the batch that fit with the other `settings`."""
        problem, rejected = self.problem, list[Rejected]()
        unchecked: Option | None = None  # the whole batch without checkpointing, which bounds the others' memory
        best: Option | None = None
        for kept in space.recomputations(problem, settings):
            if kept["train.checkpointing"] == AUTO:
                best = self.climb(settings.having(kept), unchecked, best, rejected)
                continue
            for number, (batch, accumulate) in enumerate(space.splits(problem)):
                tried = settings.having({**kept, "train.gradient_accumulation": accumulate})
                if best is not None and not _may_be_faster(best, unchecked, tried, batch):
                    break
                reasons = refusals(problem.request, tried)
                if reasons:
                    self.refused |= dict.fromkeys(reasons)
                    continue
                option = self.consider(tried, batch, unchecked)
                if isinstance(option, Rejected):
                    rejected.append(option)
                    continue
                if space.keeps_all(kept) and unchecked is None:
                    unchecked = option
                if self.beaten(option):  # smaller micro-batches and more recomputation would be slower still
                    if number == 0:
                        return self.keep(best, rejected)
                    break
                if option.fits(problem.gpu, problem.host_bytes):
                    best = option if best is None or _speed(option) > _speed(best) else best
                    break
                rejected.append(self.too_large(option))
        return self.keep(best, rejected)

    def climb(
        self, settings: Settings, unchecked: Option | None, best: Option | None, rejected: list[Rejected]
    ) -> Option | None:
        """Let `auto` choose for larger and larger micro-batches than that of `best`, until one is not faster."""
        problem = self.problem
        for batch, accumulate in reversed(space.splits(problem)):
            tried = settings.having({"train.gradient_accumulation": accumulate})
            if best is not None and not _may_be_faster(best, unchecked, tried, batch):
                continue
            reasons = refusals(problem.request, tried)
            if reasons:
                self.refused |= dict.fromkeys(reasons)
                return best
            option = self.consider(tried, batch, unchecked)
            if isinstance(option, Rejected):
                rejected.append(option)
                return best
            if not option.fits(problem.gpu, problem.host_bytes):
                rejected.append(self.too_large(option))
                return best
            if self.beaten(option) or (best is not None and _speed(option) <= _speed(best)):
                return best
            best = option
        return best

    def too_large(self, option: Option) -> Rejected:
        request = option.request
        return Rejected(
            settings=request.settings,
            batch=request.batch,
            device_bytes=option.estimate.device_bytes,
            reason=why_not(option, self.problem.gpu, self.problem.host_bytes),
        )

    def keep(self, best: Option | None, rejected: list[Rejected]) -> None:
        if best is not None:
            self.fitting.append(Recommendation(option=best, cheaper=tuple(rejected)))

    def consider(self, settings: Settings, batch: int, unchecked: Option | None) -> Option | Rejected:
        """Estimate a configuration, unless a cheaper bound shows that it cannot fit."""
        try:
            return self._consider(settings, batch, unchecked)
        except RecipeError as error:  # the model lacks the part that a technique works on
            return Rejected(settings=settings, batch=batch, device_bytes=0, reason=str(error))

    def _consider(self, settings: Settings, batch: int, unchecked: Option | None) -> Option | Rejected:
        gpu = self.problem.gpu

        def too_much(needs: int) -> Rejected | None:
            needs += non_allocator_bytes(gpu, settings)
            if needs <= gpu.memory_bytes:
                return None
            reason = f"needs more than {needs / GIB:.2f} of {gpu.memory_bytes / GIB:.2f} GiB"
            smallest = (
                settings.having({"train.checkpointing": "full"}) if settings.train.auto_checkpointing else settings
            )
            return Rejected(settings=smallest, batch=batch, device_bytes=needs, reason=reason)

        rejected = too_much(_at_least(unchecked, settings, batch)) if unchecked is not None else None
        if rejected is None and settings.train.auto_checkpointing:
            return fastest(space.as_request(self.problem.request, settings, batch), gpu)
        if rejected is None and settings.train.gradient_accumulation > 1:
            # Later micro-batches need a second trace, so the first one is estimated alone before.
            alone = estimate_option(
                space.as_request(self.problem.request, settings.having({"train.gradient_accumulation": 1}), batch), gpu
            )
            parts = alone.estimate.components
            # Gradients of earlier micro-batches add to the peak, except in an evaluation.
            accumulated = _whole_gradients(settings) and alone.estimate.peak_phase != "eval"
            added = _trained_bytes(alone) - parts["gradients"] if accumulated else 0
            rejected = too_much(alone.estimate.peak_allocated_bytes + max(0, added))
        return rejected or estimate_option(space.as_request(self.problem.request, settings, batch), gpu)

    def beaten(self, option: Option) -> bool:
        """Whether a recipe that was already kept is better."""
        return any(_beats(kept.option, option) for kept in self.fitting)


def _may_be_faster(best: Option, unchecked: Option | None, settings: Settings, batch: int) -> bool:
    """Whether more recomputation can beat `best`: only with larger micro-batches, if a step is CPU-bound."""
    if unchecked is None or batch <= best.request.batch:
        return False
    return _speed(unchecked) / space.least_cost(settings) > _speed(best)


def _at_least(unchecked: Option, settings: Settings, batch: int) -> int:
    """A lower bound of a configuration's bytes, from the estimate of the whole batch without checkpointing."""
    parts = unchecked.estimate.components
    kept = space.kept_share(settings) * batch / unchecked.request.batch
    lower = parts["weights"] + parts["optimizer"] + kept * parts["activations"]
    if settings.train.gradient_accumulation > 1 and _whole_gradients(settings):
        lower += _trained_bytes(unchecked)  # gradients of earlier micro-batches
    return int(lower)


def _trained_bytes(option: Option) -> int:
    """The bytes of the weights of the trained model."""
    frozen = sum(model_weights(one).weight_bytes for one in option.request.frozen())
    return option.estimate.components["weights"] - frozen


def _whole_gradients(settings: Settings) -> bool:
    """Whether gradients as large as the weights are held until the step."""
    return not settings.lora.used and not (settings.sharding.divides_states)


def search(problem: SearchProblem) -> tuple[list[Recommendation], tuple[str, ...]]:
    """Returns (recommendations, fastest first; the reasons why combinations were not tried)."""
    outcome = _Search(problem, [], {})
    for settings in space.walks(problem):
        if outcome.fitting and space.is_last_resort(problem, settings):
            continue
        reasons = refusals(problem.request, settings) or (_missing_here(settings) if problem.runnable_here else ())
        if reasons:
            outcome.refused |= dict.fromkeys(reasons)
        else:
            outcome.walk(settings)
    best = [
        one
        for one in outcome.fitting
        if not any(_beats(other.option, one.option) for other in outcome.fitting if other is not one)
    ]
    return sorted(best, key=lambda one: -_speed(one.option)), tuple(outcome.refused)


def recommendations(problem: SearchProblem) -> tuple[list[Recommendation], tuple[str, ...], str]:
    """Returns (recommendations, smallest change first; why combinations were not tried; the fallback's name or "").

    A fallback is tried if nothing fits, or if everything that fits keeps states on a host whose memory is not known. In
    the second case it is proposed only if it takes less than half of that memory.
    """
    found, refused = search(problem)
    used = ""
    for fallback in problem.fallbacks:
        if used or any(not _needs_host(one, problem) for one in found):
            break
        request = fallback.applied(problem.request)
        if not refusals(request, request.settings):
            more, reasons = search(replace(problem, request=request))
            if found:  # a fallback that needs as much of the host is no help
                least = min(one.option.all_host_bytes for one in found)
                more = [one for one in more if one.option.all_host_bytes < least / 2]
            found, refused = [*found, *more], tuple(dict.fromkeys((*refused, *reasons)))
            used = fallback.name if more else ""
    found.sort(key=lambda one: (space.request_rank(one.option.request), -_speed(one.option)))
    if found and found[0].option.request.masked and used != space.CROSS_DOCUMENT:
        found += _across_documents(found[0].option, problem)
        found.sort(key=lambda one: space.request_rank(one.option.request))
    return found, refused, used


def _needs_host(one: Recommendation, problem: SearchProblem) -> bool:
    """Whether a recommendation keeps data on a host of which the memory is not known."""
    result = one.option.estimate
    return problem.host_bytes is None and result.host_bytes + result.nvme_bytes > 0


def _across_documents(option: Option, problem: SearchProblem) -> list[Recommendation]:
    """`option` with attention across documents, if it needs a mask for documents alone and is faster without one."""
    if option.request.objective.pads:
        return []
    joined = estimate_option(replace(option.request, masked=False), problem.gpu)
    if _speed(joined) < WORTH * _speed(option) or not joined.fits(problem.gpu, problem.host_bytes):
        return []
    return [Recommendation(option=joined, cheaper=())]


def _missing_here(settings: Settings) -> tuple[str, ...]:
    try:
        matrix.check(settings, device="cuda")
    except RecipeError as error:
        return (str(error),)
    return ()


def _speed(option: Option) -> float:
    return option.estimate.tokens_per_s


def _beats(a: Option, b: Option) -> bool:
    """Whether `a` is better than `b`: it changes the numbers no more, and it is faster.

    If `a` changes the numbers less, it may be slower by up to `WORTH`.
    """
    ranks = space.change_rank(a.request.settings), space.change_rank(b.request.settings)
    return ranks[0] <= ranks[1] and _speed(a) * (WORTH if ranks[0] < ranks[1] else 1.0) > _speed(b)


def why_not(option: Option, gpu: Gpu, host_bytes: int | None) -> str:
    """Why a configuration does not fit: the memory needed and available, and the largest component."""
    result = option.estimate
    if result.device_bytes <= gpu.memory_bytes and host_bytes is not None:
        return f"needs {option.all_host_bytes / GIB:.2f} of {host_bytes / GIB:.2f} GiB of host memory"
    largest = max(result.components, key=lambda name: result.components[name])
    has = gpu.memory_bytes / GIB
    return (
        f"needs {result.device_bytes / GIB:.2f} of {has:.2f} GiB; the largest part is {largest}, "
        f"{result.components[largest] / GIB:.2f} GiB in the {result.peak_phase} phase"
    )


def varied_label(settings: Settings, batch: int) -> str:
    """The settings that the search varies within a class, in a few words."""
    kept = [LABELS[search.key](settings) for search in SEARCHES.values() if search.how == "recomputation"]
    return f"{', '.join(filter(None, kept))}, {batch} x {settings.train.gradient_accumulation} samples"


def against(settings: Settings, other: Settings, batch: int) -> str:
    """`other` in a few words: the settings that differ within the class of `settings`, or all settings otherwise."""
    within = [s.key for s in SEARCHES.values() if s.how in ("recomputation", "long samples", "split")]
    if settings == other.having({key: settings.value(key) for key in within}):
        return varied_label(other, batch)
    return f"{label(other)}, {batch} x {other.train.gradient_accumulation} samples"


def label(settings: Settings) -> str:
    """A configuration in a few words."""
    return ", ".join(filter(None, (words(settings) for words in LABELS.values())))
