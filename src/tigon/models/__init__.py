"""The patcher: one table row per model family; patches one instance and can be undone. See docs/patching.md."""

from __future__ import annotations

from tigon.models.fp8 import patch_fp8
from tigon.models.loading.auto import AutoModelForCausalLM
from tigon.models.patch import patch, unpatch
from tigon.models.report import PatchReport
from tigon.models.seams.head.deferred_logits import DeferredLogits, MaterializedLogitsWarning
from tigon.models.spec import PatchSpec
from tigon.models.table import MODELS
from tigon.models.verification.verify import Check, Verification, verify

__all__ = [
    "MODELS",
    "AutoModelForCausalLM",
    "Check",
    "DeferredLogits",
    "MaterializedLogitsWarning",
    "PatchReport",
    "PatchSpec",
    "Verification",
    "patch",
    "patch_fp8",
    "unpatch",
    "verify",
]
