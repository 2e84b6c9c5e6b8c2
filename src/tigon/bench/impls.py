"""The implementations that are measured: one `Impl` per implementation and op, with its import and its adapter.

Roles:

- `ours`: tigon on the row's problem.
- `variant`: tigon on a changed problem (a frozen head, half of the labels ignored, entropies too). Its error is not
  measured.
- `baseline`: the unfused formula in eager mode, with which errors are compared.
- `peer`: another library.
- `limit`: the work that every implementation must do.

Some implementations overwrite their inputs or the incoming gradient. They get separate tensors, which are restored
before every run. Liger's norms write dX into dY, its RoPE rotates q and k in place, and its losses write the gradient
into the logits. The models that Liger patches call them this way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tigon.ops import OPS, Op

Role = Literal["ours", "variant", "baseline", "peer", "limit"]
GIB = 1 << 30


class NoSuchOp(Exception):
    """An installed package lacks the op."""


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One implementation of one op."""

    name: str
    op: str
    role: Role
    target: str | Callable[..., Any]
    """"module:function", imported on first use, or the function itself."""
    adapt: Callable[..., Any] | None = None
    """Called with the function and the op's inputs by name. A row with an input that is not in its signature is "not
    supported". If None, the function itself takes the inputs."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments bound to the function itself."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Inputs with fixed values."""
    vary: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Changes the problem."""
    grads: tuple[str, ...] | None = None
    """The inputs that get a gradient, instead of all differentiable ones. () means evaluation."""
    overwrites: bool = False
    capturable: bool = True
    """False if the host waits for the device, which a CUDA graph cannot record."""
    compiled: bool = False
    """Run through torch.compile."""
    frozen: tuple[str, ...] = ()
    """Inputs without a gradient from it. A row that asks for one is "not supported"."""
    mean_only: bool = False
    """It returns the mean over the tokens. A row of values per token is "not supported"."""

    @property
    def differentiates(self) -> bool:
        return self.grads != () and self.role != "limit"

    def load(self) -> Callable[..., Any]:
        """The callable that takes the op's inputs by name.

        Raises:
            ImportError: The package is not installed.
            NoSuchOp: The package is installed, but lacks the op.
        """
        function = _imported(self.target) if isinstance(self.target, str) else self.target
        if self.keywords:
            function = functools.partial(function, **self.keywords)
        if self.compiled:
            # Static shapes: after a second row Dynamo would otherwise compile with dynamic sizes.
            function = torch.compile(function, dynamic=False)
        return function if self.adapt is None else _Adapted(self.adapt, function)


def _imported(path: str) -> Callable[..., Any]:
    module, names = path.split(":")
    value: Any = importlib.import_module(module)
    for name in names.split("."):
        if not hasattr(value, name):
            raise NoSuchOp(f"{module} has no {names}")
        value = getattr(value, name)
    return value  # type: ignore[no-any-return]


class _Adapted:
    """Calls `adapt(function, **inputs)`. Its signature has the parameters that are not bound yet."""

    def __init__(self, adapt: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._adapt, self._function = adapt, function
        signature = inspect.signature(adapt)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, **inputs: Any) -> Any:
        return self._adapt(self._function, **inputs)


def impls_for(op: Op) -> list[Impl]:
    """Every implementation of an op, tigon first, the limit last."""
    own = [
        Impl(name="tigon", op=op.name, role="ours", target=op.call, overwrites=op.name == "cross_entropy"),
        Impl(name="eager", op=op.name, role="baseline", target=op.oracle),
        Impl(name="compile", op=op.name, role="peer", target=op.oracle, compiled=True),
    ]
    rest = [impl for impl in (*TIGON, *PEERS, *LIMITS) if impl.op == op.name]
    order = ("ours", "variant", "baseline", "peer", "limit")
    return sorted((*own, *rest), key=lambda impl: order.index(impl.role))


def impl_names() -> list[str]:
    """The names that `--impl` accepts."""
    return list(dict.fromkeys(impl.name for op in OPS.values() for impl in impls_for(op)))


# --- tigon with other settings and on other problems ------------------------------------------------------------------


def _half_ignored(inputs: dict[str, Any]) -> dict[str, Any]:
    target = inputs["target"].clone()
    target.view(-1)[1::2] = -100
    return {**inputs, "target": target}


def _tigon_linear(name: str, **fields: Any) -> Impl:
    call = OPS["linear_cross_entropy"].call
    return Impl(name=name, op="linear_cross_entropy", **{"target": call, "role": "ours", **fields})


def _half_masked(inputs: dict[str, Any]) -> dict[str, Any]:
    ids = inputs["ids"]
    mask = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % 2 == 0
    return {**inputs, "mask": mask}


def _with_entropy(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    result = f(hidden, weight, ids, outputs=("entropy",))
    return result.logprob + result.entropy  # type: ignore[no-any-return]


def _tigon_logprobs(name: str, **fields: Any) -> Impl:
    call = OPS["linear_logprobs"].call
    return Impl(name=name, op="linear_logprobs", **{"target": call, "role": "ours", **fields})


TIGON = (
    Impl(
        name="tigon new gradient", op="cross_entropy", role="ours", target=OPS["cross_entropy"].call,
        fixed={"inplace": False},
    ),
    _tigon_linear("tigon one chunk", fixed={"chunk_bytes": 1024 * GIB}),
    _tigon_linear("tigon 16-bit sums", fixed={"chunk_bytes": GIB, "fp32_accumulate": False}),
    _tigon_linear("tigon small chunks", fixed={"chunk_bytes": 5 * GIB // 16, "fp32_accumulate": False}),
    _tigon_linear("tigon half ignored", role="variant", vary=_half_ignored),
    _tigon_linear("tigon frozen head", role="variant", grads=("hidden",)),
    _tigon_linear("tigon eval", role="variant", grads=()),
    _tigon_logprobs("tigon kept logits", fixed={"chunk_bytes": 4 * GIB}),
    _tigon_logprobs("tigon recomputed logits", fixed={"chunk_bytes": GIB // 2}),
    _tigon_logprobs("tigon with entropy", role="variant", adapt=_with_entropy),
    _tigon_logprobs("tigon half masked", role="variant", vary=_half_masked),
    _tigon_logprobs("tigon frozen head", role="variant", grads=("hidden",)),
    _tigon_logprobs("tigon eval", role="variant", grads=()),
    Impl(
        name="tigon frozen weight", op="lora_linear", role="variant", target=OPS["lora_linear"].call,
        grads=("x", "lora_a", "lora_b"),
    ),
    Impl(
        name="eager frozen weight", op="lora_linear", role="variant", target=OPS["lora_linear"].oracle,
        grads=("x", "lora_a", "lora_b"),
    ),
)  # fmt: skip


# --- peers ------------------------------------------------------------------------------------------------------------


def _torch_rms_norm(f: Any, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    return f(x, x.shape[-1:], weight, eps)


def _torch_add_rms_norm(f: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    s = x + residual
    return f(s, s.shape[-1:], weight, eps), s


def _torch_layer_norm(f: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Any:
    return f(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(f: Any, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    return f(x, weight, eps=eps)


def _add_rms_norm(f: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    return f(x, residual, weight, eps)


def _quack_add_rms_norm(f: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Any:
    return f(x, weight, residual=residual, eps=eps, prenorm=True)


def _layer_norm(f: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Any:
    return f(x, weight, bias, eps)


def _rope(f: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return f(q, k, cos, sin)


def _gated(f: Any, gate: Tensor, up: Tensor) -> Any:
    return f(gate, up)


def _cross_entropy(f: Any, logits: Tensor, target: Tensor) -> Any:
    return f(logits, target)


def _first_of_cross_entropy(f: Any, logits: Tensor, target: Tensor) -> Any:
    return f(logits, target)[0]


def _linear(f: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    return f(hidden, weight, target)


def _mean_of_linear(f: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
    return f(hidden, weight, target).mean()


def _minus(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
    return -f(hidden, weight, ids)


def _liger_portable(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    # temperature, ignored id, entropies
    return -f(hidden, weight, ids, 1.0, -100, False)  # type: ignore[no-any-return]


def _trl_logprobs(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
    # bias, ids, temperature, columns per chunk (the trainers' value in TRL 1.16), softcap, logit scale, other outputs
    return f(hidden, weight, None, ids, 1.0, 32768, None, 1.0, ())[0]


def _trl_divergence(
    f: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str
) -> Tensor:
    # hidden, weight and bias of the student, then of the teacher
    return f(hidden, weight, None, teacher_hidden, teacher_weight, None, _BETA[kind])[0]  # type: ignore[no-any-return]


def _liger_divergence(
    f: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str
) -> Tensor:
    return f(hidden, weight, teacher_hidden, teacher_weight, jsd_beta=_BETA[kind])  # type: ignore[no-any-return]


_TEACHER = ("teacher_hidden", "teacher_weight")
_BETA = {"jsd": 0.5, "forward": 0.0, "reverse": 1.0}
"""The divergence in TRL's and Liger's terms: the teacher's share of the mixture."""


def _peers(name: str, target: str, rows: Mapping[str, tuple[str, Callable[..., Any]]], **fields: Any) -> list[Impl]:
    """Implementations of one library: op -> (function, adapter). `fields` apply to all of them."""
    return [
        Impl(name=name, op=op, role="peer", target=target + function, adapt=adapt, **fields)
        for op, (function, adapt) in rows.items()
    ]


_LIGER, _LIGER_DISPATCH = "liger_kernel.transformers.functional:liger_", "liger_kernel.functional:"
_LIGER_CUTE = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:"
_LIGER_SCALED = "liger_kernel.ops.fused_linear_scaled_cross_entropy:"
_CUTE = {"impl": "nvidia-cutedsl"}

PEERS: Sequence[Impl] = (
    *_peers("torch", "torch.nn.functional:", {
        "rms_norm": ("rms_norm", _torch_rms_norm),
        "add_rms_norm": ("rms_norm", _torch_add_rms_norm),
        "layer_norm": ("layer_norm", _torch_layer_norm),
        "cross_entropy": ("cross_entropy", _cross_entropy),
        "linear_cross_entropy": ("linear_cross_entropy", _linear),  # torch 2.13 and newer
    }),
    *_peers("liger", _LIGER, {
        "rms_norm": ("rms_norm", _rms_norm),
        "add_rms_norm": ("fused_add_rms_norm", _add_rms_norm),
        "layer_norm": ("layer_norm", _layer_norm),
        "rope": ("rope", _rope),
        "swiglu": ("swiglu", _gated),
        "geglu": ("geglu", _gated),
    }, overwrites=True),
    # The losses read a count off the device in the forward and compare the incoming gradient with 1 in the backward.
    *_peers("liger", _LIGER, {
        "cross_entropy": ("cross_entropy", _cross_entropy),
        "linear_cross_entropy": ("fused_linear_cross_entropy", _linear),
    }, overwrites=True, capturable=False),
    *_peers("liger fp32", _LIGER, {
        "linear_cross_entropy": ("fused_linear_cross_entropy", _linear),
    }, keywords={"accum_dtype": torch.float32}, overwrites=True, capturable=False),
    # Opt-in CuTe kernels, which need nvidia-cutlass-dsl and a Hopper GPU or newer.
    *_peers("liger cute", _LIGER_DISPATCH, {
        "rms_norm": ("rms_norm", _rms_norm),
        "add_rms_norm": ("fused_add_rms_norm", _add_rms_norm),
        "layer_norm": ("layer_norm", _layer_norm),
        "rope": ("rope", _rope),
        "swiglu": ("swiglu", _gated),
        "geglu": ("geglu", _gated),
    }, keywords=_CUTE, overwrites=True),
    *_peers("liger cute", _LIGER_DISPATCH, {
        "cross_entropy": ("cross_entropy", _first_of_cross_entropy),
    }, keywords=_CUTE, overwrites=True, capturable=False),
    *_peers("liger cute", _LIGER_CUTE, {
        "linear_cross_entropy": ("liger_fused_linear_cross_entropy_sm90", _linear),
    }, overwrites=True, capturable=False),
    *_peers("liger scaled", _LIGER_SCALED, {
        "linear_cross_entropy": ("LigerFusedLinearScaledCrossEntropyFunction.apply", _mean_of_linear),
    }, overwrites=True, capturable=False),
    *_peers("liger scaled", _LIGER_SCALED, {
        "linear_logprobs": ("LigerFusedLinearScaledCrossEntropyFunction.apply", _minus),
    }, overwrites=True, capturable=False),
    # On Hopper the function above needs CuTe and does not fall back. This is what it runs elsewhere.
    *_peers("liger portable", _LIGER_SCALED, {
        "linear_logprobs": ("_FusedLinearPPOFallbackFunction.apply", _liger_portable),
    }),
    *_peers("trl", "trl.kernels:", {
        "linear_logprobs": ("ChunkedLogProbFunction.apply", _trl_logprobs),
    }),
    *_peers("trl", "trl.kernels.chunked_divergence:", {
        "linear_kl": ("ChunkedDivergenceFunction.apply", _trl_divergence),
    }, frozen=_TEACHER),
    # It computes the gradient in the forward. The backward compares the upstream gradient with 1 on the host.
    *_peers("liger jsd", _LIGER, {
        "linear_kl": ("fused_linear_jsd", _liger_divergence),
    }, capturable=False, mean_only=True, frozen=_TEACHER),
    *_peers("quack", "quack.rmsnorm:", {
        "rms_norm": ("rmsnorm", _rms_norm),
        "add_rms_norm": ("rmsnorm", _quack_add_rms_norm),
    }),
    *_peers("quack", "quack.cross_entropy:", {
        "cross_entropy": ("cross_entropy", _cross_entropy),
    }, keywords={"inplace_backward": True}, overwrites=True),
    *_peers("quack", "quack.linear_cross_entropy:", {
        "linear_cross_entropy": ("chunked_linear_cross_entropy", _linear),
    }, overwrites=True),
    *_peers("quack base", "quack.linear_cross_entropy:", {
        "linear_cross_entropy": ("chunked_linear_cross_entropy", _linear),
    }, keywords={"use_scaled_exp": False}, overwrites=True),
    # The default skips blocks whose softmax is small, which is fast but not the exact gradient. `cce exact` skips none.
    *_peers("cce", "cut_cross_entropy:", {
        "linear_cross_entropy": ("linear_cross_entropy", _linear),
    }, capturable=False),
    *_peers("cce exact", "cut_cross_entropy:", {
        "linear_cross_entropy": ("linear_cross_entropy", _linear),
    }, keywords={"filter_eps": None}, capturable=False),
)  # fmt: skip


# --- limits -----------------------------------------------------------------------------------------------------------


def _products(hidden: Tensor, weight: Tensor, *, chunk: int = 8192, logits_twice: bool = False) -> Tensor:
    """The matrix products of an lm_head: logits, dX and dW, 8192 tokens at a time, without sums."""
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    dw_VH = hidden
    for start in range(0, hidden_NH.shape[0], chunk):
        x_CH = hidden_NH[start : start + chunk]
        z_CV = torch.mm(x_CH, weight.t())
        if logits_twice:
            torch.mm(x_CH, weight.t(), out=z_CV)
        torch.mm(z_CV, weight)
        dw_VH = torch.mm(z_CV.t(), x_CH)
    return dw_VH


def _of_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _products(hidden, weight)


def _of_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return _products(hidden, weight)


def _four_of_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return _products(hidden, weight, logits_twice=True)


def _six_of_kl(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any
) -> Tensor:  # fmt: skip
    teacher_NH = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    for _pass in ("forward", "backward"):
        torch.mm(teacher_NH, teacher_weight.t())
    return _products(hidden, weight, logits_twice=True)


def _eight_of_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any) -> Tensor:
    _products(teacher_hidden, teacher_weight, logits_twice=True)
    return _products(hidden, weight, logits_twice=True)


def _four_of_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any) -> Tensor:
    torch.mm(teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), teacher_weight.t())
    return _products(hidden, weight)


def _two_of_lora(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """y = x Wᵀ and dx = dy W: the products of a frozen layer without its adapter."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.mm(torch.mm(rows, weight.t()), weight)


def _three_in_16_bits(x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The products of a linear layer without FP8, with y in place of dy."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight.t())
    return torch.mm(y, weight), torch.mm(y.t(), rows)


LIMITS = (
    Impl(name="16-bit products", op="fp8_linear", role="limit", target=_three_in_16_bits),
    Impl(name="products", op="linear_cross_entropy", role="limit", target=_of_loss),
    # The first limit of an op is the bound of its rows.
    Impl(name="products", op="linear_logprobs", role="limit", target=_of_logprobs),
    Impl(name="four products", op="linear_logprobs", role="limit", target=_four_of_logprobs),
    Impl(name="six products", op="linear_kl", role="limit", target=_six_of_kl),
    Impl(name="eight products", op="linear_kl", role="limit", target=_eight_of_kl),
    Impl(name="products once", op="linear_kl", role="limit", target=_four_of_kl),
    Impl(name="two products", op="lora_linear", role="limit", target=_two_of_lora),
)
