"""The byte-level BPE round-trips any text, and the loss mask falls on exactly the tokens of the answers."""

from __future__ import annotations

import json

import pytest
from trainer_helpers import words

from tigon.data.documents import Document, Message, Segment
from tigon.data.tokenizer import END_OF_TEXT, IGNORE_INDEX, encode, load_tokenizer, train_bpe
from tigon.errors import DataError, RecipeError

CHATML = (
    "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([words(2000)], 400)


@pytest.mark.parametrize(
    "text",
    ["", "karan lotis", "  two  spaces\n\n\ttab\r\n", "naïve Ω 🙂 \u200b \x00", "def f(x):\n    return x  # ok\n",
     f"literally {END_OF_TEXT} in a text", "don't 1234 ''' \"\"\""],
)  # fmt: skip
def test_bpe_gives_every_text_back(bpe, text):
    (document,) = encode([Document("t", (Segment(text, True),))], bpe)
    assert bpe.decode(document.tokens[:-1]) == text
    assert document.tokens[-1] == bpe.eos_token_id and bpe.eos_token_id not in document.tokens[:-1]


def test_bpe_holds_at_most_the_vocabulary_asked_for_and_is_deterministic(bpe):
    again = train_bpe([words(2000)], 400)
    assert len(bpe) <= 400 and again.get_vocab() == bpe.get_vocab()
    assert len(bpe("karan karan")["input_ids"]) < len("karan karan"), "nothing was merged"


def test_bpe_is_cached_by_text_and_size_and_a_damaged_cache_is_replaced(tmp_path):
    first = train_bpe(["abc abc abc"], 300, tmp_path)
    (cached,) = tmp_path.rglob("*.json")
    before = cached.stat().st_mtime_ns
    assert train_bpe(["abc abc abc"], 300, tmp_path).get_vocab() == first.get_vocab()
    assert cached.stat().st_mtime_ns == before, "the cache was not read"
    train_bpe(["abc abc abd"], 300, tmp_path)
    train_bpe(["abc abc abc"], 301, tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 3
    cached.write_text("{", encoding="utf-8")
    assert train_bpe(["abc abc abc"], 300, tmp_path).get_vocab() == first.get_vocab()
    assert cached.stat().st_size > 1


def test_bpe_is_used_although_its_cache_cannot_be_written(tmp_path, monkeypatch):
    def fails(self, path):
        raise Exception("No space left on device (os error 28)")  # what the Rust package raises

    monkeypatch.setattr("tokenizers.Tokenizer.save", fails)
    assert train_bpe(["abc abc abc"], 300, tmp_path).get_vocab()
    assert not list(tmp_path.rglob("*.json"))


def test_the_prompt_is_masked_token_for_token(bpe):
    prompt, answer = "karan lotis ", "mivel"
    (document,) = encode([Document("d:1", (Segment(prompt, False), Segment(answer, True)))], bpe)
    prompt_ids, answer_ids = bpe(prompt)["input_ids"], bpe(answer)["input_ids"]
    assert document.tokens == [*prompt_ids, *answer_ids, bpe.eos_token_id]
    assert document.labels == [IGNORE_INDEX] * len(prompt_ids) + [*answer_ids, bpe.eos_token_id]


CHAT = (Message("system", "karan"), Message("user", "lotis"), Message("assistant", "mivel"), Message("user", "nedor"),
        Message("assistant", "puran"))  # fmt: skip


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chat template"])
def test_only_what_the_assistant_says_is_learned(bpe, template):
    bpe.chat_template = template
    try:
        (document,) = encode([Document("c:1", messages=CHAT)], bpe)
        learned = bpe.decode([i for i in document.labels if i != IGNORE_INDEX])
        read_only = bpe.decode([t for t, i in zip(document.tokens, document.labels, strict=True) if i == IGNORE_INDEX])
    finally:
        bpe.chat_template = None
    assert "mivel" in learned and "puran" in learned
    assert not any(word in learned for word in ("karan", "lotis", "nedor", "im", "ssistant"))
    assert not any(word in read_only for word in ("mivel", "puran"))


def test_a_template_that_leaves_an_answer_out_is_refused(bpe):
    bpe.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    try:
        with pytest.raises(DataError, match=r"c:1: the chat template leaves message 2 out"):
            encode([Document("c:1", messages=CHAT)], bpe)
    finally:
        bpe.chat_template = None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no tokenizer could be loaded") as caught:
        load_tokenizer(str(tmp_path), revision=None, trust_remote_code=False)
    assert "\n" not in str(caught.value)


def test_saved_tokenizer_does_not_say_how_this_machine_loaded_it(bpe, tmp_path):
    """transformers writes `is_local` and `local_files_only` among the settings, and a file may have them already."""
    bpe.save_pretrained(tmp_path / "first")
    file = tmp_path / "first" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"local_files_only": True, "is_local": True}))
    load_tokenizer(str(tmp_path / "first"), revision=None, trust_remote_code=False).save_pretrained(tmp_path / "second")
    saved = json.loads((tmp_path / "second" / "tokenizer_config.json").read_text())
    assert not {"local_files_only", "is_local"} & saved.keys() and settings.keys() <= saved.keys()
