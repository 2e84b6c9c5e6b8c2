"""Makes Triton's interpreter faster without changing what it computes; `backends.py` applies it.

Most of an interpreted kernel's time goes into Python objects, not into numpy. Objects that every operation makes again
are remembered here, and operators of tensors of one type go to numpy directly. The results are the same bit by bit
(`test_interpreter.py`), except for subnormal numbers between bf16 and fp32, which Triton 3.6 converts to others.

Other versions of Triton than the one these replacements were written for run without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic

DIRECT = {"fp32": np.dtype(np.float32), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
"""Types of elements whose arithmetic is numpy's, with numpy's name."""
BITWISE = {"int1": np.dtype(bool), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
FLOATS = {"fp32": np.dtype(np.float32)}

CONVERTED = {
    ("int32", "int64"): np.dtype(np.int64), ("int64", "int32"): np.dtype(np.int32), ("int32", "fp32"): FLOATS["fp32"],
    ("fp16", "fp32"): FLOATS["fp32"], ("fp32", "fp16"): np.dtype(np.float16),
}  # fmt: skip
"""Conversions that are numpy's."""

Compute = Callable[[Any, Any], Any]


def make_faster(interpreter: Any) -> None:
    """Replace the slow parts of `triton.runtime.interpreter`, Triton 3.6."""
    _patch_once(interpreter)
    _remember_numpy_types(interpreter)
    _remember_shapes()
    _leave_out_steps_without_effect(interpreter)
    _convert_bf16_by_its_bits(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Find the replacements of the language's functions once, not in every launch and function call.

    Finding them takes most of the Python calls of a small kernel (docs/log/2026-11.md).
    """
    find, scope_of, restore = interpreter._patch_lang, interpreter._LangPatchScope, interpreter._LangPatchScope.restore
    known, inner, launched, imported = dict[Any, list[Any]](), set[Any](), list[Any](), dict[Any, Any]()

    def patch(function: Any) -> Any:
        here = imported.get(function)
        if here is None:
            values = {id(value) for value in function.__globals__.values()}
            here = imported[function] = id(language) in values, id(core) in values
        if launched:  # a function that the kernel calls; Triton never takes its replacements back
            if here not in known and here not in inner:
                inner.add(here)
                find(function)
            return scope_of()
        if here not in known:
            scope = find(function)
            known[here] = [(thing, name, before, getattr(thing, name)) for thing, name, before in scope._changes]
        else:
            scope = scope_of()
            scope._changes = [change[:3] for change in known[here]]
            for thing, name, _, after in known[here]:
                setattr(thing, name, after)
        launched.append(scope)
        return scope

    def restore_and_forget(scope: Any) -> None:
        launched.clear()
        restore(scope)

    def patch_attribute(thing: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*arguments, **options)

        replacement = call
        if thing is core.tensor and name in OPERATORS and not builder.options.debug:
            replacement = _operator(interpreter, name, call)
        elif name == "where" and not builder.options.debug:
            replacement = _where(interpreter, call)
        scope.set_attr(thing, name, replacement)

    interpreter._patch_lang, scope_of.restore = patch, restore_and_forget
    interpreter._patch_attr = patch_attribute


def _remember_numpy_types(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = find_once


def _leave_out_steps_without_effect(interpreter: Any) -> None:
    """Checks of a handle's width, conversions to the same type, and sums of integers that are computed a second time.

    The second sum, in 64 bits, is for an assertion, which without `debug` is dropped.
    """
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize * 8 > max(8, getattr(dtype, "primitive_bitwidth", 64)):
            self.__post_init__()

    cast, to_tensor, handle_of = TritonSemantic.cast, TritonSemantic.to_tensor, interpreter.TensorHandle

    def cast_if_needed(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        element = CONVERTED.get((source.name, target.name))
        if element is None or fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        type_ = input.type.with_element_ty(target) if input.sizes else target
        return core.tensor(handle_of(input.handle.data.astype(element), target), type_)

    def to_tensor_if_needed(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else to_tensor(self, x, check_type)

    interpreter.TensorHandle.__init__ = make_handle
    TritonSemantic.cast, TritonSemantic.to_tensor = cast_if_needed, to_tensor_if_needed


def _convert_bf16_by_its_bits(interpreter: Any) -> None:
    """bf16 is the upper half of fp32. Triton's interpreter cuts the lower half off, and rounds only if told to."""
    convert, bf16, fp32 = interpreter._convert_float, core.bfloat16, core.float32

    def convert_by_bits(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if input_dtype == bf16 and output_dtype == fp32:
            return input.astype(np.uint32) << 16
        if input_dtype == fp32 and output_dtype == bf16 and rounding_mode is None:
            return (np.ascontiguousarray(input).view(np.uint32) >> 16).astype(np.uint16)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_by_bits


def _remember_shapes() -> None:
    """Make the objects for a shape once: the block's type, and a tensor's shape and size."""
    make_block, blocks = core.block_type.__init__, dict[Any, dict[str, Any]]()
    make_tensor, tensors = core.tensor.__init__, dict[Any, dict[str, Any]]()
    broadcast = TritonSemantic.broadcast_impl_value

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[d.value if isinstance(d, core.constexpr) else d for d in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self), sizes=key[1:])
        vars(self).update(blocks[key])

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        sizes = getattr(type, "sizes", ())
        if sizes not in tensors:
            make_tensor(self, handle, type)
            tensors[sizes] = {"shape": self.shape, "numel": self.numel, "sizes": sizes}
        vars(self).update(tensors[sizes], handle=handle, type=type, dtype=type.scalar)

    def broadcast_if_shapes_differ(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.sizes == rhs.sizes:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor_once
    TritonSemantic.broadcast_impl_value = broadcast_if_shapes_differ


# --- operators --------------------------------------------------------------------------------------------------------


def _floor_divide(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b  # as InterpreterBuilder.create_idiv


ARITHMETIC: dict[str, tuple[Compute, dict[str, Any]]] = {
    "add": (np.add, DIRECT), "sub": (np.subtract, DIRECT), "mul": (np.multiply, DIRECT), "truediv": (np.divide, FLOATS),
    "floordiv": (_floor_divide, INTEGERS), "mod": (np.fmod, INTEGERS),
}  # fmt: skip
COMPARISONS: dict[str, tuple[Compute, dict[str, Any]]] = {
    "lt": (np.less, DIRECT), "le": (np.less_equal, DIRECT), "gt": (np.greater, DIRECT),
    "ge": (np.greater_equal, DIRECT), "eq": (np.equal, DIRECT), "ne": (np.not_equal, DIRECT),
}  # fmt: skip
BITS: dict[str, tuple[Compute, dict[str, Any]]] = {
    "and": (np.bitwise_and, BITWISE), "or": (np.bitwise_or, BITWISE), "xor": (np.bitwise_xor, BITWISE),
}  # fmt: skip
OPERATORS = {f"__{name}__": of for name, of in {**ARITHMETIC, **COMPARISONS, **BITS}.items()}
OPERATORS |= {f"__r{name}__": of for name, of in ARITHMETIC.items()}

_constants: dict[Any, Any] = {}


def _constant(interpreter: Any, value: Any, dtype: Any, compared: bool) -> Any:
    """The number as an array of a tensor's type. None if the type of the result is another."""
    if type(value) is core.constexpr:
        value = value.value
    kind = type(value)
    if (kind is not int and kind is not float) or value != value:
        return None
    key = kind, value, dtype.name, compared
    if key not in _constants:
        _constants[key] = None
        as_tensor = interpreter.interpreter_semantic.to_tensor(value)
        if dtype.is_floating():
            # A number is converted to fp32 or int32 before it is compared, otherwise to the tensor's type at once.
            fits = as_tensor.dtype in (core.float32, core.int32) or not compared
        else:
            fits = kind is int and dtype is not core.int1 and (not compared or as_tensor.dtype is core.int32)
            fits = fits and dtype.get_int_min_value() <= value <= dtype.get_int_max_value()
        if fits:
            _constants[key] = interpreter.interpreter_semantic.scalar_constant(value, dtype).handle.data
    return _constants[key]


def _operator(interpreter: Any, name: str, slow: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """An operator of two tensors of one type, or of a tensor and a number, computed by numpy at once.

    The type of the result is learnt from Triton's own operator, once for each pair of types. Other operands take
    Triton's own operator.
    """
    compute, types = OPERATORS[name]
    bare = name.strip("_")
    swapped, compared = bare not in {**ARITHMETIC, **COMPARISONS, **BITS}, bare in COMPARISONS
    results, widths = dict[Any, Any](), dict[str, int]()
    tensor, handle_of, pointer = core.tensor, interpreter.TensorHandle, core.pointer_type

    def operate(self: Any, other: Any) -> Any:
        dtype, left, is_tensor = self.dtype, self.handle, type(other) is tensor
        element = types.get(dtype.name)
        if element is not None:
            if is_tensor:
                if other.dtype is not dtype or swapped:
                    return slow(self, other)
                right, key = other.handle.data, (dtype.name, self.sizes, other.sizes)
            else:
                right, key = _constant(interpreter, other, dtype, compared), (dtype.name, self.sizes)
                if right is None:
                    return slow(self, other)
            if left.data.dtype is not element or right.dtype is not element:
                return slow(self, other)
        elif name == "__add__" and is_tensor and type(dtype) is pointer and other.dtype.name in INTEGERS:
            key = (dtype.name, self.sizes, other.sizes)
        else:
            return slow(self, other)
        result_type = results.get(key)
        if result_type is None:
            result = slow(self, other)
            results[key] = result.type
            return result
        if element is None:
            if dtype.name not in widths:
                widths[dtype.name] = max(1, left.get_element_ty().primitive_bitwidth // 8)
            data = left.data + widths[dtype.name] * other.handle.data.astype(np.uint64)
            return tensor(handle_of(data, left.dtype.scalar), result_type)
        if swapped:
            return tensor(handle_of(compute(right, left.data), dtype), result_type)
        return tensor(handle_of(compute(left.data, right), left.dtype.scalar), result_type)

    return operate


def _where(interpreter: Any, slow: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.where` of a condition and two tensors of one type, or a tensor and a number."""
    results = dict[Any, Any]()
    tensor, handle_of = core.tensor, interpreter.TensorHandle

    def choose(condition: Any, x: Any, y: Any, **options: Any) -> Any:
        first, second = type(x) is tensor, type(y) is tensor
        dtype = x.dtype if first else y.dtype if second else None
        if options or dtype is None or type(condition) is not tensor or condition.dtype is not core.int1:
            return slow(condition, x, y, **options)
        if dtype.name not in DIRECT or (first and second and x.dtype is not y.dtype):
            return slow(condition, x, y)
        yes = x.handle.data if first else _constant(interpreter, x, dtype, False)
        no = y.handle.data if second else _constant(interpreter, y, dtype, False)
        element = DIRECT[dtype.name]
        if yes is None or no is None or yes.dtype is not element or no.dtype is not element:
            return slow(condition, x, y)
        key = dtype.name, condition.sizes, x.sizes if first else None, y.sizes if second else None
        if key not in results:
            result = slow(condition, x, y)
            results[key] = result.type
            return result
        data = np.where(condition.handle.data, yes, no)
        return tensor(handle_of(data, y.handle.dtype.scalar if second else dtype), results[key])

    return choose
