"""The last step of each backward of a head: gradients get the factor that they lack, their dtype and their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tigon.ops.head.inputs import Wanted
from tigon.ops.losses.cross_entropy_rows import scale_rows
from tigon.ops.losses.inputs import CountedTokens


def finished(gradient: Tensor, left: Tensor | None, counted: CountedTokens, dtype: torch.dtype) -> Tensor:
    """A gradient times the factor that it lacks, in its own dtype, in the rows of its tokens."""
    if left is None and counted.index_N is None and gradient.dtype == dtype:
        return gradient
    if counted.index_N is None and not gradient.numel():  # of a process that holds no row of the weight
        return gradient.to(dtype)
    left = torch.ones((), dtype=torch.float32, device=gradient.device) if left is None else left
    return scale_rows(gradient, left, counted.index_N, counted.tokens, dtype)  # type: ignore[no-any-return]


def head_gradients(
    made: Sequence[Tensor],
    wanted: Wanted,
    lefts: tuple[Tensor | None, Tensor | None],
    counted: CountedTokens,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias as autograd takes them; None where none is wanted.

    Args:
        made: the three gradients. One that is not wanted is empty.
        lefts: the factors that hidden's gradient and the others still lack; None for 1.
        dtype: of the inputs and so of their gradients.
    """
    (dx_NH, dw_VH, db_V), (of_hidden, left) = made, lefts
    return (
        finished(dx_NH, of_hidden, counted, dtype) if wanted.want_hidden else None,
        finished(dw_VH, left, CountedTokens(None, len(dw_VH)), dtype) if wanted.want_weight else None,
        finished(db_V.unsqueeze(1), left, CountedTokens(None, len(db_V)), dtype).squeeze(1)
        if wanted.want_bias
        else None,
    )
