"""`tigon chat` answers as transformers does, with the chat template, adapters and heads."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from trained_models import CONTEXT, make_tokenizer

from tigon import medusa
from tigon.errors import OptionError
from tigon.trained.chat import Conversation
from tigon.trained.find import find
from tigon.trained.load import load

CPU = torch.device("cpu")


def expected(model, messages, n_tokens, tokenizer=None):
    """The greedy answer by transformers' own means."""
    tokenizer = tokenizer or make_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True)


def of(role, content):
    return {"role": role, "content": content}


def test_a_conversation_renders_all_messages_with_the_template(checkpoint, capsys):
    loaded = load(find(str(checkpoint)), device=CPU)
    talk = Conversation(loaded, max_tokens=6, temperature=0.0, system="be kind")
    first = talk.answer("hello")
    history = [of("system", "be kind"), of("user", "hello")]
    assert first and first == expected(loaded.model, history, 6)
    assert first in capsys.readouterr().out
    second = talk.answer("why")
    assert second == expected(loaded.model, [*history, of("assistant", first), of("user", "why")], 6)
    talk.reset()
    assert talk.answer("hello") == first


def test_the_weights_keep_the_dtype_of_the_files(checkpoint):
    assert next(load(find(str(checkpoint)), device=CPU).model.parameters()).dtype == torch.bfloat16


def test_adapters_change_the_answer_as_in_peft(checkpoint, adapter):
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(checkpoint))
    plain = expected(base, [of("user", "hello")], 8)
    adapted = expected(peft.PeftModel.from_pretrained(base, str(adapter)), [of("user", "hello")], 8)
    answer = Conversation(load(find(str(adapter)), device=CPU), max_tokens=8, temperature=0.0).answer("hello")
    assert answer == adapted != plain


def test_heads_give_the_same_text_as_the_model_alone(run, checkpoint, capsys):
    loaded = load(find(str(checkpoint)), device=CPU)
    spec = medusa.HeadsSpec(count=2)
    heads = medusa.attach(loaded.model, spec, medusa.Objective(stage=2))
    state, weight = heads.state_dict(), loaded.model.lm_head.weight
    medusa.detach(loaded.model)
    medusa.save_heads(spec, state, run / "heads", head=weight, base=str(checkpoint), n_layers=2)
    make_tokenizer().save_pretrained(run / "tokenizer")
    with_heads = Conversation(load(find(str(run)), device=CPU), max_tokens=8, temperature=0.0)
    assert with_heads.loaded.has_heads
    answer = with_heads.answer("hello")
    assert answer == expected(loaded.model, [of("user", "hello")], 8)
    assert answer in capsys.readouterr().out
    with pytest.raises(OptionError, match="--no-heads"):
        Conversation(with_heads.loaded, max_tokens=8, temperature=0.5)


def test_without_a_template_the_text_is_continued(checkpoint):
    loaded = load(find(str(checkpoint)), device=CPU)
    loaded.tokenizer.chat_template = None
    talk = Conversation(loaded, max_tokens=5, temperature=0.0)
    ids = torch.tensor([loaded.tokenizer("hello").input_ids])
    made = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert talk.answer("hello") == loaded.tokenizer.decode(made[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    with pytest.raises(OptionError, match="--system needs a chat template"):
        Conversation(loaded, max_tokens=5, temperature=0.0, system="be kind")


def test_an_answer_ends_where_the_context_ends(checkpoint):
    loaded = load(find(str(checkpoint)), device=CPU)
    loaded.model.generation_config.eos_token_id = loaded.tokenizer.eos_token = None
    talk = Conversation(loaded, max_tokens=CONTEXT, temperature=0.0)
    text = "x" * (CONTEXT - 8)
    assert len(loaded.tokenizer(talk.answer(text), add_special_tokens=False).input_ids) <= 5
    with pytest.raises(OptionError, match=r"tokens and the model takes 96; type /reset"):
        talk.answer(text)


def test_the_command_answers_one_prompt(tigon, checkpoint):
    done = tigon("chat", checkpoint, "--prompt", "hello", "--max-tokens", 6, "--temperature", 0)
    loaded = load(find(str(checkpoint)), device=CPU)
    assert (done.code, done.out.strip()) == (0, expected(loaded.model, [of("user", "hello")], 6).strip())


def test_piped_messages_are_answered_one_by_one(tigon, checkpoint, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\n\nhello\n/exit\nnever\n"))
    done = tigon("chat", checkpoint, "--max-tokens", 6, "--temperature", 0)
    first, second = done.out.strip().split("\n")
    assert done.code == 0 and first == second


@pytest.mark.parametrize(
    ("options", "named"), [(["--device", "tpu"], "--device tpu"), (["--max-tokens", 0], "--max-tokens")]
)
def test_wrong_options_are_one_line(tigon, checkpoint, options, named):
    assert named in tigon("chat", checkpoint, "--prompt", "x", *options).error_line()


def test_damaged_weights_are_one_line(tigon, checkpoint, tmp_path):
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "model.layers.2" in tigon("chat", folder, "--prompt", "x").error_line()
