"""The rows: they can be made, say what they must reach, and are chosen as typed."""

from __future__ import annotations

import inspect
from unittest.mock import MagicMock

import pytest
import torch

from tigon.bench.impls import Impl, _Adapted, impl_names, impls_for
from tigon.bench.inputs import PERMISSIONS, differentiable, make_inputs
from tigon.bench.suites import ODD, PAPER, SMALL, SUITES, TARGETS, Row, select
from tigon.errors import OptionError, ShapeError
from tigon.ops import OPS

ROWS = [row for rows in SUITES.values() for row in rows]
IMPLS = [impl for op in OPS.values() for impl in impls_for(op)]
EPS = {
    op: inspect.signature(OPS[op].call).parameters["eps"].default for op in ("rms_norm", "add_rms_norm", "layer_norm")
}


def tiny(row: Row) -> Row:
    """The row with every dimension cut down; its options stay."""
    shape = tuple(min(size, 8 * (d + 1)) for d, size in enumerate(row.shape))
    return Row(op=row.op, shape=shape, options=row.options, logits=row.logits)


@pytest.mark.parametrize("name", SUITES)
def test_rows_of_a_suite_have_distinct_ids(name):
    ids = [row.id for row in SUITES[name]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("row", {(r.op, r.logits, str(r.options)): r for r in ROWS}.values(), ids=lambda r: r.id)
def test_every_row_can_be_made_and_is_reproducible(row):
    op = OPS[row.op]
    inputs = make_inputs(tiny(row), torch.float32, torch.device("cpu"))
    assert differentiable(op, inputs)
    assert op.cost(**inputs).moved_bytes > 0
    again = make_inputs(tiny(row), torch.float32, torch.device("cpu"))
    assert all(torch.equal(value, again[name]) for name, value in inputs.items() if isinstance(value, torch.Tensor))


def test_every_implementation_that_a_row_names_exists():
    for row in ROWS:
        names = {impl.name for impl in impls_for(OPS[row.op])}
        for reach in row.reach:
            assert {reach.of, reach.vs} - {""} <= names, row.id
            assert (reach.quantity == "ratio") == bool(reach.vs), row.id
        assert {*row.impls, *row.limits} <= names, row.id


def test_suites_cover_their_ops_and_sizes():
    assert {row.op for row in SMALL} == set(OPS)
    # `python -m benchmarks experts` times experts beside transformers' implementations, and a router's ops; `lora` a
    # step with layers that share an input, and attention with sinks.
    elsewhere = {"multi_head_linear_cross_entropy", "logprobs", "experts", "lora_linears"}
    elsewhere |= {"topk_softmax", "load_balancing_loss", "attention_with_sinks"}
    assert {row.op for row in TARGETS} == set(OPS) - elsewhere
    assert {row.op for row in TARGETS if row.logits == "peaked"} == {"cross_entropy", "linear_cross_entropy"}
    assert {row.op for row in PAPER} == {"cross_entropy", "geglu", "swiglu", "rms_norm", "layer_norm", "rope"}
    assert {row.shape[-1] for row in ODD if row.op == "rms_norm"} >= {64, 128, 256, 2560, 3072, 5120, 28672}
    assert {row.shape[-1] for row in ODD if row.op == "linear_cross_entropy"} >= {50257, 151936, 262144}


def test_rows_of_targets_and_odd_have_a_target():
    for row in (*TARGETS, *ODD):
        assert row.reach or row.logits == "peaked" or row.op == "multi_head_linear_cross_entropy", row.id


def test_peaked_labels_are_drawn_from_the_softmax():
    """Then the loss is the entropy of the logits; uniform labels cost log V more than that."""
    row = Row(op="cross_entropy", shape=(4000, 500), options={"ignored": 0.25}, logits="peaked")
    inputs = make_inputs(row, torch.float32, torch.device("cpu"))
    logp = inputs["logits"].log_softmax(-1)
    kept = inputs["target"] != -100
    assert 0.2 < 1 - kept.float().mean() < 0.3, "labels that were ignored are no longer"
    entropy = -(logp.exp() * logp).sum(-1)[kept].mean()
    loss = torch.nn.functional.cross_entropy(inputs["logits"], inputs["target"])
    assert abs(loss - entropy) < 0.1
    assert abs(inputs["logits"].std() - 4.0) < 0.05


def test_peaked_hidden_states_give_peaked_logits_with_labels_from_their_softmax():
    row = Row(op="linear_cross_entropy", shape=(2000, 64, 500), options={"ignored": 0.0}, logits="peaked")
    inputs = make_inputs(row, torch.float32, torch.device("cpu"))
    logits = inputs["hidden"] @ inputs["weight"].t()
    assert abs(logits.std() - 4.0) < 0.2
    logp = logits.log_softmax(-1)
    loss = torch.nn.functional.cross_entropy(logits, inputs["target"])
    assert abs(loss + (logp.exp() * logp).sum(-1).mean()) < 0.15


def test_rows_are_chosen_by_suite_op_and_shape():
    assert select("targets", (), ()) == TARGETS
    assert {row.op for row in select("odd", ("rope", "geglu"), ())} == {"rope", "geglu"}
    (row,) = select("targets", ("rope",), ("4x32x4096x128",))
    assert row.shape == (4, 32, 4096, 128) and row.options == {"kv_heads": 8} and row.graph
    assert not select("targets", ("linear_cross_entropy",), ("8x8x8",))[0].graph


@pytest.mark.parametrize(
    ("suite", "ops", "shapes", "error", "names"),
    [
        ("nope", (), (), OptionError, "targets, paper, odd, small"),
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
        select(suite, ops, shapes)


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_compared_with_eager_and_compile(op):
    roles = {impl.name: impl.role for impl in impls_for(OPS[op])}
    assert roles["tigon"] == "ours" and roles["eager"] == "baseline" and roles["compile"] == "peer"
    assert next(iter(roles)) == "tigon"
    assert len(roles) == len(impls_for(OPS[op])), "two implementations of one name"
    assert set(roles) <= set(impl_names())


# The order in which the functions of the libraries take the tensors of an op, if it is not the op's order.
OTHER_ORDERS = {("quack", "add_rms_norm"): ("x", "weight", "residual")}


@pytest.mark.parametrize("impl", [i for i in IMPLS if i.adapt], ids=lambda impl: f"{impl.op}-{impl.name}")
def test_adapter_passes_every_input_of_its_rows_to_the_library(impl: Impl):
    """A stand-in replaces the library's function, so libraries that are not installed here are checked too."""
    row = next(row for row in SMALL if row.op == impl.op)
    inputs = make_inputs(row, torch.float32, torch.device("cpu"))
    passed = {name: value for name, value in inputs.items() if name not in PERMISSIONS}
    library = MagicMock()
    adapted = _Adapted(impl.adapt, library)
    inspect.signature(adapted).bind(**passed)
    adapted(**passed)
    (call,) = library.call_args_list
    received = [*call.args, *call.kwargs.values()]
    want = {name: value for name, value in passed.items() if isinstance(value, torch.Tensor)}
    if (impl.name, impl.op) == ("torch", "add_rms_norm"):  # PyTorch's norm takes the sum
        want = {"sum": want["x"] + want["residual"], "weight": want["weight"]}
    order = OTHER_ORDERS.get((impl.name, impl.op), tuple(want))
    tensors = [value for value in received if isinstance(value, torch.Tensor)]
    assert len(tensors) == len(order)
    assert all(torch.equal(got, want[name]) for got, name in zip(tensors, order, strict=True))
    if "eps" in inspect.signature(impl.adapt).parameters:
        assert [v for v in received if isinstance(v, float)] == [passed.get("eps", EPS[impl.op])]


@pytest.mark.parametrize("impl", [i for i in IMPLS if not i.adapt], ids=lambda impl: f"{impl.op}-{impl.name}")
def test_implementation_without_an_adapter_takes_the_inputs_of_its_rows(impl: Impl):
    row = next(row for row in SMALL if row.op == impl.op)
    inputs = make_inputs(row, torch.float32, torch.device("cpu"))
    inspect.signature(impl.target).bind(**{n: v for n, v in inputs.items() if n not in PERMISSIONS}, **impl.fixed)
