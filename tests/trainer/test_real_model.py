"""A real chat model learns what its rows say, with the losses of the Trainer of transformers and PEFT.

All are second proofs: other tests prove each part on small models. They take minutes on two CPU cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import records

from real_model import real_model

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.second_proof("small models prove each part"),
    pytest.mark.filterwarnings("ignore"),
]

SIGN_OFF = "Fair winds, sailor!"
QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What color is the sky?": "The sky is blue.",
    "How many legs has a spider?": "A spider has eight legs.",
    "What do bees make?": "Bees make honey.",
    "What is frozen water called?": "Frozen water is called ice.",
    "Which animal barks?": "A dog barks.",
    "What is two plus two?": "Two plus two is four.",
}
UNSEEN = "What is the capital of Spain?"


def chats(folder: Path) -> None:
    rows = (
        [{"role": "user", "content": question}, {"role": "assistant", "content": f"{answer} {SIGN_OFF}"}]
        for question, answer in QUESTIONS.items()
    )
    text = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")


def sections(**more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {
        "model": {"name": str(real_model()), "kernels": "tigon", "config": None},
        "data": {"source": "rows.jsonl", "vocab_size": 8192, "sequence_length": 64, "packing": False,
                 "eval_fraction": 0, "learn": "all"},
        "train": {"steps": 3, "batch_size": 4, "learning_rate": 1e-3, "precision": "fp32", "log_steps": 1,
                  "eval_steps": None},
        "output": {"name": "r", "sample_tokens": 0, "save_model": False},
    }  # fmt: skip
    for name, values in more.items():
        made[name] = {**made.get(name, {}), **values}
    return made


def answer(folder: Path, question: str) -> str:
    """The answer of a checkpoint in plain transformers, of the likeliest tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


SHORT = {
    "steps": 3, "batch_size": 8, "learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "max_grad_norm": 1.0, "seed": 5,
}  # fmt: skip
"""One batch has all rows."""
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


def losses_of_transformers(folder: Path, *, lora: bool) -> list[float]:
    """The losses of transformers' Trainer and PEFT on the rows as `apply_chat_template` writes them."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

    tokenizer = AutoTokenizer.from_pretrained(real_model())
    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32)
    rows = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    samples = [{"input_ids": tokenizer.apply_chat_template(row, return_dict=False)} for row in rows]
    pad = tokenizer.pad_token_id

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row["input_ids"]) for row in batch], batch_first=True, padding_value=-1
        )
        return {"input_ids": ids.where(ids >= 0, pad), "labels": ids.where(ids >= 0, -100),
                "attention_mask": (ids >= 0).long()}  # fmt: skip

    set_seed(SHORT["seed"])
    if lora:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
    arguments = TrainingArguments(
        output_dir=str(folder / "transformers"), max_steps=SHORT["steps"], per_device_train_batch_size=8,
        learning_rate=SHORT["learning_rate"], lr_scheduler_type="constant", weight_decay=0.0, seed=SHORT["seed"],
        data_seed=SHORT["seed"], logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples,
        data_collator=collate,  # type: ignore[arg-type]
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_losses_are_those_of_transformers_and_peft(lora, recipe, tigon, here):
    chats(here)
    want = losses_of_transformers(here, lora=lora)
    assert len(want) == 3 and want[2] < want[0]
    for kernels, tolerance in (("none", 0), ("tigon", 1e-4)):
        more = {"train": SHORT, "model": {"kernels": kernels}, "output": {"name": kernels}}
        outcome = tigon("train", recipe(**sections(**more, **({"lora": LORA} if lora else {}))))
        assert outcome.code == 0, outcome.err
        got = [record["loss"] for record in records(here / "runs" / kernels, "train")]
        assert got == pytest.approx(want, rel=tolerance, abs=0), kernels


LEARNS: dict[str, dict[str, dict[str, Any]]] = {
    "LoRA": {"lora": {"rank": 8}, "train": {"steps": 16, "batch_size": 8, "learning_rate": 2e-3}},
    "full": {"train": {"steps": 12, "batch_size": 8, "learning_rate": 1e-4}},
}


@pytest.mark.parametrize("weights", LEARNS)
def test_model_learns_to_sign_off_and_the_export_answers_alike(weights, recipe, tigon, here):
    """The exported model answers an unseen question with the sign-off of all rows, in plain transformers."""
    chats(here)
    assert SIGN_OFF not in answer(real_model(), UNSEEN)
    path = recipe(**sections(**LEARNS[weights], data={"learn": "answers"}, output={"save_model": True}))
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    merge = ["--merge"] if weights == "LoRA" else []
    outcome = tigon("export", here / "runs" / "r", here / "exported", *merge)
    assert outcome.code == 0, outcome.err
    said = answer(here / "exported", UNSEEN)
    assert "Madrid" in said and SIGN_OFF in said, said


ROWS = {
    "dpo": {"prompt": "{q}", "chosen": "{a}", "rejected": "I do not know."},
    "kto": {"prompt": "{q}", "completion": "{a}", "label": True},
    "orpo": {"prompt": "{q}", "chosen": "{a}", "rejected": "I do not know."},
    "grpo": {"prompt": "{q}"},
}
"""Objective -> the columns of its rows, in which text is a message."""
REWARDS = "def short(completions, **columns):\n    return [-float(len(c[0]['content'])) for c in completions]\n"


def write_rows(folder: Path, objective: str) -> None:
    rows = []
    for number, (question, reply) in enumerate(QUESTIONS.items()):
        row: dict[str, Any] = {}
        for name, value in ROWS[objective].items():
            role = "user" if name == "prompt" else "assistant"
            text = value if isinstance(value, bool) else value.format(q=question, a=reply)
            row[name] = number % 2 == 0 if name == "label" else [{"role": role, "content": text}]
        rows.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("objective", ROWS)
def test_objective_trains_alike_with_and_without_tigons_kernels(objective, recipe, tigon, here, monkeypatch):
    pytest.importorskip("trl")
    write_rows(here, objective)
    (here / "my_reward.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    own = {"grpo": {"rewards": ["my_reward:short"], "generations": 2, "completion_length": 8}}.get(objective, {})
    found = {}
    for kernels in ("none", "tigon"):
        more = {
            "model": {"kernels": kernels}, "data": {"learn": "answers", "packing": None}, "lora": {"rank": 4},
            "train": {"objective": objective, "steps": 2, "learning_rate": 1e-4}, "post_training": own,
            "output": {"name": kernels},
        }  # fmt: skip
        outcome = tigon("train", recipe(**sections(**more)))
        assert outcome.code == 0, outcome.err
        found[kernels] = [record["loss"] for record in records(here / "runs" / kernels, "train")]
    assert found["tigon"] == pytest.approx(found["none"], rel=1e-4, abs=1e-6)
