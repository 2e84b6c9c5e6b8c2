"""Functions rebuilt over other globals: the copy sees ours, the original and its module see nothing."""

from __future__ import annotations

import functools

import pytest

from tigon.models.seams.rebind import owner_of, rebind

FACTOR = 2


def scale(x):
    return FACTOR * x


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100

    return wrapper


class Layer:
    offset = 1

    def plain(self, x, *, twice=False):
        """Text."""
        return (scale(x) + self.offset) * (2 if twice else 1)

    @decorated
    @decorated
    def wrapped(self, x):
        return scale(x)

    def nested(self, xs):
        return [scale(x) for x in xs] + list(map(lambda x: scale(x), xs))  # noqa: C417


def ours(x):
    return -x


def rebound(function):
    owner = owner_of(function, "scale")
    assert owner is not None
    return rebind(function, owner, {"scale": ours})


def test_rebuilt_method_calls_ours_and_keeps_name_text_and_keywords():
    plain = rebound(Layer.plain)
    assert plain(Layer(), 3) == -2 and plain(Layer(), 3, twice=True) == -4
    assert (plain.__name__, plain.__qualname__, plain.__doc__) == ("plain", "Layer.plain", "Text.")
    assert Layer().plain(3) == 7 and scale(1) == 2


def test_rebuilding_reaches_through_decorators_and_nested_code():
    assert rebound(Layer.wrapped)(Layer(), 3) == 197
    assert Layer().wrapped(3) == 206
    assert rebound(Layer.nested)(Layer(), [1, 2]) == [-1, -2, -1, -2]


@pytest.mark.parametrize("function", [Layer.plain, len, Layer, None])
def test_function_that_does_not_use_the_name_has_no_owner(function):
    assert owner_of(function, "absent") is None


def test_attention_of_transformers_keeps_every_other_global():
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward
    owner = owner_of(forward, "apply_rotary_pos_emb")
    copy = rebind(forward, owner, {"apply_rotary_pos_emb": ours})
    rebuilt = owner_of(copy, "apply_rotary_pos_emb")  # below the decorator that 5.24 put around the forward
    mentioned = {n: v for n, v in rebuilt.__globals__.items() if n not in ("__builtins__", "apply_rotary_pos_emb")}
    assert mentioned and all(vars(modeling_llama)[n] is v for n, v in mentioned.items())
    assert rebuilt.__globals__["apply_rotary_pos_emb"] is ours and rebuilt.__code__ is owner.__code__
    assert copy.__code__ is forward.__code__
    assert modeling_llama.apply_rotary_pos_emb is not ours
