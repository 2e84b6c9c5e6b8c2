"""`tigon train` with TRL's trainers: each objective end to end, the records, the report, resuming, and bad input."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoint import save
from trainer_helpers import TINY_MODEL, records, tree

pytest.importorskip("trl")
pytest.importorskip("datasets")

from second_proofs import proved_by
from tigon.data import preferences
from tigon.objectives.rules import classify as classify_rules
from tigon.objectives.rules import post_training as post_training_rules
from tigon.trainer.step import Speed

SHAPE = {**TINY_MODEL, "num_hidden_layers": 2}
QUICK: dict[str, dict[str, Any]] = {
    "model": {"kernels": "tigon", "config": SHAPE},
    "data": {"source": "toy-answers", "vocab_size": 512, "sequence_length": 64, "max_text_mib": 0.01},
    "train": {"steps": 5, "log_steps": 1, "eval_steps": 5, "batch_size": 4, "learning_rate": 1e-3},
    "output": {"name": "r", "sample_tokens": 4, "save_model": True},
}
REWARDS = """
def short(completions, **columns):
    return [-float(len(completion)) for completion in completions]

def thing(completions, thing, **columns):
    return [float(name in completion) for name, completion in zip(thing, completions)]

def too_few(completions, **columns):
    return [1.0]

def without_columns(completions):
    return [0.0] * len(completions)
"""
OWN: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.2, "loss_type": "sigmoid"},
    "kto": {"desirable_weight": 1.1},
    "orpo": {"beta": 0.2},
    "grpo": {"rewards": ["my_rewards:short", "my_rewards:thing"], "generations": 2, "completion_length": 8},
    "distill": {"base_steps": 2, "completion_length": 8, "beta": 0.5},
    "reward": {},
}
METRICS = {
    "dpo": ("rewards/margins", "rewards/accuracies"),
    "kto": ("rewards/chosen",),
    "orpo": ("rewards/margins", "rewards/accuracies"),
    "grpo": ("reward", "rewards/short/mean", "rewards/thing/mean", "completions/mean_length"),
    "distill": ("entropy",),
    "reward": ("margin", "accuracy"),
}
"""What TRL logs for each objective."""


def sections(objective: str, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made = {**QUICK, "post_training": dict(OWN[objective])}
    made["train"] = {**QUICK["train"], "objective": objective}
    for name, values in more.items():
        made[name] = {**made.get(name, {}), **values}
    return made


@pytest.fixture(autouse=True)
def rewards(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))


@pytest.mark.charts
@pytest.mark.parametrize("objective", OWN)
def test_objective_trains_evaluates_saves_and_reports(objective, recipe, tigon, here):
    outcome = tigon("train", recipe(**sections(objective)))
    assert outcome.code == 0, outcome.err
    run = here / "runs" / "r"
    train, evaluated = records(run, "train"), records(run, "eval")
    assert [record["step"] for record in train] == [1, 2, 3, 4, 5]
    for record in train:
        assert {"loss", "tokens_per_s", "memory_bytes"} <= record.keys() and record["tokens_per_s"] > 0
    assert all(name in train[-1] for name in METRICS[objective])
    assert "eval_loss" in evaluated[-1] and any(f"eval_{name}" in evaluated[-1] for name in METRICS[objective])
    assert json.loads((run / "summary.json").read_text())["eval_loss"] == evaluated[-1]["eval_loss"]
    page, text = (run / "report.html").read_text(), (run / "report.md").read_text()
    assert "<svg" in page and "| the model |" in text and "nigram entropy" not in text
    assert "tigon-demo" in text and ("Text sample" in text) == (objective != "reward")
    assert (run / "model" / "model.safetensors").exists() and (run / "model" / "tokenizer.json").exists()
    assert not (run / "checkpoints" / "README.md").exists()
    assert_lines_show(IN_THE_TERMINAL[objective], outcome.out, train[-1])


IN_THE_TERMINAL = {
    "dpo": {"reward margin": "rewards/margins", "accuracy": "rewards/accuracies"},
    "kto": {"reward margin": "rewards/margins"},
    "orpo": {"reward margin": "rewards/margins", "accuracy": "rewards/accuracies"},
    "grpo": {"reward": "reward", "completion length": "completions/mean_length"},
    "distill": {"entropy": "entropy"},
    "reward": {"margin": "margin", "accuracy": "accuracy"},
}
"""The objective's own metrics in the progress lines, and their names in metrics.jsonl."""


@pytest.mark.parametrize("objective", ["dpo", "kto", "grpo", "distill"])
def test_frozen_layers_on_the_host_change_no_number(objective, recipe, tigon, here):
    pytest.importorskip("peft")
    seen = {}
    for name, offload in (("device", False), ("host", True)):
        made = sections(
            objective,
            train={"steps": 2, "eval_steps": 2},
            lora={"rank": 4, "base_offload": offload},
            output={"save_model": False, "sample_tokens": 0, "name": name},
        )
        outcome = tigon("train", recipe(**made))
        assert outcome.code == 0, outcome.err
        varies = ("_per_s", "memory", "time", "runtime", "_per_second")
        seen[name] = [
            {key: value for key, value in record.items() if not any(word in key for word in varies)}
            for kind in ("train", "eval")
            for record in records(here / "runs" / name, kind)
        ]
    assert seen["host"] == seen["device"]


def assert_lines_show(metrics: dict[str, str], printed: str, last: dict[str, Any]) -> None:
    trained = re.findall(r"^step 5/5  loss .*$", printed, re.MULTILINE)[-1]
    evaluated = re.findall(r"^step 5/5  eval loss .*$", printed, re.MULTILINE)[-1]
    for title, name in metrics.items():
        value = f"{last[name]:.1%}" if title == "accuracy" else f"{last[name]:.4f}"
        assert f"  {title} {value}  " in trained, (title, trained)
        assert f"  {title} " in evaluated, (title, evaluated)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_model_and_reference_of_dpo_run_on_tigons_head(shared_prefix, recipe, tigon, here):
    assert tigon("train", recipe(**sections("dpo", post_training={"shared_prefix": shared_prefix}))).code == 0
    patch = json.loads((here / "runs" / "r" / "summary.json").read_text())["patch"]
    assert "TRL's model: tigon's head\nTRL's ref_model: tigon's head" in patch
    assert ("beginnings that sequences share are computed once" in patch) == shared_prefix
    first = records(here / "runs" / "r", "train")[0]
    assert first["rewards/margins"] == 0 and first["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_class_of_the_trainer_does_not_hold_the_reference(recipe, tigon, here, monkeypatch):
    from tigon.trainer.post_training import trl_trainer

    fused, held = trl_trainer._fused, []

    def noted(trainer, shared_prefix):
        held.append((trainer.ref_model, type(trainer).reference))
        return fused(trainer, shared_prefix)

    monkeypatch.setattr(trl_trainer, "_fused", noted)
    assert tigon("train", recipe(**sections("dpo"))).code == 0
    assert len(held) == 1 and held[0][0] is not None and held[0][1] is None


EQUAL_MODELS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "dpo": ({}, {"loss": 0.693147, "rewards/margins": 0, "rewards/accuracies": 0, "rewards/chosen": 0}),
    "kto": ({"desirable_weight": 1.0}, {"loss": 0.5, "kl": 0, "rewards/chosen": 0}),
    "grpo": ({"beta": 0.1}, {"kl": 0}),
    "distill": ({"teacher": "checkpoint", "base_steps": 0}, {"loss": 0}),
}
"""Objective -> keys of `post_training`, and what TRL logs while the trained model equals its reference or teacher."""
PRECISIONS = {"bf16": {}, "amp-bf16": {}, "bf16 and adapters": {"lora": {"rank": 2}}}


EQUAL_RUNS = [
    (objective, precision, kernels)
    for objective in EQUAL_MODELS
    for precision in PRECISIONS
    for kernels in ("tigon", "no-flce", "none")
]


@pytest.mark.parametrize(
    "run",
    proved_by(
        lambda run: run[1:] == ("bf16", "tigon") or run == ("grpo", "bf16", "no-flce"),
        EQUAL_RUNS,
        "the same layers in another precision; only GRPO's reference is not built by tigon",
        "-".join,
    ),
)
def test_first_step_finds_the_model_equal_to_its_reference_or_teacher(run, recipe, tigon, here):
    """In bf16 the slightest difference of their layers shows."""
    objective, precision, kernels = run
    save(here / "checkpoint", initializer_range=0.3)
    keys, exact = EQUAL_MODELS[objective]
    more = {
        "model": {"name": "checkpoint", "config": None, "kernels": kernels},
        "data": {"sequence_length": 128, "vocab_size": 8192},
        "train": {"steps": 1, "eval_steps": None, "precision": precision.partition(" ")[0]},
        "post_training": {**OWN[objective], **keys},
        "output": {"sample_tokens": 0, "save_model": False},
        **PRECISIONS[precision],
    }
    outcome = tigon("train", recipe(**sections(objective, **more)))
    assert outcome.code == 0, outcome.err
    (first,) = records(here / "runs" / "r", "train")
    assert {name: first[name] for name in exact} == pytest.approx(exact, abs=1e-6 if "loss" in exact else 0)


TECHNIQUES = {
    "checkpointing": {"train": {"checkpointing": "full"}},
    "accumulation": {"train": {"gradient_accumulation": 2, "batch_size": 2}},
    "autocast": {"train": {"precision": "amp-bf16"}},
    "bf16": {"train": {"precision": "bf16"}},
    "galore": {"train": {"optimizer": "galore", "galore_rank": 4}},
    "epochs": {"train": {"steps": None, "epochs": 0.5}},
    "adapters and checkpointing": {"train": {"checkpointing": "full"}, "lora": {"rank": 2}},
}


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("objective", proved_by(["dpo"], ["dpo", "grpo"], "TRL's trainers get the same arguments"))
def test_techniques_of_the_recipe_apply(objective, technique, recipe, tigon, here):
    outcome = tigon("train", recipe(**sections(objective, **TECHNIQUES[technique], output={"sample_tokens": 0})))
    assert outcome.code == 0, outcome.err
    assert records(here / "runs" / "r", "eval")
    announced = json.loads((here / "runs" / "r" / "data.json").read_text(encoding="utf-8"))["steps"]
    assert records(here / "runs" / "r", "train")[-1]["step"] == announced


def test_teacher_is_a_model_with_the_students_vocabulary(recipe, tigon, here):
    assert tigon("train", recipe(**sections("dpo", output={"name": "first"}))).code == 0
    for teacher, size, says in (
        ("nowhere", 512, r"post_training\.teacher: 'nowhere' is neither"),
        ("llama-3.2-1b", 512, r"post_training\.teacher: llama-3\.2-1b is a preset"),
        ("runs/first/model", 600, r"has a vocabulary of 512, but tigon-demo has 600"),
    ):
        more = {
            "model": {"config": {**SHAPE, "vocab_size": size}}, "post_training": {"base_steps": 0, "teacher": teacher}
        }  # fmt: skip
        outcome = tigon("train", recipe(**sections("distill", **more)))
        assert outcome.code == 2 and re.search(says, outcome.err), outcome.err
        assert not (here / "runs" / "r").exists()
    more = {"post_training": {"base_steps": 0, "teacher": "runs/first/model"}}
    outcome = tigon("train", recipe(**sections("distill", **more)))
    assert outcome.code == 0, outcome.err


def test_kernels_change_no_loss(recipe, tigon, here):
    losses = []
    for kernels in ("none", "no-flce", "tigon"):
        more = {"model": {"kernels": kernels}, "output": {"name": kernels, "save_model": False, "sample_tokens": 0}}
        assert tigon("train", recipe(**sections("dpo", **more))).code == 0
        losses.append([record["loss"] for record in records(here / "runs" / kernels, "train")])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[2] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_adapters_are_trained_against_the_model_without_them_and_merged(objective, recipe, tigon, here):
    outcome = tigon(
        "train",
        recipe(
            **sections(objective, lora={"rank": 2}, train={"save_steps": 5}, output={"save_model": True, "merge": True})
        ),
    )
    assert outcome.code == 0, outcome.err
    first, *_, last = records(here / "runs" / "r", "train")
    assert first["rewards/chosen"] == 0 and last["rewards/chosen"] != 0
    saved = tree(here / "runs" / "r")
    assert not [name for name in saved if "/ref/" in name or ("adapter" in name and "/model/" in name)]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(here / "runs" / "r" / "model")


def test_reward_model_loads_with_its_score(recipe, tigon, here):
    assert tigon("train", recipe(**sections("reward"))).code == 0
    from transformers import AutoModelForSequenceClassification

    model, loading = AutoModelForSequenceClassification.from_pretrained(
        here / "runs" / "r" / "model", output_loading_info=True
    )
    assert not loading["missing_keys"] and model.score.weight.shape == (1, TINY_MODEL["hidden_size"])
    card = (here / "runs" / "r" / "model" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClassification.from_pretrained" in card


@pytest.mark.parametrize(
    "objective",
    proved_by(["dpo", "grpo", "distill"], OWN, "rows, optimizer and steps resume as with dpo; nothing is generated"),
)
def test_resumed_run_repeats_the_records_of_one_without_interruption(objective, recipe, tigon, here):
    more = {
        "train": {"steps": 4, "log_steps": 2, "save_steps": 1, "eval_steps": 4, "keep_checkpoints": 9},
        "output": {"save_model": False, "sample_tokens": 0},
    }
    path = recipe(**sections(objective, **more))
    assert tigon("train", path).code == 0
    run = here / "runs" / "r"
    whole = records(run, "train")
    for number in (2, 4):
        for file in (run / "checkpoints" / f"checkpoint-{number}").iterdir():
            file.unlink()
        (run / "checkpoints" / f"checkpoint-{number}").rmdir()
    (run / "summary.json").unlink()
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0, outcome.err
    assert "checkpoint-3" in outcome.out
    again = records(run, "train")
    varies = {"tokens_per_s", "memory_bytes", "memory_peak_bytes", "step_time"}
    assert [{k: v for k, v in r.items() if k not in varies} for r in again] == [
        {k: v for k, v in r.items() if k not in varies} for r in whole
    ]


def test_tokens_of_completions_are_counted_once_in_all_processes():
    state, args = SimpleNamespace(num_input_tokens_seen=100), SimpleNamespace(world_size=2)
    trainer: Any = SimpleNamespace(state=state, args=args, model=torch.nn.Linear(1, 1))
    speed = Speed(trainer)
    with speed.counting([{"prompt": "a list, as GRPO has it"}]):
        state.num_input_tokens_seen += 80  # TRL adds the tokens of all processes
    assert speed.n_tokens * args.world_size == 80


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "key of another objective": ("dpo", {"post_training": {"teacher": "x"}}, r"post_training\.teacher needs .*distill"),
    "unknown loss": ("dpo", {"post_training": {"loss_type": "kto"}}, r"losses of train\.objective: dpo are sigmoid"),
    "unknown option of generation": (
        "grpo", {"post_training": {**OWN["grpo"], "generation": {"num_beams": 2}}}, r"takes TRL's options top_p",
    ),
    "vLLM and continuous batching": (
        "grpo",
        {"post_training": {**OWN["grpo"], "generation": {
            "use_vllm": True, "use_transformers_continuous_batching": True,
        }}},
        r"exclude each other",
    ),
    "vLLM's options alone": (
        "grpo", {"post_training": {**OWN["grpo"], "generation": {"vllm_mode": "server"}}}, r"add use_vllm: true",
    ),
    "vLLM that is not installed": (
        "grpo", {"post_training": {**OWN["grpo"], "generation": {"use_vllm": True}}}, r"pip install 'trl\[vllm\]'",
    ),
    "continuous batching in distill": (
        "distill",
        {"post_training": {**OWN["distill"], "generation": {"use_transformers_continuous_batching": True}}},
        r"DistillationTrainer has no use_transformers_continuous_batching",
    ),
    "generator with options that it does not know": (
        "grpo",
        {"post_training": {**OWN["grpo"], "generator": "tigon", "generation": {"repetition_penalty": 1.1}}},
        r"knows only top_p, top_k and min_p",
    ),
    "generator with layers on the host": (
        "grpo",
        {"post_training": {**OWN["grpo"], "generator": "tigon"}, "lora": {"rank": 4, "base_offload": True}},
        r"tigon does not go with frozen layers in host memory; .*or lora\.base_offload: false",
    ),
    "generator with states on the host": (
        "grpo",
        {"post_training": {**OWN["grpo"], "generator": "tigon"}, "sharding": {"zero": 2, "offload": "cpu"}},
        r"tigon does not go with states in host memory; set generator: transformers, or sharding\.offload: none",
    ),
    "generator with 4 bits under FSDP2": (
        "grpo",
        {
            "post_training": {**OWN["grpo"], "generator": "tigon"},
            "sharding": {"fsdp": True},
            "lora": {"rank": 4, "quantize": True},
        },
        r"tigon does not go with 4-bit weights under FSDP2; set generator: transformers, or sharding\.fsdp: false",
    ),
    "smoothing without effect": (
        "dpo", {"post_training": {"loss_type": "sigmoid", "label_smoothing": 0.1}}, r"label_smoothing has no effect",
    ),
    "no reward function": ("grpo", {"post_training": {"rewards": []}}, r"set post_training\.rewards: module:function"),
    "not a function": ("grpo", {"post_training": {"rewards": ["short"]}}, r"'short' is not module:function"),
    "no such module": (
        "grpo", {"post_training": {"rewards": ["nowhere:short"]}}, r"nowhere:short: the module cannot be imported",
    ),
    "no such function": (
        "grpo", {"post_training": {"rewards": ["my_rewards:long"]}}, r"my_rewards\.py has no function long",
    ),
    "function without columns": (
        "grpo", {"post_training": {"rewards": ["my_rewards:without_columns"]}},
        r"define it as `def without_columns\(completions, \*\*kwargs\)`",
    ),
    "group that does not fit": (
        "grpo", {"post_training": {"generations": 3}}, r"must be a multiple of post_training\.generations",
    ),
    "KL of random weights": ("grpo", {"post_training": {"beta": 0.1}}, r"random weights of a preset are in no file"),
    "no teacher": ("distill", {"post_training": {"base_steps": 0}}, r"needs one teacher"),
    "divergence out of range": ("distill", {"post_training": {"beta": 1.5}}, r"between 0 \(forward KL\) and 1"),
    "one row for KTO": ("kto", {"train": {"batch_size": 1}}, r"train\.batch_size is 1, but kto"),
    "shards of rows": ("dpo", {"sharding": {"gpus": 2, "sequence": 2}}, r"set sharding\.sequence: 1"),
    "bf16 states beside a reference": (
        "dpo", {"train": {"precision": "bf16"}, "sharding": {"zero": 2}}, r"refuses bf16 states; set sharding",
    ),
    "shared prefix of other kernels": (
        "dpo", {"model": {"kernels": "none"}, "post_training": {"shared_prefix": True}},
        r"post_training\.shared_prefix needs model\.kernels: tigon and model\.attention: sdpa",
    ),
    "shared prefix in groups of heads": (
        "dpo", {"train": {"attention_groups": 2}, "post_training": {"shared_prefix": True}}, r"set attention_groups: 1",
    ),
    "shared prefix of distillation": (
        "distill", {"post_training": {"shared_prefix": True}}, r"shared_prefix needs train\.objective: dpo or kto",
    ),
    "comparison": ("dpo", {"comparison": {"steps": 3}}, r"set comparison\.steps: 0"),
    "adapter on the head": ("dpo", {"lora": {"rank": 2, "targets": ["head"]}}, r"leave head out of lora\.targets"),
    "format of text": ("dpo", {"data": {"format": "alpaca"}}, r"data\.format is for text"),
    "text": ("dpo", {"data": {"source": "python-docs"}}, r"python-docs is text, and this objective takes rows"),
    "rows for ordinary training": (
        "dpo", {"train": {"objective": "causal_lm"}, "post_training": {"beta": None, "loss_type": None}},
        r"toy-answers is for post-training",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_recipe_is_refused_with_one_line_and_nothing_is_written(case, recipe, tigon, here):
    objective, more, says = REFUSED[case]
    outcome = tigon("train", recipe(**sections(objective, **more)))
    assert outcome.code == 2 and re.search(says, outcome.err), outcome.err
    assert len(outcome.err.strip().splitlines()) == 1 and not (here / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("sharding.offload", "cpu", "because of states in host memory; sharding.offload: none uses tigon's generator"),
        ("model.kernels", "none", "because of model.kernels; model.kernels: tigon uses tigon's generator"),
    ],
)
def test_auto_says_why_a_gpu_does_not_use_the_generator(key, value, says):
    from tigon.recipe.keys import Recipe
    from tigon.trainer.post_training import trl_trainer

    chosen = Recipe().having({"train.objective": "grpo", "train.precision": "bf16", key: value})
    setup = SimpleNamespace(recipe=chosen, settings=chosen.settings())
    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("cuda")))
    assert trl_trainer._generator(trainer, setup) == f"completions  transformers' generate, {says}"
    trainer.args.device = torch.device("cpu")
    assert trl_trainer._generator(trainer, setup) == ""


@pytest.mark.parametrize("objective", ["grpo", "distill"])
def test_generator_writes_the_completions_and_the_report_says_how_far_it_differs(objective, recipe, tigon, here):
    more = {"post_training": {**OWN[objective], "generator": "tigon", "generation": {"top_p": 0.9}}}
    outcome = tigon("train", recipe(**sections(objective, train={"steps": 2, "eval_steps": 2}, **more)))
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    text = (here / "runs" / "r" / "report.md").read_text(encoding="utf-8")
    assert "TRL's generate: tigon's generator" in text
    train = records(here / "runs" / "r", "train")
    if objective == "grpo":  # TRL's distillation computes no log-probabilities of the sampled tokens
        assert all(0 <= record["sampling/sampling_logp_difference/max"] < 1e-4 for record in train)
        assert "importance ratio" in text


ROWS = {
    "missing column": ("dpo", '{"prompt": "a", "chosen": "b"}', r"rows\.jsonl:2: column 'rejected' is missing \(the "
                       r"row has prompt, chosen\); this objective takes rows with chosen and rejected"),
    "missing label": ("kto", '{"prompt": "a", "completion": "b"}', r"rows\.jsonl:2: column 'label' is missing"),
    "label as text": ("kto", '{"prompt": "a", "completion": "b", "label": "yes"}', r"column 'label' is 'yes'; write"),
    "number": ("dpo", '{"prompt": "a", "chosen": 1, "rejected": "c"}', r":2: column 'chosen' is int; write text or"),
    "empty answer": ("dpo", '{"prompt": "a", "chosen": " ", "rejected": "c"}', r":2: column 'chosen' is empty"),
    "half a message": (
        "dpo", '{"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "c"}',
        r":2: column 'chosen': message 0: content is null, not text",
    ),
    "text and messages": (
        "dpo", '{"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"}',
        r":2: 'chosen' is messages, 'rejected' is text, 'prompt' is text; write all of them as text, or all as",
    ),
    "prompt in some rows": (
        "dpo", '{"chosen": "b", "rejected": "c"}', r":2: column 'prompt' is missing, but rows\.jsonl:1 has it",
    ),
    "too long": ("dpo", json.dumps({"prompt": "a", "chosen": "b " * 200, "rejected": "c"}),
                 r"rows\.jsonl:2: \d+ tokens, over data\.sequence_length 64"),
}  # fmt: skip
FIRST = {
    "dpo": '{"prompt": "a", "chosen": "b", "rejected": "c"}',
    "kto": '{"prompt": "a", "completion": "b", "label": true}',
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_row_is_named_by_file_line_and_column(case, recipe, tigon, here):
    objective, row, says = ROWS[case]
    good = FIRST[objective]
    (here / "rows.jsonl").write_text("\n".join([good, row, *[good] * 20]) + "\n", encoding="utf-8")
    outcome = tigon("train", recipe(**sections(objective, data={"source": "rows.jsonl"})))
    assert outcome.code == 2 and re.search(says, outcome.err), outcome.err
    assert not (here / "runs").exists()


def test_long_rows_are_dropped_and_counted_on_request(recipe, tigon, here):
    long = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c d " * 100})
    (here / "rows.jsonl").write_text("\n".join([long, *[FIRST["dpo"]] * 30, long]) + "\n", encoding="utf-8")
    more = {"data": {"source": "rows.jsonl", "too_long": "drop"}}
    outcome = tigon("train", recipe(**sections("dpo", **more)))
    assert outcome.code == 0 and "2 dropped" in outcome.out, outcome.err
    data = json.loads((here / "runs" / "r" / "data.json").read_text())
    assert data["dropped_rows"] == 2 and data["rows"] == 27


def test_reward_function_with_too_few_numbers_stops_the_run(recipe, tigon, here):
    more = {"post_training": {"rewards": ["my_rewards:too_few"]}}
    outcome = tigon("train", recipe(**sections("grpo", **more)))
    assert outcome.code == 2 and "my_rewards:too_few returned 1 values for 4 completions" in outcome.err


MESSAGES = {
    "prompt": [{"role": "user", "content": "How are you?"}],
    "chosen": [{"role": "assistant", "content": "Well, thank you."}],
    "rejected": [{"role": "assistant", "content": "Go away."}],
}
TEMPLATE = textwrap.dedent("""\
    {%- for message in messages %}<{{ message.role }}> {{ message.content }}{{ eos_token }}{% endfor %}
    {%- if add_generation_prompt %}<assistant> {% endif %}""")


def test_messages_train_with_a_chat_template_and_are_refused_without(recipe, tigon, here):
    (here / "rows.jsonl").write_text("\n".join([json.dumps(MESSAGES)] * 24) + "\n", encoding="utf-8")
    path = recipe(**sections("dpo", data={"source": "rows.jsonl", "max_text_mib": None}))
    outcome = tigon("train", path)
    assert outcome.code == 2 and "rows.jsonl:1: the row has messages, but the tokenizer has no chat" in outcome.err
    from tigon.data.tokenizer import train_bpe

    tokenizer = train_bpe([json.dumps(MESSAGES)] * 3, 400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(here / "tokenizer")
    more = {"data": {"source": "rows.jsonl", "max_text_mib": None, "tokenizer": "tokenizer"}}
    path = recipe(**sections("dpo", **more))
    path.write_text(path.read_text().replace("  vocab_size: 512\n", "", 1), encoding="utf-8")
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    assert records(here / "runs" / "r", "train")[-1]["rewards/margins"] > 0


TEXT_ROWS = {
    "text": ('{"prompt": "Hello", "chosen": "Hi", "rejected": "No"}', "24 of 24 rows are text, to which"),
    "text with the template's tokens": (
        '{"prompt": "<user>Hello<bot>", "chosen": "Hi<eos>", "rejected": "No<eos>"}', None,
    ),
    "messages": (json.dumps(MESSAGES), None),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXT_ROWS)
def test_rows_of_text_on_a_chat_model_are_counted_in_a_warning(case, recipe, tigon, here):
    row, says = TEXT_ROWS[case]
    save(here / "checkpoint")
    (here / "rows.jsonl").write_text("\n".join([row] * 24) + "\n", encoding="utf-8")
    more = {
        "model": {"name": "checkpoint", "config": None},
        "data": {"source": "rows.jsonl", "sequence_length": 128, "vocab_size": 8192, "max_text_mib": None},
        "train": {"steps": 1, "eval_steps": None},
        "output": {"sample_tokens": 0, "save_model": False},
    }
    outcome = tigon("train", recipe(**sections("dpo", **more)))
    assert outcome.code == 0, outcome.err
    warned = [line for line in outcome.out.splitlines() if "chat template" in line and line.startswith("warning")]
    assert len(warned) == (says is not None) and (says is None or says in warned[0])


ONE_REWARD = {**OWN["grpo"], "rewards": ["my_rewards:short"]}


@pytest.mark.parametrize("prompt", ["Hello", [{"role": "user", "content": "Hello"}]], ids=["text", "messages"])
def test_grpo_trains_on_prompts_without_answers(prompt, recipe, tigon, here):
    save(here / "checkpoint")
    (here / "rows.jsonl").write_text("\n".join([json.dumps({"prompt": prompt})] * 24) + "\n", encoding="utf-8")
    more = {
        "model": {"name": "checkpoint", "config": None},
        "data": {"source": "rows.jsonl", "sequence_length": 128, "vocab_size": 8192, "max_text_mib": None},
        "train": {"steps": 1, "eval_steps": None},
        "post_training": ONE_REWARD,
        "output": {"sample_tokens": 4, "save_model": False},
    }
    outcome = tigon("train", recipe(**sections("grpo", **more)))
    assert outcome.code == 0, outcome.err


def test_base_steps_need_answers(recipe, tigon, here):
    row = json.dumps({"prompt": MESSAGES["prompt"]})
    (here / "rows.jsonl").write_text("\n".join([row] * 24) + "\n", encoding="utf-8")
    from tigon.data.tokenizer import train_bpe

    tokenizer = train_bpe([json.dumps(MESSAGES)] * 3, 400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(here / "tokenizer")
    data = {"source": "rows.jsonl", "max_text_mib": None, "tokenizer": "tokenizer", "vocab_size": 8192}
    more = {"data": data, "post_training": {**ONE_REWARD, "base_steps": 2}}
    outcome = tigon("train", recipe(**sections("grpo", **more)))
    assert outcome.code == 2 and "base_steps trains on answers, and no row has one" in outcome.err


def test_base_steps_are_for_random_weights(recipe, tigon, here):
    assert tigon("train", recipe(**sections("dpo", output={"name": "first"}))).code == 0
    more = {"model": {"name": "runs/first/model", "config": None}, "post_training": {"base_steps": 1}}
    outcome = tigon("train", recipe(**sections("dpo", **more)))
    assert outcome.code == 2 and "has trained weights, because it is not a preset" in outcome.err
    more = {"model": {"name": "runs/first/model", "config": None}, "data": {"vocab_size": 8192}}
    assert tigon("train", recipe(**sections("dpo", **more))).code == 0


@pytest.mark.parametrize(
    "objective",
    proved_by(
        ["dpo", "grpo"],
        ["dpo", "grpo", "distill", "reward"],
        "dpo generates nothing, grpo does",
    ),
)
def test_profile_records_the_trainer_of_trl(objective, recipe, tigon, here):
    """The model that is not trained counts as weights, and its passes belong to the forward phase."""
    from tigon.profiler.render import result
    from tigon.profiler.timeline.timeline import PHASES

    outcome = tigon("profile", recipe(**sections(objective)), "--steps", "1", "--out", "p")
    assert outcome.code == 0, outcome.err
    profile = result.read(here / "p" / "profile.json")
    assert list(dict.fromkeys(band.name for band in profile.timeline.bands() if band.step == 1)) == list(PHASES[1:])
    weights = list(map(dict, profile.timeline.live_bytes()))[-1]["weights"]
    copies = {"dpo": 2, "distill": 2}.get(objective, 1)
    model_bytes = 4 * sum(torch.Size(shape).numel() for shape in shapes_of_the_model().values())
    assert 0 <= weights - copies * model_bytes < 4096 * (1 if objective == "reward" else copies)
    assert (here / "p" / "profile.html").stat().st_size > 10_000


def shapes_of_the_model() -> dict[str, tuple[int, ...]]:
    from tigon.recipe.keys import ModelConfig
    from tigon.trainer import model

    return model.parameter_shapes(model.load_config(ModelConfig(name="tigon-demo", config=SHAPE)))


def test_profile_says_why_it_cannot_load_the_reference_of_grpo(recipe, tigon):
    outcome = tigon("profile", recipe(**sections("grpo", post_training={"beta": 0.1, "base_steps": 2})))
    assert "a profile leaves post_training.base_steps out" in outcome.error_line()


PLAN = ("plan", "tigon-demo", "--gpu", "1GiB")
WRONG_PLANS = {
    "unknown objective": (("--objective", "ppo"), "--objective ppo is not one of causal_lm, dpo, kto"),
    "heads as an objective": (("--objective", "medusa"), "use --medusa N"),
    "two objectives": (("--objective", "dpo", "--medusa", "3"), "--medusa 3 trains heads, which --objective dpo does"),
    "key without objective": (("--set", "post_training.beta=1"), "requires a recipe, or --objective with one of dpo"),
    "key of another section": (("--objective", "dpo", "--set", "train.steps=1"), "takes only keys that change it"),
    "unknown key": (("--objective", "dpo", "--set", "post_training.bta=1"), "the nearest key is post_training.beta"),
    "key of another objective": (("--objective", "dpo", "--set", "post_training.teacher=x"), "needs train.objective"),
    "other kernels": (("--objective", "orpo", "--kernels", "none"), "cannot predict post-training with these kernels"),
    "half a group": (("--objective", "grpo", "--batch", "6"), "a multiple of generations, 8"),
    "too long": (("--objective", "grpo", "--seq", "2040"), "completions have up to 64 tokens"),
}


@pytest.mark.parametrize("case", WRONG_PLANS)
def test_wrong_flags_of_a_plan_give_one_line(case, tigon):
    flags, says = WRONG_PLANS[case]
    assert says in tigon(*PLAN, *flags).error_line()


def test_kl_of_grpo_is_against_the_model_after_its_base_steps(recipe, tigon, here):
    more = {"post_training": {"base_steps": 2, "beta": 0.1}}
    outcome = tigon("train", recipe(**sections("grpo", **more)))
    assert outcome.code == 0, outcome.err
    kl = [record["kl"] for record in records(here / "runs" / "r", "train")]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 0


def test_every_objective_has_a_recipe_and_takes_its_keys() -> None:
    folder = Path(__file__).parents[2] / "recipes" / "objectives"
    stems = {path.stem for path in folder.glob("*.yaml")}
    assert stems - set(classify_rules.CLASSIFICATION.names) == set(post_training_rules.TAKES) == set(OWN)


RECIPES = Path(__file__).parents[2] / "recipes" / "objectives"


@pytest.mark.parametrize(
    "objective",
    proved_by(["dpo", "grpo"], OWN, "dpo has keys of its preset, grpo a reward function, and so have others"),
)
def test_recipe_trains_a_checkpoint_by_one_override(objective, tigon, here):
    save(here / "checkpoint")
    shutil.copytree(RECIPES, here / "recipes" / "objectives")
    short = ["train.steps=1", "train.eval_steps=null", "data.sequence_length=128", "output.save_model=false"]
    short += ["post_training.teacher=checkpoint"] if objective == "distill" else []
    path = here / "recipes" / "objectives" / f"{objective}.yaml"
    options = [part for key in ("model.name=checkpoint", *short) for part in ("--set", key)]
    outcome = tigon("train", path, *options)
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if "left out" in line]
    assert "model.config, data.vocab_size" in line and "which only the preset tigon-demo takes" in line
    assert ("post_training.base_steps" in line) == (objective not in ("orpo", "reward"))


@pytest.mark.second_proof("test_objective_trains_... trains with DPO, and tests/losses compares its loss with TRL's")
def test_recipe_of_dpo_learns_to_prefer_polite_answers(tigon, here):
    recipe = Path(__file__).parents[2] / "recipes" / "objectives" / "dpo.yaml"
    outcome = tigon("train", recipe, "--set", "output.save_model=false", "--set", "output.sample_tokens=0")
    assert outcome.code == 0, outcome.err
    first, *_, last = records(here / "runs" / "dpo", "train")
    evaluated = records(here / "runs" / "dpo", "eval")[-1]
    assert first["rewards/margins"] == 0 and last["rewards/margins"] > 1
    assert evaluated["eval_rewards/accuracies"] > 0.95 and evaluated["eval_rewards/margins"] > 1


@pytest.mark.parametrize("rows", [preferences.PAIRS, preferences.UNPAIRED, preferences.PROMPTS])
def test_sums_are_rows_of_each_objective_with_the_right_answer(rows) -> None:
    made = runpy.run_path(str(RECIPES.parent / "sums" / "rows.py"))["rows"](9)
    preferences.check_alike([rows.read(row, f"sums.jsonl:{i}") for i, row in enumerate(made, start=1)])
    assert len({row["prompt"][1]["content"] for row in made}) == 81
    for row in made:
        first, second = map(int, re.findall(r"\d+", row["prompt"][1]["content"]))
        assert row["answer"] == row["chosen"][0]["content"] == str(first + second) != row["rejected"][0]["content"]
        assert row["label"] == (row["completion"] == row["chosen"]) and row["completion"] != row["prompt"]


@pytest.mark.parametrize("rows", [preferences.PAIRS, preferences.UNPAIRED, preferences.PROMPTS])
def test_toy_answers_are_alike_and_the_same_every_time(rows) -> None:
    made = [rows.read(row, where) for where, row in rows.toy_rows()]
    preferences.check_alike(made)
    assert len(made) == 800 and made == [rows.read(row, where) for where, row in rows.toy_rows()]
    assert len({document.texts[0].text for document in made}) > 790


HYBRID = {
    **SHAPE, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("generator", ["tigon", "auto"])
def test_generator_is_refused_for_a_hybrid_model_and_auto_says_why(generator, recipe, tigon, monkeypatch):
    from tigon.trainer.post_training import trl_trainer

    of_trainer = trl_trainer._generator

    def on_a_gpu(trainer, setup):
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.args), "device", torch.device("cuda"))
            return of_trainer(trainer, setup)

    monkeypatch.setattr(trl_trainer, "_generator", on_a_gpu)
    own = {**OWN["grpo"], "generator": generator}
    made = sections("grpo", post_training=own, model={"name": "qwen3.5-0.8b", "config": HYBRID}, train={"steps": 1})
    outcome = tigon("train", recipe(**made))
    why = "it has layers that attend neither to all earlier tokens nor to a window (linear_attention)."
    says = "tigon's generator cannot write this trainer's completions: " + why
    if generator == "tigon":
        assert outcome.code == 2 and f"{says} Set generator: transformers." in outcome.err, outcome.err
    else:
        assert outcome.code == 0, outcome.err
        assert f"completions  transformers' generate, because {says}" in outcome.out


def test_few_prompts_fill_a_step_with_their_completions_or_are_refused(recipe, tigon, here):
    rows = [{"prompt": f"{n} things", "thing": "x"} for n in range(10)]
    (here / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"source": "few.jsonl", "max_text_mib": None, "eval_fraction": 0}
    made = sections("grpo", data=data, train={"steps": 1, "eval_steps": None, "batch_size": 16})
    outcome = tigon("train", recipe(**made), "--set", "train.batch_size=24")
    says = "data.source gives 10 prompts with 2 completions each, fewer than train.batch_size 24"
    assert outcome.code == 2 and f"{says}; lower train.batch_size, or add prompts" in outcome.err, outcome.err
    outcome = tigon("train", recipe(**made))
    assert outcome.code == 0, outcome.err


def test_prompts_kept_for_evaluation_are_named_if_their_completions_would_fill_the_step(recipe, tigon, here):
    rows = [{"prompt": f"{n} things", "thing": "x"} for n in range(12)]
    (here / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"source": "few.jsonl", "max_text_mib": None, "eval_fraction": 0.25}
    path = recipe(**sections("grpo", data=data, train={"steps": 1, "eval_steps": None}))
    advice = "set data.eval_fraction: 0, which adds the 3 kept for evaluation, "
    for batch_size, says in ((24, advice), (26, "")):
        outcome = tigon("train", path, "--set", f"train.batch_size={batch_size}")
        given = f"data.source gives 9 prompts with 2 completions each, fewer than train.batch_size {batch_size}"
        assert outcome.code == 2 and f"{given}; {says}lower train.batch_size, or add prompts" in outcome.err, (
            outcome.err
        )
