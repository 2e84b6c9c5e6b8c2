"""Liger's names over tigon's parts; see docs/liger.md.

from tigon.compat.liger import apply_liger_kernel_to_llama, LigerRMSNorm    # what liger_kernel.transformers has
tigon.compat.liger.install()                                               # import liger_kernel means tigon
python -m tigon.compat.liger script.py [args]                              # the same for an unmodified script
"""

from __future__ import annotations

from typing import Any

from tigon.compat.liger.aliases import install, uninstall
from tigon.compat.liger.errors import FlagConflict, NotInTigon, missing
from tigon.compat.liger.hooks import ConstructionHook, remove_hooks
from tigon.compat.liger.losses import set_loss_dtype
from tigon.compat.liger.offered import OFFERED, resolve

__all__ = ["ConstructionHook", "FlagConflict", "NotInTigon", "install", "remove_hooks", "set_loss_dtype", "uninstall"]
_LIGERS = OFFERED["liger_kernel.transformers"] | OFFERED["liger_kernel.transformers.monkey_patch"]
__all__ += sorted(_LIGERS)


def __getattr__(name: str) -> Any:
    """Names of `liger_kernel.transformers`, when first asked for: some of them import transformers."""
    if name in _LIGERS:
        return resolve(_LIGERS[name], name)
    raise AttributeError(missing(f"liger_kernel.transformers.{name}"))
