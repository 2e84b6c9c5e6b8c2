"""The request's part of a cache key."""

from __future__ import annotations

import re
from collections.abc import Hashable

from tigon.models.hybrid_layers import found_libraries
from tigon.planner.request import Request
from tigon.techniques.keys.settings import KEYS

_TRACED_OPTIONS = tuple(key for key, declared in KEYS.items() if declared["traced"])
# Python's default text of an object holds its address, which another process does not know.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class TraceKey:
    """Equal for two requests whose traces depend on equal values.

    checkpointing: used instead of the request's value for results that do not depend on it.
    """

    def __init__(self, request: Request, *, checkpointing: str | None = None) -> None:
        self.request = request
        changed = {} if checkpointing is None else {"train.checkpointing": checkpointing}
        chosen = request.settings.having(changed)
        settings = tuple(chosen.value(key) for key in _TRACED_OPTIONS)
        shape = (request.batch, request.seq, request.masked, request.adapters_fused, request.objective)
        config = request.config.to_json_string(use_diff=False)
        self._parts: Hashable = (request.model, config, shape, settings, found_libraries())

    def __hash__(self) -> int:
        return hash(self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceKey) and self._parts == other._parts

    @property
    def portable_text(self) -> str | None:
        """The key as text that is the same in every process.

        None if the text would hold an object's address, or if the model's or the objective's code is neither tigon's
        nor transformers', whose versions are known.
        """
        request, text = self.request, repr(self._parts)
        kinds = (type(request.objective).__module__, type(request.config).__module__)
        known = all(module.split(".")[0] in ("tigon", "transformers") for module in kinds)
        return text if known and not _ADDRESS.search(text) else None
