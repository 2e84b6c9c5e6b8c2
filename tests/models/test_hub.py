"""Whether the hub is asked: once, and not where nobody needs it."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import urllib.error
import urllib.request
from email.message import Message

import pytest

from tigon.models.loading import hub

GONE = OSError(errno.ENETUNREACH, "Network is unreachable")
ANSWERS = {
    "no name service": (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), "1"),
    "no route": (urllib.error.URLError(GONE), "1"),
    "nobody at the port": (urllib.error.URLError(ConnectionRefusedError()), "1"),
    "silence": (TimeoutError(), "1"),
    "an answer that is no page": (urllib.error.HTTPError("https://hub", 403, "Forbidden", Message(), None), None),
    "a certificate that only the hub's client knows": (urllib.error.URLError(ssl.SSLCertVerificationError()), None),
}


@pytest.mark.parametrize(("error", "offline"), ANSWERS.values(), ids=ANSWERS)
def test_only_a_hub_that_does_not_answer_turns_offline_mode_on(monkeypatch, error, offline):
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url, request.method, timeout))
        raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that what is set here is taken back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "https://hub")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    hub.set_offline_mode(("tigon-demo", "owner/model"))
    assert (os.environ.get("HF_HUB_OFFLINE"), asked) == (offline, [("https://hub", "HEAD", hub.TIMEOUT_S)])


@pytest.mark.parametrize(("said", "names"), [("0", ("owner/model",)), ("1", ("owner/model",)), (None, ("tigon-demo",))])
def test_hub_is_not_contacted_if_the_user_has_decided_or_no_name_needs_it(monkeypatch, said, names):
    monkeypatch.setenv("HF_HUB_OFFLINE", said or "")
    if said is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: pytest.fail("the network was used"))
    hub.set_offline_mode(names)
    assert os.environ["HF_HUB_OFFLINE"] == (said or "1")
