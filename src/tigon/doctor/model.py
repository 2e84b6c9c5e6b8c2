"""What tigon does to one model: built without weights and patched, and its family's row proved on a small model."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tigon.doctor.finding import Finding
from tigon.errors import PatchError, UsageError
from tigon.models import MODELS, PatchReport, Verification, patch, verify


@dataclass(frozen=True, kw_only=True)
class ModelCheck:
    """A model by name, and its patch report or why there is none."""

    name: str
    cls: str
    model_type: str
    report: PatchReport | None
    findings: tuple[Finding, ...] = ()
    verification: Verification | None = None
    """Of the family's row on this machine, in fp32; None where it has no row, or the self-test has failed."""


def check_model(name: str) -> ModelCheck:
    """Build the model that a preset, a folder, a config.json or a hub id names, and patch it.

    It is built on the meta device, so neither memory nor weights are needed. transformers' logging is turned down, as
    nobody reads advice on training here.

    Raises:
        UsageError: the name is none of these, transformers cannot build the model, or is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{name}: examining a model needs transformers: pip install 'tigon[train]'")
    _quieten()
    config = load_config(name)
    model = _build(name, config)
    findings = []
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        findings.append(
            Finding(
                level="note",
                id="quantised",
                what="The checkpoint is quantised; it was examined as if it were not. A quantised lm_head keeps its "
                "own forward, and then the loss is not fused with it.",
                fix="print(tigon.patch(model)) after loading says what it is with the quantised weights.",
                source="config.json, quantization_config",
            )
        )
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


def prove(check: ModelCheck) -> ModelCheck:
    """The same check with the proof of its family's row, half a second; as it is where there is none to prove."""
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
    """transformers' advice on configs and missing packages is about training, and huggingface_hub tells every retry."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def load_config(name: str) -> Any:
    """The transformers config behind a preset, folder, config.json or hub id."""
    from tigon.train.model import is_hub_id
    from tigon.train.presets import PRESETS

    if name in PRESETS:
        from transformers import AutoConfig

        shape = dict(PRESETS[name])
        return AutoConfig.for_model(shape.pop("model_type"), **shape)
    path = Path(name)
    if path.exists():
        return _config_from_file(path / "config.json" if path.is_dir() else path)
    if is_hub_id(name):
        return _config_from_hub(name)
    raise UsageError(
        f"{name!r} is neither a file, nor a folder, nor a hub id (owner/model), nor a preset; presets are "
        f"{', '.join(PRESETS)}."
    )


def _config_from_file(file: Path) -> Any:
    from transformers import AutoConfig

    if not file.is_file():
        raise UsageError(f"{file.parent}: there is no config.json in it; give the folder of a Hugging Face checkpoint.")
    try:
        declared = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file} is not a JSON file that can be read: {error}") from None
    if not isinstance(declared, dict) or "model_type" not in declared:
        raise UsageError(f"{file} has no model_type, so it is not the config.json of a Hugging Face model.")
    _refuse_remote_code(str(file), declared)
    try:
        return AutoConfig.from_pretrained(file)
    except Exception as error:  # transformers and huggingface_hub raise a dozen types for a config they cannot take
        raise UsageError(f"{file}: transformers cannot read it: {_one_line(error)}") from None


def _config_from_hub(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # as above, and those of the connection
        raise UsageError(f"{name}: its config cannot be had from the hub: {_one_line(error)}") from None


def _refuse_remote_code(name: str, declared: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in declared and declared["model_type"] not in CONFIG_MAPPING:
        raise UsageError(
            f"{name}: the model's code comes with the checkpoint, and the doctor does not run it. Load the model "
            "yourself and print(tigon.patch(model))."
        )


def _build(name: str, config: Any) -> torch.nn.Module:
    import transformers

    (architecture,) = (getattr(config, "architectures", None) or [""])[:1]
    cls = getattr(transformers, architecture, None) if architecture else None
    try:
        with torch.device("meta"):
            if cls is not None:
                return cls(config)  # type: ignore[no-any-return]
            sees = "vision_config" in getattr(config, "sub_configs", {})
            auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
            return auto.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:  # a config can be wrong in as many ways as there are models
        what = architecture or "a language model"
        raise UsageError(f"{name}: transformers cannot build {what} from its config: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """The first sentence of a message that may be a page."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0][:240]}"
