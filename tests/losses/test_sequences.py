"""Sums and means per sequence, padded and packed, against loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_checks import check, draw
from torch import Tensor

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.losses import sequence_lengths, sequence_mean, sequence_sum

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
PADDED = draw(3, 4, seed=1)
PACKED = draw(8, seed=2)
# (segment of each token or None, layout) of PACKED
IDS = torch.tensor([0, 0, 0, 1, 1, -1, 2, 0])
CU = torch.tensor([1, 4, 4, 6, 7, 7], dtype=torch.int32)
LAYOUTS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "segment ids": ([[0, 1, 2, 7], [3, 4], [6]], {"segment_ids": IDS}),
    "int32 segment ids": ([[0, 1, 2, 7], [3, 4], [6]], {"segment_ids": IDS.int()}),
    "cu_seqlens": ([[1, 2, 3], [], [4, 5], [6], []], {"cu_seqlens": CU}),
}
PACKED_MASK = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1])


def loop(sequences: list[list[Tensor]], is_mean: bool, like: Tensor) -> Tensor:
    zero = like.new_zeros(())
    return torch.stack([sum(values, zero) / (max(len(values), 1) if is_mean else 1) for values in sequences])


@pytest.mark.parametrize("function", [sequence_sum, sequence_mean])
def test_padded_sequences(function: Any) -> None:
    def formula(x: Tensor) -> Tensor:
        rows = [[x[b, t] for t in range(4) if MASK[b, t]] for b in range(3)]
        return loop(rows, function is sequence_mean, x)

    check(lambda x: function(x, MASK), formula, {"x": PADDED})
    check(lambda x: function(x, MASK.long()), formula, {"x": PADDED})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [None, PACKED_MASK], ids=["all", "masked"])
@pytest.mark.parametrize("function", [sequence_sum, sequence_mean])
def test_packed_sequences(function: Any, mask: Tensor | None, layout: str) -> None:
    places, options = LAYOUTS[layout]

    def formula(x: Tensor) -> Tensor:
        values = [[x[i] for i in sequence if mask is None or mask[i]] for sequence in places]
        return loop(values, function is sequence_mean, x)

    check(lambda x: function(x, mask, **options), formula, {"x": PACKED})


def test_lengths_count_the_tokens_of_the_mask() -> None:
    assert sequence_lengths(MASK).tolist() == [3, 0, 1]
    places, options = LAYOUTS["cu_seqlens"]
    assert sequence_lengths(torch.ones(8), **options).tolist() == [len(p) for p in places]
    assert sequence_lengths(PACKED_MASK, **options).tolist() == [2, 0, 1, 1, 0]


@pytest.mark.parametrize("function", [sequence_sum, sequence_mean])
def test_masked_values_never_enter_even_if_they_are_nan(function: Any) -> None:
    x = PADDED.masked_fill(~MASK, math.nan).requires_grad_()
    found = function(x, MASK)
    torch.testing.assert_close(found, function(PADDED, MASK))
    found.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[~MASK].any()


def test_half_precision_is_summed_in_fp32_and_empty_batches_are_empty() -> None:
    assert sequence_sum(PADDED.bfloat16(), MASK).dtype == torch.float32
    assert sequence_sum(torch.zeros(0, 4)).shape == (0,)
    assert sequence_sum(torch.zeros(2, 0)).tolist() == [0.0, 0.0]
    assert sequence_sum(torch.zeros(0), cu_seqlens=torch.tensor([0])).shape == (0,)
    assert sequence_mean(torch.zeros(0), cu_seqlens=torch.tensor([0, 0])).tolist() == [0.0]
    assert sequence_sum(torch.zeros(0), segment_ids=torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(OptionError, match="pass one of them"):
        sequence_sum(PACKED, segment_ids=IDS, cu_seqlens=CU)
    for call in (
        lambda: sequence_sum(PADDED, MASK[0]),
        lambda: sequence_sum(PADDED, segment_ids=IDS),
        lambda: sequence_sum(PACKED, segment_ids=IDS[:3]),
        lambda: sequence_sum(PACKED, segment_ids=IDS.double()),
        lambda: sequence_sum(PACKED, cu_seqlens=CU.double()),
        lambda: sequence_sum(PACKED, cu_seqlens=CU[:0]),
        lambda: sequence_sum(PACKED, cu_seqlens=CU[:1]),
        lambda: sequence_sum(torch.tensor(1.0)),
    ):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(DtypeError):
        sequence_sum(IDS)
