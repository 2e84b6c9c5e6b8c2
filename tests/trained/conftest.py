"""A checkpoint with a chat template, adapters for it, and a run folder, made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from trained_models import make_model, make_tokenizer

from commands import tigon, undrawn  # noqa: F401


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapter(checkpoint: Path) -> Path:
    """Adapters of the checkpoint that change its answers."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], base_model_name_or_path=str(checkpoint))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(str(checkpoint)), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = checkpoint.with_name("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reward_adapter(checkpoint: Path) -> Path:
    """Adapters of a reward model over the checkpoint, with a trained score layer."""
    import peft
    from transformers import AutoModelForCausalLM

    from tigon.models.loading.reward_model import with_score

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], base_model_name_or_path=str(checkpoint), task_type="SEQ_CLS"
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(with_score(AutoModelForCausalLM.from_pretrained(str(checkpoint))), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "score" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = checkpoint.with_name("reward-adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Path:
    """A run folder without results. A test adds `model/`, adapters or `heads/`."""
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = f"model: {{name: {checkpoint}}}\ntrain: {{steps: 1}}\n"
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder
