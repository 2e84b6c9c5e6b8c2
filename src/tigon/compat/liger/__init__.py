"""Liger Kernel's API, implemented with tigon's ops; see docs/liger.md.

from tigon.compat.liger import apply_liger_kernel_to_llama, LigerRMSNorm    # names of liger_kernel.transformers
tigon.compat.liger.install()                                               # `import liger_kernel` then uses tigon
python -m tigon.compat.liger script.py [args]                              # runs an unmodified script with tigon

The folders mirror Liger's packages:

    liger_kernel.ops             ops/            Functions, launchers, and the losses that they share with the modules
    liger_kernel.transformers    transformers/   modules and functional
                                 patching/       monkey_patch, auto_model, trainer_integration
    liger_kernel.chunked_loss    chunked_loss/   preference, policy and distillation losses of heads
    liger_kernel.functional      functional.py
    liger_kernel.utils           utils.py
    ops without a kernel here    compositions/   Functions, functional and modules, from PyTorch's and tigon's ops

`offered.py` lists every name with its file, `absent.py` lists the names that tigon lacks with the reason, and
`aliases.py` lets `import liger_kernel` find them. Another package of Liger becomes a folder of its name and rows of
`offered.py`.
"""

from __future__ import annotations

from typing import Any

from tigon.compat.liger.aliases import install, uninstall
from tigon.compat.liger.errors import FlagConflict, NotInTigon, missing
from tigon.compat.liger.offered import OFFERED, resolve
from tigon.compat.liger.ops.losses import set_loss_dtype
from tigon.compat.liger.patching.hooks import ConstructionHook, remove_hooks

__all__ = ["ConstructionHook", "FlagConflict", "NotInTigon", "install", "remove_hooks", "set_loss_dtype", "uninstall"]
_LIGERS = OFFERED["liger_kernel.transformers"] | OFFERED["liger_kernel.transformers.monkey_patch"]
__all__ += sorted(_LIGERS)


def __getattr__(name: str) -> Any:
    """Import names of `liger_kernel.transformers` on first use, because some of them import transformers."""
    if name in _LIGERS:
        return resolve(_LIGERS[name], name)
    raise AttributeError(missing(f"liger_kernel.transformers.{name}"))
