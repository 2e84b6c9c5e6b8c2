"""The options of the losses: one declaration for types, defaults, checks and operator schemas."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tigon import cross_entropy, linear_cross_entropy, multi_head_linear_cross_entropy
from tigon.errors import OptionError
from tigon.ops import prepare_targets
from tigon.ops.losses.inputs import LossOptions

LOSSES = (cross_entropy, linear_cross_entropy, multi_head_linear_cross_entropy)


@pytest.mark.parametrize("loss", LOSSES)
def test_public_signature_shows_the_declared_defaults(loss: Callable[..., Any]) -> None:
    parameters = inspect.signature(loss).parameters
    assert {name: parameters[name].default for name in LossOptions._fields} == LossOptions._field_defaults


@pytest.mark.parametrize("name", [loss.__name__ for loss in LOSSES] + ["cross_entropy_fwd", "cross_entropy_bwd"])
def test_schema_of_every_loss_operator_holds_the_declared_options(name: str) -> None:
    arguments = [a.name for a in getattr(torch.ops.tigon, name).default._schema.arguments]
    start = arguments.index("ignore_index")
    assert tuple(arguments[start : start + len(LossOptions._fields)]) == LossOptions._fields


@pytest.mark.parametrize("folder", ["ops", "kernels"])
def test_no_function_of_the_losses_takes_more_than_seven_positional_arguments(folder: str) -> None:
    sources = Path(tigon.__file__).parent / folder
    files = [*(sources / "losses").glob("*.py")] if folder == "ops" else [*sources.glob("*cross_entropy.py")]
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            # A kernel is called by keyword, and another kernel's helper is inlined.
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                assert len([a for a in node.args.args if a.arg not in ("self", "ctx")]) <= 7, (file.name, node.name)


def head() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(2, 6, 8), torch.randn(11, 8), torch.randint(0, 11, (2, 6))


@pytest.mark.parametrize("call", [torch.nn.functional.linear, None], ids=["logits", "linear"])
def test_fraction_divides_as_the_number_that_it_is(call: Any) -> None:
    hidden, weight, target = head()

    def loss(num_items: Any) -> Any:
        if call is None:
            return linear_cross_entropy(hidden, weight, target, num_items=num_items)
        return cross_entropy(call(hidden, weight), target, num_items=num_items)

    assert torch.equal(loss(Fraction(7, 2)), loss(3.5))
    with pytest.raises(OptionError, match="num_items"):
        loss(Fraction(-1, 2))


def test_fractions_are_taken_as_head_weights_and_options() -> None:
    hidden, weight, target = head()

    def loss(a: Any, b: Any) -> Any:
        return multi_head_linear_cross_entropy(hidden, weight, target, shifts=[1, 2], head_weights=[a, 1.0], z_loss=b)

    assert torch.equal(loss(Fraction(1, 4), Fraction(1, 8)), loss(0.25, 0.125))


def test_shifts_may_be_a_tensor_of_integers_on_the_cpu() -> None:
    hidden, weight, target = head()
    shifts = torch.tensor([1, 2])
    expected = multi_head_linear_cross_entropy(hidden, weight, target, shifts=[1, 2])
    assert torch.equal(multi_head_linear_cross_entropy(hidden, weight, target, shifts=shifts), expected)
    prepared = prepare_targets(target, shifts=shifts)
    assert torch.equal(multi_head_linear_cross_entropy(hidden, weight, prepared, shifts=shifts), expected)
    for bad in (torch.tensor([1.0, 2.0]), torch.tensor(1), torch.tensor([[1, 2]]), shifts.to("meta"), shifts > 1):
        with pytest.raises(OptionError, match="list of whole numbers"):
            multi_head_linear_cross_entropy(hidden, weight, target, shifts=bad)


@pytest.mark.parametrize("kind", [tuple, list, set, frozenset])
def test_outputs_may_be_any_collection_of_names(kind: Any) -> None:
    hidden, weight, target = head()
    got = linear_cross_entropy(hidden, weight, target, outputs=kind(["accuracy", "logprob"]))
    assert got.accuracy is not None and got.logprob is not None and got.entropy is None
    heads = multi_head_linear_cross_entropy(hidden, weight, target, shifts=[1], outputs=kind(["counts"]))
    assert heads.counts is not None and heads.losses is None


@pytest.mark.parametrize("outputs", ["accuracy", {"accuracy": 1}, None, 1])
def test_outputs_that_are_no_collection_of_names_are_refused(outputs: Any) -> None:
    hidden, weight, target = head()
    for loss in (
        lambda: cross_entropy(hidden @ weight.T, target, outputs=outputs),
        lambda: linear_cross_entropy(hidden, weight, target, outputs=outputs),
        lambda: multi_head_linear_cross_entropy(hidden, weight, target, shifts=[1], outputs=outputs),
    ):
        with pytest.raises(OptionError, match="outputs"):
            loss()
