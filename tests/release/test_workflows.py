"""The workflows of .github: their steps are targets of the Makefile, and their versions those of pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tigon.doctor.known_bad import OLDEST, UNTESTED_FROM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
if not FOLDER.is_dir():
    pytest.skip("the sdist has no workflows", allow_module_level=True)
WORKFLOWS: dict[str, Any] = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FOLDER.iterdir()}
JOBS = [
    pytest.param(job, id=f"{name}-{title}") for name, flow in WORKFLOWS.items() for title, job in flow["jobs"].items()
]
MATRIX = WORKFLOWS["ci.yml"]["jobs"]["tests"]["strategy"]["matrix"]["include"]


def minor(version: str) -> tuple[int, int]:
    first, second = version.split(".")[:2]
    return int(first), int(second)


@pytest.mark.parametrize("job", JOBS)
def test_every_command_is_a_target_of_the_makefile(job: Any) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands and all(re.fullmatch(r"make [a-z-]+", command) for command in commands)
    assert {command.split()[1] for command in commands} <= {*targets}


@pytest.mark.parametrize("job", JOBS)
def test_job_sets_only_variables_that_the_setup_reads(job: Any) -> None:
    setup = (ROOT / "tools" / "setup_venv.sh").read_text(encoding="utf-8")
    assert not [name for name in job.get("env", {}) if f"${{{name}:" not in setup]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_matrix_reaches_from_the_oldest_supported_release_to_the_newest_tested(package: str) -> None:
    versions = sorted(minor(row[package]) for row in MATRIX)
    assert versions[0] == minor(OLDEST[package])
    if package in UNTESTED_FROM:
        major, beyond = minor(UNTESTED_FROM[package])
        assert versions[-1] == (major, beyond - 1)


def test_matrix_tests_oldest_and_newest_of_both_with_each_other() -> None:
    ends = {name: (minimum(name), maximum(name)) for name in ("torch", "transformers")}
    tested = {(row["torch"], row["transformers"]) for row in MATRIX}
    assert {(a, b) for a in ends["torch"] for b in ends["transformers"]} <= tested


def minimum(package: str) -> str:
    return str(min((row[package] for row in MATRIX), key=minor))


def maximum(package: str) -> str:
    return str(max((row[package] for row in MATRIX), key=minor))


def test_matrix_starts_with_the_oldest_python_and_holds_the_releases_of_the_setup() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^requires-python = ">=([\d.]+)"$', project, re.MULTILINE)
    assert min((row["python"] for row in MATRIX), key=minor) == oldest
    setup = (ROOT / "tools" / "setup_venv.sh").read_text(encoding="utf-8")
    defaults = {name.lower(): version for name, version in re.findall(r"\$\{(TORCH|TRITON):-([\d.]+)\}", setup)}
    assert any(defaults.items() <= row.items() for row in MATRIX)
    assert all(minor(row["triton"]) >= minor(OLDEST["triton"]) for row in MATRIX)


def test_release_check_installs_the_torch_of_the_setup() -> None:
    named = [
        re.findall(r"\$\{TORCH:-([\d.]+)\}", (ROOT / "tools" / name).read_text(encoding="utf-8"))
        for name in ("setup_venv.sh", "release_check.sh")
    ]
    assert named[0] == named[1] and len(named[0]) == 1


def test_actionlint_finds_nothing() -> None:
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed (make workflows)")
    done = subprocess.run([program, *map(str, sorted(FOLDER.iterdir()))], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.name)
def test_issue_form_names_what_it_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert all({"name", "url", "about"} == link.keys() for link in form["contact_links"])
        return
    assert form["name"] and form["description"]
    assert all(field["attributes"]["label"] for field in form["body"])
    identifiers = [field["id"] for field in form["body"]]
    assert len(identifiers) == len({*identifiers})
