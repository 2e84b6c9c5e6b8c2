"""The cache of keys and values of all prompts and completions: one pool of tokens per layer, without copies.

Each prompt has a range of slots in the pool, which the completions of its group share, and each row has a range for
its own tokens. A pass over prompts writes their keys and values and attends among the prompts' tokens; a decoding step
writes one token per row, and gives attention the whole pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# B prompts, T tokens, M = B·T, k KV heads, N slots, S rows, D head width.


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's pool (1, k, N, D). The first pass makes it, because only it knows dtype and sizes."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self.pool = pool

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def allocate(states: Tensor) -> Tensor:
            # Under autocast a norm over fp32 weights gives fp32 keys beside 16-bit values.
            shape = (1, states.shape[1], self.pool.n_slots, states.shape[3])
            return states.new_empty(shape, dtype=value_states.dtype)

        self.keys, self.values = allocate(key_states), allocate(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        indices, slots = self.pool.prompt_token_indices, self.pool.slots
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            new_kMD = new.transpose(0, 1).flatten(1, 2).to(stored.dtype)
            stored[0].index_copy_(1, slots, new_kMD if indices is None else new_kMD[:, indices])
        return (self.keys, self.values) if indices is None else (key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: a pass over prompts begins with nothing, and a decoding step passes its positions."""
        return 0

    def get_max_length(self) -> int:
        return self.pool.n_slots

    get_max_cache_shape = get_max_length  # the name before transformers 5.14


class KVPool(Cache):  # type: ignore[misc]
    """The pools of a model's layers, and where the next pass writes."""

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self.n_slots = n_slots
        self.prompt_token_indices: Tensor | None = None
        """For a pass over prompts: the indices of the non-padding tokens, below M. None: a decoding step."""
        self.slots: Tensor = torch.empty(0, dtype=torch.long)
        """The slot of each token."""
        super().__init__(layers=[PoolLayer(self) for _ in range(n_layers)])

    def for_prompts(self, prompt_token_indices: Tensor, slots: Tensor) -> KVPool:
        """Let the next pass write these tokens of a batch of prompts into these slots. Returns the pool itself."""
        self.prompt_token_indices, self.slots = prompt_token_indices, slots
        return self

    def for_decoding_step(self, slots_S: Tensor) -> KVPool:
        """Let the next pass write one token per row into these slots. Returns the pool itself."""
        self.prompt_token_indices, self.slots = None, slots_S
        return self

    def free(self) -> None:
        """Free the keys and values. The layers and the pool refer to each other, so Python would do so later."""
        for layer in self.layers:
            layer.keys = layer.values = None
