"""Makes a row's tensors, and binds an implementation to them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tigon.bench.impls import Impl
from tigon.bench.suites import Row
from tigon.ops import OPS, Case, Op

# N tokens, H hidden, V vocabulary.

Inputs = dict[str, Any]

# Peaked rows: normal logits of this standard deviation, with labels drawn from their softmax, have a loss near
# log V - σ²/2. That is 3.8 nats at V = 128256, as in a trained model. Random rows have uniform labels: 13.8 nats.
PEAKED_STD = 4.0
# Standard deviation of the logits in the ops' own inputs (Op.make).
_RANDOM_STD = 2.0
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


def differentiable(op: Op, inputs: Mapping[str, Any], frozen: Collection[str] = ()) -> list[str]:
    """The inputs that get a gradient."""
    return [name for name in op.grads if isinstance(inputs.get(name), Tensor) and name not in frozen]


def outputs_of(result: Any, mean: bool = False) -> list[Tensor]:
    """The differentiable outputs of a call that returns a tensor or a tuple; with `mean`, the mean of each."""
    tensors = (result,) if isinstance(result, Tensor) else tuple(result)
    outputs = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    return [t.mean() if t.ndim else t for t in outputs] if mean else outputs


def make_upstream(op: Op, inputs: Inputs, mean: bool = False) -> list[Tensor]:
    """Upstream gradients: 1 for a loss or a mean, as in training, else random with the strides of the outputs.

    Those of log-probabilities and divergences are random: every loss on them has another gradient per token.
    """
    torch.manual_seed(21)
    if mean or "target" in inputs or op.name == "load_balancing_loss":
        return [torch.ones((), device=inputs[op.grads[0]].device)]
    if "ids" in inputs:
        return [torch.randn(inputs["ids"].shape, device=inputs["ids"].device)]
    if "teacher_hidden" in inputs:
        return [torch.randn(inputs["hidden"].shape[:-1], device=inputs["hidden"].device)]
    if op.name in ("lora_linear", "fp8_linear"):
        x = inputs["x"]
        return [torch.randn(*x.shape[:-1], inputs["weight"].shape[0], device=x.device).to(x.dtype)]
    if op.name == "lora_linears":
        x = inputs["x"]
        widths = [inputs[f"weight_{i}"].shape[0] for i in range(2)]
        return [torch.randn(*x.shape[:-1], width, device=x.device).to(x.dtype) for width in widths]
    if op.name == "topk_softmax":
        logits = inputs["logits"]
        return [torch.randn(logits.shape[0], inputs["top_k"], device=logits.device).to(logits.dtype)]
    if op.name == "rope":
        like = [inputs["q"], inputs["k"]]
    elif op.name == "add_rms_norm":
        like = [inputs["x"], inputs["x"]]
    elif op.name == "attention_with_sinks":
        like = [inputs["q"].transpose(1, 2).contiguous()]
    else:
        like = [inputs[op.grads[0]]]
    return [torch.randn_like(t) for t in like]


class Bound:
    """An implementation bound to its inputs. `forward()` and `both()` use the same tensors in every call.

    Tensors that the implementation overwrites are copies, and `restore()` resets their values.

    Args:
        frozen: inputs that get no gradient.
        mean: take the mean of each output.

    Raises:
        NotImplementedError: the implementation lacks a gradient, or returns a mean where values per token are wanted.
    """

    def __init__(
        self, impl: Impl, op: Op, inputs: Inputs, upstream: Sequence[Tensor], frozen: Collection[str] = (),
        mean: bool = False,
    ) -> None:  # fmt: skip
        self.impl = impl
        self._mean = mean and impl.role != "limit"
        if impl.mean_only and not mean:
            raise NotImplementedError("it returns the mean over the tokens, and this row has values per token")
        kept = inputs if impl.role == "ours" else {n: v for n, v in inputs.items() if n not in PERMISSIONS}
        self._pristine = {**kept, **impl.fixed}
        if impl.vary is not None:
            self._pristine = impl.vary(dict(self._pristine))
        self._call = impl.load()
        inspect.signature(self._call).bind(**self._pristine)
        self._given = list(upstream)
        names = differentiable(op, self._pristine, frozen)
        if lacking := [name for name in names if name in impl.frozen]:
            raise NotImplementedError(f"it has no gradient of {' and '.join(lacking)}")
        self.names = [n for n in names if impl.grads is None or n in impl.grads]
        if impl.overwrites:
            self._own = {n: _copy(v) if isinstance(v, Tensor) else v for n, v in self._pristine.items()}
            self._upstream = [_copy(g) for g in upstream]
        else:
            self._own = {
                n: v.detach().requires_grad_(n in self.names) if isinstance(v, Tensor) else v
                for n, v in self._pristine.items()
            }
            self._upstream = self._given

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
        if not self.impl.overwrites:
            return self._own
        # autograd cannot differentiate a leaf again after an in-place write
        return {
            n: v.detach().requires_grad_(n in self.names) if isinstance(v, Tensor) else v for n, v in self._own.items()
        }

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
        upstream = [g.to(t.dtype) for g, t in zip(self._upstream, outputs, strict=True)]
        return outputs, list(torch.autograd.grad(outputs, [leaves[n] for n in self.names], upstream))


def _copy(t: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_like(t, memory_format=torch.preserve_format).copy_(t)
