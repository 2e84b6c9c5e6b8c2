"""Tensors that do not belong together, from the ops' records: each is refused by name, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import make
from tests.ops.cases import cases_of
from tigon.errors import OptionError, TigonError, UsageError
from tigon.ops import OPS, Case, Op, cross_entropy, multi_head_linear_cross_entropy, prepare_targets

F32 = torch.float32


def _tensors(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor)]


def _arguments() -> Iterator[Any]:
    """(op, case, argument), each argument once for each set of tensors that it is passed with."""
    for op in OPS.values():
        seen = set()
        for case in cases_of(op):
            tensors = _tensors(make(op, case, F32)) if case.small else []
            if frozenset(tensors) in seen:
                continue
            seen.add(frozenset(tensors))
            for name in tensors:
                yield pytest.param(op, case, name, id=f"{op.name}-{case.id}-{name}")


each_argument = pytest.mark.parametrize(("op", "case", "name"), list(_arguments()))


@each_argument
def test_tensor_on_another_device_is_refused(op: Op, case: Case, name: str) -> None:
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


@each_argument
def test_tensor_of_another_shape_is_refused_or_follows_the_formula(op: Op, case: Case, name: str) -> None:
    """A shape that is accepted gives the result of the formula."""
    for change, reshape in RESHAPED.items():
        inputs = make(op, case, F32)
        changed = {**inputs, name: reshape(inputs[name])}
        try:
            got = op.call(**changed)
        except TigonError:
            continue
        want = op.oracle(**changed)
        for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            # The one difference from the formula: with no label left a mean is 0.
            if mine is not None:
                torch.testing.assert_close(
                    mine, torch.nan_to_num(theirs), rtol=1e-4, atol=1e-5, msg=lambda text, of=change: f"{of}: {text}"
                )


@each_argument
def test_complex_numbers_are_refused(op: Op, case: Case, name: str) -> None:
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
def test_arguments_that_heads_cannot_read_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        multi_head_linear_cross_entropy(**{**HEADS, **given})


def test_positions_on_another_device_are_refused() -> None:
    with pytest.raises(UsageError, match="positions is on meta"):
        prepare_targets(HEADS["target"], shifts=(1,), positions=HEADS["target"].to("meta"))


def test_order_of_heads_of_two_dtypes_does_not_change_the_loss() -> None:
    hidden, weight = HEADS["hiddens"], HEADS["weights"]
    rest = {"target": HEADS["target"], "shifts": (1, 1)}
    for a, b in (([hidden, hidden.bfloat16()], weight.bfloat16()), (hidden.bfloat16(), [weight, weight.bfloat16()])):
        turned = [list(reversed(x)) if isinstance(x, list) else x for x in (a, b)]
        got = [multi_head_linear_cross_entropy(x, w, **rest) for x, w in ((a, b), turned)]
        torch.testing.assert_close(got[0], got[1], rtol=1e-6, atol=0)


LOSSES = ("cross_entropy", "linear_cross_entropy", "multi_head_linear_cross_entropy")
NOT_NUMBERS = ("x", True, None, [1.0], torch.ones(()), math.nan)


def _inputs(name: str) -> dict[str, Any]:
    op = OPS[name]
    return make(op, next(case for case in cases_of(op) if case.small), F32)


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=repr)
@pytest.mark.parametrize("option", ["label_smoothing", "softcap", "logit_scale", "z_loss"])
@pytest.mark.parametrize("name", LOSSES)
def test_option_that_is_no_number_is_named(name: str, option: str, value: Any) -> None:
    if option == "softcap" and value is None:
        pytest.skip("None is no cap")
    with pytest.raises(OptionError, match=option):
        OPS[name].call(**{**_inputs(name), option: value})


@pytest.mark.parametrize("value", ["x", True, -1, -1.0, math.nan, math.inf, [1]], ids=repr)
@pytest.mark.parametrize("name", LOSSES)
def test_denominator_that_is_no_count_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="num_items"):
        OPS[name].call(**{**_inputs(name), "num_items": value})


@pytest.mark.parametrize("name", LOSSES)
def test_value_of_a_num_items_tensor_is_checked_only_on_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {**_inputs(name), "num_items": torch.tensor(-2.0)}
    monkeypatch.delenv("TIGON_CHECK", raising=False)
    OPS[name].call(**inputs)
    monkeypatch.setenv("TIGON_CHECK", "1")
    with pytest.raises(OptionError, match=r"num_items=-2\.0"):
        OPS[name].call(**inputs)


@pytest.mark.parametrize("value", ["x", True, 1.5, 0, -1, math.nan], ids=repr)
@pytest.mark.parametrize("name", LOSSES[1:])
def test_chunk_size_is_a_positive_whole_number(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="chunk_bytes"):
        OPS[name].call(**{**_inputs(name), "chunk_bytes": value})


@pytest.mark.parametrize("value", ["x", True, None, -100.0], ids=repr)
@pytest.mark.parametrize("name", LOSSES)
def test_ignored_label_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="ignore_index"):
        OPS[name].call(**{**_inputs(name), "ignore_index": value})


@pytest.mark.parametrize("value", ["x", True, None, -1e-6, math.nan, math.inf], ids=repr)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_eps_is_a_finite_number_of_at_least_0(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="eps"):
        OPS[name].call(**{**_inputs(name), "eps": value})


@pytest.mark.parametrize("value", ["x", math.nan, True], ids=repr)
def test_weights_of_heads_are_finite_numbers(value: Any) -> None:
    inputs = _inputs("multi_head_linear_cross_entropy")
    with pytest.raises(OptionError, match="head_weights"):
        OPS["multi_head_linear_cross_entropy"].call(**{**inputs, "head_weights": [value] * len(inputs["shifts"])})


def test_class_weights_that_are_all_zero_give_a_mean_of_zero() -> None:
    """PyTorch gives NaN: 0 divided by the sum of the weights."""
    logits, target = torch.randn(4, 7, requires_grad=True), torch.arange(4)
    loss = cross_entropy(logits, target, weight=torch.zeros(7))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()
    assert torch.nn.functional.cross_entropy(logits, target, weight=torch.zeros(7)).isnan()
