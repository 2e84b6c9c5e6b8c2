"""Silences libraries: their loggers, progress bars, advice, and log lines of PyTorch's C++ code."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

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


def quiet_loading() -> None:
    """Drop the progress bars and the advice that transformers prints while it loads a model.

    Raises ImportError if transformers finds wrong versions of its dependencies.
    """
    quiet_packages()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")  # addressed to PEFT's authors
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence PEFT's warnings about its own calls, and about cases that tigon handles.

    Merging unties tied weights. Adapters that change the frozen weights are converted when they are saved. A checkpoint
    may hold the weight of an adapted head too.
    """
    with warnings.catch_warnings():
        for message in (
            "`is_gradient_checkpointing`",
            ".*fan_in_fan_out",
            "Model has `tie_word_embeddings=True`",
            "(PiSSA|OLoRA) changes the base weights",
            "Setting `save_embedding_layers`",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextlib.contextmanager
def library_log_lines_dropped() -> Iterator[None]:
    """Drop C++ log lines that the profiler and the CPU allocator write to file descriptor 2.

    They log when profiling starts and ends, and for memory older than the profiling. Their log levels cannot be changed
    here, because they are read when torch is imported. Python's own output to stderr still arrives.
    """
    python = sys.stderr
    python.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    ours = os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        if getattr(python, "fileno", None) is not None and _is_descriptor_2(python):
            sys.stderr = ours
        yield
    finally:
        sys.stderr = python
        ours.close()
        os.dup2(kept, 2)
        os.close(kept)


def _is_descriptor_2(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 2)
    except (OSError, ValueError):  # a stream that a test or a notebook has put in its place
        return False
