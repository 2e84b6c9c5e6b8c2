"""The flag `attention_sinks`: which models run the op, with which masks, and that their steps are the same."""

from __future__ import annotations

import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn

import tigon
from second_proofs import proved_by
from tigon import ops
from tigon.errors import PatchError
from tigon.models.packed_documents import keep_apart
from tigon.models.patch import flags_of, unpatch
from tigon.models.seams.attention_sinks import CausalRows
from tigon.models.verification.tiny import tiny_config, tiny_model
from tigon.ops.attention_with_sinks import attention_with_sinks_fwd
from tigon.techniques.checkpointing import checkpointing, layer_function

LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 4}
FAMILIES = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint")
IDS = 3 + torch.arange(26).view(2, 13) % 50
RIGHT = torch.ones(2, 13, dtype=torch.long)
RIGHT[1, 9:] = 0
POSITIONS = torch.cat([torch.arange(5), torch.arange(8)])[None].expand(2, -1)
INPUTS: dict[str, dict[str, Any]] = {
    "whole rows": {},
    "padding at the right": {"attention_mask": RIGHT, "labels": IDS.where(RIGHT == 1, -100)},
    "padding at the left": {"attention_mask": RIGHT.flip(1), "labels": IDS.where(RIGHT.flip(1) == 1, -100)},
}


def model_of(family: str = "gpt_oss", **config: Any) -> Any:
    """A small model whose sinks differ from each other."""
    try:
        small = tiny_config(family, {**LAYERS, **config})
    except PatchError:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small).train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
        if "router" in name or "gate" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


def step(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, "use_cache": False, **inputs}).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        difference = float((got[name] - value).abs().max())
        assert difference <= 1e-6 + 1e-4 * float(value.abs().max()), (name, difference)


def calls() -> Any:
    return patch.object(ops, "attention_with_sinks", wraps=ops.attention_with_sinks)


@pytest.mark.parametrize(
    "family", proved_by(("gpt_oss", "granite_swa", "flint"), FAMILIES, "its attention is Granite-SWA's")
)
def test_family_runs_the_op_with_the_same_step(family: str) -> None:
    """One layer with a window and one without."""
    model = model_of(family)
    want = step(model)
    report = tigon.patch(model, attention_sinks=True)
    with calls() as called:
        got = step(model)
    assert called.call_count == 2 and {call.kwargs["window"] for call in called.call_args_list} == {None, 4}
    assert report.counts["attention_with_sinks"] == 3  # two layers, and the module that makes their masks
    assert_close(got, want)


@pytest.mark.parametrize("inputs", INPUTS)
def test_padding_gives_the_same_step_and_the_op_if_it_is_at_the_right(inputs: str) -> None:
    model = model_of()
    want = step(model, **INPUTS[inputs])
    tigon.patch(model, attention_sinks=True)
    with calls() as called:
        got = step(model, **INPUTS[inputs])
    assert called.call_count == (0 if inputs == "padding at the left" else 2)
    assert_close(got, want)


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa"])
def test_packed_documents_are_lengths_instead_of_a_mask(family: str) -> None:
    """GPT-OSS's own code ignores the positions; `keep_apart` hands their documents to it."""
    model = model_of(family)
    keep_apart(model)
    want = step(model, position_ids=POSITIONS)
    assert abs(want["loss"] - step(model)["loss"]) > 1e-4
    tigon.patch(model, attention_sinks=True)
    with calls() as called:
        got = step(model, position_ids=POSITIONS)
    lengths = {tuple(call.kwargs["cu_seqlens"].tolist()) for call in called.call_args_list}
    assert lengths == {(0, 5, 13, 18, 26)} and called.call_args.kwargs["max_length"] == 8
    assert_close(got, want)
    assert_close(step(model), step(undone(model)))  # rows of one document need no lengths


def undone(model: Any) -> Any:
    unpatch(model)
    return model


def test_undo_restores_attention_masks_and_rotary_embedding() -> None:
    model = model_of()
    before = {path: type(module) for path, module in model.named_modules()}
    report = tigon.patch(model, attention_sinks=True)
    assert {"attention_sinks", "rope"} <= flags_of(model)
    again = tigon.patch(model, attention_sinks=True)
    assert not again.replaced and "already patched" in str(again)
    report.undo()
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_patch_after_one_without_it_adds_it_and_undoes_it_first() -> None:
    model = model_of()
    want = step(model)
    first = tigon.patch(model, attention_sinks=False)
    second = tigon.patch(model, attention_sinks=True)
    assert second.counts == {"attention_with_sinks": 3}
    with pytest.raises(PatchError, match="undo the later patch first"):
        first.undo()
    second.undo()
    assert_close(step(model), want)
    first.undo()


def test_op_runs_unless_the_flag_is_false() -> None:
    assert "attention_with_sinks" in tigon.patch(model_of()).counts
    assert "attention_with_sinks" not in tigon.patch(model_of(), attention_sinks=False).counts


def test_copy_by_pickle_and_recomputed_layers_give_the_same_step() -> None:
    model = model_of()
    want = step(model)
    tigon.patch(model, attention_sinks=True)
    assert_close(step(pickle.loads(pickle.dumps(model))), want)
    tigon.checkpoint(model, "full")
    with calls() as called:
        assert_close(step(model), want)
    assert called.call_count == 4


def test_selective_checkpointing_keeps_the_results_of_attention() -> None:
    model = model_of()
    want = step(model)
    tigon.patch(model, attention_sinks=True)
    layer_function.enable(model, context_fn=checkpointing.selective_contexts)
    with patch.object(attention_with_sinks_fwd, "_composite", wraps=attention_with_sinks_fwd._composite) as computed:
        assert_close(step(model), want)
    assert computed.call_count == 2


@pytest.mark.parametrize("family", ["gpt_oss", "flint"])
def test_compiled_forward_is_one_graph_that_runs_the_op_with_the_same_loss(family: str) -> None:
    """Flint's mask reads positions, and GPT-OSS's does not."""
    model = model_of(family)
    want = step(model)
    tigon.patch(model, attention_sinks=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with patch.object(attention_with_sinks_fwd, "_composite", wraps=attention_with_sinks_fwd._composite) as computed:
        got = step(compiled)
    assert computed.call_count == 2
    assert_close(got, {f"_orig_mod.{name}" if "." in name else name: t for name, t in want.items()})


@pytest.mark.parametrize("family", ["gpt_oss", "flint"])
def test_rows_without_positions_are_one_document_without_a_look_at_them(family: str) -> None:
    """On a GPU the host would wait for it."""
    model = model_of(family)
    tigon.patch(model, attention_sinks=True)
    with patch.object(CausalRows, "of_positions", side_effect=AssertionError), calls() as called:
        step(model)
    assert called.call_count == 2


def test_autocast_computes_attention_in_bf16() -> None:
    model = model_of()
    tigon.patch(model, attention_sinks=True)
    with torch.autocast("cpu", torch.bfloat16), calls() as called:
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert {call.args[0].dtype for call in called.call_args_list} == {torch.bfloat16}
    assert model.model.layers[0].self_attn.sinks.grad.dtype == torch.float32


def test_dropout_and_requested_weights_run_the_models_own_code() -> None:
    model = model_of(attention_dropout=0.5)
    tigon.patch(model, attention_sinks=True)
    with calls() as called:
        step(model, position_ids=POSITIONS)
        model.eval()
        weights = model(input_ids=IDS, use_cache=False, output_attentions=True).attentions
    assert called.call_count == 0
    assert [w.shape[-2:] for w in weights] == [(13, 13)] * 2 and float(
        weights[1][0, 0, 2, 3:].detach().abs().max()
    ) == 0.0


def test_generation_with_a_cache_gives_the_same_tokens() -> None:
    model = model_of().eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(IDS[:1], **options)
    tigon.patch(model, attention_sinks=True)
    assert torch.equal(model.generate(IDS[:1], **options), want)


def test_dense_mask_of_documents_is_that_of_packed_documents() -> None:
    rows, query = CausalRows.of_positions(POSITIONS), torch.zeros(2, 4, 13, 8)
    sees = rows.dense(query, 3) == 0
    assert sees[0, 0, 6].tolist() == [place in (5, 6) for place in range(13)]
    assert torch.equal(sees[0], sees[1]) and not sees[0, 0].triu(1).any()


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("llama", {"layer_types": None}, "it has no eager attention with sinks"),
        ("mimo_v2_flash", {}, "has eager attention without sinks"),
        ("hy_v4", {"layer_types": None}, "reads or changes the mask"),
    ],
)
def test_model_that_it_does_not_serve_is_left_alone_with_the_reason(
    family: str, config: dict[str, Any], words: str
) -> None:
    model = model_of(family, **config)
    with pytest.raises(PatchError, match=words):
        tigon.patch(model, attention_sinks=True)
    assert not flags_of(model)


def test_another_attention_implementation_is_left_alone() -> None:
    model = model_of()
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(PatchError, match="its attention is flex_attention"):
        tigon.patch(model, attention_sinks=True)


def test_changed_formula_is_left_alone() -> None:
    """For example a release that scales the sink."""
    model = tiny_model("gpt_oss")
    modeling = __import__("sys").modules[type(model).__module__]
    original = modeling.eager_attention_forward

    def other(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        return original(module, 1.01 * query, *rest, **options)

    with (
        patch.object(modeling, "eager_attention_forward", other),
        pytest.raises(PatchError, match="differs from the module's"),
    ):
        tigon.patch(model, attention_sinks=True)
