"""Files of rows: what each kind of file gives, and that a malformed row is named by file, line and column."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tigon.data.documents import BadRows
from tigon.data.source.reading import first_look, read
from tigon.data.source.rows import READERS, read_rows
from tigon.data.source.sources import SUFFIXES, Source
from tigon.errors import DataError

ROWS = [{"prompt": "one, two", "completion": "a\nb"}, {"prompt": "é🙂", "completion": 'say "c"'}]
AS_TEXT = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".ndjson": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS, indent=1),
    ".csv": 'prompt,completion\n"one, two","a\nb"\né🙂,"say ""c"""\n',
    ".tsv": 'prompt\tcompletion\none, two\t"a\nb"\né🙂\t"say ""c"""\n',
}


def rows_of(path, bad=None):
    return list(read_rows(path, (bad or BadRows()).take))


def write_parquet(path, rows):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("suffix", AS_TEXT)
def test_every_kind_of_text_file_gives_the_same_rows(tmp_path, suffix, mark):
    path = tmp_path / f"d{suffix}"
    path.write_text(mark + AS_TEXT[suffix], encoding="utf-8")
    assert [row for _, row in rows_of(path)] == ROWS


def test_a_parquet_file_gives_its_rows_with_their_numbers(tmp_path):
    path = tmp_path / "d.parquet"
    write_parquet(path, ROWS * 800)
    found = rows_of(path)
    assert [row for _, row in found] == ROWS * 800
    assert found[-1][0] == f"{path}:1600"


def test_every_kind_of_file_has_a_test_and_is_found_in_folders():
    assert set(READERS) == {*AS_TEXT, ".parquet"} and set(READERS) < set(SUFFIXES)


@pytest.mark.parametrize("suffix", [".JSONL", ".Json", ".CSV", ".TSV", ".NDJSON"])
def test_a_suffix_in_capitals_names_the_same_kind_of_file(tmp_path, suffix):
    path = tmp_path / f"d{suffix}"
    path.write_text(AS_TEXT[suffix.lower()], encoding="utf-8")
    for source in (path, tmp_path):
        assert [document.format for document in read([str(source)], "auto", None)] == ["prompt-completion"] * 2


@pytest.mark.parametrize("name", ["d.jsonl.bak", "d.xlsx", "d"])
def test_an_unknown_suffix_is_refused_and_not_read_as_text(tmp_path, name):
    path = tmp_path / name
    path.write_text(AS_TEXT[".jsonl"], encoding="utf-8")
    for look in (lambda source: read([source], "auto", None), lambda source: first_look([source])):
        with pytest.raises(DataError, match=r"does not say what the file holds; rename it .* set data\.format: text"):
            look(Source(str(path)))
    (document,) = read([Source(str(path), format="text")], "auto", None)
    assert document.text == AS_TEXT[".jsonl"]
    assert len(read([Source(str(path), format="prompt-completion")], "auto", None)) == 2


def test_rows_of_a_json_list_have_the_lines_on_which_they_begin(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('[\n {"text": "a",\n  "n": 1},\n\n {"text": "b"}, {"text": "c"}\n]\n', encoding="utf-8")
    assert [where for where, _ in rows_of(path)] == [f"{path}:{line}" for line in (2, 5, 5)]


def test_a_json_file_may_hold_objects_without_a_list(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{\n"text": "c"\n}\n', encoding="utf-8")
    assert [where for where, _ in rows_of(path)] == [f"{path}:{line}" for line in (1, 2, 3)]


@pytest.mark.parametrize("text", ["", "[]", " [ ] \n", "\n"])
def test_a_json_file_may_be_empty(tmp_path, text):
    (tmp_path / "d.json").write_text(text, encoding="utf-8")
    assert rows_of(tmp_path / "d.json") == []


# file name, content, line, message
MALFORMED = {
    "json: broken row": ("d.json", b'[\n{"text": "a"},\n{"text": }\n]', 3, "not valid JSON at column 10"),
    "json: no comma": ("d.json", b'[{"text": "a"}\n {"text": "b"}]', 2, "at column 2: Expecting ',' or ']'"),
    "json: comma at the end": ("d.json", b'[{"text": "a"},\n]', 2, "at column 1: Expecting a row"),
    "json: cut off": ("d.json", b'[{"text": "a"},\n{"te', 2, "at column 2: Unterminated string"),
    "json: list never closed": ("d.json", b'[{"text": "a"}\n', 2, "at column 1: Expecting ',' or ']'"),
    "json: text behind": ("d.json", b'[{"text": "a"}]\nx', 1, "after the list's closing bracket"),
    "json: number": ("d.json", b"[{}, \n7]", 2, "a row is a JSON object, not int"),
    "json: one number": ("d.json", b"7", 1, "a row is a JSON object, not int"),
    "json: deep": ("d.json", b"[" * 200_000, 1, "nested too deeply"),
    "json: long number": ("d.json", b'[{"a": ' + b"1" * 5000 + b"}]", 1, "not a JSON row"),
    "json: not UTF-8": ("d.json", b'[{"text": "\xff"}]', None, r"not UTF-8 text \(byte 11\)"),
    "jsonl: a list": ("d.jsonl", b'[{"text": "a"}]', 1, r"not list; name a file with one list of rows \.json"),
    "csv: too many fields": ("d.csv", b"text,n\na,1\nb,2,3\n", 3, "3 fields, but the header has 2 columns"),
    "csv: too few fields": ("d.csv", b'text,n\n"a\nb",1\nc\n', 4, "1 fields, but the header has 2"),
    "csv: open quote": ("d.csv", b'text,n\na,"1\nb,2\n', 2, "not valid CSV: unexpected end of data"),
    "csv: text behind a quote": ("d.csv", b'text\n"a"b\n', 2, "not valid CSV"),
    "csv: not UTF-8": ("d.csv", b"text\na\n\xe9\n", 3, r"not UTF-8 text \(byte 0 of the line\)"),
    "csv: a column twice": ("d.csv", b"text,text\na,b\n", 1, "names column 'text' twice"),
    "parquet: another file": ("d.parquet", b"PAR1 nothing", None, "not a readable parquet file"),
    "parquet: empty": ("d.parquet", b"", None, "not a readable parquet file"),
}


@pytest.mark.parametrize("name, content, line, message", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, name, content, line, message):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        rows_of(path)
    where = path if line is None else f"{path}:{line}"
    assert str(caught.value).startswith(f"{where}: ") and "\n" not in str(caught.value)


def test_rows_around_a_malformed_one_are_read_if_bad_rows_are_skipped(tmp_path):
    bad = BadRows("skip")
    path = tmp_path / "d.csv"
    path.write_bytes(b"text,n\na,1\nb,2,3\n\xe9,4\nc,5\n")
    assert [row["text"] for _, row in rows_of(path, bad)] == ["a", "c"]
    path = tmp_path / "d.json"
    path.write_bytes(b'[{"text": "a"}, 7, {"text": "b"}, {"text": }, {"text": "c"}]')
    assert [row["text"] for _, row in rows_of(path, bad)] == ["a", "b"], "rows behind broken JSON cannot be told apart"
    assert len(bad.problems) == 4


@pytest.mark.parametrize("suffix", READERS)
def test_only_regular_files_are_read(tmp_path, suffix):
    fifo = tmp_path / f"d{suffix}"
    os.mkfifo(fifo)
    with pytest.raises(DataError, match="a named pipe"):
        read([str(fifo)], "auto", None)
    with pytest.raises(DataError, match="a named pipe"):
        read([str(tmp_path)], "auto", None)
    fifo.unlink()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"d{suffix}").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="a link out of the folder"):
        read([str(tmp_path / "in")], "auto", None)


def test_a_folder_of_rows_is_read_without_the_files_that_describe_it(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}]', encoding="utf-8")
    (tmp_path / "b.csv").write_text("text\nb\n", encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text('{"features": 1}', encoding="utf-8")
    write_parquet(tmp_path / "c.parquet", [{"text": "c"}])
    assert [document.text for document in read([str(tmp_path)], "auto", None)] == ["a", "b", "c"]


def _malformed(kind: str, folder: Path) -> tuple[Path, str]:
    """A file of 3,000 rows whose row 2,001 is wrong, and where the error is."""
    rows = [{"prompt": f"q {i}", "completion": f"a {i}"} for i in range(3000)]
    lines, table = [json.dumps(row) for row in rows], ["prompt,completion", *(f"q {i},a {i}" for i in range(3000))]
    file = folder / kind.split("-")[0]
    if kind == "rows.jsonl":
        lines[2000] = lines[2000][:-1]
        file.write_text("\n".join(lines), encoding="utf-8")
        return file, f"{file}:2001: not valid JSON at column {len(lines[2000]) + 1}:"
    if kind == "rows.jsonl-type":
        lines[2000] = json.dumps({**rows[2000], "completion": 5})
        file.write_text("\n".join(lines), encoding="utf-8")
        return file, f"{file}:2001: completion is int"
    if kind == "rows.json":
        lines[2000] = lines[2000].replace(",", "")
        file.write_text("[" + ",\n".join(lines) + "]", encoding="utf-8")
        column = lines[2000].index('"completion"') + 1
        return file, f"{file}:2001: not valid JSON at column {column}:"
    if kind == "rows.csv":
        table[2001] = "q, with a comma, and another"
        file.write_text("\n".join(table), encoding="utf-8")
        return file, f"{file}:2002: 3 fields, but the header has 2 columns"
    if kind == "rows.csv-quotes":
        table[2001] = '"q" x,a'
        file.write_text("\n".join(table), encoding="utf-8")
        return file, f"{file}:2002: not valid CSV"
    import pyarrow as pa
    import pyarrow.parquet as pq

    answers = [None if i == 2000 else f"a {i}" for i in range(3000)]
    pq.write_table(pa.table({"prompt": [row["prompt"] for row in rows], "completion": answers}), file)
    return file, f"{file}:2001: completion is null"


@pytest.mark.parametrize(
    "kind", ["rows.jsonl", "rows.jsonl-type", "rows.json", "rows.csv", "rows.csv-quotes", "rows.parquet"]
)
def test_the_first_look_names_a_malformed_row_by_file_line_and_column(kind: str, tmp_path: Path) -> None:
    if kind == "rows.parquet":
        pytest.importorskip("pyarrow")
    file, words = _malformed(kind, tmp_path)
    with pytest.raises(DataError) as error:
        first_look([Source(str(file))], seconds=60)
    assert str(error.value).startswith(words)
