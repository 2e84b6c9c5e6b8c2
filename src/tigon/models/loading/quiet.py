"""Silences transformers while it loads a model."""

from __future__ import annotations

import warnings

from tigon._quiet import quiet_packages


def quiet_loading() -> None:
    """Drop the progress bars and the advice that transformers prints while it loads a model.

    Raises ImportError if transformers finds wrong versions of its dependencies.
    """
    quiet_packages()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")  # addressed to PEFT's authors
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
