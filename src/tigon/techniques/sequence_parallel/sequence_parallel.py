"""Sequence parallelism: several processes share the tokens of each row.

The processes of a group read the same rows, and each computes a shard: an Nth part of the tokens. Norms, MLPs, rotary
embedding, head and loss treat tokens one by one, so they run on the shard as they are. Attention needs the whole row.
With Ulysses (arXiv 2309.14509), an all-to-all before attention gives each process all tokens of an Nth part of the
heads, and a second one after it gives the shard back. In a ring (`ring_attention.py`) each process keeps its
tokens, and keys and values go from one process to the next.

The model is called with whole rows. A hook cuts them: labels are shifted before the cut, because the label of a
shard's last token is the first token of the next shard. A call without labels, such as that of `generate`, is not cut.
Each process's loss is the sum over its shard divided by the learned tokens of all rows. The sum over the processes is
the loss of the whole rows, and DDP and FSDP2 reduce the gradients over all processes as they do without shards.

Accelerate's context parallelism needs FSDP2 and CUDA's attention kernels. Its Ulysses is DeepSpeed's: it needs
DeepSpeed's engine, and drops the mask that separates packed documents.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.head_groups import Attend, check_has_attention, check_text_alone, replace_sdpa
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.sharding import RING, ULYSSES
from tigon.techniques.sequence_parallel import ring_attention
from tigon.techniques.sequence_parallel.method import (
    KEY,
    METHOD,
    check_processes,
    divisible_heads,
    instead_of_ring,
    resolved,
)
from tigon.techniques.technique import Declaration, RunInfo, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# B rows, h query heads, k key heads, T tokens of a row, t tokens of a shard, D head width, N processes of a group.

SHARD = "sequence_shard"
"""The keyword that carries the `Shard` from the model's call to its attention, also when layers are computed again."""
IGNORE_INDEX = -100
_RING_OF_DOCUMENTS = (
    f"{METHOD}: ring has no mask that separates packed documents; set data.cross_document_attention: true or "
    f"data.packing: false, or {METHOD}: ulysses"
)

_shared: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def shards_of(model: nn.Module) -> int:
    """Returns the number of processes that share each row of this model's batches; 1 without sequence parallelism."""
    return _shared.get(model, 1)


class Shard:
    """What attention needs to know about the rows of one call of the model.

    It is not a dataclass, because FSDP2's mixed precision hands copies of those to the model, and `layers` is shared.
    """

    def __init__(self, group: dist.ProcessGroup, positions_BT: Tensor, mask: Tensor | None) -> None:
        """Describe rows.

        Args:
            group: The processes that share the rows.
            positions_BT: The position of each token in its document.
            mask: (B, 1, T, T), True where a token sees another; None if each row holds one document.
        """
        self.group, self.positions_BT, self.mask = group, positions_BT, mask
        self.layers: set[int] = set()
        """The attention modules that used it."""


def share_rows(model: nn.Module, group: dist.ProcessGroup, method: str = ULYSSES) -> None:
    """Let this model compute, for calls with labels, only this process's shard of the rows that it is called with.

    The model's attention has to be `sdpa`. This function replaces it by a version for shards.

    Args:
        model: A causal language model of transformers.
        group: The processes that share the rows, in the order of their shards.
        method: `ulysses` or `ring`, how attention sees whole rows.
    """
    size = dist.get_world_size(group)
    name = f"sdpa_of_{size}_sequence_shards" + ("_in_a_ring" if method == RING else "")
    replace_sdpa(model, name, _in_a_ring if method == RING else _of_whole_rows)
    hooks = _Hooks(group, int(model.config.num_hidden_layers), method)  # type: ignore[union-attr, arg-type]
    model.register_forward_pre_hook(hooks.cut, with_kwargs=True)
    model.register_forward_hook(hooks.check_layers, with_kwargs=True)
    _shared[model] = size


class _Hooks:
    """Cuts the rows of a model's calls, and refuses a model whose layers do not all exchange tokens."""

    def __init__(self, group: dist.ProcessGroup, n_layers: int, method: str) -> None:
        self.group, self.n_layers, self.method = group, n_layers, method
        self.checked = False

    def cut(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if kwargs.get("labels") is None:
            return args, kwargs
        if args:
            raise TypeError(f"{KEY} cuts named inputs, but the model was called with {len(args)} unnamed ones")
        inputs = cut_rows(kwargs, self.group, self.method)
        if (
            not self.checked and self.method == ULYSSES
        ):  # layers with another attention would fail at a mask of whole rows
            inputs["attention_mask"] = None
        return (), inputs

    def check_layers(self, _: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> None:
        shard: Shard | None = kwargs.get(SHARD)
        if shard is None:
            return
        if len(shard.layers) != self.n_layers:
            raise RecipeError(
                f"{KEY}: {len(shard.layers)} of the model's {self.n_layers} layers exchange tokens between processes, "
                f"and the others would not see the whole row; set {KEY}: 1"
            )
        self.checked = True


# --- rows ------------------------------------------------------------------------------------------------------------


def cut_rows(inputs: Mapping[str, Any], group: dist.ProcessGroup, method: str = ULYSSES) -> dict[str, Any]:
    """Returns this process's part of the inputs of a causal language model.

    Rows are padded at the right to a multiple of the group's size, or of twice that for a ring. No token sees the
    padding, which follows them all.

    Args:
        inputs: Whole rows: input_ids and labels (B, T), and position_ids (B, T) or an attention_mask (B, T), whose
            zeros are at the right. Other values stay.
        group: The processes that share the rows.
        method: `ulysses`: a process has one stretch of tokens; `ring`: those of `ring_attention.own_tokens`.

    Raises:
        RecipeError: A row for a ring holds several documents.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rest = {name: value for name, value in inputs.items() if name not in ("attention_mask", "position_ids")}
    tokens_BT, labels_BT = rest.pop("input_ids"), rest.pop("labels")
    shift_labels_BT = rest.pop("shift_labels", None)
    if shift_labels_BT is None:
        shift_labels_BT = F.pad(labels_BT, (0, 1), value=IGNORE_INDEX)[:, 1:]
    positions_BT = _positions(inputs)
    padding = -tokens_BT.shape[1] % (size * (ring_attention.CHUNKS if method == RING else 1))
    after = positions_BT[:, -1:] + torch.arange(1, padding + 1, device=positions_BT.device)
    positions_BT = torch.cat([positions_BT, after], dim=1)
    whole = positions_BT.shape[1]
    own = [slice(rank * whole // size, (rank + 1) * whole // size)]
    if method == RING:
        own = ring_attention.own_tokens(rank, size, whole)

    def of_own(rows_BT: Tensor) -> Tensor:
        return torch.cat([rows_BT[:, stretch] for stretch in own], dim=1)

    def part(rows_BT: Tensor, fill: int) -> Tensor:
        return of_own(F.pad(rows_BT, (0, padding), value=fill))

    if method == RING:
        learned_BT = F.pad(shift_labels_BT, (0, padding), value=IGNORE_INDEX) != IGNORE_INDEX
        if bool(((documents(positions_BT) > 0) & learned_BT).any()):  # padding may count as a document
            raise RecipeError(_RING_OF_DOCUMENTS)
        # a mask of this form keeps transformers from making one
        mask: Tensor | None = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens_BT.device)
    else:
        mask = document_mask(positions_BT)
    shard = Shard(group, positions_BT, mask)
    return rest | {
        "input_ids": part(tokens_BT, 0),
        "labels": part(labels_BT, IGNORE_INDEX),
        "shift_labels": part(shift_labels_BT, IGNORE_INDEX),
        "position_ids": of_own(positions_BT),
        "attention_mask": shard.mask,
        SHARD: shard,
    }


def _positions(inputs: Mapping[str, Any]) -> Tensor:
    """The position of each token in its document, (B, T)."""
    tokens_BT, mask_BT = inputs["input_ids"], inputs.get("attention_mask")
    positions_BT: Tensor | None = inputs.get("position_ids")
    if positions_BT is not None and mask_BT is None:
        return positions_BT.expand(tokens_BT.shape)
    if positions_BT is not None or (mask_BT is not None and mask_BT.ndim != 2):
        raise TypeError(f"{KEY} takes position_ids, or an attention_mask of shape (B, T); not both")
    if mask_BT is not None and bool((mask_BT[:, 1:] > mask_BT[:, :-1]).any()):
        raise TypeError(f"{KEY} takes rows whose padding is at the right")
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)


def documents(positions_BT: Tensor) -> Tensor:
    """Returns the number of each token's document in its row, (B, T).

    A document begins where positions do not go on by one.
    """
    begins = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    return F.pad(begins.cumsum(1), (1, 0))


def document_mask(positions_BT: Tensor) -> Tensor | None:
    """Returns where a token sees another, (B, 1, T, T); None if no row holds several documents."""
    documents_BT = documents(positions_BT)
    if not bool(documents_BT[:, -1].any()):
        return None
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same.tril_()


# --- attention -------------------------------------------------------------------------------------------------------


def _of_whole_rows(attend: Attend) -> Attend:
    """Returns `attend` for the shards of a row."""

    def attend_whole_rows(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        shard: Shard | None = options.pop(SHARD, None)
        if shard is None:  # a call without labels
            return attend(module, query, key, value, attention_mask, **options)
        if options.get("sliding_window") is not None:
            raise RecipeError(f"{KEY} has no sliding window of {options['sliding_window']} tokens; set {KEY}: 1")
        shard.layers.add(id(module))
        if "position_ids" in options:
            options["position_ids"] = shard.positions_BT
        exchange, size = _exchange(shard.group), dist.get_world_size(shard.group)
        qkv = whole_rows((query, key, value), size, exchange)
        out_BThD, _ = attend(module, *qkv, shard.mask, **options)
        return own_tokens(out_BThD, size, exchange), None

    return attend_whole_rows


def _in_a_ring(attend: Attend) -> Attend:
    """Returns causal attention for shards whose keys and values go round. `attend` is for calls without labels."""

    def attend_in_a_ring(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        shard: Shard | None = options.pop(SHARD, None)
        if shard is None:
            return attend(module, query, key, value, attention_mask, **options)
        others = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
        others += ["dropout"] * bool(options.get("dropout"))
        others += ["a width of values of its own"] * (value.shape[-1] != query.shape[-1])
        others += ["attention to later tokens"] * (not getattr(module, "is_causal", True))
        if others:
            raise RecipeError(f"{METHOD}: ring: the model's attention has {others[0]}; set {METHOD}: ulysses")
        shard.layers.add(id(module))
        scale = options.get("scaling")
        out_BhtD = ring_attention.ring_attention(query, key, value, shard.group, scale=scale)
        return out_BhtD.transpose(1, 2).contiguous(), None

    return attend_in_a_ring


class _AllToAll(torch.autograd.Function):
    """x (N, ...) -> (N, ...): row i of process j becomes row j of process i. It is its own transpose.

    PyTorch 2.13 deprecates its version in distributed.nn, and the one that replaces it is private.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        dout = dout.contiguous()
        dx = torch.empty_like(dout)
        dist.all_to_all_single(dx, dout, group=ctx.group)
        return dx, None


Exchange = Callable[[Tensor], Tensor]
"""(N, ...) -> (N, ...), with a row of each process."""


def _exchange(group: dist.ProcessGroup) -> Exchange:
    return lambda x: _AllToAll.apply(x, group)


def whole_rows(shards: tuple[Tensor, ...], size: int, exchange: Exchange) -> list[Tensor]:
    """Each (B, heads, t, D), with all heads -> (B, heads / N, T, D), with all tokens. They share one all-to-all."""
    parts = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in shards]  # (N, B, heads / N, t, D)
    sent = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
    split = exchange(sent).split([part[0].numel() for part in parts], dim=1)
    whole = (x.view(part.shape) for x, part in zip(split, parts, strict=True))
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in whole]


def own_tokens(out_BThD: Tensor, size: int, exchange: Exchange) -> Tensor:
    """(B, T, h / N, D), with all tokens -> (B, t, h, D), with all heads."""
    sent = out_BThD.unflatten(1, (size, -1)).movedim(1, 0).contiguous()  # (N, B, t, h / N, D)
    return exchange(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)


# --- checks and records ----------------------------------------------------------------------------------------------


def check(config: PreTrainedConfig, settings: Settings) -> None:
    """Raise RecipeError if processes cannot share the rows of a model with this transformers config."""
    size = settings.sharding.sequence
    if size == 1:
        return
    check_processes(settings)
    check_text_alone(config, KEY)
    check_has_attention(config, KEY)
    n_heads, n_key_heads = divisible_heads(config)
    if resolved(settings, config).sharding.sequence_method == RING:
        ring_attention.check()
        if dropout := getattr(config, "attention_dropout", 0):
            raise RecipeError(
                f"{METHOD}: ring: the model's attention has dropout; set model.config.attention_dropout: "
                f"0 instead of {dropout}, or {instead_of_ring(settings, config)}"
            )
    elif n_heads % size or n_key_heads % size:
        raise RecipeError(
            f"{KEY} is {size}, and the model has {n_heads} heads and {n_key_heads} key heads, which are divided over "
            f"these processes; choose a divisor of both, or {METHOD}: ring"
        )
    others = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"})
    if others:
        raise RecipeError(
            f"{KEY}: the model has layers of {', '.join(others)}, which would not see whole rows; set {KEY}: 1"
        )
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    if window is not None:
        raise RecipeError(
            f"{KEY}: the model's attention has a sliding window of {window} tokens, which has not been "
            f"tried with shards of rows; set {KEY}: 1"
        )
    if getattr(config, "output_router_logits", False):
        raise RecipeError(
            f"{KEY}: the router's loss is not a sum over tokens; set model.config.output_router_logits: "
            f"false, or {KEY}: 1"
        )


def _share(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    size = settings.sharding.sequence
    mesh = dist.device_mesh.init_device_mesh(
        run_info.device, (run_info.processes // size, size), mesh_dim_names=("data", "sequence")
    )
    share_rows(model, mesh.get_group("sequence"), resolved(settings, model.config).sharding.sequence_method)
    return model


_SHARDED = Condition("sharding.sequence", "is at least", 2)


def _not_with(condition: Condition, reason: str, instead: str, source: str) -> Exclusion:
    return Exclusion(when=(_SHARDED, condition), reason=reason, instead=instead, source=source)


_UNTRIED = "tigon.techniques.sequence_parallel: not tried"

DECLARATION = Declaration(
    labels={
        KEY: "rows shared by {}",
        METHOD: lambda settings: "ring attention" if settings.sharding.sequence_method == RING else "",
    },
    techniques=(
        Technique(
            name="sequence-parallel",
            recipe={"sharding.gpus": 2, KEY: 2},
            chosen=(_SHARDED,),
            model=_share,
            fits=check,
        ),
        Technique(
            name="ring-attention",
            recipe={
                "sharding.gpus": 2,
                KEY: 2,
                METHOD: RING,
                "data.cross_document_attention": True,
            },
            chosen=(_SHARDED, Condition("sharding.sequence_method", "is", RING)),
        ),
    ),
    exclusions=(
        _not_with(
            Condition("model.attention", "is not", "sdpa"),
            "the all-to-alls are around the sdpa function",
            "model.attention: sdpa",
            "tigon.techniques.sequence_parallel",
        ),
        _not_with(
            Condition("train.attention_groups", "is at least", 2),
            "each of them replaces the attention function",
            "train.attention_groups: 1",
            "tigon.techniques.head_groups",
        ),
        Exclusion(
            when=(Condition("sharding.sequence_method", "is", RING), Condition("sharding.sequence", "is", 1)),
            reason="a ring needs processes that share rows",
            instead=f"{KEY}: 2, or {METHOD}: ulysses",
            source=KEY,
        ),
        _not_with(
            Condition("model.kernels", "is", "liger"),
            "Liger Kernel has not been tried with shards of rows",
            "model.kernels: tigon",
            _UNTRIED,
        ),
    ),
)
