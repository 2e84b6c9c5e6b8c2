"""Liger Kernel's API, implemented with tigon's ops; see docs/liger.md.

from tigon.compat.liger import apply_liger_kernel_to_llama, LigerRMSNorm    # names of liger_kernel.transformers
tigon.compat.liger.install()                                               # `import liger_kernel` then uses tigon
python -m tigon.compat.liger script.py [args]                              # runs an unmodified script with tigon

    offered.py          every name that tigon offers, with the file that has it
    absent.py           the names that tigon refuses, with the reason or with what to use instead
    import_hook.py      `install` and `uninstall`: `import liger_kernel` finds the names
    __main__.py         runs a script with tigon
    rows.py             makes functions and modules from lines of Liger's parameters
    errors.py           errors that are tigon's and also of the type that Liger raises
    loss_dtype.py       the dtype of the losses

    layers.py           norms, gated units, rotary embeddings and experts
    modules.py          norms, MLPs and experts as modules
    losses/             cross entropies, divergences, preference losses, KTO and GRPO
    utils.py            `liger_kernel.utils`
    patching/           `apply_liger_kernel_to_*`, the Auto class, and what Trainer calls
"""

from __future__ import annotations

from typing import Any

from tigon.compat.liger.errors import FlagConflict, NotInTigon, missing
from tigon.compat.liger.import_hook import install, uninstall
from tigon.compat.liger.loss_dtype import set_loss_dtype
from tigon.compat.liger.offered import OFFERED, resolve
from tigon.compat.liger.patching.hooks import ConstructionHook, remove_hooks

__all__ = ["ConstructionHook", "FlagConflict", "NotInTigon", "install", "remove_hooks", "set_loss_dtype", "uninstall"]
_LIGERS = (
    OFFERED["liger_kernel.chunked_loss"]
    | OFFERED["liger_kernel.transformers"]
    | OFFERED["liger_kernel.transformers.monkey_patch"]
)
__all__ += sorted(_LIGERS)


def __getattr__(name: str) -> Any:
    """Import names of `transformers` and `chunked_loss` on first use, because some of them import transformers."""
    if name in _LIGERS:
        return resolve(_LIGERS[name], name)
    raise AttributeError(missing(f"liger_kernel.transformers.{name}"))
