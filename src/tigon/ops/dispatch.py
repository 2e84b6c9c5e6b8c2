"""How a call reaches a kernel: one torch.library operator per forward and backward, skipped in plain eager mode.

A `Primitive` is a named operator `tigon::x_fwd` with three bodies: the Triton launcher, the composite path of the same
algorithm in PyTorch (`reference`), and the fake that only computes shapes. `torch.compile`, FakeTensor tracing and
activation-checkpoint policies see the operator. Plain eager calls skip the dispatcher to save time. Measured on the CPU
with torch 2.13:

    direct call                     0.7 us
    `Library.define` and `impl`     2.3 us
    `custom_op` decorator           8.9 us (16.5 us with its autograd)

A `Differentiable` is the operator `tigon::x` that users call. Its Autograd key runs a `torch.autograd.Function` that
calls primitives. Dynamo puts the operator into its graph without tracing tigon's Python code. AOTAutograd then traces
through the Autograd key and keeps the forward and backward primitives.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx

from tigon.errors import DoubleBackwardError, DtypeError, OptionError
from tigon.kernels import chips
from tigon.kernels.chips import Chip
from tigon.ops.signature import Signature

_LIBRARY = torch.library.Library("tigon", "DEF")
_F = TypeVar("_F", bound=Callable[..., Any])

# Kernels accumulate in fp32, so fp64 inputs use the composite path, which computes in fp64.
KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

_FLOATS = KERNEL_DTYPES | {torch.float64}

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton reads the same variable when it decorates a kernel and ignores later changes.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def uses_kernel(x: Tensor) -> bool:
    """Whether an op on `x` runs its Triton kernel: on a GPU, or on the CPU with TRITON_INTERPRET=1; never for fp64."""
    return HAS_TRITON and (x.is_cuda or (INTERPRET and x.device.type == "cpu")) and x.dtype in KERNEL_DTYPES


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What ops ask while a trace of fake tensors plans a GPU's run: facts that depend on values or on the device."""

    arch: tuple[int, int]
    """The GPU's compute capability."""
    ignored: int = 0
    """Tokens of a micro-batch that do not count."""
    count: Callable[..., None] = lambda **work: None
    """Takes the work of a call that a GPU does in place, as `flops`, `moved_bytes` and `dtype`."""


_planned: Planned | None = None


@contextlib.contextmanager
def planned_for(run: Planned) -> Iterator[None]:
    """Let ops plan for a CUDA GPU, whatever device their tensors are on.

    Used to trace fake tensors on machines without a GPU, where fake CUDA tensors cannot be created.
    """
    global _planned
    before, _planned = _planned, run
    try:
        yield
    finally:
        _planned = before


def planned() -> Planned | None:
    """The run that a trace plans; None outside of traces."""
    return _planned


def planned_device(x: Tensor) -> str:
    """The device type that an op on `x` plans for."""
    return "cuda" if _planned is not None else x.device.type


def planned_chip(x: Tensor) -> Chip | None:
    """The chip whose launch tables an op on `x` uses; None if no kernel runs or the chip has no table row."""
    if _planned is not None:
        return chips.chip_of_arch(_planned.arch)
    if not HAS_TRITON or not (x.is_cuda or (INTERPRET and x.device.type == "cpu")):
        return None
    return chips.chip(x.device.index)


def check_number(name: str, value: object) -> Any:
    """Return `value` as an int or a float (symbolic ones too), or raise `OptionError` if it is not a real number.

    Tensors are refused because reading one would wait for the GPU, and booleans because True would count as 1.
    """
    if type(value) is float:
        return value
    if not isinstance(value, bool):
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            return value
        if not isinstance(value, Tensor) and isinstance(value, numbers.Real):
            return float(value)  # such as a Fraction, which PyTorch does not take
    raise OptionError(f"{name}={value!r} is a {type(value).__name__}; it must be a number.")


def check_whole(name: str, value: object) -> None:
    """Raise `OptionError` unless the value is a Python integer."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}; it must be a whole number.")


def check_dtype(*tensors: Tensor | None) -> None:
    """Raise `DtypeError` for a tensor whose dtype is not fp16, bf16, fp32 or fp64."""
    for t in tensors:
        if t is not None and t.dtype not in _FLOATS:
            raise DtypeError(
                f"dtype {t.dtype} is not supported; "
                "the limit is float16, bfloat16, float32 and float64. Cast the input."
            )


def product_dtype(hidden: Tensor, *others: Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, else the promoted dtype of all tensors."""
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (t.dtype for t in others), hidden.dtype)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, which would make the fp32 accumulation 16-bit; the caller has already chosen the dtypes.

    A context of autocast takes several microseconds of host time, so there is none if autocast is off.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def can_bypass_dispatcher(args: Iterable[Any]) -> bool:
    """True if no compiler, mode or tensor subclass needs to see a named operator, and no argument is a meta tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    for a in args:
        if type(a) in _PLAIN:
            if a.is_meta:
                return False
        elif isinstance(a, Tensor):
            return False
    return True


def runs_eagerly(x: Tensor) -> bool:
    """Whether an op on `x` runs without a compiler, a mode or a tensor subclass, or is traced for a run that does."""
    return _planned is not None or can_bypass_dispatcher((x,))


def may_overwrite(gradient: Tensor) -> bool:
    """Whether a backward may scale its own gradient in place. A trace may, because its GPU run does."""
    return runs_eagerly(gradient)


PRIMITIVES: dict[str, Primitive] = {}
"""All primitives by qualified name. The planner runs their fakes and records what they allocate."""


class Primitive:
    """A non-differentiable operator `tigon::name`.

    It has either a `kernel` and a `reference`, or a `composite`. The `reference` runs the same algorithm on tensors
    that the kernel does not support. A `composite` calls other primitives and PyTorch ops on every device. `kernel` is
    "module:function", resolved at the first launch so that importing tigon does not import Triton. `fake` takes the
    same arguments and returns empty outputs of the right shapes, dtypes and devices. `check`, if given, runs first on
    the arguments of every real call and may raise. `complete(results, *args)`, if given, replaces each None in the
    kernel's results by an empty tensor, because an operator must not return None. Calls without the dispatcher get
    None, because an allocation takes 1 us. `op` names an op whose kernel spills registers on some chips
    (`Chip.spills`), where the reference runs.

    Without a `schema`, the annotations of `fake` make it, and all bodies take and return records (`signature.py`).
    """

    def __init__(
        self,
        name: str,
        schema: str | None = None,
        *,
        fake: Callable[..., Any],
        reference: Callable[..., Any] | None = None,
        kernel: str | None = None,
        composite: Callable[..., Any] | None = None,
        check: Callable[..., None] | None = None,
        complete: Callable[..., Any] | None = None,
        op: str = "",
    ) -> None:
        if (composite is None) == (reference is None) or (reference is None) != (kernel is None):
            raise TypeError(f"{name} needs either a composite, or a kernel and a reference.")
        self.name = name
        self._check = check
        self._complete = complete
        self._reference = reference
        self._composite = composite
        self._op = op
        self._kernel_path = kernel
        self.signature = Signature(fake) if schema is None else None
        self.fake = _flat(fake, self.signature)
        """The fake, with the operator's flat arguments."""
        _LIBRARY.define(name + (schema or self.signature.schema))  # type: ignore[union-attr]
        _LIBRARY.impl(name, _flat(self._of_operator, self.signature), "CompositeExplicitAutograd")
        torch.library.register_fake(f"tigon::{name}", self.fake, lib=_LIBRARY)
        self._operator = getattr(torch.ops.tigon, name).default
        is_tensor = ["Tensor" in str(a.type) and "List" not in str(a.type) for a in self._operator._schema.arguments]
        self._getters = [] if self.signature is None else self.signature.tensor_getters()
        # Only tensors decide whether a call needs the dispatcher, so arguments after the last tensor are not checked.
        last = len(is_tensor) - is_tensor[::-1].index(True)
        self._tensors_end = last if self.signature is None else self.signature.leading_tensors()
        PRIMITIVES[f"tigon::{name}"] = self

    @functools.cached_property
    def kernel(self) -> Callable[..., Any]:
        """The function that launches the kernel."""
        assert self._kernel_path is not None
        module, function = self._kernel_path.split(":")
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]

    def body(self, x: Tensor) -> Callable[..., Any]:
        """The real body of a call whose first tensor is `x`, without its check."""
        if self._composite is None and uses_kernel(x) and not (self._op and self._spills(x)):
            return self.kernel
        return self._composite or self._reference  # type: ignore[return-value]

    def _spills(self, x: Tensor) -> bool:
        """Whether the kernel spills registers on the chip of `x`; says once that PyTorch runs the op there."""
        chip = chips.chip(x.device.index)
        if chip is None or self._op not in chip.spills:
            return False
        _say_slow(self._op, chip.names)
        return True

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        return [tensor for position, get in self._getters for tensor in get(args[position])]

    def _of_operator(self, *args: Any) -> Any:
        """The real body as the operator runs it."""
        if self._check is not None:
            self._check(*args)
        x = args[0] if self._tensors_end else self._tensors(args)[0]
        results = self.body(x)(*args)
        return results if self._complete is None else self._complete(results, *args)

    def __call__(self, *args: Any) -> Any:
        signature = self.signature
        tensors = args[:end] if (end := self._tensors_end) else self._tensors(args)
        if not can_bypass_dispatcher(tensors):
            if signature is None:
                return self._operator(*args)
            return signature.results(self._operator(*signature.flatten(args)))
        if self._check is not None:
            self._check(*args)
        return self.body(tensors[0])(*args)


@functools.cache
def _say_slow(op: str, chip: str) -> None:
    warnings.warn(f"tigon.{op} runs in PyTorch on {chip}, because its kernels spill registers there.", stacklevel=2)


def _flat(body: Callable[..., Any], signature: Signature | None) -> Callable[..., Any]:
    """`body` with the flat arguments of its operator."""
    return body if signature is None else signature.flat(body)


class Differentiable:
    """The operator `tigon::name` that runs `function`; torch.compile calls it, eager code calls the function.

    Without a `schema`, the annotations of `function` make it.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        self.signature = Signature(function) if schema is None else None
        flat = _flat(function, self.signature)
        _LIBRARY.define(name + (schema or self.signature.schema))  # type: ignore[union-attr]
        _LIBRARY.impl(name, flat, "Autograd")
        _LIBRARY.impl(name, torch.no_grad()(flat), "CompositeExplicitAutograd")
        torch.library.register_fake(f"tigon::{name}", torch.no_grad()(flat), lib=_LIBRARY)
        self._operator = getattr(torch.ops.tigon, name).default

    def __call__(self, *args: Any) -> Any:
        """Call the operator."""
        if self.signature is None:
            return self._operator(*args)
        return self.signature.results(self._operator(*self.signature.flatten(args)))


def outside_graphs(function: _F) -> _F:
    """Decorate a function that torch.compile must not trace: it runs eagerly, between two graphs.

    `torch.compiler.disable` does the same, but loads Dynamo with the module, which takes seconds.
    """
    return cast(_F, _disable_dynamo(function))


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor. Compared by name, because importing the class takes long."""
    return type(value).__name__ == "DTensor"


def by_vocabulary(divided: Callable[..., Any], **weights: int) -> Callable[[_F], _F]:
    """Decorate a function of whole heads: `divided` takes the calls whose head is divided by vocabulary.

    The call is divided if a weight is a DTensor, or if `vocab_parallel` is given.

    Args:
        divided: takes the same arguments.
        weights: the names of the weights, and their places among the arguments.
    """

    def decorate(whole: _F) -> _F:
        @functools.wraps(whole)
        def entered(*args: Any, **options: Any) -> Any:
            if options.get("vocab_parallel") is not None:
                return divided(*args, **options)
            for name, place in weights.items():
                if is_dtensor(args[place] if place < len(args) else options.get(name)):
                    return divided(*args, **options)
            return whole(*args, **options)

        return cast(_F, entered)

    return decorate


class Context(FunctionCtx):
    """The `ctx` of an autograd function. Its other attributes are what the function keeps for its backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: object) -> None: ...


def first_order(backward: _F) -> _F:
    """Decorate a backward so that it raises `DoubleBackwardError` under `create_graph=True`.

    `once_differentiable` is not enough. If the incoming gradient does not require grad, as in every
    `loss.backward(create_graph=True)`, it returns plain tensors, and a gradient penalty silently loses this term.
    """

    @functools.wraps(backward)
    def checked(ctx: Context, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                f"{type(ctx).__name__.removesuffix('Backward')}: create_graph=True needs a second derivative, which "
                "tigon's ops do not have. Call the PyTorch op instead where you need it."
            )
        return backward(ctx, *grads)

    return checked  # type: ignore[return-value]
