"""A plan without child processes, whose traces other tests of the module use again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tigon.planner.search import pool


@pytest.fixture(scope="module")
def in_one_process() -> Iterator[None]:
    """A child saves time on a free core, but its traces end with it. Other tests run plans with children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_can_fork", lambda: False)
        yield
