"""Tokenised data is read from the cache by the next run with the same data, and never with other data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tigon.data import token_cache, tokenizer
from tigon.data.chat_template import Rendering
from tigon.data.documents import BadRows, Document, Message, Segment
from tigon.data.token_cache import TokenCache

pytest.importorskip("tokenizers")
TEXTS = ["one two three", "four five", "six seven eight nine"]
DOCUMENTS = [
    Document("a.txt", (Segment(TEXTS[0], True),)),
    Document("b.jsonl:1", (Segment("ask ", False), Segment("answer", True))),
    Document("b.jsonl:2", (), (Message("user", "hello"), Message("assistant", "good day"))),
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def bpe() -> Any:
    return tokenizer.train_bpe([*TEXTS, "ask answer hello good day user assistant"], 300)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents of each call that tokenises."""
    calls: list[int] = []

    def encode(documents: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(documents))
        return tokenizer.encode(documents, *args, **kwargs)

    monkeypatch.setattr(token_cache, "encode", encode)
    return calls


def cache(folder: Path, bpe: Any, **changes: Any) -> TokenCache:
    return replace(TokenCache(folder, bpe, None, BadRows(), Rendering()), **changes)


def test_the_second_time_the_same_tokens_come_from_the_cache(tmp_path: Path, bpe: Any, counted: list[int]) -> None:
    first, second = cache(tmp_path, bpe), cache(tmp_path, bpe)
    assert first.encode(DOCUMENTS) == second.encode(DOCUMENTS) == tokenizer.encode(DOCUMENTS, bpe)
    assert (counted, first.n_read, second.n_read) == ([3], 0, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda made, docs: (made, [replace(docs[0], segments=(Segment("one two threE", True),)), *docs[1:]]),
        lambda made, docs: (made, [replace(docs[0], segments=(Segment(TEXTS[0], False),)), *docs[1:]]),
        lambda made, docs: (made, [*docs[:2], replace(docs[2], messages=(Message("user", "hello"),))]),
        lambda made, docs: (replace(made, rendering=Rendering("plain")), docs),
        lambda made, docs: (replace(made, rendering=Rendering(learn="all")), docs),
        lambda made, docs: (replace(made, vocab_size=4000), docs),
    ],
    ids=["text", "learned", "messages", "template", "learn", "vocabulary"],
)
def test_other_data_or_options_are_tokenised_again(
    change: Callable[..., Any], tmp_path: Path, bpe: Any, counted: list[int]
) -> None:
    cache(tmp_path, bpe).encode(DOCUMENTS)
    made, documents = change(cache(tmp_path, bpe), DOCUMENTS)
    made.encode(documents)
    assert len(counted) == 2 and made.n_read == 0


def test_another_chat_template_is_another_entry(tmp_path: Path, bpe: Any, counted: list[int]) -> None:
    cache(tmp_path, bpe).encode(DOCUMENTS)
    bpe.chat_template = TEMPLATE
    try:
        cache(tmp_path, bpe).encode(DOCUMENTS)
    finally:
        bpe.chat_template = None
    assert len(counted) == 2


def test_another_tokenizer_is_another_entry(tmp_path: Path, bpe: Any, counted: list[int]) -> None:
    cache(tmp_path, bpe).encode(DOCUMENTS)
    cache(tmp_path, tokenizer.train_bpe(TEXTS, 290)).encode(DOCUMENTS)
    assert len(counted) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path, bpe: Any, counted: list[int]) -> None:
    want = cache(tmp_path, bpe).encode(DOCUMENTS)
    (file,) = tmp_path.glob("*.safetensors")
    content = file.read_bytes()
    changed = bytearray(content)
    changed[-3] ^= 1
    broken = {"cut": content[:-10], "changed": bytes(changed), "empty": b"", "text": b"not a tensor"}[damage]
    file.write_bytes(broken)
    assert cache(tmp_path, bpe).encode(DOCUMENTS) == want
    assert file.read_bytes() == content
    assert cache(tmp_path, bpe).encode(DOCUMENTS) == want
    assert len(counted) == 2


CHANGES = {
    "a length": ("lengths", lambda tensor: tensor - tensor.clamp(max=1)),
    "the last document": ("lengths", lambda tensor: tensor[:-1]),
    "a negative length": ("lengths", lambda tensor: tensor * torch.tensor([1, 1, -1])),
    "a token beyond the vocabulary": ("tokens", lambda tensor: tensor + 10_000),
    "a negative token": ("tokens", lambda tensor: tensor - 10_000),
    "the kinds": ("is_text", lambda tensor: tensor[:-1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_was_changed_and_hashed_again_is_made_again(
    name: str, tmp_path: Path, bpe: Any, counted: list[int]
) -> None:
    cache(tmp_path, bpe, vocab_size=300).encode(DOCUMENTS)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    key, change = CHANGES[name]
    tensors[key] = change(tensors[key]).to(tensors[key].dtype)
    save_file(tensors, file, {"sha256": token_cache._digest(tensors)})
    assert cache(tmp_path, bpe, vocab_size=300).encode(DOCUMENTS) == tokenizer.encode(DOCUMENTS, bpe)
    assert counted == [3, 3]


def test_rows_that_were_left_out_are_counted_again_from_the_cache(tmp_path: Path, bpe: Any) -> None:
    def bad() -> BadRows:
        return BadRows("skip")

    first, second = cache(tmp_path, bpe, bad=bad(), vocab_size=150), cache(tmp_path, bpe, bad=bad(), vocab_size=150)
    assert first.encode(DOCUMENTS) == second.encode(DOCUMENTS)
    assert first.bad.problems and first.bad.problems == second.bad.problems


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, bpe: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    made = cache(tmp_path / "file" / "tokens", bpe)
    assert made.encode(DOCUMENTS) == tokenizer.encode(DOCUMENTS, bpe)


def test_the_files_that_were_not_used_for_longest_are_removed_first(
    tmp_path: Path, bpe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = [Document(f"{name}.txt", (Segment(TEXTS[0], True),)) for name in "abc"]
    for number, document in enumerate(alike[:2]):
        cache(tmp_path, bpe).encode([document])
        newest = max(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    old = min(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    size_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(token_cache, "MAX_CACHE_BYTES", size_bytes)
    cache(tmp_path, bpe).encode([alike[2]])
    assert not old.exists() and len(list(tmp_path.glob("*.safetensors"))) == 2


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
