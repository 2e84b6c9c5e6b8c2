"""Sets HF_HUB_OFFLINE. The network is used only for a hub id, with a single request.

Without this, huggingface_hub makes six attempts before it reports that the network is unreachable.
"""

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


def set_offline_mode(names: Iterable[str], *, needed: bool = False) -> None:
    """Set HF_HUB_OFFLINE=1, unless the user has set it or the hub is needed and answers.

    It is needed if one of `names` is a hub id, or if `needed` says so.

    Files that were downloaded before are found in either mode. Call this before importing transformers, which reads the
    variable at import.
    """
    if "HF_HUB_OFFLINE" not in os.environ and not ((needed or any(map(is_hub_id, names))) and hub_is_reachable()):
        os.environ["HF_HUB_OFFLINE"] = "1"


def hub_is_reachable() -> bool:
    """Whether the hub can be reached; huggingface_hub handles its answer and certificate errors."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S).close()
    except Exception as error:
        reason = getattr(error, "reason", error)
        return not (isinstance(reason, UNREACHABLE) or getattr(reason, "errno", None) in NO_ROUTE)
    return True
