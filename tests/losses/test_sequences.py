"""Sums and means per sequence against loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_checks import check, draw
from torch import Tensor

from tigon.errors import DtypeError, ShapeError
from tigon.losses import sequence_lengths, sequence_mean, sequence_sum

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
PADDED = draw(3, 4, seed=1)


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


def test_lengths_count_the_tokens_of_the_mask() -> None:
    assert sequence_lengths(MASK).tolist() == [3, 0, 1]


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


def test_wrong_arguments_are_refused() -> None:
    for call in (lambda: sequence_sum(PADDED, MASK[0]), lambda: sequence_sum(torch.tensor(1.0))):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(DtypeError):
        sequence_sum(torch.tensor([[0, 1]]))
