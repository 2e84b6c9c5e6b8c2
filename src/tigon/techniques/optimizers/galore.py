"""GaLore: AdamW in a low-rank subspace of each linear layer's gradient (arXiv 2403.03507).

Let W be an m x n weight with m <= n, and G its gradient. Every `gap` steps, P becomes an orthonormal basis of the r
leading left singular vectors of G (equation 6). AdamW's moments have the shape of R = P^T G, r x n. W moves by
alpha P N(R) (algorithm 2, alpha = 0.25). If m > n, the other side is projected. Moments stay when the subspace changes.

Unlike galore-torch 1.0, the whole state is plain tensors and integers. Therefore checkpoints load with
weights_only=True, and a resumed run equals the uninterrupted one. The range finder is random but seeded by the step, so
it needs no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

ELEMENTS = 1 << 23  # of a weight that are updated at a time
# Columns of the range finder beyond the rank. More would change the basis by less than rounding (arXiv 0909.4061 §4.5).
OVERSAMPLING = 8
SCALE = 0.25  # alpha of the paper's experiments (§5)
POWER_ITERATIONS = 2  # more would change the basis by less than rounding (arXiv 0909.4061 §4.5)


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW that updates the parameters of groups with a `rank` within a subspace of that rank.

    layerwise: Update each parameter as soon as the backward pass has its gradient, and free that gradient (§4.4).
        step() then does nothing, and neither accumulation nor clipping is possible. A gradient that is not finite
        changes nothing. The check of each gradient waits for the GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gap: int = 200,
        layerwise: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": 0, "gap": gap}
        super().__init__(params, defaults)
        self._layerwise = layerwise
        self._n_refused = 0
        if layerwise:
            for index, group in enumerate(self.param_groups):
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:  # looks the group up late, because load_state_dict replaces it
            gradient = parameter.grad
            if gradient is not None and not _is_finite(gradient):
                self._n_refused += 1
            else:
                self._update(parameter, self.param_groups[index])
            parameter.grad = None

        return update

    def take_refused(self) -> bool:
        """Returns whether `layerwise` skipped an update since the last call because its gradient was not finite."""
        refused, self._n_refused = self._n_refused > 0, 0
        return refused

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._layerwise:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._update(parameter, group)
        return loss

    @torch.no_grad()
    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        if weight.grad is None:
            return
        state = self.state[weight]
        state["step"] = step = state.get("step", 0) + 1
        gradient, rank = weight.grad, group["rank"]
        if rank:
            if (step - 1) % group["gap"] == 0:
                state["projection"] = basis(gradient, rank, seed=step).to(weight.dtype)
            gradient = project(gradient, state["projection"])
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(gradient, dtype=weight.dtype) for _ in range(2))
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        if rank:
            within = _adam(gradient, exp_avg, exp_avg_sq, step, group)
            for rows in _turns(weight):
                _move(weight[rows], project_back(within, state["projection"], weight.shape, rows).mul_(SCALE), group)
            return
        for rows in _turns(weight):
            _move(weight[rows], _adam(gradient[rows], exp_avg[rows], exp_avg_sq[rows], step, group), group)


def _is_finite(gradient: Tensor) -> bool:
    """Reads the gradient once. `isfinite` makes |x| and three masks, which would become the peak of the step."""
    return not gradient.numel() or math.isfinite(torch.linalg.vector_norm(gradient, math.inf))


def _turns(weight: Tensor) -> Iterator[Any]:
    """Yields row indices in parts, because fp32 temporaries of a whole embedding would become the peak of the step."""
    if not weight.ndim:
        return iter((...,))
    rows = max(1, ELEMENTS * len(weight) // max(weight.numel(), 1))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _adam(gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    """Advance the moments and return AdamW's update in fp32, without its learning rate."""
    beta1, beta2 = group["betas"]
    gradient = gradient.float()
    # Computed in fp32 and rounded once, because in-place updates of bf16 states would lose small changes.
    first = torch.lerp(exp_avg.float(), gradient, 1 - beta1)
    second = (exp_avg_sq.float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    denominator = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    return first.div_(1 - beta1**step).div_(denominator)


def _move(weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.add_(update.to(weight.dtype), alpha=-group["lr"])


def basis(gradient: Tensor, rank: int, *, seed: int) -> Tensor:
    """Returns an orthonormal basis of the leading singular directions of an (m, n) gradient on its shorter side, fp32.

    Its shape is (m, r) if m <= n, else (n, r). A randomised range finder with power iterations (arXiv 0909.4061,
    algorithm 4.4) finds a range, and an exact decomposition within it gives the basis.
    """
    short = gradient.float() if gradient.shape[0] <= gradient.shape[1] else gradient.float().T
    width = min(rank + OVERSAMPLING, short.shape[0])
    draw = torch.Generator(device=short.device).manual_seed(seed)
    probe = torch.randn(short.shape[1], width, device=short.device, generator=draw)
    with torch.autocast(short.device.type, enabled=False):
        span = torch.linalg.qr(short @ probe).Q
        for _ in range(POWER_ITERATIONS):
            span = torch.linalg.qr(short @ torch.linalg.qr(short.T @ span).Q).Q
        inner = span.T @ short
        directions = torch.linalg.eigh(inner @ inner.T).eigenvectors  # eigenvalues ascend
        leading: Tensor = span @ directions[:, -rank:].flip(-1)
        return leading


def project(gradient: Tensor, projection: Tensor) -> Tensor:
    """Projects (m, n) to (r, n) or, if m > n, to (m, r)."""
    projection = projection.to(gradient.dtype)
    return projection.T @ gradient if gradient.shape[0] <= gradient.shape[1] else gradient @ projection


def project_back(update: Tensor, projection: Tensor, shape: Sequence[int], rows: Any) -> Tensor:
    """Returns `rows` of the (m, n) update from its projection: (r, n) or, if m > n, (m, r)."""
    projection = projection.to(update.dtype)
    return projection[rows] @ update if shape[0] <= shape[1] else update[rows] @ projection.T


def projects(shape: Sequence[int], rank: int) -> bool:
    """Returns whether GaLore projects a weight of this shape. A projection as large as it would save nothing."""
    return len(shape) == 2 and min(shape) > rank


def projected_names(model: nn.Module, rank: int) -> set[str]:
    """Returns the names of the weights that GaLore projects: of linear modules other than the head, with both sides
    longer than `rank`."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and projects(module.weight.shape, rank):
            names.add(f"{path}.weight" if path else "weight")
    return names


def build(
    model: nn.Module,
    decayed: Iterable[str],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    rank: int,
    gap: int,
    layerwise: bool,
) -> GaLoreAdamW:
    """Returns the optimizer of a model. decayed: names of the parameters that get weight decay."""
    return GaLoreAdamW(groups(model, decayed, weight_decay, rank), lr=lr, betas=betas, gap=gap, layerwise=layerwise)


def groups(model: nn.Module, decayed: Iterable[str], weight_decay: float, rank: int) -> list[dict[str, Any]]:
    """Returns the parameter groups: projected or not, decayed or not."""
    projected, decayed = projected_names(model, rank), set(decayed)
    sorted_out: dict[tuple[int, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = (rank if name in projected else 0, weight_decay if name in decayed else 0.0)
            sorted_out.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "rank": group_rank, "weight_decay": decay}
        for (group_rank, decay), parameters in sorted_out.items()
    ]
