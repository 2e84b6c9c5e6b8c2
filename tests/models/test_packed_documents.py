"""Each family keeps the documents of a packed sample apart, or its runs are refused."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import transformers
from models_helpers import tiny_model

import tigon
from second_proofs import proved_by
from tigon._trunk import trunk_of
from tigon.models import MODELS, hybrid_layers
from tigon.models.kv_cache import cache_argument
from tigon.models.packed_documents import (
    FIRST_RELEASE,
    MASK_WITHOUT_POSITIONS,
    MIX_DOCUMENTS,
    RECURRENT,
    STATES_APART,
    has_states,
    keep_apart,
    objection,
)
from tigon.models.verification.small_models import NotBuilt, small_model

FIRST, SECOND = 9, 12  # tokens of the two documents of a sample


def logits_of_second(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    with torch.no_grad():
        return model(input_ids=ids_BT, position_ids=positions, use_cache=False).logits[0, FIRST:].float()


def influence(model: Any) -> float:
    """How much another first document changes the logits of the second one."""
    torch.manual_seed(1)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (1, FIRST + SECOND))
    other = ids.clone()
    other[0, :FIRST] = torch.randint(3, vocabulary, (FIRST,))
    return float((logits_of_second(model, ids) - logits_of_second(model, other)).abs().max())


@pytest.mark.parametrize("family", MODELS)
def test_first_document_does_not_change_the_second(family: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(family, MODELS[family].tiny).eval()
    if objection(model.config) is not None:
        assert influence(model) > 1e-2, "it could be allowed"
        return
    keep_apart(model)
    assert influence(model) < 1e-5


OTHERS = {
    "afmoe": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 16},
    "biogpt": {},
    "falcon": {"alibi": False},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2},
}


def from_config(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 8,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **{**sizes, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", OTHERS)
def test_family_outside_the_table_gets_its_mask(family: str) -> None:
    assert family in MASK_WITHOUT_POSITIONS
    model = from_config(family, **OTHERS[family])
    mixes = influence(model)
    assert mixes > 1e-4 or (family == "falcon" and mixes < 1e-6), "Falcon reads the positions from 5.24 on"
    undo = keep_apart(model)
    assert influence(model) < 1e-6
    undo()
    assert influence(model) == mixes


def test_document_of_a_packed_sample_has_the_logits_of_the_document_alone() -> None:
    """With windows of 8 tokens, which are shorter than the document of 12."""
    for model in (from_config("afmoe", **OTHERS["afmoe"]), tiny_model("gpt_oss", {"sliding_window": 8}).eval()):
        torch.manual_seed(2)
        ids = torch.randint(3, 60, (1, FIRST + SECOND))
        alone = model(input_ids=ids[:, FIRST:], use_cache=False).logits[0].float()
        keep_apart(model)
        torch.testing.assert_close(logits_of_second(model, ids), alone.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", sorted(MASK_WITHOUT_POSITIONS))
@pytest.mark.parametrize("form", ["as its name", "as the former name"])
def test_pass_with_a_cache_gets_no_mask_of_the_new_tokens_alone(family: str, form: str) -> None:
    """Such a mask has no columns for the tokens in the cache."""
    if family == "gpt_oss":
        torch.manual_seed(0)
        model = tiny_model("gpt_oss", {"sliding_window": 64}).eval()
        tigon.patch(model)  # its masks of packed rows are then those of attention_sinks
    elif family == "granitemoehybrid":
        model = hybrid(family).eval()
    else:
        model = from_config(family, **OTHERS[family], **({"sliding_window": 64} if family == "afmoe" else {}))
    trunk = trunk_of(model)
    name = cache_argument(trunk.forward)
    assert name is not None
    if form == "as the former name":
        if name != "cache":
            pytest.skip(f"{name} is its name")
        name = "past_key_values"
    ids, positions = torch.randint(3, 60, (1, FIRST + SECOND)), torch.arange(FIRST + SECOND)[None]

    def passes() -> torch.Tensor:
        """The hidden states of three passes, each over the tokens that follow those in the cache."""
        cache, parts = transformers.DynamicCache(config=model.config), (FIRST, SECOND - 1, 1)
        each = zip(ids.split(parts, 1), positions.split(parts, 1), strict=True)
        inputs = [{"input_ids": tokens, "position_ids": at, "use_cache": True, name: cache} for tokens, at in each]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.cat([trunk(**each).last_hidden_state for each in inputs], 1)

    want = passes()
    undo = keep_apart(model)
    assert torch.equal(passes(), want)
    undo()


@pytest.mark.parametrize(
    "family", ["bloom", "jamba", "mamba", "mamba2", "opt", "recurrent_gemma", "rwkv", "xlstm", "bart", "bert"]
)
def test_family_that_mixes_documents_names_the_reason(family: str) -> None:
    reason = objection(transformers.AutoConfig.for_model(family))
    words = ("state", "numbers the tokens", "does not read where documents begin")
    assert reason is not None and any(word in reason for word in words)


@pytest.mark.parametrize(
    "family",
    proved_by(
        ("bert", "openai-gpt", "rwkv"), sorted(MIX_DOCUMENTS | RECURRENT), "a family of each kind mixes its documents"
    ),
)
def test_family_that_is_refused_by_name_mixes_documents(family: str) -> None:
    try:
        model, _ = small_model(family)
    except NotBuilt as error:
        pytest.skip(str(error))
    assert influence(model.eval()) > 1e-5, "it could be allowed"


HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {}, "bamba": {"attn_layer_indices": [1]}, "falcon_h1": {}, "granitemoehybrid": {},
    "kimi_linear": {}, "lara_mini": {}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]}, "lfm3": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {}, "olmo_hybrid": {}, "qwen3_5_moe_text": {}, "qwen3_5_text": {}, "qwen3_next": {},
    "qwen4_exp_text": {}, "zamba": {}, "zamba2": {},
}  # fmt: skip
"""The families of `STATES_APART`, and the config's fields that give their small model a layer with a state."""


def hybrid(family: str) -> Any:
    """A small model with layers of attention and layers with a state, in fp32."""
    try:
        model, fields = small_model(family)
    except NotBuilt as error:
        pytest.skip(str(error))
    model = tiny_model(family, {**fields, **HYBRIDS[family]}, every_expert=True)
    assert hybrid_layers.runs_of(model)
    if not has_states(model.config):
        pytest.skip(f"its layers get no arguments before transformers {FIRST_RELEASE}")
    return model


def test_every_hybrid_family_that_packs_is_tried() -> None:
    assert {*HYBRIDS} == STATES_APART


ROWS = ((9, 70, 3), (40, 42))  # tokens of the documents of two samples: less than a kernel's chunk, and more


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_model_gives_packed_documents_the_loss_and_gradients_of_documents_alone(family: str) -> None:
    torch.manual_seed(3)
    model = hybrid(family)
    ids = torch.randint(3, 60, (2, sum(ROWS[0])))
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in ROWS])
    weights = torch.randn(*ids.shape, model.get_output_embeddings().weight.shape[0])
    mixed = model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
    parts = zip(ids, weights, ROWS, strict=True)
    alone = []
    for row, weight, sizes in parts:
        for document, its_weight in zip(row.split(sizes), weight.split(sizes), strict=True):
            alone.append(model(input_ids=document[None], use_cache=False).logits[0])
            (alone[-1] * its_weight).sum().backward()
    want = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    undo = keep_apart(model)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat(alone), rtol=1e-4, atol=1e-5)
    got = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        error = (got[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-4, f"{name}: {error:.1e}"
    undo()
    again = model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
    assert torch.equal(again, mixed) and (mixed - packed).abs().max() > 1e-2


def test_bounds_for_the_kernels_of_attention_do_not_reach_layers_with_a_state() -> None:
    """A collator for flash attention gives them, and transformers' PyTorch code refuses them."""
    model = hybrid("qwen3_5_text").eval()
    keep_apart(model)
    ids, positions = torch.randint(3, 60, (1, 82)), torch.cat([torch.arange(40), torch.arange(42)])[None]
    ends = torch.tensor([0, 40, 82], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 42, "max_length_k": 42}
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits, want)


@pytest.mark.parametrize(("family", "name"), [
    ("qwen3_next", "torch_chunk_gated_delta_rule"),
    ("kimi_linear", "chunk_kimi_delta_attention"),
])  # fmt: skip
def test_kernel_that_takes_bounds_runs_all_documents_at_once(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with the arguments of flash-linear-attention's, which runs transformers' code for each document."""
    model = hybrid(family)
    module = next(module for _, module, _ in hybrid_layers.runs_of(model))
    file = sys.modules[type(module).__module__]
    own, calls = getattr(file, name), []

    def kernel(q: Any, k: Any, v: Any, *, g: Any, beta: Any, cu_seqlens: Any, cu_seqlens_cpu: Any, **more: Any) -> Any:
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        calls.append(sizes := cu_seqlens.diff().tolist())
        parts = zip(*(x.split(sizes, dim=1) for x in (q, k, v, g, beta)), strict=True)
        given = {key: value for key, value in more.items() if key != "seq_idx"}
        each = [own(q, k, v, g=g, beta=beta, **given)[0] for q, k, v, g, beta in parts]
        return torch.cat(each, dim=1), None

    ids = torch.randint(3, 60, (2, sum(ROWS[0])))
    positions = torch.stack([torch.cat([torch.arange(size) for size in sizes]) for sizes in ROWS])
    undo = keep_apart(model)
    want = model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()
    undo()
    monkeypatch.setattr(file, name, kernel)
    monkeypatch.setattr(
        hybrid_layers, "runs_in",
        lambda kind, layer: hybrid_layers.PYTORCH if kind is hybrid_layers.CONVOLUTION else kind.library,
    )  # fmt: skip
    keep_apart(model)
    got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert calls == [[*ROWS[0], *ROWS[1]]]
