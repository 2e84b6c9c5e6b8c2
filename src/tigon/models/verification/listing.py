"""The table of model families and their ops, for `tigon models` and docs/models.md.

The table is generated: each row's small random model is patched, and the table shows its report.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tigon.errors import OptionError, PatchError
from tigon.models.patch import apply_row
from tigon.models.report import PatchReport
from tigon.models.spec import PatchSpec
from tigon.models.table import MODELS
from tigon.models.verification.tiny import tiny_model
from tigon.models.verification.verify import Verification, verify

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """One row of the table, and its patch report for a model of two layers."""

    row: PatchSpec
    report: PatchReport
    verification: Verification | None = None
    refused: str = ""
    """Why `patch` refuses the family in the installed transformers; the report is then empty."""

    @property
    def logits(self) -> str:
        """The scaling and capping of the logits, as names of config attributes."""
        attributes = self.row.logits
        uses = (("× ", attributes.multiply), ("÷ ", attributes.divide), ("capped by ", attributes.softcap))
        return ", ".join(f"{use}{name}" for use, name in uses if name)

    @property
    def left_alone(self) -> list[tuple[str, str]]:
        """(what, why), from the row and from the report."""
        if self.refused:
            return [("the family", self.refused)]
        named = [*self.row.keep.items(), *((entry.cls, entry.reason) for entry in self.report.left_alone)]
        return [*named, *columns_without_op(self.report.counts, named)]

    def to_dict(self) -> dict[str, Any]:
        """The family as a JSON-serialisable dict."""
        return {
            "model_type": self.row.model_type,
            "model": self.report.model.split(" ")[0],
            "gets": self.report.counts,
            "logits": self.logits,
            "left_alone": [{"what": what, "why": why} for what, why in self.left_alone],
            "verification": None if self.verification is None else self.verification.to_dict(),
            "refused": self.refused or None,
        }


def families(
    names: Iterable[str] = (), *, verified: bool = False, device: str = "cpu", dtype: str = "fp32"
) -> Iterator[Family]:
    """Yield the families of the table, or the named ones, each when it is ready.

    Raises OptionError for a family that is not in the table, a dtype other than fp32 and bf16, or a missing device.
    """
    chosen = list(names) or list(MODELS)
    unknown = [name for name in chosen if name not in MODELS]
    if unknown:
        raise OptionError(f"{unknown[0]} is not in the table; choose from {', '.join(MODELS)}.")
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype} is not known; choose one of {', '.join(DTYPES)}.")
    if not _has(device):
        raise OptionError(f"device={device} is not available; choose cpu, or cuda on a machine with a GPU.")
    return _families(chosen, verified, device, DTYPES[dtype])


def _has(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True


def _families(names: list[str], verified: bool, device: str, dtype: torch.dtype) -> Iterator[Family]:
    for name in names:
        row = MODELS[name]
        model = tiny_model(name, row.tiny)
        try:
            report = apply_row(model, row)
        except PatchError as error:  # an older transformers has other code for it
            yield Family(row, PatchReport(type(model).__name__), refused=str(error))
            continue
        yield Family(row, report, verify(row, device=device, dtype=dtype) if verified else None)


# --- as text ----------------------------------------------------------------------------------------------------------

_COLUMNS = {
    "norm": ("rms_norm", "gated_rms_norm", "layer_norm"),
    "MLP": ("swiglu", "geglu", "experts"),
    "router": ("topk_softmax", "topk_sigmoid"),
    "rope": ("rope",),
    "loss": ("linear_cross_entropy",),
}


_NO_CANDIDATE = {
    "MLP": (
        ("mlp", "expert", "moe"),
        "none has the layers of a gated one, and an activation alone is not worth a kernel",
    ),
    "rope": (("attention", "rope"), "no attention calls a rotary function of its file"),
}
"""Column -> (words in the names of parts with a reason of their own, why no module is a candidate)."""


def columns_without_op(ops: Collection[str], named: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """(column, why) of the columns in which a family gets nothing although no part of it was refused.

    Args:
        ops: The ops that the family gets.
        named: (what, why) of the parts that have a reason of their own.
    """
    refused = " ".join(what.lower() for what, _ in named if "router" not in what.lower())
    return [
        (column, why)
        for column, (words, why) in _NO_CANDIDATE.items()
        if not any(op in ops for op in _COLUMNS[column]) and not any(word in refused for word in words)
    ]


def cells(family: Family) -> list[str]:
    """The family's row of the table."""
    counts = family.report.counts
    row = [" + ".join(op for op in ops if op in counts) or "-" for ops in _COLUMNS.values()]
    row[-1] = f"{row[-1]}, logits {family.logits}" if family.logits else row[-1]
    return [family.row.model_type, *row]


def _proof(verification: Verification) -> str:
    if not verification.passed:
        return f"FAILED: {', '.join(check.name for check in verification.failures)}"
    applicable = [check for check in verification.checks if not check.note]
    return f"{len(applicable)} checks passed"


HEADING = f"{'family':18s}{'norm':24s}{'MLP':18s}{'router':14s}{'rope':6s}loss in training"


def text_lines(family: Family) -> Iterator[str]:
    """The lines of one family for the terminal."""
    name, norm, mlp, router, rope, loss = cells(family)
    proof = "" if family.verification is None else f"   {_proof(family.verification)}"
    yield f"{name:18s}{norm:24s}{mlp:18s}{router:14s}{rope:6s}{loss}{proof}"
    for what, why in family.left_alone:
        yield f"{'':18s}{what} left alone: {why}"


def json_text(listed: Iterable[Family]) -> str:
    """The table as JSON."""
    import transformers

    families = list(listed)
    proofs = [family.verification for family in families if family.verification is not None]
    record = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "verified": sum(proof.passed for proof in proofs),
        "families": [family.to_dict() for family in families],
    }
    return json.dumps(record, indent=1)
