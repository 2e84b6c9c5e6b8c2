"""What is patched where: one row a family, one engine, per instance and reversible. See docs/patching.md."""

from __future__ import annotations

from tigon.models.auto import AutoModelForCausalLM
from tigon.models.deferred import DeferredLogits, MaterializedLogitsWarning
from tigon.models.patch import patch, unpatch
from tigon.models.report import PatchReport
from tigon.models.spec import PatchSpec
from tigon.models.table import MODELS

__all__ = [
    "MODELS",
    "AutoModelForCausalLM",
    "DeferredLogits",
    "MaterializedLogitsWarning",
    "PatchReport",
    "PatchSpec",
    "patch",
    "unpatch",
]
