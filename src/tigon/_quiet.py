"""Silences packages whose loggers warn, on import, about features that a run never uses."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes")  # _pytree warns about torchao's classes


def quiet_packages() -> None:
    """Call this before transformers is imported, because transformers imports these packages."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
