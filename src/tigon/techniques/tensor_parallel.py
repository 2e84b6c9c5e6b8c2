"""Tensor parallelism (Megatron-LM, arXiv 1909.08053) inside FSDP2: a few processes divide each matrix of the layers.

The processes of a group read the same samples. Each holds a part of the heads, the MLP's width and the vocabulary. The
output of attention and of the MLP is a sum over the group, so each layer has one all-reduce after each of the two,
and one before each in the backward pass. Norms and embeddings are whole in every process.

The plan of a model is transformers' (`base_model_tp_plan` of its config). PyTorch's ColwiseParallel and RowwiseParallel
carry it out: weights become DTensors of the group, and FSDP2 divides them further over the groups. transformers' own
loader was not taken, because it divides a checkpoint while it reads it, and presets and adapters are not read so.

Accelerate would make DTensors of the norms' weights too, which kernels do not take. Here these weights are ordinary
ones that FSDP2 divides over the groups only. Their gradients are equal in all processes of a group, except those of
norms of single heads, which `sum_gradients` adds up.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from tigon.errors import RecipeError
from tigon.techniques.condition import Condition, Exclusion
from tigon.techniques.head_groups import check_has_attention, check_text_alone, key_heads
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import Declaration, RunInfo, Technique

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig, PreTrainedModel

KEY = "sharding.tensor"
EMBEDDINGS = "embedding_rowwise"
COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""transformers' words for: each process computes a part of the outputs; a part of the sum; a norm of own heads."""

_divided: weakref.WeakKeyDictionary[nn.Module, tuple[Any, tuple[nn.Module, ...]]] = weakref.WeakKeyDictionary()
"""Model -> (the processes that divide its matrices, the modules whose gradients are sums over them)."""


def group_size(model: nn.Module) -> int:
    """Returns the number of processes that divide each matrix of this model; 1 without tensor parallelism."""
    return dist.get_world_size(_divided[model][0]) if model in _divided else 1


def plan_of(config: PreTrainedConfig) -> Mapping[str, str]:
    """Returns the styles of a model's layers by the names of modules in the base model, `*` for a layer's number.

    Embeddings stay whole. transformers 5.17 has them in the plan of a model whose head is tied to them.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if style != EMBEDDINGS}


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of a causal language model of transformers over the processes of a mesh of one dimension.

    The head is divided by vocabulary unless it is tied to the embeddings.
    """
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    summed: list[nn.Module] = []
    styles: dict[str, Any] = {}
    for name, style in _modules(model):
        if style == COLUMNS:
            styles[name] = ColwiseParallel()
        elif style == ROWS:
            styles[name] = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        else:
            summed.append(model.get_submodule(name))
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Linear) and head.weight is not embeddings.weight:
        styles[next(name for name, module in model.named_modules() if module is head)] = ColwiseParallel(
            output_layouts=Replicate()
        )
    parallelize_module(model, mesh, styles)
    for name, style in styles.items():
        if isinstance(style, RowwiseParallel):
            model.get_submodule(name).register_forward_hook(_summed)
    _divided[model] = (mesh.get_group(), tuple(summed))
    # It warns, in every process, that a tensor on a mesh of two dimensions is gathered along one after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _summed(module: nn.Module, args: object, output: Any) -> Any:
    """The sum over the group, as an ordinary tensor. RowwiseParallel's own is one that kernels cannot read yet."""
    from torch.distributed.tensor import Replicate

    return output.redistribute(placements=[Replicate()]).to_local()


def _modules(model: nn.Module) -> list[tuple[str, str]]:
    """(name, style) of each module that the model's plan names."""
    prefix: Any = model.base_model_prefix
    patterns = [
        (re.compile(re.escape(f"{prefix}.{name}").replace(r"\*", r"\d+")), style)
        for name, style in plan_of(model.config).items()
    ]
    return [
        (name, style) for name, _ in model.named_modules() for pattern, style in patterns if pattern.fullmatch(name)
    ]


def sum_gradients(model: nn.Module) -> torch.Tensor | None:
    """Add up, over the group, the gradients of modules that see only their process's heads. Once per step.

    Returns:
        A norm that is not finite if a gradient of any process is not, because some versions of the Trainer take the
        norm of such a model without Accelerate. None without tensor parallelism.
    """
    if model not in _divided:
        return None
    group, summed = _divided[model]
    for parameter in (one for module in summed for one in module.parameters()):
        if parameter.grad is not None:
            dist.all_reduce(_local(parameter.grad), group=group)
    norm = nn.utils.get_total_norm([_local(one.grad) for one in model.parameters() if one.grad is not None])
    total: torch.Tensor = norm.float().square()
    dist.all_reduce(total)
    return total.sqrt()


def _local(grad: Any) -> Any:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def step_by_mesh(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's steps take weights of one mesh at a time, because its kernels do not take several.

    Between steps its groups are those of a run without tensor parallelism, so that checkpoints are too. Some versions
    of the Trainer make a group per mesh.
    """
    optimizer.param_groups = _joined(model, optimizer.param_groups)
    whole: list[dict[str, Any]] = []

    def split(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        whole[:] = optimizer.param_groups
        groups = []
        for group in whole:
            kinds: dict[Any, list[Any]] = {}
            for parameter in group["params"]:
                kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
            groups += [{**group, "params": parameters} for parameters in kinds.values()]
        optimizer.param_groups = groups

    def join(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        optimizer.param_groups = list(whole)

    optimizer.register_step_pre_hook(split)
    optimizer.register_step_post_hook(join)


def _joined(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One group for all groups with the same options, with the weights in the model's order."""
    order = {parameter: place for place, parameter in enumerate(model.parameters())}
    joined: list[dict[str, Any]] = []
    for group in groups:
        options = {name: value for name, value in group.items() if name != "params"}
        alike = next((one for one in joined if options == {name: one[name] for name in options}), None)
        if alike is None:
            joined.append({**group, "params": list(group["params"])})
        else:
            alike["params"] += group["params"]
    for group in joined:
        group["params"].sort(key=order.__getitem__)
    return joined


# --- checks and records ----------------------------------------------------------------------------------------------


def check(config: PreTrainedConfig, settings: Settings) -> None:
    """Raise RecipeError if processes cannot divide the matrices of a model with this transformers config."""
    size = settings.sharding.tensor
    if size == 1:
        return
    if settings.sharding.gpus % size or settings.sharding.gpus < 2 * size:
        raise RecipeError(
            f"{KEY} is {size}, and FSDP2 needs at least two groups of {size} GPUs, but sharding.gpus is "
            f"{settings.sharding.gpus}; set sharding.gpus to a multiple of {size} from {2 * size} on"
        )
    check_text_alone(config, KEY)
    check_has_attention(config, KEY)
    plan = plan_of(config)
    if not plan:
        raise RecipeError(
            f"{KEY}: transformers has no plan that divides the layers of {config.model_type}; set {KEY}: 1"
        )
    others = sorted(set(plan.values()) - {COLUMNS, ROWS, SUMMED})
    if others:
        raise RecipeError(
            f"{KEY}: transformers' plan for {config.model_type} divides layers by {', '.join(others)}, which tigon has "
            f"not tried; set {KEY}: 1"
        )
    n_heads, n_key_heads, width = int(config.num_attention_heads), key_heads(config), int(config.intermediate_size)
    if n_heads % size or n_key_heads % size or width % size:
        raise RecipeError(
            f"{KEY} is {size}, and the model has {n_heads} heads, {n_key_heads} key heads and an MLP of width {width}, "
            "which are divided over these processes; choose a divisor of all three"
        )


def mesh_sizes(settings: Settings) -> dict[str, int]:
    """Returns the dimensions of Accelerate's mesh: the processes that shard, and those that divide matrices."""
    return {"dp_shard_size": settings.sharding.gpus // settings.sharding.tensor, "tp_size": settings.sharding.tensor}


def _divide(model: PreTrainedModel, settings: Settings, run_info: RunInfo) -> Any:
    from accelerate import ParallelismConfig

    mesh = ParallelismConfig(**mesh_sizes(settings)).build_device_mesh(run_info.device)
    divide(model, mesh["tp"])
    return model


def _arguments(settings: Settings, run_info: RunInfo) -> Mapping[str, Any]:
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(**mesh_sizes(settings))}


_DIVIDED = Condition("sharding.tensor", "is at least", 2)


def _not_with(condition: Condition, reason: str, instead: str) -> Exclusion:
    return Exclusion(when=(_DIVIDED, condition), reason=reason, instead=instead, source="techniques/tensor_parallel.py")


_UNTRIED = "tigon has not tried it with divided matrices"

DECLARATION = Declaration(
    labels={KEY: "matrices over {}"},
    techniques=(
        Technique(
            name="tensor-parallel",
            devices=("cuda",),
            recipe={"sharding.gpus": 4, "sharding.fsdp": True, KEY: 2},
            chosen=(_DIVIDED,),
            model=_divide,
            fits=check,
            arguments=_arguments,
            rough_time=True,
        ),
    ),
    exclusions=(
        _not_with(
            Condition("sharding.fsdp", "is", False),
            "the groups share out weights and states by FSDP2",
            "sharding.fsdp: true",
        ),
        _not_with(Condition("sharding.replicas", "is at least", 2), _UNTRIED, "sharding.replicas: 1"),
        _not_with(Condition("sharding.sequence", "is at least", 2), _UNTRIED, "sharding.sequence: 1"),
        _not_with(Condition("sharding.offload", "is not", "none"), _UNTRIED, "sharding.offload: none"),
        _not_with(Condition("lora.rank", "is at least", 1), _UNTRIED, "lora.rank: null"),
        _not_with(Condition("train.precision", "is", "fp8"), _UNTRIED, "train.precision: amp-bf16"),
        _not_with(
            Condition("train.gradient_accumulation_fusion", "is", True),
            _UNTRIED,
            "train.gradient_accumulation_fusion: false",
        ),
        _not_with(Condition("train.mlp_tile_tokens", "is at least", 1), _UNTRIED, "train.mlp_tile_tokens: 0"),
        _not_with(Condition("train.attention_groups", "is at least", 2), _UNTRIED, "train.attention_groups: 1"),
        _not_with(
            Condition("train.optimizer", "is not one of", ("adamw", "adamw-foreach")),
            _UNTRIED,
            "train.optimizer: adamw",
        ),
        _not_with(
            Condition("model.kernels", "is", "liger"),
            "Liger reads the head's weight as a whole",
            "model.kernels: tigon",
        ),
    ),
)
