"""The shared prefix in the trained forward: sequences that begin alike go through the model with one copy of it.

TRL calls a model with a padded batch and reads one number per token. `SharedPrefix` puts the batch's tokens into one
row (`prefix_layout.py`), runs the same forward on the row, and puts the numbers back into the padded shape. The row's
mask is a stand-in by which tigon's attention function finds the layout. transformers hands a mask of four dimensions to
every layer as it is. With any other mask the function calls the attention that it replaces.

Each family is tried on a small model before. It is refused if it gives other hidden states there: layers may carry a
state, count positions themselves, or read the mask.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from tigon import ops
from tigon.errors import PatchError
from tigon.integrations.trl.head import UnfusedWarning
from tigon.integrations.trl.prefix_layout import PrefixLayout, layout_of
from tigon.models.packed_documents import has_states, objection
from tigon.models.verification.small_models import NotBuilt, small_model
from tigon.ops.shared_prefix_attention import PrefixRow
from tigon.techniques.head_groups import Attend, replace_sdpa

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sdpa_with_shared_prefix"
"""The name of the attention in the model's config."""
TAKES = frozenset({"input_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch"})
"""The inputs that are put into a row. The options stay as they are."""
OPTIONS = frozenset({"fused_lm_head", "use_cache", "return_dict"})
TOLERANCE = 1e-4
"""The largest difference of hidden states of a small model in fp32, as a share of their largest value."""

_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The row behind each mask that `mask_of` made."""


# --- attention -------------------------------------------------------------------------------------------------------


def mask_of(row: PrefixRow, device: torch.device) -> Tensor:
    """The mask (1, 1, 1, 1) that stands for the row."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    _rows[mask] = row
    return mask


def row_behind(mask: object) -> PrefixRow | None:
    """The row of a mask that `mask_of` made; None for any other mask."""
    return _rows.get(mask) if isinstance(mask, Tensor) else None


def with_rows(attend: Attend) -> Attend:
    """`attend`, an attention function of transformers, that also takes the masks of `mask_of`."""

    def attend_with_rows(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if (row := row_behind(attention_mask)) is None:
            plain = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
            return attend(module, query, key, value, attention_mask, **plain)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        _check_options(causal, dropout, options)
        return attend_row(row, (query, key, value), scaling, options.get("sliding_window")), None

    return attend_with_rows


def _check_options(causal: bool, dropout: float, options: Mapping[str, Any]) -> None:
    """Raise PatchError for attention that differs from causal attention by more than a window."""
    names = {"softcap": "a softcap", "s_aux": "sinks", "position_bias": "a bias", "indices": "an index"}
    odd = [what for name, what in names.items() if options.get(name) is not None]
    odd += ["dropout"] if dropout else []
    odd += [] if causal else ["tokens that see later ones"]
    if odd:
        raise PatchError(f"its attention has {' and '.join(odd)}")


def attend_row(
    row: PrefixRow, heads: tuple[Tensor, Tensor, Tensor], scaling: float | None, window: int | None
) -> Tensor:
    """q (1, h, N, D), k (1, k, N, D) and v (1, k, N, E) -> (1, N, h, E)."""
    q, k, v = heads
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) for x in heads)
    E = v.shape[-1]
    v = F.pad(v, (0, max(0, q.shape[-1] - E)))  # FlashAttention takes one width
    out = ops.shared_prefix_attention(q, k.to(q.dtype), v.to(q.dtype), row, scale=scaling, window=window)
    return out[..., :E]


# --- the forward -----------------------------------------------------------------------------------------------------


@dataclass
class TokenCounts:
    """How many tokens the calls of a trainer's models had, and how many of them went through the models."""

    given: int = 0
    computed: int = 0
    noted: set[str] = field(default_factory=set, repr=False)
    """The reasons of padded batches that a warning has given."""

    def __str__(self) -> str:
        if not self.given:
            return "no batch has been computed yet"
        return f"{self.computed:,} of {self.given:,} tokens computed"


@dataclass
class SharedPrefix:
    """Runs batches of one model as rows."""

    model: PreTrainedModel
    counts: TokenCounts = field(default_factory=TokenCounts)
    _undo: Callable[[], None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises PatchError if the model's family cannot share prefixes."""
        if reason := model_objection(self.model):
            raise PatchError(reason)
        self._undo = replace_sdpa(self.model, NAME, with_rows)

    def restore(self) -> None:
        self._undo()

    def layout(self, inputs: Mapping[str, Any]) -> PrefixLayout | None:
        """The layout of a call's batch; None if the call has to run padded, which a warning says once per reason."""
        others = {name for name, value in inputs.items() if value is not None and value is not False}
        others -= TAKES | OPTIONS
        layout = None
        if others or inputs.get("input_ids") is None:
            reason = f"a batch has {', '.join(sorted(others)) or 'no input_ids'}"
        elif (layout := layout_of(inputs["input_ids"], inputs.get("attention_mask"))) is None:
            reason = "no two sequences of a batch begin with the same tokens, or padding stands between tokens"
        else:
            self.counts.given += layout.row.given
            self.counts.computed += layout.tokens
            return layout
        if reason not in self.counts.noted:
            self.counts.noted.add(reason)
            text = f"tigon computes the whole prompt of each sequence of such a batch: {reason}."
            warnings.warn(text, UnfusedWarning, stacklevel=3)
        return None

    def hidden_states(self, layout: PrefixLayout, ids_BT: Tensor) -> Tensor:
        """(N, H): the hidden states of the row's tokens."""
        return self.model.base_model(**row_of(layout, ids_BT), use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]


def row_of(layout: PrefixLayout, ids_BT: Tensor) -> dict[str, Tensor]:
    """The inputs of a model for the row."""
    return {
        "input_ids": layout.take(ids_BT),
        "attention_mask": mask_of(layout.row, ids_BT.device),
        "position_ids": layout.positions_N[None],
    }


def fused_outputs(
    layout: PrefixLayout, run: Callable[..., Any], inputs: Mapping[str, Any], keep_BT: Tensor | None
) -> Any:
    """TRL's `FusedCausalLMOutput` of a padded batch, computed by one row.

    Args:
        layout: of the batch.
        run: TRL's forward; called with the row's inputs, and with the row's `keep_BT`.
        inputs: of the padded batch, with `labels` or `shift_labels`.
        keep_BT: False for labels that do not count; None: all that are not -100.
    """
    labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
    labels_BT: Tensor = F.pad(labels[:, 1:], (0, 1), value=-100) if shifted is None else shifted  # type: ignore[index]
    counts_BT = labels_BT != -100 if keep_BT is None else keep_BT
    labels_1N, keep_1N = layout.largest(labels_BT.where(counts_BT, -100), -100), None
    if keep_BT is not None:  # every token is scored
        labels_1N, keep_1N = labels_1N.clamp(min=0), labels_1N != -100
    options = {name: value for name, value in inputs.items() if name in OPTIONS}
    outputs = run({**row_of(layout, inputs["input_ids"]), "shift_labels": labels_1N, **options}, keep_1N)
    shown = slice(None) if shifted is not None else slice(None, -1)
    mask = (labels_BT != -100)[:, shown]
    fields = {
        name: layout.padded(value, labels_BT.shape)[:, shown].masked_fill(~mask, 0)
        for name, value in outputs.items()
        if isinstance(value, Tensor) and value.shape == labels_1N.shape and name != "label_mask"
    }
    count = inputs.get("num_items_in_batch")
    loss = -fields["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
    return type(outputs)(loss=loss, label_mask=mask, **fields)


# --- which models ----------------------------------------------------------------------------------------------------


def model_objection(model: nn.Module) -> str | None:
    """Why a model cannot share prefixes, in a clause; None if it can."""
    config: Any = model.config
    text = config.get_text_config()
    if config._attn_implementation not in ("sdpa", NAME):
        return f"its attention is {config._attn_implementation}, and this takes sdpa"
    if has_states(config) or objection(config):
        return objection(config) or "its layers carry a state from one token to the next"
    rope = getattr(text, "rope_parameters", None) or {}
    if any("mrope_section" in part for part in (rope, *rope.values()) if isinstance(part, Mapping)):
        return "a token of it has several positions (M-RoPE)"
    if getattr(text, "attention_dropout", 0):
        return f"its attention has dropout {text.attention_dropout:g}; set attention_dropout=0 in its config"
    if getattr(config, "output_router_logits", False):
        return "its load-balancing loss counts each copy of a prompt; set output_router_logits=False in its config"
    return family_objection(config.model_type)


@functools.cache
def family_objection(model_type: str) -> str | None:
    """Why a small model of the family computes other hidden states with a shared prefix; None if it does not."""
    try:
        model: Any = small_model(model_type)[0].eval()
    except NotBuilt as reason:
        return f"no small model of {model_type} could be built to try it on ({reason})"
    if model.config._attn_implementation != "sdpa":
        return f"the attention of {model_type} is not one that sdpa computes"
    undo = replace_sdpa(model, NAME, with_rows)
    _narrow_windows(model)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(3, 90, (4, 13), generator=generator)
    ids_BT[:3, :6] = ids_BT[0, :6]
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, 10:] = 0
    layout = layout_of(ids_BT, mask_BT)
    assert layout is not None
    try:
        with torch.no_grad():
            expected = model.base_model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
            row_NH = model.base_model(**row_of(layout, ids_BT), use_cache=False).last_hidden_state[0]
    except Exception as error:  # the code of a family that takes no such row may raise anything
        return str(error) if isinstance(error, PatchError) else f"the code of {model_type} takes no such row"
    finally:
        undo()
    actual = row_NH[layout.place_BT].view(expected.shape)
    difference = float(((actual - expected) * mask_BT[..., None]).abs().max() / expected.abs().max())
    return None if difference <= TOLERANCE else f"the code of {model_type} gives other results with a shared prefix"


def _narrow_windows(model: PreTrainedModel) -> None:
    """Give layers with a window one that hides some of the tokens of a small batch."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            if isinstance(getattr(holder, "sliding_window", None), int):
                holder.sliding_window = 5  # type: ignore[union-attr]
