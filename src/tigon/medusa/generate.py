"""Greedy decoding with heads: the output of greedy decoding in fewer forward passes.

One forward pass of the model takes the last token and a tree of guesses for the next tokens. Each guess attends only to
its ancestors (tree attention, arXiv 2401.10774, §2.1.2). The model's own choice after each node decides which child is
correct. The longest path of correct guesses from the root is accepted, and its last node gives one more token. Each
pass therefore adds one token plus the accepted guesses, and all of them are the model's own choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon._trunk import trunk_of
from tigon.errors import UsageError
from tigon.medusa.attach import heads_of, layer_inputs_kept, trunk
from tigon.models.kv_cache import cache_argument
from tigon.models.patch import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TextStreamer


# Q nodes of the tree, P tokens in the cache, H hidden, K heads.

# Number of guesses that each head adds to every guess of the previous head; fewer if guesses are rarely right.
DEFAULT_TREE = (4, 2, 1)


@dataclass(frozen=True)
class Generated:
    """tokens: the generated tokens. forward_passes: of the model, including that of the prompt."""

    tokens: list[int]
    forward_passes: int

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass, without the prompt's pass; 1 without heads."""
        return (len(self.tokens) - 1) / max(1, self.forward_passes - 1)


@dataclass(frozen=True)
class _Tree:
    """Nodes in order of depth, the root first. A node's token is choice number `rank` of head `depth` at the root."""

    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    ranks: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(branching: Sequence[int]) -> _Tree:
        tree = _Tree()
        level = [0]
        for depth, width in enumerate(branching, start=1):
            below = []
            for parent in level:
                for rank in range(width):
                    below.append(len(tree.parents))
                    tree.parents.append(parent)
                    tree.depths.append(depth)
                    tree.ranks.append(rank)
            level = below
        return tree

    def sees(self) -> Tensor:
        """(Q, Q) bool: each node attends to itself and its ancestors."""
        Q = len(self.parents)
        seen = torch.eye(Q, dtype=torch.bool)
        for node in range(1, Q):
            seen[node] |= seen[self.parents[node]]
        return seen


def medusa_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    tree: Sequence[int] | None = None,
    eos_token_id: int | None = None,
    streamer: TextStreamer | None = None,
) -> Generated:
    """Decode greedily with the model's heads.

    Args:
        model: a model with heads. Its attention must be sdpa or eager, which accept a mask tensor.
        input_ids: (1, T), the prompt.
        max_new_tokens: largest number of tokens to generate, at least 1.
        tree: the number of guesses that each head adds to every guess of the previous head. If it is shorter than the
            number of heads, only the first heads are used; if empty, decoding is plain greedy. The default for Medusa
            heads is `DEFAULT_TREE`, then one guess per further head. The default for MTP modules is one guess each.
        eos_token_id: stop after this token.
        streamer: a streamer of transformers, such as `TextStreamer`. It gets the prompt, then the tokens of each pass.

    Returns:
        `Generated`, with at most `max_new_tokens` tokens.

    Raises:
        UsageError: the model lacks heads; input_ids is not one prompt; or max_new_tokens is below 1.
            The tree is deeper than the heads, or too wide.
            The model has a recurrent state or ALiBi, its attention is neither sdpa nor eager, or the text is longer
            than its sliding window.
    """
    model = unwrap(model)
    heads = heads_of(model)
    count = heads.spec.count
    # A second guess of an MTP module would need a separate hidden state.
    widest = DEFAULT_TREE if heads.spec.kind == "medusa" else (1,)
    branching = tuple(tree) if tree is not None else (*widest, *[1] * count)[:count]
    _check(model, input_ids, branching, count, heads.spec.kind, max_new_tokens)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            decoder = _Decoder(model, heads, _Tree.of(branching), max(branching, default=0))
            return decoder.run(input_ids, max_new_tokens, eos_token_id, streamer)
    finally:
        model.train(was_training)


# Values of `layer_types` with a state, and of `model_type` for ALiBi models whose config lacks `alibi`.
_LAYERS_WITH_STATE = ("conv", "linear_attention", "mamba", "recurrent", "lightning_attention")
_ALIBI = ("bloom", "mpt")


def _check(
    model: PreTrainedModel, input_ids: Tensor, branching: tuple[int, ...], count: int, kind: str, max_new_tokens: int
) -> None:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise UsageError(f"input_ids is {tuple(input_ids.shape)}; it must be one prompt, (1, T) with T >= 1.")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if len(branching) > count or not all(1 <= width <= vocabulary for width in branching):
        raise UsageError(
            f"tree is {branching}; it must have at most {count} widths (the heads), each at least 1 and "
            f"at most {vocabulary} tokens."
        )
    if kind == "mtp" and any(width != 1 for width in branching):
        raise UsageError(f"tree is {branching}; MTP modules guess one token each, so every width must be 1.")
    if getattr(model, "_is_stateful", False):
        raise UsageError(f"{type(model).__name__} has a recurrent state, from which wrong guesses cannot be removed.")
    if cache_argument(trunk_of(model).forward) is None:
        raise UsageError(f"{type(model).__name__} keeps no keys and values between passes, which decoding needs.")
    implementation = getattr(model.config.get_text_config(), "_attn_implementation", None)
    if implementation not in (None, "sdpa", "eager"):
        raise UsageError(f"attention is {implementation}, which takes no tree mask; load the model with sdpa or eager.")
    text = model.config.get_text_config()
    kinds = {kind for kind in getattr(text, "layer_types", None) or () if kind in _LAYERS_WITH_STATE}
    if kinds:
        raise UsageError(f"its layers are {', '.join(sorted(kinds))}; their state cannot drop wrong guesses.")
    if getattr(text, "alibi", False) or text.model_type in _ALIBI:
        raise UsageError(f"{text.model_type} uses ALiBi positions, which do not support a tree of guesses.")
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    length = input_ids.shape[1] + max_new_tokens + len(_Tree.of(branching).parents)
    if window is not None and length > window:
        raise UsageError(f"{length} tokens exceed the model's sliding window of {window}; lower max_new_tokens.")


class _Decoder:
    """The state of one decoding: the cache and the heads' inputs."""

    def __init__(self, model: PreTrainedModel, heads: Any, tree: _Tree, widest: int) -> None:
        from transformers import DynamicCache

        self.model, self.heads, self.tree, self.widest = model, heads, tree, max(widest, 1)
        self.cache = DynamicCache()
        self.cache_name = cache_argument(trunk_of(model).forward) or ""
        self.passes = 0
        self.head = model.get_output_embeddings()
        self.device = self.head.weight.device
        self.sees = tree.sees().to(self.device)
        self.depths = torch.tensor(tree.depths, device=self.device)
        self.mtp = _MtpState(model, heads) if heads.spec.kind == "mtp" else None

    def run(
        self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None, streamer: TextStreamer | None
    ) -> Generated:
        known = input_ids[0].tolist()
        prompt = shown = len(known)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        hidden = self._pass(input_ids.to(self.device), None, None)
        self._keep(0, list(range(prompt)), hidden, known)
        known.append(int(self.head(hidden[0, -1]).argmax()))
        last = hidden[0, -1]
        while len(known) - prompt < max_new_tokens and known[-1] != eos_token_id:
            if streamer is not None:
                streamer.put(torch.tensor(known[shown:]))
                shown = len(known)
            # Every pass adds one token besides the guesses. The tree is therefore at most as deep as the remaining
            # tokens minus 1, so that positions stay in range.
            wanted = max_new_tokens - (len(known) - prompt) - 1
            n_nodes = sum(depth <= wanted for depth in self.tree.depths)
            nodes, depths = self._guess(last, known)[:n_nodes], self.depths[:n_nodes]
            hidden = self._pass(torch.tensor([nodes], device=self.device), self._mask(n_nodes), depths + len(known) - 1)
            chosen = self.head(hidden[0]).argmax(-1).tolist()
            path = self._walk(nodes, chosen)
            added = [nodes[node] for node in path[1:]] + [chosen[path[-1]]]
            self._keep(len(known) - 1, path, hidden, [nodes[node] for node in path])
            last = hidden[0, path[-1]]
            if eos_token_id in added:
                added = added[: added.index(eos_token_id) + 1]
            known += added
        if streamer is not None:
            streamer.put(torch.tensor(known[shown : prompt + max_new_tokens]))
            streamer.end()
        return Generated(known[prompt : prompt + max_new_tokens], self.passes)

    def _pass(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """(1, Q, H) hidden states of these tokens; adds their keys and values to the cache."""
        self.passes += 1
        inputs: dict[str, Any] = {"input_ids": ids, self.cache_name: self.cache, "use_cache": True}
        if mask is not None and positions is not None:
            inputs |= {"attention_mask": mask, "position_ids": positions.unsqueeze(0)}
        if self.mtp is not None:
            with layer_inputs_kept(self.model, self.mtp.new_inputs):
                return trunk(self.model, inputs).last_hidden_state  # type: ignore[no-any-return]
        return trunk(self.model, inputs).last_hidden_state  # type: ignore[no-any-return]

    def _mask(self, n_nodes: int) -> Tensor:
        """(1, 1, Q, P + Q) mask of the tree's first nodes: 0 for visible tokens, else the dtype's lowest number."""
        Q, P = n_nodes, self.cache.get_seq_length()
        sees = torch.cat([self.sees.new_ones((Q, P)), self.sees[:Q, :Q]], dim=1)
        dtype = self.head.weight.dtype
        return torch.zeros_like(sees, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)[None, None]

    def _guess(self, last_H: Tensor, known: list[int]) -> list[int]:
        """The token of each node: the last known token for the root, then each head's best guesses."""
        depth = max(self.tree.depths)
        if depth == 0:
            return [known[-1]]
        if self.mtp is not None:
            best = [[token] for token in self.mtp.guess(known, depth)]
        else:
            best = self.heads.logits(last_H.unsqueeze(0), self.head)[:depth, 0].topk(self.widest, -1).indices.tolist()
        pairs = zip(self.tree.depths, self.tree.ranks, strict=True)
        return [known[-1] if not depth else best[depth - 1][rank] for depth, rank in pairs]

    def _walk(self, nodes: list[int], chosen: list[int]) -> list[int]:
        """The path from the root along guesses that equal the model's choice after their parent."""
        path = [0]
        for node in range(1, len(nodes)):  # in order of depth, so a node's parent comes before it
            if self.tree.parents[node] == path[-1] and nodes[node] == chosen[path[-1]]:
                path.append(node)
        return path

    def _keep(self, before: int, path: list[int], hidden: Tensor, tokens: list[int]) -> None:
        """Remove guesses that were not accepted from the cache."""
        if self.mtp is not None:
            self.mtp.keep(path, hidden)
        if len(path) == hidden.shape[1]:
            return
        kept = torch.tensor([*range(before), *(before + node for node in path)], device=self.device)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.index_select(-2, kept), layer.values.index_select(-2, kept)


class _MtpState:
    """Hidden states and rotary tables of all accepted tokens. The modules run over all of them, without a cache."""

    def __init__(self, model: PreTrainedModel, heads: Any) -> None:
        self.model, self.heads = model, heads
        self.new_inputs: dict[str, Any] = {}
        self.hidden: Tensor | None = None
        self.rotary: tuple[Tensor, ...] = ()

    def keep(self, path: list[int], hidden: Tensor) -> None:
        if "position_embeddings" not in self.new_inputs:
            raise UsageError(
                "its layers do not take rotary tables (position_embeddings), which decoding with MTP modules needs."
            )
        index = torch.tensor(path, device=hidden.device)
        rotary = tuple(table.index_select(-2, index) for table in self.new_inputs["position_embeddings"])
        accepted = hidden.index_select(1, index)
        if self.hidden is None:
            self.hidden, self.rotary = accepted, rotary
            return
        self.hidden = torch.cat([self.hidden, accepted], dim=1)
        self.rotary = tuple(torch.cat(pair, dim=-2) for pair in zip(self.rotary, rotary, strict=True))

    def guess(self, known: list[int], depth: int) -> list[int]:
        """One token of each of the first `depth` modules."""
        assert self.hidden is not None
        hidden, T = self.hidden, self.hidden.shape[1]
        causal = torch.full((T, T), torch.finfo(hidden.dtype).min, device=hidden.device, dtype=hidden.dtype).triu_(1)
        inputs = {**self.new_inputs, "position_embeddings": self.rotary, "attention_mask": causal[None, None]}
        inputs["position_ids"] = torch.arange(T, device=hidden.device).unsqueeze(0)
        tokens = list(known)  # the last one is not in the cache yet
        guesses: list[int] = []
        for module in list(self.heads.mtp)[:depth]:
            ahead = torch.tensor([tokens[-T:]], device=hidden.device)
            hidden = module(hidden, self.model.get_input_embeddings()(ahead), inputs)
            guesses.append(int(self.model.get_output_embeddings()(hidden[0, -1]).argmax()))
            tokens.append(guesses[-1])
        return guesses
