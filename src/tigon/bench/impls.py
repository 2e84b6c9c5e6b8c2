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

`CATALOGUE` has PyTorch's own ops and Liger's. `benchmarks/kernels` of the repository adds other libraries.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.rows import SUITES, Row
from tigon.ops import OPS

Role = Literal["ours", "variant", "baseline", "peer", "limit"]


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


@dataclass(frozen=True)
class Catalogue:
    """What can be measured."""

    suites: Mapping[str, tuple[Row, ...]]
    impls: tuple[Impl, ...]
    """Beside those that every op has: tigon, eager and compile."""

    def impls_for(self, op: str) -> list[Impl]:
        """Every implementation of an op, tigon first, the limits last."""
        call, oracle = OPS[op].call, OPS[op].oracle
        own = [
            Impl(name="tigon", op=op, role="ours", target=call, overwrites=op == "cross_entropy"),
            Impl(name="eager", op=op, role="baseline", target=oracle),
            Impl(name="compile", op=op, role="peer", target=oracle, compiled=True),
        ]
        order = ("ours", "variant", "baseline", "peer", "limit")
        rest = [impl for impl in self.impls if impl.op == op]
        return sorted((*own, *rest), key=lambda impl: order.index(impl.role))

    def names(self) -> list[str]:
        """The names that `--impl` accepts."""
        return list(dict.fromkeys(impl.name for op in OPS for impl in self.impls_for(op)))

    def of_row(self, row: Row, names: Collection[str]) -> list[Impl]:
        """The implementations of these names that are measured on a row, and always the row's limits."""

        def is_wanted(impl: Impl) -> bool:
            if impl.role == "limit":
                return not row.limits or impl.name in row.limits
            return impl.name in names and (not row.impls or impl.name in row.impls)

        return [impl for impl in self.impls_for(row.op) if is_wanted(impl)]


def peers(name: str, module: str, functions: Mapping[str, str], **fields: Any) -> list[Impl]:
    """Implementations of one library: op -> function, with the op's adapter of ADAPTERS. `fields` apply to all."""
    fields = {"role": "peer", **fields}
    return [
        Impl(name=name, op=op, target=f"{module}:{function}", **{"adapt": ADAPTERS.get(op), **fields})
        for op, function in functions.items()
    ]


ADAPTERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "rms_norm": lambda f, x, weight, eps=1e-6: f(x, weight, eps=eps),
        "add_rms_norm": lambda f, x, residual, weight, eps=1e-6: f(x, residual, weight, eps),
        "layer_norm": lambda f, x, weight, bias, eps=1e-5: f(x, weight, bias, eps),
        "rope": lambda f, q, k, cos, sin: f(q, k, cos, sin),
        "swiglu": lambda f, gate, up: f(gate, up),
        "geglu": lambda f, gate, up: f(gate, up),
        "cross_entropy": lambda f, logits, target: f(logits, target),
        "linear_cross_entropy": lambda f, hidden, weight, target: f(hidden, weight, target),
    }
)
"""How most libraries take the inputs of an op."""
LIGER = "liger_kernel.transformers.functional"
LIGER_NAMES = {
    "rms_norm": "liger_rms_norm",
    "add_rms_norm": "liger_fused_add_rms_norm",
    "layer_norm": "liger_layer_norm",
    "rope": "liger_rope",
    "swiglu": "liger_swiglu",
    "geglu": "liger_geglu",
}


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    s = x + residual
    return _torch_rms_norm(s, weight, eps), s


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def products(hidden: Tensor, weight: Tensor, *, logits_twice: bool = False) -> Tensor:
    """The matrix products of an lm_head: logits, dX and dW, 8192 tokens at a time, without sums."""
    hidden_NH = hidden.reshape(-1, hidden.shape[-1])
    dw_VH = hidden
    for x_CH in hidden_NH.split(8192):
        z_CV = torch.mm(x_CH, weight.t())
        if logits_twice:
            torch.mm(x_CH, weight.t(), out=z_CV)
        torch.mm(z_CV, weight)
        dw_VH = torch.mm(z_CV.t(), x_CH)
    return dw_VH


PEERS: tuple[Impl, ...] = (
    Impl(name="torch", op="rms_norm", role="peer", target=_torch_rms_norm),
    Impl(name="torch", op="add_rms_norm", role="peer", target=_torch_add_rms_norm),
    Impl(name="torch", op="layer_norm", role="peer", target=_torch_layer_norm),
    # torch 2.13 and newer have linear_cross_entropy
    *peers(
        "torch",
        "torch.nn.functional",
        {"cross_entropy": "cross_entropy", "linear_cross_entropy": "linear_cross_entropy"},
    ),
    *peers("liger", LIGER, LIGER_NAMES, overwrites=True),
    # The losses read a count off the device in the forward and compare the incoming gradient with 1 in the backward.
    *peers(
        "liger",
        LIGER,
        {"cross_entropy": "liger_cross_entropy", "linear_cross_entropy": "liger_fused_linear_cross_entropy"},
        overwrites=True,
        capturable=False,
    ),
)
# The first limit of an op is the bound of its rows.
LIMITS = (
    Impl(
        name="products",
        op="linear_cross_entropy",
        role="limit",
        target=lambda hidden, weight, target: products(hidden, weight),
    ),
    Impl(
        name="products",
        op="linear_logprobs",
        role="limit",
        target=lambda hidden, weight, ids: products(hidden, weight),
    ),
)
CATALOGUE = Catalogue(SUITES, (*PEERS, *LIMITS))
