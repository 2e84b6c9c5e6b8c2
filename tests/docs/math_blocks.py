"""Reads the ```sympy blocks of docs/math*.md and runs them, with symbols or with numbers.

A block is Python. It declares its inputs with `scalar`, `vector` and `matrix`, and ends with

    forward = [(output, upstream gradient), ...]
    backward = [(input, claimed gradient), ...]

or, where it states an equality, with `identity = [(left, right), ...]`; `call` is the op's call that the forward
describes. The functions a block uses come from its environment, so that the same text is a derivation for sympy and a
program for numbers of fifty digits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import mpmath
import numpy as np
import sympy

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("math*.md")))
"""The pages that derive the ops."""
DIGITS = 50
# A claim that is right differs by rounding at DIGITS digits; one that is wrong has no reason to come near this.
TOLERANCE = mpmath.mpf(10) ** (-DIGITS + 10)
IGNORED = -100
FUNCTIONS = ("exp", "log", "sqrt", "tanh", "erf")

for name in ("sum", "prod", "max", "min", "mean"):
    getattr(np.ones(1), name)()  # NumPy imports the module of each at the first call, which a block cannot

Namespace = dict[str, Any]
Numbers = dict[str, mpmath.mpf]
Entry = tuple[sympy.Expr, sympy.Expr]


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=object)


def _one_hot(labels: list[int], width: int) -> np.ndarray:
    """1[v = y_i] as integers; a row of zeros where the label is IGNORED."""
    return _array([[int(v == y) for v in range(width)] for y in labels])


# What both kinds of run share. Arrays are numpy's, of sympy expressions or of mpmath numbers.
_COMMON: Namespace = {
    "IGNORED": IGNORED,
    "array": _array,
    "one_hot": _one_hot,
    "concat": lambda *parts: np.concatenate(parts, axis=-1),
    "interleave": lambda a, b: np.stack((a, b), axis=-1).reshape(*a.shape[:-1], -1),
    "sum_columns": lambda x: x.sum(axis=-1, keepdims=True),
    "sum_rows": lambda x: x.sum(axis=0),
    "mean": lambda x: x.sum(axis=-1, keepdims=True) / x.shape[-1],
}


def _environment(make: Callable[[str, float, float], Any], functions: Any, rational: Callable[[str], Any]) -> Namespace:
    def scalar(name: str, low: float = -2, high: float = 2) -> Any:
        return make(name, low, high)

    def vector(name: str, n: int, low: float = -2, high: float = 2) -> np.ndarray:
        return _array([make(f"{name}{i}", low, high) for i in range(n)])

    def matrix(name: str, rows: int, columns: int, low: float = -2, high: float = 2) -> np.ndarray:
        return _array([[make(f"{name}{i}{j}", low, high) for j in range(columns)] for i in range(rows)])

    elementwise = {name: np.frompyfunc(getattr(functions, name), 1, 1) for name in FUNCTIONS}
    return {
        **_COMMON, **elementwise,
        "pi": +functions.pi, "rational": rational, "scalar": scalar, "vector": vector, "matrix": matrix,
    }  # fmt: skip


def _symbol(name: str, low: float, high: float) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True) if low >= 0 else sympy.Symbol(name, real=True)


def _expand(array: Any) -> list[Any]:
    return list(np.asarray(array, dtype=object).reshape(-1))


def pairs(rows: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The entries of [(array, array), ...], side by side; the arrays of a pair must agree in shape."""
    entries = []
    for left, right in rows:
        assert np.shape(left) == np.shape(right), f"shapes {np.shape(left)} and {np.shape(right)} differ"
        entries += zip(_expand(left), _expand(right), strict=True)
    return entries


@dataclass(frozen=True)
class Block:
    """One ```sympy block: the section it stands in, its number there, and its text."""

    section: str
    number: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.section}-{self.number}"

    @property
    def claims_a_gradient(self) -> bool:
        return "\nbackward = " in self.text

    def with_symbols(self) -> Namespace:
        """Run with symbols."""
        return self._run(_environment(_symbol, sympy, sympy.Rational), self.text)

    def at_point(self, seed: int, text: str | None = None) -> tuple[Namespace, Numbers]:
        """Run with numbers, which are returned by name too; `text` replaces the block's own, for mutants."""
        numbers: Numbers = {}

        def number(name: str, low: float, high: float) -> mpmath.mpf:
            assert name not in numbers, f"{self.id} declares {name} twice, which would make two inputs one"
            # A rational inside the interval, the same for a name and a seed.
            numerator = Random(zlib.crc32(name.encode()) + seed).randint(1, 96)
            numbers[name] = mpmath.mpf(low) + mpmath.mpf(high - low) * numerator / 97
            return numbers[name]

        with mpmath.workdps(DIGITS):
            return self._run(_environment(number, mpmath.mp, mpmath.mpf), text or self.text), numbers

    def _run(self, environment: Namespace, text: str) -> Namespace:
        namespace = {"__builtins__": {"range": range, "len": len}, **environment}
        exec(compile(text, f"docs/math.md:{self.id}", "exec"), namespace)
        assert ("forward" in namespace) == ("backward" in namespace), f"{self.id}: forward and backward belong together"
        assert namespace.get("backward") or namespace.get("identity"), f"{self.id} states nothing to check"
        return namespace

    @cached_property
    def derivatives(self) -> list[Entry]:
        """(derivative of the forward, claimed gradient) of every entry of every input."""
        ran = self.with_symbols()
        total = sum(output * upstream for output, upstream in pairs(ran["forward"]))
        return [(sympy.diff(total, symbol), sympy.sympify(claim)) for symbol, claim in pairs(ran["backward"])]

    @cached_property
    def identities(self) -> list[Entry]:
        """(left, right) of every entry of every equality."""
        return [(sympy.sympify(a), sympy.sympify(b)) for a, b in pairs(self.with_symbols().get("identity", []))]

    def derivatives_at(self, numbers: Numbers) -> list[mpmath.mpf]:
        """The derivative of the forward, by sympy, evaluated."""
        with mpmath.workdps(DIGITS):
            function = sympy.lambdify(
                [sympy.Symbol(name) for name in numbers],
                [plain(derivative) for derivative, _ in self.derivatives], "mpmath", cse=True,
            )  # fmt: skip
            return [mpmath.mpf(value) for value in function(*numbers.values())]


def plain(expression: sympy.Expr) -> sympy.Expr:
    """The expression with symbols that carry a name and no assumption."""
    return expression.xreplace({symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols})


def vanishes(expression: sympy.Expr) -> bool:
    """Whether a difference is exactly zero, by rational arithmetic.

    Every exp, log, tanh, erf and root becomes a variable, with R² = P for a root R of P. The rest is a quotient of
    polynomials, and the test is whether its numerator is zero. This is orders of magnitude faster than
    sympy.simplify. A zero result is always right: other dependencies between the variables only make it stricter.
    """
    replaced, roots = _rationalised(expression)
    numerator = sympy.fraction(sympy.together(replaced))[0].expand()
    for root, square in roots:
        numerator = sympy.rem(numerator, root**2 - square, root) if numerator.has(root) else numerator
    return bool(sympy.expand(numerator) == 0)


def _rationalised(expression: sympy.Expr) -> tuple[sympy.Expr, list[tuple[sympy.Symbol, sympy.Expr]]]:
    """The expression over new variables, and (R, P) of every root R = √P among them."""
    denominators = _denominators(expression)
    variables: dict[sympy.Expr, sympy.Symbol] = {}
    roots: list[tuple[sympy.Symbol, sympy.Expr]] = []

    def variable(e: sympy.Expr) -> sympy.Symbol:
        return variables.setdefault(e, sympy.Dummy(f"v{len(variables)}"))

    def visit(e: sympy.Expr) -> sympy.Expr:
        if e.is_Add or e.is_Mul:
            return e.func(*map(visit, e.args))
        if isinstance(e, sympy.exp):
            powers = []
            for coefficient, rest in _terms(e):
                q = denominators[rest]
                powers.append(variable(sympy.exp(rest / q)) ** (coefficient * q))
            return sympy.prod(powers)
        if isinstance(e, sympy.tanh):
            return visit(e.rewrite(sympy.exp))
        if e.is_Pow and e.exp.is_Integer:
            return visit(e.base) ** e.exp
        if e.is_Pow and e.exp.is_Rational and e.exp.q == 2:
            known = sympy.sqrt(e.base) in variables
            root = variable(sympy.sqrt(e.base))
            if not known:
                roots.append((root, visit(e.base)))
            return root**e.exp.p
        return e if e.is_Symbol or e.is_Rational else variable(e)

    return visit(expression), roots


def _terms(exponential: sympy.exp) -> list[tuple[sympy.Rational, sympy.Expr]]:
    """The exponent as a sum of (rational coefficient, rest)."""
    return [term.as_coeff_Mul() for term in sympy.Add.make_args(sympy.expand(exponential.exp))]


def _denominators(expression: sympy.Expr) -> dict[sympy.Expr, int]:
    """For each t in an exponent, the q with which every exp(p t) of the expression is a whole power of exp(t / q)."""
    exponentials = expression.atoms(sympy.exp)
    for t in expression.atoms(sympy.tanh):
        exponentials |= t.rewrite(sympy.exp).atoms(sympy.exp)
    found: dict[sympy.Expr, int] = {}
    for exponential in exponentials:
        for coefficient, rest in _terms(exponential):
            found[rest] = sympy.ilcm(found.get(rest, 1), coefficient.q)
    return found


def read_blocks(document: str) -> list[Block]:
    """The blocks in order, each under the last heading of the second level."""
    blocks: list[Block] = []
    section, start = "", 0
    for match in re.finditer(r"^## ([^\n]+)$|^```sympy\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        if match[1]:
            section, start = match[1].strip("`"), len(blocks)
        else:
            blocks.append(Block(section, len(blocks) - start + 1, match[2]))
    return blocks
