"""Completions with their rewards: which ones are shown, where, and when rewards end a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tiny_checkpoint import tokenizer
from trainer_helpers import records

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tigon.objectives.post_training.reward_entries import entries_of
from tigon.recipe.keys import PostTrainingConfig
from tigon.trainer.checkpoint.resume_rules import redistribute_counters
from tigon.trainer.post_training.completions import CompletionLog, table_of
from tigon.trainer.post_training.reward_stop import RewardStop

ENTRIES = entries_of(["a:right", {"function": "a:short", "weight": 0.5}])


def log_of(count: int) -> tuple[CompletionLog, list[dict[str, Any]], Console]:
    log, written, console = CompletionLog(ENTRIES, count), [], Console(record=True, width=60)
    log.show(written.append, console, [lambda rows, step: written.append({"table": len(rows), "step": step})])
    return log, written, console


def score(log: CompletionLog, right: list[float | None], short: list[float | None], completions: list[Any]) -> None:
    prompts = [f"question {i}" for i in range(len(completions))]
    for title, rewards in (("right", right), ("short", short)):
        log.note(title, prompts, completions, rewards)


def record(log: CompletionLog, step: int, **logs: float) -> None:
    log.on_log(None, SimpleNamespace(global_step=step), None, logs)


def test_best_worst_and_those_between_are_shown_with_the_weighted_sum() -> None:
    log, written, console = log_of(3)
    score(log, [0, 1, 0.5, 0, 1], [0, 1, 0, 1, 0], ["a", "b", "c", "d", "e"])
    record(log, 7, loss=0.1)
    assert [(one["text"], one["reward"]) for one in written[:3]] == [("b", 1.5), ("c", 0.5), ("a", 0)]
    assert written[0]["rewards"] == {"right": 1, "short": 1} and written[0]["prompt"] == "question 1"
    assert written[3] == {"table": 3, "step": 7}
    printed = console.export_text()
    assert "         reward 1.50: 'question 1' -> 'b'\n" in printed


def test_record_shows_the_completions_scored_last_and_evaluations_are_named() -> None:
    log, written, _ = log_of(1)
    score(log, [1], [1], ["old"])
    score(log, [0], [None], ["new"])
    record(log, 3, eval_loss=0.1)
    assert [(one["text"], one["label"], one["rewards"]) for one in written[:1]] == [
        ("new", "step 3, eval", {"right": 0})
    ]


def test_other_records_and_none_asked_for_show_nothing() -> None:
    for log, written, _ in (log_of(2), log_of(0)):
        record(log, 1, loss=0.1)  # nothing has been scored
        score(log, [1], [1], ["a"])
        record(log, 1, train_runtime=3.0)
        if log.chosen():
            continue
        record(log, 1, loss=0.1)
        assert not written


def test_long_texts_keep_the_line_within_the_terminal_and_messages_show_their_calls() -> None:
    log, written, console = log_of(1)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "5"},
    ]
    score(log, [1], [0], [[*turns, {"role": "assistant", "content": "x" * 200}]])
    record(log, 1, loss=0.1)
    assert written[0]["text"].startswith('assistant: [{"type": "function"') and "\ntool: 5\n" in written[0]["text"]
    assert all(len(line) <= 60 for line in console.export_text().splitlines())


def test_report_shows_records_from_the_first_to_the_last() -> None:
    made = [
        {"event": "completion", "step": step, "label": f"step {step}", "prompt": "p", "text": "t", "reward": 1.0,
         "rewards": {"right": 1.0}}
        for step in range(1, 12)
    ]  # fmt: skip
    titles, rows = table_of(made, 3)
    assert titles == ["", "prompt", "completion", "reward", "right"]
    assert [row[0] for row in rows] == ["step 1", "step 6", "step 11"]
    assert table_of([], 3)[1] == []


# --- when rewards end a run -------------------------------------------------------------------------------------------


def stopped_at(stop: RewardStop, values: list[float], name: str) -> int | None:
    """The number of the record at which training ends."""
    for number, value in enumerate(values):
        control = SimpleNamespace(should_training_stop=False)
        stop.on_log(None, SimpleNamespace(), control, {"loss": 0.0, name: value})  # type: ignore[arg-type]
        stop.on_log(None, SimpleNamespace(), control, {"eval_loss": 0.0, name: -9.0})  # type: ignore[arg-type]
        if control.should_training_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("rewards", "end"),
    [
        ([0.1, 0.5, 0.9, 0.4, 0.3, 0.2], 4),
        ([0.9, 0.4, 0.5, 0.4, 0.5, 0.4], None),
        ([0.9, 0.4, 0.4], 2),
        ([0.1, 0.1, 0.1, 0.1], None),
    ],
)
def test_run_ends_when_the_reward_stays_below_its_best(rewards, end) -> None:
    stop = RewardStop(PostTrainingConfig(stop_reward_drop=0.5, stop_patience=2))
    assert stopped_at(stop, rewards, "reward") == end
    assert (stop.reason() is None) == (end is None)
    assert end is None or "0.5 below its best record, 0.9, in 2 records in a row" in str(stop.reason())


@pytest.mark.parametrize(("shares", "end"), [([0.9, 1.0, 0.2, 0.95, 0.9], 1), ([0.9, 0.8, 0.9], None)])
def test_run_ends_when_completions_stay_at_the_limit(shares, end) -> None:
    stop = RewardStop(PostTrainingConfig(stop_clipped_share=0.9, stop_patience=2, completion_length=32))
    assert stopped_at(stop, shares, "completions/clipped_ratio") == end
    assert end is None or "at least 90% of the completions reached 32 tokens" in str(stop.reason())


def test_nothing_ends_a_run_by_default() -> None:
    stop = RewardStop(PostTrainingConfig())
    assert stopped_at(stop, [1.0, -1.0, -1.0, -1.0, -1.0], "reward") is None
    assert stopped_at(stop, [1.0] * 9, "completions/clipped_ratio") is None


def test_counts_survive_a_checkpoint_on_another_number_of_processes() -> None:
    keys = PostTrainingConfig(stop_reward_drop=0.5, stop_patience=3)
    stop = RewardStop(keys)
    stopped_at(stop, [1.0, 0.2, 0.2], "reward")
    saved = json.loads(json.dumps({**stop.counted(), "gate": {"loss_sum": 0.0}}))
    again = RewardStop(keys)
    again.resume_counting(redistribute_counters([saved, saved], 1))
    assert stopped_at(again, [0.2], "reward") == 0


# --- a run with tools and an environment ------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

def bare(a, b):
    return a + b

def used(completions, **columns):
    return [float(any(turn["role"] == "tool" and turn["content"] == "5" for turn in each)) for each in completions]

class Counter:
    def reset(self, **columns):
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.calls)

class NoReset:
    pass
'''


@pytest.fixture
def caller(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that writes a call of `add` or ends its turn, by the bias of its head. Its template is TRL's."""
    import importlib.resources

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    fast = tokenizer()
    fast.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens([CALL])
    fast.chat_template = (importlib.resources.files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    eos, call = fast.convert_tokens_to_ids(["<|im_end|>", CALL])
    config = AutoConfig.for_model(
        "phi", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=len(fast),
        max_position_embeddings=4096, eos_token_id=eos, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.bias[[eos, call]] = 12.0
    model.save_pretrained(here / "caller")
    fast.save_pretrained(here / "caller")
    (here / "my_tools.py").write_text(TOOLS, encoding="utf-8")
    row = {"prompt": [{"role": "user", "content": "What is 2 + 3?"}]}
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(16)), encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    return here / "caller"


def recipe_of(**post_training: Any) -> dict[str, dict[str, Any]]:
    return {
        "model": {"name": "caller", "kernels": "none", "config": None},
        "data": {"source": "rows.jsonl", "vocab_size": 8192, "sequence_length": 128, "eval_fraction": 0},
        "train": {"objective": "grpo", "steps": 1, "batch_size": 16, "log_steps": 1, "eval_steps": None},
        "post_training": {
            "generations": 8,
            "completion_length": 256,
            "max_tool_calling_iterations": 1,
            **post_training,
        },
        "output": {"name": "r", "sample_tokens": 0, "save_model": False},
    }


def test_model_calls_tools_and_rewards_see_the_results(caller, recipe, tigon, here) -> None:
    outcome = tigon("train", recipe(**recipe_of(tools=["my_tools:add"], rewards=["my_tools:used"])))
    assert outcome.code == 0, outcome.err
    (first,) = records(here / "runs" / "r", "train")
    assert first["tools/call_frequency"] > 0 and first["tools/failure_frequency"] == 0
    assert 0 < first["rewards/used/mean"] == first["reward"] < 1
    shown = records(here / "runs" / "r", "completion")
    assert [one["reward"] for one in shown] == [1, 0]
    assert "tool: 5" in shown[0]["text"] and '"name": "add"' in shown[0]["text"]


def test_environment_gives_tools_and_its_own_reward(caller, recipe, tigon, here) -> None:
    outcome = tigon("train", recipe(**recipe_of(environment="my_tools:Counter")))
    assert outcome.code == 0, outcome.err
    (first,) = records(here / "runs" / "r", "train")
    assert first["rewards/Counter/mean"] == pytest.approx(first["tools/call_frequency"]) and first["reward"] > 0


REFUSED = {
    "a tool without types": ({"tools": ["my_tools:bare"], "rewards": ["my_tools:used"]},
                             r"tools: my_tools:bare cannot be described to the model: .*give each argument a type"),
    "a tool that is not there": ({"tools": ["my_tools:sub"], "rewards": ["my_tools:used"]}, r"has no function sub"),
    "no class": ({"environment": "my_tools:add"}, r"environment: my_tools:add: write a class with a method reset"),
    "no reset": ({"environment": "my_tools:NoReset"}, r"my_tools:NoReset: write a class with a method reset"),
    "another form": ({"environment": "Counter"}, r"'Counter' is not module:Class, e\.g\. my_game:Game"),
    "rounds without tools": ({"rewards": ["my_tools:used"]}, r"_iterations has no effect without tools"),
    "no reward": ({"tools": ["my_tools:add"]}, r"needs a reward function; set post_training\.rewards"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tools_are_refused_in_one_line_before_the_run(case, caller, recipe, tigon, here) -> None:
    keys, says = REFUSED[case]
    line = tigon("train", recipe(**recipe_of(**keys))).error_line()
    assert re.search(says, line), line
    assert not (here / "runs").exists()


def test_template_without_tools_is_refused(caller, recipe, tigon, here) -> None:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(caller)
    fast.chat_template = tokenizer().chat_template
    fast.save_pretrained(caller)
    outcome = tigon("train", recipe(**recipe_of(tools=["my_tools:add"], rewards=["my_tools:used"])))
    assert outcome.code == 2 and "chat template does not support tool calling" in outcome.err
