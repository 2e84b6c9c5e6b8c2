from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models_helpers import FITS_FROM, too_old


@pytest.fixture(autouse=True)
def fitting_release(request: pytest.FixtureRequest) -> None:
    """Skip the case of a family whose code in the installed transformers is older than its row.

    `test_families.py::test_family_older_than_its_row_is_refused_or_trains_as_unpatched` has these.
    """
    case = getattr(request.node, "callspec", None)
    for value in case.params.values() if case is not None else ():
        if isinstance(value, str) and value in FITS_FROM and too_old(FITS_FROM[value]):
            pytest.skip(f"the row of {value} fits transformers {FITS_FROM[value]} and newer")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are taken in one order, so two runs of a model compare to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
