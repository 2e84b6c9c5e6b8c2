"""The modules and parameters of a model that get adapters, and the reasons why PEFT cannot adapt some of them."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from tigon._trunk import language_model, trunk_of
from tigon.errors import RecipeError
from tigon.techniques.keys.lora import DIFFERENCE_INITS, EMBEDDINGS, EXPERTS, HEAD, LINEAR, LoraConfig
from tigon.techniques.lora.four_bit_weights import names_in_4_bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POOLER = "pooler"
"""The name that encoders give the layer that makes one vector of a sequence."""


@dataclass(frozen=True)
class Targets:
    """The parts of a model that get adapters."""

    modules: tuple[str, ...]
    """Paths of modules."""
    parameters: tuple[str, ...] = ()
    """Paths of parameters that belong to no module of PEFT: the experts' three-dimensional weights."""


def targets_of(model: PreTrainedModel, targets: tuple[str, ...]) -> Targets:
    """The modules and parameters that `lora.targets` names.

    A target is one of `WORDS`, the name or path of a module, or a regular expression that matches whole paths.

    Raises:
        RecipeError: A target names no module, or one that PEFT cannot adapt.
    """
    modules = dict(model.named_modules())
    named = {path: target for target in targets for path in _found(model, modules, target) if target != EXPERTS}
    parameters = tuple(expert_parameters(model)) if EXPERTS in targets else ()
    if EXPERTS in targets and not parameters:
        raise RecipeError(
            "lora.targets: experts: the model has no experts whose weights are one three-dimensional parameter; leave "
            "it out"
        )
    return Targets(tuple(path for path in modules if path in named), parameters)


def short_names(model: PreTrainedModel, targets: Targets) -> list[str]:
    """The names by which PEFT finds the modules of `targets` and no others: last parts of paths, if they suffice."""
    names = {path.rpartition(".")[2] for path in targets.modules}
    same_ends = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in names]
    return sorted(names) if sorted(same_ends) == sorted(targets.modules) else list(targets.modules)


def _found(model: PreTrainedModel, modules: Mapping[str, nn.Module], target: str) -> list[str]:
    wanted = _by_word(model).get(target)
    if wanted is not None:
        return [path for path, module in modules.items() if wanted(module)]
    matching = [path for path in modules if path and (path == target or path.endswith(f".{target}"))]
    by_pattern = not matching
    if by_pattern:
        matching = [path for path in modules if path and re.fullmatch(target, path)]
    unfit = left_out(model)
    adaptable = [path for path in matching if _is_adaptable(modules[path]) and path not in unfit]
    # A pattern such as .*mlp.* also matches modules without weights: containers and activations.
    refused = [
        path for path in matching if path not in adaptable and not (by_pattern and not _has_weights(modules[path]))
    ]
    if refused:
        kind = type(modules[refused[0]]).__name__
        why = unfit.get(refused[0], "PEFT adapts linear modules and embeddings; name the modules inside it")
        raise RecipeError(
            f"lora.targets: {target!r} names {refused[0]}, a {kind}, and {why}; use a narrower pattern or other names"
        )
    if not adaptable:
        raise RecipeError(f"lora.targets: {target!r} names no module of this model; {_nearest(modules, target)}")
    return adaptable


def _by_word(model: PreTrainedModel) -> Mapping[str, Callable[[nn.Module], bool]]:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    unfit = {model.get_submodule(path) for path in left_out(model)}
    pooler = getattr(trunk_of(model), POOLER, None)
    of_text = set(language_model(model).modules()) - unfit - set(pooler.modules() if pooler is not None else ())

    def is_linear(module: nn.Module) -> bool:
        return (isinstance(module, nn.Linear) or _is_conv1d(module)) and module is not head and module in of_text

    return {
        LINEAR: is_linear,
        "linear": is_linear,
        HEAD: lambda module: module is head,
        EMBEDDINGS: lambda module: module is embeddings,
        EXPERTS: lambda module: False,
    }


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear module of GPT-2, whose weight is transposed."""
    return type(module).__name__ == "Conv1D"


def _is_adaptable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or _is_conv1d(module)


def head_modules(model: PreTrainedModel) -> list[str]:
    """The names of the modules of a classification head, and of a pooler below it.

    They are trained whole and saved beside adapters, because most checkpoints of base models lack them.
    """
    trunk = trunk_of(model)
    pooler = [POOLER] if getattr(trunk, POOLER, None) is not None else []
    return pooler + [
        name
        for name, child in model.named_children()
        if child is not trunk and next(child.parameters(), None) is not None
    ]


def left_out(model: PreTrainedModel) -> dict[str, str]:
    """Path -> reason of the linear modules that cannot have an adapter, although PEFT would make one for most of them.

    The reasons are the ends of sentences.
    """
    reasons: dict[str, str] = {}
    computes: dict[type, bool] = {}
    read: dict[type, frozenset[str]] = {}
    for path, module in model.named_modules():
        if type(module) not in read:
            read[type(module)] = _weights_read_by(type(module))
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear):
                continue
            where, kind = f"{path}.{name}" if path else name, type(child)
            if kind not in computes:
                computes[kind] = _computes_product(child)
            if name in read[type(module)]:
                reasons[where] = f"{type(module).__name__} reads its weight itself, past an adapter"
            elif not computes[kind]:
                reasons[where] = f"the forward of {kind.__name__} is more than a linear product"
    return reasons


_READS_WEIGHT = re.compile(r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size|ndim)\b)")


def _weights_read_by(cls: type[nn.Module]) -> frozenset[str]:
    """Names of the modules whose weight the code of a model's class reads itself, as Mamba's kernels do.

    Such code would not notice an adapter, which adds its product to the module's output.
    """
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith(_MODEL_CODE)]
    methods = [method for owner in owners for name, method in vars(owner).items() if name != "__init__"]
    sources = (_source_of(method) for method in methods if inspect.isfunction(method))
    # BLOOM, and Llama's code of 2023 that others copied, read weights only if the config's pretraining_tp is above 1,
    # which repeats the rounding of the pretraining. No checkpoint is trained so.
    read = (_READS_WEIGHT.findall(source) for source in sources if "pretraining_tp" not in source)
    return frozenset(name for names in read for name in names)


def _source_of(method: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(method)
    except (OSError, TypeError):  # code without a file
        return ""


_MODEL_CODE = ("transformers.models.", "transformers_modules.")
"""Modules with the code of models. A linear class of another module stores its weight in another format."""


def _computes_product(layer: nn.Linear) -> bool:
    """Whether the forward of a linear module computes x Wᵀ + b. Routers return tuples, and some divide their weight."""
    cls = type(layer)
    if cls.forward is nn.Linear.forward or not cls.__module__.startswith(_MODEL_CODE):
        return True
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in layer.state_dict().items()}
    x_TC = torch.randn(3, layer.in_features, generator=draw)
    try:
        with torch.no_grad():
            y_TF = torch.func.functional_call(layer, tensors, x_TC)
        product = F.linear(x_TC, tensors["weight"], tensors.get("bias"))
        return y_TF.shape == product.shape and torch.allclose(y_TF, product, rtol=1e-3, atol=1e-3)
    except Exception:  # a forward with other arguments, shapes or results raises anything
        return False


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _nearest(modules: Mapping[str, nn.Module], target: str) -> str:
    names = sorted({path.rpartition(".")[2] for path, module in modules.items() if _is_adaptable(module)})
    near = difflib.get_close_matches(target, names, n=1)
    return f"the nearest is {near[0]}" if near else f"its modules are {', '.join(names[:12])}"


def expert_parameters(model: PreTrainedModel) -> Iterator[str]:
    """Paths of the parameters that hold all experts of a layer, (experts, ..., ...), in 4 bits too."""
    for path, module in model.named_modules():
        if "expert" in path.lower() and not isinstance(module, nn.Conv1d):
            yield from (f"{path}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim == 3)
            yield from (f"{path}.{name}" for name in names_in_4_bits(module))


def modules_to_save(model: PreTrainedModel, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Name -> paths of the modules of `lora.modules_to_save`, which PEFT finds by the end of their path.

    Raises:
        RecipeError: A name is that of no module.
    """
    modules = dict(model.named_modules())
    paths_of = {name: [path for path in modules if path and f".{path}".endswith(f".{name}")] for name in names}
    for name, paths in paths_of.items():
        if not paths:
            known = sorted(
                {path.rpartition(".")[2] for path in modules if path and not path.endswith(tuple("0123456789"))}
            )
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is {near[0]}" if near else f"its modules are {', '.join(known[:12])}"
            raise RecipeError(f"lora.modules_to_save: {name!r} names no module of this model; {hint}")
    return paths_of


def check(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Refuse adapters that PEFT cannot make, or that would not do what the recipe says.

    Args:
        model: The model, without data and not quantised.
        lora: The `lora` section of its recipe, with a rank.

    Raises:
        RecipeError: The message names the key.
    """
    adapted = targets_of(model, lora.targets)
    if not adapted.modules and not adapted.parameters:
        raise RecipeError(f"lora.targets: {', '.join(lora.targets)} names no module of this model; name its modules")
    modules = dict(model.named_modules())
    for name, paths in modules_to_save(model, lora.modules_to_save).items():
        both = next((path for path in paths if path in adapted.modules), None)
        if both is not None:
            raise RecipeError(
                f"lora.modules_to_save: {name!r} names {both}, which also gets an adapter; leave it out of "
                "lora.targets or of lora.modules_to_save"
            )
        if lora.quantize and any(_holds_4_bits(modules[path], model) for path in paths):
            raise RecipeError(
                f"lora.modules_to_save: {name!r} names linear modules that lora.quantize keeps in integers, which "
                "cannot be trained; leave it out, or set lora.quantize: false"
            )
    _check_init(modules, adapted, lora)
    owners = modules.items() if lora.bias == "all" else ((path, modules[path]) for path in adapted.modules)
    if lora.bias != "none" and not any(getattr(module, "bias", None) is not None for _, module in owners):
        where = "the model" if lora.bias == "all" else "lora.targets"
        raise RecipeError(f"lora.bias: {lora.bias}: no module of {where} has a bias; set lora.bias: none")


def _holds_4_bits(module: nn.Module, model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return any(isinstance(inner, nn.Linear) and inner is not head for inner in module.modules())


def _check_init(modules: Mapping[str, nn.Module], adapted: Targets, lora: LoraConfig) -> None:
    rank, init = lora.rank or 0, lora.init
    if init in ("default", "gaussian"):
        return
    others = [path for path in adapted.modules if not isinstance(modules[path], nn.Linear)]
    if adapted.parameters or (others and not (init.startswith("pissa") and _is_conv1d(modules[others[0]]))):
        other = adapted.parameters[0] if adapted.parameters else others[0]
        raise RecipeError(
            f"lora.init: {init}: PEFT has it for linear modules only, and {other} is none; use lora.init: default, or "
            "leave it out of lora.targets"
        )
    shapes = {path: modules[path].get_parameter("weight").shape for path in adapted.modules}
    smallest = min(shapes, key=lambda path: min(shapes[path]))
    size = min(shapes[smallest])
    if init.startswith(DIFFERENCE_INITS) and rank > size:
        raise RecipeError(
            f"lora.init: {init}: lora.rank is {rank}, but the weight of {smallest} has only {size} singular values; "
            f"set lora.rank to {size} or less"
        )
    if init == "orthogonal" and rank % 2:
        raise RecipeError(f"lora.init: orthogonal: lora.rank is {rank}, but must be even; set lora.rank: {rank + 1}")
