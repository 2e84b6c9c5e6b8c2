"""A reward function's results and failures are one line that names the function."""

from __future__ import annotations

import sys

import pytest
import torch

from tigon.errors import RecipeError
from tigon.trainer.post_training.rewards import load_rewards


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """reward(body): the function that a module with this body defines, as a recipe loads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def load(body: str):
        (tmp_path / "own_rewards.py").write_text(f"def score(completions, **columns):\n    {body}\n", encoding="utf-8")
        sys.modules.pop("own_rewards", None)
        return load_rewards(["own_rewards:score"])[0]

    yield load
    sys.modules.pop("own_rewards", None)


@pytest.mark.parametrize("value", ["1", "0.5", "True", "__import__('torch').tensor(0.5)"])
def test_numbers_are_passed_on(reward, value):
    assert reward(f"return [{value}] * 2")(completions=["a", "b"]) == [eval(value)] * 2


def test_numbers_of_numpy_are_passed_on(reward):
    pytest.importorskip("numpy")
    assert reward("import numpy; return [numpy.float32(0.5)]")(completions=["a"]) == [0.5]


@pytest.mark.parametrize(
    "value", ["'good'", "None", "float('nan')", "float('inf')", "[1.0]", "1j", "__import__('torch').ones(2)"]
)
def test_what_is_no_finite_number_is_refused_with_its_completion(reward, value):
    with pytest.raises(RecipeError, match=r"own_rewards:score returned .* for completion 1 of 2; return a finite"):
        reward(f"return [0.0, {value}]")(completions=["a", "b"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return 1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import sys; sys.exit()", "Exit"),
    ],
)
def test_a_function_that_fails_or_exits_is_named_with_its_line(reward, body, named):
    with pytest.raises(RecipeError, match=rf"own_rewards:score failed: .*{named}.*, in line 2 of .*own_rewards.py"):
        reward(body)(completions=["a"])


def test_a_module_that_exits_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "leaving.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="leaving:score: the module cannot be imported: SystemExit: 0"):
        load_rewards(["leaving:score"])


def test_the_tensor_that_is_passed_on_is_the_functions_own(reward):
    (value,) = reward("import torch; return [torch.tensor(2.0)]")(completions=["a"])
    assert isinstance(value, torch.Tensor)
