"""`tigon models`: print what tigon does with each model family, as text or JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from tigon.cli.shared import Command
from tigon.errors import OptionError
from tigon.models.verification import listing


def command(
    families: Annotated[list[str] | None, typer.Argument(metavar="[FAMILY...]", help="Only these families.")] = None,
    verified: Annotated[bool, typer.Option("--verify", help="Verify each family on a small random model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the verification of each family.")] = False,
    device: Annotated[str | None, typer.Option(help="Device for --verify: cpu (default) or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype for --verify: fp32 (default) or bf16.")] = None,
    trained: Annotated[
        bool, typer.Option("--train", help="Train a small model of each family for a step; ten minutes for all.")
    ] = False,
) -> None:
    """Show what tigon patches in each family, what it leaves and why; exit code 1 if one differs or is refused."""
    if trained:
        if as_json or verified or device or dtype:
            raise OptionError("--train goes with families alone; leave out the other options.")
        train(families or ())
        return
    same = models(families or (), as_json=as_json, verified=verified, device=device, dtype=dtype)
    raise typer.Exit(0 if same else 1)


def models(
    names: Sequence[str] = (),
    *,
    as_json: bool = False,
    verified: bool = False,
    device: str | None = None,
    dtype: str | None = None,
) -> bool:
    """Print the table. Returns False if a family is refused, or differs when patched.

    Raises:
        OptionError: A family has no row, a device or dtype is unknown, or options exclude each other.
    """
    if (device or dtype) and not (verified or as_json):
        raise OptionError("--device and --dtype require --verify or --json; add one of them.")
    _silence_transformers()
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
    return all(not family.refused and (family.verification is None or family.verification.passed) for family in listed)


def train(names: Sequence[str] = ()) -> None:
    """Train a small model of each family, and print the outcomes.

    Raises:
        OptionError: A family is unknown.
    """
    _silence_transformers()
    from tigon.trainer import family_training  # not for --help

    unknown = sorted(set(names) - set(family_training.all_families()))
    if unknown:
        raise OptionError(f"{unknown[0]} is no causal language model of the installed transformers, nor in the table.")
    print(family_training.HEADING)
    for family in family_training.trained_families(names):
        print(family_training.text_line(family), flush=True)


def _silence_transformers() -> None:
    """Silence transformers, whose advice on configs does not apply to the small models used here."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)


COMMAND = Command(command, place=6)
