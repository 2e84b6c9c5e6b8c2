"""The table of known bad combinations: every row is well formed, fires where it should, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tigon.doctor import environment, known_bad
from tigon.doctor.environment import CONDITIONS, PACKAGES, Environment
from tigon.doctor.finding import LEVELS
from tigon.doctor.known_bad import OLDEST, ROWS, UNTESTED_FROM, KnownBad

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

GOOD = Environment(
    python="3.11.7",
    platform="Linux",
    packages={"torch": "2.13.0+cu130", "triton": "3.6.0", "numpy": "2.4.1", "transformers": "5.17.0",
              "accelerate": "1.15.0", "peft": "0.21.2"},
    device="NVIDIA H200",
    runs="Triton kernels",
    conditions=frozenset({"gpu"}),
)  # fmt: skip


def found(env: Environment) -> set[str]:
    return {finding.id for finding in known_bad.matching(env)}


def test_good_environment_has_no_finding() -> None:
    assert found(GOOD) == set()


# A version of each package that a specifier of the table matches, unless it has a lower limit.
BAD_VERSIONS = {"triton": "3.3.1", "liger_kernel": "0.8.5"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_fires_only_on_its_packages_and_conditions(row: KnownBad) -> None:
    versions = {p: "99.0" if s.startswith(">=") else BAD_VERSIONS.get(p, "0.1") for p, s in row.packages.items()}
    env = replace(GOOD, packages={**GOOD.packages, **versions}, conditions=GOOD.conditions | {*row.conditions})
    assert row.id in found(env)
    for condition in row.conditions:
        assert row.id not in found(replace(env, conditions=env.conditions - {condition})), condition
    for package in row.packages:
        assert row.id not in found(replace(env, packages={**env.packages, package: None})), package


@pytest.mark.parametrize(
    ("triton", "numpy", "bad"),
    [
        ("3.6.0", "2.4.0", True),
        ("3.6.0", "2.3.5", False),
        ("3.7.0", "2.4.0", False),
        ("3.9.0", "2.4.6", False),
        ("3.4.0", "2.10.1", True),
    ],
)
def test_interpreter_with_numpy_it_cannot_run_is_reported(triton: str, numpy: str, bad: bool) -> None:
    packages = {**GOOD.packages, "triton": triton, "numpy": numpy}
    env = replace(GOOD, packages=packages, conditions=frozenset({"interpreter"}))
    assert ("interpreter-numpy" in found(env)) is bad


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("4.57.1", {"transformers-older-than-supported"}),
        ("5.7.9", {"transformers-older-than-supported"}),
        ("5.8.0", set()),
        ("5.24.1", {"add-adapter-needs-newer-peft"}),
        ("5.25.0", {"add-adapter-needs-newer-peft", "transformers-newer-than-tested"}),
        ("5.26.0.dev0", {"add-adapter-needs-newer-peft", "transformers-newer-than-tested"}),
    ],
)
def test_transformers_outside_the_tested_range_is_reported(version: str, expected: set[str]) -> None:
    assert found(replace(GOOD, packages={**GOOD.packages, "transformers": version})) == expected


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "2.14.1+cu130", set()),
        ("torch", "2.15.0", {"torch-newer-than-tried"}),
        ("torch", "2.16.0.dev20261126+cpu", {"torch-newer-than-tried"}),
        ("triton", "3.9.0", set()),
        ("triton", "3.10.0", {"triton-newer-than-tried"}),
    ],
)
def test_torch_and_triton_that_were_not_tried_are_noted(package: str, version: str, expected: set[str]) -> None:
    assert found(replace(GOOD, packages={**GOOD.packages, package: version})) == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row_is_well_formed_and_names_its_source(row: KnownBad) -> None:
    assert row.packages or row.conditions, "it would fire everywhere"
    assert {*row.conditions} <= CONDITIONS.keys()
    assert row.packages.keys() <= set(PACKAGES)
    assert row.level in LEVELS
    assert row.what.endswith(".") and row.fix.endswith(".") and row.source


def test_rows_have_distinct_ids() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_every_condition_is_used_by_a_row() -> None:
    assert set().union(*(row.conditions for row in ROWS)) == set(CONDITIONS)


def requirements() -> Iterable[tuple[str, str]]:
    """(package, specifier) of pyproject's dependencies and of the extras a user installs."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (
        *project["dependencies"],
        *(line for name, lines in extras.items() if name != "dev" for line in lines),
    ):
        requirement = packaging.Requirement(text)
        yield requirement.name, str(requirement.specifier)


def test_supported_versions_are_those_of_pyproject() -> None:
    declared = {name: spec for name, spec in requirements() if name in PACKAGES}
    table = {
        name: ",".join(filter(None, (f"<{UNTESTED_FROM[name]}" if name in UNTESTED_FROM else "", f">={oldest}")))
        for name, oldest in OLDEST.items()
    }
    assert {name: set(spec.split(",")) for name, spec in declared.items()} == {
        name: set(spec.split(",")) for name, spec in table.items()
    }


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((12, 0), ["sm_80", "sm_90", "sm_100"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((7, 5), ["sm_80", "compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], False),
    ],
)
def test_gpu_runs_builds_for_its_own_or_a_compatible_architecture(
    capability: tuple[int, int], built: list[str], runs: bool
) -> None:
    assert environment._built_for(capability, built) is runs


def test_classes_replaced_by_another_library_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    assert not [name for name in environment.replaced_names() if "modeling_llama" in name]
    theirs = type("LigerRMSNorm", (), {"__module__": "liger_kernel.transformers.rms_norm"})
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", theirs)
    seen = environment.current_environment()
    assert "transformers.models.llama.modeling_llama.LlamaRMSNorm -> liger_kernel.transformers.rms_norm" in seen.foreign
    assert "patched-globally" in found(seen)


def test_environment_of_this_process_is_read_correctly() -> None:
    import torch

    seen = environment.current_environment()
    assert seen.packages["torch"] == torch.__version__ and seen.packages["tigon"]
    assert set(seen.packages) == set(PACKAGES)
    assert seen.conditions <= CONDITIONS.keys()
    assert ("gpu" in seen.conditions) is torch.cuda.is_available()
