"""Statistics and taking turns."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from tigon.bench import timing
from tigon.bench.measure import _phases
from tigon.bench.timing import Run, Spread

CPU = torch.device("cpu")


def test_spread_is_the_median_and_the_outer_fifths():
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Spread(median=3.5, low=2.0, high=5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.2, 1.8)


def test_backward_time_is_a_difference_within_one_repetition():
    """A slow repetition slows forward and both; their difference must come from the same one."""
    phases = _phases([1.0, 101.0, 1.0], [3.0, 103.0, 3.0])
    assert phases["backward"] == Spread(2.0, 2.0, 2.0)
    assert phases["both"].median == 3.0


def test_implementations_take_turns():
    order: list[str] = []
    runs = {
        name: Run(lambda name=name: order.append(name), lambda: order.append("restore"), idle=True) for name in "ab"
    }
    times = timing.take_turns(runs, 3, CPU)
    assert order == ["restore", "a", "restore", "b"] * 3
    assert all(len(values) == 3 and min(values) >= 0 for values in times.values())


def test_failed_run_is_not_repeated_and_the_others_go_on():
    calls = itertools.count()

    def fails_the_second_time() -> None:
        if next(calls) == 1:
            raise torch.cuda.OutOfMemoryError("out of memory")

    runs = {
        "bad": Run(fails_the_second_time, lambda: None, idle=True),
        "good": Run(lambda: None, lambda: None, idle=True),
    }
    times = timing.take_turns(runs, 4, CPU)
    assert isinstance(times["bad"], torch.cuda.OutOfMemoryError) and times["bad"].__traceback__ is None
    assert len(times["good"]) == 4
    assert next(calls) == 2, "a run that failed was tried again"


def test_garbage_collector_is_enabled_again_after_an_exception():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), timing.no_garbage_collection():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_ceilings_are_positive_rates():
    rates = timing.ceilings(CPU, 2)
    assert rates["copy_gb_per_s"] > 0 and rates["matmul_tflop_per_s"] > 0 and rates["matmul_size"] == 512
