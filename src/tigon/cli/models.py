"""`tigon models`: the table of families, on a terminal, as JSON, or into docs/models.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tigon.errors import OptionError
from tigon.models.verification import listing


def models(
    names: Sequence[str] = (),
    *,
    as_json: bool = False,
    verified: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    into: Path | None = None,
    others: bool = False,
) -> bool:
    """Print the table, or put it into a document; False where a family differs from the unpatched one.

    Raises OptionError: a family without a row, an unknown device or dtype, a document without markers, or options that
    exclude each other.
    """
    if into is not None and (as_json or verified or names):
        raise OptionError("--into writes the whole table; leave the families, --json and --verify out.")
    if (device or dtype) and not (verified or as_json):
        raise OptionError("--device and --dtype say how to prove a row; add --verify or --json.")
    if others and into is None:
        raise OptionError("--others takes minutes and belongs to --into; name a document.")
    _silence_transformers()
    if into is not None:
        _write(into, others)
        return True
    families = listing.families(names, verified=verified or as_json, device=device or "cpu", dtype=dtype or "fp32")
    listed = []
    if as_json:
        listed = list(families)
        print(listing.json_text(listed))
    else:
        print(listing.HEADING)
        for family in families:
            listed.append(family)
            print("\n".join(listing.text_lines(family)), flush=True)
    return all(family.verification is None or family.verification.passed for family in listed)


def _silence_transformers() -> None:
    """Its advice on configs is about real models, not about those of two layers."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def _write(into: Path, others: bool) -> None:
    try:
        document = into.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--into {into}: {error.strerror}.") from None
    document = listing.put_between_markers(document, "rows", listing.rows_markdown())
    if others:
        document = listing.put_between_markers(document, "others", listing.survey_markdown())
    into.write_text(document, encoding="utf-8")
