"""Makes Triton's interpreter faster without changing what it computes; `backends.py` applies it.

Most of an interpreted kernel's time goes into Python objects, not into numpy. What is made again in every operation
is remembered here. Other versions of Triton than the one these replacements were written for run without them.
"""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic


def make_faster(interpreter: Any) -> None:
    """Replace the slow parts of `triton.runtime.interpreter`, Triton 3.6."""
    _patch_once_per_launch(interpreter)
    _remember_numpy_types(interpreter)
    _leave_out_checks_without_effect(interpreter)
    _remember_shapes()


def _patch_once_per_launch(interpreter: Any) -> None:
    """Replace the language's functions once per launch instead of in every function call.

    The replacements are most of the Python calls of an interpreted kernel (docs/log/2026-11.md).
    """
    patch, restore, done = interpreter._patch_lang, interpreter._LangPatchScope.restore, set[Any]()

    def patch_once(function: Any) -> Any:
        if function in done:
            return interpreter._LangPatchScope()
        done.add(function)
        return patch(function)

    def restore_and_forget(scope: Any) -> None:
        done.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch_once, restore_and_forget


def _remember_numpy_types(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = find_once


def _leave_out_checks_without_effect(interpreter: Any) -> None:
    """Every sum of integers is computed again in 64 bits for an assertion, which without `debug` is dropped."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
        key = getattr(type, "sizes", ())
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def broadcast_if_shapes_differ(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ()):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor_once
    TritonSemantic.broadcast_impl_value = broadcast_if_shapes_differ
