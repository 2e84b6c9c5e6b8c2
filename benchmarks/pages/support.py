"""The tables of docs/support.md, from the chips, the workflows and the committed records.

    python -m benchmarks.pages.support

`tools/release_check.sh` leaves a record of each environment that the wheel was used in; `benchmarks/installs`
holds the committed ones.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pages import regions
from tigon.doctor.known_bad import OLDEST, UNTESTED_FROM
from tigon.kernels.chips import CHIPS
from tigon.report.table import markdown_table

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "support.md"
RESULTS = ROOT / "benchmarks" / "results"
COMPILED = RESULTS / "compiled" / "triton" / "launches.json"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PACKAGES = (
    "torch", "triton", "transformers", "trl", "deepspeed", "accelerate", "peft", "bitsandbytes", "torchao", "kernels"
)  # fmt: skip
NONE = "–"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Row = Mapping[str, Any]


@cache
def targets() -> Mapping[str, Any]:
    """The chips of tests/kernels/aot.py by name."""
    place = ROOT / "tests" / "kernels" / "aot.py"
    spec = importlib.util.spec_from_file_location("aot", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return dict(module.TARGETS)


@cache
def runs() -> tuple[Row, ...]:
    """The environments of all records that were measured on a GPU."""
    found = []
    for path in sorted(RESULTS.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        environment = record.get("environment") if isinstance(record, dict) else None
        if environment and environment.get("device") and not environment["device"].startswith("CPU"):
            found.append(environment)
    return tuple(found)


@cache
def installs() -> tuple[Row, ...]:
    """The records of `make release-check`, one per Python."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks" / "installs").glob("*.json")]
    return tuple(sorted(found, key=lambda row: _key(row["python"])))


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _versions(package: str) -> list[str]:
    """The releases of a package in the GPU's records, oldest first."""
    found = {row["versions"][package] for row in runs() if row["versions"].get(package)}
    return sorted((version.partition("+")[0] for version in found), key=_key)


# --- the tables ------------------------------------------------------------------------------------------------------


def gpus() -> str:
    """Each chip: is it compiled for in the tests, did a record run on it, and what was tuned on it?"""

    def rows() -> Iterator[list[str]]:
        for chip in CHIPS:
            name = chip.arch if isinstance(chip.arch, str) else f"sm_{chip.arch[0]}{chip.arch[1]}"
            target = targets().get(name)
            compiled = ", ".join(_SHORT[dtype] for dtype in target.dtypes) if target else "no"
            ran = sorted({row["device"] for row in runs() if _is_of(row["device"], chip.names)})
            yield [chip.names, f"`{name}`", compiled, ", ".join(ran) or "no"]

    return markdown_table(("cards", "chip", "kernels compiled in the tests", "run"), rows())


def _is_of(device: str, names: str) -> bool:
    """Whether a card is one of those, such as `NVIDIA H100 80GB HBM3` of `H100, H200, GH200`."""
    return any(re.search(rf"\b{re.escape(name)}( \d+GB( HBM\w*)?)?$", device) for name in names.split(", "))


def packages() -> str:
    """Each package: the oldest release that is accepted, the workflow's matrix, and the GPU's records."""

    def rows() -> Iterator[list[str]]:
        for package in PACKAGES:
            limit = f", below {UNTESTED_FROM[package]}" if package in UNTESTED_FROM else ""
            oldest = f"{OLDEST.get(package) or _bound(package)}{limit}"
            matrix = sorted({str(row[package]) for row in _matrix() if package in row}, key=_key)
            yield [package, oldest, ", ".join(matrix) or NONE, ", ".join(_versions(package)) or NONE]

    return markdown_table(("package", "accepted from", "matrix of the workflow", "with a GPU"), rows())


def _bound(package: str) -> str:
    """The oldest release of a package that pyproject.toml accepts."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'"{package}>=([\d.]+)', text)
    return found[1] if found else NONE


def _matrix() -> list[Row]:
    import yaml

    flow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return list(flow["jobs"]["tests"]["strategy"]["matrix"]["include"])


def pythons() -> str:
    """Each Python: the workflow's matrix, and the environments that the wheel was installed into."""

    def rows() -> Iterator[list[str]]:
        minors = {".".join(row["python"].split(".")[:2]): row for row in installs()}
        matrix = {str(row["python"]) for row in _matrix()}
        measured = {".".join(row["versions"]["python"].split(".")[:2]) for row in runs()}
        for minor in ("3.10", "3.11", "3.12", "3.13", "3.14"):
            used = minors.get(minor)
            wheel = f"{used['python']}, {used['system']}, {used['date']}" if used else "no"
            yield [minor, _yes(minor in matrix), wheel, _yes(minor in measured)]

    titles = ("Python", "in the matrix of the workflow", "wheel installed and used", "with a GPU")
    return markdown_table(titles, rows())


def extras() -> str:
    """Each extra for users: the release that was installed into a separate environment, and where."""

    def rows() -> Iterator[list[str]]:
        for row in installs():
            for extra, versions in row.get("extras", {}).items():
                ((package, version),) = versions.items()
                yield [f"`{extra}`", f"{package} {version}", f"{row['python']}, {row['system']}, {row['date']}"]

    return markdown_table(("extra", "package", "Python, system, date"), rows())


def compilers() -> str:
    """Each chip of the record of two Tritons: registers and spills of all launches that both compiled."""
    record = json.loads(COMPILED.read_text(encoding="utf-8"))
    old, new = record["triton"]

    def rows() -> Iterator[list[str]]:
        for chip, found in record["chips"].items():
            worst = max((*found["spills"], {"kernel": "", "bytes": (0, 0)}), key=_growth)
            small, large = worst["bytes"]
            most = f"`{worst['kernel']}`, {small} to {large}" if large > small else NONE
            before, after = found["registers"]
            spilling = " to ".join(map(str, found["spilling"]))
            counts = (found["launches"], f"{100 * (after / before - 1):+.1f} %", found["fewer"], found["more"])
            yield [f"`{chip}`", *map(str, counts), spilling, most]

    titles = ("chip", "launches", "registers", "fewer", "more", "launches that spill", "largest growth, bytes")
    table = markdown_table(titles, rows())
    return f"Triton {old} to {new}, commit {record['tigon_commit']}, {record['date']}:\n\n{table}"


def _growth(launch: Row) -> int:
    before, after = launch["bytes"]
    return int(after - before)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


PARTS: Mapping[str, Callable[[], str]] = {made.__name__: made for made in (gpus, packages, compilers, pythons, extras)}


def written(text: str) -> str:
    """The page with its tables written again."""
    return regions.written(text, "support", PARTS, DOCUMENT)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
