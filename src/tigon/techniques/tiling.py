"""MLPs that process a tile of a micro-batch's tokens at a time (like TiledMLP in arXiv 2506.13996, §3.1).

An MLP treats each token by itself, so it can process tokens in turns. A tile may hold tokens of several samples. The
MLP keeps only its input. A tile's inner activations exist only while that tile is computed, and the backward pass
computes them again. Checkpointing leaves one layer's inner activations in memory. With tiles, one tile's remain, and
they do not grow with the micro-batch.

A weight's gradient is the sum over the tiles. It is added up in fp32 and rounded once. Autograd would add the tiles'
rounded gradients in the weight's dtype, which for 64 tiles in bf16 gives 8 times the rounding error. Because of this
sum, this is an autograd function instead of one checkpoint per tile.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon.errors import RecipeError
from tigon.ops.products import keeps_graph
from tigon.techniques.checkpointing.recompute import Generators, SavedInputs
from tigon.techniques.condition import Condition
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Search, Spans, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# N tokens of the micro-batch, H hidden.

TILE_TOKENS = 8192
"""The tile that the planner tries if samples are longer: a Llama MLP of this many tokens fills a GPU."""
# transformers' names for the MLP of a decoder layer.
_MLP = re.compile(r".*\.\d+\.(mlp|feed_forward|ffn)")
# Modules with these children are left alone: a router chooses among all tokens, and returns its scores too.
_ROUTED = ("experts", "router", "gate")


def spans(n_tokens: int, tokens: int) -> Iterator[slice]:
    """The tiles of `tokens` tokens each, the last of which may have fewer."""
    return (slice(start, min(start + tokens, n_tokens)) for start in range(0, n_tokens, tokens))


def tile(model: nn.Module, tokens: int, spans: Spans = spans) -> None:
    """Let every dense MLP of the decoder layers process `tokens` tokens at a time, on this instance only.

    Args:
        model: The model.
        tokens: Tokens of a tile.
        spans: Gives the tiles to compute. The planner computes a few of them, and counts these for all.

    Raises:
        RecipeError: The model has no dense MLP.
    """
    mlps = dense_mlps(model)
    if not mlps:
        raise RecipeError(
            f"train.mlp_tile_tokens: {type(model).__name__} has no dense MLP in its decoder layers (routed experts are "
            "left alone); set it to 0"
        )
    for mlp in mlps:
        mlp.forward = _Tiles(mlp, tokens, spans)


def dense_mlps(model: nn.Module) -> list[nn.Module]:
    """Returns the MLPs of the decoder layers, without those that have routed experts."""
    named = [module for name, module in model.named_modules() if _MLP.fullmatch(name)]
    return [mlp for mlp in named if not any(name in _ROUTED for name, _ in mlp.named_children())]


class _Tiles:
    """Replaces an MLP's forward and calls it for each tile."""

    def __init__(self, mlp: nn.Module, tokens: int, spans: Spans) -> None:
        self.mlp, self.tokens, self.spans = mlp, tokens, spans
        self.whole: Callable[[Tensor], Tensor] = mlp.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[:-1].numel() <= self.tokens:
            return self.whole(hidden)
        # A recomputation ends when all tensors are saved. A function saves its own after its forward, so the tiles
        # would be computed for nothing.
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        saved = (SavedInputs.apply(hidden, hidden),) if recomputing and hidden.requires_grad else ()
        out: Tensor = _TiledMLP.apply(self, hidden, saved, *self.trained())
        return out

    def trained(self) -> list[nn.Parameter]:
        """Returns the trained weights, read at each use: adapters are added later, and sharding replaces tensors."""
        return [weight for weight in self.mlp.parameters() if weight.requires_grad]

    def draws(self) -> bool:
        return self.mlp.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.mlp.modules())


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, hidden: Tensor, saved: tuple[Tensor, ...], *trained: Tensor) -> Tensor:
        ctx.tiles, ctx.device, ctx.saved = tiles, hidden.device, saved
        kind = hidden.device.type
        ctx.autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        ctx.rng = Generators(hidden.device) if tiles.draws() else None
        if not saved:
            ctx.save_for_backward(hidden)
        x_NH, out_NH = _rows(hidden), None
        for at in tiles.spans(x_NH.shape[1], tiles.tokens):
            y = tiles.whole(x_NH[:, at])
            if out_NH is None:
                out_NH = y.new_empty((1, x_NH.shape[1], y.shape[-1]))
            out_NH[:, at] = y
        assert out_NH is not None
        return out_NH.view(*hidden.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        tiles: _Tiles = ctx.tiles
        (hidden,) = ctx.saved[0].grad_fn.saved_tensors if ctx.saved else ctx.saved_tensors
        if not keeps_graph():
            ctx.saved = ()
        trained = tiles.trained()
        x_NH, dout_NH = _rows(hidden), _rows(dout)
        dx_NH = torch.empty_like(x_NH, memory_format=torch.contiguous_format) if ctx.needs_input_grad[1] else None
        sums: list[Tensor | None] = [None] * len(trained)
        same_masks = contextlib.nullcontext() if ctx.rng is None else ctx.rng.as_before()
        with torch.autocast(ctx.device.type, **ctx.autocast), same_masks:
            for at in tiles.spans(x_NH.shape[1], tiles.tokens):
                with torch.enable_grad():
                    tile_x = x_NH[:, at].detach().requires_grad_(dx_NH is not None)
                    y = tiles.whole(tile_x)
                wanted = [*([tile_x] if dx_NH is not None else []), *trained]
                grads: list[Tensor | None] = [*torch.autograd.grad(y, wanted, dout_NH[:, at], allow_unused=True)]
                del y
                if dx_NH is not None:
                    dtile = grads.pop(0)
                    assert dtile is not None, "an MLP's output depends on its input"
                    dx_NH[:, at] = dtile
                _add(sums, grads)
        dweights = [None if s is None else s.to(w.dtype) for s, w in zip(sums, trained, strict=True)]
        return None, None if dx_NH is None else dx_NH.view(hidden.shape), None, *dweights


def _add(sums: list[Tensor | None], grads: list[Tensor | None]) -> None:
    """Add one tile's gradients to the sums, in fp32, or in fp64 if they are fp64."""
    for i, grad in enumerate(grads):
        if grad is not None:
            total = sums[i]
            sums[i] = grad.to(torch.promote_types(grad.dtype, torch.float32)) if total is None else total.add_(grad)
        grads[i] = None


def _rows(x: Tensor) -> Tensor:
    """Returns x as (1, N, H). MLPs expect three dimensions."""
    return x.reshape(1, -1, x.shape[-1])


def _trace(model: PreTrainedModel, settings: Settings, spans: Spans) -> None:
    if settings.train.mlp_tile_tokens:
        tile(model, settings.train.mlp_tile_tokens, spans)


def _tile(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    tile(model, settings.train.mlp_tile_tokens)
    if settings.sharding.zero == 3:
        # Stage 3 gathers a module's weights when it is called. As a leaf, the MLP gathers once, not once per tile.
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list({type(mlp) for mlp in dense_mlps(model)}))
    return model


DECLARATION = Declaration(
    searches=(Search(key="train.mlp_tile_tokens", how="long samples", candidates=lambda config: (TILE_TOKENS,)),),
    labels={"train.mlp_tile_tokens": "MLP tiles of {}"},
    techniques=(
        Technique(
            name="tiled-mlp",
            recipe={"train.mlp_tile_tokens": 8192},
            chosen=(Condition("train.mlp_tile_tokens", "is at least", 1),),
            model=_tile,
            trace=_trace,
        ),
    ),
)
