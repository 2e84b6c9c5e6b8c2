"""Layers with a state instead of attention: which code runs them is known before a run, and said."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tigon import patch
from tigon.models import hybrid_layers
from tigon.models.hybrid_layers import (
    PYTORCH,
    TIGON,
    counts_of,
    install_command,
    paths_of,
    paths_of_counts,
    refused_backward,
    slow_layers,
)

DELTA, KIMI, MAMBA, MAMBA2, CONV = (kind.name for kind in hybrid_layers.KINDS)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "qwen3_5_text": ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, {DELTA: 3, CONV: 3}),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"]}, {DELTA: 1, CONV: 1}),
    "kimi_linear": ({"layer_types": ["linear_attention", "full_attention"]}, {KIMI: 1, CONV: 1}),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, {CONV: 2}),
    "mamba": ({"num_hidden_layers": 2}, {MAMBA: 2, CONV: 2}),
    "jamba": ({"num_hidden_layers": 2, "attn_layer_offset": 1, "attn_layer_period": 2}, {MAMBA: 1, CONV: 1}),
    "mamba2": ({"num_hidden_layers": 2}, {MAMBA2: 2, CONV: 2}),
    "bamba": ({"num_hidden_layers": 2, "attn_layer_indices": [1]}, {MAMBA2: 1, CONV: 1}),
    "falcon_h1": ({"num_hidden_layers": 2}, {MAMBA2: 2, CONV: 2}),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"]}, {MAMBA2: 1, CONV: 1}),
    "zamba2": ({"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]}, {MAMBA2: 2, CONV: 2}),
    "llama": ({"num_hidden_layers": 2}, {}),
}


def model_of(family: str) -> torch.nn.Module:
    given = FAMILIES[family][0]
    layers = {"num_hidden_layers": len(given["layer_types"])} if "layer_types" in given else {}
    try:
        config = AutoConfig.for_model(family, **layers, **given)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_is_counted(family: str) -> None:
    assert counts_of(model_of(family)) == FAMILIES[family][1]


def library(monkeypatch: pytest.MonkeyPatch, kind: hybrid_layers.LayerKind) -> None:
    """Let Python find a library that has the kind's kernel."""
    module = ModuleType(kind.module)
    setattr(module, kind.function, lambda: None)
    monkeypatch.setitem(sys.modules, kind.module, module)


def test_without_libraries_pytorch_runs_all_and_one_line_says_what_to_install() -> None:
    paths = paths_of(model_of("qwen3_next"))
    assert [path.runs for path in paths] == [PYTORCH, PYTORCH]
    command = "pip install flash-linear-attention && pip install causal-conv1d --no-build-isolation"
    assert install_command(paths) == command
    said = slow_layers(paths)
    assert said is not None and "\n" not in said
    assert f"PyTorch runs {DELTA} (1 layer) and {CONV} (1 layer)" in said and command in said


@pytest.mark.skipif(
    not hasattr(transformers.integrations, "use_kernel_func_from_hub_with_fallback"),
    reason="before 5.16 the file of a model decides once, when it is imported",
)
@pytest.mark.parametrize("kind", hybrid_layers.KINDS, ids=lambda kind: kind.name)
def test_library_that_is_installed_runs_its_kind_alone(
    kind: hybrid_layers.LayerKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(monkeypatch, kind)
    family = next(name for name, (_, counts) in FAMILIES.items() if kind.name in counts)
    runs = {path.kind: path.runs for path in paths_of(model_of(family))}
    assert runs.pop(kind.name) == kind.library and {*runs.values()} <= {PYTORCH}
    assert {path.kind: path.runs for path in paths_of_counts({kind.name: 1})} == {kind.name: kind.library}


def test_what_an_older_transformers_bound_in_the_models_file_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It binds None if it does not take an installed library, for example without a GPU."""
    kind, model = hybrid_layers.KINDS[0], model_of("qwen3_next")
    library(monkeypatch, kind)
    file = sys.modules[type(model).__module__]
    monkeypatch.setattr(file, kind.function, None, raising=False)
    assert paths_of(model)[0].runs == PYTORCH
    monkeypatch.delitem(sys.modules, kind.module)
    monkeypatch.setattr(file, kind.function, pytest.importorskip)
    assert paths_of(model)[0].runs == kind.library


def test_kernels_of_the_hub_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lfm2")
    monkeypatch.setattr(type(model), "use_kernels", True)
    assert [path.runs for path in paths_of(model)] == [hybrid_layers.HUB] and not install_command(paths_of(model))


def test_report_of_patch_names_the_layers_with_a_state_and_what_runs_them() -> None:
    report = patch(model_of("qwen3_5_text"))
    assert [(path.kind, path.runs) for path in report.layer_paths] == [(DELTA, TIGON), (CONV, TIGON)]
    text = str(report)
    assert "layers with a state\n       3  gated delta rule       tigon\n" in text
    assert "install kernels" not in text
    assert report.to_dict()["layer_paths"][0] == {
        "kind": DELTA, "layers": 3, "runs": TIGON, "library": "flash-linear-attention",
    }  # fmt: skip
    assert "layers with a state" not in str(patch(model_of("llama")))


def test_report_of_patch_says_what_to_install_for_layers_without_an_op() -> None:
    text = str(patch(model_of("kimi_linear")))
    assert text.count("install kernels: pip install flash-linear-attention") == 1


@pytest.mark.parametrize(
    ("triton", "arch", "tilelang", "refused"),
    [
        ("3.3.1", (9, 0), False, False),
        ("3.4.0", (9, 0), False, True),
        ("3.6.0", (9, 0), False, True),
        ("3.6.0", (9, 0), True, False),
        ("3.6.0", (8, 0), False, False),
        ("3.6.0", (10, 0), False, False),
        ("3.7.0", (9, 0), False, True),
        ("3.7.1", (9, 0), False, False),
    ],
)
def test_backward_that_the_library_refuses_on_hopper_is_said_beforehand(
    triton: str, arch: tuple[int, int], tilelang: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, triton, arch, tilelang)
    assert refused_backward(paths_of_counts({DELTA: 3}), arch) is None, "PyTorch runs it"
    for kind in hybrid_layers.KINDS[:2]:
        library(monkeypatch, kind)
    assert refused_backward(paths_of_counts({KIMI: 3}), arch) is None
    paths = paths_of_counts({DELTA: 3, KIMI: 1})
    said = refused_backward(paths, arch)
    assert said == refused_backward(paths), "of this process"
    assert (said is not None) == refused
    words = (f"Triton {triton}", "3 layers", "3.7.1", "tilelang", "uninstall")
    assert said is None or all(word in said for word in words)


def machine(monkeypatch: pytest.MonkeyPatch, triton: str, arch: tuple[int, int], tilelang: bool = False) -> None:
    """Let this process see a GPU, a Triton, and tilelang or not."""
    monkeypatch.setattr("importlib.metadata.version", {"triton": triton}.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "tilelang" and tilelang else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: arch)


def test_report_of_patch_says_that_the_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, hybrid_layers.DELTA_RULE)
    monkeypatch.setattr(hybrid_layers, "arch_here", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")
    text = str(patch(model_of("qwen3_5_text"), convolution=False))
    assert text.count("note: gated delta rule (3 layers) cannot train: flash-linear-attention refuses") == 1


def test_op_takes_the_place_of_a_library_that_refuses_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, hybrid_layers.DELTA_RULE)
    assert patch(model_of("qwen3_5_text")).layer_paths[0].runs == hybrid_layers.DELTA_RULE.library
    monkeypatch.setattr(hybrid_layers, "arch_here", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")
    report = patch(model_of("qwen3_5_text"))
    assert report.layer_paths[0].runs == TIGON and "cannot train" not in str(report)


def test_convolution_that_is_switched_off_keeps_the_gated_delta_rule_too() -> None:
    report = patch(model_of("qwen3_5_text"), convolution=False)
    assert [path.runs for path in report.layer_paths] == [PYTORCH, PYTORCH]


def test_wider_keys_than_the_op_takes_are_named_before_and_after_the_patch() -> None:
    config = AutoConfig.for_model(
        "qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention"] * 2, linear_key_head_dim=256
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    planned = paths_of(model, fused=True)
    assert [path.runs for path in planned] == [PYTORCH, TIGON]
    assert planned == paths_of_counts(counts_of(model), fused=True, width=256)
    report = patch(model)
    assert report.layer_paths == planned
    said = "gated_delta_rule: its keys have 256 numbers; the op's limit is 128; PyTorch runs these layers"
    assert said in report.notes, str(report)
    assert said not in patch(model_of("qwen3_5_text")).notes


def test_chip_whose_kernels_spill_keeps_the_layers_code() -> None:
    runs = {arch: paths_of_counts({DELTA: 3}, fused=True, arch=arch)[0].runs for arch in ((7, 5), (8, 0), (9, 0))}
    assert runs == {(7, 5): PYTORCH, (8, 0): TIGON, (9, 0): TIGON}
    assert "RTX 20, T4" in (hybrid_layers.rule_objection(128, (7, 5)) or "")


def test_plan_for_transformers_without_global_functions_names_the_layers_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hybrid_layers._calls_globals.cache_clear()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.15.1")
    assert [path.runs for path in paths_of_counts({DELTA: 3, CONV: 3}, fused=True)] == [PYTORCH, PYTORCH]
    hybrid_layers._calls_globals.cache_clear()


def test_amd_gpu_is_not_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "3.6.0", (9, 4))
    assert hybrid_layers.arch_here() == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert hybrid_layers.arch_here() == (0, 0)
