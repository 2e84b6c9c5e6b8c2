"""A checkpoint folder's weight files are compared with its model."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tigon.doctor.model import check_model

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip


def test_missing_and_unused_tensors_and_damaged_files_are_named(tmp_path):
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    assert not check_model(str(tmp_path)).findings
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "visual.patch": tensors["lm_head.weight"].clone()}, file, {"format": "pt"})
    (note,) = check_model(str(tmp_path)).findings
    assert (note.level, note.id) == ("note", "unused-tensors") and "visual.patch" in note.what
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    (problem,) = check_model(str(tmp_path)).findings
    assert (problem.level, problem.id) == ("problem", "weights") and "lm_head.weight" in problem.what
    file.write_bytes(b"damaged")
    (problem,) = check_model(str(tmp_path)).findings
    assert str(file) in problem.what
