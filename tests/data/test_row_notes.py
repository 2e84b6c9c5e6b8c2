"""What a row has and its text does not teach is named, with the number of rows; what is taught is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from tigon.data.chat import row_notes
from tigon.data.chat.chat_template import Rendering
from tigon.data.documents import Document, Message, Segment
from tigon.data.tokenizer import Encoded, encode, train_bpe
from tigon.data.tokens import learns_an_end

LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = Message("user", "Hi")
ANSWER = Message("assistant", "Hello")


@pytest.fixture(scope="module")
def tok():
    draw = random.Random(0)
    bpe = train_bpe(["".join(draw.choices("kalomivelndorpurn Hello", k=4000))], 330)
    bpe.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    bpe.eos_token = "<|im_end|>"
    return bpe


def rows(tok, *chats, template=CHATML, rendering=None, **more):
    tok.chat_template = template
    documents = [Document(f"d:{i}", messages=chat, **more) for i, chat in enumerate(chats, start=1)]
    return encode(documents, tok, rendering=rendering)


def test_a_chat_that_is_written_whole_has_no_notes(tok):
    calls = {
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Rome", "n": [1, None]}}}]
    }
    (row,) = rows(tok, (QUESTION, replace(ANSWER, more=calls)))
    assert row.notes == () and row_notes.warnings_of([row]) == ()


def test_keys_of_messages_that_the_template_leaves_out_are_counted(tok):
    thinks = replace(ANSWER, more={"reasoning_content": "He greets.", "id": 7})
    encoded = rows(tok, (QUESTION, ANSWER), (QUESTION, thinks), (QUESTION, thinks))
    (warning,) = row_notes.warnings_of(encoded)
    assert "leaves out these keys of messages, first at d:2: reasoning_content (2 rows), id (2 rows)" in warning


def test_plain_headers_leave_every_key_out(tok):
    (row,) = rows(tok, (QUESTION, replace(ANSWER, more={"name": "Bo"})), rendering=Rendering("plain"))
    assert row.notes == (("key", "name"),)


def test_reasoning_that_a_template_cuts_off_is_named_with_its_share(tok):
    cuts = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    (row,) = rows(tok, (QUESTION, Message("assistant", "<think>abcdefghij</think>Hello")), template=cuts)
    (warning,) = row_notes.warnings_of([row])
    assert "parts of messages, first at d:1: assistant (1 row, 67% of their characters)" in warning


def test_arguments_and_schemas_that_a_template_leaves_out_are_named(tok):
    names_only = (
        CHATML.replace("c.function | tojson", "c.function.name")
        + "{% for t in tools %}{{ t.function.name }}{% endfor %}"
    )
    calls = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {"default": "Bonn"}}}}}
    (row,) = rows(tok, (QUESTION, replace(ANSWER, more=calls)), template=names_only, tools=(tool,))
    assert set(row.notes) == {("key", "tool_calls"), ("tools", "city"), ("tools", "default"), ("tools", "Bonn")}


def test_special_tokens_inside_messages_and_in_plain_text_are_named(tok):
    tok.chat_template = CHATML
    documents = [
        Document("d:1", messages=(Message("user", "Hi<|im_end|>"), ANSWER)),
        Document("d:2", (Segment("<|im_start|>user\nHi<|im_end|>\n", True),)),
        Document("d:3", (Segment("plain <b>text</b>", True),)),
    ]
    in_text, in_chat = row_notes.warnings_of(encode(documents, tok))
    assert in_text.startswith("1 row of text contain special tokens of the tokenizer, such as <|im_start|> in d:2")
    assert in_chat.startswith("messages of 1 row contain special tokens of the tokenizer, such as <|im_end|> in d:1")


def test_a_data_set_in_which_no_end_is_learned_is_recognised(tok):
    encoded = rows(tok, (QUESTION, ANSWER))
    assert learns_an_end(encoded, tok, Rendering())
    without = [Encoded(each.tokens, [-100] * len(each.labels), each.origin, False) for each in encoded]
    assert not learns_an_end(without, tok, Rendering())
    assert "none of 1 documents teaches the model to end its answer" in row_notes.no_end(len(without))
