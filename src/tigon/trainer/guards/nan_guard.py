"""Skips an optimizer step whose loss or gradient is not finite, so that it changes no weight.

If the loss of a micro-batch is not finite, its gradient is multiplied by NaN. The gradients are summed over the
processes, so the norm of the summed gradient decides alike in all processes. A skipped step is not part of the logged
loss. It is counted and the learning rate schedule advances, except with a loss scale (docs/faults.md, "Steps that are
skipped"). The run ends after too many counted steps in a row.

PyTorch's fused optimizers skip a step on the GPU by the flag that GradScaler uses. The host then reads the counts of a
step while the next step runs, so nothing waits for the GPU. For other optimizers the host waits before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.errors import RecipeError
from tigon.techniques.lora.four_bit_weights import packed_weights

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer
    from transformers import PreTrainedModel


class NanGuard:
    """The guard of one trainer. Its counters are on `device`, so that no step synchronises with the GPU."""

    def __init__(self, device: torch.device, limit: int) -> None:
        """Make a guard that allows `limit` skipped steps in a row."""
        self.limit = limit
        self.skipped = 0
        """Skipped steps that the host has counted; on a GPU one step late, until `settle`."""
        self.left_out = torch.zeros((), dtype=torch.bool, device=device)
        """Whether the last step was skipped, also if only the loss scale was too large."""
        self._device = device
        # Skipped steps in total, skipped steps in a row, and steps that updated the weights.
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._here = torch.zeros(3, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None
        self._step_loss = torch.zeros((), device=device)
        self._loss_sum = torch.zeros((), device=device)
        self._n_summed = torch.zeros((), dtype=torch.int64, device=device)

    def nan_if_not_finite(self, loss: Tensor) -> Tensor:
        """The loss, times NaN if it is not finite, so that all gradients of this micro-batch become NaN."""
        return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)

    def add(self, loss: Tensor) -> Tensor:
        """Add the loss of a micro-batch. Returns it, or 0 if it is not finite, for the Trainer's own sum."""
        self._step_loss += loss
        return torch.where(torch.isfinite(loss), loss, 0.0)

    def close(self, norm: Tensor | float | None, optimizer: Optimizer, *, scale: float | None, step: int) -> None:
        """End the gradients of a step: make the optimizer skip the step unless loss and gradient norm are finite.

        Args:
            norm: The norm of the step's gradient over all processes, if it is known.
            optimizer: The optimizer that is about to step.
            scale: The loss scale, if GradScaler or DeepSpeed skips steps by itself. Steps skipped to lower the scale
                are not counted until it is 1.
            step: The number of this step, for the message.

        Raises:
            RecipeError: More than `limit` steps in a row were skipped.
        """
        inner = innermost(optimizer)
        bad = ~torch.isfinite(self._step_loss) | ~torch.isfinite(_plain(norm, self._device))
        if refused := getattr(inner, "take_refused", None):  # it updates in the backward pass, and checks there
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

    def put_loss(self, logs: dict[str, float], reduce: Callable[..., Tensor], step: int) -> None:
        """Replace the logged loss by the mean over the steps that were not skipped; drop it if all were skipped.

        Args:
            logs: The record of the steps since the last call.
            reduce: Accelerate's, which averages a tensor over the processes.
            step: The number of the last step, for the message of `settle`.
        """
        self.settle(step)
        loss_sum, n_steps = reduce(self._loss_sum.clone(), "mean"), int(self._n_summed)
        self._loss_sum.zero_()
        self._n_summed.zero_()
        if n_steps:
            logs["loss"] = float(loss_sum) / n_steps
        else:
            del logs["loss"]
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        if self.skipped:
            logs["skipped_steps"] = self.skipped

    def state(self) -> dict[str, float]:
        """The counters for a checkpoint, with this process's sum of losses since the last record."""
        counts = dict(zip(("skipped", "in_a_row", "taken"), self._counts.tolist(), strict=True))
        return {**counts, "loss_sum": float(self._loss_sum), "n_summed": int(self._n_summed)}

    def resume(self, state: Mapping[str, float]) -> None:
        """Restore the counters that `state` returned."""
        self.skipped = int(state["skipped"])
        self._counts[0], self._counts[1] = self.skipped, int(state["in_a_row"])
        self._counts[2] = int(state["taken"])
        self._loss_sum.fill_(state["loss_sum"])
        self._n_summed.fill_(int(state["n_summed"]))

    def settle(self, step: int) -> None:
        """Read the counts up to the last step, which waits for the GPU. Raises RecipeError as `close` does."""
        self._judge(self._counts.tolist(), step)

    def _read_counts(self, step: int) -> None:
        """Read the counts. On a GPU these are the previous step's, which have arrived, so nothing waits."""
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
                cause = "no step has changed a weight yet, so the learning rate is not the cause. Check the model (its "
                cause += "weights, its config), train.precision (fp32 has the widest range), and the kernels "
                cause += "(model.kernels: none trains without them)"
            raise RecipeError(
                f"loss or gradient not finite in {many} with train.max_skipped_steps {self.limit}: {cause}"
            )


class ClippedNorm:
    """Keeps the norm of the gradients that the Trainer clips, because none of its events receives it.

    The Trainer calls Accelerate's `clip_grad_norm_` once per step, and its result is read from there. Computing the
    norm again would read all gradients twice.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Let `accelerator.clip_grad_norm_` store its result in `value`."""
        self.value: Tensor | float | None = None
        clip = accelerator.clip_grad_norm_

        def clip_and_keep(*args: object, **kwargs: object) -> Any:
            self.value = norm = clip(*args, **kwargs)
            return norm

        accelerator.clip_grad_norm_ = clip_and_keep


def first_nonfinite(model: PreTrainedModel) -> int | None:
    """The index in `model.named_parameters()` of the first parameter with a NaN or infinity in this process's part.

    None if all values are finite. Reads each weight once without copying it, and waits once per device.
    """
    flags: list[tuple[int, Tensor]] = []
    states = {id(weight): state for _, weight, state in packed_weights(model)}
    for index, parameter in enumerate(model.parameters()):
        for tensor in _own_values(parameter, states.get(id(parameter), getattr(parameter, "quant_state", None))):
            if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
                wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
                least, most = wide.detach().aminmax()  # both are NaN if any value is NaN
                flags.append((index, torch.isfinite(least) & torch.isfinite(most)))
    for device in {flag.device for _, flag in flags}:  # an offloaded model has weights on two devices
        on_device = [(index, flag) for index, flag in flags if flag.device == device]
        finite = torch.stack([flag for _, flag in on_device]).tolist()
        if not all(finite):
            return on_device[finite.index(False)][0]
    return None


def first_overflow(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str | None:
    """The first tensor with a finite value that is infinite in `dtype`, in words; None if there is none."""
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.numel() and torch.finfo(tensor.dtype).max > torch.finfo(dtype).max:
            largest = torch.stack(tensor.detach().float().aminmax()).abs().max()
            if torch.isfinite(largest) and torch.isinf(largest.to(dtype)):
                narrow = str(dtype).removeprefix("torch.")
                return f"{name} holds {largest.item():.6g}, and {narrow} ends at {torch.finfo(dtype).max:.6g}"
    return None


def _own_values(parameter: Tensor, state: Any) -> list[Tensor]:
    """The values of a parameter that this process holds.

    FSDP2: the shard. ZeRO-3: the partition, unless it is in a file. 4-bit weights: the scales. Otherwise: all.
    """
    if hasattr(parameter, "ds_tensor"):
        partition = parameter.ds_tensor
        return [] if getattr(getattr(partition, "status", None), "name", "") == "NOT_AVAILABLE" else [partition]
    if state is not None:
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
    """Make the next step() do nothing if `bad`, by the fused optimizers' flag or by removing the gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if optimizer.defaults.get("fused") and not any(hasattr(p, "to_local") for p in parameters):
        optimizer.found_inf = bad.float()
    elif bool(bad):
        for parameter in parameters:
            parameter.grad = None
