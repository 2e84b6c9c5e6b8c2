"""A dense decoder as the numbers that the arithmetic of a cluster plan needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tigon.errors import UsageError
from tigon.planner.request import Request, text_config
from tigon.planner.simulate.model_states import model_weights

BF16 = 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model. Widths and counts are numbers of elements."""

    name: str
    layers: int
    hidden: int
    ffn: int
    query_heads: int
    kv_heads: int
    head_width: int
    vocab: int
    gated: bool = True
    """Whether the MLP has a gate, as in Llama."""
    tied: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized, which saves both once more."""
    dropout: bool = False
    """Whether each layer keeps two masks of dropout, of one byte per element."""
    other_layer_numel: int = 0
    """Parameters of a layer outside its matrices."""
    other_numel: int = 0
    """Parameters outside the layers that are neither embeddings nor head."""

    @property
    def attention_width(self) -> int:
        return self.query_heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def layer_matrix_numel(self) -> int:
        """Parameters of a layer's matrices; each costs two FLOPs per token in the forward pass."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_numel(self) -> int:
        return self.layer_matrix_numel + self.other_layer_numel

    @property
    def head_numel(self) -> int:
        return self.vocab * self.hidden

    @property
    def outside_numel(self) -> int:
        """Parameters outside the layers: embeddings, head and the rest."""
        return self.head_numel * (1 if self.tied else 2) + self.other_numel

    @property
    def numel(self) -> int:
        return self.layers * self.layer_numel + self.outside_numel

    def saved_bytes(self) -> int:
        """Bytes that one layer saves per token for its backward pass, in 16 bits, with attention by blocks.

        The inputs of both norms and their outputs, queries, keys, values and the output of attention, and the MLP's
        tensors.
        """
        elements = 4 * self.hidden + 2 * self.attention_width + 2 * self.kv_width + (3 if self.gated else 2) * self.ffn
        if self.qk_norm:
            elements += self.attention_width + self.kv_width
        return BF16 * elements + 4 * self.query_heads + (2 * self.hidden if self.dropout else 0)


def shape_of(request: Request) -> ModelShape:
    """The shape of a request's model, with the parameters that transformers gives it.

    Raises:
        UsageError: The model has experts, or layers of several kinds, which this arithmetic does not describe.
    """
    config: Any = text_config(request.config)
    weights = model_weights(request).weights
    if any(len(weight.shape) > 2 for weight in weights) or getattr(config, "num_local_experts", None):
        raise UsageError(f"--nodes plans dense models, and {request.model} has experts; plan one node without --nodes.")
    layer = [weight for weight in weights if weight.layer == 0]
    outside = [weight for weight in weights if weight.layer is None]
    queries = config.num_attention_heads
    shape = ModelShape(
        name=request.model, layers=config.num_hidden_layers, hidden=config.hidden_size, ffn=config.intermediate_size,
        query_heads=queries, kv_heads=getattr(config, "num_key_value_heads", None) or queries,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // queries, vocab=config.vocab_size,
        gated=sum(len(w.shape) == 2 and config.intermediate_size in w.shape for w in layer) != 2 or _packed(layer),
        tied=bool(config.tie_word_embeddings), qk_norm=any("q_norm" in weight.name for weight in layer),
        other_layer_numel=sum(weight.numel for weight in layer if len(weight.shape) < 2),
        other_numel=sum(weight.numel for weight in outside if len(weight.shape) < 2),
    )  # fmt: skip
    found = sum(weight.numel for weight in weights)
    if found != shape.numel:
        raise UsageError(
            f"--nodes plans models whose layers are all alike, and {request.model} has {found:,} parameters where such "
            f"layers would have {shape.numel:,}; plan one node without --nodes."
        )
    return shape


def _packed(layer: Any) -> bool:
    """Whether gate and up are one matrix."""
    return any("gate_up" in weight.name for weight in layer)
