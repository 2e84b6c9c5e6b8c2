"""Answers by tigon's generator equal those of transformers, are printed as they are written, and fall back aloud."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tigon.errors import OptionError, UsageError
from tigon.models.decoding.generation_config import objection, settings_of
from tigon.trained.answers import Answers
from tigon.trained.find import find
from tigon.trained.load import Loaded, load

CPU = torch.device("cpu")
PROMPT = [7, 9, 11, 5]


@pytest.fixture
def loaded(checkpoint: Any) -> Loaded:
    made = load(find(str(checkpoint)), device=CPU)
    made.model.float()
    return made


def both(loaded: Loaded, capsys: pytest.CaptureFixture[str]) -> list[tuple[list[int], str]]:
    """The greedy tokens and the printed text, by tigon and by transformers."""
    found = []
    for generator in ("tigon", "transformers"):
        tokens = Answers(loaded, 0.0, generator).write(PROMPT, 12)
        found.append((tokens, capsys.readouterr().out))
    return found


def test_greedy_answers_and_their_printed_text_equal_those_of_transformers(
    loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    by_tigon, by_transformers = both(loaded, capsys)
    assert by_tigon == by_transformers and len(by_tigon[0]) == 12 and by_tigon[1].strip()


@pytest.mark.parametrize("place", [0, 3], ids=["first token", "fourth token"])
def test_an_answer_ends_with_each_stop_token(loaded: Loaded, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Answers(loaded, 0.0, "tigon").write(PROMPT, 12)
    capsys.readouterr()
    end = tokens[place]
    loaded.model.generation_config.eos_token_id = [loaded.tokenizer.eos_token_id, end]
    by_tigon, by_transformers = both(loaded, capsys)
    assert by_tigon == by_transformers
    assert by_tigon[0] == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.2, "top_k": 0}, {"top_k": 0}], ids=str
)
def test_tokens_are_drawn_from_the_probabilities_of_transformers(loaded: Loaded, options: dict[str, Any]) -> None:
    """Also without options, for which transformers has defaults of its own."""
    config = copy.deepcopy(loaded.model.generation_config)
    config.update(**options, do_sample=True, temperature=0.7, max_new_tokens=1)
    ids = torch.tensor([PROMPT])
    scores = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, output_scores=True,
        return_dict_in_generate=True,
    ).scores[0]  # fmt: skip
    _, sampling = settings_of(config)
    ours = sampling.restricted(loaded.model(ids).logits[:, -1].float() / sampling.temperature)
    torch.testing.assert_close(torch.softmax(ours, -1), torch.softmax(scores, -1))
    assert int((ours > float("-inf")).sum()) > 1


def test_a_seed_of_pytorch_repeats_a_drawn_answer(loaded: Loaded) -> None:
    answers, drawn = Answers(loaded, 1.5, "tigon"), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(answers.write(PROMPT, 12))
    assert drawn[0] == drawn[1] != drawn[2]


def test_auto_leaves_a_cpu_to_transformers_without_a_word(loaded: Loaded) -> None:
    answers = Answers(loaded, 0.0)
    assert not answers.by_generator and answers.note is None


def test_auto_says_why_transformers_writes_on_a_gpu(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.model.generation_config.repetition_penalty = 1.2
    monkeypatch.setattr("tigon.trained.answers._on_gpu", lambda model: True)
    note = Answers(loaded, 0.0).note
    assert note == "transformers' generate writes the answers, because the generation config sets repetition_penalty"
    loaded.model.generation_config.repetition_penalty = 1.0
    assert Answers(loaded, 0.0).by_generator


def test_what_the_generator_does_not_know_is_refused(loaded: Loaded) -> None:
    loaded.model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(OptionError, match=r"sets no_repeat_ngram_size; use --generator transformers"):
        Answers(loaded, 0.0, "tigon")


def test_options_that_change_nothing_are_no_objection() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(
        num_beams=1, repetition_penalty=1.0, output_attentions=False, max_length=99, use_cache=True
    )
    assert objection(config) is None
    assert objection(GenerationConfig(cache_implementation="hybrid")) is None
    assert "cache_implementation" in str(objection(GenerationConfig(cache_implementation="quantized")))


def test_a_token_id_of_0_is_an_option() -> None:
    from transformers import GenerationConfig

    assert "forced_eos_token_id" in str(objection(GenerationConfig(forced_eos_token_id=0)))
    assert objection(GenerationConfig(pad_token_id=0, eos_token_id=0)) is None


def test_options_that_a_call_leaves_out_are_those_of_the_models_own_config() -> None:
    from transformers import GenerationConfig

    own = GenerationConfig(suppress_tokens=[5], repetition_penalty=1.2, top_k=3)
    assert objection(GenerationConfig(), own) == "the generation config sets repetition_penalty, suppress_tokens"
    assert objection(GenerationConfig(repetition_penalty=1.0, suppress_tokens=[]), own) is None


def test_an_unknown_generator_is_one_line(tigon: Any, checkpoint: Any) -> None:
    done = tigon("chat", checkpoint, "--prompt", "x", "--generator", "vllm")
    assert "--generator vllm: it must be one of auto, tigon, transformers" in done.error_line()


def test_logits_that_are_not_finite_end_the_answer(loaded: Loaded) -> None:
    loaded.model.lm_head.weight.data[3] = float("nan")
    answers = Answers(loaded, 0.0, "transformers")
    answers.by_generator = True  # the self-check finds the weights damaged too
    with pytest.raises(UsageError, match="the logits after 4 tokens are not finite"):
        answers.write(PROMPT, 3)


def test_the_command_prints_the_answer_of_transformers(tigon: Any, checkpoint: Any) -> None:
    outs = [
        tigon("chat", checkpoint, "--prompt", "hello", "--max-tokens", 6, "--temperature", 0, "--generator", generator)
        for generator in ("tigon", "transformers")
    ]
    assert [done.code for done in outs] == [0, 0] and outs[0].out == outs[1].out != ""
