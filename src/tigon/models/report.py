"""`PatchReport`: what `patch` did to a model, and how to undo it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tigon.errors import PatchError
from tigon.models.hybrid_layers import LayerPath, install_command
from tigon.models.seams.base import Change, Seam
from tigon.models.seams.norm import mark_finds_amax

SeamsByPath = tuple[tuple[str, Seam], ...]
"""A module's path -> what replaces its forward."""


@dataclass(frozen=True)
class Replaced:
    """Modules of one class that now run the same op."""

    op: str
    cls: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class LeftAlone:
    """Modules that were left unchanged, and why."""

    op: str
    cls: str
    paths: tuple[str, ...]
    reason: str


@dataclass
class PatchReport:
    """The result of `tigon.patch`: `print` it, export it with `to_dict`, or restore the model with `undo`."""

    model: str
    """Class and model type of the model, for the heading."""
    replaced: list[Replaced] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layer_paths: tuple[LayerPath, ...] = ()
    """Layers with a state instead of attention, and the code that runs them."""
    _changes: list[Change] = field(default_factory=list, repr=False)
    _finding_amax: list[nn.Module] = field(default_factory=list, repr=False)
    """Norms that find the largest magnitudes of their results for FP8 layers."""

    @property
    def seams(self) -> SeamsByPath:
        """The replacements in effect, in their order, for `patch_like`."""
        return tuple((change.path, change.seam) for change in self._changes)

    @property
    def counts(self) -> dict[str, int]:
        """Number of modules replaced, by op."""
        counts: dict[str, int] = {}
        for row in self.replaced:
            counts[row.op] = counts.get(row.op, 0) + len(row.paths)
        return counts

    def undo(self) -> None:
        """Restore the original class of every module that this report replaced; a second call does nothing.

        Raises:
            PatchError: a module was wrapped after the patch, or patched again on top. Nothing was undone.
        """
        later: dict[int, tuple[Seam, ...]] = {}
        blocked = []
        for change in reversed(self._changes):
            above = later.get(id(change.module), ())
            blocked += [reason] if (reason := change.blocked(above)) else []
            later[id(change.module)] = (*above, change.seam)
        if blocked:
            raise PatchError(f"cannot undo: {blocked[0]}. Undo before wrapping the model; nothing was undone.")
        for change in reversed(self._changes):
            change.revert()
        mark_finds_amax(self._finding_amax, False)
        self._changes.clear()
        self._finding_amax.clear()

    def extend(self, later: PatchReport) -> None:
        """Add what a later patch of the same model did, so that `undo` restores both."""
        self.replaced += later.replaced
        self.left_alone += later.left_alone
        self.notes += later.notes
        self._changes += later._changes
        self._finding_amax += later._finding_amax

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON-serialisable dict: model, replaced, left_alone, notes, layer_paths, counts."""
        return {
            "model": self.model,
            "replaced": [{"op": r.op, "class": r.cls, "paths": list(r.paths)} for r in self.replaced],
            "left_alone": [
                {"op": r.op, "class": r.cls, "paths": list(r.paths), "reason": r.reason} for r in self.left_alone
            ],
            "notes": list(self.notes),
            "layer_paths": [asdict(path) for path in self.layer_paths],
            "counts": self.counts,
        }

    def __str__(self) -> str:
        lines = [f"tigon.patch: {self.model}"]
        for title, rows in (("replaced", self.replaced), ("left alone", self.left_alone)):
            lines += [f"  {title}"] if rows else []
            for row in rows:
                lines.append(f"    {len(row.paths):4d}  {row.op:22s} {row.cls:20s} {', '.join(_stars(row.paths))}")
                if isinstance(row, LeftAlone):
                    lines.append(f"          because {row.reason}")
        lines += ["  layers with a state"] if self.layer_paths else []
        lines += [f"    {path.layers:4d}  {path.kind:22s} {path.runs}" for path in self.layer_paths]
        if command := install_command(self.layer_paths):
            lines.append(f"          PyTorch is slow here; install kernels: {command}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _stars(paths: Iterable[str]) -> list[str]:
    """The distinct paths with layer numbers replaced by *: model.layers.*.mlp."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) or "(the model)" for path in paths))
