"""`install` makes `import liger_kernel` resolve to tigon with a finder on `sys.meta_path`; `uninstall` removes it.

The finder also answers `importlib.metadata`, so that checks for the distribution "liger-kernel" succeed. Its version is
Liger's followed by "+tigon". A missing name fails when it is used, with its name in the message: an attribute raises
AttributeError (so that `hasattr` is False), `from ... import` and `import` raise ImportError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tigon.compat.liger.errors import NotInTigon, missing
from tigon.compat.liger.offered import OFFERED, VERSION, resolve
from tigon.errors import UsageError

PACKAGE = "liger_kernel"
_INSTALLED_VERSION = f"{VERSION}+tigon"


class _Distribution(Distribution):
    """The distribution "liger-kernel" for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        metadata = Message()
        metadata["Metadata-Version"], metadata["Name"], metadata["Version"] = "2.1", "liger-kernel", _INSTALLED_VERSION
        return str(metadata)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(DistributionFinder, Loader):
    """Finds and makes the modules of `OFFERED`, and refuses everything else under `liger_kernel`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != PACKAGE:
            return None
        if fullname not in OFFERED:
            # Also reached by `from liger_kernel.x import Name`, because Python looks for a submodule of that name. If
            # `name` were set on this error, Python would replace it by an error that says less.
            raise NotInTigon(missing(fullname))
        # Every module is a package, because Python looks for submodules only in packages.
        return ModuleSpec(fullname, self, origin=__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, names = module.__name__, OFFERED[module.__name__]

        def __getattr__(attribute: str) -> Any:
            if attribute not in names:
                raise AttributeError(missing(f"{name}.{attribute}"))
            value = resolve(names[attribute], attribute)
            setattr(module, attribute, value)
            return value

        module.__file__ = __file__
        module.__doc__ = f"{name}, implemented by tigon.compat.liger."
        vars(module).update(__getattr__=__getattr__, __all__=list(names), __version__=_INSTALLED_VERSION)
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *names})

    def find_distributions(self, context: object = None) -> Iterator[Distribution]:
        wanted_name = getattr(context, "name", None)
        if wanted_name is not None and wanted_name.lower().replace("_", "-") == "liger-kernel":
            yield _Distribution()


_FINDER = _Finder()


def install() -> None:
    """Make `import liger_kernel` use tigon in this process, until `uninstall`. A second call does nothing.

    Call it before anything imports liger_kernel or checks for it. transformers' cached check is cleared.

    Raises:
        UsageError: the real liger_kernel is imported already.
    """
    if _FINDER in sys.meta_path:
        return
    real = sys.modules.get(PACKAGE)
    if real is not None:
        raise UsageError(
            f"liger_kernel is imported already, from {getattr(real, '__file__', None)}. Call "
            "tigon.compat.liger.install() before the code that imports it; nothing was changed."
        )
    sys.meta_path.insert(0, _FINDER)
    _clear_availability_cache()


def uninstall() -> None:
    """Undo `install`: `import liger_kernel` finds the real package again, if it is installed.

    Names that were imported before keep working. Construction hooks and patched models stay; see `remove_hooks` and
    `tigon.models.unpatch`.
    """
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "loader", None) is _FINDER:
            del sys.modules[name]
    _clear_availability_cache()


def _clear_availability_cache() -> None:
    """Clear the cached result of transformers' `is_liger_kernel_available`."""
    importlib.invalidate_caches()
    checks = sys.modules.get("transformers.utils.import_utils")
    check: Any = getattr(checks, "is_liger_kernel_available", None)
    forget: Callable[[], None] | None = getattr(check, "cache_clear", None)
    if forget is not None:
        forget()
