"""The seam for layers with a state: they begin anew at each document of a packed sample.

No mask stops such a layer from carrying its state and its last tokens into the next document. The trunk gets `seq_idx`,
transformers' name for the document of each token, and from 5.16 on it hands the argument down to these layers
(`models/packed_documents.py`). A layer that gets it runs in one of two ways:

- `chunk_gated_delta_rule` and `chunk_kda` of flash-linear-attention take where documents begin, and so do tigon's
  gated delta rule and short convolution. A layer of these parts runs once.
- Everything else runs each document by itself. This is exact with any implementation. The layer's products and kernels
  are then as many as the documents.

The argument goes through activation checkpointing as every argument does, so a recomputation has its own documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tigon.models.kv_cache import cache_in
from tigon.models.seams import convolution
from tigon.models.seams.base import Seam, imitate
from tigon.models.seams.rebind import Forward, rebind_each
from tigon.ops.causal_conv1d import MAX_TAPS

SEQ_IDX = "seq_idx"
_OTHERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")
"""Arguments for the kernels of attention, which say the same. Some layers would take them too."""


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin, if its rows are put one after another.

    Args:
        sizes: The tokens of each document.
        bounds: (documents + 1,) int64 on the device: where each begins, and the number of all tokens.
        host_bounds: The same numbers in host memory.
    """

    sizes: list[int]
    bounds: Tensor
    host_bounds: Tensor

    @classmethod
    def of_sizes(cls, sizes: list[int], device: torch.device) -> Documents:
        host_bounds = torch.tensor([0, *sizes]).cumsum(0)
        return cls(sizes, host_bounds.to(device), host_bounds)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The documents of each `seq_idx` that `document_numbers` made, so that no layer waits for the GPU."""


def document_numbers(positions_BT: Tensor) -> Tensor | None:
    """The document of each token, (1, B · T) int32, counted over all rows; None if each row is one document."""
    starts_BT = positions_BT.diff(dim=1, prepend=positions_BT[:, :1]) != 1
    starts_BT[:, 0] = True
    begins = starts_BT.flatten().nonzero().flatten().tolist()
    if len(begins) == len(positions_BT):
        return None
    seq_idx = (starts_BT.flatten().cumsum(0) - 1).int()[None]
    sizes = [end - begin for begin, end in zip(begins, [*begins[1:], starts_BT.numel()], strict=True)]
    _known[seq_idx] = Documents.of_sizes(sizes, seq_idx.device)
    return seq_idx


def documents_of(seq_idx: Tensor) -> Documents:
    """The documents that `seq_idx` numbers."""
    if seq_idx not in _known:  # a copy, such as one on another device
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        _known[seq_idx] = Documents.of_sizes(sizes, seq_idx.device)
    documents: Documents = _known[seq_idx]
    return documents


def _convolution(
    original: Callable[..., Tensor], x_BDT: Tensor, weight: Tensor, *rest: Any, seq_idx: Tensor, **more: Any
) -> Tensor:
    """transformers' `causal_conv1d_fn` for one row of documents. Around a filter too long for the op are zeros."""
    if (width := weight.shape[1] - 1) < MAX_TAPS:
        return convolution.fused(original)(x_BDT, weight, *rest, seq_idx=seq_idx, **more)
    sizes = documents_of(seq_idx).sizes
    gap = x_BDT.new_zeros((*x_BDT.shape[:2], width))
    y_BDT = original(
        torch.cat([part for one in x_BDT.split(sizes, dim=2) for part in (one, gap)], dim=2), weight, *rest, **more
    )
    with_gaps = [size for document in sizes for size in (document, width)]
    return torch.cat(y_BDT.split(with_gaps, dim=2)[::2], dim=2)


@dataclass(frozen=True)
class DocumentsSeam(Seam):
    """A layer with a state that gets `seq_idx`.

    Args:
        once: Whether the layer runs once for all documents. Otherwise it runs once for each.
        bounds: The argument by which the layer's kernel takes where documents begin; "" if it has no such kernel.
        convolves: Whether tigon's convolution replaces the layer's, which would mix documents.
    """

    once: bool = False
    bounds: str = ""
    convolves: bool = False
    op: ClassVar[str] = "documents"
    flag: ClassVar[str] = "documents"
    reported: ClassVar[bool] = False

    def candidate(self, module: nn.Module) -> bool:
        return True

    def objection(self, module: nn.Module) -> str | None:
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain: Forward = base.forward
        run_once = plain
        if self.convolves:
            original = convolution.function_of(base)
            assert original is not None  # a kind of layer that convolves
            run_once = rebind_each(plain, {convolution.NAME: partial(_convolution, original)})

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seq_idx = kwargs.pop(SEQ_IDX, None)
            for name in _OTHERS:
                kwargs.pop(name, None)
            if seq_idx is None or cache_in(kwargs) is not None:  # a cache holds the state of one document
                return plain(self, *args, **kwargs)
            hidden_BTD, *rest = args if args else (kwargs.pop("hidden_states"),)
            if (padding_BT := kwargs.get("attention_mask")) is not None:
                kwargs["attention_mask"] = padding_BT.flatten()[None]
            y = run(self, hidden_BTD.flatten(0, 1)[None], *rest, seq_idx=seq_idx, **kwargs)
            return y.view(*hidden_BTD.shape[:2], -1)

        run = _in_one_call(run_once, self.bounds) if self.once else _one_by_one(plain)
        imitate(plain, forward)
        return {"forward": forward}


def _in_one_call(forward: Callable[..., Any], bounds: str) -> Callable[..., Any]:
    def run(self: nn.Module, x_1TD: Tensor, *rest: object, seq_idx: Tensor, **kwargs: object) -> Any:
        documents = documents_of(seq_idx)
        more = {bounds: documents.bounds, "cu_seqlens_cpu": documents.host_bounds} if bounds else {}
        return forward(self, x_1TD, *rest, **kwargs, **more, seq_idx=seq_idx)

    return run


def _one_by_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, x_1TD: Tensor, *rest: object, seq_idx: Tensor, **kwargs: Any) -> Any:
        sizes = documents_of(seq_idx).sizes
        masks: Sequence[Tensor | None] = [None] * len(sizes)
        if (mask_1T := kwargs.pop("attention_mask", None)) is not None:
            masks = mask_1T.split(sizes, dim=1)
        documents = zip(x_1TD.split(sizes, dim=1), masks, strict=True)
        return torch.cat([forward(self, x, *rest, attention_mask=mask, **kwargs) for x, mask in documents], dim=1)

    return run
