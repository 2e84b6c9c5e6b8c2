"""The gate before each optimizer step: a loss or gradient that is not finite changes no weight.

A micro-batch whose loss is not finite multiplies its gradient by NaN, so that the norm of the step's gradient alone
decides, and decides alike in all processes: gradients are summed over them before. The step is then left out, counted,
and not part of the logged loss; the learning rate's schedule goes on. After too many in a row the run stops.

Nothing waits for the GPU where the optimizer can leave a step out there (PyTorch's fused ones, by the flag that
GradScaler uses): the host reads the counts of a step while the next one runs. The others are asked before each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tigon.errors import RecipeError


class NanGuard:
    """One for each trainer. Counters live on `device`: steps left out in all, in a row now, and in this record."""

    def __init__(self, device: torch.device, limit: int) -> None:
        """limit: steps in a row that may be left out."""
        self.limit = limit
        self.skipped = 0
        """Steps left out, as far as the host has heard."""
        self.left_out = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was, also for a loss scale that does not fit yet."""
        self._device = device
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)  # left out in all and in a row; taken
        self._here = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: Any = None
        self._step_loss = torch.zeros((), device=device)
        self._loss_sum = torch.zeros((), device=device)
        self._n_summed = torch.zeros((), dtype=torch.int64, device=device)

    def nan_if_not_finite(self, loss: Tensor) -> Tensor:
        """The loss, which gives NaN gradients everywhere if it is not finite itself."""
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def add(self, loss: Tensor) -> Tensor:
        """Take note of a micro-batch's loss; returns it, or 0 for one that would spoil the Trainer's own sum."""
        self._step_loss += loss
        return torch.where(torch.isfinite(loss), loss, 0.0)

    def close(self, norm: Tensor | float | None, optimizer: Any, *, scale: float | None, step: int) -> None:
        """Before the optimizer's step: have it left out unless the gradient's norm is finite.

        scale: GradScaler's, which leaves steps out by itself while it looks for a scale that fits; they only count once
        it is down to 1. Raises RecipeError after more than `limit` in a row.
        """
        inner = innermost(optimizer)
        bad = ~torch.isfinite(self._step_loss) | ~torch.isfinite(_plain(norm, self._device))
        if refused := getattr(inner, "take_refused", None):  # updates in the backward pass: it has been its own gate
            bad |= refused()
        if scale is None:
            _leave_out(inner, bad)
        self.left_out = bad
        self._loss_sum += torch.where(bad, 0.0, self._step_loss)
        self._n_summed += ~bad
        self._step_loss.zero_()
        counted = bad & (scale is None or scale <= 1.0)
        self._counts[0] += counted
        self._counts[1] = (self._counts[1] + 1) * counted
        self._counts[2] += ~bad
        self._read_counts(step)

    def mean_loss(self) -> tuple[Tensor, Tensor]:
        """(sum of the losses of the steps taken since the last call, their number)"""
        sums = self._loss_sum.clone(), self._n_summed.clone()
        self._loss_sum.zero_()
        self._n_summed.zero_()
        return sums

    def state(self) -> dict[str, float]:
        """What a resumed run goes on counting from, this process's part of the loss since the last record among it."""
        skipped, in_a_row, counts = self._counts.tolist()
        return {
            "skipped": skipped, "in_a_row": in_a_row, "taken": counts, "loss_sum": float(self._loss_sum),
            "n_summed": int(self._n_summed),
        }  # fmt: skip

    def resume(self, state: Mapping[str, float]) -> None:
        """Go on from `state`."""
        self.skipped = int(state["skipped"])
        self._counts[0], self._counts[1] = self.skipped, int(state["in_a_row"])
        self._counts[2] = int(state.get("taken", 1))  # older checkpoints do not say
        self._loss_sum.fill_(state["loss_sum"])
        self._n_summed.fill_(int(state["n_summed"]))

    def settle(self, step: int) -> None:
        """Hear of the last step too, at the cost of waiting for it."""
        self._judge(self._counts.tolist(), step)

    def _read_counts(self, step: int) -> None:
        """The counts of the step before, on a GPU; there they have arrived long ago."""
        if self._device.type != "cuda":
            self.settle(step)
            return
        if self._copied is not None:
            self._copied.synchronize()
            self._judge(self._here.tolist(), step - 1)
        self._here.copy_(self._counts, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def _judge(self, counts: list[int], step: int) -> None:
        self.skipped, in_a_row, taken = counts
        if in_a_row > self.limit:
            many = f"{in_a_row} steps in a row, up to step {step}," if in_a_row > 1 else f"step {step}"
            if taken:
                cause = "training diverged and was stopped; these steps changed no weight. Lower train.learning_rate, "
                cause += "raise train.warmup_steps, or use another precision"
            else:
                cause = "no step has changed a weight yet, so that the learning rate is not the cause. Look for it in "
                cause += "the model (its weights, its config), in train.precision (fp32 has the widest range), and in "
                cause += "the kernels (model.kernels: none trains without them)"
            raise RecipeError(
                f"loss or gradient not finite in {many} with train.max_skipped_steps {self.limit}: {cause}"
            )


def first_nonfinite(model: Any) -> int | None:
    """The index among `model.named_parameters()` of the first whose values are not all finite, in this process's part.
    Reads each weight once, without a copy of it, and waits for the device once."""
    flags: list[tuple[int, Tensor]] = []
    for index, parameter in enumerate(model.parameters()):
        for tensor in _own_values(parameter):
            if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
                wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
                least, most = wide.detach().aminmax()  # both are NaN if a value is
                flags.append((index, torch.isfinite(least) & torch.isfinite(most)))
    for device in {flag.device for _, flag in flags}:  # the weights of an offloaded model are in two places
        here = [(index, flag) for index, flag in flags if flag.device == device]
        fine = torch.stack([flag for _, flag in here]).tolist()
        if not all(fine):
            return here[fine.index(False)][0]
    return None


def _own_values(parameter: Any) -> list[Tensor]:
    """What of a parameter is in this process: FSDP2's shard, ZeRO-3's partition unless it is in a file, the scales of
    weights of 4 bits, or all of it."""
    if hasattr(parameter, "ds_tensor"):
        partition = parameter.ds_tensor
        return [] if getattr(getattr(partition, "status", None), "name", "") == "NOT_AVAILABLE" else [partition]
    if state := getattr(parameter, "quant_state", None):
        scales = (getattr(state, "absmax", None), getattr(state, "offset", None))
        return [scale for scale in scales if isinstance(scale, Tensor)]
    return [parameter.to_local() if hasattr(parameter, "to_local") else parameter]


def innermost(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _plain(norm: Tensor | float | None, device: torch.device) -> Tensor:
    if norm is None:
        return torch.zeros((), device=device)
    if isinstance(norm, Tensor) and hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return torch.as_tensor(norm, device=device, dtype=torch.float32)


def _leave_out(optimizer: Any, bad: Tensor) -> None:
    """Have the next step() do nothing if `bad`. No optimizer touches a parameter without a gradient."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if optimizer.defaults.get("fused") and not any(hasattr(p, "to_local") for p in parameters):
        optimizer.found_inf = bad.float()
    elif bool(bad):
        for parameter in parameters:
            parameter.grad = None
