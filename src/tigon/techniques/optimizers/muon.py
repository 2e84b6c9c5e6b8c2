"""Muon for the matrices of linear layers in the decoder layers, and AdamW for all other weights, as one optimizer.

Muon's update is the momentum with its singular values set to about 1 (https://kellerjordan.github.io/posts/muon). It is
scaled to the RMS of AdamW's updates (arXiv 2502.16982), so that AdamW's learning rate and weight decay fit.
PyTorch has the optimizer from 2.9 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tigon._trunk import decoder_layers
from tigon.errors import RecipeError


class MuonAdamW(torch.optim.Optimizer):
    """Steps torch.optim.Muon for groups with `muon: True`, and fused AdamW for the others. Both share its state."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        groups = [*groups]
        by_muon, others = ([group for group in groups if group["muon"] == is_muon] for is_muon in (True, False))
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if by_muon:  # with Nesterov momentum 0.95 and 5 iterations
            self._parts[True] = torch.optim.Muon(by_muon, lr=lr, adjust_lr_fn="match_rms_adamw")
        if others:
            self._parts[False] = torch.optim.AdamW(others, lr=lr, betas=betas, fused=True)
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, part in self._parts.items():
            # load_state_dict replaces both
            part.state, part.param_groups = self.state, [g for g in self.param_groups if g["muon"] == is_muon]
            part.step()
        return loss


def check() -> None:
    """Raise RecipeError if this PyTorch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise RecipeError(
            f"train.optimizer: muon needs PyTorch 2.9 or newer, and this is {torch.__version__}; upgrade it, or use "
            "adamw"
        )


def matrix_names(model: nn.Module) -> set[str]:
    """Returns the names of the weights that Muon updates: those of linear modules inside the decoder layers.

    Heads lie outside: lm_head, the score of a classification, Medusa's. A vision tower does too.
    """
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    linear = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear))
    return {f"{path}.weight" for path, module in linear if id(module) in inside}


def check_model(model: nn.Module) -> None:
    """Raise RecipeError if Muon would update no weight of the model."""
    check_count(len(matrix_names(model)), type(model).__name__)


def check_count(matrices: int, model: str) -> None:
    """Raise RecipeError if Muon would update none of `model`'s weights. matrices: how many it would update."""
    if not matrices:
        raise RecipeError(
            f"train.optimizer: muon updates linear layers inside the decoder layers, and {model} has none; use "
            "train.optimizer: adamw"
        )


def build(
    model: nn.Module, decayed: Iterable[str], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> MuonAdamW:
    """Returns the optimizer of a model. decayed: names of the parameters that get weight decay.

    Raises:
        RecipeError: The model has no linear layer inside decoder layers.
    """
    check_model(model)
    matrices, decayed = matrix_names(model), set(decayed)
    sorted_out: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = name in matrices, weight_decay if name in decayed else 0.0
            sorted_out.setdefault(kind, []).append(parameter)
    groups = [{"params": some, "muon": muon, "weight_decay": decay} for (muon, decay), some in sorted_out.items()]
    return MuonAdamW(groups, lr=lr, betas=betas)
