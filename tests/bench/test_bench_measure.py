"""Measuring a row on the CPU: figures are there and right, and nothing an implementation does ends the run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from benchmarks.kernels.peers import CATALOGUE, OTHERS, TIGON
from benchmarks.kernels.suites import SUITES
from tigon.bench import measure, numerical_errors
from tigon.bench.impls import LIMITS, Catalogue, Impl
from tigon.bench.inputs import Bound, Problem
from tigon.bench.measure import Setting, measure_row
from tigon.bench.record import Measurement, RowRecord
from tigon.bench.rows import SMALL, Row, row
from tigon.bench.timing import Spread
from tigon.errors import BenchError
from tigon.ops import OPS

CPU = torch.device("cpu")
CEILINGS = {"copy_gb_per_s": 10.0, "matmul_tflop_per_s": 0.1, "matmul_size": 512}
SETTING = Setting(dtype=torch.float32, device=CPU, repetitions=2, ceilings=CEILINGS)
BASIC = (
    *("tigon", "eager", "torch", "tigon new gradient", "tigon one chunk", "tigon half ignored", "tigon frozen head"),
    "tigon eval",
)


def measured(case: Row, names=BASIC, catalogue: Catalogue = CATALOGUE) -> RowRecord:
    return measure_row(case, catalogue.of_row(case, names), SETTING)


def only(*peers: Impl) -> Catalogue:
    """tigon, the formula, and these peers."""
    return Catalogue(SUITES, (*peers, *LIMITS))


def problem(op: str, *shape: int, **fields: Any) -> Problem:
    return Problem.of(row(op, *shape, **fields), torch.float32, CPU)


@pytest.mark.parametrize("case", SUITES[SMALL], ids=lambda case: case.id)
def test_row_has_times_memory_errors_and_rates(case):
    record = measured(case)
    by_name = {m.impl: m for m in record.measurements}
    for name in ("tigon", "eager"):
        m = by_name[name]
        assert m.status == "ok" and m.eager_ms is not None and m.graph_ms is None and m.graph_detail
        assert m.extra_peak_bytes > 0 and 0 < m.fraction < math.inf
        assert (m.tflop_per_s is not None) == bool(record.flops) != (m.gb_per_s is not None)
        gradients = {n for n in m.errors if n.startswith("gradient of ")}
        wanted = Problem.of(case, torch.float32, CPU).differentiable()
        assert gradients == {f"gradient of {n}" for n in wanted}
        assert not m.breaks_rule and max(m.errors.values()) < 1e-5
    assert record.error_shape == list(case.shape) and record.repetitions == 2
    assert record.limit_ms > 0


def test_limit_is_the_slower_of_bytes_and_flops():
    record = measured(row("rms_norm", 64, 128), ("tigon",))
    assert record.limit_ms == pytest.approx(5 * 64 * 128 * 4 / 10.0 / 1e6)
    record = measured(row("linear_cross_entropy", 64, 32, 1000, graph=False), ("tigon",))
    assert record.limit_ms == pytest.approx(max(6 * 64 * 32 * 1000 / 0.1 / 1e9, record.moved_bytes / 10.0 / 1e6))
    assert [m.impl for m in record.measurements] == ["tigon", "products"], "the limit is measured whoever is chosen"


def test_variants_and_limits_are_timed_without_errors():
    record = measured(row("linear_cross_entropy", 64, 32, 1000, graph=False))
    for m in record.measurements:
        assert bool(m.errors) == (m.role not in ("variant", "limit")), m.impl
        assert m.status == "ok" and m.eager_ms is not None


def test_wrong_tigon_is_refused_and_not_timed(monkeypatch):
    op = OPS["swiglu"]
    wrong = dataclasses.replace(op, call=lambda gate, up: op.call(gate, up) * 1.001)
    monkeypatch.setitem(OPS, "swiglu", wrong)
    tigon, eager = measured(row("swiglu", 16, 32)).measurements[:2]
    assert tigon.status == "refused" and tigon.eager_ms is None and "has error 1.0e-03" in tigon.detail
    assert eager.status == "ok" and eager.eager_ms is not None


def test_tigon_with_a_nan_is_refused(monkeypatch):
    op = OPS["swiglu"]
    wrong = dataclasses.replace(op, call=lambda gate, up: op.call(gate, up) * math.nan)
    monkeypatch.setitem(OPS, "swiglu", wrong)
    assert measured(row("swiglu", 16, 32), ("tigon",)).measurements[0].status == "refused"


def test_wrong_peer_is_timed_and_marked():
    def wrong(f: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return f(gate) * up * 1.001

    silu = "torch.nn.functional:silu"
    peers = only(
        Impl(name="liger", op="swiglu", role="peer", target=silu, adapt=wrong),
        Impl(name="quack", op="swiglu", role="peer", target=silu, adapt=lambda f, gate, up: f(gate) * up),
    )
    record = measured(row("swiglu", 16, 32), ("tigon", "liger", "quack"), peers)
    _, liger, quack = record.measurements
    assert liger.breaks_rule == ["output 0", "gradient of gate", "gradient of up"] and liger.eager_ms is not None
    assert not quack.breaks_rule


def test_failure_of_one_implementation_leaves_the_others_measured():
    def out_of_memory(f: Any, gate: torch.Tensor, up: torch.Tensor) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def bug(f: Any, gate: torch.Tensor, up: torch.Tensor) -> None:
        raise RuntimeError("shape\nsecond line")

    silu = "torch.nn.functional:silu"
    peers = only(
        Impl(name="torch", op="swiglu", role="peer", target="torch.nn.functional:no_such_function"),
        Impl(name="liger", op="swiglu", role="peer", target="no_such_package:silu"),
        Impl(name="quack", op="swiglu", role="peer", target=silu, adapt=out_of_memory),
        Impl(name="cce", op="swiglu", role="peer", target=silu, adapt=bug),
        Impl(name="cce exact", op="swiglu", role="peer", target=silu, adapt=lambda f, gate: f(gate)),
    )
    record = measured(row("swiglu", 16, 32), ("tigon", "torch", "liger", "quack", "cce", "cce exact"), peers)
    by_name = {m.impl: m for m in record.measurements}
    assert by_name["tigon"].eager_ms is not None
    statuses = {name: m.status for name, m in by_name.items()}
    assert statuses == {
        "tigon": "ok",
        "torch": "no such op",
        "liger": "not installed",
        "quack": "out of memory",
        "cce": "failed",
        "cce exact": "not supported",
    }
    assert by_name["cce"].detail == "RuntimeError: shape"


def test_dead_device_ends_the_run_and_names_who_left_it(monkeypatch):
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def crash(f: Any, gate: torch.Tensor, up: torch.Tensor) -> None:
        monkeypatch.setattr(measure.timing, "synchronize", dead)
        raise RuntimeError("illegal memory access")

    peers = only(Impl(name="quack", op="swiglu", role="peer", target="torch.nn.functional:silu", adapt=crash))
    with pytest.raises(BenchError, match="quack left the device unusable"):
        measured(row("swiglu", 16, 32), ("tigon", "quack"), peers)


def test_overwritten_inputs_are_restored_and_belong_to_one_implementation():
    """An implementation that destroys its inputs has its own, and finds them whole before each run."""
    seen = []

    def destroys(f: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        seen.append(gate.detach().clone())
        result = f(gate) * up
        with torch.no_grad():
            gate.mul_(0)
        return result.detach().requires_grad_()

    swiglu = problem("swiglu", 16, 32)
    before = {name: value.clone() for name, value in swiglu.inputs.items()}
    impl = Impl(name="x", op="swiglu", role="peer", target="torch.nn.functional:silu", adapt=destroys, overwrites=True)
    bound = Bound(impl, swiglu)
    for _ in range(3):
        bound.restore()
        bound.forward()
    assert all(torch.equal(gate, before["gate"]) for gate in seen)
    assert all(torch.equal(value, before[name]) for name, value in swiglu.inputs.items())


def test_copies_for_overwriting_keep_the_memory_order():
    rope = problem("rope", 2, 4, 8, 16, options={"kv_heads": 2})
    own = Bound(Impl(name="x", op="rope", role="peer", target=rope.op.call, overwrites=True), rope)._leaves()
    q = rope.inputs["q"]
    assert own["q"].stride() == q.stride() and own["q"].data_ptr() != q.data_ptr()


def test_errors_are_measured_on_fewer_tokens_if_fp64_does_not_fit(monkeypatch):
    """Errors are then of fewer tokens, and the record says of how many."""
    whole = numerical_errors.oracle

    def small_gpu(problem, dtype=None):
        if dtype == torch.float64 and problem.inputs["q"].shape[2] > 10:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return whole(problem, dtype)

    monkeypatch.setattr(numerical_errors, "oracle", small_gpu)
    record = measured(row("rope", 1, 4, 32, 16, options={"kv_heads": 2}), ("tigon", "eager"))
    assert record.error_shape == [1, 4, 8, 16] and record.shape == [1, 4, 32, 16]
    tigon = record.measurements[0]
    assert tigon.status == "ok" and set(tigon.errors) > {"gradient of q"} and tigon.eager_ms is not None


def test_error_is_the_relative_frobenius_norm():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert numerical_errors.relative_error(truth * 1.01, truth) == pytest.approx(0.01)
    assert numerical_errors.relative_error(truth[:1], truth) == math.inf
    assert numerical_errors.relative_error(torch.tensor(2.0), torch.tensor(1.0, dtype=torch.float64)) == 1.0
    assert numerical_errors.relative_error(torch.full((2, 2), math.nan), truth) != 0


def test_rule_allows_twice_the_error_of_rounding_or_of_the_unfused_op():
    swiglu = problem("swiglu", 64, 64)
    truth = numerical_errors.oracle(swiglu, torch.float64)
    rounding = numerical_errors.relative_error(truth["output 0"].bfloat16(), truth["output 0"])
    allowed = numerical_errors.allowed_errors(swiglu, truth, torch.bfloat16, dict.fromkeys(truth, 0.0))
    assert allowed["output 0"] == pytest.approx(2 * rounding, rel=1e-3)
    allowed = numerical_errors.allowed_errors(swiglu, truth, torch.bfloat16, dict.fromkeys(truth, 0.5))
    assert allowed["output 0"] == pytest.approx(1.0, rel=1e-3)
    allowed = numerical_errors.allowed_errors(swiglu, truth, torch.bfloat16, None)
    assert allowed["output 0"] == pytest.approx(2 * max(swiglu.op.errors["bf16"], rounding), rel=1e-3)
    assert numerical_errors.breaks_rule({"output 0": math.nan}, allowed) == ["output 0"]
    assert numerical_errors.breaks_rule({"output 0": allowed["output 0"]}, allowed) == []


def test_row_is_judged_by_its_graph_time_if_it_asks_for_one():
    graph, eager = {"both": Spread(1, 1, 1)}, {"both": Spread(2, 2, 2)}
    both = Measurement(impl="x", role="peer", graph_ms=graph, eager_ms=eager)
    assert (both.judged_ms(True).median, both.judged_ms(False).median) == (1, 2)
    assert Measurement(impl="x", role="peer", eager_ms=eager).judged_ms(True).median == 2
    assert Measurement(impl="x", role="peer").judged_ms(True) is None


def test_row_of_log_probabilities_has_its_settings_variants_and_both_bounds():
    pytest.importorskip("trl.kernels")
    names = ("tigon", *(impl.name for impl in TIGON if impl.op == "linear_logprobs"), "eager", "trl")
    record = measured(row("linear_logprobs", 64, 32, 1000, graph=False), names)
    by_name = {m.impl: m for m in record.measurements}
    assert set(by_name) == {*names, "products", "four products"}
    for name, m in by_name.items():
        assert m.status == "ok" and m.eager_ms is not None, f"{name}: {m.detail}"
        assert not m.breaks_rule, name
    assert record.flops == 8 * 64 * 32 * 1000


KL_ROWS = {row.problem: row for row in SUITES[SMALL] if row.op == "linear_kl"}


def of_kl(problem: str, names=("tigon", "eager", "trl", "liger jsd"), catalogue=CATALOGUE) -> dict[str, Measurement]:
    pytest.importorskip("trl.kernels")
    return {m.impl: m for m in measured(KL_ROWS[problem], names, catalogue).measurements}


def test_divergence_of_two_trained_heads_has_gradients_of_both_and_eight_products():
    by_name = of_kl("jsd, both heads trained")
    assert {f"gradient of teacher_{name}" for name in ("hidden", "weight")} < set(by_name["tigon"].errors)
    assert by_name["eight products"].status == "ok" and "six products" not in by_name
    assert by_name["trl"].status == "not supported" and "teacher_weight" in by_name["trl"].detail


def test_divergence_from_a_frozen_teacher_is_compared_with_trls_function():
    by_name = of_kl("jsd, frozen teacher")
    for name in ("tigon", "trl"):
        m = by_name[name]
        assert m.status == "ok" and not m.breaks_rule, (name, m.detail)
        assert set(m.errors) == {"output 0", "gradient of hidden", "gradient of weight"}
    assert by_name["liger jsd"].status in ("not supported", "not installed")
    assert {"six products", "products once"} < set(by_name)


@pytest.mark.parametrize("problem", ["mean jsd, frozen teacher", "mean forward KL, frozen teacher"])
def test_mean_divergence_is_compared_with_trls_function(problem):
    by_name = of_kl(problem)
    for name in ("tigon", "eager", "trl"):
        assert by_name[name].status == "ok" and not by_name[name].breaks_rule, (name, by_name[name].detail)


def test_peer_that_returns_a_mean_is_called_with_the_arguments_of_its_divergence():
    def function(hidden, weight, teacher_hidden, teacher_weight, *, jsd_beta):
        kind = "forward" if jsd_beta == 0.0 else "jsd"
        return OPS["linear_kl"].oracle(hidden, weight, teacher_hidden, teacher_weight, kind=kind).mean()

    (liger,) = (impl for impl in OTHERS if impl.name == "liger jsd")
    peers = only(dataclasses.replace(liger, target=function))
    for problem in ("mean jsd, frozen teacher", "mean forward KL, frozen teacher"):
        m = of_kl(problem, ("liger jsd",), peers)["liger jsd"]
        assert m.status == "ok" and not m.breaks_rule, m.detail
    m = of_kl("jsd, frozen teacher", ("liger jsd",), peers)["liger jsd"]
    assert m.status == "not supported" and "mean over the tokens" in m.detail


def test_cost_of_a_frozen_teacher_leaves_its_gradients_out():
    both, frozen = (measured(KL_ROWS[name], ("tigon",)).flops for name in KL_ROWS if name.startswith("jsd"))
    assert both == 16 * 64 * 32 * 1000 and frozen == 12 * 64 * 32 * 1000
