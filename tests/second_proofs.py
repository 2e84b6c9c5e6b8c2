"""Marks the tests that prove a second time what another test proves: `make test` leaves them out.

`pytest` without options and `make test-all` run every test. The marker names the reason:

    @pytest.mark.second_proof("the other precision takes the same path")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

MARKER = "second_proof"
DIFFERENT = ("llama", "gemma2", "glm4", "cohere", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "falcon_h1", "llava")
"""Model families that together have every kind of seam: RMSNorm and LayerNorm, gated, packed and expert MLPs, every
rope, capped and scaled heads."""
COLLECTED = pytest.StashKey[tuple[int, int]]()
"""The numbers of first and second proofs that were collected."""


def proved_by(
    first: Callable[[Any], bool] | Iterable[Any], values: Iterable[Any], why: str, ids: Callable[[Any], str] = str
) -> list[Any]:
    """Parameters of a test, of which those in `first` prove the behaviour and the others repeat the proof.

    Args:
        first: The values that `make test` runs, or a function that says whether it runs a value.
        values: All values of the parameter.
        why: The reason why `first` covers the behaviour.
        ids: Makes the id of a value.
    """
    chosen = first if callable(first) else list(first).__contains__
    values = list(values)
    assert any(map(chosen, values)) and not all(map(chosen, values)), "nothing is left out, or nothing is left"
    second = pytest.mark.second_proof(why)
    return [pytest.param(value, id=ids(value), marks=() if chosen(value) else second) for value in values]


def one_of_each(values: Iterable[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """The first value of each kind."""
    chosen: dict[Any, Any] = {}
    for value in values:
        chosen.setdefault(kind(value), value)
    return list(chosen.values())


def check_and_count(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the collected tests in `config.stash[COLLECTED]`.

    Raises:
        pytest.UsageError: A marker has no reason.
    """
    second = 0
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker is not None and not (len(marker.args) == 1 and isinstance(marker.args[0], str)):
            raise pytest.UsageError(f"{item.nodeid}: second_proof takes the reason, as text")
        second += marker is not None
    config.stash[COLLECTED] = (len(items) - second, second)
