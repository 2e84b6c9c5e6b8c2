"""A run says which code runs layers with a state instead of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tigon.errors import RecipeError
from tigon.models import hybrid_layers
from tigon.models.verification.small_models import small_model
from tigon.trainer import prepare
from tigon.trainer.family_training import NAME, letters
from tigon.trainer.guards import preflight


def test_run_names_the_code_of_its_layers_and_on_a_gpu_what_to_install(
    here: Path, recipe: Any, tigon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = small_model("mamba")
    model.save_pretrained(here / NAME)
    letters().save_pretrained(here / NAME)
    (here / "rows.jsonl").write_text('{"prompt": "say karan", "completion": "karan"}\n' * 4, encoding="utf-8")
    path = recipe(
        model={"name": NAME, "config": None, "attention": "eager"}, train={"steps": 1, "batch_size": 1},
        data={"source": "rows.jsonl", "sequence_length": 48, "eval_fraction": 0},
    )  # fmt: skip
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("layers ")]
    assert line == "layers   Mamba scan (2 layers): PyTorch; short convolution (2 layers): PyTorch"
    assert "pip install" not in outcome.out, "on a CPU the library would not help"
    (warning,) = prepare.slow_layer_warning(hybrid_layers.paths_of(model), "cuda")
    assert "Mamba scan (2 layers)" in warning and "pip install mamba-ssm causal-conv1d" in warning


def test_run_whose_backward_would_be_refused_ends_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_layers, "arch_here", lambda: (9, 0))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")
    rule = hybrid_layers.DELTA_RULE
    paths = (hybrid_layers.LayerPath(rule.name, 3, rule.library, rule.library),)
    preflight.check_backward("qwen", paths, torch.device("cpu"))
    with pytest.raises(RecipeError, match=r"name is qwen: gated delta rule .* Triton 3.6.0.* install Triton 3.7.1"):
        preflight.check_backward("qwen", paths, torch.device("cuda", 0))
