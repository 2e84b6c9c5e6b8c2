"""What one process computes if processes share rows (`sharding.sequence`) or divide matrices (`sharding.tensor`)."""

from __future__ import annotations

import copy
from dataclasses import replace

from tigon.planner.request import Request, text_config, ties_embeddings
from tigon.planner.simulate.model_states import ModelWeights, Weight
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.sharding import RING
from tigon.techniques.sequence_parallel.ring_attention import CHUNKS


def check(request: Request) -> None:
    """Raise RecipeError if a technique does not fit the model, as before a run."""
    for technique in TECHNIQUES.values():
        technique.fits(text_config(request.config), request.settings)


def of_process(request: Request) -> Request:
    """The request with one process's tokens of a row, heads and MLP columns. Embeddings stay whole."""
    sharding, config = request.settings.sharding, request.config
    parts = sharding.sequence * (CHUNKS if sharding.sequence_method == RING else 1)
    tokens = -(-request.seq // parts) * (parts // sharding.sequence)
    if sharding.tensor == 1:
        return replace(request, seq=tokens) if sharding.sequence > 1 else request
    config = copy.deepcopy(config)
    text = text_config(config)
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, getattr(text, name) // sharding.tensor)
    return replace(request, seq=tokens, config=config)


def with_part_of_head(request: Request) -> Request:
    """The request whose trace has one process's part of a head that is divided by vocabulary."""
    size = request.settings.sharding.tensor
    if size == 1 or ties_embeddings(request.config):
        return request
    config = copy.deepcopy(request.config)
    text_config(config).vocab_size = -(-text_config(config).vocab_size // size)
    return replace(request, config=config)


def divided_head(model: ModelWeights, request: Request) -> ModelWeights:
    """The weights with one process's part of the head. Tied embeddings stay whole."""
    size = request.settings.sharding.tensor
    if size == 1 or ties_embeddings(request.config):
        return model
    rows, width = model.lm_head_shape
    part = (-(-rows // size), width)

    def cut(weight: Weight) -> Weight:
        is_head = weight.shape == model.lm_head_shape and not weight.embedding
        return replace(weight, shape=part, numel=part[0] * width) if is_head else weight

    return replace(model, weights=tuple(map(cut, model.weights)), lm_head_shape=part)


def summed_bytes(request: Request) -> int:
    """Bytes that tensor parallelism sends per micro-batch while all else waits: sums of the hidden states.

    A pass of a layer adds up two. Layers that are computed again repeat those of the forward pass.
    """
    size, text = request.settings.sharding.tensor, text_config(request.config)
    if size == 1:
        return 0
    passes = 2 if request.settings.train.checkpointing == "none" else 3
    states = request.tokens * text.hidden_size * 2
    return int(2 * passes * text.num_hidden_layers * states * 2 * (size - 1) / size)
