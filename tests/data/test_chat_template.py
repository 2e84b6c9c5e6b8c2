"""Chat templates: exactly the assistant's tokens are learned, whatever the template does to earlier turns."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("transformers")

from tigon.data.chat import render_chat
from tigon.data.chat.chat_template import PLAIN_HEADERS, Rendering, choose, segments_of
from tigon.data.document_table import Documents, stored
from tigon.data.documents import Document, Message, Segment
from tigon.data.preview import pieces, rows_line
from tigon.data.source.formats import read_row
from tigon.data.tokenizer import END_OF_TEXT, IGNORE_INDEX, encode, train_bpe
from tigon.errors import DataError, RecipeError

LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "<|im|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
MARKED = (
    LOOP + "<|im|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
# As Qwen3's: the last turn has room for reasoning, and earlier turns lose theirs.
REASONING = (
    LOOP + "<|im|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'].split('</think>')[-1].strip() }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
# As Mistral's: no header before the answer, the system message within the last question, and roles must alternate.
INSTRUCT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% endif %}"
    + LOOP
    + "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {% if loop.last or loop.revindex0 == 1 %}{{ system }}\n\n{% endif %}"
    "{{ m['content'] }}[/INST]{% else %} {{ m['content'] | trim }}<|end|>{% endif %}{% endfor %}"
)
ALWAYS_OPEN = (
    LOOP + "<|im|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n<think>\n{% endif %}"
)
# template, what is learned of `first` and of `last`
TEMPLATES = {
    "chatml": (CHATML, "{}<|end|>\n", "{}<|end|>\n"),
    "generation marks": (MARKED, "{}<|end|>", "{}<|end|>"),
    "reasoning": (REASONING, "{}<|end|>\n", "<think>\n\n</think>\n\n{}<|end|>\n"),
    "instruct": (INSTRUCT, " {}<|end|>", " {}<|end|>"),
    "opens with reasoning": (ALWAYS_OPEN, "{}<|end|>\n", "{}<|end|>\n"),
}
CHAT = (Message("user", "ka?"), Message("assistant", "mivel"), Message("user", "nedor?"), Message("assistant", "puran"))


@pytest.fixture(scope="module")
def bpe():
    draw = random.Random(0)
    return train_bpe(["".join(draw.choices("kalomivelndorpurn ", k=4000))], 330)


@pytest.fixture
def tok(bpe):
    bpe.chat_template = None
    yield bpe
    bpe.chat_template = None


def learned(segments):
    return [segment.text for segment in segments if segment.learned]


@pytest.mark.parametrize("system", [(), (Message("system", "sys"),)], ids=["", "system"])
@pytest.mark.parametrize("template, first, last", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_exactly_the_answers_and_their_ends_are_learned(tok, template, first, last, system):
    tok.chat_template = template
    document = Document("d:1", messages=(*system, *CHAT))
    segments = segments_of(document, tok, Rendering())
    assert learned(segments) == [first.format("mivel"), last.format("puran")]
    whole = tok.apply_chat_template([m.as_mapping() for m in document.messages], tokenize=False)
    assert "".join(segment.text for segment in segments) == whole


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_that_resembles_its_surroundings_is_found(tok, seed):
    """Answers of a few characters, some of which the template, the questions and the stand-ins have too."""
    tok.chat_template = REASONING
    draw = random.Random(seed)
    questions, answers = (["".join(draw.choices("0Q1Z<|n", k=draw.randint(1, 4))) for _ in range(3)] for _ in range(2))
    turns = [m for q, a in zip(questions, answers, strict=True) for m in (Message("user", q), Message("assistant", a))]
    found = learned(segments_of(Document("d:1", messages=tuple(turns)), tok, Rendering()))
    assert found == [*(f"{a}<|end|>\n" for a in answers[:-1]), f"<think>\n\n</think>\n\n{answers[-1]}<|end|>\n"]


def test_turns_that_are_not_to_be_learned_are_only_read(tok):
    turns = (CHAT[0], Message("assistant", "mivel", learned=False), *CHAT[2:])
    for template in (CHATML, MARKED, REASONING):
        tok.chat_template = template
        (answer,) = learned(segments_of(Document("d:1", messages=turns), tok, Rendering()))
        assert answer.rstrip("\n").endswith("puran<|end|>")


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "warm", "arguments": {"city": "Rome"}}}]}
TOOL = {"type": "function", "function": {"name": "warm", "parameters": {}}}
WITH_TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    + LOOP
    + "<|im|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)


def test_calls_of_tools_are_learned_and_their_results_are_read(tok):
    tok.chat_template = WITH_TOOLS
    turns = (CHAT[0], Message("assistant", "", CALLS), Message("tool", "25"), CHAT[3])
    segments = segments_of(Document("d:1", messages=turns, tools=(TOOL,)), tok, Rendering())
    call, answer = learned(segments)
    assert call == '<call>{"name": "warm", "arguments": {"city": "Rome"}}</call><|end|>\n'
    assert answer == "<think></think>puran<|end|>\n"
    assert segments[0].text.startswith("tools: [{")


@pytest.mark.parametrize("template", [None, CHATML], ids=["none", "chatml"])
def test_tools_that_the_template_cannot_write_are_refused(tok, template):
    tok.chat_template = template
    with pytest.raises(DataError, match=r"d:1: .*(has no chat template|has no place) for tools"):
        segments_of(Document("d:1", messages=CHAT, tools=(TOOL,)), tok, Rendering())


def test_a_template_that_never_ends_ends_the_run_and_is_not_tried_in_other_forms(tok, monkeypatch):
    monkeypatch.setattr(render_chat, "LIMIT_S", 0.1)
    tok.chat_template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(render_chat.EndlessTemplate, match=r"has not ended after 0\.1 s"):
        segments_of(Document("d:1", messages=CHAT), tok, Rendering())


def test_what_a_template_refuses_is_one_line_with_the_row(tok):
    tok.chat_template = INSTRUCT
    with pytest.raises(DataError, match=r"d:1: the chat template refuses message \d: roles must alternate"):
        segments_of(Document("d:1", messages=CHAT[:1] * 2), tok, Rendering())


# --- which rows use the template --------------------------------------------------------------------------------------

ALPACA = Document("d:1", (Segment("### P", False), Segment("puran", True)), CHAT[2:], format="alpaca")
COMPLETION = Document("d:2", (Segment("P", False), Segment("puran", True)), CHAT[2:], as_chat=False)


@pytest.mark.parametrize(
    "template, chats",
    [("auto", (True, False)), ("chat", (True, True)), ("plain", (False, False))],
)
def test_the_key_chooses_which_rows_use_the_template(tok, template, chats):
    tok.chat_template = CHATML
    rendering = choose(tok, template, "answers")
    for document, chat in zip((ALPACA, COMPLETION), chats, strict=True):
        text = "".join(segment.text for segment in segments_of(document, tok, rendering))
        assert text.startswith("<|im|>user\n") == chat
    tok.chat_template = None
    assert segments_of(ALPACA, tok, Rendering()) == ALPACA.segments


def test_a_file_with_a_template_becomes_the_tokenizers(tok, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(MARKED, encoding="utf-8")
    rendering = choose(tok, str(path), "answers")
    assert tok.chat_template == MARKED
    assert learned(segments_of(COMPLETION, tok, rendering)) == ["puran<|end|>"]


def test_a_template_that_cannot_be_used_is_named(tok, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.template: chat needs a tokenizer with a chat template"):
        choose(tok, "chat", "answers")
    with pytest.raises(RecipeError, match=r"data\.template: none\.jinja: no such file; .* one of auto, chat, plain"):
        choose(tok, "none.jinja", "answers")
    (tmp_path / "t.jinja").write_text("a\n{% for %}", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"t\.jinja:2: not a Jinja template"):
        choose(tok, str(tmp_path / "t.jinja"), "answers")


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_plain_headers_and_the_template_that_is_saved_for_them_write_the_same(tok):
    """`tigon chat` and other programs read the template from the saved tokenizer."""
    turns = (("system", "be kind"), ("user", "hello"), ("assistant", "hi\n"), ("user", "why"), ("assistant", "so"))
    document = Document("row", messages=tuple(Message(role, text) for role, text in turns))
    assert not tok.chat_template
    plain = segments_of(document, tok, Rendering())
    tok.chat_template = PLAIN_HEADERS
    assert segments_of(document, tok, Rendering()) == plain
    opened = tok.apply_chat_template([{"role": "user", "content": "why"}], tokenize=False, add_generation_prompt=True)
    assert opened == "### User:\nwhy\n\n### Assistant:\n"


def test_all_tokens_are_learned_if_the_recipe_says_so(tok):
    for template in (None, CHATML):
        tok.chat_template = template
        for document in (ALPACA, COMPLETION, Document("d:3", messages=CHAT)):
            (row,) = encode([document], tok, rendering=Rendering(learn="all"))
            assert row.labels == row.tokens and not row.is_text


def test_a_chat_that_ends_with_the_end_of_text_gets_no_second_one(tok):
    tok.chat_template = CHATML
    (row,) = encode([Document("d:1", messages=CHAT)], tok)
    assert row.tokens.count(tok.eos_token_id) == 4 and tok.decode(row.tokens).endswith(f"{END_OF_TEXT}\n")
    tok.chat_template = LOOP + "{{ m['content'] }}\n{% endfor %}"
    (row,) = encode([Document("d:1", messages=CHAT)], tok)
    assert row.tokens[-1] == row.labels[-1] == tok.eos_token_id


def test_a_tokenizer_that_puts_a_space_before_texts_does_so_once():
    """Llama 2's kind. Segments tokenised one by one would each begin with a space that the text does not have."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    characters = "\u2581[]INSTHab"
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", *characters, "ab"])}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    document = Document("d:1", (Segment("[I] ab", False), Segment("ab b", True)))
    (row,) = encode([document], tokenizer)
    assert tokenizer.decode(row.tokens) == "[I] abab b</s>"
    assert tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX]) == "ab b</s>"


# --- what is printed --------------------------------------------------------------------------------------------------


def test_rows_are_shown_as_tokens_with_the_learned_ones_marked(tok):
    tok.chat_template = CHATML
    (row,) = encode([Document("d:1", messages=(Message("user", "é🙂"), CHAT[1]))], tok)
    shown = list(pieces(row, tok))
    assert "".join(piece for piece, _ in shown) == "<|im|>user\né🙂<|end|>\n<|im|>assistant\nmivel<|end|>\n"
    assert "".join(piece for piece, is_learned in shown if is_learned) == "mivel<|end|>\n"
    assert ("🙂", False) in shown, "the bytes of one character come together"


def test_the_formats_are_named_with_what_becomes_of_them(tok):
    rows = {"d:1": ("alpaca", {"instruction": "Add.", "output": "5"}), "d:2": ("text", {"text": "t"})}
    rows["d:3"] = rows["d:2"]
    documents = Documents.of_rows(stored(read_row(name, row, where), row) for where, (name, row) in rows.items())
    assert rows_line(documents[1:], tok, Rendering()) == ()
    tok.chat_template = CHATML
    (line,) = rows_line(documents, tok, Rendering())
    assert line == "rows     1 alpaca (chat template), 2 text; answers are learned"
