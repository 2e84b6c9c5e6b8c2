"""`train.checkpointing: auto`: chooses what each layer recomputes, and the micro-batch, under the GPU's memory.

Every choice is estimated like any other run, from a trace of what it will run. Layers of one model cost the same, so
the best choice has at most two kinds of layers: one that fits in all layers, and one that saves more time per byte than
the others and does not fit in all. A line through the known sizes tells how many layers can have the second kind. The
estimate of that choice then confirms or corrects the number.

Beside recomputation, the layers' inputs may go to the host if nothing else fits (`offload`), and attention's results
if that is faster (`offload-attention`). Micro-batches may add to the gradients in their products (accumulation fusion).
Small micro-batches wait for the CPU, so layers may be launched as CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tigon.errors import RecipeError
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, has_routed_experts, refusals, text_config
from tigon.planner.search.option import Option, estimate_option
from tigon.techniques.accumulation import accumulation
from tigon.techniques.checkpointing.checkpointing import KEPT_ON_HOST, OFFLOAD
from tigon.techniques.checkpointing.layer_checkpointing import written
from tigon.techniques.keys.train import STATES

MAX_LOOKS = 6
"""Estimates for the number of layers of one pair of kinds."""
MAX_PAIRS = 2
LONG_TOKENS = 4096
"""Tokens of a sample from which `offload-attention` is tried. Below, attention takes little of a layer's time."""
GRAPHS_PAY = 1.02
"""How many times as fast a step with CUDA graphs has to be. They need batches of one shape, and time to capture."""
SLOW_HOST_S = 11.5e-6
"""CPU time of an operator on the slowest of three hosts of H100s (docs/planner-method.md). Hosts differ by more than
graphs cost: 16 x 4 samples of 1,024 tokens of Llama-3.2-1B took 895 (H200), 907 and 918 ms (two H100s) in graphs, and
without them 907, 1,196 and 1,780."""
Needs = Callable[[Option], int]
"""An option -> the bytes that have to fit."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What `choose` may use beside the recomputation of layers and the micro-batch."""

    host: bool = False
    """Keep the layers' inputs, or attention's results too, in host memory."""
    host_bytes: int | None = None
    """The host memory that it may use; None: any amount."""
    fusion: bool = False
    """Switch gradient accumulation fusion on where it pays."""
    graphs: bool = False
    """Launch layers as CUDA graphs where that pays. All batches of the run have one shape."""


@dataclass
class Choice:
    """What `auto` chose, and what it compared. `option` may not fit, if nothing does."""

    option: Option
    seen: dict[tuple[int, str], Option] = field(default_factory=dict)
    """(micro-batch, value of train.checkpointing) -> its estimate."""


def device_bytes(option: Option) -> int:
    """The memory of the GPU, with what is outside the allocator."""
    return option.estimate.device_bytes


def choose(
    request: Request,
    gpu: Gpu,
    splits: Sequence[tuple[int, int]] = (),
    *,
    needs: Needs = device_bytes,
    beside: Beside = Beside(),
) -> Choice:
    """The fastest choice that fits `gpu`; if nothing fits, the smallest.

    Args:
        request: The run. Its `checkpointing` does not count.
        gpu: The GPU, with the memory that the run may take.
        splits: (batch, accumulate) pairs to choose from, largest micro-batch first; empty: the request's own.
        needs: the bytes of an option that have to fit.
        beside: what it may use beside recomputation.

    Raises:
        UsageError: The model cannot be traced, or the request is wrong.
    """
    splits = splits or [(request.batch, request.micro_batches)]
    seen: dict[tuple[int, str], Option] = {}

    def layers_of(split: tuple[int, int]) -> _Layers:
        return _Layers(request_of(request, *split), gpu, seen, needs, beside)

    largest = layers_of(splits[0])
    whole = largest.option("none")
    if whole is not None and largest.fits(whole):
        return Choice(whole, seen)
    start = _first_split(whole, needs(whole), splits, gpu) if whole is not None else len(splits) - 1
    best: Option | None = None
    for layers in map(layers_of, reversed(splits[: start + 1])):
        option = layers.fastest(beats=_speed(best) if best is not None and layers.fits(best) else 0.0)
        if best is not None and layers.fits(best) and not layers.better(option, best):
            break  # larger micro-batches recompute more still
        best = option if best is None or layers.better(option, best) else best
    assert best is not None, "there is at least one split"
    # A batch that is not divided holds no gradients in its forward pass, so it may keep more than its parts.
    undivided = splits[0][1] == 1 and splits[0][0] != best.request.batch
    if undivided and best.request.settings.train.recomputes:
        option = largest.fastest(beats=_speed(best) if largest.fits(best) else 0.0)
        best = option if largest.better(option, best) else best
    if beside.host and best.request.settings.train.recomputes:
        # With the inputs alone on the host every layer is recomputed, which is never faster than what fits.
        kinds = [] if largest.fits(best) else [OFFLOAD]
        if not request.masked and request.seq >= LONG_TOKENS:
            kinds.append(KEPT_ON_HOST)
        for kind in kinds:
            on_host = _on_host(kind, map(layers_of, reversed(splits)), beside.host_bytes)
            best = on_host if on_host is not None and largest.better(on_host, best) else best
    return Choice(best, seen)


def _on_host(kind: str, smallest_first: Iterable[_Layers], host_bytes: int | None) -> Option | None:
    """The fastest micro-batch that fits with a kind that keeps tensors on the host; None if none does."""
    best: Option | None = None
    for layers in smallest_first:
        option = layers.option(kind)
        # One that does not fit decides nothing about larger ones: a batch that is not divided holds no gradients.
        if option is None or not layers.fits(option) or option.host_excess(host_bytes) > 0:
            continue
        if best is not None and _speed(option) <= _speed(best):
            break
        best = option
    return best


def request_of(request: Request, batch: int, accumulate: int) -> Request:
    """The request with another micro-batch."""
    return replace(request, batch=batch, settings=request.settings.having({"train.gradient_accumulation": accumulate}))


def fastest(request: Request, gpu: Gpu) -> Option:
    """The request with the fastest recomputation that fits; if none fits, with the one that needs least memory."""
    return _Layers(request, gpu, {}, device_bytes, Beside()).fastest()


def _speed(option: Option) -> float:
    return option.estimate.tokens_per_s


def _first_split(whole: Option, needed: int, splits: Sequence[tuple[int, int]], gpu: Gpu) -> int:
    """The place of the largest micro-batch that probably fits without recomputation, else of the smallest.

    whole: the largest micro-batch without recomputation, which does not fit. needed: the bytes that it needs. Smaller
    micro-batches are slower than the first that fits without recomputation.
    """
    estimate = whole.estimate
    grows = estimate.components["activations"] + estimate.components["logits"]
    left = gpu.memory_bytes - (needed - grows)
    most = whole.request.batch * left / max(grows, 1)
    return next((at for at, (batch, _) in enumerate(splits) if batch <= most), len(splits) - 1)


@dataclass
class _Layers:
    """The settings for the layers of one request."""

    request: Request
    gpu: Gpu
    seen: dict[tuple[int, str], Option]
    needs: Needs
    beside: Beside

    def fits(self, option: Option) -> bool:
        return self.needs(option) <= self.gpu.memory_bytes

    def better(self, option: Option, than: Option) -> bool:
        """Whether `option` fits and `than` does not. If both fit: is faster. If neither: is smaller."""
        if self.fits(option) != self.fits(than):
            return self.fits(option)
        return _speed(option) > _speed(than) if self.fits(option) else self.needs(option) < self.needs(than)

    @property
    def depth(self) -> int:
        return int(text_config(self.request.config).num_hidden_layers)

    def option(self, checkpointing: str) -> Option | None:
        """The estimate of a value of `train.checkpointing`; None if the run or the model excludes it."""
        key = self.request.batch, checkpointing
        if key not in self.seen:
            settings = self.request.settings.having({"train.checkpointing": checkpointing})
            if refusals(self.request, settings):
                return None
            fused = settings.having({"train.gradient_accumulation_fusion": True})
            if self.beside.fusion and accumulation.pays(settings) and not refusals(self.request, fused):
                settings = fused
            try:
                plain = estimate_option(replace(self.request, settings=settings), self.gpu)
            except RecipeError:  # the model lacks layers or MLPs that can be recomputed alone
                return None
            self.seen[key] = self._in_graphs(plain) if self.beside.graphs else plain
        return self.seen[key]

    def _in_graphs(self, option: Option) -> Option:
        """The option in CUDA graphs, if that is allowed, fits and pays on a slow host; else the option."""
        request = option.request
        settings = request.settings.having({"train.cuda_graphs": True})
        one_shape = not request.objective.pads and request.objective.own_parameters is None
        captured = one_shape and not has_routed_experts(request.config)  # which read their loads on the host
        if request.settings.train.cuda_graphs is not None or not captured or refusals(request, settings):
            return option
        graphed = estimate_option(replace(request, settings=settings), self.gpu)
        if not self.fits(graphed):
            return option
        slow = replace(self.gpu, host_s=max(self.gpu.host_s, SLOW_HOST_S))
        without, within = (_speed(estimate_option(one.request, slow)) for one in (option, graphed))
        return graphed if within > GRAPHS_PAY * without else option

    def mixed(self, first: str, second: str, count: int) -> Option | None:
        """The option in which the last `count` layers have the state `second`, and the others `first`."""
        return self.option(written([first] * (self.depth - count) + [second] * count))

    def fastest(self, *, beats: float = 0.0) -> Option:
        """The fastest option that fits, else the smallest.

        beats: tokens/s to exceed. If an option that recomputes nothing is not faster, it is returned at once.
        """
        none = self.option("none")
        if none is not None and (self.fits(none) or _speed(none) <= beats):
            return none
        whole = {state: self.mixed(state, state, 0) for state in STATES}
        uniform = {state: option for state, option in whole.items() if option is not None}
        if not uniform:
            return estimate_option(
                replace(self.request, settings=self.request.settings.having({"train.checkpointing": "none"})), self.gpu
            )
        fitting = {state: option for state, option in uniform.items() if self.fits(option)}
        if not fitting:
            return min(uniform.values(), key=self.needs)
        best = max(fitting.values(), key=_speed)
        pairs = [
            (self._expected_s(less, more), first, second)
            for first, less in fitting.items()
            for second, more in uniform.items()
            if second not in fitting and more.estimate.step_s < less.estimate.step_s
        ]
        for expected_s, first, second in sorted(pairs)[:MAX_PAIRS]:
            if expected_s >= best.estimate.step_s:
                break
            option = self._most(first, second, fitting[first], uniform[second])
            best = max(best, option, key=_speed)
        return best

    def _expected_s(self, less: Option, more: Option) -> float:
        """Seconds of a step with as many layers like `more` as fit beside layers like `less`, on a straight line."""
        room = self.gpu.memory_bytes - self.needs(less)
        share = min(1.0, room / max(self.needs(more) - self.needs(less), 1))
        return less.estimate.step_s + share * (more.estimate.step_s - less.estimate.step_s)

    def _most(self, first: str, second: str, less: Option, more: Option) -> Option:
        """The option with the most layers of the state `second` that fits."""
        low, high = (0, self.needs(less)), (self.depth, self.needs(more))
        best = less
        for _ in range(MAX_LOOKS):
            if high[0] - low[0] <= 1:
                break
            slope = (high[1] - low[1]) / (high[0] - low[0])
            guess = low[0] + math.floor((self.gpu.memory_bytes - low[1]) / slope) if slope > 0 else low[0] + 1
            count = min(max(guess, low[0] + 1), high[0] - 1)
            option = self.mixed(first, second, count)
            if option is None:
                break
            if self.fits(option):
                best, low = option, (count, self.needs(option))
            else:
                high = (count, self.needs(option))
        return best
