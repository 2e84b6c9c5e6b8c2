"""Every chat template of the installed packages, and small ones of each kind: the tokens are transformers' tokens.

What is trained are the ids of `apply_chat_template(tokenize=True)`, for chats of several turns, with tools, reasoning,
a system prompt, empty answers, and answers that come first.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tigon.data.chat.chat_template import Rendering, segments_of
from tigon.data.chat.messages import read_messages
from tigon.data.documents import Document
from tigon.data.tokenizer import IGNORE_INDEX, encode, train_bpe
from tigon.errors import DataError

MARKS = re.compile(r"<\|?[A-Za-z_/][\w/ ]*\|?>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]|\[gMASK\]")
"""Texts in a template that its tokenizer has as special tokens."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>",
        "<|END_OF_TURN_TOKEN|>", "<|end|>", "</s>")  # fmt: skip


def installed() -> dict[str, str]:
    """name -> source of the templates that TRL has."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path("none")
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


LOOP = "{% for m in messages %}"
HARMONY = (
    LOOP + "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GLM = LOOP + "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
MISTRAL = (
    "{{ bos_token }}" + LOOP + "{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
MARKED_WITHOUT_END = (
    LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_REASONING = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NEEDS_A_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found') }}{% endif %}"
    + LOOP + "<|im_start|>{{ m.role }}\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
PARTS_ONLY = (
    LOOP + "{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT_ARGUMENTS = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# tools #}"
)
OWN = {
    "harmony": HARMONY, "glm": GLM, "mistral": MISTRAL, "marked without end": MARKED_WITHOUT_END,
    "drops reasoning": DROPS_REASONING, "needs a question": NEEDS_A_QUESTION, "parts only": PARTS_ONLY,
    "text arguments": TEXT_ARGUMENTS,
}  # fmt: skip
TEMPLATES = OWN | installed()

ARGUMENTS = {"city": "Rome", "day": None}
CALL = {"type": "function", "id": "call00001", "function": {"name": "warm", "arguments": ARGUMENTS}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "where"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "warm", "description": "Tells it", "parameters": PARAMETERS}}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "one turn": [user("Hi"), answer("Hello")],
    "two turns": [user("Hi"), answer("Hello"), user("Bye"), answer("Ciao")],
    "a system prompt": [{"role": "system", "content": "Be kind."}, user("Hi"), answer("Hello")],
    "reasoning": [user("Hi"), answer("Hello", reasoning_content="He greets."), user("Bye"), answer("Ciao")],
    "thoughts": [user("Hi"), answer("<think>\nHe greets.\n</think>\n\nHello")],
    "an empty answer": [user("Hi"), answer(""), user("Bye"), answer("Ciao")],
    "an answer first": [answer("Welcome"), user("Hi"), answer("Hello")],
    "a question last": [user("Hi"), answer("Hello"), user("Bye")],
    "tools": [user("Warm?"), answer("", tool_calls=[CALL]), {"role": "tool", "name": "warm", "content": "25"},
              answer("Yes, 25.")],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    draw = random.Random(0)
    bpe = train_bpe(["".join(draw.choices("kalomivelndorpurn Hello Ciao Bye.\n", k=4000))], 330)
    marks = {mark for template in TEMPLATES.values() for mark in MARKS.findall(template)}
    marks |= {"<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", *ENDS}
    bpe.add_special_tokens({"additional_special_tokens": sorted(marks)})
    bpe.bos_token = "<|pad|>"
    return bpe


def prepared(tokenizer, template):
    tokenizer.chat_template = template
    tokenizer.eos_token = next((end for end in ENDS if end in template), "<|im_end|>")
    return tokenizer


def forms(chat) -> Iterator[list[dict]]:
    """The chat as transformers takes it, in the forms that templates need."""
    yield chat
    text = json.loads(json.dumps(chat))
    for message in text:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    yield text
    yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
    yield [{("thinking" if key == "reasoning_content" else key): value for key, value in m.items()} for m in chat]


def ids_by_transformers(tokenizer, chat, tools) -> list[list[int]]:
    found = []
    for form in forms(chat):
        try:
            found.append(tokenizer.apply_chat_template(form, tools=tools, tokenize=True)["input_ids"])
        except Exception:  # the template refuses this form
            continue
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_every_chat_are_those_of_transformers(tokenizer, name):
    tok = prepared(tokenizer, TEMPLATES[name])
    n_accepted = 0
    for kind, chat in CHATS.items():
        tools = [TOOL] if kind == "tools" and "tools" in TEMPLATES[name] else None
        document = Document("d:1", messages=read_messages(chat, "d:1"), tools=tuple(tools or ()))
        expected = ids_by_transformers(tok, chat, tools)
        try:
            (row,) = encode([document], tok)
        except DataError as error:
            drops_call = kind == "tools" and not any("Rome" in tok.decode(ids) for ids in expected)
            refused = "no place for" in str(error) or not expected or drops_call
            assert refused, f"{kind}: transformers takes it, and tigon says {error}"
            continue
        n_accepted += 1
        without_end = row.tokens[:-1] if row.tokens[-1] == row.labels[-1] == tok.eos_token_id else row.tokens
        assert row.tokens in expected or without_end in expected, kind
        words = tok.decode([label for label in row.labels if label != IGNORE_INDEX])
        learned = [
            message["content"].split("</think>")[-1].strip() for message in chat if message["role"] == "assistant"
        ]
        assert all(text in words for text in learned), (kind, words)
        assert not any(message["content"] in words for message in chat if message["role"] in ("user", "system")), kind
    assert n_accepted >= 3


# --- what is learned of each kind of template ------------------------------------------------------------------------


def learned(row, tok):
    """The learned stretches of a row, as text."""
    stretches: list[list[int]] = [[]]
    for token, label in zip(row.tokens, row.labels, strict=True):
        if label == IGNORE_INDEX:
            stretches.append([])
        else:
            stretches[-1].append(token)
    return [tok.decode(stretch) for stretch in stretches if stretch]


def row_of(tok, chat, rendering=None):
    (row,) = encode([Document("d:1", messages=read_messages(chat, "d:1"))], tok, rendering=rendering or Rendering())
    return row


def test_a_special_token_is_never_cut(tokenizer):
    """`<|return|>` ends the last answer and `<|end|>` the earlier ones. Their common characters are no token."""
    tok = prepared(tokenizer, HARMONY)
    row = row_of(tok, CHATS["two turns"])
    assert row.tokens.count(tok.convert_tokens_to_ids("<|end|>")) == 3
    assert learned(row, tok) == ["<|channel|>final<|message|>Hello", "<|channel|>final<|message|>Ciao<|return|>"]


def test_the_mark_of_the_next_turn_is_learned_if_the_model_ends_its_answers_with_it(tokenizer):
    tok = prepared(tokenizer, GLM)
    ends = tuple(tok.convert_tokens_to_ids(["<|user|>", "<|tool|>"]))
    row = row_of(tok, CHATS["two turns"], Rendering(ends=ends))
    assert learned(row, tok) == ["Hello<|user|>", f"Ciao{tok.eos_token}"]
    call = [user("Warm?"), answer("warm()"), {"role": "tool", "content": "25"}, answer("Yes")]
    assert learned(row_of(tok, call, Rendering(ends=ends)), tok)[0] == "warm()<|tool|>"


def test_an_end_outside_of_the_generation_marks_is_learned(tokenizer):
    tok = prepared(tokenizer, MARKED_WITHOUT_END)
    assert learned(row_of(tok, CHATS["two turns"]), tok) == ["Hello<|im_end|>", "Ciao<|im_end|>"]


@pytest.mark.parametrize("chat", [
    [user("Hi"), answer("Hello"), user("Bye"), answer("Ciao", weight=0)],
    CHATS["a question last"],
], ids=["weight 0", "a question last"])  # fmt: skip
def test_no_end_is_learned_after_a_turn_that_is_not(tokenizer, chat):
    tok = prepared(tokenizer, GLM)
    assert learned(row_of(tok, chat), tok) == ["Hello"]


def test_a_chat_that_begins_with_the_assistant_is_learned(tokenizer):
    for template in (MARKED_WITHOUT_END.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
                     NEEDS_A_QUESTION):  # fmt: skip
        tok = prepared(tokenizer, template)
        first, second = learned(row_of(tok, CHATS["an answer first"]), tok)
        assert first.rstrip() == "Welcome<|im_end|>" and second.rstrip().endswith("Hello<|im_end|>")


def test_a_message_that_the_template_leaves_out_doubles_no_text(tokenizer):
    """As Mistral's: no header, the system message in the last question; and no place for results of tools."""
    template = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        + LOOP + "{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% elif m.role == 'user' %}"
        "[INST] {% if loop.revindex0 == 2 %}{{ system }} {% endif %}{{ m.content }}[/INST]{% endif %}{% endfor %}"
    )  # fmt: skip
    tok = prepared(tokenizer, template)
    chat = [{"role": "system", "content": "sys"}, user("u1"), answer("a1"), user("u2"),
            {"role": "tool", "content": "t"}, answer("a2")]  # fmt: skip
    document = Document("d:1", messages=read_messages(chat, "d:1"))
    segments = segments_of(document, tok, Rendering())
    whole = tok.apply_chat_template(chat, tokenize=False)
    assert "".join(segment.text for segment in segments) == whole
    words = [segment.text for segment in segments if segment.learned]
    assert len(words) == 2 and words[0].startswith("a1") and words[1].endswith(f"a2{tok.eos_token}")


def test_reasoning_goes_under_the_key_that_the_template_reads(tokenizer):
    tok = prepared(tokenizer, LOOP + "<|im_start|>{{ m.role }}\n{{ m.thinking }}{{ m.content }}<|im_end|>\n{% endfor %}"
                              "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")  # fmt: skip
    row = row_of(tok, [user("Hi"), answer("Hello", reasoning_content="He greets. ")])
    assert learned(row, tok) == ["He greets. Hello<|im_end|>\n"] and row.notes == ()


class SlowTokenizer:
    """A tokenizer that does not tell where its tokens are."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def __call__(self, texts, **options):
        return self.fast(texts, **options)


@pytest.mark.parametrize("name", OWN)
def test_a_slow_tokenizer_learns_the_same_tokens(tokenizer, name):
    tok = prepared(tokenizer, TEMPLATES[name])
    for kind in ("two turns", "a system prompt", "an empty answer"):
        fast, slow = (row_of(each, CHATS[kind]) for each in (tok, SlowTokenizer(tok)))
        assert fast == slow, kind
