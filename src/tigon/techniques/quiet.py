"""Silence of the techniques' packages, whose loggers warn on import of what a run never uses."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes")  # the second about the first's classes


def quiet_packages() -> None:
    """Before any of them is imported, which transformers does."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
