"""Trained models with a score or labels: they are loaded with their head, merged and exported whole."""

import json
import shutil

import pytest
import torch

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def whole_reward_model(checkpoint, tmp_path_factory):
    """A reward model as a run without adapters saves it."""
    from transformers import AutoModelForCausalLM

    from tigon.models.loading.reward_model import with_score

    model = with_score(AutoModelForCausalLM.from_pretrained(str(checkpoint)))
    torch.nn.init.normal_(model.score.weight, std=0.1)
    folder = tmp_path_factory.mktemp("reward") / "whole"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder)
    return folder


def test_a_whole_reward_model_is_exported_with_its_score_and_a_padding_token(tigon, whole_reward_model, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = tigon("export", whole_reward_model, tmp_path / "out")
    assert done.code == 0 and "scores differ by 0.00%" in done.out, done.err
    ours, theirs = (
        AutoModelForSequenceClassification.from_pretrained(folder) for folder in (whole_reward_model, tmp_path / "out")
    )
    assert torch.equal(ours.score.weight, theirs.score.weight)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.config.pad_token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id)
    batch = torch.tensor([[5, 6, 7], [8, 9, theirs.config.pad_token_id]])
    assert theirs(batch).logits.shape == (2, 1)


def test_a_merged_reward_model_names_its_padding_token(tigon, reward_adapter, tmp_path):
    done = tigon("export", reward_adapter, tmp_path / "out", "--merge")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is not None


def test_chat_refuses_a_reward_model_in_one_line(tigon, whole_reward_model, reward_adapter):
    for folder in (whole_reward_model, reward_adapter):
        line = tigon("chat", folder, "--prompt", "Hi").error_line()
        assert "gives labels or scores and writes no text" in line and "text-classification" in line


def test_gguf_refuses_a_whole_reward_model(tigon, whole_reward_model, tmp_path):
    line = tigon("export", whole_reward_model, tmp_path / "out", "--gguf", "f16").error_line()
    assert "tigon writes no GGUF file of a reward model or classifier" in line
