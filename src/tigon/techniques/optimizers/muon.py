"""Muon for the matrices of linear layers, and AdamW for all other weights, as one optimizer.

Muon's update is the momentum with its singular values set to about 1 (https://kellerjordan.github.io/posts/muon). It is
scaled to the RMS of AdamW's updates (arXiv 2502.16982), so that AdamW's learning rate and weight decay fit.
PyTorch has the optimizer from 2.9 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tigon.errors import RecipeError
from tigon.techniques.optimizers import galore


class MuonAdamW(torch.optim.Optimizer):
    """Steps torch.optim.Muon for groups with `muon: True`, and fused AdamW for the others. Both share its state."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        groups = [*groups]
        muon = torch.optim.Muon(
            [group for group in groups if group["muon"]], lr=lr, adjust_lr_fn="match_rms_adamw"
        )  # with Nesterov momentum 0.95 and 5 iterations
        adamw = torch.optim.AdamW([group for group in groups if not group["muon"]], lr=lr, betas=betas, fused=True)
        self._parts = {True: muon, False: adamw}
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, part in self._parts.items():
            # load_state_dict replaces both, and heads of their own split groups
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


def build(
    model: nn.Module, decayed: Iterable[str], *, lr: float, betas: tuple[float, float], weight_decay: float
) -> MuonAdamW:
    """Returns the optimizer of a model. decayed: names of the parameters that get weight decay."""
    matrices, decayed = galore.projected_names(model, 0), set(decayed)
    sorted_out: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = name in matrices, weight_decay if name in decayed else 0.0
            sorted_out.setdefault(kind, []).append(parameter)
    groups = [{"params": some, "muon": muon, "weight_decay": decay} for (muon, decay), some in sorted_out.items()]
    return MuonAdamW(groups, lr=lr, betas=betas)
