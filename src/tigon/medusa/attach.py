"""Attaches heads to a model: the heads become a submodule, and training runs a different forward of the model.

As in `tigon.models.seams.base`, the model's `__class__` becomes a generated subclass. Trainer, Accelerate, FSDP2,
DeepSpeed and PEFT still see a transformers model, and checkpoints hold the heads under `draft_heads.`.

In training with labels, the model's trunk runs first (in stage 1 without a graph). Then all losses are computed at
once, inside the forwards of the modules whose weights they need, because engines that shard weights gather them there.
In evaluation, and without labels, the model's own forward runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tigon import ops
from tigon._trunk import decoder_layers, trunk_of
from tigon.errors import PatchError, UsageError
from tigon.medusa import loss
from tigon.medusa.heads import MedusaHeads, MtpHeads, Visit, inside, make_heads
from tigon.medusa.record import HeadMetrics
from tigon.medusa.spec import HeadsSpec, Objective
from tigon.models.kv_cache import CACHE_ARGUMENTS
from tigon.models.patch import unwrap
from tigon.models.seams.base import Change, PatchedModule, Seam, imitate
from tigon.models.seams.head.deferred_logits import version_of
from tigon.models.seams.head.head_path import observed_logit_map
from tigon.models.seams.head.logits import LogitMap
from tigon.models.seams.head.loss import HeadSeam, item_count_on
from tigon.ops.head.multi_head import MultiHeadOutput
from tigon.ops.losses.prepared_targets import PreparedTargets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# B batch, T positions, H hidden, K losses.

NAME = "draft_heads"
# Arguments of a causal language model's forward that its trunk does not take.
_NOT_THE_TRUNKS = frozenset({"labels", "logits_to_keep", "num_items_in_batch", "skip_logits", "return_dict", "self"})
# Arguments that the model's own loss uses and the heads' losses do not -> the value that is allowed.
_UNREAD = {"shift_labels": None, "ignore_index": loss.IGNORE_INDEX, "logits_to_keep": 0}


@dataclass
class HeadState:
    """State that changes from step to step, and the recorded losses."""

    objective: Objective
    count: int
    scheduled: float = 1.0
    """The current value of the schedule."""
    ranked: bool = False
    """Whether to compute accuracies in this step, which adds a third to the heads' time."""
    scoring: bool = False
    record: HeadMetrics = field(default_factory=lambda: HeadMetrics([]))
    evaluated: HeadMetrics | None = None
    """The record of an evaluation that `take` has not returned yet."""

    def __post_init__(self) -> None:
        if not self.record.names:
            self.record = self.new_record()

    def new_record(self) -> HeadMetrics:
        own = ["model"] if self.objective.stage == 2 else []
        return HeadMetrics([*own, *(f"head{k}" for k in range(1, self.count + 1))])

    def take(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The metrics of an evaluation since the last call, or else those of the steps since the last call.

        reduce: sums a tensor over all processes. Either all processes call this method, or none.
        """
        evaluated, self.evaluated = self.evaluated, None
        return (evaluated or self.record).take(reduce)

    def factors(self) -> list[float]:
        return self.objective.factors(self.count, self.scheduled)


@dataclass(frozen=True)
class LmHeadSeam(Seam):
    """The model's `lm_head`, whose forward runs a `Visit`."""

    op: ClassVar[str] = "multi_head_linear_cross_entropy"
    flag: ClassVar[str] = "heads"

    def candidate(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def objection(self, module: nn.Module) -> str | None:
        if not isinstance(module, nn.Linear):
            return f"its output head is a {type(module).__module__}.{type(module).__name__}, not a linear module"
        return "its output head has a bias" if module.bias is not None else None

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        base_forward: Callable[..., Any] = base.forward

        def forward(self: Any, input: Tensor | Visit) -> Any:
            return input.run() if isinstance(input, Visit) else base_forward(self, input)

        return {"forward": forward}


@dataclass(frozen=True, kw_only=True)
class HeadedSeam(Seam):
    """A causal language model that trains its heads."""

    op: ClassVar[str] = "multi_head_linear_cross_entropy"
    flag: ClassVar[str] = "heads"

    objective: Objective
    fused: bool
    """False: use PyTorch's ops and all logits, for comparison."""
    logit_map: LogitMap = field(default_factory=LogitMap)
    """The scaling and capping of the model's logits, which the heads apply too."""

    def candidate(self, module: nn.Module) -> bool:
        return hasattr(module, "get_output_embeddings") and hasattr(module, "base_model")

    def objection(self, module: PreTrainedModel) -> str | None:
        if not self.candidate(module) or trunk_of(module) is module:
            return "it is not a causal language model with a separate trunk"
        if isinstance(getattr(module, NAME, None), nn.Module):
            return "it already has heads; detach them first"
        if self.objective.stage == 2 and getattr(module.config, "output_router_logits", False):
            return "its config has output_router_logits, whose loss would be lost; set it to False"
        return LmHeadSeam().objection(module.get_output_embeddings())

    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        seam, base_forward, base_train = self, base.forward, base.train
        signature = inspect.signature(base_forward)
        more = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

        def forward(self: Any, *args: object, **kwargs: object) -> Any:
            bound = signature.bind_partial(self, *args, **kwargs).arguments
            extra = bound.pop(more[0], {}) if more else {}
            inputs = {**bound, **extra}
            heads = getattr(self, NAME)
            if inputs.get("labels") is None or not (self.training or heads.state.scoring):
                return base_forward(self, *args, **kwargs)
            from transformers.modeling_outputs import CausalLMOutputWithPast

            losses = seam.losses(self, inputs, factors=heads.state.factors(), ranked=heads.state.ranked)
            heads.state.record.add(losses, inputs.get("num_items_in_batch"))
            return CausalLMOutputWithPast(loss=losses.loss)

        def train(self: Any, mode: bool = True) -> Any:
            base_train(self, mode)
            if seam.objective.stage == 1:
                trunk_of(self).eval()  # frozen: no dropout, no activation checkpoints
            return self

        imitate(base_forward, forward)
        return {"forward": forward, "train": train}

    def losses(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], *, factors: list[float], ranked: bool
    ) -> MultiHeadOutput:
        """The losses of one batch. inputs: the keyword arguments of the model's forward."""
        for name, neutral in _UNREAD.items():
            given = inputs.get(name)
            if given is not None and not (isinstance(given, int) and given == neutral):
                raise UsageError(f"{name} is not supported by the losses of heads; leave it out.")
        heads, head = getattr(model, NAME), model.get_output_embeddings()
        labels, positions = inputs["labels"], inputs.get("position_ids")
        if positions is not None and positions.ndim == 2:  # (1, T) applies to every sample
            positions = positions.expand(labels.shape)
        shifts = self.objective.shifts(heads.spec.count)

        def targets() -> Tensor | PreparedTargets:
            return ops.prepare_targets(labels, shifts=shifts, positions=positions) if self.fused else labels

        # The targets are prepared before the trunk runs, so that the loss does not wait for the trunk.
        early, written = targets(), _versions(labels, positions)
        layer_inputs: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            if heads.spec.kind == "mtp":
                stack.enter_context(layer_inputs_kept(model, layer_inputs))
            if self.objective.stage == 1:
                stack.enter_context(torch.no_grad())
            # With a cache, transformers ignores the document boundaries in position_ids.
            hidden = trunk(model, {**inputs, "use_cache": False}).last_hidden_state
        joint = self.objective.stage == 2
        outputs: list[MultiHeadOutput] = []

        def compute() -> Tensor:
            weights = heads.weights() or [head.weight] * heads.spec.count
            hiddens = heads.hiddens(model, hidden, inputs, layer_inputs)
            blocks = heads.block_weights()
            if joint:
                hiddens, weights, blocks = [hidden, *hiddens], [head.weight, *weights], [[], *blocks]
            compute_losses: Callable[..., MultiHeadOutput] = loss.fused if self.fused else loss.plain
            # A hook may have edited the labels since. A write through `.data` does not change the version, so on the
            # CPU, where this costs no wait, the labels are read again.
            unwritten = labels.is_cuda and not torch.compiler.is_compiling() and _versions(labels, positions) == written
            target = early if unwritten else targets()
            given = loss.HeadInputs(
                hiddens=hiddens,
                weights=weights,
                blocks=blocks,
                shifts=shifts,
                factors=factors,
                positions=positions,
                num_items=item_count_on(hidden.device, inputs.get("num_items_in_batch")),
                logit_map=self.logit_map,
                ranked=ranked,
            )
            outputs.append(compute_losses(given, target))
            return outputs[0].loss

        total = inside([head, *heads.visited()], compute)
        return outputs[0]._replace(loss=total)


def _versions(*values: Tensor | None) -> tuple[int, ...]:
    """The version counter of each value; empty under torch.compile, because Dynamo cannot compare versions."""
    return () if torch.compiler.is_compiling() else tuple(version_of(value) for value in values)


def trunk(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Call the model without its head, with those `inputs` that the trunk takes."""
    return trunk_of(model)(**{name: value for name, value in inputs.items() if name not in _NOT_THE_TRUNKS})


@contextlib.contextmanager
def layer_inputs_kept(model: PreTrainedModel, kept: dict[str, Any]) -> Iterator[None]:
    """Store in `kept` the arguments of the last decoder layer except the hidden state: masks and rotary tables.

    The cache is left out too. It belongs to the model, and MTP modules do not use it.
    """

    last = decoder_layers(model)[-1]
    # The class's forward, because an activation checkpoint's forward on the instance accepts any arguments.
    signature = inspect.signature(type(last).forward)
    more = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]

    def keep(layer: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> None:
        bound = signature.bind_partial(layer, *args, **kwargs).arguments  # GPT-2 passes masks by position
        inputs = {**bound, **(bound.get(more[0], {}) if more else {})}
        own = {*list(signature.parameters)[:2], *more, *CACHE_ARGUMENTS, "use_cache"}  # [:2]: self, the hidden state
        kept.update({name: value for name, value in inputs.items() if name not in own})

    handle = last.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def attach(
    model: PreTrainedModel, spec: HeadsSpec, objective: Objective, state: Mapping[str, Tensor] | None = None
) -> MedusaHeads | MtpHeads:
    """Attach heads to a model, in place, together with the losses that train them.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one. Call `attach` after `tigon.patch` and
            before any engine wraps the model. If the model is not patched, or is patched without the fused loss, the
            heads' losses use PyTorch's own ops with all logits.
        spec: the shape of the heads.
        objective: the training objective; stage 1 freezes everything but the heads.
        state: the heads' weights, from `load_heads`. None initialises them as the authors do, but with biases of 0.

    Returns:
        The heads, which are also `model.draft_heads`.

    Raises:
        PatchError: the model cannot have heads; the message gives the reason. The model is unchanged.
        UsageError: `state` does not fit the heads.
    """
    model = unwrap(model)
    head = model.get_output_embeddings()
    seam = HeadedSeam(objective=objective, fused=_has_fused_loss(head))
    reason = seam.objection(model)
    observed = observed_logit_map(model) if reason is None else reason
    if isinstance(observed, str):
        raise PatchError(f"{type(model).__name__} cannot have heads: {observed}.")
    seam = dataclasses.replace(seam, logit_map=observed)
    heads = make_heads(spec, model)
    if state is not None:
        load_into(heads, state)
    if objective.stage == 1:
        model.requires_grad_(False)
    heads.requires_grad_(True)
    heads.state = HeadState(objective=objective, count=spec.count)
    setattr(model, NAME, heads)
    for change in _changes(model, seam):
        change.apply()
    model.train(model.training)
    return heads


def _has_fused_loss(head: nn.Module) -> bool:
    return isinstance(head, PatchedModule) and isinstance(head._tigon_seam, HeadSeam)


def _changes(model: PreTrainedModel, seam: HeadedSeam) -> tuple[Change, Change]:
    return Change("lm_head", model.get_output_embeddings(), LmHeadSeam()), Change("", model, seam)


def load_into(heads: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state_dict into heads. Raises UsageError if names or shapes differ."""
    check_fits(heads, state)
    heads.load_state_dict(dict(state))


def check_fits(heads: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise UsageError if the names or shapes of a state_dict differ from those of the heads."""
    own = heads.state_dict()
    wrong = sorted(own.keys() ^ state.keys()) or [n for n, t in own.items() if t.shape != state[n].shape]
    if wrong:
        raise UsageError(
            f"the file of heads does not fit: {wrong[0]} ({len(wrong)} differ); use the kind, count, layers, output "
            "and model that the heads were trained with."
        )


def heads_of(model: PreTrainedModel) -> MedusaHeads | MtpHeads:
    """The heads of a model. Raises UsageError if it has none."""
    heads = getattr(unwrap(model), NAME, None)
    if heads is None:
        raise UsageError(f"this {type(model).__name__} does not have heads; attach them first.")
    return heads  # type: ignore[no-any-return]


def detach(model: PreTrainedModel) -> MedusaHeads | MtpHeads:
    """Remove the heads from a model and restore its forward; returns the heads.

    Parameters that stage 1 froze stay frozen. Raises UsageError if the model lacks heads.
    """
    model = unwrap(model)
    heads = heads_of(model)
    for change in _changes(model, type(model)._tigon_seam):
        change.revert()
    delattr(model, NAME)
    return heads


@contextlib.contextmanager
def scoring(model: PreTrainedModel) -> Iterator[HeadMetrics]:
    """Context in which the model, in evaluation, records the heads' losses and accuracies for batches with labels.

    Yields the `HeadMetrics`. Each loss is divided by its own number of tokens.
    """
    heads = heads_of(model)
    before = heads.state
    heads.state = dataclasses.replace(before, scoring=True, ranked=True, record=before.new_record())
    try:
        with torch.no_grad():
            yield heads.state.record
    finally:
        heads.state = before
