"""Silences packages whose loggers warn, on import, about features that a run never uses."""

from __future__ import annotations

import logging

_LOGGERS = (
    "torchao",
    "torch.utils._pytree",  # about torchao's classes
    "bitsandbytes",
    "kernels",  # about hub kernels that bitsandbytes asks for on a CPU
)


def _is_not_cpu_note(record: logging.LogRecord) -> bool:
    """False for DeepSpeed's note that it runs on the CPU. tigon prints the device itself."""
    return "Setting accelerator to CPU" not in record.getMessage()


def quiet_packages() -> None:
    """Call this before transformers is imported, because transformers imports these packages."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # A filter, because DeepSpeed sets its logger's level when it is imported.
    logging.getLogger("DeepSpeed").addFilter(_is_not_cpu_note)
