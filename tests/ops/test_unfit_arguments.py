"""Tensors that do not belong together, from the ops' records: each is refused by name, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import make
from tigon.errors import TigonError, UsageError
from tigon.ops import OPS, Case, Op, multi_head_linear_cross_entropy, prepare_targets

F32 = torch.float32


def _tensors(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor)]


def _arguments() -> Iterator[Any]:
    """(op, case, argument), each argument once for each set of tensors that it is passed with."""
    for op in OPS.values():
        seen = set()
        for case in op.cases:
            tensors = _tensors(make(op, case, F32)) if case.small else []
            if frozenset(tensors) in seen:
                continue
            seen.add(frozenset(tensors))
            for name in tensors:
                yield pytest.param(op, case, name, id=f"{op.name}-{case.id}-{name}")


each_argument = pytest.mark.parametrize(("op", "case", "name"), list(_arguments()))


@each_argument
def test_tensor_on_another_device_is_computed_with(op: Op, case: Case, name: str) -> None:
    inputs = make(op, case, F32)
    if len(_tensors(inputs)) == 1:
        pytest.skip("it is the only tensor, and its device the op's")
    with pytest.raises(UsageError, match="meta"):
        op.call(**{**inputs, name: inputs[name].to("meta")})


RESHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "another dimension": lambda t: t.unsqueeze(0),
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "one row": lambda t: t[:1],
    "a column less": lambda t: t[..., :-1],
    "one column": lambda t: t[..., :1],
    "no row": lambda t: t[:0],
    "no column": lambda t: t[..., :0],
}


@pytest.mark.parametrize("change", RESHAPED.values(), ids=RESHAPED)
@each_argument
def test_tensor_of_another_shape_is_broadcast_or_read_beside(
    op: Op, case: Case, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """What is not refused is what the formula says of these shapes."""
    inputs = make(op, case, F32)
    changed = {**inputs, name: change(inputs[name])}
    try:
        got = op.call(**changed)
    except TigonError:
        return
    want = op.oracle(**changed)
    for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        # The one difference from the formula: with no label left a mean is 0.
        torch.testing.assert_close(mine, torch.nan_to_num(theirs), rtol=1e-4, atol=1e-5)


@each_argument
def test_complex_numbers_lose_their_imaginary_part(op: Op, case: Case, name: str) -> None:
    inputs = make(op, case, F32)
    with pytest.raises(UsageError, match="complex"):
        op.call(**{**inputs, name: inputs[name].to(torch.complex64)})


HEADS: dict[str, Any] = {
    "hiddens": torch.randn(2, 5, 8),
    "weights": torch.randn(11, 8),
    "target": torch.randint(0, 11, (2, 5)),
    "shifts": (1, 2),
}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "positions": {"positions": torch.zeros(2, 5, dtype=torch.long, device="meta")},
    "head_weights": {"head_weights": torch.ones(2, device="meta")},
    "num_items": {"num_items": torch.tensor(3.0, device="meta")},
    "num_items with a gradient": {"num_items": torch.tensor(3.0, requires_grad=True)},
    "H of 0": {"hiddens": torch.randn(2, 5, 0), "weights": torch.randn(11, 0)},
    "V of 0": {"weights": torch.randn(0, 8)},
}


@pytest.mark.parametrize("given", ELSEWHERE.values(), ids=ELSEWHERE)
def test_heads_are_given_what_cannot_be_read(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        multi_head_linear_cross_entropy(**{**HEADS, **given})


def test_positions_elsewhere_are_prepared() -> None:
    with pytest.raises(UsageError, match="positions is on meta"):
        prepare_targets(HEADS["target"], shifts=(1,), positions=HEADS["target"].to("meta"))


def test_order_of_heads_of_two_dtypes_decides_the_precision() -> None:
    hidden, weight = HEADS["hiddens"], HEADS["weights"]
    rest = {"target": HEADS["target"], "shifts": (1, 1)}
    for a, b in (([hidden, hidden.bfloat16()], weight.bfloat16()), (hidden.bfloat16(), [weight, weight.bfloat16()])):
        turned = [list(reversed(x)) if isinstance(x, list) else x for x in (a, b)]
        got = [multi_head_linear_cross_entropy(x, w, **rest) for x, w in ((a, b), turned)]
        torch.testing.assert_close(got[0], got[1], rtol=1e-6, atol=0)
