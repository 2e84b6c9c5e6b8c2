"""A patched model's pass reads nothing from the GPU to make its mask, if its caller gives no positions."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from second_proofs import proved_by
from tigon.models import MODELS
from tigon.models.kv_cache import cache_argument
from tigon.models.seams.base import PatchedModule
from tigon.models.seams.mask import MaskSeam
from tigon.models.verification.tiny import tiny_batch, tiny_model

transformers = pytest.importorskip("transformers")

READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "nonzero"})
# A count that a GPU's event announces, and two checks that only labels on the CPU get.
OF_THE_HEAD = {"inputs.py", "prepared_targets.py", "loss.py"}
FIRST = ("llama", "gemma3_text", "llama4_text", "gpt_neox")
each_family = pytest.mark.parametrize(
    "family", proved_by(FIRST, MODELS, "the trunks of transformers make positions and masks in the same words")
)


class Reads(TorchDispatchMode):
    """The files whose code reads a value of a tensor. On a GPU the host waits for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.files: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in READS:
            frames = [frame.filename for frame in traceback.extract_stack()[:-1]]
            self.files.append(Path([file for file in frames if "/torch/" not in file][-1]).name)
        return func(*args, **(kwargs or {}))


def patched(family: str) -> Any:
    model = tiny_model(family, MODELS[family].tiny).train()
    tigon.patch(model)
    return model


def without_seam(model: Any) -> Any:
    """The model with transformers' own masks."""
    for module in model.modules():
        if isinstance(module, PatchedModule) and isinstance(module._tigon_seam, MaskSeam):
            module.__class__ = module._tigon_base
    return model


def step(model: Any, **inputs: Tensor) -> tuple[list[str], list[Tensor]]:
    """The files that read a value in a forward and backward pass, and the loss with all gradients."""
    batch = {**tiny_batch(torch.device("cpu")), "use_cache": False, **inputs}
    if model.config.get_text_config().pad_token_id is not None:
        model.config.pad_token_id = None  # some models look for padding to warn about
    with Reads() as reads:
        loss = model(**batch).loss
        loss.backward()
    return reads.files, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@each_family
def test_pass_without_positions_waits_for_nothing_and_computes_the_same_bits(family: str) -> None:
    files, results = step(patched(family))
    assert set(files) <= OF_THE_HEAD
    before, expected = step(without_seam(patched(family)))
    if not MODELS[family].towers_of_any_family and family in FIRST:
        assert "masking_utils.py" in before
    assert len(results) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_positions_of_packed_documents_still_make_their_mask() -> None:
    positions = torch.arange(18).repeat(2, 1)
    positions[1, 7:] -= 7
    files, results = step(patched("llama"), position_ids=positions)
    _, expected = step(without_seam(patched("llama")), position_ids=positions)
    assert "masking_utils.py" in files
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    _, one_document = step(patched("llama"))
    assert not torch.equal(results[0], one_document[0])


def test_caller_may_give_positions_by_place() -> None:
    trunk, ids = patched("llama").model, tiny_batch(torch.device("cpu"))["input_ids"]
    packed = torch.arange(18).repeat(2, 1) % 9
    with Reads() as reads:
        by_place = trunk(ids, None, packed, use_cache=False).last_hidden_state
    assert "masking_utils.py" in reads.files
    assert torch.equal(by_place, trunk(ids, position_ids=packed, use_cache=False).last_hidden_state)
    assert not torch.equal(by_place, trunk(ids, use_cache=False).last_hidden_state)


def test_masks_of_padding_and_of_a_cache_are_those_of_transformers() -> None:
    ids = tiny_batch(torch.device("cpu"))["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    with_seam, plain = patched("mistral").eval(), without_seam(patched("mistral").eval())
    with torch.no_grad():
        results = []
        for model in (with_seam, plain):
            cache = {cache_argument(model.model.forward): transformers.DynamicCache(config=model.config)}
            first = model.model(ids[:, :9], use_cache=True, **cache)
            second = model.model(ids[:, 9:], **cache).last_hidden_state
            results.append((model.model(ids, attention_mask=mask).last_hidden_state, first.last_hidden_state, second))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_the_patched_model_changes_and_undo_restores_it() -> None:
    other = tiny_model("llama", MODELS["llama"].tiny)
    model = tiny_model("llama", MODELS["llama"].tiny)
    before = type(model.model)
    report = tigon.patch(model)
    assert type(model.model) is not before and type(other.model) is before
    assert "mask" not in report.counts and "mask" not in str(report)
    report.undo()
    assert type(model.model) is before


def test_model_that_makes_other_positions_is_left_alone() -> None:
    from transformers import AutoModelForCausalLM, OPTConfig

    config = OPTConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32
    )
    model = AutoModelForCausalLM.from_config(config)
    assert not any(MaskSeam().candidate(module) for module in model.modules())
