"""The forward that TRL gives a model (`add_fused_lm_head`), with tigon's head in place of TRL's chunked function.

TRL's forward runs the backbone, selects the labelled tokens, and computes their log-probabilities with an autograd
function. For a mixture of experts it adds the auxiliary loss. tigon replaces only the autograd function and the
gathering of the weight. The function object is rebuilt with other globals (`tigon.models.seams.rebind`).
Everything else stays TRL's code, in every version of TRL. Nothing is assigned to TRL's modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tigon.errors import PatchError
from tigon.integrations.trl.head import FusedHead, LogitForm, Request, TokenStatistics, bound_arguments
from tigon.integrations.trl.shared_prefix import SharedPrefix, fused_outputs
from tigon.models.seams.rebind import owner_of, rebind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRL_FUNCTION = "_ChunkedLogProbFunction"
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""What TRL's autograd function returns, in its order."""
PARAMETERS = {
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
}


SFT_LOSS = "_chunked_cross_entropy_loss"
"""The function in the forward that SFTTrainer of TRL 1.8 to 1.14 gives its model; its signature never changed."""


class NoDTensor:
    """Stands for DTensor in TRL's forward, which then does not gather the weight: the head's own forward does."""


class FusedForward:
    """One model whose `model(..., fused_lm_head=True)` uses tigon's head."""

    def __init__(self, model: nn.Module, *before: Any) -> None:
        """before: the instance's own `forward` to restore, or None if it had none; TRL's forward if omitted.

        Raises:
            PatchError: tigon does not know the model's forward, or cannot fuse its head.
        """
        self.model = model
        self.head = FusedHead(model)
        self.active = True
        self.form: LogitForm | None = None
        """The form of the logits that TRL derived from the model's config; known after the first call."""
        self.request: Callable[[LogitForm], Request] | None = None
        """Makes what the next calls compute instead of TRL's fields; its first answer stands in `log_probs`."""
        self.keep_mask: Tensor | None = None
        """False for the tokens whose log-probabilities the next calls leave out."""
        self.shared: SharedPrefix | None = None
        """Runs batches whose sequences share prefixes; set by `share_prefix`."""
        function: Any = getattr(model.forward, "__func__", None)
        owner = owner_of(function, TRL_FUNCTION)
        globals_: dict[str, Any]
        self._scores_rows = owner is not None and "shift_labels" in owner.__code__.co_varnames
        if owner is not None:
            self._parameters = list(inspect.signature(owner.__globals__[TRL_FUNCTION].forward).parameters)[1:]
            if set(self._parameters) != PARAMETERS:
                raise PatchError(f"TRL's {TRL_FUNCTION} has other arguments than tigon knows: {self._parameters}")
            globals_ = {
                TRL_FUNCTION: self,
                "DTensor": NoDTensor,
                "maybe_gather_lm_head_ctx": lambda *_: nullcontext(),
                "_use_triton": lambda _: self.keep_mask is None,  # True: TRL passes the labelled tokens only
            }
        elif owner := owner_of(function, SFT_LOSS):
            globals_ = {SFT_LOSS: self.chunked_loss}
        else:
            raise PatchError(f"{type(model).__name__} has no fused forward of TRL's")
        self.head.patch()
        self._before = before[0] if before else vars(model).get("forward")
        self._forward = MethodType(self._switch(function, rebind(function, owner, globals_)), model)
        vars(model)["forward"] = self._forward

    def _switch(self, trl_forward: Any, fused: FunctionType) -> Any:
        """`fused` while active, and TRL's forward after `restore`, for wrappers that still hold the new forward."""

        def forward(model: PreTrainedModel, *args: object, **kwargs: object) -> Any:
            if self.shared is not None and kwargs.get("fused_lm_head"):
                return self._with_shared_prefix(self.shared, functools.partial(fused, model), args, kwargs)
            return (fused if self.active else trl_forward)(model, *args, **kwargs)

        functools.update_wrapper(forward, trl_forward)
        # accelerate's unwrap_model follows `__wrapped__`, and must find what it finds on TRL's forward.
        vars(forward).pop("__wrapped__")
        vars(forward).update(vars(trl_forward))
        return forward

    def share_prefix(self, shared: SharedPrefix) -> None:
        """Let calls with the fused head compute prefixes that sequences share once.

        Raises:
            PatchError: TRL's forward takes no labels for a row of several sequences.
        """
        if not self._scores_rows:
            raise PatchError("it needs TRL 1.15, whose forward takes shift_labels")
        self.shared = shared

    def _with_shared_prefix(
        self, shared: SharedPrefix, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of `run`, the fused forward, for a padded batch."""
        inputs = {"input_ids": args[0], **kwargs} if args else kwargs
        if len(args) > 1 or (layout := shared.layout(inputs)) is None:
            return run(*args, **kwargs)
        keep_mask = self.keep_mask

        def run_row(row: dict[str, Any], keep_1N: Tensor | None) -> Any:
            self.keep_mask = keep_1N
            return run(**row)

        try:
            return fused_outputs(layout, run_row, inputs, keep_mask)
        finally:
            self.keep_mask = keep_mask

    def apply(self, *args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        """In place of TRL's autograd function; the weight among the arguments is not used."""
        given = bound_arguments(self._parameters, args, kwargs)
        self.form = LogitForm(given["temperature"], given["final_logit_softcapping"], given["logit_scale"])
        if self.request is not None:
            first, *_ = self.head.compute(given["hidden"], self.request(self.form))
            return (first, *(None for _ in FIELDS[1:]))
        outputs = tuple(name for name in FIELDS[1:] if name in given["outputs"])
        mask = None if self.keep_mask is None else self.keep_mask.reshape(-1)
        request = TokenStatistics(given["targets"], self.form, outputs, mask)
        answers = dict(zip(("log_probs", *outputs), self.head.compute(given["hidden"], request), strict=True))
        return tuple(answers.get(name) for name in FIELDS)

    def chunked_loss(
        self,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        chunk_size: int,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logit_scale: float = 1.0,
        final_logit_softcapping: float | None = None,
        lm_head_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In place of TRL's function of that name: loss (), number of correct tokens, sum of entropies, tokens."""
        if shift_labels is not None:
            hidden, ids = hidden_states, shift_labels
        else:
            assert labels is not None
            hidden, ids = hidden_states[..., :-1, :], labels[..., 1:]
        mask = ids != -100
        form = LogitForm(1.0, final_logit_softcapping, logit_scale)
        request = TokenStatistics(ids[mask], form, ("entropy", "is_top1"))
        logprob, entropy, is_top1 = self.head.compute(hidden[mask], request)
        count = mask.sum()
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.to(logprob.device)
        return -logprob.sum() / divisor, is_top1.sum().float(), entropy.detach().sum(), count

    def restore(self) -> None:
        """Give the model TRL's forward back, and the head its own."""
        self.active, self.shared = False, None
        if vars(self.model).get("forward") is self._forward:
            restore_forward(self.model, self._before)
        self.head.restore()


class FusedInsideAutocast:
    """A model that Accelerate put under autocast before `fuse`, as TRL's trainers do with their reference.

    Accelerate's wrapper hides TRL's forward. It is taken off and put around the fused forward again.
    """

    def __init__(self, model: nn.Module, accelerator: Any) -> None:
        """Raises PatchError as FusedForward does; the model is then as it was."""
        self.model = model
        self._before = {name: vars(model)[name] for name in ("forward", WITHOUT_AUTOCAST)}
        vars(model)["forward"] = vars(model)[WITHOUT_AUTOCAST]
        try:
            self.fused = FusedForward(model)
        except PatchError:
            vars(model).update(self._before)
            raise
        # Accelerate keeps a list of prepared models, in which this one stands already, and skips a model of this mark.
        prepared = len(accelerator._models)
        vars(model)[PREPARED] = False
        accelerator.prepare_model(model, evaluation_mode=True)
        del accelerator._models[prepared:]

    def restore(self) -> None:
        self.fused.restore()
        vars(self.model).update(self._before)


def forwards_of(part: object) -> list[FusedForward]:
    """The fused forwards in a part of a fused trainer."""
    held = (part, *(getattr(part, name, None) for name in ("fused", "forward")))
    return [each for each in held if isinstance(each, FusedForward)]


PREPARED = "_is_accelerate_prepared"
WITHOUT_AUTOCAST = "_original_forward"
"""Accelerate keeps here the forward of a model that it puts under autocast."""


def has_trl_forward(model: nn.Module) -> bool:
    """Whether TRL gave this model a forward that tigon can fuse. Accelerate may have put it under autocast since."""
    forward = vars(model).get(WITHOUT_AUTOCAST, model.forward)
    function = getattr(forward, "__func__", None)
    return any(owner_of(function, name) is not None for name in (TRL_FUNCTION, SFT_LOSS))


def restore_forward(model: nn.Module, before: Any) -> None:
    """Set the instance's own `forward` to `before`; None: remove it, so that the class's forward runs."""
    if before is not None:
        vars(model)["forward"] = before
    else:
        vars(model).pop("forward", None)
