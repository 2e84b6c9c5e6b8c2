"""`Diagnosis`: the findings of `tigon doctor`, as text and as data."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tigon.doctor import known_bad
from tigon.doctor.environment import Environment, current_environment
from tigon.doctor.finding import LEVELS, Finding
from tigon.doctor.model import ModelCheck, check_model, prove
from tigon.doctor.self_test import run_self_test
from tigon.ops import OPS
from tigon.ops.self_test import DTYPES, PRODUCT, OpCheck


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`; `print` it, or export it with `to_dict`."""

    environment: Environment
    checks: tuple[OpCheck, ...]
    checks_s: float
    """Duration of the self-test in seconds, including its imports."""
    model: ModelCheck | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no finding has the level "problem"; warnings and notes do not count."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as a JSON-serialisable dict: ok, findings, environment, self_test, model."""
        environment = self.environment
        model = self.model
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "environment": {
                "python": environment.python,
                "platform": environment.platform,
                "packages": dict(environment.packages),
                "device": environment.device,
                "runs": environment.runs,
                "conditions": sorted(environment.conditions),
                "replaced_by_others": list(environment.foreign),
            },
            "self_test": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "model": None
            if model is None
            else {
                "name": model.name,
                "class": model.cls,
                "patch": None if model.report is None else model.report.to_dict(),
                "proof": None if model.verification is None else model.verification.to_dict(),
            },
        }

    def __str__(self) -> str:
        return "\n".join((*self._versions(), *self._self_test(), *self._model(), *self._findings()))

    def _versions(self) -> Iterable[str]:
        environment = self.environment
        yield "versions"
        yield f"  {'python':14s}{environment.python} on {environment.platform}"
        for name, version in environment.packages.items():
            if version is not None:
                yield f"  {name:14s}{version}"
        absent = [name for name, version in environment.packages.items() if version is None]
        if absent:
            yield f"  {'not installed':14s}{', '.join(absent)}"
        yield "device"
        yield f"  {environment.device}"
        yield f"  ops run as: {environment.runs}"
        for name in environment.foreign:
            yield f"  replaced by another library: {name}"

    def _self_test(self) -> Iterable[str]:
        yield f"self-test, {self.checks_s:.1f} s: error against fp64 as a share of the allowed error"
        yield f"  {'':34s}" + "".join(f"{dtype:>8s}" for dtype in DTYPES)
        by_key = {(check.op, check.dtype): check for check in self.checks}
        for op in (PRODUCT, *OPS):
            cells = (_cell(by_key.get((op, dtype))) for dtype in DTYPES)
            yield f"  {op:34s}" + "".join(f"{cell:>8s}" for cell in cells)

    def _model(self) -> Iterable[str]:
        if self.model is None:
            yield "model"
            yield "  none given; `tigon doctor MODEL` lists the kernels that a model gets, and why it lacks the others"
            return
        yield f"model {self.model.name}"
        text = f"{self.model.cls}: not patched" if self.model.report is None else str(self.model.report)
        for line in text.splitlines():
            yield f"  {line}"
        proof = self.model.verification
        if proof is not None:
            passed = sum(check.passed for check in proof.checks)
            small = f"a small {proof.model_type} with its unpatched twin"
            yield f"  {passed} of {len(proof.checks)} comparisons of {small} passed"

    def _findings(self) -> Iterable[str]:
        yield "findings" if self.findings else "nothing is wrong"
        for finding in self.findings:
            head = f"{finding.level.upper()} {finding.id}: {finding.what}"
            for line in (head, f"    fix: {finding.fix}", f"    source: {finding.source}"):
                yield textwrap.fill(line, 110, initial_indent="  ", subsequent_indent=" " * 6, break_long_words=False)
        counts = [(sum(f.level == level for f in self.findings), level) for level in LEVELS]
        if self.findings:
            yield ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for n, level in counts)


def _cell(check: OpCheck | None) -> str:
    if check is None:
        return "-"
    if check.error is not None or check.share is None:
        return "FAILED"
    return f"{check.share:.2f}" if check.passed else f"{check.share:.2g}!"


def diagnose(model: str | None = None) -> Diagnosis:
    """Examine this machine and, if a name is given, a model.

    Args:
        model: a preset, folder, config.json or hub id.

    Raises:
        UsageError: `model` is not a preset, folder, config.json or hub id; transformers cannot build it or is missing.
    """
    model_check = None if model is None else check_model(model)
    environment = current_environment()
    start = time.perf_counter()
    checks = tuple(run_self_test())
    checks_s = time.perf_counter() - start
    if model_check is not None and all(check.passed for check in checks):
        model_check = prove(model_check)
    if any(c.op == PRODUCT and c.dtype == "bf16" and "SIGILL" in (c.error or "") for c in checks):
        environment = replace(environment, conditions=environment.conditions | {"bf16-product-traps"})
    findings = [*known_bad.matching(environment), *_failed(checks), *(model_check.findings if model_check else ())]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Diagnosis(
        environment=environment, checks=checks, checks_s=checks_s, model=model_check, findings=tuple(findings)
    )


def _failed(checks: Iterable[OpCheck]) -> Iterable[Finding]:
    """Yield one finding per cause; equal failures, in one or several dtypes, share a finding."""
    alike: dict[tuple[str, str], list[OpCheck]] = {}
    for check in checks:
        if not check.passed:
            alike.setdefault((check.dtype, check.error or check.op), []).append(check)
    causes: dict[tuple[str, str], list[str]] = {}
    for (dtype, _), group in alike.items():
        first = group[0]
        what = first.error or f"the error is {first.share:.3g} times the allowed error, in {first.worst}"
        causes.setdefault((", ".join(check.op for check in group), what), []).append(dtype)
    for (names, what), dtypes in causes.items():
        yield Finding(
            level="problem",
            id="self-test",
            what=f"{names} in {', '.join(dtypes)}: {what}",
            fix="do not train with this op here. If no finding above explains it, report it with the output of --json.",
            source="the self-test",
        )
