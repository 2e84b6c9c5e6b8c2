"""tigon's layers for transformers' `use_kernels`, as a local repository of the package `kernels`.

    folder = tigon.integrations.hub_kernels.write_repository("tigon-kernels")
    config = KernelConfig(tigon.integrations.hub_kernels.mapping(folder), use_local_kernel=True)
    model = AutoModelForCausalLM.from_pretrained("path/to/model")
    model.train().set_use_kernels(True, config)

`from_pretrained(..., use_kernels=True)` of transformers 5.22 to 5.24 cannot read a local repository.

`kernels` replaces layers by their registered name. It has no name for the MLP and the loss, so `tigon.patch` does more.
It also compares each replaced module with the original, which `kernels` does not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tigon import ops
from tigon.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIANT = "torch-universal"
"""The build of a repository without compiled code."""
NAME = "tigon"
_INIT = '"""Written by tigon.integrations.hub_kernels."""\n\nfrom tigon.integrations.hub_kernels import layers\n'


class RMSNorm(nn.Module):
    """The forward of Llama's RMSNorm: normalised in fp32, rounded, then multiplied by the weight."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RotaryEmbedding(nn.Module):
    """The function `apply_rotary_pos_emb` of Llama and its relatives, as a layer."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return ops.rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


layers = SimpleNamespace(RMSNorm=RMSNorm, RotaryEmbedding=RotaryEmbedding)
"""The attribute of a repository's module in which `kernels` looks for layers."""
REGISTERED = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryEmbedding"}
"""Name in transformers -> layer here."""


def write_repository(folder: str | os.PathLike[str]) -> Path:
    """Write a repository of `kernels` with tigon's layers; its code is an import of this module.

    Args:
        folder: a new or empty folder, or one that this function wrote.

    Returns:
        Its absolute path.

    Raises:
        UsageError: the folder holds something else.
    """
    root = Path(folder).absolute()
    if root.exists() and any(entry.name != "build" for entry in root.iterdir()):
        raise UsageError(f"{root} holds other files; name a new folder for the repository.")
    build = root / "build" / VARIANT
    build.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, Any] = {
        "name": NAME,
        "id": f"_{NAME}_hub_kernels",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    (build / "__init__.py").write_text(_INIT, encoding="utf-8")
    return root


def mapping(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The argument `kernel_mapping` of transformers' KernelConfig, for a repository of `write_repository`."""
    return {name: f"{Path(folder).absolute()}:{layer}" for name, layer in REGISTERED.items()}


def undo(model: PreTrainedModel) -> int:
    """Give the layers that run tigon's forward their own again, which transformers cannot.

    Args:
        model: a module on which `kernelize` or `use_kernels` was called.

    Returns:
        The number of layers that were changed back.
    """
    own = {RMSNorm.forward, RotaryEmbedding.forward}
    changed = 0
    for module in model.modules():
        functions = (getattr(module, "_kernel_funcs", None) or {}).values()
        for layer in (module, *(one for one in functions if isinstance(one, nn.Module))):
            if getattr(vars(layer).get("forward"), "__func__", None) in own:
                del layer.forward
                changed += 1
    return changed
