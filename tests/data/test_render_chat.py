"""A chat template gets a limited time, and its failures are one line."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from tigon.data.chat import render_chat as module
from tigon.data.chat.render_chat import render_chat
from tigon.errors import UsageError

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def test_a_template_that_ends_gives_its_text(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    assert render_chat(tokenizer, MESSAGES, add_generation_prompt=True) == "hello!"


def test_a_template_that_never_ends_is_stopped_and_leaves_no_alarm(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    tokenizer.chat_template, before = ENDLESS, signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(UsageError, match=r"has not ended after 0\.1 s"):
        render_chat(tokenizer, MESSAGES)
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_template_is_rendered_in_another_thread(tokenizer: Any) -> None:
    """Signals reach the main thread alone."""
    tokenizer.chat_template, texts = "{{ messages[0].content }}", list[str]()
    thread = threading.Thread(target=lambda: texts.append(render_chat(tokenizer, MESSAGES)))
    thread.start()
    thread.join()
    assert texts == ["hello"]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ a.b.c }}"])
def test_a_template_that_fails_is_a_usage_error(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="the chat template fails: "):
        render_chat(tokenizer, MESSAGES)
