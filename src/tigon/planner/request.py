"""The input of an estimate: a model, the samples of a micro-batch per GPU, and the run's techniques."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tigon.errors import UsageError
from tigon.models.kv_cache import layer_configs
from tigon.models.loading.config import build_on_meta
from tigon.objectives.base import FrozenModel, PlannedObjective
from tigon.recipe.keys import Recipe
from tigon.techniques import matrix
from tigon.techniques.checkpointing.layer_checkpointing import is_by_layer, states_of
from tigon.techniques.keys.settings import Settings
from tigon.techniques.sequence_parallel import method
from tigon.techniques.sharding import sharding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Request:
    """One configuration to estimate, per GPU."""

    model: str
    """The model's name, for messages."""
    config: PreTrainedConfig
    """Its transformers config, as `tigon.models.loading.config.load_config` returns it."""
    batch: int
    """Samples of one micro-batch on one GPU."""
    seq: int
    """Tokens per sample."""
    settings: Settings
    masked: bool = False
    """Whether samples hold several documents, so that attention needs a block mask."""
    objective: PlannedObjective = field(default_factory=PlannedObjective)
    clipped: bool = True
    """Whether gradients are clipped by their norm, which the Trainer does unless max_grad_norm is 0."""
    adapters_fused: bool = True
    """False: PEFT added the adapters to a model that was patched before, and computes them itself."""
    evaluated: bool = False
    """Whether the run evaluates, in batches of the same size. If so, the evaluation counts in the peak."""
    by_tigon_train: bool = False
    """Whether `tigon train` runs it, which sets PyTorch's allocator itself (`sets_expandable_segments`)."""

    def __post_init__(self) -> None:
        """Choose a method in place of `sharding.sequence_method: auto`."""
        object.__setattr__(self, "settings", method.resolved(self.settings, self.config))

    @property
    def gpus(self) -> int:
        return self.settings.sharding.gpus

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step."""
        return self.settings.train.gradient_accumulation

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step on one GPU."""
        return self.batch * self.micro_batches

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one GPU."""
        return self.objective.sequences(self.batch) * self.objective.sequence_tokens(self.seq)

    def frozen(self) -> tuple[Request, ...]:
        """A request for each model that the run holds beside the trained one, as if it were the model of a run.

        Its techniques are the run's, without adapters, quantisation and checkpointing. They are made in
        trainer/post_training/trl_trainer.py.
        """
        plain = {"lora.rank": None, "lora.quantize": False, "lora.base_offload": False, "train.checkpointing": "none"}
        settings = self.settings.having(plain)
        trained = FrozenModel(name=self.model, config=self.config)
        return tuple(
            replace(self, model=one.name, config=one.config, settings=settings, objective=PlannedObjective())
            for one in self.objective.frozen_models(trained, self.settings)
        )


def request_of(
    recipe: Recipe, config: PreTrainedConfig, settings: Settings, objective: PlannedObjective, *, evaluated: bool
) -> Request:
    """The request of a recipe. settings: its techniques, with values for `auto`.

    Raises:
        UsageError: The planner cannot predict the objective with these settings, although a run can train it.
        RecipeError: Rows of several documents would go round a ring.
    """
    for reason in objective.refusals(settings):
        raise UsageError(f"{reason}.")
    data, train = recipe.data, recipe.train
    if data.packs and not data.cross_document_attention:
        method.check_documents(settings, config)
    needs_mask = objective.pads or not (data.packs and data.cross_document_attention)
    return Request(
        model=recipe.model.name,
        config=config,
        batch=train.batch_size,
        seq=data.sequence_length,
        settings=settings,
        masked=needs_mask and not settings.model.flash_attention,
        clipped=train.max_grad_norm > 0,
        evaluated=evaluated,
        objective=objective,
        by_tigon_train=True,
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the language model; multimodal configs hold one inside."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def has_routed_experts(config: PreTrainedConfig) -> bool:
    """Whether layers of the model have routed experts, by the names that configs give their number."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text_config(config), name, 0) or 0) > 1 for name in names)


def ties_embeddings(config: PreTrainedConfig) -> bool:
    """Whether the head and the embeddings share one weight."""
    return bool(getattr(text_config(config), "tie_word_embeddings", False))


def build(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, without memory for its weights. `name` is for messages.

    Raises UsageError if the config cannot be built or gives a weight a size of 0.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = build_on_meta(name, config)
    for parameter, weight in model.named_parameters():
        if not weight.numel():
            raise UsageError(f"{name}: its config gives {parameter} the shape {tuple(weight.shape)}; no size may be 0.")
    return model


def refusals(request: Request, settings: Settings) -> tuple[str, ...]:
    """The reasons why `request` cannot run with these settings, one sentence each."""
    return (*matrix.refusals(settings), *request.objective.refusals(settings))


def check(request: Request) -> None:
    """Raise UsageError for a value out of range, and RecipeError for checkpointing of another number of layers, or for
    copies that do not divide the GPUs.

    `techniques.matrix` checks which settings exclude each other.
    """
    for name, value in (("batch", request.batch), ("seq", request.seq)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    if request.settings.train.auto_checkpointing:
        raise UsageError("checkpointing is auto, which stands for a choice; planner.search.checkpointing makes it.")
    for reason in matrix.untraceable(request.settings):
        raise UsageError(f"{reason}.")
    sharding.check_sizes(request.settings)
    text = text_config(request.config)
    if text.num_hidden_layers < 1:
        depth = text.num_hidden_layers
        raise UsageError(f"{request.model} has num_hidden_layers {depth}; a model has at least one layer.")
    for layer in layer_configs(text):
        heads, key_heads = (getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(key_heads, int) and (key_heads < 1 or heads % key_heads):
            raise UsageError(
                f"{request.model} has num_key_value_heads {key_heads}, which does not divide its num_attention_heads "
                f"{heads}; correct its config.json."
            )
    if is_by_layer(request.settings.train.checkpointing):
        states_of(request.settings.train.checkpointing, text.num_hidden_layers)
    if refusal := request.objective.batch_refusal(request.batch):
        raise UsageError(f"batch is {request.batch}, but {refusal}.")
    limit = getattr(text, "max_position_embeddings", None)
    written = request.objective.sequence_tokens(request.seq) - request.seq
    if limit is not None and request.seq + written > limit:
        completion = f" and completions have up to {written} tokens" if written else ""
        raise UsageError(
            f"seq is {request.seq}{completion}, but {request.model} has max_position_embeddings {limit}; use at most "
            f"{max(limit - written, 0)}, or give a config.json with longer positions."
        )
