"""Silences packages whose loggers warn, on import, about features that a run never uses."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes", "kernels")
# _pytree warns about torchao's classes; kernels, about the hub kernels that bitsandbytes asks for on a CPU


def _is_needed(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's note that this machine has no GPU, which tigon's own output says."""
    return "Setting accelerator to CPU" not in record.getMessage()


def quiet_packages() -> None:
    """Call this before transformers is imported, because transformers imports these packages."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, because DeepSpeed sets its logger's level when it is imported.
    logging.getLogger("DeepSpeed").addFilter(_is_needed)
