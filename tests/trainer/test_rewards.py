"""A reward function's results and failures are one line that names the function."""

from __future__ import annotations

import sys

import pytest
import torch

from tigon.errors import RecipeError
from tigon.objectives.grpo import PlannedGRPO
from tigon.objectives.post_training.reward_entries import entries_of
from tigon.trainer.post_training.rewards import load_rewards


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """reward(body): the function that a module with this body defines, as a recipe loads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def load(body: str):
        (tmp_path / "own_rewards.py").write_text(f"def score(completions, **columns):\n    {body}\n", encoding="utf-8")
        sys.modules.pop("own_rewards", None)
        return load_rewards(entries_of(["own_rewards:score"]))[0]

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
        load_rewards(entries_of(["leaving:score"]))


def test_the_tensor_that_is_passed_on_is_the_functions_own(reward):
    (value,) = reward("import torch; return [torch.tensor(2.0)]")(completions=["a"])
    assert isinstance(value, torch.Tensor)


# --- entries with weights and arguments -------------------------------------------------------------------------------


def test_entries_have_weights_arguments_and_names_that_differ() -> None:
    given = ["a:same", "b:same", {"function": "c:other", "weight": 2, "arguments": {"most": 3}}, {"function": "c:other",
             "name": "again"}]  # fmt: skip
    entries = entries_of(given)
    assert [entry.title for entry in entries] == ["a:same", "b:same", "c:other", "again"]
    assert [entry.weight for entry in entries] == [1, 1, 2, 1]
    assert entries[2].arguments == {"most": 3} and entries_of(["c:other"])[0].title == "other"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"weight": 2}, "an entry lacks the key function"),
        ({"function": "a:b", "factor": 2}, "factor is not a key of a reward; its keys are function, name, weight"),
        ({"function": "a:b", "weight": "2"}, "weight is '2'; it must be a number"),
        ({"function": "a:b", "weight": True}, "weight is True; it must be a number"),
        ({"function": "a:b", "weight": 0}, "weight is 0; it must be a finite number other than 0"),
        ({"function": "a:b", "weight": float("nan")}, "weight is nan; it must be a finite number"),
        ({"function": "a:b", "arguments": [1]}, r"arguments is \[1\]; it must be a mapping"),
        ({"function": ["a:b"]}, "function is .* must be text"),
    ],
)
def test_wrong_entries_are_refused_with_the_key(entry, says) -> None:
    with pytest.raises(RecipeError, match=rf"post_training\.rewards: {says}"):
        entries_of([entry])


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(RecipeError, match="two entries have the name a:b; give each its own"):
        entries_of(["a:b", {"function": "a:b"}])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("tigon.rewards:exact_answer", "takes the column answer, and the rows have prompt, thing; add it to the rows"),
        ("tigon.rewards:length", r"needs most; set arguments: \{most: ...\} beside it"),
        (
            {"function": "tigon.rewards:length", "arguments": {"least": 3}},
            "has no argument least; it takes completions",
        ),
        ({"function": "tigon.rewards:length", "arguments": {"most": 0}}, "ValueError: most is 0; it must be above 0"),
        ({"function": "tigon.rewards:length", "arguments": {"most": "x"}}, "TypeError"),
        ({"function": "tigon.rewards:answer_format", "arguments": {"pattern": "("}}, ".*missing \\), unterminated"),
        ({"function": "tigon.rewards:passes_tests", "arguments": {"allow": False}}, "takes the column tests"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_the_run(entry, says) -> None:
    with pytest.raises(RecipeError, match=rf"post_training\.rewards: tigon\.rewards:\w+:? {says}"):
        load_rewards(entries_of([entry]), columns=("prompt", "thing"))


def test_pattern_of_an_answer_is_compiled_before_the_run() -> None:
    wrong = entries_of([{"function": "tigon.rewards:exact_answer", "arguments": {"pattern": "("}}])
    with pytest.raises(RecipeError, match=r"exact_answer: .*missing \), unterminated"):
        load_rewards(wrong, columns=("prompt", "answer"))


def test_code_needs_leave_before_the_run() -> None:
    with pytest.raises(RecipeError, match=r"tigon\.rewards:passes_tests: it runs code that the model writes"):
        load_rewards(entries_of(["tigon.rewards:passes_tests"]), columns=("prompt", "tests"))
    allowed = {"function": "tigon.rewards:passes_tests", "arguments": {"allow": True}}
    load_rewards(entries_of([allowed]), columns=("prompt", "tests"))


def test_arguments_reach_the_function_and_its_title_names_the_metrics() -> None:
    short = {"function": "tigon.rewards:length", "arguments": {"most": 2}, "name": "short"}
    (function,) = load_rewards(entries_of([short]))
    assert function.__name__ == "short"
    rewards = function(prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[0, 0], [0, 0, 0, 0]])
    assert rewards == [1, 0]


def test_plans_of_rewards_with_arguments_are_compared() -> None:
    rewards = ({"function": "a:b", "arguments": {"most": 3}},)
    one, other = (PlannedGRPO("grpo", (("rewards", given),)) for given in (rewards, ("a:b",)))
    again = PlannedGRPO("grpo", (("rewards", ({"function": "a:b", "arguments": {"most": 3}},)),))
    assert one == again != other and hash(one) == hash(again)
    assert one.recipe_keys()["post_training.rewards"] == list(rewards)
