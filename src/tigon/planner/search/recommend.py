"""Which recipes fit a GPU: the search, fastest first, and the study's ladder, rung by rung.

The search goes through the classes of recipes by what they change of the run's numbers. Within a class and a placement
of its states it tries checkpointing from the fastest kind on, each with the batch whole and then in micro-batches, and
keeps the first that fits. It leaves a class as soon as it is slower than what was found with fewer changes, so that
what is recommended is fast for what it changes. A trace is made only where a lower bound, from the trace of the whole
batch, does not say already that the micro-batch cannot fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tigon.errors import RecipeError, UsageError
from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.estimate import Estimate, Method, estimate
from tigon.planner.gpus import GIB, Gpu
from tigon.planner.request import Request, refusals
from tigon.planner.search import space
from tigon.planner.search.largest_batch import MaxSizes, max_sizes
from tigon.planner.search.pool import ForkedCall
from tigon.planner.search.space import Rung, SearchProblem
from tigon.techniques import SETTINGS, matrix
from tigon.techniques.choices import Choices

WORTH = 1.05
"""A further change of the numbers has to make a step this much faster. Less is what an optimizer's smaller states save
in bytes, and its own arithmetic, which is not modelled, may take."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A configuration that was looked at."""

    request: Request
    estimate: Estimate

    def fits(self, gpu: Gpu) -> bool:
        """Whether the allocator gets by with the GPU's memory, giving back what it has cached where it must."""
        return self.estimate.device_bytes <= gpu.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A configuration that does not fit."""

    choices: Choices
    batch: int
    device_bytes: int
    """What it needs; at least this where `reason` says so."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recipe that fits, and the cheaper rungs below it that do not."""

    option: Option
    cheaper: tuple[Rejected, ...]
    """The same precision, optimizer and placement with less recomputation or larger micro-batches."""


@dataclass(frozen=True, kw_only=True)
class RungResult:
    """A rung of the ladder, tried."""

    rung: str
    option: Option | None
    """None: not tried."""
    fits: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer."""

    problem: SearchProblem
    """Its GPU is the real one less the headroom."""
    gpu: Gpu
    method: str
    option: Option
    """What was asked for, as it is."""
    recommended: tuple[Recommendation, ...]
    refused: tuple[str, ...]
    """Why combinations were not looked at."""
    ladder: tuple[RungResult, ...]
    max_sizes: MaxSizes
    """How far what was asked for reaches."""
    best_max_sizes: MaxSizes | None
    """How far the first recommendation reaches."""


def plan(problem: SearchProblem, *, method: Method = "trace", by: str = "search") -> Plan:
    """Predict what was asked for, and find what fits. Raises UsageError for what cannot be."""
    for reason in refusals(problem.request, problem.request.choices):
        raise UsageError(f"{reason}.")
    option = Option(request=problem.request, estimate=estimate(problem.request, gpu=problem.gpu, method=method))
    gpu, problem = problem.gpu, replace(problem, gpu=space.with_headroom(problem.gpu))
    reach = ForkedCall(max_sizes, problem.request, problem.gpu)
    ladder: tuple[RungResult, ...] = ()
    if by == "study":
        ladder, recommended, refused = _try_ladder(problem)
    else:
        recommended, refused = search(problem)
    best_max_sizes = max_sizes(recommended[0].option.request, problem.gpu) if recommended else None
    return Plan(
        problem=problem, gpu=gpu, method=method, option=option, recommended=tuple(recommended), refused=refused,
        ladder=ladder, max_sizes=reach.result(),
        best_max_sizes=best_max_sizes,
    )  # fmt: skip


def estimate_option(request: Request, gpu: Gpu) -> Option:
    return Option(request=request, estimate=estimate(request, gpu=gpu, evaluation=False))


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    problem: SearchProblem
    fitting: list[Recommendation]
    refused: dict[str, None]

    def walk(self, choices: Choices) -> None:
        """Look for the fastest that fits with these choices but for checkpointing and the split of the batch."""
        problem, rejected = self.problem, list[Rejected]()
        unchecked: Option | None = None  # the whole batch without checkpointing, which bounds what others keep
        best: Option | None = None
        for kept in space.recomputations(problem, choices):
            for number, (batch, accumulate) in enumerate(space.splits(problem)):
                tried = replace(choices, **kept, accumulate=accumulate)
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
                if self.beaten(option):  # and so are smaller micro-batches, and more recomputation of this one
                    if number == 0:
                        return self.keep(best, rejected)
                    break
                if option.fits(problem.gpu):
                    best = option if best is None or _speed(option) > _speed(best) else best
                    break
                rejected.append(
                    Rejected(
                        choices=tried, batch=batch, device_bytes=option.estimate.device_bytes,
                        reason=why_not(option, problem.gpu),
                    )
                )  # fmt: skip
        return self.keep(best, rejected)

    def keep(self, best: Option | None, rejected: list[Rejected]) -> None:
        if best is not None:
            self.fitting.append(Recommendation(option=best, cheaper=tuple(rejected)))

    def consider(self, choices: Choices, batch: int, unchecked: Option | None) -> Option | Rejected:
        """The configuration estimated, unless something cheaper to know says that it cannot fit."""
        try:
            return self._consider(choices, batch, unchecked)
        except RecipeError as error:  # this model has no part that the technique works on
            return Rejected(choices=choices, batch=batch, device_bytes=0, reason=str(error))

    def _consider(self, choices: Choices, batch: int, unchecked: Option | None) -> Option | Rejected:
        gpu = self.problem.gpu

        def too_much(needs: int) -> Rejected | None:
            needs += non_allocator_bytes(gpu, choices)
            if needs <= gpu.memory_bytes:
                return None
            reason = f"needs more than {needs / GIB:.2f} of {gpu.memory_bytes / GIB:.2f} GiB"
            return Rejected(choices=choices, batch=batch, device_bytes=needs, reason=reason)

        rejected = too_much(_at_least(unchecked, choices, batch)) if unchecked is not None else None
        if rejected is None and choices.accumulate > 1:
            # Micro-batches after the first have a trace of their own, made only if the first alone fits.
            alone = estimate_option(space.as_request(self.problem.request, replace(choices, accumulate=1), batch), gpu)
            parts = alone.estimate.components
            # An evaluation has no gradients, so none wait at its peak.
            waits = _whole_gradients(choices) and alone.estimate.peak_phase != "eval"
            waiting = parts["weights"] - parts["gradients"] if waits else 0
            rejected = too_much(alone.estimate.peak_allocated_bytes + max(0, waiting))
        return rejected or estimate_option(space.as_request(self.problem.request, choices, batch), gpu)

    def beaten(self, option: Option) -> bool:
        """Whether something at hand makes it not worth having."""
        return any(_beats(rivals.option, option) for rivals in self.fitting)


def _may_be_faster(best: Option, unchecked: Option | None, choices: Choices, batch: int) -> bool:
    """Whether more recomputation can beat `best`: only by launching larger micro-batches, where the host is slow."""
    if unchecked is None or batch <= best.request.batch:
        return False
    return _speed(unchecked) / space.least_cost(choices) > _speed(best)


def _at_least(unchecked: Option, choices: Choices, batch: int) -> int:
    """Bytes that a configuration allocates at least, from the same one with the whole batch and no checkpointing."""
    parts = unchecked.estimate.components
    kept = space.kept_share(choices) * batch / unchecked.request.batch
    lower = parts["weights"] + parts["optimizer"] + kept * parts["activations"]
    if choices.accumulate > 1 and _whole_gradients(choices):
        lower += parts["weights"]  # gradients of the micro-batches before
    return int(lower)


def _whole_gradients(choices: Choices) -> bool:
    """Whether gradients as large as the weights wait for the step."""
    return choices.lora_rank is None and not (choices.zero or choices.fsdp)


def search(problem: SearchProblem) -> tuple[list[Recommendation], tuple[str, ...]]:
    """(recommendations, fastest first; why combinations were not looked at)"""
    outcome = _Search(problem, [], {})
    for choices in space.walks(problem):
        if outcome.fitting and space.is_last_resort(problem, choices):
            continue
        reasons = refusals(problem.request, choices) or (_missing_here(choices) if problem.runnable_here else ())
        if reasons:
            outcome.refused |= dict.fromkeys(reasons)
        else:
            outcome.walk(choices)
    best = [
        one
        for one in outcome.fitting
        if not any(_beats(other.option, one.option) for other in outcome.fitting if other is not one)
    ]
    return sorted(best, key=lambda one: -_speed(one.option)), tuple(outcome.refused)


def _missing_here(choices: Choices) -> tuple[str, ...]:
    try:
        matrix.check(choices, device="cuda")
    except RecipeError as error:
        return (str(error),)
    return ()


def _speed(option: Option) -> float:
    return option.estimate.tokens_per_s


def _beats(a: Option, b: Option) -> bool:
    """Whether `a` makes `b` not worth having: it changes no more of the numbers and is faster, or hardly slower."""
    ranks = space.change_rank(a.request.choices), space.change_rank(b.request.choices)
    return ranks[0] <= ranks[1] and _speed(a) * (WORTH if ranks[0] < ranks[1] else 1.0) > _speed(b)


def why_not(option: Option, gpu: Gpu) -> str:
    """Why a configuration does not fit: needed against had, and the largest part of it."""
    result = option.estimate
    largest = max(result.components, key=lambda name: result.components[name])
    has = gpu.memory_bytes / GIB
    return (
        f"needs {result.device_bytes / GIB:.2f} of {has:.2f} GiB, of it {largest} "
        f"{result.components[largest] / GIB:.2f} "
        f"in the {result.peak_phase} phase"
    )


# --- the study's ladder ----------------------------------------------------------------------------------------------


def _try_ladder(problem: SearchProblem) -> tuple[tuple[RungResult, ...], list[Recommendation], tuple[str, ...]]:
    """(rungs, the recipe where the first rung fits, with batch and accumulation; refusals)"""
    start = {name: value for name, value in space.LADDER_START.items() if name in problem.free}
    current = replace(problem.request.choices, **start)
    steps: list[RungResult] = []
    refused: dict[str, None] = {}
    option = estimate_option(space.as_request(problem.request, current, problem.request.batch), problem.gpu)
    fitting = option if option.fits(problem.gpu) else None
    steps.append(_step("nothing", option, problem.gpu, ""))
    below: list[RungResult] = [] if fitting else [*steps]
    for rung in space.LADDER:
        step, current = _try_rung(rung, current, problem, refused)
        steps.append(step)
        if fitting is None and step.fits:
            fitting = step.option
        elif fitting is None:
            below.append(step)
    if fitting is None:
        return tuple(steps), [], tuple(refused)
    final, more = _enlarge(fitting, problem)
    steps += more
    cheaper = [
        Rejected(
            choices=step.option.request.choices, batch=step.option.request.batch,
            device_bytes=step.option.estimate.device_bytes, reason=step.reason,
        )
        for step in below
        if step.option is not None and not step.fits
    ]  # fmt: skip
    return tuple(steps), [Recommendation(option=final, cheaper=tuple(cheaper))], tuple(refused)


def _try_rung(
    rung: Rung, current: Choices, problem: SearchProblem, refused: dict[str, None]
) -> tuple[RungResult, Choices]:
    """(the rung, the choices that the next one starts from)"""

    def skipped(reason: str) -> tuple[RungResult, Choices]:
        return RungResult(rung=rung.name, option=None, fits=False, reason=reason), current

    if current.gpus < rung.needs_gpus:
        return skipped(f"is for {rung.needs_gpus} GPUs and more")
    fixed = [
        name for name, value in rung.change.items() if name not in problem.free and getattr(current, name) != value
    ]
    if fixed:
        return skipped(f"{', '.join(fixed)} was given otherwise")
    wanted = replace(current, **rung.change)
    reasons = refusals(problem.request, wanted)
    if not reasons:
        return _step(rung.name, _micro(wanted, problem), problem.gpu, ""), wanted
    refused |= dict.fromkeys(reasons)
    given_up = {name: value for name, value in rung.without.items() if name in problem.free}
    alone = replace(wanted, **given_up)
    if refusals(problem.request, alone):
        return skipped(reasons[0])
    # A way off the ladder: the rungs above start from where it left.
    changed = ", ".join(f"{name}: {value}" for name, value in given_up.items() if getattr(wanted, name) != value)
    return _step(rung.name, _micro(alone, problem), problem.gpu, f"{reasons[0]}; so with {changed}: "), current


def _micro(choices: Choices, problem: SearchProblem) -> Option:
    return estimate_option(space.as_request(problem.request, choices, problem.request.batch), problem.gpu)


def _step(name: str, option: Option, gpu: Gpu, before: str) -> RungResult:
    fits = option.fits(gpu)
    return RungResult(rung=name, option=option, fits=fits, reason=before + ("fits" if fits else why_not(option, gpu)))


def _enlarge(option: Option, problem: SearchProblem) -> tuple[Option, list[RungResult]]:
    """Batch and accumulation to the effective batch, with the largest micro-batch that fits."""
    choices, gpu, rows = option.request.choices, problem.gpu, problem.rows
    if problem.effective_batch is None or "accumulate" not in problem.free:
        return option, []  # the rows of a micro-batch were given, or follow from what was
    most = max_sizes(option.request, gpu).largest_batch or option.request.batch
    batch = max(size for size in range(1, min(most, rows) + 1) if rows % size == 0)
    steps = [_step("batch size", estimate_option(replace(option.request, batch=batch), gpu), gpu, f"{batch} rows: ")]
    if rows // batch > 1:
        larger = replace(choices, accumulate=rows // batch)
        reasons = refusals(problem.request, larger)
        if reasons:
            steps.append(RungResult(rung="accumulation", option=None, fits=False, reason=reasons[0]))
        else:
            enlarged = estimate_option(replace(option.request, batch=batch, choices=larger), gpu)
            steps.append(_step("accumulation", enlarged, gpu, f"{rows // batch} micro-batches of {batch} rows: "))
    last = [step.option for step in steps if step.option is not None and step.fits]
    return (last[-1] if last else option), steps


def rung(choices: Choices, batch: int) -> str:
    """What the search varies within a class, in a few words."""
    kept = [setting.label(choices) for setting in SETTINGS.values() if setting.search == "recomputation"]
    return f"{', '.join(filter(None, kept))}, {batch} x {choices.accumulate} rows"


def against(choices: Choices, other: Choices, batch: int) -> str:
    """`other` as far as it is not `choices`: of the same class by what the search varies, else in full."""
    within = [s.field for s in SETTINGS.values() if s.search in ("recomputation", "long rows", "split")]
    varied = {name: getattr(choices, name) for name in within}
    if choices == replace(other, **varied):
        return rung(other, batch)
    return f"{label(other)}, {batch} x {other.accumulate} rows"


def label(choices: Choices) -> str:
    """A configuration in a few words."""
    return ", ".join(filter(None, (setting.label(choices) for setting in SETTINGS.values())))
