"""The rows: they can be made, and are chosen as typed. The implementations: they take the inputs of their rows."""

from __future__ import annotations

import inspect
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.kernels.peers import CATALOGUE
from benchmarks.kernels.suites import SUITES, targets_of
from tigon.bench import impls
from tigon.bench.impls import Impl, _Adapted
from tigon.bench.inputs import PERMISSIONS, Problem, make_inputs
from tigon.bench.rows import SMALL, USUAL, Row, select, small_row
from tigon.errors import OptionError, ShapeError
from tigon.ops import OPS

CPU = torch.device("cpu")
ALL = {**impls.CATALOGUE.suites, **SUITES}
ROWS = [row for rows in ALL.values() for row in rows]
IMPLS = [impl for op in OPS for impl in CATALOGUE.impls_for(op)]
EPS = {
    op: inspect.signature(OPS[op].call).parameters["eps"].default for op in ("rms_norm", "add_rms_norm", "layer_norm")
}


def tiny(row: Row) -> Row:
    """The row with every dimension cut down; its options stay."""
    shape = tuple(min(size, 8 * (d + 1)) for d, size in enumerate(row.shape))
    return Row(op=row.op, shape=shape, options=row.options, logits=row.logits)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_suite_have_distinct_ids(name):
    ids = [row.id for row in ALL[name]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("row", {(r.op, r.logits, str(r.options)): r for r in ROWS}.values(), ids=lambda r: r.id)
def test_every_row_can_be_made_and_is_reproducible(row):
    problem = Problem.of(tiny(row), torch.float32, CPU)
    assert problem.differentiable()
    assert problem.op.cost(**problem.inputs).moved_bytes > 0
    again = Problem.of(tiny(row), torch.float32, CPU)
    assert all(torch.equal(v, again.inputs[n]) for n, v in problem.inputs.items() if isinstance(v, torch.Tensor))
    assert all(map(torch.equal, problem.upstream, again.upstream))


def test_every_implementation_that_a_row_names_exists():
    for suite, rows in ALL.items():
        for row in rows:
            names = {impl.name for impl in CATALOGUE.impls_for(row.op)}
            for reach in targets_of(suite, row.id):
                assert {reach.of, reach.vs} - {""} <= names, row.id
                assert (reach.quantity == "ratio") == bool(reach.vs), row.id
            assert {*row.impls, *row.limits} <= names, row.id


@pytest.mark.parametrize("suite", [SMALL, USUAL])
def test_suites_of_the_command_have_every_op(suite):
    assert [row.op for row in impls.CATALOGUE.suites[suite]] == list(OPS)


def test_rows_of_targets_and_odd_have_a_target():
    for suite in ("targets", "odd"):
        for row in SUITES[suite]:
            assert targets_of(suite, row.id) or row.logits == "peaked", row.id


def test_peaked_labels_are_drawn_from_the_softmax():
    """Then the loss is the entropy of the logits; uniform labels cost log V more than that."""
    row = Row(op="cross_entropy", shape=(4000, 500), options={"ignored": 0.25}, logits="peaked")
    inputs = make_inputs(row, torch.float32, CPU)
    logp = inputs["logits"].log_softmax(-1)
    kept = inputs["target"] != -100
    assert 0.2 < 1 - kept.float().mean() < 0.3, "labels that were ignored are no longer"
    entropy = -(logp.exp() * logp).sum(-1)[kept].mean()
    loss = torch.nn.functional.cross_entropy(inputs["logits"], inputs["target"])
    assert abs(loss - entropy) < 0.1
    assert abs(inputs["logits"].std() - 4.0) < 0.05


def test_peaked_hidden_states_give_peaked_logits_with_labels_from_their_softmax():
    row = Row(op="linear_cross_entropy", shape=(2000, 64, 500), options={"ignored": 0.0}, logits="peaked")
    inputs = make_inputs(row, torch.float32, CPU)
    logits = inputs["hidden"] @ inputs["weight"].t()
    assert abs(logits.std() - 4.0) < 0.2
    logp = logits.log_softmax(-1)
    loss = torch.nn.functional.cross_entropy(logits, inputs["target"])
    assert abs(loss + (logp.exp() * logp).sum(-1).mean()) < 0.15


def test_rows_are_chosen_by_suite_op_and_shape():
    assert select(SUITES, "targets", (), ()) == SUITES["targets"]
    assert {row.op for row in select(SUITES, "odd", ("rope", "geglu"), ())} == {"rope", "geglu"}
    (row,) = select(SUITES, "targets", ("rope",), ("4x32x4096x128",))
    assert row.shape == (4, 32, 4096, 128) and row.options == {"kv_heads": 8} and row.graph
    assert not select(SUITES, "targets", ("linear_cross_entropy",), ("8x8x8",))[0].graph


@pytest.mark.parametrize(
    ("suite", "ops", "shapes", "error", "names"),
    [
        ("nope", (), (), OptionError, "targets, odd, paper, small"),
        ("odd", ("relu",), (), OptionError, "rms_norm"),
        ("paper", ("add_rms_norm",), (), OptionError, "cross_entropy, geglu"),
        ("odd", (), ("8x8",), OptionError, "exactly one --op"),
        ("odd", ("rope", "geglu"), ("8x8",), OptionError, "exactly one --op"),
        ("odd", ("geglu",), ("8*8",), ShapeError, "16384x4096"),
        ("odd", ("geglu",), ("8",), ShapeError, "64x256"),
        ("odd", ("geglu",), ("8x0",), ShapeError, "positive"),
    ],
)
def test_wrong_choice_is_refused_with_the_known_names(suite, ops, shapes, error, names):
    with pytest.raises(error, match=names):
        select(SUITES, suite, ops, shapes)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_compared_with_eager_and_compile(op):
    found = CATALOGUE.impls_for(op)
    roles = {impl.name: impl.role for impl in found}
    assert roles["tigon"] == "ours" and roles["eager"] == "baseline" and roles["compile"] == "peer"
    assert next(iter(roles)) == "tigon"
    assert len(roles) == len(found), "two implementations of one name"
    assert {impl.name for impl in impls.CATALOGUE.impls_for(op)} <= set(roles)


# The order in which the functions of the libraries take the tensors of an op, if it is not the op's order.
OTHER_ORDERS = {("quack", "add_rms_norm"): ("x", "weight", "residual")}


@pytest.mark.parametrize("impl", [i for i in IMPLS if i.adapt], ids=lambda impl: f"{impl.op}-{impl.name}")
def test_adapter_passes_every_input_of_its_rows_to_the_library(impl: Impl):
    """A stand-in replaces the library's function, so libraries that are not installed here are checked too."""
    inputs = make_inputs(small_row(impl.op), torch.float32, CPU)
    passed = {name: value for name, value in inputs.items() if name not in PERMISSIONS}
    library = MagicMock()
    adapted = _Adapted(impl.adapt, library)
    inspect.signature(adapted).bind(**passed)
    adapted(**passed)
    (call,) = library.call_args_list
    received = [*call.args, *call.kwargs.values()]
    want = {name: value for name, value in passed.items() if isinstance(value, torch.Tensor)}
    order = OTHER_ORDERS.get((impl.name, impl.op), tuple(want))
    tensors = [value for value in received if isinstance(value, torch.Tensor)]
    assert len(tensors) == len(order)
    assert all(torch.equal(got, want[name]) for got, name in zip(tensors, order, strict=True))
    if "eps" in inspect.signature(impl.adapt).parameters:
        assert [v for v in received if isinstance(v, float)] == [passed.get("eps", EPS[impl.op])]


@pytest.mark.parametrize("impl", [i for i in IMPLS if not i.adapt], ids=lambda impl: f"{impl.op}-{impl.name}")
def test_implementation_without_an_adapter_takes_the_inputs_of_its_rows(impl: Impl):
    inputs = make_inputs(small_row(impl.op), torch.float32, CPU)
    inspect.signature(impl.target).bind(**{n: v for n, v in inputs.items() if n not in PERMISSIONS}, **impl.fixed)
