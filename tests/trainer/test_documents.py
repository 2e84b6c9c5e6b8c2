"""Files to documents: every layout, every refusal with its file and line, and what is held out."""

from __future__ import annotations

import errno
import io
import json
import os
from unittest import mock

import pytest

from tigon.data.document_table import Documents, split_eval
from tigon.data.documents import BadRows, Segment
from tigon.data.source.reading import read
from tigon.data.source.sources import BUILT_IN
from tigon.errors import DataError


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one(path, *rows, layout="auto"):
    (document,) = read([jsonl(path, *rows)], layout, None)
    return document


def test_layouts_are_recognised_by_their_keys(tmp_path):
    prompt = one(tmp_path / "p.jsonl", {"prompt": "2+2=", "completion": "4"})
    assert prompt.segments == (Segment("2+2=", False), Segment("4", True))
    alpaca = one(tmp_path / "a.jsonl", {"instruction": "Add.", "input": "2 2", "output": "4"})
    assert alpaca.segments[0].text.endswith("### Response:\n") and "2 2" in alpaca.segments[0].text
    assert [s.learned for s in alpaca.segments] == [False, True] and alpaca.segments[1].text == "4"
    text = one(tmp_path / "t.jsonl", {"text": "hello", "source": 3})
    assert text.segments == (Segment("hello", True),) and text.is_text and not prompt.is_text
    openai = one(
        tmp_path / "m.jsonl", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    )
    sharegpt = one(
        tmp_path / "s.jsonl", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    )
    assert openai.messages == sharegpt.messages and [m.role for m in openai.messages] == ["user", "assistant"]


def test_a_document_knows_its_file_and_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    assert [d.origin for d in read([str(path)], "auto", None)] == [f"{path}:1", f"{path}:3"]


GOOD = b'{"prompt": "p", "completion": "c"}\n'
BAD_ROWS = {
    "broken JSON": (b'{"prompt": "p", "completion": \n', "not valid JSON at column"),
    "not an object": (b"[1, 2]\n", "a row is a JSON object"),
    "other keys": (b'{"prompt": "p", "answer": "c"}\n', "needs prompt and completion"),
    "number for text": (b'{"prompt": "p", "completion": 4}\n', "completion is int, not text"),
    "empty answer": (b'{"prompt": "p", "completion": " "}\n', "nothing to learn from"),
    "not UTF-8": (b'{"prompt": "\xff", "completion": "c"}\n', "not UTF-8"),
    "deep JSON": (b"[" * 200_000 + b"\n", "nested too deeply"),
    "long number": (b'{"prompt": ' + b"1" * 5000 + b"}\n", "not a JSON row"),
}


@pytest.mark.parametrize("line, message", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b"\n" + line + GOOD)
    with pytest.raises(DataError, match=message) as caught:
        read([str(path)], "auto", None)
    assert str(caught.value).startswith(f"{path}:3: ") and "\n" not in str(caught.value)


def test_skipped_rows_are_named_and_good_rows_are_kept(tmp_path):
    path, bad = tmp_path / "d.jsonl", BadRows("skip")
    path.write_bytes(GOOD.join([b"", *(line for line, _ in BAD_ROWS.values()), b""]))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"one\ntwo \xe9\n")
    found = read([str(path), str(latin)], "auto", None, bad)
    assert [d.origin for d in found] == [f"{path}:{n}" for n in range(1, 2 * len(BAD_ROWS) + 2, 2)]
    assert len(bad.problems) == len(BAD_ROWS) + 1
    for number, (said, (_, message)) in enumerate(zip(bad.problems, BAD_ROWS.values(), strict=False)):
        assert said.startswith(f"{path}:{2 * number + 2}: ") and message in said
    assert bad.problems[-1].startswith(f"{latin}:2: not UTF-8")
    path.write_bytes(b"".join(line for line, _ in BAD_ROWS.values()))
    with pytest.raises(DataError, match=r"no text in these files.*; \d+ rows were left out, the first: .*d\.jsonl:1"):
        read([str(path)], "auto", None, BadRows("skip"))


BAD_CHATS = {
    "no list": ({"messages": "hi"}, "not a list of turns"),
    "no turn": ({"messages": []}, "not a list of turns"),
    "turn that is text": ({"messages": ["hi"]}, "message 0 is str"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "role 'wizard'"),
    "no content": ({"messages": [{"role": "user"}]}, "content is null"),
    "no assistant": ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn from"),
}


@pytest.mark.parametrize("row, message", BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_a_bad_chat_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        one(tmp_path / "c.jsonl", row)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt: no such file"):
        read([str(tmp_path / "none.txt")], "auto", None)
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.txt: no text in these files"):
        read([str(tmp_path / "empty.txt")], "auto", None)
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(DataError, match=r"latin\.txt:2: not UTF-8"):
        read([str(tmp_path / "latin.txt")], "auto", None)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="in this folder"):
        read([str(tmp_path / "folder")], "auto", None)
    (tmp_path / "x.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.json: no text in these files"):
        read([str(tmp_path / "x.json")], "auto", None)


def test_a_folder_is_read_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.md", "c.bin"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert [d.text for d in read([str(tmp_path)], "auto", None)] == ["a.md", "b.txt"]


def test_the_built_in_text_is_large_stable_and_cut_at_its_limit():
    some = read([BUILT_IN], "auto", 1.0)
    assert [d.origin for d in some] == [d.origin for d in read([BUILT_IN], "auto", 1.0)]
    n_bytes = sum(len(d.text.encode()) for d in some)
    assert 0.8 * 2**20 < n_bytes <= 2**20
    assert some[0].origin.startswith("pydoc_data.topics[") and some[-1].origin.endswith(".py")


def test_whole_documents_are_held_out_evenly_and_none_is_in_both():
    everything = Documents.of_texts((str(i), f"{i}\n") for i in range(100))
    kept, held = split_eval(everything, 0.05)
    assert len(held) == 5 and not {d.origin for d in kept} & {d.origin for d in held}
    assert sorted([*kept, *held], key=lambda d: int(d.origin)) == list(everything)
    assert [int(d.origin) // 20 for d in held] == [0, 1, 2, 3, 4]
    assert [list(part) for part in split_eval(everything, 0)] == [list(everything), []]


def test_a_single_text_has_its_tail_held_out_at_a_line_break():
    (whole,) = documents = Documents.of_texts([("a", "".join(f"line {i}\n" for i in range(100)))])
    (kept,), (held,) = split_eval(documents, 0.1)
    assert kept.text + held.text == whole.text and held.text.startswith("line ") and 5 < held.text.count("\n") < 15


def test_a_single_document_that_cannot_be_split_is_refused(tmp_path):
    row = {"prompt": "p", "completion": "c"}
    with pytest.raises(DataError, match=r"d\.jsonl:1: .* set data.eval_source"):
        split_eval(read([jsonl(tmp_path / "d.jsonl", row)], "auto", None), 0.1)


@pytest.mark.parametrize("name", ["rows.jsonl", "text.txt"])
def test_file_that_cannot_be_opened_or_read_is_refused_with_the_reason(tmp_path, monkeypatch, name):
    """As one without permission, or on a disk that fails."""
    path = tmp_path / name
    path.write_text('{"text": "a"}\n', encoding="utf-8")

    class Failing(io.FileIO):
        def readline(self, *size):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        read = __next__ = readline

    for opened in (
        mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")),
        Failing,
    ):
        with monkeypatch.context() as patch:
            for module in ("reading", "rows"):
                patch.setattr(f"tigon.data.source.{module}.open_regular", opened)
            with pytest.raises(
                DataError, match=rf"{name}: cannot be read: (Permission denied|Input/output error); fix"
            ):
                read([str(path)], "auto", None)
