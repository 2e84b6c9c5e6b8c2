"""docs/math*.md: every claimed backward is the derivative of its forward, and the ops compute what is written there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import mpmath
import numpy as np
import pytest
import sympy
import torch
from math_blocks import DIGITS, TEXT, TOLERANCE, Block, Entry, Namespace, pairs, read_blocks, vanishes

from tigon import ops
from tigon.ops import OPS

BLOCKS = read_blocks(TEXT)
GRADIENTS = [pytest.param(block, id=block.id) for block in BLOCKS if block.claims_a_gradient]
IDENTITIES = [pytest.param(block, id=block.id) for block in BLOCKS if "identity = " in block.text]
SEEDS = (1, 2)


def test_every_op_has_a_section_with_a_checked_gradient() -> None:
    derived = {block.section for block in BLOCKS if block.claims_a_gradient}
    assert derived >= set(OPS), f"docs/math*.md derive no gradient for {sorted(set(OPS) - derived)}"


def test_every_fenced_sympy_block_is_read() -> None:
    assert len(BLOCKS) == TEXT.count("```sympy")


def assert_exactly_equal(entries: list[Entry], what: str) -> None:
    for number, (left, right) in enumerate(entries):
        assert not left.atoms(sympy.Float) | right.atoms(sympy.Float), f"{what}: a rounded constant; write rational()"
        assert vanishes(left - right), f"{what}, entry {number}: the difference {left - right} is not zero"


SLOW = ("experts-1", "linear_kl-1", "linear_kl-2", "linear_logprobs-3")
"""Blocks whose derivatives take a second or more to simplify."""


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            *block.values, id=block.id, marks=pytest.mark.second_proof("numbers show it at several points, below")
        )
        if block.id in SLOW
        else block
        for block in GRADIENTS
    ],
)
def test_claimed_gradient_is_the_derivative(block: Block) -> None:
    assert_exactly_equal(block.derivatives, f"backward of {block.id}")


@pytest.mark.parametrize("block", IDENTITIES)
def test_stated_identity_holds(block: Block) -> None:
    assert_exactly_equal(block.identities, f"identity of {block.id}")


# --- with numbers: what a proof of one formula cannot show ------------------------------------------------------------


def agree(left: list[mpmath.mpf], right: list[mpmath.mpf]) -> bool:
    with mpmath.workdps(DIGITS):
        scale = 1 + max(abs(x) for x in right)
        return all(abs(a - b) <= TOLERANCE * scale for a, b in zip(left, right, strict=True))


def claims(ran: Namespace) -> list[mpmath.mpf]:
    return [claim for _, claim in pairs(ran["backward"])]


@cache
def derivatives(block: Block, seed: int) -> list[mpmath.mpf]:
    return block.derivatives_at(block.at_point(seed)[1])


@pytest.mark.parametrize("block", GRADIENTS)
def test_claimed_gradient_has_the_value_of_the_derivative(block: Block) -> None:
    for seed in SEEDS:
        assert agree(claims(block.at_point(seed)[0]), derivatives(block, seed))


def mutants(block: Block) -> Iterator[str]:
    """The block with one sign of its claim flipped: each + and - of the formulas, and each claim as a whole."""
    text = block.text
    derivation, listing = text.index("# backward"), text.index("\nforward = ")
    for match in re.finditer(r"[+-]", text[derivation:listing]):
        at = derivation + match.start()
        yield text[:at] + ("-" if match[0] == "+" else "+") + text[at + 1 :]
    listing = text.index("\nbackward = ")
    for match in re.finditer(r", (\w+)\)", text[listing : text.index("\n", listing + 1)]):
        at = listing + match.start(1)
        yield f"{text[:at]}-{text[at:]}"


@pytest.mark.parametrize("block", GRADIENTS)
def test_a_flipped_sign_in_a_claim_is_noticed(block: Block) -> None:
    unnoticed = [m for m in mutants(block) if agree(claims(block.at_point(1, m)[0]), derivatives(block, 1))]
    assert not unnoticed, f"{len(unnoticed)} wrong claims pass, the first:\n{unnoticed[0]}"


# --- against the ops --------------------------------------------------------------------------------------------------


def tensor(value: object) -> object:
    """fp64 of an array of numbers, int64 of a list of labels, float of a number; anything else as it is."""
    if isinstance(value, mpmath.mpf):
        return float(value)
    if isinstance(value, np.ndarray):
        return torch.tensor(value.astype(np.float64))
    return torch.tensor(value) if isinstance(value, list) and all(isinstance(v, int) for v in value) else value


@pytest.mark.parametrize("block", GRADIENTS)
def test_op_computes_the_written_formula(block: Block) -> None:
    ran, _ = block.at_point(SEEDS[0])
    names = {id(value): name for name, value in ran.items() if isinstance(value, np.ndarray)}
    arguments = {name: tensor(value) for name, value in ran.items()}
    leaves = [arguments[names[id(variable)]].requires_grad_() for variable, _ in ran["backward"]]
    called = (*OPS, "LoraLayer", "PrefixGroup", "PrefixRow")
    outputs = eval(ran["call"], {name: getattr(ops, name) for name in called} | {"list": list}, arguments)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    stated, upstream = (
        [torch.as_tensor(tensor(v), dtype=torch.float64) for v in side] for side in zip(*ran["forward"], strict=True)
    )
    # Two factors in e4m3 are each off by up to 1/16.
    rounding = 2 / 16 if OPS[block.section].straight_through else 0.0
    torch.testing.assert_close(outputs, stated, rtol=1e-12 + rounding, atol=1e-12 + rounding)
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    claims = [tensor(claim) for _, claim in ran["backward"]]
    torch.testing.assert_close(list(gradients), claims, rtol=1e-11 + rounding, atol=1e-11 + rounding)
