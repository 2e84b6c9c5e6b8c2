"""The wheel and the sdist hold what they should, and every file names one version."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import tigon

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LARGEST_FILE, LARGEST_SDIST = MIB // 2, 4 * MIB
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""The headings of keepachangelog.com."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this tree."""
    build = pytest.importorskip("hatchling.build", reason="hatchling is not installed (pip install -e '.[dev]')")
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build.build_wheel(str(folder)), folder / build.build_sdist(str(folder))


def test_wheel_holds_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(archives[0]).namelist()
    assert {name.partition("/")[0] for name in names} == {"tigon", f"tigon-{tigon.__version__}.dist-info"}
    held = {name for name in names if name.startswith("tigon/")}
    package = ROOT / "src" / "tigon"
    written = {p.relative_to(ROOT / "src").as_posix() for p in package.rglob("*") if p.is_file()}
    assert held == {name for name in written if "__pycache__" not in name}
    assert "tigon/py.typed" in held
    assert f"tigon-{tigon.__version__}.dist-info/licenses/LICENSE" in names


def test_sdist_holds_what_its_tests_need_and_no_service_settings(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as sdist:
        sizes = {member.name.partition("/")[2]: member.size for member in sdist.getmembers()}
    assert {name.partition("/")[0] for name in sizes} == {
        ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO",
        "README.md", "SECURITY.md", "benchmarks", "docs", "examples", "pyproject.toml", "recipes", "src", "tests",
        "tools",
    }  # fmt: skip
    assert not [name for name in sizes if "__pycache__" in name]
    assert not {name: size for name, size in sizes.items() if size > LARGEST_FILE}
    assert archives[1].stat().st_size < LARGEST_SDIST


def test_citation_names_the_packages_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == tigon.__version__
    assert citation["authors"] == [{"name": "The tigon authors"}]


def test_changelog_has_the_form_of_keepachangelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
    for version in versions:
        assert f"\n{version.partition(' ')[0]}: https://" in text
