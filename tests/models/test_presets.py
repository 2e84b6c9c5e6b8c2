"""Shapes that tigon carries: their sizes are those of the checkpoints, and hub ids find them."""

import pytest

from tigon.models.loading.config import build_on_meta, load_config
from tigon.models.loading.presets import HUB_SHAPES, MULTIMODAL_SHAPES, PRESETS, carried, checkpoint_of

# Billions of parameters that llama.cpp counts in the published checkpoints. It counts what tigon does not load: a layer
# for multi-token prediction in GLM-4.5-Air (3.6), and keys and values of Gemma's layers that share them (0.02, 0.06).
# It has no encoders of images, so Gemma's are those of the text.
COUNTED = {
    "qwen3.5-0.8b": 0.75239,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.90,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3-next-80b-a3b": 79.67,
    "kimi-linear-48b-a3b": 49.12,
    "glm-4.7-flash": 29.94,
    "google/gemma-4-E2B-it": 4.65 - 0.02,
    "google/gemma-4-E4B-it": 7.52 - 0.06,
    "google/gemma-4-26B-A4B-it": 25.23,
    "google/gemma-4-31B-it": 30.70,
}


@pytest.mark.parametrize("name", COUNTED)
def test_shapes_of_hybrids_and_mixtures_have_the_parameters_of_the_checkpoints(name):
    model = build_on_meta(name, load_config(name))
    parts = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    held = {
        id(parameter): parameter.numel()
        for path, parameter in model.named_parameters()
        if not any(part in path for part in parts)
    }
    assert sum(held.values()) / 1e9 == pytest.approx(COUNTED[name], rel=0.002)


def test_glm_without_the_layer_for_multi_token_prediction_has_its_published_size():
    model = build_on_meta("glm-4.5-air", load_config("glm-4.5-air"))
    layer = sum(parameter.numel() for parameter in model.model.layers[-1].parameters())
    head = 2 * 151552 * 4096 + 2 * 4096 * 4096  # the extra layer has an embedding, a head and a joining matrix
    assert (sum(p.numel() for p in model.parameters()) + layer + head) / 1e9 == pytest.approx(110.47, rel=0.001)


def test_ids_that_people_type_find_a_shape():
    for typed, shape in {
        "Qwen/Qwen3.5-9B": "qwen3.5-9b",
        "qwen/qwen3.5-9b": "qwen3.5-9b",
        "unsloth/Qwen3.5-9B": "qwen3.5-9b",
        "Qwen/Qwen3.5-9B-Base": "qwen3.5-9b",
        "Qwen/Qwen3.6-35B-A3B": "qwen3.5-35b-a3b",
        "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
        "unsloth/gemma-4-E4B-it": "google/gemma-4-E4B-it",
    }.items():
        assert carried(typed) == shape
    for unknown in ("Qwen/Qwen3.5-9B-FP8", "someone/Qwen3.5-9B", "unsloth/", "Qwen3.5-9B", "recipe.yaml", ""):
        assert carried(unknown) is None, unknown


def test_a_preset_stands_for_the_instruction_tuned_checkpoint():
    assert checkpoint_of("llama-3.2-1b") == "meta-llama/Llama-3.2-1B-Instruct"
    assert checkpoint_of("qwen3.5-27b") == "Qwen/Qwen3.5-27B"
    assert HUB_SHAPES.keys().isdisjoint(MULTIMODAL_SHAPES) and PRESETS.keys().isdisjoint(MULTIMODAL_SHAPES)


def test_a_folder_named_as_a_model_of_the_hub_is_not_taken_for_its_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "unsloth/Llama-3.2-1B"
    assert carried(name) == "llama-3.2-1b"
    (tmp_path / name).mkdir(parents=True)
    assert carried(name) is None
