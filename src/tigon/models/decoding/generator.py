"""Writes completions of prompts with a model as it is in memory: adapters, 4-bit weights and tigon's kernels included.

1. Equal prompts are one group, and go through the model once. Their keys and values are kept once.
2. A decoding step computes the next token of every row and chooses it on the device. It is the same work on the same
   memory each time, so on a GPU it is captured into a CUDA graph: one launch instead of thousands.
3. Every `CHECK_STEPS` steps the host looks which rows have ended. If at most half go on, they move together, and a
   graph for fewer rows is captured.

The pool of keys and values and the graphs are freed at the end, so that an update finds the memory that it had before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon._trunk import trunk_of
from tigon.models.decoding.pool import KVPool
from tigon.models.decoding.rows import MOST_ROWS, Limits, Rows, Written
from tigon.models.decoding.sampling import Sampling, sample
from tigon.models.kv_cache import cache_argument, queries_per_key
from tigon.models.loading.weight_files import one_line
from tigon.models.patch import unwrap
from tigon.models.tracing import attention_replaced
from tigon.ops.decode_attention import MOST_TILE_QUERIES, decode_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECK_STEPS = 16
"""Decoding steps between two looks at which rows have ended. A look waits for the GPU."""
LEAST_GRAPH_STEPS = 16
"""Steps that have to remain for a capture, which takes as long as two steps without a graph."""
PROMPT_TOKENS, PROMPTS = 4096, 16
"""The most tokens, with padding, and prompts of one pass."""


@dataclass(frozen=True, kw_only=True)
class Completions:
    """What the model wrote, one entry per prompt."""

    tokens: list[list[int]]
    """With the token that ends a completion, if there was one."""
    logprobs: list[list[float]]
    """Of each token, at the sampling's temperature and before its filters."""


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    *,
    graphs: bool = True,
) -> Completions:
    """Write one completion of each prompt. Equal prompts are computed once.

    Args:
        model: A causal language model of transformers, also in PEFT's wrapper. It is set to `eval` meanwhile.
        prompts: The tokens of each prompt, at least one.
        limits: When a completion ends.
        sampling: How tokens are chosen. The same seed on the same device writes the same completions.
        graphs: Whether decoding steps on a GPU run as CUDA graphs.

    Returns:
        The completions in the order of the prompts.
    """
    writer = _Writer(unwrap(model), model, limits, sampling, graphs)
    result = Completions(tokens=[[] for _ in prompts], logprobs=[[] for _ in prompts])
    with evaluating(model), torch.no_grad():
        for wave in waves_of(prompts):
            writer.write(wave, prompts, result)
    if writer.device.type == "cuda":
        torch.cuda.empty_cache()  # the graphs' memory serves nothing else before
    return result


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set the modules to `eval` that train, and afterwards to `train` again. Dropout is then off."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def waves_of(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The prompts' numbers, equal prompts together, in parts of at most `MOST_ROWS`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(number)
    ordered = [number for members in groups.values() for number in members]
    for begin in range(0, len(ordered), MOST_ROWS):
        yield ordered[begin : begin + MOST_ROWS]


@dataclass
class _Writer:
    """Writes waves of completions. `called` is the model as its trainer wraps it, such as under autocast."""

    model: Any
    called: Any
    limits: Limits
    sampling: Sampling
    graphs: bool
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.device: torch.device = next(self.model.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(self.sampling.seed)
        self.ends = torch.tensor(self.limits.ends or (-1,), device=self.device)
        self.config = self.model.config.get_text_config()
        self.cache_name = cache_argument(trunk_of(self.model).forward) or "past_key_values"

    def write(self, wave: Sequence[int], prompts: Sequence[Sequence[int]], result: Completions) -> None:
        """Write the completions of the prompts with these numbers into `result`."""
        groups: dict[tuple[int, ...], int] = {}
        group_of = [groups.setdefault(tuple(prompts[number]), len(groups)) for number in wave]
        ranges, begin = [], 0
        for prompt in groups:
            ranges.append((begin, begin := begin + len(prompt)))
        limit = self.limits.new_tokens
        pool = KVPool(self.config.num_hidden_layers, begin + limit * len(wave))
        own = [begin + limit * row for row in range(len(wave))]
        rows = Rows.of([ranges[group] for group in group_of], own, self.device)
        written = Written.empty(len(wave), limit, self.device)
        try:
            logits = self._read(pool, list(groups), [place for place, _ in ranges])
            self._take(logits[torch.tensor(group_of, device=self.device)], rows, written)
            attend = partial(self._attend, most_prompt=max(map(len, groups)))
            with attention_replaced(self.model, attend, _no_mask):
                self._decode(pool, rows, written, group_of)
        finally:
            pool.free()
        for number, tokens, logprobs, count in zip(
            wave, written.tokens_NL.tolist(), written.logprobs_NL.tolist(), written.counts_N.tolist(), strict=True
        ):
            result.tokens[number], result.logprobs[number] = tokens[:count], logprobs[:count]

    def _read(self, pool: KVPool, prompts: Sequence[tuple[int, ...]], places: Sequence[int]) -> Tensor:
        """Fill the pool with the prompts. Returns the logits after each, (groups, V)."""
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        logits: dict[int, Tensor] = {}
        while order:
            longest = len(prompts[order[-1]])
            count = max(1, min(PROMPTS, PROMPT_TOKENS // longest))
            batch, order = order[-count:], order[:-count]
            # Padding comes last, so that no token of a prompt sees it, and needs no mask.
            ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
            source: list[int] = []
            targets: list[int] = []
            for row, number in enumerate(batch):
                ids_BT[row, : len(prompts[number])] = torch.tensor(prompts[number])
                source += range(row * longest, row * longest + len(prompts[number]))
                targets += range(places[number], places[number] + len(prompts[number]))
            ends = [len(prompts[number]) - 1 for number in batch]
            read = sorted(set(ends))
            given, to = torch.tensor(source, device=self.device), torch.tensor(targets, device=self.device)
            out = self.called(
                input_ids=ids_BT.to(self.device),
                position_ids=torch.arange(longest, device=self.device)[None],
                logits_to_keep=torch.tensor(read, device=self.device),
                use_cache=True,
                **{self.cache_name: pool.for_prompts(given, to)},
            )
            for row, number in enumerate(batch):
                logits[number] = out.logits[row, read.index(ends[row])].clone()  # a view would keep them all
        return torch.stack([logits[number] for number in range(len(prompts))])

    def _decode(self, pool: KVPool, rows: Rows, written: Written, groups: list[int]) -> None:
        """Decode until every row has ended."""
        left = self.limits.new_tokens - 1
        run: Callable[[], None] | None = None
        while left > 0:
            goes_on = (~rows.has_ended).nonzero()[:, 0]
            if not len(goes_on):
                return
            if run is None or (2 * len(goes_on) <= len(rows) and left >= LEAST_GRAPH_STEPS):
                rows, groups = rows.kept(goes_on), [groups[row] for row in goes_on.tolist()]
                rows.set_tiles(groups, self._tile_rows())
                run, left = self._runner(pool, rows, written, left)
            steps = min(left, CHECK_STEPS)
            for _ in range(steps):
                run()
            left -= steps

    def _runner(self, pool: KVPool, rows: Rows, written: Written, left: int) -> tuple[Callable[[], None], int]:
        """A function that runs a step, and the steps left: a capture is preceded by one, which compiles the kernels."""
        step = partial(self._step, pool, rows, written)
        if self.device.type != "cuda" or not self.graphs or left <= LEAST_GRAPH_STEPS:
            return step, left
        step()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:  # such as a layer that copies sizes to the host
            self.graphs, self.generator = False, torch.Generator(self.device).manual_seed(self.sampling.seed + 1)
            reason = one_line(error)
            warnings.warn(f"decoding steps run without CUDA graphs, several times as long: {reason}", stacklevel=2)
            return step, left - 1
        return graph.replay, left - 1

    def _step(self, pool: KVPool, rows: Rows, written: Written) -> None:
        out = self.called(
            input_ids=rows.tokens[:, None],
            position_ids=rows.positions[:, None],
            attention_mask=self._bounds(rows),
            use_cache=True,
            **{self.cache_name: pool.for_rows(rows.places)},
        )
        self._take(out.logits[:, -1], rows, written)

    def _take(self, logits_SV: Tensor, rows: Rows, written: Written) -> None:
        tokens, logprobs = sample(logits_SV, self.sampling, self.generator)
        rows.take(tokens, logprobs, written, self.ends)

    def _bounds(self, rows: Rows) -> Any:
        """The rows' bounds in place of a mask: transformers hands a tensor with four dimensions on to attention."""
        whole = rows.bounds[:, None, None]
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if window is None or not getattr(self.config, "use_sliding_window", True) or kinds == {"full_attention"}:
            return whole
        inside = rows.bounds_in_window(window)[:, None, None]
        return {"full_attention": whole, "sliding_attention": inside} if "full_attention" in kinds else inside

    def _tile_rows(self) -> int:
        return max(1, MOST_TILE_QUERIES // queries_per_key(self.config))

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        *,
        most_prompt: int,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        """The attention function of a decoding step: query (S, h, 1, D), key and value the whole pool."""
        query_ShD = query[:, :, 0].to(key.dtype).contiguous()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out_ShE = decode_attention(
            query_ShD,
            key[0],
            value[0],
            attention_mask[:, 0, 0],
            s_aux,
            scale,
            softcap or 0.0,
            most_prompt,
            self.limits.new_tokens,
            self._tile_rows(),
        )
        return out_ShE.to(query.dtype)[:, None], None


def _no_mask(*args: object, **options: object) -> None:
    """A mask function: the bounds stand for masks."""
