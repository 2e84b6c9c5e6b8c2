"""Tiny vision-language models of several families with their processors, and rows with images, all made here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

_EXAMPLE = Path(__file__).parents[1] / "examples" / "vision" / "make_model.py"


def example() -> Any:
    """The example that makes a tiny SmolVLM and its rows."""
    spec = importlib.util.spec_from_file_location("make_model", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smolvlm(folder: Path) -> Path:
    """A checkpoint of SmolVLM's family (idefics3)."""
    example().save_model(folder, hidden_size=32)
    return folder


def llava(folder: Path) -> Path:
    """A checkpoint of LLaVA's family: a CLIP tower and a Llama."""
    import torch
    from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaProcessor, set_seed
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    made = example()
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images, made.processor().tokenizer, patch_size=8, vision_feature_select_strategy="default",
        chat_template=made.CHAT_TEMPLATE, num_additional_image_tokens=1,
    )  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    n_ids = len(processor.tokenizer)
    config = LlavaConfig(
        text_config={"model_type": "llama", **sizes, "num_key_value_heads": 1, "vocab_size": n_ids, "pad_token_id": 0,
                     "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1},
        vision_config={"model_type": "clip_vision_model", **sizes, "image_size": 32, "patch_size": 8},
        image_token_id=processor.image_token_id, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    set_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def qwen2_5_vl(folder: Path) -> Path:
    """A checkpoint of Qwen2.5-VL's family. Its processor reads videos too, for which transformers needs torchvision."""
    import torch
    from transformers import (
        AutoModelForImageTextToText,
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        set_seed,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    made = example()
    tokenizer = made.processor().tokenizer
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]}
    )
    limits = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(patch_size=8, merge_size=2, size=limits), tokenizer,
        Qwen2VLVideoProcessor(patch_size=8, merge_size=2),
        chat_template=made.CHAT_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>"),
    )  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config={**sizes, "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer),
                     "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 2, "patch_size": 8,
                       "out_hidden_size": 32, "window_size": 32, "fullatt_block_indexes": [1]},
        tie_word_embeddings=False, **ids,
    )  # fmt: skip
    set_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def without_images(folder: Path) -> Path:
    """A checkpoint of text alone, with a tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = example().processor().tokenizer
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


FAMILIES = {"smolvlm": smolvlm, "llava": llava, "qwen2_5_vl": qwen2_5_vl}
# Before transformers 5.23 every processor of images needs torchvision.
_WITHOUT_TORCHVISION = Version(importlib.metadata.version("transformers")) >= Version("5.23")
NEEDS = {"qwen2_5_vl": "torchvision"} if _WITHOUT_TORCHVISION else dict.fromkeys(FAMILIES, "torchvision")


def checkpoint_in(store: Path, family: str) -> Path:
    """A checkpoint with its processor, made once in a folder. Skips the test if the family's package is missing."""
    if family in NEEDS:
        pytest.importorskip(NEEDS[family])
    return store / family if (store / family).exists() else FAMILIES[family](store / family)


"""Family -> a package that its processor needs."""


def write(path: Path, *rows: Any) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
