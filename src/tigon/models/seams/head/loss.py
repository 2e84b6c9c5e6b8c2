"""The seams at the end of the model: `lm_head`, and the model that calls `lm_head` and `loss_function`.

Hugging Face's forward calls `self.lm_head(hidden)`, then `self.loss_function(logits, labels, ...)`. Neither is copied.
During a training step with labels, the patched model keeps a `LossCall` in a thread-local slot. The head reads
it and computes the loss inside its own forward. There its weight is complete: FSDP and ZeRO-3 have gathered it and
forward pre-hooks have run. The head returns `DeferredLogits`, which carries the loss to `loss_function`.

The fused loss is used only if three conditions hold:

- `loss_function` gets exactly that object with exactly the labels of the call, and neither was written to.
- The model scales and caps the logits as the head assumed in its loss. The family's row names the config attributes
  that define this. If a model does something else, the observed map is used from the next step on.
- No other operation happened in between, such as a LoRA wrapper that adds its product or a hook that reads or edits the
  logits. Any such operation computes the logits, and the loss is then the ordinary loss of that tensor.

No operation around the head can therefore be lost from the loss. The structural checks only avoid computing a fused
loss that would not be used.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tigon import ops
from tigon.errors import OptionError, PatchError, ShapeError
from tigon.models.seams.base import PatchedModule, Seam, imitate, is_dtensor
from tigon.models.seams.head.deferred_logits import DeferredLogits, LogitsSource, version_of
from tigon.models.seams.head.divided_head import has_tensor_parallel_forward, is_divided, own_rows
from tigon.models.seams.head.logits import LogitAttributes, LogitMap
from tigon.models.seams.head.token_metrics import TokenMetrics
from tigon.models.seams.head.traced_logits import TracedLogits, UncomputedLogits
from tigon.models.seams.router import with_balancing_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

# Class names of wrappers that pass the input to a descendant and return its output unchanged: PEFT's `modules_to_save`,
# and FSDP1.
TRANSPARENT_WRAPPERS = frozenset({"ModulesToSaveWrapper", "FullyShardedDataParallel"})


def peel(head: nn.Module) -> list[nn.Module]:
    """The modules that may compute when `head` is called: `head` itself, or the modules of a transparent wrapper.

    It is no generator: Dynamo of torch 2.14 cannot compile one with a `yield from` that is left before its end.
    """
    return [*head.modules()] if type(head).__name__ in TRANSPARENT_WRAPPERS else [head]


def next_tokens(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """The label that each position predicts, (N,): `shift_labels` unchanged, or labels (..., T) shifted left by one."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def item_count_on(device: torch.device, num_items: Tensor | float | None) -> Tensor | float | None:
    """`num_items` as a loss on that device takes it: a tensor becomes a scalar there."""
    return num_items.to(device).reshape(()) if isinstance(num_items, Tensor) else num_items


def _same(a: object, b: object) -> bool:
    return a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)


class LossCall:
    """The request of one forward of a patched model to its head, and the head's results."""

    def __init__(
        self,
        head: nn.Module,
        labels: Tensor,
        options: dict[str, Any],
        logit_map: LogitMap,
        metrics: TokenMetrics | None = None,
    ) -> None:
        self.metrics = metrics
        self.predicted: Tensor | None = None
        """The index of each token's largest logit, if `metrics` requests it and the head has computed its loss."""
        self.logit_map = logit_map
        """The map that the model is expected to apply to the logits."""
        self.observed: LogitMap | None = None
        """The map that the model applied instead."""
        self.labels, self.shift_labels = labels, options.get("shift_labels")
        self.heads = tuple(m for m in peel(head) if isinstance(m, PatchedModule))
        self.ignore_index: int = options.get("ignore_index", -100)
        self.num_items: Tensor | float | None = options.get("num_items_in_batch")
        self._read_labels()
        self.answers: list[tuple[Any, tuple[int, ...], Tensor]] = []
        """Per call of the head: the source of its logits, the versions of the tensors that its loss was computed from,
        and the labels that it read."""
        self.vocab_size = 0
        self.losses: dict[Any, Tensor] = {}
        """Losses with a gradient that were returned, by their gate."""
        self.taken: DeferredLogits | TracedLogits | None = None
        """The object that `loss_function` got instead of logits."""

    def _read_labels(self) -> None:
        self.target = next_tokens(self.labels, self.shift_labels, self.ignore_index)
        # Starts counting the labels that are not ignored; the GPU's count arrives before the trunk finishes. Under
        # torch.compile the CPU cannot wait for a count, so all tokens are kept.
        compiling = torch.compiler.is_compiling()
        self.prepared = self.target if compiling else ops.prepare_targets(self.target, ignore_index=self.ignore_index)
        self._read_at = self._versions()

    def _versions(self) -> tuple[int, ...]:
        if torch.compiler.is_compiling():  # Dynamo cannot compare versions while it traces
            return ()
        return tuple(version_of(value) for value in (self.labels, self.shift_labels, self.num_items))

    def _unwritten(self, versions: tuple[int, ...], target: Tensor) -> bool:
        """Whether labels, shift_labels and num_items are unchanged since they had these versions.

        On the CPU the labels are compared too; this is cheap and detects a write through `.data` or numpy. On a GPU the
        comparison would wait for the device.
        """
        if self._versions() != versions:
            return False
        if torch.compiler.is_compiling() or type(target) is not Tensor or target.device.type != "cpu":
            return True
        return torch.equal(next_tokens(self.labels, self.shift_labels, self.ignore_index), target)

    def _nan_if_written(self, loss: Tensor, target: Tensor) -> Tensor:
        """NaN if labels were written after the head: a compiled graph cannot fall back to the ordinary loss."""
        now = next_tokens(self.labels, self.shift_labels, self.ignore_index).to(loss.device)
        return torch.where((now == target.to(loss.device)).all(), loss, torch.nan)

    def fits(self, hidden: Tensor) -> bool:
        """Whether each hidden state has a label. False if a model slices its logits after the head."""
        return hidden.shape[:-1].numel() == self.target.numel()

    def compute(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, memory_bytes: int | None = None, **adapter: Any
    ) -> Tensor:
        """hidden (..., H), weight (V, H), bias (V,) or None -> loss (), as in transformers' ForCausalLMLoss.

        adapter: more keywords of `ops.linear_cross_entropy`: of the head's LoRA adapter, for hidden (N, H), or of a
            divided head's rows.
        """
        self.vocab_size = weight.shape[0]
        if torch.compiler.is_compiling() or not self._unwritten(self._read_at, self.target):
            self._read_labels()
        prepared = self.prepared
        if self.target.device != hidden.device:
            prepared = ops.prepare_targets(self.target.to(hidden.device), ignore_index=self.ignore_index)
        result = ops.linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            prepared,
            bias=bias,
            ignore_index=self.ignore_index,
            num_items=item_count_on(hidden.device, self.num_items),
            logit_scale=self.logit_map.scale,
            softcap=self.logit_map.softcap,
            memory_bytes=memory_bytes,
            outputs=() if self.metrics is None else ("predicted",),
            **adapter,
        )
        if isinstance(result, Tensor):
            return result
        self.predicted = result.predicted
        return result.loss

    def answered(self, source: object) -> None:
        """Record that the head has computed its loss for logits of this source."""
        self.answers.append((source, self._read_at, self.target))

    def take(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor | None:
        """The head's loss if it was computed for these logits, labels and options of `loss_function`, else None."""
        asked = (
            labels,
            options.get("shift_labels"),
            options.get("num_items_in_batch"),
            options.get("ignore_index", -100),
            options["vocab_size"],
        )
        known = (self.labels, self.shift_labels, self.num_items, self.ignore_index, self.vocab_size)
        if not all(_same(a, b) for a, b in zip(asked, known, strict=True)):
            return None
        if not isinstance(logits, (DeferredLogits, TracedLogits)):
            return None
        answers = [(versions, target) for source, versions, target in self.answers if source is logits.source]
        if not answers or not self._unwritten(*answers[0]) or logits.touched():
            return None
        observed = logits.logit_map()
        if observed is None or not observed.agrees(self.logit_map):
            self.observed = observed
            return None
        self.taken = logits
        loss = logits.loss(self.losses)
        return self._nan_if_written(loss, answers[0][1]) if torch.compiler.is_compiling() else loss

    def add_metrics(self, outputs: ModelOutput) -> Any:
        """The model's outputs with the metrics of the fused loss, or of its logits if the fused loss was not used."""
        if self.metrics is None:
            return outputs
        if self.taken is None or self.predicted is None:
            target = next_tokens(self.labels, self.shift_labels, self.ignore_index)  # as the ordinary loss read them
            return _metrics_of_logits(self.metrics, outputs, target, self.ignore_index)
        target = self.target.to(self.predicted.device)
        return self.metrics.add(outputs, self.predicted, target, self.ignore_index)

    def seal(self, output: object) -> Any:
        """One element of the model's output; the head's object is replaced by one that the user may hold."""
        if isinstance(output, DeferredLogits):
            return output.seal()
        return UncomputedLogits() if isinstance(output, TracedLogits) else output


def _shift_labels_alone(kwargs: dict[str, Any]) -> Tensor:
    """`shift_labels` of a call with `skip_logits=True` and without labels; models compute a loss only with labels.

    Raises:
        OptionError: shift_labels is None too.
    """
    shift_labels: Tensor | None = kwargs.get("shift_labels")
    if shift_labels is None:
        raise OptionError(
            "skip_logits=True, but labels and shift_labels are None: there is neither a loss nor logits to return. "
            "Pass labels, or leave skip_logits out."
        )
    return shift_labels


def _metrics_of_logits(metrics: TokenMetrics, outputs: ModelOutput, target: Tensor, ignore_index: int) -> Any:
    """The outputs with the metrics of their logits; both metrics are None if logits and labels differ in number."""
    if isinstance(outputs, tuple):  # the losses come first; mixture-of-experts models may return two
        logits = next(part for part in outputs if not isinstance(part, Tensor) or part.ndim)
    else:
        logits = outputs.logits
    predicted = logits.detach().argmax(-1).reshape(-1)
    if predicted.shape != target.shape:  # logits_to_keep
        return metrics.add_none(outputs)
    return metrics.add(outputs, predicted, target.to(predicted.device), ignore_index)


class _Active(threading.local):
    """The current call of this thread. Not a ContextVar, because Dynamo cannot trace one."""

    def __init__(self) -> None:  # runs once per thread; with class attributes Dynamo would guard on their absence here
        self.call: LossCall | None = None
        self.without_logits = False


_active = _Active()


@contextlib.contextmanager
def without_logits() -> Iterator[None]:
    """Let patched models that this thread calls with labels compute the loss inside the head, also in eval mode.

    It works through any wrapper and does not affect unpatched models, because no argument is passed to `forward`. An
    unpatched model would pass the keyword `skip_logits` on to its layers.
    """
    before, _active.without_logits = _active.without_logits, True
    try:
        yield
    finally:
        _active.without_logits = before


@dataclass(frozen=True)
class HeadSeam(Seam):
    """An `nn.Linear` that computes the loss if its model's training step requests it, and logits otherwise."""

    op: ClassVar[str] = "linear_cross_entropy"
    flag: ClassVar[str] = "linear_cross_entropy"

    def candidate(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def objection(self, module: nn.Module) -> str | None:
        if type(module).forward is not nn.Linear.forward:
            return f"it is a {type(module).__module__}.{type(module).__name__}, which overrides nn.Linear's forward"
        return "it is parametrized" if parametrize.is_parametrized(module) else None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        plain_forward = base.forward

        def fused(self: Any, input: Tensor, same_hidden: bool = False) -> Any:
            """The loss in place of logits, or None if logits are wanted. same_hidden: as in `is_divided`."""
            call = requested_loss(self)
            if call is None:
                return None
            if not (sees_full_weight(self) or is_divided(self, input, same_hidden)):
                warn_full_logits(self, "lm_head.weight is a shard (tensor parallel)")
                return None
            if not call.fits(input):
                return None
            memory_bytes = vars(self).get("loss_memory_bytes")
            if is_dtensor(self.weight) and not is_dtensor(input):
                weight, bias, part = own_rows(self)
                loss = call.compute(input, weight, bias, memory_bytes, vocab_parallel=part)
            else:
                loss = call.compute(input, self.weight, self.bias, memory_bytes)
            call.vocab_size = self.weight.shape[0]
            return deferred(call, loss, self, plain_forward, input)

        def forward(self: Any, input: Tensor) -> Any:
            output = fused(self, input)
            return plain_forward(self, input) if output is None else output

        def around(self: Any, inner: Callable[..., Any], input: Tensor) -> Any:
            output = fused(self, input, same_hidden=not is_dtensor(input))
            return inner(input) if output is None else output

        return {"forward": forward, "_tigon_around": around}

    def goes_around(self, module: nn.Module) -> bool:
        return has_tensor_parallel_forward(module)


def requested_loss(head: nn.Module) -> LossCall | None:
    """The call whose loss this head is to compute now, or None."""
    call = _active.call
    return call if call is not None and any(head is one for one in call.heads) else None


def deferred(
    call: LossCall, loss: Tensor, head: nn.Module, plain_forward: Callable[..., Tensor], hidden: Tensor
) -> Any:
    """The head's output: it carries the loss, and can compute the logits by `plain_forward(head, hidden)`."""
    if torch.compiler.is_compiling() or type(loss) is not Tensor:  # fake tensors cannot defer logits
        traced = TracedLogits(loss, plain_forward, head, hidden)
        call.answered(traced.source)
        return traced
    source = LogitsSource(head, plain_forward, hidden)
    call.answered(source)
    return DeferredLogits.carry(loss, source)


def sees_full_weight(head: nn.Linear) -> bool:
    """Whether the head's forward sees its complete weight, not a tensor-parallel shard."""
    if head.weight.numel() == 0:
        raise PatchError(
            "lm_head.weight has 0 elements inside lm_head's own forward: it is partitioned (ZeRO-3) and nothing "
            "gathered it. Run the model through its DeepSpeed engine, or patch with linear_cross_entropy=False."
        )
    return not is_dtensor(head.weight) and head.weight.shape == (head.out_features, head.in_features)


@dataclass(frozen=True, kw_only=True)
class CausalLMSeam(Seam):
    """A `ForCausalLM` that passes the loss arguments to its head and uses the loss that the head computes."""

    op: ClassVar[str] = "cross_entropy"
    flag: ClassVar[str] = "cross_entropy"

    head: str = "lm_head"
    fused: bool = True
    """Whether to compute the training loss inside the head."""
    cross_entropy: bool = True
    """Whether to compute the loss of existing logits with tigon's cross_entropy instead of PyTorch's."""
    logits: LogitAttributes = field(default_factory=LogitAttributes)
    balancing: bool = False
    """Whether to compute a mixture's load-balancing loss with tigon's op."""

    def find_head(self, model: nn.Module) -> nn.Module | None:
        """The module at the path `head`, or None."""
        try:
            return model.get_submodule(self.head)
        except AttributeError:
            return None

    def candidate(self, module: nn.Module) -> bool:
        return self.find_head(module) is not None and hasattr(type(module), "loss_function")

    def op_for(self, module: nn.Module) -> str:
        return "cross_entropy" if self.cross_entropy else "linear_cross_entropy"

    def objection(self, module: nn.Module) -> str | None:
        loss_function = getattr(module, "loss_function", None)
        if not is_causal_lm_loss(loss_function):
            return f"its loss_function is {_name(loss_function)}, not transformers' ForCausalLMLoss"
        wanted = {self.head.split(".")[0], "loss_function"}
        for cls in type(module).__mro__:
            if "forward" in vars(cls):
                names = set(getattr(inspect.unwrap(vars(cls)["forward"]), "__code__", _no_code).co_names)
                if wanted <= names:
                    return None
                if "super" not in names:
                    break
        return f"{type(module).__name__}.forward does not call self.{self.head} and self.loss_function"

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam = self
        base_forward: Callable[..., Any] = with_balancing_loss(base.forward) if seam.balancing else base.forward
        labels_at = _position(base_forward, "labels")
        loss_property: Any = inspect.getattr_static(base, "loss_function")

        def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            skip_logits, metrics = kwargs.pop("skip_logits", None), TokenMetrics.pop(kwargs)
            labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
            if labels is None and skip_logits:
                labels = _shift_labels_alone(kwargs)
                if len(args) > labels_at:
                    args = (*args[:labels_at], labels, *args[labels_at + 1 :])
                else:
                    kwargs["labels"] = labels
            fuse = self.training or _active.without_logits if skip_logits is None else skip_logits
            head = seam.fusable_head(self) if fuse and labels is not None else None
            if labels is None or head is None:
                outputs = base_forward(self, *args, **kwargs)
                if metrics is None or labels is None:
                    return outputs
                ignore_index = kwargs.get("ignore_index", -100)
                target = next_tokens(labels, kwargs.get("shift_labels"), ignore_index)
                return _metrics_of_logits(metrics, outputs, target, ignore_index)
            call = LossCall(head, labels, kwargs, seam.logit_map(self), metrics)
            outer, _active.call = _active.call, call
            try:
                outputs = base_forward(self, *args, **kwargs)
            finally:
                _active.call = outer
            if isinstance(outputs, tuple):
                outputs = tuple(call.seal(output) for output in outputs)
            elif getattr(outputs, "logits", None) is not None:
                outputs.logits = call.seal(outputs.logits)
            return call.add_metrics(outputs)

        def loss_function(self: PreTrainedModel) -> Any:
            original = self._original_loss()
            return self._tigon_loss if is_causal_lm_loss(original) else original

        def _tigon_loss(
            self: PreTrainedModel, logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: object
        ) -> Tensor:
            call = _active.call
            fused = None if call is None else call.take(logits, labels, {**kwargs, "vocab_size": vocab_size})
            if fused is not None:
                return fused
            if isinstance(logits, (DeferredLogits, TracedLogits)):
                if call is not None and call.observed is not None:
                    _remember(self, call.observed)
                # Copied, because cross_entropy saves the logits for its backward. Other code that holds them may still
                # write to them, even invisibly through `.data`.
                logits = logits.materialize().clone()
            plain = type(logits) in (Tensor, nn.Parameter)  # DTensor logits use the original loss
            compute: Callable[..., Tensor] = causal_lm_loss if seam.cross_entropy and plain else self._original_loss()
            return compute(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)

        imitate(base_forward, forward)
        return {
            "forward": forward,
            "loss_function": property(loss_function, loss_property.fset),
            "_original_loss": loss_property.fget,
            "_tigon_loss": _tigon_loss,
        }

    def logit_map(self, model: PreTrainedModel) -> LogitMap:
        """The map that the model will apply to its logits: the observed one, or the one of its config."""
        observed = None if torch.compiler.is_compiling() else _observed.get(model)
        return observed or self.logits.read(model.config.get_text_config())

    def fusable_head(self, model: PreTrainedModel) -> nn.Module | None:
        """The head that can compute the loss of this training step; None, with one warning, if it cannot."""
        if not self.fused or not is_causal_lm_loss(model._original_loss()):
            return None
        head = self.find_head(model)
        if head is not None and any(isinstance(m, PatchedModule) for m in peel(head)):
            return head
        reason = (
            f"{self.head} became a {type(head).__module__}.{type(head).__name__} after the patch; "
            "call tigon.patch(model) again to patch it"
        )
        warn_full_logits(model, reason)
        return None


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_observed: weakref.WeakKeyDictionary[nn.Module, LogitMap] = weakref.WeakKeyDictionary()


def _remember(model: nn.Module, observed: LogitMap) -> None:
    """Use the observed map from the next step on; this step has computed the logits."""
    if not torch.compiler.is_compiling():
        _observed[model] = observed


def warn_full_logits(module: nn.Module, reason: str) -> None:
    """Warn once per module that the full logits are computed; a compiled graph does not warn."""
    if not torch.compiler.is_compiling() and module not in _warned:
        _warned.add(module)
        warnings.warn(f"tigon computes the full logits in this step: {reason}.", stacklevel=4)


_no_code = (lambda: None).__code__


def is_causal_lm_loss(function: object) -> bool:
    """Whether `function` is transformers' own next-token loss, not one that the user has set."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    # Compared by code, because a reloaded loss_utils has another function object.
    return bool(getattr(function, "__code__", None) == ForCausalLMLoss.__code__)


def _name(function: object) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _position(function: Callable[..., Any], parameter: str) -> int:
    """The index of `parameter` among the positional arguments after self, or their number if it is not one of them."""
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return names.index(parameter) - 1 if parameter in names else len(names)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: object,
) -> Tensor:
    """transformers' ForCausalLMLoss through tigon's cross_entropy: logits (..., T, V), labels (..., T) -> loss ().

    Other keywords are meant for the trunk and are ignored, as in transformers.

    Raises:
        ShapeError: the number of logits does not fit the labels and vocab_size.
    """
    target = next_tokens(labels, shift_labels, ignore_index).to(logits.device)
    if logits.numel() != target.numel() * vocab_size:
        raise ShapeError(
            f"logits are {tuple(logits.shape)}, but there are {target.numel()} labels. With logits_to_keep, pass "
            "labels (or shift_labels) of the kept positions only."
        )
    num_items = item_count_on(logits.device, num_items_in_batch)
    return ops.cross_entropy(  # type: ignore[return-value]  # a tuple only with outputs=
        logits.reshape(-1, vocab_size), target, ignore_index=ignore_index, num_items=num_items
    )
