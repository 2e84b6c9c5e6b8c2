"""An op that is wrong on this machine's GPU is left out of the patch, said and recorded; or the run is refused."""

from __future__ import annotations

import pytest
import torch
from trainer_helpers import records

from tigon.ops import OPS, dispatch
from tigon.trainer import engine
from tigon.trainer.guards import self_test
from wrong_ops import WRONG


def test_every_op_of_the_self_test_has_a_flag_of_patch():
    from tigon.models import patch

    flags = set(self_test.FLAGS.values())
    assert set(self_test.FLAGS) <= set(OPS)
    assert flags <= set(patch.__kwdefaults__)


def test_wrong_op_is_left_out_of_the_run_and_recorded(recipe, tigon, here, wrong, monkeypatch):
    path = recipe(model={"kernels": "tigon"}, train={"steps": 2})
    found = {}
    original = self_test.wrong_ops

    def ask(*arguments):
        found.update(original(*arguments))
        dispatch.uses_kernel = uses_kernel  # the run itself is on the CPU
        return dict(found)

    uses_kernel = lambda tensor: False  # noqa: E731
    monkeypatch.setattr(self_test, "wrong_ops", ask)
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert set(found) == WRONG and all("times what rounding allows" in why for why in found.values())
    assert outcome.out.count("gives wrong results on this device") == 2 and "warning  swiglu" in outcome.out
    (said,) = records(here / "runs" / "r", "self_test")
    assert said["wrong_ops"] == found
    patched = records(here / "runs" / "r", "result")[0]["patch"]
    assert "cross_entropy" in patched and "rope" in patched
    assert not any(line.split()[:1] == ["swiglu"] for line in patched.splitlines()), patched


def test_strict_run_with_a_wrong_op_is_refused(recipe, tigon, here, wrong):
    path = recipe(model={"kernels": "tigon", "self_test": "strict"})
    line = tigon("train", path).error_line()
    assert "kernels that give wrong results on this device: swiglu: " in line and "tigon doctor" in line
    assert not (here / "runs").exists()


@pytest.mark.parametrize("model", [{"kernels": "tigon", "self_test": "off"}, {"kernels": "none"}])
def test_ops_that_are_not_used_are_not_tested(recipe, tigon, wrong, model, monkeypatch):
    monkeypatch.setattr(self_test, "check_op", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(dispatch, "uses_kernel", lambda tensor: False)
    assert tigon("train", recipe(model=model, train={"steps": 1})).code == 0


def test_run_with_every_op_left_out_completes(recipe, tigon, monkeypatch):
    everything = dict.fromkeys(self_test.FLAGS, "wrong")
    monkeypatch.setattr(self_test, "wrong_ops", lambda *_: everything)
    outcome = tigon("train", recipe(model={"kernels": "tigon"}, train={"steps": 1}))
    assert outcome.code == 0, outcome.err


def test_wrong_op_is_left_out_of_the_training_before_the_run_too(recipe, tigon, monkeypatch):
    built, build = [], engine.build
    monkeypatch.setattr(self_test, "wrong_ops", lambda *_: {"swiglu": "wrong"})
    monkeypatch.setattr(engine, "build", lambda *args, **rest: built.append(args[0].wrong_ops) or build(*args, **rest))
    path = recipe(model={"kernels": "tigon"}, train={"steps": 1}, heads={"stage": 1, "count": 1, "base_steps": 1})
    outcome = tigon("medusa", path)
    assert outcome.code == 0, outcome.err
    assert len(built) >= 2 and all(wrong == {"swiglu": "wrong"} for wrong in built)


@pytest.mark.gpu
def test_self_test_finds_no_right_kernel_wrong():
    from tigon.recipe.keys import Recipe
    from tigon.techniques.keys.settings import Settings

    for precision in ("amp-bf16", "fp32"):
        assert self_test.wrong_ops(Recipe(), Settings.of({"train.precision": precision}), torch.device("cuda", 0)) == {}
