"""Decoding with heads: the text of greedy decoding whatever the heads guess, in fewer passes where they guess well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads_helpers import MEDUSA, MTP, SPECS, with_heads

import tigon
from second_proofs import DIFFERENT, proved_by
from tigon._trunk import decoder_layers
from tigon.errors import UsageError
from tigon.medusa import HeadsSpec, Objective, attach, medusa_generate
from tigon.medusa.attach import layer_inputs_kept
from tigon.medusa.generate import _Tree
from tigon.models import MODELS
from tigon.models.verification.tiny import tiny_batch, tiny_model

transformers = pytest.importorskip("transformers")

NEW = 16
# Rows whose state cannot forget a wrong guess, and rows whose small models see less far than prompt and answer.
STATEFUL = ("qwen3_next", "falcon_h1")
WINDOWED = ("mistral", "gemma2", "cohere2")


def prompt(tokens: int = 6) -> torch.Tensor:
    return tiny_batch(torch.device("cpu"))["input_ids"][:1, :tokens]


def greedy(model: Any, ids: torch.Tensor, n: int = NEW) -> list[int]:
    """transformers' own greedy decoding."""
    model.eval()
    answer = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=None
    )
    return answer[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_decoding_gives_the_text_of_greedy_decoding(spec: HeadsSpec, implementation: str) -> None:
    model = with_heads(spec, Objective())
    model.set_attn_implementation(implementation)
    wanted = greedy(model, prompt())
    widths = (None, (), (1,)) if spec.kind == "mtp" else (None, (), (1,), (3, 3, 3))
    for tree in widths:
        found = medusa_generate(model, prompt(), max_new_tokens=NEW, tree=tree)
        assert found.tokens == wanted, tree
        assert found.forward_passes <= NEW
    assert medusa_generate(model, prompt(), max_new_tokens=NEW, tree=()).forward_passes == NEW
    assert model.training is False and model.train().training


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "gpt2", "gpt_neox"])
def test_mtp_modules_do_not_receive_the_cache_of_the_model(family: str) -> None:
    """They would write into it, at the place of the last layer."""
    model: Any = tiny_model(family, MODELS[family].tiny).eval()
    kept: dict[str, Any] = {}
    given: list[Any] = []
    last = decoder_layers(model)[-1]
    last.register_forward_pre_hook(lambda _, args, kwargs: given.extend([*args, *kwargs.values()]), with_kwargs=True)
    with layer_inputs_kept(model, kept), torch.no_grad():
        model(prompt(), use_cache=True)
    assert any(isinstance(value, transformers.Cache) for value in given)
    assert kept and not any(isinstance(value, transformers.Cache) for value in kept.values())


WITH_A_TREE = [name for name in MODELS if name not in (*STATEFUL, *WINDOWED)]


@pytest.mark.parametrize("family", proved_by(DIFFERENT, WITH_A_TREE, "heads see a trunk and a head of the same kinds"))
def test_every_family_decodes_the_text_of_greedy_decoding(family: str) -> None:
    model = with_heads(HeadsSpec(count=2, shared=True), Objective(), family=family)
    found = medusa_generate(model, prompt(), max_new_tokens=8)
    assert found.tokens == greedy(model, prompt(), 8)


@pytest.mark.parametrize("kind", ["separate", "mtp"])
def test_trained_heads_need_fewer_passes(kind: str) -> None:
    """Heads trained on what the model itself says guess it, so that passes give more than one token."""
    model = with_heads(SPECS[kind], Objective(stage=1, decay=1.0, coefficient=1.0))
    ids = torch.cat([prompt(), torch.tensor([greedy(model, prompt(), 40)])], dim=1)
    model.train()
    optimizer = torch.optim.Adam(model.draft_heads.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    found = medusa_generate(model, prompt(), max_new_tokens=30)
    assert found.tokens == ids[0, 6:36].tolist()
    ahead = SPECS[kind].count
    assert found.forward_passes < 30 / 2, found
    assert 2 < found.acceptance_length <= ahead + 1


def test_decoding_stops_at_the_end_token_and_the_length_limit() -> None:
    model = with_heads(MEDUSA, Objective())
    wanted = greedy(model, prompt())
    end = wanted[5]
    stopped = wanted[: wanted.index(end) + 1]
    assert medusa_generate(model, prompt(), max_new_tokens=NEW, eos_token_id=end).tokens == stopped
    assert medusa_generate(model, prompt(), max_new_tokens=1).tokens == wanted[:1]


def test_tree_node_sees_only_itself_and_its_ancestors() -> None:
    tree = _Tree.of((2, 2))
    assert tree.parents == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.depths == [0, 1, 1, 2, 2, 2, 2]
    sees = [[i for i, seen in enumerate(row) if seen] for row in tree.sees().tolist()]
    assert sees == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]


def test_decoding_refuses_prompts_trees_and_models_it_cannot_handle() -> None:
    model = with_heads(MEDUSA, Objective())
    with pytest.raises(UsageError, match=r"one prompt"):
        medusa_generate(model, prompt().expand(2, -1), max_new_tokens=2)
    with pytest.raises(UsageError, match="at most 3 widths"):
        medusa_generate(model, prompt(), max_new_tokens=2, tree=(1, 1, 1, 1))
    with pytest.raises(UsageError, match="at least 1"):
        medusa_generate(model, prompt(), max_new_tokens=2, tree=(0,))
    with pytest.raises(UsageError, match="every width must be 1"):
        medusa_generate(with_heads(MTP, Objective()), prompt(), max_new_tokens=2, tree=(2,))
    for family in WINDOWED:
        with pytest.raises(UsageError, match="sliding window of 8"):
            medusa_generate(with_heads(MEDUSA, Objective(), family=family), prompt(), max_new_tokens=8)
    for family in STATEFUL:
        with pytest.raises(UsageError, match="has a recurrent state"):
            medusa_generate(with_heads(MEDUSA, Objective(), family=family), prompt(), max_new_tokens=8)


def test_decoding_refuses_a_model_without_a_cache() -> None:
    """Its forward would ignore a cache, and guesses would not see the prompt."""
    config = transformers.AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    attach(model, HeadsSpec(count=2), Objective(stage=2))
    with pytest.raises(UsageError, match="OpenAIGPTLMHeadModel keeps no keys and values"):
        medusa_generate(model, prompt(), max_new_tokens=2)


def test_tree_stays_within_the_positions_of_the_model() -> None:
    config = transformers.AutoConfig.for_model("gpt2", vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tigon.patch(model)
    attach(model, HeadsSpec(count=3), Objective(stage=2))
    ids = torch.randint(3, 97, (1, 54))
    plain, tree = (medusa_generate(model, ids, max_new_tokens=10, tree=tree).tokens for tree in ((), None))
    assert plain == tree and len(plain) == 10


@pytest.mark.parametrize("options", [{"tree": (200, 1)}, {"max_new_tokens": -3}])
def test_negative_length_and_tree_wider_than_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    model = with_heads(MEDUSA, Objective(stage=2))
    with pytest.raises(UsageError, match=r"tree|max_new_tokens"):
        medusa_generate(model, prompt(), **{"max_new_tokens": 4, **options})
