"""The cache is off in every config that a forward reads, and saved models keep the setting of their checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models_helpers import tiny_model
from transformers import CONFIG_MAPPING, AutoConfig

from tigon.models import MODELS
from tigon.models.kv_cache import cache_as_in, kv_widths, queries_per_key, without_cache
from tigon.models.verification.small_models import small_model
from tigon.techniques.head_groups import key_heads


def caches(config: Any) -> dict[str, Any]:
    """Name of each part -> its `use_cache`; parts without the field are left out."""
    parts = {"top": config, **{name: getattr(config, name) for name in getattr(config, "sub_configs", {})}}
    return {name: vars(part)["use_cache"] for name, part in parts.items() if "use_cache" in vars(part)}


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "llava", "mllama"])
def test_cache_is_switched_off_where_the_forward_reads_it_and_back_on(family: str) -> None:
    model = tiny_model(family, MODELS[family].tiny)
    before = caches(model.config)
    assert before and any(before.values())
    of_modules = [module.config for module in model.modules() if "use_cache" in vars(getattr(module, "config", model))]
    undo = without_cache(model)
    assert set(caches(model.config).values()) == {False}
    assert not any(config.use_cache for config in of_modules)
    undo()
    assert caches(model.config) == before


@pytest.mark.parametrize("family", ["llama", "gemma3", "llava"])
def test_saved_config_has_the_setting_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Also for a top config without the field, in which the Trainer sets it."""
    model = tiny_model(family, MODELS[family].tiny)
    model.save_pretrained(tmp_path / "before")
    original = type(model.config).from_pretrained(tmp_path / "before")
    without_cache(model)
    model.config.use_cache = False
    with cache_as_in(model, original):
        model.save_pretrained(tmp_path / "after")
    assert not any(caches(model.config).values())
    want, got = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert got == want


def test_text_part_of_a_composite_checkpoint_has_the_setting_of_that_part() -> None:
    composite = small_model("qwen3_5")[0].config
    composite.text_config.use_cache = True
    part, _ = small_model("qwen3_5_text")
    without_cache(part)
    with cache_as_in(part, composite):
        assert part.config.use_cache is True
    assert part.config.use_cache is False


def test_layers_that_differ_in_their_heads_have_caches_of_their_own() -> None:
    """transformers refuses to read such numbers from the config of the whole model."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("transformers without Gemma 4")
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        global_head_dim=32, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=8,
    )  # fmt: skip
    assert kv_widths(config, 20) == [(4 * 16 * 7,) * 2] * 5 + [(2 * 32 * 20,) * 2]
    assert queries_per_key(config) == 4
    assert key_heads(config) == 2
