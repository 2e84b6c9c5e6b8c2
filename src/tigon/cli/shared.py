"""Helpers that several commands share."""

from __future__ import annotations


def gpus_as_override(gpus: int | None) -> list[str]:
    """`--gpus N` as `--set sharding.gpus=N`."""
    return [] if gpus is None else [f"sharding.gpus={gpus}"]
