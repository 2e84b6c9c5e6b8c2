"""Renders messages with a tokenizer's chat template. A template comes with a model, so it may be wrong or never end.

transformers runs templates in Jinja's sandbox, which limits what they reach but not their time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tigon.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 10  # templates of published models take milliseconds


class EndlessTemplate(UsageError):
    """A chat template that has not ended in time. Another row or form of the messages would take as long."""


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: object) -> str:
    """The messages as text.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        messages: The messages, as mappings with `role` and `content`.
        options: More options of `apply_chat_template`, such as `add_generation_prompt`.

    Raises:
        EndlessTemplate: The template takes longer than `LIMIT_S`.
        UsageError: The template cannot be parsed, or refuses the messages.
    """
    try:
        with _limited_time():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TimeoutError:
        raise EndlessTemplate(
            f"the chat template has not ended after {LIMIT_S} s; correct chat_template.jinja"
        ) from None
    except Exception as error:  # a template can raise any type of error
        raise UsageError(f"the chat template fails: {' '.join(str(error).split())[:200]}") from None


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TimeoutError in the block after `LIMIT_S` of this process's CPU time.

    A process that is stopped for a while, or waits for others, does not use it up. Without limit outside the main
    thread, and on Windows.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
