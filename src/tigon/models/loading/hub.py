"""The network: left alone unless a hub id is asked for, and then tried once, where huggingface_hub would wait through
six tries before it says that there is none."""

from __future__ import annotations

import errno
import os
import socket
import urllib.request
from collections.abc import Iterable

from tigon.models.loading.config import is_hub_id

TIMEOUT_S = 5
UNREACHABLE = (socket.gaierror, TimeoutError, ConnectionError)
NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH)


def settle(names: Iterable[str]) -> None:
    """Decide on HF_HUB_OFFLINE, unless the user has: 1 unless one of `names` is a hub id and the hub answers. What was
    downloaded before is found either way. Call it before transformers is imported, which reads it then."""
    if "HF_HUB_OFFLINE" not in os.environ and not (any(map(is_hub_id, names)) and answers()):
        os.environ["HF_HUB_OFFLINE"] = "1"


def answers() -> bool:
    """Whether there is a way to the hub; what it says is huggingface_hub's to judge, and so are certificates."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S).close()
    except Exception as error:
        reason = getattr(error, "reason", error)
        return not (isinstance(reason, UNREACHABLE) or getattr(reason, "errno", None) in NO_ROUTE)
    return True
