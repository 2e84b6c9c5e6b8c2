"""Whether vLLM can serve a folder of adapters, by the rules of its loader.

tigon does not import vLLM, because vLLM 0.33 pins torch 2.14 and transformers before 5.21 with CUDA, so it is seldom
installed where a model is trained. The rules were read in its sources: lora/peft_helper.py, lora_model.py, utils.py,
model_manager.py and config/lora.py of vLLM 0.33.0. Other releases were not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.models.loading.weight_files import Header, read_headers

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that `--max-lora-rank` takes."""
_PREFIX = "base_model.model."
_PARTS = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
_UNREAD = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
"""Ends of names that vLLM skips: copies of the base model's weights."""
_SPECIAL = {"lm_head", "embed_tokens", "wte"}
_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisations that leave the base model's weights as they are."""
_EXPERTS, _FIRST = ".experts", ".experts.base_layer"


@dataclass(frozen=True)
class Verdict:
    """What vLLM makes of a folder of adapters."""

    refusals: tuple[str, ...] = ()
    """Why it does not load them; empty if it does."""
    max_rank: int = MAX_RANKS[0]
    """The least `--max-lora-rank`."""
    conditions: tuple[str, ...] = ()
    """What else must hold."""

    @property
    def refusal_line(self) -> str:
        """The refusals in a line for the console."""
        return f"vLLM does not load these adapters: {'; '.join(self.refusals)}; serve a merged model"


def judge(folder: Path) -> Verdict:
    """Judge the adapters in `folder`.

    Raises:
        UsageError: The file of the adapters is damaged.
        OSError: A file is missing.
    """
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    headers = read_headers([folder / "adapter_model.safetensors"])
    modules: dict[str, dict[str, Header]] = {}
    unknown = []
    for name, header in headers.items():
        if name.endswith(_UNREAD):
            continue
        found = split(name)
        if found is None:
            unknown.append(name)
        else:
            modules.setdefault(found[0], {})[_factor(found[1])] = header
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    alone = [path for path, factors in modules.items() if factors.keys() != {"A", "B"}]
    refusals = _of_config(config, rank)
    refusals += [f"the file has one of the two factors of {alone[0]}"] if alone else _of_experts(modules)
    if unknown and not refusals:
        refusals.append(f"it reads no tensor named {unknown[0]}")
    max_rank = next((value for value in MAX_RANKS if value >= rank), MAX_RANKS[-1])
    return Verdict(tuple(refusals), max_rank, tuple(_conditions(modules)))


def split(name: str) -> tuple[str, str] | None:
    """A tensor's name -> the module's path and the part, such as lora_A.weight. None: vLLM raises an error for it."""
    path = name.removeprefix(_PREFIX)
    return next(((path.removesuffix(f".{part}"), part) for part in _PARTS if path.endswith(f".{part}")), None)


def _factor(part: str) -> str:
    """A or B."""
    return part.removeprefix("lora_").removeprefix("embedding_")[0]


def _of_config(config: dict[str, Any], rank: int) -> list[str]:
    refusals = []
    if config.get("use_dora"):
        refusals.append("it has no DoRA (lora.dora)")
    if config.get("modules_to_save"):
        refusals.append("it takes no whole modules beside adapters (lora.modules_to_save)")
    if config.get("bias", "none") != "none":
        refusals.append("it takes no trained biases (lora.bias)")
    if rank > MAX_RANKS[-1]:
        refusals.append(f"their rank is {rank}, and its highest is {MAX_RANKS[-1]}")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _INITS:
        refusals.append(f"init_lora_weights is {init}, which changed the base model's weights")
    return refusals


def _of_experts(modules: dict[str, dict[str, Header]]) -> list[str]:
    """vLLM needs adapters of both projections: `experts.base_layer` is the first, (gate and up, hidden)."""
    owners = {path[: path.index(_EXPERTS) + len(_EXPERTS)] for path in modules if path.endswith((_EXPERTS, _FIRST))}
    for owner in sorted(owners):
        second, first = modules.get(owner), modules.get(f"{owner}.base_layer")
        if first is None or second is None:
            return [f"it needs adapters of both projections of {owner}"]
        hidden = {first["A"].shape[1], second["B"].shape[0]}
        if len(hidden) > 1 or first["B"].shape[0] not in (2 * second["A"].shape[1], second["A"].shape[1]):
            return [f"{owner}.base_layer is not the first projection"]
    return []


def _conditions(modules: dict[str, dict[str, Header]]) -> list[str]:
    conditions = []
    special = sorted({path.rpartition(".")[2] for path in modules} & _SPECIAL)
    if special:
        conditions.append(
            f"Adapters of {' and '.join(special)} load only if the model's class in vLLM lists them in "
            "`embedding_modules`, as Llama's does."
        )
    if any(path.endswith(_EXPERTS) for path in modules):
        conditions.append(
            "Adapters of experts load if the model's class in vLLM sets `is_3d_moe_weight`, as GPT-OSS's does. For "
            "others start vLLM with `enable_mixed_moe_lora_format`, and set `is_3d_lora_weight` in the `LoRARequest`."
        )
    return conditions
