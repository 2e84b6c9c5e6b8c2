"""Verifies a row: a small random model of the family, patched, must compute the same as its unpatched twin.

Each check runs one way of using a model on both twins and compares all results: the loss and every gradient, or the
logits. Errors are relative, in the Frobenius norm, per tensor; a check reports the worst one.

    fp32    The limit is 1e-5, or `NOISE_FACTOR` times the unpatched model's error against itself in fp64 if that is
            larger. Some gradients consist of rounding errors only, such as that of a key bias.
    bf16    The reference is the unpatched model in fp32 with the same (rounded) weights. The limits are:

            - root mean square of the errors of all tensors: `BF16_FACTOR` times that of the unpatched bf16 model;
            - one tensor, which may have only eight elements: `TENSOR_FACTOR` times its error in the unpatched bf16
              model, or times the median error there;
            - the loss: `TENSOR_FACTOR` times its error in the unpatched bf16 model, or times `BF16_FLOOR`.

If a tensor's elements are below `NEGLIGIBLE` times the usual gradient element, its error is divided by that size.
"""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tigon.errors import OptionError
from tigon.models.patch import apply_row
from tigon.models.report import PatchReport
from tigon.models.seams.head.deferred_logits import DeferredLogits
from tigon.models.spec import PatchSpec
from tigon.models.verification.tiny import tiny_batch, tiny_model

FP32_BOUND = 1e-5
NOISE_FACTOR = 10.0
BF16_FACTOR = 2.0
TENSOR_FACTOR = 4.0
# FP32_BOUND times this is one fp32 rounding step of the usual gradient.
NEGLIGIBLE = 1e-2
# The error from one bf16 rounding of a value that the loss depends on. The unpatched model may avoid it by chance.
BF16_FLOOR = 1e-3
_ALL = "all tensors"

Tensors = dict[str, Tensor]
Run = Callable[[nn.Module], Tensors]


@dataclass(frozen=True)
class Check:
    """One way of using the model, and the difference between the patched and the unpatched model."""

    name: str
    passed: bool
    error: float | None = None
    """The largest error of all tensors, as defined in the module docstring; None if nothing was measured."""
    bound: float | None = None
    """The limit for `error`."""
    worst: str = ""
    """The tensor that is closest to, or farthest above, its bound."""
    note: str = ""
    """Why the check does not apply (the unpatched model raises too), or what failed."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    model_type: str
    dtype: str
    device: str
    checks: tuple[Check, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    """Modules replaced in the two-layer model, by op."""
    left_alone: tuple[tuple[str, str], ...] = ()
    """(class, reason)."""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    def to_dict(self) -> dict[str, Any]:
        """The verification as a JSON-serialisable dict."""
        return {
            "model_type": self.model_type,
            "dtype": self.dtype,
            "device": self.device,
            "passed": self.passed,
            "counts": dict(self.counts),
            "left_alone": [list(entry) for entry in self.left_alone],
            "checks": [vars(check) for check in self.checks],
        }


def verify(
    row: PatchSpec, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, tokens: int = 18
) -> Verification:
    """Compare a patched and an unpatched random model of two layers; the module docstring gives checks and limits.

    Args:
        row: a row of `tigon.models.MODELS`, or your own.
        device: the device of the models; on a GPU the ops run as kernels.
        dtype: torch.float32 or torch.bfloat16.
        tokens: length of the sequences.

    Returns:
        A `Verification`; `passed` is True if every check passed. A failed check does not raise.

    Raises:
        PatchError: transformers does not know the family, or the row matches nothing in its model.
        OptionError: dtype is neither torch.float32 nor torch.bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise OptionError(f"dtype={dtype} cannot be verified; choose torch.float32 or torch.bfloat16.")
    twins = _Twins(row, torch.device(device), dtype)
    batch = tiny_batch(torch.device(device), tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A row declares the scaling of the logits. Without a row, the first training step finds it out.
        checks = [] if not row.claims else [_head_is_fused(twins, batch)]
        checks += [_compare(name, run, twins) for name, run in _runs(batch, twins.original, dtype).items()]
        checks += [] if row.claims else [_head_is_fused(twins, batch)]
        checks += [_undone(twins, batch)]
    left_alone = tuple((entry.cls, entry.reason) for entry in twins.report.left_alone)
    name = str(dtype).removeprefix("torch.")
    return Verification(row.model_type, name, torch.device(device).type, tuple(checks), twins.counts, left_alone)


class _Twins:
    """The same model patched and unpatched, and for bf16 also in fp32 as the reference."""

    def __init__(self, row: PatchSpec, device: torch.device, dtype: torch.dtype) -> None:
        wide = dtype == torch.float32
        self.original = tiny_model(row.model_type, row.tiny, every_expert=not wide).to(dtype).to(device)
        self.patched = copy.deepcopy(self.original)
        self.truth = copy.deepcopy(self.original).float() if dtype == torch.bfloat16 else None
        self.report: PatchReport = apply_row(self.patched, row)
        self.counts = self.report.counts


# --- ways of using a model --------------------------------------------------------------------------------------------


def _runs(batch: dict[str, Tensor], model: nn.Module, dtype: torch.dtype) -> dict[str, Run]:
    """The checks by name. Keywords that the family's forward does not accept are not checked."""
    accepted = inspect.signature(type(model).forward).parameters
    ids, labels = batch["input_ids"], batch["labels"]
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    runs = {
        "labels": _training(**batch),
        "shift_labels": _training(**batch, shift_labels=targets),
        "num_items_in_batch": _training(**batch, num_items_in_batch=torch.tensor(11)),
        "gradient accumulation": _accumulated(batch),
        "evaluation": _evaluation(**batch),
        "generate": _generation(ids[:, :7], forced=None if dtype == torch.float32 else ids[:, 7:11]),
        "gradient checkpointing": _checkpointed(_training(**batch)),
    }
    if "logits_to_keep" in accepted:
        runs["logits_to_keep"] = _training(input_ids=ids, labels=labels[:, -6:], logits_to_keep=6)
        runs["logits_to_keep in evaluation"] = _evaluation(input_ids=ids, logits_to_keep=1)
    if "output_router_logits" in accepted:
        runs["router loss"] = _training(**batch, output_router_logits=True)
    if "position_ids" in accepted:
        tokens = ids.shape[1]
        positions = torch.cat([torch.arange(tokens // 3), torch.arange(tokens - tokens // 3)])[None].to(ids.device)
        runs["packed position_ids"] = _training(input_ids=ids[1:], labels=labels[1:], position_ids=positions)
    return runs


def _gradients(model: nn.Module) -> Tensors:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _training(**inputs: object) -> Run:
    def run(model: nn.Module) -> Tensors:
        model.train()
        loss = model(**inputs).loss
        loss.backward()
        return {"loss": loss.detach(), **_gradients(model)}

    return run


def _accumulated(batch: dict[str, Tensor]) -> Run:
    items = (batch["labels"][:, 1:] != -100).sum()

    def run(model: nn.Module) -> Tensors:
        model.train()
        losses = []
        for row in range(len(batch["labels"])):
            part = {name: t[row : row + 1] for name, t in batch.items()}
            losses.append(model(**part, num_items_in_batch=items).loss)
            losses[-1].backward()
        return {"loss": torch.stack(losses).sum().detach(), **_gradients(model)}

    return run


def _evaluation(**inputs: object) -> Run:
    def run(model: nn.Module) -> Tensors:
        model.eval()
        with torch.no_grad():
            outputs = model(**inputs)
        loss = {} if outputs.loss is None else {"loss": outputs.loss}
        return {**loss, "logits": outputs.logits}

    return run


def _generation(prompt: Tensor, forced: Tensor | None) -> Run:
    """Four greedy tokens and their logits.

    In bf16 the tokens are given and only logits are compared, because two models that round differently may choose
    different tokens of nearly equal logits.
    """

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert forced is not None
        chosen = torch.full_like(scores, -math.inf)
        return chosen.scatter_(1, forced[:, input_ids.shape[1] - prompt.shape[1]][:, None], 0.0)

    def run(model: nn.Module) -> Tensors:
        model.eval()
        outputs = model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            logits_processor=[] if forced is None else [choose],
        )
        logits = {f"logits {i}": step for i, step in enumerate(outputs.logits)}
        return {"tokens": outputs.sequences.float(), **logits}

    return run


def _checkpointed(training: Run) -> Run:
    def run(model: nn.Module) -> Tensors:
        switch: Any = model
        if next(model.parameters()).dtype == torch.float64:  # the exact gradients; a recomputation does not see `_Wide`
            return training(model)
        # transformers 5.23 has a new name for it
        old_name = not hasattr(model, "activation_checkpointing_enable")
        enable = switch.gradient_checkpointing_enable if old_name else switch.activation_checkpointing_enable
        enable({"use_reentrant": False})
        try:
            return training(model)
        finally:
            (switch.gradient_checkpointing_disable if old_name else switch.activation_checkpointing_disable)()

    return run


# --- comparing --------------------------------------------------------------------------------------------------------


def _measure(run: Run, model: nn.Module) -> Tensors:
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else ()):
        torch.manual_seed(0)
        tensors = {name: t.detach().double() for name, t in run(model).items()}
    model.zero_grad(set_to_none=True)
    return tensors


def _compare(name: str, run: Run, twins: _Twins) -> Check:
    try:
        baseline = _measure(run, twins.original)
        truth = None if twins.truth is None else _measure(run, twins.truth)
    except Exception as error:  # the unpatched model may raise anything
        return Check(name, passed=True, note=f"does not apply: the unpatched model raises {short(error)}")
    try:
        got = _measure(run, twins.patched)
    except Exception as error:
        return Check(name, passed=False, note=f"the patched model raises {short(error)}")
    if got.keys() != baseline.keys():
        return Check(name, passed=False, note=f"only one of the two has {', '.join(got.keys() ^ baseline.keys())}")
    errors = _errors(got, baseline if truth is None else truth)
    bounds = dict.fromkeys(errors, FP32_BOUND)
    if truth is None:
        bounds |= _rounding_noise(run, twins.original, baseline, [t for t in errors if not errors[t] <= FP32_BOUND])
    else:
        usual = _errors(baseline, truth)
        # The loss is a mean over tokens, so its error is far smaller than a gradient's.
        lucky = {tensor: BF16_FLOOR if tensor == "loss" else statistics.median(usual.values()) for tensor in usual}
        bounds = {tensor: TENSOR_FACTOR * max(error, lucky[tensor], BF16_FLOOR) for tensor, error in usual.items()}
        errors[_ALL], bounds[_ALL] = _mean(errors), BF16_FACTOR * max(_mean(usual), BF16_FLOOR)
    worst = max(errors, key=lambda tensor: errors[tensor] / bounds[tensor])
    return Check(name, passed=errors[worst] <= bounds[worst], error=errors[worst], bound=bounds[worst], worst=worst)


class _Wide(TorchFunctionMode):
    """Casts to fp32 are casts to fp64: a router that casts its input has weights in fp64 too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*wide, **named)


def _rounding_noise(run: Run, original: nn.Module, baseline: Tensors, tensors: list[str]) -> dict[str, float]:
    """Bounds for tensors that the unpatched fp32 model may not compute to `FP32_BOUND` either."""
    if not tensors:
        return {}
    try:
        exact: Any = copy.deepcopy(original).double()
        exact.set_experts_implementation("eager")  # the others lack fp64; without experts this does nothing
        with _Wide():
            noise = _errors(baseline, _measure(run, exact))
    except Exception:  # some models do not run in fp64
        return {}
    return {tensor: max(FP32_BOUND, NOISE_FACTOR * noise[tensor]) for tensor in tensors if tensor in noise}


def _mean(errors: Mapping[str, float]) -> float:
    return math.sqrt(statistics.fmean(error * error for error in errors.values()))


def _errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Relative Frobenius error of each tensor; see the module docstring for negligible tensors."""
    single = {"loss", "tokens"}
    others = [t for name, t in want.items() if name not in single]
    usual = math.sqrt(sum(float(t.square().sum()) for t in others) / max(1, sum(t.numel() for t in others)))
    errors = {}
    for name, expected in want.items():
        least = 0.0 if name in single else NEGLIGIBLE * usual * math.sqrt(expected.numel())
        difference, scale = float((got[name] - expected).norm()), max(float(expected.norm()), least)
        error = difference / scale if scale else difference
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def short(error: Exception) -> str:
    """The class of an error and the beginning of its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


NO_LOGITS = "no logits in training"
"""The check that fails if the results are right and no memory is saved."""


def _head_is_fused(twins: _Twins, batch: dict[str, Tensor]) -> Check:
    """Check that the first training step computed no logits."""
    name = NO_LOGITS
    if "linear_cross_entropy" not in twins.counts:
        return Check(name, passed=True, note="does not apply: the head is left alone")
    try:
        logits = twins.patched.train()(**batch).logits
    except Exception as error:
        return Check(name, passed=False, note=f"the patched model raises {short(error)}")
    fused = isinstance(logits, DeferredLogits) and not logits.touched()
    return Check(name, passed=fused, note="" if fused else "the logits were computed")


def _undone(twins: _Twins, batch: dict[str, Tensor]) -> Check:
    """Check that the model after `undo` equals the model that was never patched, bit for bit."""
    name, run = "undo", _training(**batch)
    twins.report.undo()
    if [type(m) for m in twins.patched.modules()] != [type(m) for m in twins.original.modules()]:
        return Check(name, passed=False, note="a module has kept another class")
    want, again, got = (_measure(run, model) for model in (twins.original, twins.original, twins.patched))
    # On a GPU a few PyTorch backwards sum in varying order. Skip tensors that the original does not reproduce itself.
    steady = [tensor for tensor in want if torch.equal(want[tensor], again[tensor])]
    other = [tensor for tensor in steady if not torch.equal(got[tensor], want[tensor])]
    return Check(name, passed=bool(steady) and not other, note=f"other bits in {', '.join(other)}" if other else "")
