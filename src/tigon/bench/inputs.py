"""Makes a row's tensors, and binds an implementation to them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.bench.impls import Impl
from tigon.bench.rows import Row
from tigon.ops import OPS, Case, Op

# N tokens, V vocabulary.

Inputs = dict[str, Any]

# Peaked rows: normal logits of this standard deviation, with labels drawn from their softmax, have a loss near
# log V - σ²/2. That is 3.8 nats at V = 128256, as in a trained model. Random rows have uniform labels: 13.8 nats.
PEAKED_STD = 4.0
# Standard deviation of the logits in the ops' own inputs (Op.make).
_RANDOM_STD = 2.0
# The dimension of an op's shape that shrinks until fp64 fits. It is the first dimension for ops not listed here.
_TOKENS = {"rope": 2, "multi_head_linear_cross_entropy": 1}
# Inputs that an implementation may ignore.
PERMISSIONS = ("inplace", "chunk_bytes", "fp32_accumulate")


def make_inputs(row: Row, dtype: torch.dtype, device: torch.device) -> Inputs:
    """New input tensors with the same values in every call. Parameters that are None are left out."""
    torch.manual_seed(20)
    op = OPS[row.op]
    made = op.make(Case(id="bench", shape=row.shape, options=row.options), dtype, device)
    inputs = {name: value for name, value in made.items() if value is not None}
    if row.logits == "peaked":
        _peak(inputs)
    return inputs


def _peak(inputs: Inputs) -> None:
    scaled = "logits" if "logits" in inputs else "weight"
    inputs[scaled] = inputs[scaled] * (PEAKED_STD / _RANDOM_STD)
    target = inputs["target"].view(-1)
    kept = target != -100
    for start in range(0, target.shape[0], 1024):
        rows = slice(start, start + 1024)
        if scaled == "logits":
            z_NV = inputs["logits"].flatten(0, -2)[rows].float()
        else:
            z_NV = (inputs["hidden"].flatten(0, -2)[rows] @ inputs["weight"].t()).float()
        # The argmax of z + Gumbel noise is a sample of softmax(z).
        drawn = (z_NV - torch.empty_like(z_NV).exponential_().log()).argmax(-1)
        target[rows] = torch.where(kept[rows], drawn, target[rows])


@dataclass(frozen=True)
class Problem:
    """A row with its tensors."""

    row: Row
    inputs: Inputs
    upstream: Sequence[Tensor]

    @classmethod
    def of(cls, row: Row, dtype: torch.dtype, device: torch.device) -> Problem:
        inputs = make_inputs(row, dtype, device)
        return cls(row, inputs, make_upstream(row, inputs))

    @property
    def op(self) -> Op:
        return OPS[self.row.op]

    def differentiable(self) -> list[str]:
        """The inputs that get a gradient."""
        tensors = [name for name in self.op.grads if isinstance(self.inputs.get(name), Tensor)]
        return [name for name in tensors if name not in self.row.frozen]

    def leaves(self) -> Inputs:
        """The inputs, of which those that get a gradient require one. Some costs depend on it."""
        return leaves_of(self.inputs, self.differentiable() if self.row.frozen else ())

    def with_half_the_tokens(self, dtype: torch.dtype, device: torch.device) -> Problem | None:
        """The same problem on half the tokens, or None if there is only one token."""
        shape, at = list(self.row.shape), _TOKENS.get(self.row.op, 0)
        if shape[at] == 1:
            return None
        shape[at] //= 2
        return Problem.of(replace(self.row, shape=tuple(shape)), dtype, device)


def leaves_of(inputs: Mapping[str, Any], names: Sequence[str]) -> Inputs:
    """The inputs with new leaves for tensors. Those named require a gradient."""
    return {n: v.detach().requires_grad_(n in names) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def outputs_of(result: Tensor | Sequence[Tensor], mean: bool = False) -> list[Tensor]:
    """The differentiable outputs of a call that returns a tensor or a tuple; with `mean`, the mean of each."""
    tensors = (result,) if isinstance(result, Tensor) else tuple(result)
    outputs = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    return [t.mean() if t.ndim else t for t in outputs] if mean else outputs


def make_upstream(row: Row, inputs: Inputs) -> list[Tensor]:
    """Upstream gradients: 1 for a loss or a mean, as in training, else random with the strides of the outputs.

    Those of log-probabilities and divergences are random: every loss on them has another gradient per token.
    """
    torch.manual_seed(21)
    with FakeTensorMode(), torch.no_grad():  # on the CPU, where every op can be traced
        fake = {
            n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) if isinstance(v, Tensor) else v
            for n, v in inputs.items()
        }
        outputs = outputs_of(OPS[row.op].call(**fake), row.mean)
    device = next(v.device for v in inputs.values() if isinstance(v, Tensor))
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in outputs]
    return [t.normal_() if t.ndim else t.fill_(1.0) for t in made]


class Bound:
    """An implementation bound to a problem's tensors. `forward()` and `both()` use the same tensors in every call.

    Tensors that the implementation overwrites are copies, and `restore()` resets their values.

    Raises:
        NotImplementedError: the implementation lacks a gradient, or returns a mean where values per token are wanted.
    """

    def __init__(self, impl: Impl, problem: Problem) -> None:
        self.impl, row, inputs = impl, problem.row, problem.inputs
        self._mean = row.mean and impl.role != "limit"
        if impl.mean_only and not row.mean:
            raise NotImplementedError("it returns the mean over the tokens, and this row has values per token")
        kept = inputs if impl.role == "ours" else {n: v for n, v in inputs.items() if n not in PERMISSIONS}
        self._pristine = {**kept, **impl.fixed}
        if impl.vary is not None:
            self._pristine = impl.vary(dict(self._pristine))
        self._call = impl.load()
        inspect.signature(self._call).bind(**self._pristine)
        self._given = list(problem.upstream)
        names = problem.differentiable()
        if lacking := [name for name in names if name in impl.frozen]:
            raise NotImplementedError(f"it has no gradient of {' and '.join(lacking)}")
        self.names = [n for n in names if impl.grads is None or n in impl.grads]
        if impl.overwrites:
            self._own = {n: _copy(v) if isinstance(v, Tensor) else v for n, v in self._pristine.items()}
            self._upstream = [_copy(g) for g in self._given]
        else:
            self._own = leaves_of(self._pristine, self.names)
            self._upstream = self._given

    @property
    def device(self) -> torch.device:
        return next(t.device for t in self._own.values() if isinstance(t, Tensor))

    def tensors(self) -> list[Tensor]:
        """The tensors that exist before the call: inputs and upstream gradients."""
        own = [*self._own.values(), *self._pristine.values()]
        return [t for t in (*own, *self._upstream, *self._given) if isinstance(t, Tensor)]

    def restore(self) -> None:
        """Reset the tensors that the implementation overwrote."""
        if not self.impl.overwrites:
            return
        for name, value in self._pristine.items():
            if isinstance(value, Tensor):
                self._own[name].copy_(value)
        for own, given in zip(self._upstream, self._given, strict=True):
            own.copy_(given)

    def _leaves(self) -> Inputs:
        # autograd cannot differentiate a leaf again after an in-place write
        return leaves_of(self._own, self.names) if self.impl.overwrites else self._own

    def forward(self) -> list[Tensor]:
        """The outputs."""
        if not self.impl.differentiates:
            with torch.no_grad():
                return outputs_of(self._call(**self._own), self._mean)
        return outputs_of(self._call(**self._leaves()), self._mean)

    def both(self) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients, in the order of `names`. The gradients are empty if no input is differentiable."""
        if not self.impl.differentiates:
            return self.forward(), []
        leaves = self._leaves()
        outputs = outputs_of(self._call(**leaves), self._mean)
        return outputs, gradients(outputs, [leaves[n] for n in self.names], self._upstream)


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the leaves for upstream gradients, which are rounded to the outputs' dtypes."""
    rounded = [g.to(t.dtype) for g, t in zip(upstream, outputs, strict=True)]
    return list(torch.autograd.grad(outputs, leaves, rounded))


def _copy(t: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_like(t, memory_format=torch.preserve_format).copy_(t)
