"""Reads data sets of the Hugging Face hub by id, through the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tigon.data.sources import Source
from tigon.errors import DataError

DEFAULT_SPLIT = "train"


def read_rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """(data set, split and number, row) of every row in the split.

    Raises:
        DataError: The data set cannot be loaded; the message says what to do.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    split = source.split or DEFAULT_SPLIT
    number = 0
    try:
        rows = datasets.load_dataset(
            source.name, source.subset, split=split, revision=source.revision, streaming=source.streaming
        )
        for row in with_stored_images(rows):
            number += 1
            yield f"{source.name}/{split}:{number}", row
    except DataError:
        raise
    except Exception as error:  # the package raises a dozen kinds, builtin ones among them
        raise DataError(_message(source, split, error)) from None


def with_stored_images(rows: Any) -> Any:
    """The rows with images as the bytes of their files. Decoded, each would hold all of its pixels in memory."""
    import datasets

    stored = datasets.Image(decode=False)
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, stored)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):  # a list of images
            rows = rows.cast_column(name, type(feature)(stored))
    return rows


def _message(source: Source, split: str, error: Exception) -> str:
    name, reason = source.name, " ".join(str(error).split())[:200]
    if _is_offline(error):
        return (
            f"{name}: neither a local path nor downloaded before, and the hub cannot be reached; check the name, or "
            f"run `hf download --repo-type dataset {name} --local-dir DIR` where there is a network and name its files"
        )
    if type(error).__name__ in ("DatasetNotFoundError", "RepositoryNotFoundError", "GatedRepoError"):
        return (
            f"{name}: neither a local path nor a data set of the hub that you may read; check the name, or log in with "
            "`hf auth login`"
        )
    if "Config name is missing" in reason or "BuilderConfig" in reason:
        return f"{name}: set data.subset to one of its subsets: {reason}"
    if "split" in reason.lower():
        return f"{name}: data.split is {split!r}: {reason}"
    return f"{name}: the data set cannot be read: {type(error).__name__}: {reason}"


def _is_offline(error: BaseException | None) -> bool:
    """Whether the network was missing, by the error or one that it came from."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or "Offline" in type(error).__name__:
            return True
        if type(error).__name__ in ("ConnectError", "LocalEntryNotFoundError"):
            return True
        error = error.__cause__ or error.__context__
    return False
