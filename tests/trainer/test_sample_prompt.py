"""The report's text sample continues a row's prompt, up to where the answer begins; of text, the first tokens."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoint import save

from tigon.data.tokenizer import IGNORE_INDEX
from tigon.trainer.evaluation.prompts import TEXT_TOKENS, prompt_of

TEXT = (list(range(100)), [IGNORE_INDEX, *range(1, 100)])


def row(n_read: int) -> tuple[list[int], list[int]]:
    return [*range(n_read), 7, 7], [IGNORE_INDEX] * n_read + [7, 7]


def test_prompt_ends_where_the_first_answer_begins():
    assert prompt_of([row(40), row(3)], None) == list(range(40))


def test_a_row_without_an_answer_is_all_prompt():
    assert prompt_of([(list(range(40)), [IGNORE_INDEX] * 40)], None) == list(range(40))


def test_prompt_of_text_is_its_first_tokens():
    assert prompt_of([TEXT], 100) == list(range(TEXT_TOKENS))


def test_prompt_leaves_room_for_the_answer():
    assert prompt_of([row(40), row(9), row(3)], 10) == list(range(9))
    assert prompt_of([row(60), row(50)], 30) == list(range(30, 60))
    assert len(prompt_of([TEXT], 10)) == TEXT_TOKENS  # the run is refused, as output.sample_tokens leaves too little


@pytest.mark.parametrize("data", [{}, {"packing": True}, {"learn": "all"}], ids=["apart", "packed", "all learned"])
def test_text_sample_of_a_chat_is_the_whole_question_with_the_template(data, here, recipe, tigon):
    question = "Name the capital of the country in the Andes, please."
    chat = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Lima"}]}
    (here / "my.jsonl").write_text(f"{json.dumps(chat)}\n" * 16, encoding="utf-8")
    save(here / "m")
    path = recipe(
        model={"name": "m", "config": None},
        data={"source": "my.jsonl", "sequence_length": 128, "vocab_size": 8192, "eval_fraction": 0, **data},
        train={"steps": None, "epochs": 1, "batch_size": 2},
    )  # fmt: skip
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    summary = json.loads((here / "runs" / "r" / "summary.json").read_text(encoding="utf-8"))
    assert summary["sample"]["prompt"] == f"<user>{question}<bot>"
