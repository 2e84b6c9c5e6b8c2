"""Documents and tokens in Arrow files: they are read from the cache by the next run with the same data, never with
other data, and in other processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tigon.data import cache, preferences, tokenizer, tokens
from tigon.data.chat.chat_template import Rendering
from tigon.data.document_table import Documents
from tigon.data.documents import BadRows
from tigon.data.packing import pack
from tigon.data.source.reading import read
from tigon.data.source.sources import Source
from tigon.data.tokens import Encoder, Tokens
from tigon.errors import DataError

pytest.importorskip("tokenizers")
pytest.importorskip("datasets")
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
ROWS = {
    "a.jsonl": [{"text": "one two three"}, {"text": "four five"}],
    "b.jsonl": [{"prompt": "ask ", "completion": "answer"}],
    "c.jsonl": [{"messages": CHAT}],
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write(folder: Path, rows: dict[str, list[Any]] = ROWS) -> str:
    folder.mkdir(exist_ok=True)
    for name, of_file in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in of_file), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def bpe() -> Any:
    return tokenizer.train_bpe(["one two three four five", "ask answer hello good day user assistant"], 300)


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    return read([write(tmp_path / "data")], "auto", None)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents of each call that tokenises."""
    calls: list[int] = []

    def encode(documents: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(documents))
        return tokenizer.encode(documents, *args, **kwargs)

    monkeypatch.setattr(tokens, "encode", encode)
    return calls


def encoder(folder: Path | None, bpe: Any, **changes: Any) -> Encoder:
    return replace(Encoder(bpe, None, Rendering(), BadRows(), folder), **changes)


def test_the_second_time_the_same_tokens_come_from_the_cache(
    tmp_path: Path, bpe: Any, documents: Documents, counted: list[int]
) -> None:
    first, second = (encoder(tmp_path / "cache", bpe) for _ in range(2))
    assert list(first.encode(documents)) == list(second.encode(documents)) == tokenizer.encode(documents, bpe)
    assert (counted, first.n_cached, second.n_cached) == ([4], 0, 4)


def changed_rows(folder: Path, name: str, row: dict[str, Any]) -> Documents:
    return read([write(folder, {**ROWS, name: [row]})], "auto", None)


@pytest.mark.parametrize(
    "change",
    [
        lambda made, docs, folder: (made, changed_rows(folder, "b.jsonl", {"prompt": "ask ", "completion": "answeR"})),
        lambda made, docs, folder: (made, changed_rows(folder, "b.jsonl", {"text": "ask answer"})),
        lambda made, docs, folder: (made, changed_rows(folder, "c.jsonl", {"messages": CHAT[1:]})),
        lambda made, docs, folder: (made, docs[:3]),
        lambda made, docs, folder: (replace(made, rendering=Rendering("plain")), docs),
        lambda made, docs, folder: (replace(made, rendering=Rendering(learn="all")), docs),
        lambda made, docs, folder: (replace(made, vocab_size=4000), docs),
        lambda made, docs, folder: (replace(made, tokenizer=tokenizer.train_bpe(["one two"], 290)), docs),
    ],
    ids=["text", "learned", "messages", "fewer", "template", "learn", "vocabulary", "tokenizer"],
)
def test_other_data_or_options_are_tokenised_again(
    change: Callable[..., Any], tmp_path: Path, bpe: Any, documents: Documents, counted: list[int]
) -> None:
    encoder(tmp_path / "cache", bpe).encode(documents)
    made, changed = change(encoder(tmp_path / "cache", bpe), documents, tmp_path / "data")
    made.encode(changed)
    assert len(counted) == 2 and made.n_cached == 0


def test_another_chat_template_is_another_entry(
    tmp_path: Path, bpe: Any, documents: Documents, counted: list[int]
) -> None:
    encoder(tmp_path / "cache", bpe).encode(documents)
    bpe.chat_template = TEMPLATE
    try:
        encoder(tmp_path / "cache", bpe).encode(documents)
    finally:
        bpe.chat_template = None
    assert len(counted) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_file_is_made_again(
    damage: str, tmp_path: Path, bpe: Any, documents: Documents, counted: list[int]
) -> None:
    want = list(encoder(tmp_path / "cache", bpe).encode(documents))
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    content = file.read_bytes()
    file.unlink()  # the file above is mapped
    file.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"no table"}[damage])
    again = encoder(tmp_path / "cache", bpe)
    assert list(again.encode(documents)) == want and again.n_cached == 0
    assert list(encoder(tmp_path / "cache", bpe).encode(documents)) == want
    assert len(counted) == 2


def test_rows_that_were_left_out_are_counted_again_from_the_cache(
    tmp_path: Path, bpe: Any, documents: Documents
) -> None:
    first, second = (encoder(tmp_path / "cache", bpe, bad=BadRows("skip"), vocab_size=150) for _ in range(2))
    assert list(first.encode(documents)) == list(second.encode(documents))
    assert first.bad.problems and first.bad.problems == second.bad.problems


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, bpe: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "tokens"
    documents = read([write(tmp_path / "data")], "auto", None, cached=folder)
    assert list(encoder(folder, bpe).encode(documents)) == tokenizer.encode(documents, bpe)


def test_the_entries_that_were_not_used_for_longest_are_removed_first(
    tmp_path: Path, bpe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    for number in range(2):
        encoder(folder, bpe).encode(Documents.of_texts([(f"{number}.txt", "one two three")]))
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    old = min(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    monkeypatch.setattr(cache, "MAX_CACHE_BYTES", size_bytes)
    encoder(folder, bpe).encode(Documents.of_texts([("2.txt", "one two three")]))
    assert not old.exists() and len(list(folder.iterdir())) == 2


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_rows_are_read_from_the_cache_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder = write(tmp_path / "data"), tmp_path / "cache"
    want = list(read([source], "auto", None, cached=folder))
    with monkeypatch.context() as patch:
        patch.setattr("tigon.data.source.rows.read_rows", lambda *_: pytest.fail("a file is read"))
        assert list(read([source], "auto", None, cached=folder)) == want
    write(tmp_path / "data", {"a.jsonl": [{"text": "other"}]})
    assert read([source], "auto", None, cached=folder)[0].text == "other"
    assert len(read([Source(source, weight=2)], "auto", None, cached=folder)) == 3


def test_skipped_rows_are_named_again_from_the_cache(tmp_path: Path) -> None:
    source = write(tmp_path / "data", {"a.jsonl": [{"text": "a"}, {"text": 1}, {"text": "b"}]})
    named = []
    for _ in range(2):
        bad = BadRows("skip")
        assert [d.text for d in read([source], "auto", None, bad, cached=tmp_path / "cache")] == ["a", "b"]
        named.append(bad.problems)
    assert named[0] == named[1] and "a.jsonl:2: text is int" in named[0][0]


def test_a_damaged_file_of_rows_is_read_again(tmp_path: Path) -> None:
    source, folder = write(tmp_path / "data"), tmp_path / "cache"
    want = list(read([source], "auto", None, cached=folder))
    (file,) = folder.rglob("*.arrow")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])
    assert list(read([source], "auto", None, cached=folder)) == want


def test_a_full_disk_is_named_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise datasets.exceptions.DatasetGenerationError from OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "from_generator", full)
    with pytest.raises(DataError, match=r"cache.*: the data cannot be stored: No space left on device; make room"):
        read([write(tmp_path / "data")], "auto", None, cached=tmp_path / "cache")


# --- processes --------------------------------------------------------------------------------------------------------


def test_several_processes_give_the_same_tokens(
    tmp_path: Path, bpe: Any, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    made = encoder(tmp_path / "cache", bpe).encode(documents)
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 2
    assert list(made) == tokenizer.encode(documents, bpe)


def test_environment_is_the_same_object_after_several_processes(
    tmp_path: Path, bpe: Any, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datasets puts a copy in its place; a library that holds the first object would miss later changes."""
    monkeypatch.setattr(tokens, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    environ, variables = os.environ, dict(os.environ)
    encoder(tmp_path / "cache", bpe).encode(documents)
    assert os.environ is environ and dict(environ) == variables


def test_a_row_that_cannot_be_used_ends_several_processes(
    tmp_path: Path, bpe: Any, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(DataError, match="the tokenizer gives id"):
        encoder(tmp_path / "cache", bpe, vocab_size=2).encode(documents)


def test_a_process_whose_run_was_killed_ends(bpe: Any) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    batch = tokens._Batch(None, bpe, None, Rendering(), "error", gone.pid)
    process = multiprocessing.get_context("fork").Process(target=batch, args=({"row": []},))
    process.start()
    process.join()
    assert process.exitcode == 1


def test_samples_of_another_process_map_the_same_file(tmp_path: Path, bpe: Any, documents: Documents) -> None:
    made = encoder(tmp_path / "cache", bpe).encode(documents)
    samples = pack(made, 4, packing=True, cross_document=False, too_long="truncate").samples
    pickled = pickle.dumps(samples)
    assert [s.tokens_T.tolist() for s in pickle.loads(pickled)] == [s.tokens_T.tolist() for s in samples]
    assert pickle.loads(pickle.dumps(made)).rows.cache_files == made.rows.cache_files
    assert isinstance(pickle.loads(pickle.dumps(made)), Tokens)


def test_the_second_start_of_a_recipe_does_not_tokenise_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    import torch

    from tigon.objectives.recipe_checks import load
    from tigon.trainer.prepare import prepare

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(50)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    Path("r.yaml").write_text(
        "model: {config: {num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2, "
        "num_key_value_heads: 1, vocab_size: 512}}\ntrain: {steps: 1, batch_size: 2, device: cpu}\n"
        "data: {source: rows.jsonl, vocab_size: 300, sequence_length: 16}\n",
        encoding="utf-8",
    )

    def prepared(*sets: str) -> Any:
        return prepare(load(Path("r.yaml"), sets, gpu_present=lambda: False), torch.device("cpu"))

    first, second = prepared(), prepared()
    assert counted == [49, 1]
    assert second.data == first.data
    assert any("from the cache" in line for line in second.rows_line) and first.rows_line != second.rows_line
    prepared("data.cache=false")
    assert counted == [49, 1, 49, 1]


# --- rows for TRL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False])
def test_rows_for_trl_are_a_file_unless_their_types_differ(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(preferences, "ROWS_TYPED", 1)
    more: dict[str, Any] = {} if alike else {"name": "Ann"}
    chats = [[{"role": "user", "content": "q"}], [{"role": "user", "content": "r", **more}]]
    rows = [{"prompt": chat, "chosen": CHAT[1:], "rejected": CHAT[1:], "unread": 1} for chat in chats]
    read_rows = read([write(tmp_path / "data", {"a.jsonl": rows})], preferences.PAIRS, None)
    for _ in range(2):
        made = preferences.as_dataset(read_rows, tmp_path / "cache")
        assert bool(made.cache_files) == alike
        assert made.column_names == ["chosen", "rejected", "prompt"]
        prompts = [{name: value for name, value in row["prompt"][0].items() if value is not None} for row in made]
        assert prompts == [chat[0] for chat in chats]
