"""A dispatch mode that records the allocations and frees of a fake run, and sums the costs of its operators."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.ops.attention_with_sinks import product_flops
from tigon.ops.dispatch import PRIMITIVES, Primitive
from tigon.planner.trace.cache import operator_cache
from tigon.planner.trace.tape import Tape, TapeSegment, Where

if TYPE_CHECKING:
    from torch._ops import OpOverload

# The caching allocator's granularity: c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize.
ROUND_BYTES = 512

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def rounded(nbytes: int) -> int:
    """Bytes that torch.cuda.memory_allocated() counts for an allocation of `nbytes`."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES


# CPU time of one of tigon's operators with its autograd, as a number of PyTorch's operators. The forward and backward
# passes of a small norm take 0.08 ms of CPU time.
HOST_CALLS = 5

Scratch = Callable[[tuple[Any, ...]], int]
"""An operator's arguments -> bytes that it allocates and frees besides its outputs."""
Inplace = Mapping[int, int]
"""Index of an output -> index of the argument whose memory it reuses."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """The recorder's questions about an operator. PyTorch computes each of these again at every question."""

    name: str
    primitive: Primitive | None
    """tigon's primitive; None for an operator of PyTorch."""
    is_mutable: bool

    @classmethod
    def of(cls, func: OpOverload) -> _Operator:
        name = func._schema.name
        return cls(name, PRIMITIVES.get(name), func._schema.is_mutable)


_operators: dict[Any, _Operator] = {}
_DEVICE = torch.ops.prim.device.default


class TraceRecorder(TorchDispatchMode):
    """Records onto `tape`. `scratch` and `inplace` hold, by operator name, the memory use that fakes do not show.

    host_calls: CPU time of one of tigon's fused operators, as a number of ordinary operators.
    """

    def __init__(
        self, scratch: Mapping[str, Scratch], inplace: Mapping[str, Inplace], host_calls: int = HOST_CALLS
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._host_calls, self._closed = host_calls, False
        self.watching_calls = 0
        """Additional CPU time per operator, as a number of operators, while a Python dispatch mode is active."""
        self.tape = Tape()
        self.component = "activations"
        self._scratch, self._inplace = scratch, inplace
        self._storages: dict[int, Any] = {}
        self._blocks: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self.mark(Where("forward"), "activations")

    def mark(self, where: Where, component: str) -> None:
        """Later events belong to `where`, later allocations to `component`."""
        self.where, self.component = where, component
        self.tape.segments.append(TapeSegment(where))

    def close(self) -> None:
        """Stop recording: later costs and frees do not count."""
        self._storages.clear()
        self._closed = True

    def exclude(self, tensors: Iterator[Tensor]) -> None:
        """Leave out tensors that exist before the recording starts, which other code counts."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def block_of(self, tensor: Tensor) -> int | None:
        """The block of a tensor; None if the tensor is older than the recording."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def relabel(self, tensor: Tensor, component: str) -> None:
        block = self.block_of(tensor)
        if block is not None:
            self.tape.components[block] = component

    def count(
        self, *, flops: float = 0.0, moved_bytes: float = 0.0, launches: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        """Add work that no operator of the trace represents."""
        if self._closed:
            return
        cost = self.tape.segments[-1].cost
        if dtype is None or dtype in _HALF:
            cost.flops += flops
        else:
            cost.fp32_flops += flops
        cost.moved_bytes += moved_bytes
        cost.launches += launches
        cost.host_calls += launches

    def count_host(self, calls: int) -> None:
        """Add CPU time that no operator of the trace represents, as a number of operators."""
        if not self._closed:
            self.tape.segments[-1].cost.host_calls += calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch wraps each dispatch in a switch that turns off torch.compile. Nothing compiles a trace."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # three of five dispatches; each counts as an operator
            self.tape.segments[-1].cost.host_calls += 1 + self.watching_calls
            return args[0].fake_device
        operator = _operators.get(func) or _operators.setdefault(func, _Operator.of(func))
        name, primitive = operator.name, operator.primitive
        if primitive is None or name in self._inplace:
            out = operator_cache.call(func, args, kwargs or {})
        else:
            calls = self.tape.segments[-1].cost.host_calls
            with self:  # the fake allocates the same tensors as the kernel, including temporaries
                out = primitive.fake(*args)
            self.tape.segments[-1].cost.host_calls = calls
        results = out if isinstance(out, (tuple, list)) else _written(func, args) if out is None else (out,)
        own_calls = self._host_calls if primitive is not None else 1
        self.tape.segments[-1].cost.host_calls += own_calls + self.watching_calls
        inplace = _FIRST if _sums_gradients(func, args) else self._inplace.get(name)
        fresh = False
        for position, result in enumerate(results):
            if isinstance(result, Tensor):
                source = None if inplace is None or position not in inplace else args[inplace[position]]
                fresh |= self._follow(result, source)
        scratch = self._scratch.get(name)
        if scratch is not None:
            self.transient(scratch(args))
        if fresh or operator.is_mutable or (primitive is not None and name not in self._inplace):
            self._charge(func, name, args, results)
        return out

    def follow(self, results: object) -> None:
        """Record the memory of tensors that another mode has made."""
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor):
                self._follow(result, None)

    def transient(self, nbytes: int) -> None:
        """Record memory that is allocated and freed within one operator."""
        if nbytes > 0:
            block = self._new(nbytes, "workspace")
            self.tape.segments[-1].events += [block, ~block]

    def _new(self, nbytes: int, component: str) -> int:
        self.tape.sizes.append(rounded(nbytes))
        self.tape.components.append(component)
        return len(self.tape.sizes) - 1

    def _follow(self, tensor: Tensor, source: Tensor | None) -> bool:
        """Whether the tensor's storage is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        nbytes = storage.nbytes()
        block = self.block_of(source) if source is not None else None
        if block is None:
            if nbytes == 0:
                return True
            block = self._new(nbytes, self.component)
            self.tape.segments[-1].events.append(block)
        self._holders[block] = self._holders.get(block, 0) + 1
        self._blocks[key] = block
        self._storages[key] = weakref.ref(storage, lambda _, key=key: self._died(key))  # type: ignore[misc]
        return True

    def _died(self, key: int) -> None:
        if self._storages.pop(key, None) is None:
            return
        block = self._blocks.pop(key)
        self._holders[block] -= 1
        if not self._holders[block]:
            self.tape.segments[-1].events.append(~block)

    def _charge(self, func: OpOverload, name: str, args: tuple[Any, ...], results: Sequence[object]) -> None:
        cost = self.tape.segments[-1].cost
        if func is aten.empty.memory_format or func is aten.empty_strided.default or func is aten.new_empty.default:
            return
        cost.launches += 1
        product = _PRODUCTS.get(name)
        if product is not None and not _waits_for_memory(name, args):
            names = (argument.name for argument in func._schema.arguments)
            flops = product(dict(zip(names, args, strict=False)))
            flat = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            dtypes = {t.dtype for t in flat if isinstance(t, Tensor)}
            if not dtypes.isdisjoint(_FP8):
                cost.fp8_flops += flops
            elif not dtypes.isdisjoint(_HALF):
                cost.flops += flops
            else:
                cost.fp32_flops += flops
            return
        touched = _TOUCHED.get(name)
        if touched is not None:
            cost.moved_bytes += touched(args)
            return
        tensors = [t for t in (*args, *results) if isinstance(t, Tensor)]
        for arg in args:
            if isinstance(arg, (tuple, list)):
                tensors += [t for t in arg if isinstance(t, Tensor)]
        cost.moved_bytes += sum(t.numel() * t.itemsize for t in tensors)


def _written(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that an operator writes to. They are the results of an operator that returns None."""
    pairs = zip(args, func._schema.arguments, strict=False)
    return tuple(arg for arg, declared in pairs if declared.alias_info is not None and declared.alias_info.is_write)


_FIRST: Inplace = {0: 0}


def _sums_gradients(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the autograd engine is adding two gradients of one tensor.

    It adds ordinary tensors in place, but not fakes (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
    Other additions are excluded: backward formulas of the operators here never add two tensors of one shape, and a
    recomputation runs with gradients enabled.
    """
    return (
        func is aten.add.Tensor
        and not torch.is_grad_enabled()
        and torch._C._current_graph_task_id() != -1
        and isinstance(args[1], Tensor)
        and args[0].shape == args[1].shape
    )


_THIN = 64


def _waits_for_memory(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a product into an existing matrix has so small a summed dimension that its bytes take the time."""
    return name == "aten::addmm_" and args[1].shape[1] <= _THIN


def _rows_added(args: tuple[Any, ...]) -> int:
    """Bytes of an embedding's gradient rows: read, and added to as many rows of the table's gradient at most."""
    grad_VH, dy_NH = args[:2]
    return int(dy_NH.numel() * (dy_NH.itemsize + 2 * grad_VH.itemsize))


_TOUCHED: Mapping[str, Callable[[tuple[Any, ...]], int]] = {"tigon::add_rows_": _rows_added}
"""Bytes of the operators that read and write only a part of their tensors."""


def _mm(args: Mapping[str, Any]) -> float:
    a, b = (args[name] for name in (("mat1", "mat2") if "mat1" in args else ("self", "mat2")))
    return float(2 * math.prod(a.shape) * b.shape[-1])


def _fp8_product(args: Mapping[str, Any]) -> float:
    return float(2 * math.prod(args["a_MK"].shape) * args["b_NK"].shape[0])


EXPERT_TILE_ROWS = 128
"""Rows of a tile of a grouped product (kernels/experts.py)."""


def _grouped_product(args: Mapping[str, Any]) -> float:
    """FLOPs of each slot times its expert's weight, (E, outputs, inputs), and its adapter's, (E, outputs, rank).

    The last tile of each expert is half empty on average, and takes the time of a full one.
    """
    weights = (args["weight"], args["low_weight"])
    rows = len(args["order"]) + args["weight"].shape[0] * EXPERT_TILE_ROWS // 2
    return float(sum(2 * rows * math.prod(w.shape[1:]) for w in weights if w is not None))


def _grouped_weight_gradient(args: Mapping[str, Any]) -> float:
    """FLOPs of each slot's outer product, (outputs, inputs)."""
    return float(2 * len(args["a"]) * math.prod(args["weight"].shape[1:]))


def _chunked_loss(args: Mapping[str, Any]) -> float:
    """FLOPs of the logits, and of the gradients if the forward computes them."""
    made = 0 if args["keep"] else args["want_hidden"] + args["want_weight"]
    flops = float(2 * math.prod(args["hidden_NH"].shape) * args["weight_VH"].shape[0] * (1 + made))
    if (low_NR := args["low_NR"]) is not None:
        made = 0 if args["keep"] else args["want_low"] + args["want_lora_b"]
        flops += 2 * math.prod(low_NR.shape) * args["lora_b_VR"].shape[0] * (1 + made)
    return flops


def _of_exponentials(args: Mapping[str, Any]) -> float:
    """FLOPs of the gradient of hidden or of the weight, from exponentials that the forward kept."""
    other = args["weight"] if "weight" in args else args["hidden"]
    return float(2 * math.prod(args["e"].shape) * other.shape[1])


def _logprobs(args: Mapping[str, Any]) -> float:
    """FLOPs of the logits."""
    return float(2 * math.prod(args["hidden_NH"].shape) * args["weight_VH"].shape[0])


def _logprobs_frozen(args: Mapping[str, Any]) -> float:
    """FLOPs of the logits and of hidden's gradient."""
    return 2.0 * _logprobs(args)


def _logprobs_gradients(args: Mapping[str, Any]) -> float:
    """FLOPs of the requested gradients, and of the logits unless they were kept."""
    products = (args["kept_NV"] is None) + args["want_hidden"] + args["want_weight"]
    return float(_logprobs(args) * products)


def _divergence(args: Mapping[str, Any]) -> float:
    """FLOPs of the logits of p and q."""
    return sum(_side_flops(args, side) for side in _SIDES)


def _divergence_frozen(args: Mapping[str, Any]) -> float:
    """FLOPs of the logits of p and q, and of the requested gradients of their hidden states."""
    return float(sum(_side_flops(args, side) * (1 + args[f"{side}_want_hidden"]) for side in _SIDES))


def _divergence_gradients(args: Mapping[str, Any]) -> float:
    """FLOPs of the requested gradients of each side, and of its logits unless they were kept."""
    flops = 0.0
    for side in _SIDES:
        wanted = args[f"{side}_want_hidden"] + args[f"{side}_want_weight"]
        flops += _side_flops(args, side) * (wanted + (args["p_kept_NV"] is None))
    return flops


_SIDES = ("p", "q")


def _side_flops(args: Mapping[str, Any], side: str) -> float:
    return float(2 * math.prod(args[f"{side}_hidden_NH"].shape) * args[f"{side}_weight_VH"].shape[0])


# FlashAttention 2 reaches about half of the rate of other products on an H100 (35 % of the peak: arXiv 2407.08608). No
# long row has been timed.
_FLASH_2_SHARE = 0.5


def _attention_with_sinks(products: int) -> Callable[[Mapping[str, Any]], float]:
    """FLOPs of the products of the queries with the keys that they see, as products of the usual rate."""

    def flops(args: Mapping[str, Any]) -> float:
        return products * product_flops(args["q"].shape, args["v"].shape[-1], args["window"]) / _FLASH_2_SHARE

    return flops


def _varlen_attention(products: int) -> Callable[[Mapping[str, Any]], float]:
    """The same of attention with variable lengths, which is given the number of pairs of a query and a key."""

    def flops(args: Mapping[str, Any]) -> float:
        width = args["q"].shape[-1] + args["v"].shape[-1]
        return float(products * args["pairs"] * args["q"].shape[1] * width / _FLASH_2_SHARE)

    return flops


def _multi_head(args: Mapping[str, Any]) -> float:
    """FLOPs of each head's residual blocks and logits, and of their requested gradients."""
    tokens, flops = args["target"].numel(), 0.0
    blocks, start = args["blocks"], 0
    for hidden, weight, count in zip(args["hidden_of"], args["weight_of"], args["block_counts"], strict=True):
        own = args["want_blocks"][start : start + 2 * count]
        vocab, width = args["weights"][weight].shape
        upstream = args["want_hiddens"][hidden] or any(own)
        flops += 2 * tokens * width * vocab * (1 + upstream + args["want_weights"][weight])
        flops += 2 * tokens * width * width * count * (1 + any(own) + args["want_hiddens"][hidden])
        start += 2 * count
    assert start == len(blocks), "each block must have two tensors"
    return float(flops)


# FLOPs of operators that multiply matrices. The time of all other operators is computed from their bytes.
_PRODUCTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _mm,
    "aten::addmm_": _mm,
    "tigon::attention_with_sinks_bwd": _attention_with_sinks(5),
    "tigon::attention_with_sinks_fwd": _attention_with_sinks(2),
    "tigon::fp8_product": _fp8_product,
    "tigon::grouped_product": _grouped_product,
    "tigon::grouped_weight_gradient": _grouped_weight_gradient,
    "tigon::linear_cross_entropy_chunks": _chunked_loss,
    "tigon::linear_cross_entropy_exp_hidden_grad": _of_exponentials,
    "tigon::linear_cross_entropy_exp_weight_grad": _of_exponentials,
    "tigon::linear_logprobs_fwd": _logprobs,
    "tigon::linear_logprobs_frozen": _logprobs_frozen,
    "tigon::linear_logprobs_bwd": _logprobs_gradients,
    "tigon::linear_kl_fwd": _divergence,
    "tigon::linear_kl_frozen": _divergence_frozen,
    "tigon::linear_kl_bwd": _divergence_gradients,
    "tigon::multi_head_linear_cross_entropy_chunks": _multi_head,
    "tigon::varlen_attention_bwd": _varlen_attention(5),
    "tigon::varlen_attention_fwd": _varlen_attention(2),
}
