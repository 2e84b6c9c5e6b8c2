"""The generator: tokens equal to transformers' `generate`, draws as likely as the softmax says, and what is refused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tigon.models.decoding import generator
from tigon.models.decoding.generator import generate
from tigon.models.decoding.kv_pool import KVPool, PoolLayer
from tigon.models.decoding.rows import Limits, tiles_of
from tigon.models.decoding.sampling import Sampling
from tigon.models.decoding.self_check import refusal
from tigon.models.verification.tiny import VOCAB, tiny_config

GREEDY = Sampling(temperature=0.0)
ENDS = (2, 11, 31)
WINDOW = 6


def model_of(family: str, **overrides: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(family, overrides)
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def prompts() -> list[list[int]]:
    """Four prompts, one of a single token, in groups whose members do not stand together."""
    draw = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in (5, 9, 1, 14))
    return [a, b, c, d, b, a, b, b]


def by_transformers(model: Any, asked: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    model.eval()
    written = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=list(ENDS),
            pad_token_id=0,
        )
        written.append(out[0, len(prompt) :].tolist())
    model.train()
    return written


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "llama",
        "mistral",  # a window in every layer
        "gemma3_text",  # a window in some layers
        "gemma2",  # softcap
        "gpt_oss",  # sinks, experts
        "gpt2",  # learned positions
        "phi3",
    ],
)
def test_greedy_completions_equal_those_of_transformers(family: str) -> None:
    model, asked = model_of(family), prompts()
    written = generate(model, asked, Limits(new_tokens=12, ends=ENDS), GREEDY)
    assert written.tokens == by_transformers(model, asked, 12)
    assert model.training
    assert [len(tokens) for tokens in written.tokens] == [len(logprobs) for logprobs in written.logprobs]


def test_rows_move_together_when_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "CHECK_STEPS", 1)
    monkeypatch.setattr(generator, "LEAST_GRAPH_STEPS", 1)
    model, asked = model_of("qwen3"), prompts()
    whole = generate(model, asked, Limits(new_tokens=24), GREEDY).tokens
    ends = (whole[0][3], whole[1][9], whole[2][15])
    cut = [tokens[: min([24, *(tokens.index(end) + 1 for end in ends if end in tokens)])] for tokens in whole]
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    assert generate(model, asked, Limits(new_tokens=24, ends=ends), GREEDY).tokens == cut
    assert len({len(tokens) for tokens in cut}) > 2
    assert sizes[1] == len(asked) and sizes[-1] < len(asked)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_completions_that_wait_take_the_rows_of_those_that_have_ended(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(1)
    asked = [torch.randint(3, VOCAB, (2 + 5 * i % 7,), generator=draw).tolist() for i in range(12)]
    model, asked = model_of(family), [*asked, asked[3], asked[3]]
    whole = generate(model, asked, Limits(new_tokens=24), GREEDY).tokens

    def cut_at(ends: Sequence[int]) -> list[list[int]]:
        return [tokens[: min([24, *(tokens.index(end) + 1 for end in ends if end in tokens)])] for tokens in whole]

    def one_after_another(ends: Sequence[int]) -> int:
        lengths = [len(tokens) for tokens in cut_at(ends)]
        return sum(max(lengths[begin : begin + 3]) for begin in range(0, len(lengths), 3))

    def saved(ends: Sequence[int]) -> float:
        return one_after_another(ends) - sum(map(len, cut_at(ends))) / 3

    ends = max(itertools.combinations(sorted({token for tokens in whole for token in tokens}), 2), key=saved)
    monkeypatch.setattr(generator, "MOST_ROWS", 3)
    monkeypatch.setattr(generator, "CHECK_STEPS", 4)
    passes: list[int] = []
    model.model.register_forward_pre_hook(lambda *call: passes.append(len(call[2]["input_ids"])), with_kwargs=True)
    assert generate(model, asked, Limits(new_tokens=24, ends=ends), GREEDY).tokens == cut_at(ends)
    assert len(passes) < one_after_another(ends)


def test_every_completion_is_shown_as_it_is_written() -> None:
    model, shown = model_of("qwen3"), []
    whole = generate(model, [[5, 6, 7]], Limits(new_tokens=9), GREEDY, show=lambda *new: shown.append(new))
    assert [tokens for tokens, _ in shown] == [[token] for token in whole.tokens[0]]
    assert [logprob for _, logprobs in shown for logprob in logprobs] == whole.logprobs[0]


def test_completions_with_adapters_equal_those_of_transformers() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("qwen3"), peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    plain = generate(model, prompts(), Limits(new_tokens=8), GREEDY).tokens
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted = generate(model, prompts(), Limits(new_tokens=8, ends=ENDS), GREEDY).tokens
    assert adapted == by_transformers(model, prompts(), 8) != plain


def test_the_pool_holds_keys_and_values_in_16_bits_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: set[torch.dtype] = set()
    free = KVPool.free

    def noted(pool: KVPool) -> None:
        dtypes.update(states.dtype for layer in pool.layers for states in (layer.keys, layer.values))
        free(pool)

    monkeypatch.setattr(KVPool, "free", noted)
    with torch.autocast("cpu", torch.bfloat16):
        generate(model_of("qwen3"), prompts(), Limits(new_tokens=2), GREEDY)
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mistral", "adapters in fp32"])
def test_logprobs_under_autocast_are_as_near_to_fp64_as_those_of_transformers(family: str) -> None:
    model = model_of("qwen3" if " " in family else family)
    if " " in family:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model.bfloat16(), peft.LoraConfig(r=4, target_modules="all-linear"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.3)
    draw = torch.Generator().manual_seed(1)
    asked = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in range(2, 18)]
    errors: list[tuple[float, float]] = []
    with torch.autocast("cpu", torch.bfloat16):
        assert refusal(model) is None
        written = generate(model, asked, Limits(new_tokens=10), GREEDY)
        model.eval()
        theirs = [
            model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=10,
                do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
            )
            for prompt in asked
        ]  # fmt: skip
    model.double()
    for prompt, tokens, logprobs, made in zip(asked, written.tokens, written.logprobs, theirs, strict=True):
        own = made.sequences[0, len(prompt) :].tolist()
        same = next((i for i, pair in enumerate(zip(own, tokens, strict=True)) if pair[0] != pair[1]), len(own))
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            exact = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1], -1)
        for i in range(same):  # rounding decides between tokens that are as likely
            by_transformers = torch.log_softmax(made.logits[i][0].double(), -1)[tokens[i]]
            expected = float(exact[i, tokens[i]])
            errors.append((abs(logprobs[i] - expected), abs(float(by_transformers) - expected)))
    assert len(errors) > 80
    ours, by_transformers = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    assert 0 < ours < 1.5 * by_transformers, (ours, by_transformers)


def test_each_prompt_is_computed_once() -> None:
    model, passes = model_of("qwen3"), []
    model.model.register_forward_pre_hook(
        lambda module, args, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    generate(model, [[5, 6, 7]] * 6 + [[8, 9]] * 2, Limits(new_tokens=3), GREEDY)
    assert passes == [(2, 3), (8, 1), (8, 1)]


def test_logprobs_are_those_of_a_forward_pass_at_the_temperature() -> None:
    model, asked = model_of("qwen3"), prompts()
    written = generate(model, asked, Limits(new_tokens=6), Sampling(temperature=0.7, top_k=9, seed=3))
    model.double()
    for prompt, tokens, logprobs in zip(asked, written.tokens, written.logprobs, strict=True):
        ids = torch.tensor([prompt + tokens])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        assert (torch.tensor(logprobs).double() - expected).abs().max() < 1e-5


FILTERS = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1, "top_p": 0.9}]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_are_drawn_with_their_probabilities(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Second tokens after each first one, against the filters of transformers in fp64."""
    from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    draws = 4096
    monkeypatch.setattr(generator, "MOST_ROWS", draws)
    model = model_of("qwen3", vocab_size=12, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    written = generate(model, [[5, 6, 7]] * draws, Limits(new_tokens=2), Sampling(seed=1, **options)).tokens
    filters = LogitsProcessorList()
    if "top_k" in options:
        filters.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        filters.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        filters.append(MinPLogitsWarper(options["min_p"]))
    model.double().eval()

    def probabilities(ids: list[list[int]]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor(ids), use_cache=False).logits[:, -1] / options.get("temperature", 1.0)
        return torch.softmax(filters(torch.tensor(ids), logits), -1).detach()

    first = probabilities([[5, 6, 7]])[0]
    pairs = first[:, None] * probabilities([[5, 6, 7, token] for token in range(12)])
    counts = torch.zeros(12, 12, dtype=torch.float64)
    for a, b in written:
        counts[a, b] += 1
    assert not counts[pairs == 0].any()
    expected = pairs * draws
    checked = expected > 5
    chi2 = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[checked].sum().item()
    degrees = int(checked.sum()) - 1
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5 + 4, (chi2, degrees)


def test_keys_and_values_are_freed_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[weakref.ref[torch.Tensor]] = []
    make = PoolLayer.lazy_initialization

    def noted(self: PoolLayer, *states: torch.Tensor) -> None:
        make(self, *states)
        stored.extend(map(weakref.ref, (self.keys, self.values)))

    monkeypatch.setattr(PoolLayer, "lazy_initialization", noted)
    gc.disable()
    try:
        generate(model_of("qwen3"), prompts(), Limits(new_tokens=4), GREEDY)
        assert len(stored) == 4 and not any(one() is not None for one in stored)
    finally:
        gc.enable()


def test_a_seed_repeats_the_completions() -> None:
    model, asked = model_of("qwen3"), prompts()
    runs = [generate(model, asked, Limits(new_tokens=8), Sampling(seed=seed)).tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][1] != runs[0][4], "rows of one prompt draw different tokens"


def test_tiles_are_runs_of_one_group() -> None:
    assert tiles_of([0, 0, 0, 1, 2, 2], 2) == [(0, 2), (2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "linear_attention"),
        ("llama4_text", "chunked_attention"),
        ("falcon", "does not take the generator's cache"),
    ],
)
def test_other_layers_than_attention_are_refused(family: str, reason: str) -> None:
    assert reason in str(refusal(model_of(family)))


def test_self_check_finds_a_model_whose_cache_counts_otherwise() -> None:
    model = model_of("qwen3")
    assert refusal(model) is None
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, position_ids + 3 * (x.shape[1] == 1))
    assert "differ" in str(refusal(model))
