"""Trainers that read `outputs.logits` (TRL 1.8 to 1.14): DPO, KTO, GRPO and RLOO without the logits.

These trainers slice the logits and give them to `selective_log_softmax` and `entropy_from_logits`. While
one of their methods runs, the model returns `UnreadLogits` instead of logits: the hidden states, which can be sliced in
the same ways. The two functions compute from them with the head. Anything else that reads them gets the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tigon.errors import PatchError
from tigon.integrations.trl.forward import restore_forward
from tigon.integrations.trl.head import FusedHead, LogitForm, TokenStatistics
from tigon.integrations.trl.overrides import Override
from tigon.models.seams.head.head_path import observed_logit_map
from tigon.models.seams.rebind import owner_of, rebind

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

FUNCTIONS = ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy")


class UnreadLogits:
    """Logits (..., V) that are not computed: the hidden states (..., H) and the head that would compute them."""

    def __init__(
        self, head: FusedHead, hidden: Tensor, form: LogitForm, known: dict[str, Tensor] | None = None
    ) -> None:
        self.head, self.hidden, self.form = head, hidden, form
        self.known = known or {}
        """Statistics (...,) of these logits that a log-probability has computed along the way."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.vocab_size))

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def _view(self, take: Callable[[Tensor], Tensor]) -> UnreadLogits:
        return UnreadLogits(self.head, take(self.hidden), self.form, {n: take(t) for n, t in self.known.items()})

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if keys and keys[0] is Ellipsis:
            keys = (slice(None),) * (self.ndim - len(keys) + 1) + keys[1:]
        if len(keys) == self.ndim:
            if keys[-1] != slice(None):
                return self.materialize()[key]
            keys = keys[:-1]
        return self._view(lambda tensor: tensor[keys])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[UnreadLogits, ...]:
        hidden = self.hidden.chunk(chunks, dim)
        known = {name: tensor.chunk(chunks, dim) for name, tensor in self.known.items()}
        return tuple(
            UnreadLogits(self.head, part, self.form, {name: parts[i] for name, parts in known.items()})
            for i, part in enumerate(hidden)
        )

    def index_select(self, dim: int, index: Tensor) -> UnreadLogits:
        return self._view(lambda tensor: tensor.index_select(dim, index))

    def detach(self) -> UnreadLogits:
        return self._view(Tensor.detach)

    def contiguous(self) -> UnreadLogits:
        return self

    def __len__(self) -> int:
        return len(self.hidden)

    def __mul__(self, factor: float) -> UnreadLogits:
        return self / (1 / factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> UnreadLogits:
        form = LogitForm(self.form.temperature * divisor, self.form.softcap, self.form.scale)
        return UnreadLogits(self.head, self.hidden, form)

    def __add__(self, other: Any) -> Tensor:
        total: Tensor = self.materialize() + other
        return total

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        difference: Tensor = self.materialize() - other
        return difference

    def div_(self, divisor: float) -> UnreadLogits:
        self.form, self.known = (self / divisor).form, {}
        return self

    def logprobs(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids (...,) -> their log-probabilities (...,). Keeps the entropy and the largest logits' ids."""
        outputs = ("entropy", "predicted")
        flat = None if mask is None else mask.reshape(-1) != 0
        request = TokenStatistics(ids.reshape(-1), self.form, outputs, flat)
        logprob, entropy, predicted = self.head.compute(self.hidden.reshape(-1, self.hidden.shape[-1]), request)
        if mask is None:
            self.known |= {"entropy": entropy.view(ids.shape), "predicted": predicted.view(ids.shape)}
        return logprob.view(ids.shape)

    def entropy(self) -> Tensor:
        return self._statistic("entropy")

    def argmax(self, dim: int = -1) -> Tensor:
        return self._statistic("predicted") if dim in (-1, self.ndim - 1) else self.materialize().argmax(dim)

    def _statistic(self, name: str) -> Tensor:
        if name in self.known:
            return self.known[name] if torch.is_grad_enabled() else self.known[name].detach()
        rows = self.hidden.shape[:-1]
        ids = torch.zeros(rows.numel(), dtype=torch.long, device=self.device)
        # A mean needs no log-probability; a mask without a token skips it.
        mask = torch.zeros_like(ids, dtype=torch.bool) if name == "mean_logits" else None
        request = TokenStatistics(ids, self.form, (name,), mask)
        return self.head.compute(self.hidden.reshape(-1, self.hidden.shape[-1]), request)[1].view(rows)

    def mean(self, dim: int) -> Tensor:
        return self._statistic("mean_logits") if dim in (-1, self.ndim - 1) else self.materialize().mean(dim)

    def nansum(self) -> Tensor:
        """The sum of all logits that are not NaN, (); the mean per token is NaN for all of a token's logits or none."""
        return self._statistic("mean_logits").nansum() * self.head.vocab_size

    def materialize(self) -> Tensor:
        """The logits (..., V), as the head computes them."""
        head: Any = self.head.model.get_output_embeddings()  # type: ignore[operator]
        logits: Tensor = head(self.hidden)
        return (self.form.of_products(logits) / self.form.temperature).to(logits.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if func is torch.logsumexp and kwargs.get("dim", args[1:]) in (-1, (-1,)):
            return first._statistic("lse")
        if (
            func is F.cross_entropy
            and len(args) == 2
            and all(kwargs.get(name) is default for name, default in _CROSS_ENTROPY.items())
        ):
            return -first.logprobs(args[1]).mean()
        real = tuple(each.materialize() if isinstance(each, cls) else each for each in args)
        return func(*real, **kwargs)


_CROSS_ENTROPY = {"weight": None, "size_average": None, "reduce": None}


class UnreadLogitsTrainer:
    """A trainer of TRL 1.8 to 1.14 whose methods get `UnreadLogits` from its models."""

    def __init__(self, trainer: Trainer, models: dict[str, nn.Module]) -> None:
        """Raises PatchError if no method uses TRL's functions, or a model's path to its logits cannot be followed."""
        methods = [
            name for name in dir(type(trainer)) if inspect.isfunction(inspect.getattr_static(type(trainer), name))
        ]
        owners = {name: owner_of(getattr(type(trainer), name), FUNCTIONS[0]) for name in methods}
        owners |= {
            name: owner_of(getattr(type(trainer), name), FUNCTIONS[2]) for name in methods if owners[name] is None
        }
        owners = {name: owner for name, owner in owners.items() if owner is not None}
        if not owners:
            raise PatchError(f"this {type(trainer).__name__} computes its loss from the logits that the model returns")
        forms = {name: observed_logit_map(model) for name, model in models.items()}
        if reasons := [form for form in forms.values() if isinstance(form, str)]:
            raise PatchError(reasons[0])
        self.inside = 0
        self.parts = [FusedHead(model) for model in models.values()]
        self.overrides: list[Override] = []
        self.forwards: list[tuple[nn.Module, Any]] = []
        try:
            for head, form in zip(self.parts, forms.values(), strict=True):
                head.patch()
                self._replace_forward(head, LogitForm(1.0, form.softcap, form.scale))  # type: ignore[union-attr]
        except PatchError:
            self.restore()
            raise
        for name, owner in owners.items():
            self._replace_method(trainer, name, owner)

    def _replace_forward(self, head: FusedHead, form: LogitForm) -> None:
        model, before = head.model, vars(head.model).get("forward")
        original: Any = model.forward

        def forward(model: PreTrainedModel, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            if not self.inside or labels is not None or kwargs.get("output_router_logits"):
                return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
            from transformers.modeling_outputs import CausalLMOutputWithPast

            keep = kwargs.pop("logits_to_keep", 0)
            hidden = model.base_model(*args, **kwargs).last_hidden_state
            return CausalLMOutputWithPast(logits=UnreadLogits(head, hidden[:, -keep:] if keep else hidden, form))

        vars(forward)["__signature__"] = inspect.signature(type(model).forward)
        vars(model)["forward"] = MethodType(forward, model)
        self.forwards.append((model, before))

    def _replace_method(self, trainer: Trainer, name: str, owner: Any) -> None:
        method: Any = getattr(type(trainer), name)
        originals = {function: owner.__globals__[function] for function in FUNCTIONS if function in owner.__globals__}
        fused = rebind(method, owner, {function: _with(function, original) for function, original in originals.items()})
        signature = inspect.signature(method)

        def run(*args: object, **kwargs: object) -> Any:
            if signature.bind(trainer, *args, **kwargs).arguments.get("return_outputs"):
                return method(trainer, *args, **kwargs)  # the caller receives the logits
            with self._counting():
                return fused(trainer, *args, **kwargs)

        self.overrides.append(Override(trainer, name, run))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def restore(self) -> None:
        for override in self.overrides:
            override.restore()
        for model, before in self.forwards:
            restore_forward(model, before)
        for head in self.parts:
            head.restore()
        self.overrides, self.forwards = [], []


def _with(name: str, original: Any) -> Any:
    """TRL's function of that name, which takes `UnreadLogits` too."""

    def selective_log_softmax(
        logits: Any, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> Tensor:
        more: dict[str, Any] = {} if temperature == 1.0 else {"temperature": temperature}
        more |= {} if row_mask is None else {"row_mask": row_mask}
        if not isinstance(logits, UnreadLogits) or index.ndim != logits.ndim - 1:
            logits = logits.materialize() if isinstance(logits, UnreadLogits) else logits
            return original(logits, index, **more)  # type: ignore[no-any-return]
        return (logits if temperature == 1.0 else logits / temperature).logprobs(index, row_mask)

    def entropy_from_logits(logits: Any, *args: object, **kwargs: object) -> Tensor:
        return logits.entropy() if isinstance(logits, UnreadLogits) else original(logits, *args, **kwargs)

    def selective_log_softmax_and_entropy(
        logits: Any,
        index: Tensor,
        entropy_requires_grad: bool = True,
        temperature: float = 1.0,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(logits, UnreadLogits):
            return original(logits, index, entropy_requires_grad, temperature, row_mask)  # type: ignore[no-any-return]
        scaled = logits / temperature
        logprob = scaled.logprobs(index)
        logits.known |= {"predicted": scaled.known["predicted"]}
        entropy = scaled.entropy() if entropy_requires_grad else scaled.entropy().detach()
        if row_mask is not None:
            logprob, entropy = logprob.masked_fill(row_mask == 0, 0.0), entropy.masked_fill(row_mask == 0, 0.0)
        return logprob, entropy

    return {
        function.__name__: function
        for function in (
            selective_log_softmax,
            entropy_from_logits,
            selective_log_softmax_and_entropy,
        )
    }[name]
