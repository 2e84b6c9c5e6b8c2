"""Examines one model: builds it without weights, patches it, and verifies its family's row on a small model."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tigon._install import install_command
from tigon.doctor.finding import Finding, Level
from tigon.errors import PatchError, UsageError
from tigon.models import MODELS, PatchReport, Verification, hybrid_layers, patch, verify
from tigon.models.loading import weight_files
from tigon.models.loading.config import build_on_meta, load_config
from tigon.models.loading.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """A model by name, with its patch report, or findings that say why it could not be patched."""

    name: str
    cls: str
    model_type: str
    report: PatchReport | None
    findings: tuple[Finding, ...] = ()
    verification: Verification | None = None
    """The verification of the family's row on this machine in fp32; None without a row or after a failed self-test."""


def check_model(name: str) -> ModelCheck:
    """Build the model of a preset, a folder, a config.json or a hub id, and patch it.

    The model is built on the meta device, so neither memory nor weights are needed. transformers' logging is silenced,
    because its advice concerns training.

    Raises:
        UsageError: the name is not one of these; transformers cannot build the model, or is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{name}: examining a model needs transformers: {install_command('train')}")
    _quieten()
    config = load_config(name)
    model = build_on_meta(name, config)
    findings = []
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        findings.append(
            Finding(
                level="note",
                id="quantised",
                what="The checkpoint is quantised, but it was examined without quantisation. A quantised lm_head keeps "
                "its own forward, so the loss is not fused with it.",
                fix="print(tigon.patch(model)) after loading shows the report for the quantised weights.",
                source="config.json, quantization_config",
            )
        )
    findings += _weights(name, config, type(model))
    findings += _state_layers(hybrid_layers.paths_of(model, fused=True))
    report = None
    try:
        report = patch(model)
    except PatchError as error:
        findings.append(
            Finding(
                level="problem",
                id="not-patched",
                what=str(error),
                fix="use tigon.nn and tigon.linear_cross_entropy in your own code, or train it unpatched.",
                source="tigon.patch",
            )
        )
    return ModelCheck(
        name=name, cls=type(model).__name__, model_type=config.model_type, report=report, findings=tuple(findings)
    )


def _state_layers(paths: Sequence[hybrid_layers.LayerPath]) -> list[Finding]:
    """What is wrong with the code that runs layers with a state instead of attention."""
    source, here = "tigon.models.hybrid_layers", torch.cuda.is_available()
    findings = []
    if slow := hybrid_layers.slow_layers(paths):
        what, fix = slow.partition(";")[0], hybrid_layers.install_command(paths)
        level: Level = "warning" if here else "note"
        findings.append(Finding(level=level, id="slow-layers", what=what, fix=fix, source=source))
    if refused := hybrid_layers.refused_backward(paths):
        what, _, fix = refused.partition("; ")
        findings.append(Finding(level="problem", id="refused-backward", what=what, fix=fix, source=source))
    return findings


def _weights(name: str, config: PreTrainedConfig, cls: type[torch.nn.Module]) -> list[Finding]:
    """Findings about the weight files of a folder; only their headers are read."""
    folder = Path(name)
    if name in PRESETS or not folder.is_dir() or not any(folder.glob("*.safetensors*")):
        return []
    try:
        files = weight_files.files_in(folder, getattr(config, "transformers_weights", None))
        headers = weight_files.read_headers(files)
        if getattr(config, "quantization_config", None):
            return []  # the quantiser changes names and shapes
        report = weight_files.compare(config, headers, cls=cls)
    except UsageError as error:
        problem: str | None = str(error)
    else:
        problem = report.problem
        if problem is None and report.unexpected:
            listed = weight_files.listed(report.unexpected, "tensor")
            what = f"The files hold {listed}, which the model does not have."
            fix = "none if they belong to a part that is not trained; otherwise the config belongs to another model."
            return [Finding(level="note", id="unused-tensors", what=what, fix=fix, source=f"the headers in {folder}")]
    if problem is None:
        return []
    fix = "tigon train refuses this checkpoint: restore the files, or rename the tensors."
    return [Finding(level="problem", id="weights", what=problem, fix=fix, source=f"the headers in {folder}")]


def prove(check: ModelCheck) -> ModelCheck:
    """The check with a verification of its family's row, in half a second; unchanged without a row or report."""
    row = MODELS.get(check.model_type)
    if row is None or check.report is None:
        return check
    verification = verify(row, device="cuda" if torch.cuda.is_available() else "cpu")
    failures = tuple(
        Finding(
            level="problem",
            id="not-proved",
            what=f"a small {check.model_type} differs from its unpatched twin in {failed.name}: "
            f"{failed.note or f'{failed.worst} by {failed.error:.1e}, allowed {failed.bound:.1e}'}",
            fix="do not patch this family here; report it with the output of --json.",
            source="tigon.models.verify",
        )
        for failed in verification.failures
    )
    return replace(check, verification=verification, findings=check.findings + failures)


def _quieten() -> None:
    """Silence transformers, whose advice concerns training, and huggingface_hub, which logs every retry."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
