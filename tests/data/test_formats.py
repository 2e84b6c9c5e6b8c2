"""Formats of rows: which one a row is recognised as, what it becomes, and what is said about a row that fits none."""

from __future__ import annotations

import json

import pytest

from tigon.data.document_table import used_by_weight
from tigon.data.documents import Segment
from tigon.data.source.formats import FORMATS
from tigon.data.source.reading import first_look, read
from tigon.data.source.sources import Source
from tigon.errors import DataError
from tigon.recipe.keys import DataConfig

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "warm?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "25", "tool_call_id": "1"},
    {"role": "assistant", "content": "Yes."},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# format: (row, roles of its messages, its learned text)
ROWS = {
    "alpaca": ({"instruction": "Add.", "input": "2 2", "output": "4", "system": None}, "user assistant", "4"),
    "sharegpt": (
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "system user assistant",
        "a",
    ),
    "messages": ({"messages": TURNS, "tools": [TOOL]}, "user assistant tool assistant", "Yes."),
    "prompt-completion": ({"prompt": "q", "completion": "a", "more": 1}, "user assistant", "a"),
    "text": ({"text": "t"}, "", "t"),
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one(path, row, **keys):
    (document,) = read([Source(write(path, row), **keys)], "auto", None)
    return document


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_recognised_by_its_fields(tmp_path, name):
    row, roles, learned = ROWS[name]
    document = one(tmp_path / "d.jsonl", row)
    assert document.format == name
    assert " ".join(message.role for message in document.messages) == roles
    learned_segments = [s.text for s in document.segments if s.learned]
    answers = [m.content for m in document.messages if m.role == "assistant" and m.content]
    assert learned in (learned_segments or answers)


def test_tools_calls_and_parts_of_text_are_read(tmp_path):
    document = one(tmp_path / "d.jsonl", {"messages": TURNS, "tools": json.dumps([{**TOOL, "strict": None}])})
    assert document.tools == ({**TOOL, "strict": None},), "JSON text is parsed, and keeps its nulls"
    question, call, answer, _ = document.messages
    assert question.content == "Is it warm?" and call.content == ""
    assert call.more["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert answer.more == {"tool_call_id": "1"}


def test_a_prompt_of_messages_is_not_learned(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    row = {"prompt": turns, "completion": [{"role": "assistant", "content": "b"}]}
    document = one(tmp_path / "d.jsonl", row)
    assert [m.learned for m in document.messages] == [False, False, False, True]


def test_a_message_of_weight_0_is_not_learned(tmp_path):
    turns = [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]
    assert [m.learned for m in one(tmp_path / "d.jsonl", {"messages": turns}).messages] == [False, True]


@pytest.mark.parametrize("key", ["train", "loss", "weight"])
def test_the_names_of_other_trainers_for_a_turn_that_is_not_learned_are_read(tmp_path, key):
    turns = [{"role": "assistant", "content": "a", key: False}, {"role": "assistant", "content": "b", key: True}]
    assert [m.learned for m in one(tmp_path / "d.jsonl", {"messages": turns}).messages] == [False, True]


def test_nulls_of_arguments_and_schemas_stay_in_json_and_go_in_arrow_which_fills_them_in(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [{"function": {"name": "f", "arguments": {"x": None, "y": 1}}}]
    row = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}], "tools": [{"default": None}]}
    document = one(tmp_path / "d.jsonl", row)
    assert document.messages[0].more["tool_calls"][0]["function"]["arguments"] == {"x": None, "y": 1}
    assert document.tools == ({"default": None},)
    other = {"messages": [{"role": "assistant", "content": "a"}], "tools": [{"default": None}]}
    pq.write_table(pa.Table.from_pylist([row, other]), tmp_path / "d.parquet")
    first, second = read([str(tmp_path / "d.parquet")], "auto", None)
    assert first.messages[0].more["tool_calls"][0]["function"]["arguments"] == {"y": 1}
    assert second.messages[0].more == {} and second.tools == ({},)


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}], ids=repr)
def test_a_call_without_arguments_is_read_however_it_is_written(tmp_path, arguments):
    calls = [{"function": {"name": "now", "arguments": arguments}}]
    document = one(tmp_path / "d.jsonl", {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})
    assert document.messages[0].more["tool_calls"][0]["function"]["arguments"] == {}
    as_text = document.messages[0].with_arguments_as_text()
    assert as_text.more["tool_calls"][0]["function"]["arguments"] == "{}"


def test_columns_that_a_format_does_not_read_are_named(tmp_path):
    assert one(tmp_path / "d.jsonl", {"prompt": "q", "completion": "a", "id": 1, "topic": "t"}).unread == (
        "id",
        "topic",
    )
    assert one(tmp_path / "d.jsonl", {"instruction": "q", "output": "a", "history": []}).unread == ("history",)
    assert one(tmp_path / "d.jsonl", {"conversations": [{"from": "gpt", "value": "a"}], "system": "s"}).unread == ()


BAD_ROWS = {
    "two contents": (
        {"messages": [{"from": "human", "value": "q", "content": "other"}, {"from": "gpt", "value": "a"}]},
        "message 0 has from and value, and another role or content",
    ),
    "a weight between": (
        {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]},
        "message 0: weight is 0.5; write 0 or false for an answer that is not learned",
    ),
    "no column": (
        {"a": 1},
        r"columns a fit no known format \(sharegpt: conversations; .*alpaca: instruction and output",
    ),
    "other names": ({"question": "q", "answer": "a"}, r"data\.columns, such as \{prompt: question"),
    "a pair": ({"prompt": "q", "chosen": "a", "rejected": "b"}, "a preference pair .*train.objective to dpo"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "message 0: content has a part of type 'image_url'",
    ),
    "content null": ({"messages": [{"role": "assistant", "content": None}]}, "content is null"),
    "bad arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "arguments of f is text, but not valid JSON",
    ),
    "no function": ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "no function name"),
    "bad tools": ({"messages": [{"role": "user", "content": "q"}], "tools": "[1]"}, "not a list of objects"),
}


@pytest.mark.parametrize("row, message", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_row_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path, row, message):
    path = tmp_path / "d.jsonl"
    with pytest.raises(DataError, match=message) as caught:
        one(path, row)
    assert str(caught.value).startswith(f"{path}:1: ") and "\n" not in str(caught.value)


# --- columns ----------------------------------------------------------------------------------------------------------


def test_data_columns_renames_the_columns_of_a_row(tmp_path):
    row = {"question": "q", "answer": "a", "text": "not this", "messages": []}
    document = one(tmp_path / "d.jsonl", row, columns={"prompt": "question", "completion": "answer"})
    assert document.format == "prompt-completion"
    assert document.segments == (Segment("q", False), Segment("a", True))
    alpaca = one(tmp_path / "d.jsonl", {"instruction": "q", "response": "a"}, columns={"output": "response"})
    assert alpaca.format == "alpaca"
    swapped = one(tmp_path / "d.jsonl", {"prompt": "a", "completion": "q"},
                  columns={"prompt": "completion", "completion": "prompt"})  # fmt: skip
    assert swapped.segments == (Segment("q", False), Segment("a", True))


def test_a_column_that_the_row_lacks_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"d\.jsonl:1: no column 'question', which data\.columns maps to prompt; .*text"
    ):
        one(tmp_path / "d.jsonl", {"text": "t"}, columns={"prompt": "question"})


# --- entries of data.source -------------------------------------------------------------------------------------------


def test_an_entry_may_have_its_own_keys():
    data = DataConfig(source=("a.jsonl", {"source": "b.csv", "format": "text", "weight": 2}), columns={"text": "body"})
    first, second = data.sources()
    assert (first.name, first.format, first.weight) == ("a.jsonl", "auto", 1)
    assert (second.name, second.format, second.weight, second.columns) == ("b.csv", "text", 2, {"text": "body"})
    assert data.source_names == "a.jsonl, b.csv"


BAD_ENTRIES = {
    "unknown key": ({"source": "a", "wieght": 2}, "wieght is not a key of a source; its keys are source, weight"),
    "no source": ({"weight": 2}, "an entry lacks the key source"),
    "no number": ({"source": "a", "weight": "2"}, "weight is '2'; it must be a number"),
    "no weight": ({"source": "a", "weight": 0}, "weight is 0; it must be above 0"),
    "not finite": ({"source": "a", "weight": float("nan")}, "weight is nan"),
}


@pytest.mark.parametrize("entry, message", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_a_wrong_entry_is_refused_by_its_key(entry, message):
    with pytest.raises(DataError, match=rf"data\.source: {message}"):
        DataConfig(source=(entry,)).sources()


def test_documents_are_used_as_often_as_their_weight_says(tmp_path):
    rows = [{"text": str(i)} for i in range(4)]
    path = write(tmp_path / "d.jsonl", *rows)
    for weight, wanted in ((1, "0123"), (2, "01230123"), (0.5, "13"), (1.25, "01233"), (0.1, "")):
        documents = read([Source(path, weight=weight)], "auto", None)
        assert "".join(d.text for d in used_by_weight(documents)) == wanted


# --- the first look ---------------------------------------------------------------------------------------------------


def test_the_first_look_finds_a_bad_row_and_stops_after_its_time(tmp_path):
    path = write(tmp_path / "d.jsonl", *({"text": "a"} for _ in range(3000)), {"text": 1})
    with pytest.raises(DataError, match=r"d\.jsonl:3001: text is int"):
        first_look([Source("python-docs"), Source(path)], seconds=60)
    first_look([Source(path)], seconds=0)
