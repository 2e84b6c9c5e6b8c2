"""The output head that answers a request: log-probabilities or a divergence, computed inside its own forward.

TRL reads `lm_head.weight` and never calls `lm_head`. Its code therefore gathers the weight itself under FSDP2 and
ZeRO-3, and ignores hooks. tigon calls the head. Its forward finds the complete weight there, pre-hooks have run, and
the hooks on its outputs gather the weight again for the backward pass.

A head whose forward cannot answer returns logits: one with an adapter, with hooks on its output, or with a weight that
tensor parallelism shards. The answer is then computed from these logits.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tigon import losses, ops
from tigon.errors import PatchError
from tigon.models.seams.base import Change, PatchedModule, Seam, is_dtensor, package_of
from tigon.models.seams.head.loss import peel

# N tokens, H hidden, V vocabulary.

QUIET_HOOKS = frozenset({"torch", "deepspeed", "accelerate", "trl"})
"""Packages whose forward hooks on a head gather weights or switch offloading, and read no logits."""


class UnfusedWarning(UserWarning):
    """A trainer, or an option of it, that runs without tigon's fused head. Its results are TRL's own."""


@dataclass(frozen=True)
class LogitForm:
    """z = softcap(scale · (hidden @ weight.T + bias)) / temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def of_products(self, products: Tensor) -> Tensor:
        """z without the division by the temperature, in fp32."""
        z = products.float() * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def keywords(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "logit_scale": self.scale}


class Request(Protocol):
    """What one call of the head should compute instead of logits."""

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]: ...

    def answer_from_logits(self, products: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class TokenStatistics:
    """Request of log-probabilities per token, and what TRL derives from the same logits."""

    ids_N: Tensor
    form: LogitForm
    outputs: tuple[str, ...] = ()
    """Names of TRL: entropy, log_sum_sq_probs, mean_logits, is_top1; and predicted and lse as tigon returns them."""
    mask_N: Tensor | None = None
    """False: the token's log-probability and entropy are 0. `mean_logits` is computed for every token."""

    def _wanted(self) -> tuple[str, ...]:
        """The outputs of `tigon.linear_logprobs` that TRL's names need."""
        names = {"entropy": "entropy", "log_sum_sq_probs": "lse", "is_top1": "predicted"}
        names |= {"predicted": "predicted", "lse": "lse"}
        return tuple({names[name] for name in self.outputs if name in names})

    def _given(self) -> dict[str, Any]:
        return {"mask": self.mask_N, **self.form.keywords()}

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """hidden (N, H), weight (V, H), bias (V,) or None -> log-probabilities and each of `outputs`, all (N,)."""
        result: Any = ops.linear_logprobs(
            hidden,
            weight,
            self.ids_N,
            bias=bias,
            temperature=self.form.temperature,
            outputs=self._wanted(),
            **self._given(),
        )
        extra: dict[str, Tensor] = {}
        with torch.no_grad():
            if "log_sum_sq_probs" in self.outputs:  # log Σ p² = lse(2z) - 2 lse(z), and 2z is z at half the temperature
                twice: Any = ops.linear_logprobs(
                    hidden,
                    weight,
                    self.ids_N,
                    bias=bias,
                    temperature=self.form.temperature / 2,
                    outputs=("lse",),
                    **self._given(),
                )
                extra["log_sum_sq_probs"] = twice.lse - 2 * result.lse
            if "mean_logits" in self.outputs:
                extra["mean_logits"] = mean_logits(hidden, weight, bias, self.form)
        return self._named(result, extra)

    def answer_from_logits(self, products: Tensor) -> tuple[Tensor, ...]:
        """products (N, V): what the head's own forward returned."""
        result = ops.logprobs(
            products, self.ids_N, temperature=self.form.temperature, outputs=self._wanted(), **self._given()
        )
        extra: dict[str, Tensor] = {}
        with torch.no_grad():
            if "log_sum_sq_probs" in self.outputs:
                z = self.form.of_products(products) / self.form.temperature
                extra["log_sum_sq_probs"] = torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)
            if "mean_logits" in self.outputs:
                extra["mean_logits"] = self.form.of_products(products).mean(-1) / self.form.temperature
        return self._named(result, extra)

    def _named(self, result: Any, extra: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if isinstance(result, Tensor):
            return (result, *(extra[name] for name in self.outputs))
        if "entropy" in self.outputs:
            extra["entropy"] = result.entropy
        extra |= {name: getattr(result, name) for name in ("predicted", "lse") if name in self.outputs}
        if "is_top1" in self.outputs:
            extra["is_top1"] = result.predicted == self.ids_N
        return (result.logprob, *(extra[name] for name in self.outputs))


@dataclass(frozen=True)
class Divergence:
    """Request of the divergence from a frozen teacher per token, and on request the student's entropy."""

    teacher_hidden_NH: Tensor
    teacher_weight_VH: Tensor
    teacher_bias_V: Tensor | None
    form: LogitForm
    teacher_form: LogitForm
    beta: float
    """0: KL(teacher || student). 1: KL(student || teacher). Between: Jensen-Shannon with this weight of the teacher."""
    with_entropy: bool = False

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """hidden (N, H), weight (V, H), bias (V,) or None -> divergence (N,) and entropy (N,)."""
        divergence = ops.linear_kl(
            hidden,
            weight,
            self.teacher_hidden_NH,
            self.teacher_weight_VH,
            kind="jsd",
            beta=float(self.beta),
            bias=bias,
            teacher_bias=self.teacher_bias_V,
            temperature=self.form.temperature,
            softcap=self.form.softcap,
            teacher_softcap=self.teacher_form.softcap,
            logit_scale=self.form.scale,
            teacher_logit_scale=self.teacher_form.scale,
        )
        if not self.with_entropy:
            return (divergence,)
        ids_N = torch.zeros(hidden.shape[0], dtype=torch.long, device=hidden.device)
        with torch.no_grad():
            entropy = TokenStatistics(ids_N, self.form, ("entropy",)).answer(hidden, weight, bias)[1]
        return divergence, entropy

    def answer_from_logits(self, products: Tensor) -> tuple[Tensor, ...]:
        """products (N, V): what the student's head returned. Its logits and the teacher's are held in full."""
        z = self.form.of_products(products) / self.form.temperature
        teacher = F.linear(self.teacher_hidden_NH, self.teacher_weight_VH, self.teacher_bias_V)
        log_p = F.log_softmax(z, -1)
        log_t = F.log_softmax(self.teacher_form.of_products(teacher) / self.form.temperature, -1)
        divergence = losses.divergence(log_p, log_t, kind="jsd", beta=float(self.beta))
        return (divergence, -(log_p.exp() * log_p).sum(-1).detach()) if self.with_entropy else (divergence,)


@dataclass
class CapturedHead:
    """Request of the head's complete weight and bias; `hidden`, as the head's forward got it, comes along."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        """Keeps the three tensors and returns zeros (N,), which stand for log-probabilities nobody reads."""
        self.hidden, self.weight, self.bias = hidden, weight, bias
        return (hidden.new_zeros(hidden.shape[0], dtype=torch.float32),)

    def answer_from_logits(self, products: Tensor) -> tuple[Tensor, ...]:
        return (products.new_zeros(products.shape[0], dtype=torch.float32),)


def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm) -> Tensor:
    """The mean of z over the vocabulary, (N,) in fp32.

    Without a softcap the mean logit is the product with the mean of the weight's rows. With a softcap it takes one more
    product with the head, in blocks of the vocabulary.
    """
    if form.softcap is None:
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        mean = mean if bias is None else mean + bias.float().mean()
        return form.of_products(mean) / form.temperature
    total_N = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    for start in range(0, weight.shape[0], 8192):
        block = slice(start, start + 8192)
        total_N += form.of_products(F.linear(hidden, weight[block], None if bias is None else bias[block])).sum(-1)
    return total_N / weight.shape[0] / form.temperature


class _Active(threading.local):
    def __init__(self) -> None:
        self.request: Request | None = None
        self.answered = False


_active = _Active()


@dataclass(frozen=True)
class RequestSeam(Seam):
    """An `nn.Linear` that answers the active request, and computes logits if there is none."""

    op: ClassVar[str] = "linear_logprobs"
    flag: ClassVar[str] = "linear_logprobs"

    def candidate(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def objection(self, module: nn.Module) -> str | None:
        cls = type(module)
        while issubclass(cls, PatchedModule) and "_tigon_base" in vars(cls):
            cls = cls._tigon_base
        if cls.forward is not nn.Linear.forward:
            return f"it is a {cls.__module__}.{cls.__name__}, which overrides nn.Linear's forward"
        return None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        base_forward = base.forward

        def forward(self: Any, input: Tensor) -> Any:
            request = _active.request
            if request is None or is_dtensor(self.weight):
                return base_forward(self, input)
            _active.request, _active.answered = None, True
            return request.answer(*_one_dtype(input, self.weight, self.bias))

        return {"forward": forward}


def _one_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The dtype that TRL computes in: autocast's, or the hidden states'."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class FusedHead:
    """The head of one model, as TRL's code and tigon's overrides call it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changes: list[Change] = []

    @property
    def vocab_size(self) -> int:
        """The number of logits per token."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        return next(m.out_features for m in peel(head) if isinstance(m, nn.Linear))

    def patch(self) -> None:
        """Let the head answer requests.

        Raises:
            PatchError: the head is not a linear module, or overrides nn.Linear's forward. Nothing was changed.
        """
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        linears = [] if head is None else [m for m in peel(head) if isinstance(m, nn.Linear)]
        seam = RequestSeam()
        if not linears:
            raise PatchError(f"the head is a {type(head).__module__}.{type(head).__name__}")
        for module in linears:
            if objection := seam.objection(module):
                raise PatchError(f"the head cannot compute log-probabilities itself: {objection}")
        for module in linears:
            if not isinstance(getattr(module, "_tigon_seam", None), RequestSeam):
                change = Change("lm_head", module, seam)
                change.apply()
                self.changes.append(change)

    def restore(self) -> None:
        """Undo `patch`. A head that something wrapped since keeps its class, which without a request does nothing."""
        for change in reversed(self.changes):
            if change.blocked() is None:
                change.revert()
        self.changes.clear()

    def compute(self, hidden: Tensor, request: Request) -> tuple[Tensor, ...]:
        """hidden (N, H) -> the request's answer, computed in the head's own forward if it can."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]  # looked up per call: FSDP replaces it
        if _cast_to_fp32(head):
            return request.answer(hidden, head.weight, head.bias)
        hooks = [hook for m in peel(head) for hook in m._forward_hooks.values() if package_of(hook) not in QUIET_HOOKS]
        if hooks:
            self._warn("a forward hook on the head reads or changes the logits")
            return request.answer_from_logits(head(hidden))
        before = _active.request, _active.answered
        _active.request, _active.answered = request, False
        try:
            result = head(hidden)
            answered = _active.answered
        finally:
            _active.request, _active.answered = before
        if answered:
            return result  # type: ignore[no-any-return]
        self._warn("the head's own forward computes the logits (an adapter, a tensor-parallel shard or another class)")
        return request.answer_from_logits(result)

    def _warn(self, reason: str) -> None:
        if self.model not in _warned:
            _warned.add(self.model)
            warnings.warn(
                f"tigon computes the logits of {type(self.model).__name__}'s labelled tokens in full: {reason}.",
                UnfusedWarning,
                stacklevel=2,
            )


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _cast_to_fp32(head: Any) -> bool:
    """Whether GRPO's `cast_lm_head_to_fp32` replaced the head's forward on the instance, and its weight is complete."""
    own = vars(head).get("forward")
    weight = head.weight
    whole = not is_dtensor(weight) and weight.numel() > 0
    return whole and getattr(own, "__name__", "") == "cast_forward_to_fp32"


def bound_arguments(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the callee's parameter names."""
    return {**dict(zip(names, args, strict=False)), **kwargs}
