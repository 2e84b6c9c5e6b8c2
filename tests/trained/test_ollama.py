"""The Modelfile's template gives each chat as the Jinja template does, or is left out and said."""

from __future__ import annotations

import re

import pytest
from trained_models import CHATML, TEMPLATE, make_byte_level, make_family

from tigon.data.chat.render_chat import render_chat
from tigon.trained import ollama

LLAMA_3 = (
    "{{ '<|im_start|>' }}{% for m in messages %}<|endoftext|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} </s>{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"
SAY = {role: {"role": role, "content": f"{role} says 1 thing"} for role in ("system", "user", "assistant")}
CHATS = (["user"], ["user", "assistant", "user"], ["system", "user"], ["system", "user", "assistant", "user"])


def templated(template):
    tokenizer = make_byte_level()
    tokenizer.chat_template = template
    return tokenizer


def of_go(text, messages, system):
    """What Ollama makes of a template of this form: one loop over the messages with a branch per role."""
    start, loop, end = re.fullmatch(
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", text, re.S
    ).groups()
    pieces = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', loop)
    branches = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return start + "".join(branches[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + end


@pytest.mark.parametrize("template", [CHATML, TEMPLATE, LLAMA_3, GEMMA, LLAMA_2])
def test_the_template_in_go_gives_each_chat_as_jinja_does(template):
    tokenizer = templated(template)
    text = ollama.modelfile(make_family("llama"), tokenizer, "x.gguf").text
    go = re.search(r'TEMPLATE """(.*?)"""', text, re.S).group(1)
    system = re.search(r'SYSTEM """(.*?)"""', text, re.S)
    has_system = template not in (GEMMA, LLAMA_2)
    for roles in CHATS if has_system else CHATS[:2]:
        messages = [SAY[role] for role in roles]
        expected = render_chat(tokenizer, messages, add_generation_prompt=True)
        assert of_go(go, messages, system and system.group(1)) == expected
    assert bool(system) == (template == CHATML)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (NUMBERED, "not turns in a row"),
        ("{{ 'Answer {{user}}.' }}" + TEMPLATE, "holds braces or"),
        (TEMPLATE.replace("<{{ m.role }}>", "{{ '<' + m.role + '>{' }}"), "holds braces or"),
        (TEMPLATE.replace("<end>", '"""'), "holds braces or"),
    ],
    ids=["numbered", "two braces", "a brace before the content", "quotes"],
)
def test_a_template_that_ollama_cannot_hold_is_left_out_and_said(template, named):
    made = ollama.modelfile(make_family("llama"), templated(template), "x.gguf")
    assert "TEMPLATE" not in made.text and named in made.notes[0]


def test_a_model_without_a_template_continues_the_prompt():
    assert 'TEMPLATE """{{ .Prompt }}"""' in ollama.modelfile(make_family("llama"), templated(None), "x.gguf").text


def test_stop_tokens_sampling_and_context_are_parameters():
    model = make_family("llama")
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9, eos_token_id=[2, 0])
    lines = ollama.modelfile(model, make_byte_level(), "x.gguf").text.splitlines()
    assert lines[0] == "FROM ./x.gguf"
    for text in ('stop "<|im_end|>"', 'stop "<|endoftext|>"', "temperature 0.2", "top_p 0.9", "num_ctx 256"):
        assert f"PARAMETER {text}" in lines
    model.generation_config.update(do_sample=False, temperature=None, top_p=None)
    assert "PARAMETER temperature 0" in ollama.modelfile(model, make_byte_level(), "x.gguf").text.splitlines()
