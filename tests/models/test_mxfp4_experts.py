"""Experts in MXFP4: the op makes one weight dense at a time. Adapters beside them agree with those of dense ones."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from adapted_experts import IDS, adapted, step
from models_helpers import assert_agree
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import tigon
from tigon.models.verification.tiny import tiny_model
from tigon.techniques.lora.adapter_targets import expert_parameters

peft = pytest.importorskip("peft")
WIDTHS = {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 96}


def models() -> tuple[Any, Any]:
    """A GPT-OSS whose experts are in MXFP4, and one with the same numbers as dense weights."""
    from tigon.techniques.lora.mxfp4_experts import Mxfp4Parametrization

    torch.manual_seed(0)
    stored = tiny_model("gpt_oss", WIDTHS).float()
    dense = tiny_model("gpt_oss", WIDTHS).float()
    dense.load_state_dict(stored.state_dict())
    for path in list(expert_parameters(stored)):
        module_path, _, name = path.rpartition(".")
        module = stored.get_submodule(module_path)
        experts, inputs, outputs = getattr(module, name).shape
        blocks = (experts, outputs, inputs // 32)
        packed = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        step = Mxfp4Parametrization(torch.randint(120, 123, blocks, dtype=torch.uint8), torch.float32)
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        register_parametrization(module, name, step, unsafe=True)
        with torch.no_grad():
            dense.get_parameter(path).copy_(getattr(module, name))
    return stored, dense


@pytest.mark.parametrize("targets", [("linear",), ("linear", "experts")], ids=["experts-frozen", "experts-adapted"])
def test_patched_experts_in_mxfp4_agree_with_dense_ones(targets: tuple[str, ...]) -> None:
    stored, dense = (adapted(model, *targets) for model in models())
    want = step(dense)
    report = tigon.patch(stored, linear_cross_entropy=False)
    assert "experts" in {entry.op for entry in report.replaced}
    for _ in range(2):  # nothing of the first forward is left
        assert_agree(step(stored), want)
    assert {p.dtype for n, p in stored.named_parameters() if n.endswith("proj.original")} == {torch.uint8}


@pytest.mark.parametrize("targets", [("linear",), ("linear", "experts")], ids=["experts-frozen", "experts-adapted"])
def test_no_dense_weight_waits_for_the_backward(targets: tuple[str, ...]) -> None:
    stored, dense = models()
    shapes = {tuple(dense.get_parameter(path).shape) for path in expert_parameters(dense)}
    stored = adapted(stored, *targets)
    tigon.patch(stored, linear_cross_entropy=False)
    kept: set[tuple[int, ...]] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = stored(input_ids=IDS, use_cache=False).logits
    logits.sum().backward()
    assert kept and not kept & (shapes | {(shape[0], shape[2], shape[1]) for shape in shapes})


def test_a_patched_model_that_nobody_holds_is_freed() -> None:
    """torch's class of a parametrized module holds the module, so no cache may hold the class."""
    stored, _ = models()
    experts = [module for module in stored.modules() if hasattr(module, "parametrizations")]
    module = weakref.ref(experts[0])
    tigon.patch(stored)
    stored(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    del stored, experts, _
    gc.collect()
    assert module() is None


def test_an_undone_patch_gives_parametrized_experts_their_class_back() -> None:
    stored, _ = models()
    classes = [type(module) for module in stored.modules()]
    tigon.patch(stored).undo()
    assert [type(module) for module in stored.modules()] == classes
