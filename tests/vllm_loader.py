"""vLLM's steps from a folder of adapters to the changes of weights, written anew from what its sources do.

vllm/lora/peft_helper.py, lora_weights.py, lora_model.py, utils.py and model_manager.py of 0.33.0: `validate_legal`,
`get_rank_and_scaling`, `parse_fine_tuned_lora_name`, `optimize` and `_stack_moe_lora_weights`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

READ_BY = {"r", "lora_alpha", "target_modules", "bias", "modules_to_save", "use_rslora", "use_dora"}


def served(folder: Path, *, n_experts: int = 0, max_rank: int = 512) -> dict[str, torch.Tensor]:
    """Module path -> what vLLM adds to its weight, (out, in), or (experts, out, in).

    Raises:
        ValueError: vLLM refuses the folder.
    """
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert {"r", "lora_alpha", "target_modules"} <= config.keys()
    if config["modules_to_save"] or config["use_dora"] or config["bias"] != "none" or config["r"] > max_rank:
        raise ValueError("not legal")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            continue
        path, factor = _parsed(name)
        factors.setdefault(path, {})[factor] = tensor
    deltas = {}
    for path, pair in factors.items():
        rank, alpha = (
            next((value for key, value in config[pattern].items() if path.endswith(f".{key}")), config[default])
            for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        a, b = pair["A"], pair["B"] * (alpha / (math.sqrt(rank) if config["use_rslora"] else rank))
        if ".experts" in path:
            # both projections or none: the manager asserts it
            owner = path.removesuffix(".base_layer")
            assert {owner, f"{owner}.base_layer"} <= factors.keys()
            a = a.reshape(n_experts, -1, a.shape[-1])
            b = b.reshape(b.shape[0], -1, n_experts).permute(2, 0, 1)
            assert a.shape[1] == b.shape[2] == config["r"]
        deltas[path] = b @ a
    return deltas


def _parsed(name: str) -> tuple[str, str]:
    parts = name.split(".")
    start = 2 if name.startswith("base_model.model.") else 0
    if parts[-1] == "weight" and parts[-2] in ("lora_A", "lora_B"):
        return ".".join(parts[start:-2]), parts[-2][-1]
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[start:-1]), parts[-1][-1]
    raise ValueError(f"{name} is unsupported LoRA weight")
