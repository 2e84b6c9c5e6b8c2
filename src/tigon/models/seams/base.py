"""Replaces the forward of one module of one model, and restores it.

A patched module keeps its identity, parameters, hooks and attributes. Only its `__class__` changes, to a generated
subclass of its class. `torch.distributed.fsdp.fully_shard` adds its methods in the same way. transformers and torch are
not modified and no attribute is left on the instance, so undoing is one assignment.

Most patchers set `module.forward` on the instance instead. This was rejected for three reasons:

- pickle rebuilds a bound method by name, so an unpickled model is silently unpatched;
- `torch.nn.DataParallel` copies `__dict__`, so every replica runs the original's forward;
- accelerate and PEFT set their own `forward` on the instance.

The subclass has two costs: `type(module) is LlamaRMSNorm` becomes False (`isinstance` stays True), and unpickling needs
tigon installed.

The subclass has its base's `__name__`, `__qualname__` and `__module__`, because other code reads them: transformers
keys output capturing by `str(cls)`, accelerate finds the blocks to wrap by class name, and `save_pretrained` writes the
name into config.json.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils import parametrize

from tigon.errors import PatchError


class Seam(ABC):
    """One kind of replacement: which modules it applies to, objections to a module, and the new methods.

    Seams are frozen dataclasses, hence hashable (one generated class per base class and seam) and picklable (a pickled
    model names the base class and the seam, and rebuilds the generated class from them).
    """

    op: ClassVar[str]
    """The op of `tigon.ops` that does the work."""
    flag: ClassVar[str]
    """The keyword of `tigon.patch` that switches the seam on and off."""
    reported: ClassVar[bool] = True
    """Whether reports name the replacement. False if it has no op and no flag of its own."""

    @abstractmethod
    def candidate(self, module: nn.Module) -> bool:
        """Whether the module is of the kind that this seam replaces, judged by structure alone."""

    def claims(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Path and module of every candidate in a model."""
        return [(path, module) for path, module in model.named_modules() if self.candidate(module)]

    @abstractmethod
    def objection(self, module: nn.Module) -> str | None:
        """Why this candidate must stay unchanged, or None. Compares results on a tiny stand-in, not on the weights."""

    def goes_around(self, module: nn.Module) -> bool:
        """Whether the seam replaces a forward that is set on the instance; its class then has `_tigon_around`."""
        return False

    def code(self, module: nn.Module) -> Callable[..., Any]:
        """The function that the op would replace; it shows which package's code the module runs."""
        return vars(module).get("forward", type(module).forward)  # type: ignore[no-any-return]

    def op_for(self, module: nn.Module) -> str:
        """The op that this module gets, for the report."""
        return self.op

    def ops_for(self, module: nn.Module) -> tuple[str, ...]:
        """All ops that this module gets, for the report."""
        return (self.op_for(module),)

    @abstractmethod
    def namespace(self, base: type[nn.Module]) -> dict[str, Any]:
        """The attributes of the generated subclass of `base`."""


class PatchedModule(nn.Module):
    """First base of every generated class."""

    _tigon_base: ClassVar[type[nn.Module]]
    _tigon_seam: ClassVar[Any]  # a Seam; Any, because transformers resolves the annotations of its subclasses

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle would look the generated class up by its base's name, find the base, and refuse. Deepcopy uses this
        # method too.
        reduced: tuple[Any, ...] = super().__reduce_ex__(max(2, protocol))  # type: ignore[assignment]
        base: type[Any] = self._tigon_base
        seams = [self._tigon_seam]
        while "_tigon_seam" in vars(base):  # a generated class below this one has its base's name too
            base, seams = base._tigon_base, [base._tigon_seam, *seams]
        return (_new_patched, (base, *seams), *reduced[2:])


def own_flag(module: nn.Module) -> str | None:
    """The flag of `patch` whose op this module runs by itself, as those of tigon.nn do; None for any other module."""
    flag: str | None = getattr(type(module), "tigon_flag", None)
    return flag


def _new_patched(base: type[nn.Module], *seams: Seam) -> nn.Module:
    """Rebuild a pickled module's class. `seams` lists the lowest class's seam first."""
    cls = functools.reduce(patched_class, seams, base)
    return cls.__new__(cls)


def patched_class(base: type[nn.Module], seam: Seam) -> type[PatchedModule]:
    """The subclass of `base` with the seam's methods; the same class for the same pair.

    torch gives each parametrized module a class of its own, whose properties hold the module. A cache of such classes
    would keep every model's weights, so these classes carry their own.
    """
    if not is_parametrized_class(base):
        return _cached_class(base, seam)  # type: ignore[arg-type]  # typeshed asks for hashable instances
    if _CACHE not in vars(base):
        setattr(base, _CACHE, {})
    made: dict[Seam, type[PatchedModule]] = vars(base)[_CACHE]
    if seam not in made:
        made[seam] = _patched_class(base, seam)
    return made[seam]


_CACHE = "_tigon_patched_classes"


def is_parametrized_class(cls: type) -> bool:
    """Whether torch or tigon made the class for one parametrized module (torch.nn.utils.parametrize)."""
    return any(c.__name__.startswith("Parametrized") and c.__module__ == parametrize.__name__ for c in cls.__mro__)


def _patched_class(base: type[nn.Module], seam: Seam) -> type[PatchedModule]:
    identity = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    methods = seam.namespace(base)
    bases = (base,) if issubclass(base, PatchedModule) else (PatchedModule, base)  # a second seam subclasses the first
    return type(base.__name__, bases, {**identity, **methods, "_tigon_base": base, "_tigon_seam": seam})


_cached_class = functools.cache(_patched_class)


def seams_of(module: nn.Module) -> list[Any]:
    """The seams of a module, the last one first. FSDP2 may have put a class of its own above theirs."""
    return [vars(cls)["_tigon_seam"] for cls in type(module).__mro__ if "_tigon_seam" in vars(cls)]


class Around:
    """A forward on the instance that calls the class's `_tigon_around(inner, ...)` with the forward it replaces."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        self.module, self.inner = module, inner

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.module._tigon_around(self.inner, *args, **kwargs)  # type: ignore[operator]


def imitate(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Give `replacement` the name, docstring and signature of `original`.

    Trainer and generate read the signature of `forward`. `functools.wraps` is not used, because accelerate's
    `unwrap_model` follows `__wrapped__` to the innermost function and would remove the patch.
    """
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(replacement, name, getattr(original, name))
    vars(replacement)["__signature__"] = inspect.signature(original)


@dataclass(frozen=True)
class Change:
    """One module whose class was changed, or will be."""

    path: str
    module: nn.Module
    seam: Seam

    def apply(self) -> None:
        _set_class(self.module, patched_class(type(self.module), self.seam))

    def blocked(self, later: tuple[Seam, ...] = ()) -> str | None:
        """Why `revert` is impossible now, or None. later: seams of this module that are reverted before, last first."""
        if not isinstance(self.module, PatchedModule):
            return None
        cls = type(self.module)
        for seam in later:
            if vars(cls).get("_tigon_seam") == seam:
                cls = cls._tigon_base  # type: ignore[assignment]
        if cls is patched_class(cls._tigon_base, cls._tigon_seam):
            if cls._tigon_seam == self.seam:
                return None
            return f"{self.path or 'the model'} was patched again by tigon; undo the later patch first"
        return f"{self.path or 'the model'} was wrapped after the patch (its class is now {cls.__name__})"

    def revert(self) -> None:
        if isinstance(self.module, PatchedModule):
            _set_class(self.module, self.module._tigon_base)


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor; tigon's operators lack sharding rules."""
    return type(value).__name__ == "DTensor"


def instance_objection(module: nn.Module) -> str | None:
    """Why a new class would not take effect on this module, or None."""
    if "forward" not in vars(module) or _hooked_by_accelerate(module):
        return None
    return "its forward is overridden on the instance; patch the model before whatever overrides it"


def runs_more_than_its_class(module: nn.Module) -> bool:
    """Whether a call of this module without parameters runs a hook or a forward that somebody has set on it.

    DeepSpeed's ZeRO-3 puts hooks on every module. They gather parameters, of which such a module has none.
    """
    return any(package_of(hook) != "deepspeed" for hook in hooks_of(module)) or instance_objection(module) is not None


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks of a module that its call runs."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for kind in kinds for hook in getattr(module, kind).values()]


_ANYBODYS = frozenset({"torch", "transformers", "transformers_modules", "tigon", "accelerate", "__main__", "functools"})


def package_of(code: object) -> str:
    """The top-level package of a function, a method or a partial of one; "" if unknown."""
    code = getattr(code, "func", code)
    return str(getattr(getattr(code, "__func__", code), "__module__", None) or "").partition(".")[0]


def vendor(code: object, home: str) -> str | None:
    """The package that replaced the model's code by its own, or None.

    home: the package of the model's class. Its code is never a replacement.
    """
    package = package_of(code)
    return package if package and package not in _ANYBODYS and package != home else None


def replaced_by_package_reason(package: str, module: nn.Module) -> str:
    """Why a module that another package has replaced is left alone, and what to do."""
    where = "set on the instance" if "forward" in vars(module) else type(module).__name__
    return f"it runs {package}'s code already ({where}); load the model without {package}'s patch to have tigon's ops"


def _hooked_by_accelerate(module: nn.Module) -> bool:
    """Whether accelerate's device-map hook holds the class's forward in `_old_forward`, which can be replaced."""
    inner = vars(module).get("_old_forward")
    return isinstance(inner, MethodType) and inner.__func__ is getattr(type(module), "forward", None)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    hooked = _hooked_by_accelerate(module)
    try:
        module.__class__ = cls
    except TypeError as error:
        raise PatchError(f"{type(module).__name__} cannot change its class: {error}. Nothing was changed.") from error
    if hooked:
        vars(module)["_old_forward"] = MethodType(cls.forward, module)
    forward = vars(module).get("forward")
    if isinstance(forward, Around):
        vars(module)["forward"] = forward = forward.inner
    seam = getattr(cls, "_tigon_seam", None)
    if forward is not None and seam is not None and seam.goes_around(module):
        vars(module)["forward"] = Around(module, forward)
