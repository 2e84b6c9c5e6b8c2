"""Writes completions of prompts with a model as it is in memory: adapters, 4-bit weights and tigon's kernels included.

1. Equal prompts are one group, and go through the model once. Their keys and values are kept once.
2. A decoding step computes the next token of every row and chooses it on the device. It is the same work on the same
   memory each time, so on a GPU it is captured into a CUDA graph: one launch instead of thousands.
3. Every `CHECK_STEPS` steps the host looks which rows have ended. If completions wait, they get these rows, and the
   graph stays. If none wait and at most half of the rows go on, they move together, and a graph for fewer rows is
   captured.

The pool of keys and values and the graphs are freed at the end, so that an update finds the memory that it had before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon._trunk import trunk_of
from tigon.errors import one_line
from tigon.models.decoding.kv_pool import KVPool
from tigon.models.decoding.prompt_queue import PromptQueue
from tigon.models.decoding.rows import LEAST_GRAPH_STEPS, MOST_ROWS, PROMPT_TOKENS, PROMPTS, Limits, Rows, Written
from tigon.models.decoding.sampling import Sampling, sample
from tigon.models.kv_cache import cache_argument, queries_per_key
from tigon.models.patch import unwrap
from tigon.models.tracing import attention_replaced
from tigon.ops.decode_attention import MOST_TILE_QUERIES, decode_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECK_STEPS = 16
"""Decoding steps between two looks at which rows have ended. A look waits for the GPU. Waiting completions begin when
one of this many rows is free, because a pass over their prompts takes at least as long as a step."""


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
    show: Callable[[list[int], list[float]], None] | None = None,
) -> Completions:
    """Write one completion of each prompt. Equal prompts are computed once.

    Args:
        model: A causal language model of transformers, also in PEFT's wrapper. It is set to `eval` meanwhile.
        prompts: The tokens of each prompt, at least one.
        limits: When a completion ends.
        sampling: How tokens are chosen. The same seed on the same device writes the same completions.
        graphs: Whether decoding steps on a GPU run as CUDA graphs.
        show: Called after each step with the new tokens of the first prompt and their log-probabilities.

    Returns:
        The completions in the order of the prompts.
    """
    writer = _Writer(unwrap(model), model, limits, sampling, graphs, show)
    with evaluating(model), torch.no_grad():
        result = writer.write(prompts)
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


@dataclass
class _Writer:
    """Writes completions, once. `called` is the model as its trainer wraps it, such as under autocast."""

    model: Any
    called: Any
    limits: Limits
    sampling: Sampling
    graphs: bool
    show: Callable[[list[int], list[float]], None] | None

    def __post_init__(self) -> None:
        self.device: torch.device = next(self.model.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(self.sampling.seed)
        self.ends = torch.tensor(self.limits.ends or (-1,), device=self.device)
        self.config = self.model.config.get_text_config()
        self.cache_name = cache_argument(trunk_of(self.model).forward) or "past_key_values"

    def write(self, prompts: Sequence[Sequence[int]]) -> Completions:
        self.queue, limit = PromptQueue(prompts, MOST_ROWS), self.limits.new_tokens
        room = self.queue.room
        self.pool = KVPool(self.config.num_hidden_layers, room.prompt_tokens + limit * room.rows)
        self.rows = Rows.idle([room.prompt_tokens + limit * row for row in range(room.rows)], self.device)
        self.groups, self.left, self.shown = [-1] * room.rows, 0, 0
        """The group of each row, the most steps until all rows have ended, and the tokens that `show` has got."""
        self.written = Written.empty(len(prompts), limit, self.device)
        self.logits: dict[int, Tensor] = {}
        """After the prompts of groups of which completions have yet to begin."""
        self.run: Callable[[], None] | None = None
        self.autocast: torch.dtype | None = None
        try:
            with self._noting_autocast():
                goes_on = self._begin_waiting()
            # Accelerate's forward enters autocast by itself. Around all steps, each weight is cast once.
            kind, dtype = self.device.type, self.autocast
            with contextlib.nullcontext() if dtype is None else torch.autocast(kind, dtype):
                while goes_on:
                    with attention_replaced(self.model, self._attend, _no_mask):
                        self._decode(goes_on)
                    goes_on = self._begin_waiting()
            self._show()
        finally:
            self.pool.free()
        parts = (self.written.tokens_NL, self.written.logprobs_NL, self.written.counts_N)
        each = list(zip(*(part.tolist() for part in parts), strict=True))
        return Completions(
            tokens=[tokens[:n] for tokens, _, n in each], logprobs=[logprobs[:n] for _, logprobs, n in each]
        )

    @contextlib.contextmanager
    def _noting_autocast(self) -> Iterator[None]:
        """Note the dtype of autocast that the model's forward runs under."""
        kind = self.device.type

        def note(*_: object) -> None:
            self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

        hook = trunk_of(self.model).register_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def _going_on(self) -> list[int]:
        """The rows that have not ended."""
        return (~self.rows.has_ended).nonzero()[:, 0].tolist()

    def _begin_waiting(self) -> list[int]:
        """Give enough free rows to completions that wait. Returns the rows that go on."""
        while True:
            goes_on = self._going_on()
            n_free = len(self.rows) - len(goes_on)
            if not self.queue or (goes_on and n_free * CHECK_STEPS < len(self.rows)):
                return goes_on
            begun = self.queue.take(n_free, [self.groups[row] for row in goes_on])
            if not begun:
                return goes_on
            self._move([*goes_on, *sorted(set(range(len(self.rows))) - set(goes_on))])
            self._begin(begun, len(goes_on))

    def _move(self, rows: list[int]) -> None:
        """Move these rows to the front. Rows that are not named are dropped."""
        self.rows, self.groups = self.rows.kept(rows), [self.groups[row] for row in rows]
        self.rows.set_tiles(self.groups, self._tile_rows())

    def _begin(self, begun: Sequence[tuple[int, int]], at: int) -> None:
        """Choose the first tokens of completions, given as (completion, group), in the rows from `at` on."""
        groups = [group for _, group in begun]
        if unread := [group for group in dict.fromkeys(groups) if group not in self.logits]:
            self._read(unread)
        self.groups[at : at + len(begun)] = groups
        new = self.rows.begin(at, [number for number, _ in begun], [self.queue.ranges[group] for group in groups])
        self.rows.set_tiles(self.groups, self._tile_rows())
        self._take(torch.stack([self.logits[group] for group in groups]), new)
        self.logits = {group: logits for group, logits in self.logits.items() if self.queue.continues(group)}
        self.left = self.limits.new_tokens - 1

    def _read(self, groups: Sequence[int]) -> None:
        """Fill the pool with the prompts of these groups, and keep the logits after each."""
        order = sorted(groups, key=lambda group: len(self.queue.prompts[group]))
        while order:
            longest = len(self.queue.prompts[order[-1]])
            count = max(1, min(PROMPTS, PROMPT_TOKENS // longest))
            batch, order = order[-count:], order[:-count]
            # Padding comes last, so that no token of a prompt sees it, and needs no mask.
            ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
            prompt_token_indices: list[int] = []
            slots: list[int] = []
            for row, group in enumerate(batch):
                prompt = self.queue.prompts[group]
                ids_BT[row, : len(prompt)] = torch.tensor(prompt)
                prompt_token_indices += range(row * longest, row * longest + len(prompt))
                slots += range(*self.queue.ranges[group])
            ends = [len(self.queue.prompts[group]) - 1 for group in batch]
            read = sorted(set(ends))
            pool = self.pool.for_prompts(*torch.tensor((prompt_token_indices, slots), device=self.device))
            out = self.called(
                input_ids=ids_BT.to(self.device),
                position_ids=torch.arange(longest, device=self.device)[None],
                logits_to_keep=torch.tensor(read, device=self.device),
                use_cache=True,
                **{self.cache_name: pool},
            )
            for row, group in enumerate(batch):
                self.logits[group] = out.logits[row, read.index(ends[row])].clone()  # a view would keep them all

    def _decode(self, goes_on: list[int]) -> None:
        """Decode until every row has ended, or for `CHECK_STEPS` if completions wait."""
        while goes_on:
            if not self.queue and (
                self.run is None or (2 * len(goes_on) <= len(self.rows) and self.left >= LEAST_GRAPH_STEPS)
            ):
                self._move(goes_on)
                self.run = None
            self._show()
            if self.run is None:
                self.run = self._runner()
            steps = min(self.left, CHECK_STEPS if self.show is None else 1)
            for _ in range(steps):
                self.run()
            self.left -= steps
            if self.queue:
                return
            goes_on = self._going_on()

    def _show(self) -> None:
        if self.show is not None and self.shown < (count := int(self.written.counts_N[0])):
            new = slice(self.shown, count)
            self.shown = count
            self.show(self.written.tokens_NL[0, new].tolist(), self.written.logprobs_NL[0, new].tolist())

    def _runner(self) -> Callable[[], None]:
        """A function that runs a step. A capture is preceded by a step, which compiles the kernels."""
        step = partial(self._step, self.rows)
        if self.device.type != "cuda" or not self.graphs or self.left <= LEAST_GRAPH_STEPS:
            return step
        step()
        self.left -= 1
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:  # such as a layer that copies sizes to the host
            self.graphs, self.generator = False, torch.Generator(self.device).manual_seed(self.sampling.seed + 1)
            reason = one_line(error)
            warnings.warn(f"decoding steps run without CUDA graphs, several times as long: {reason}", stacklevel=2)
            return step
        return graph.replay

    def _step(self, rows: Rows) -> None:
        out = self.called(
            input_ids=rows.tokens[:, None],
            position_ids=rows.positions[:, None],
            attention_mask=self._bounds(rows),
            use_cache=True,
            **{self.cache_name: self.pool.for_decoding_step(rows.slots)},
        )
        self._take(out.logits[:, -1], rows)

    def _take(self, logits_SV: Tensor, rows: Rows) -> None:
        tokens, logprobs = sample(logits_SV, self.sampling, self.generator)
        rows.take(tokens, logprobs, self.written, self.ends)

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
            self.queue.longest,
            self.limits.new_tokens,
            self._tile_rows(),
        )
        return out_ShE.to(query.dtype)[:, None], None


def _no_mask(*args: object, **options: object) -> None:
    """A mask function: the bounds stand for masks."""
