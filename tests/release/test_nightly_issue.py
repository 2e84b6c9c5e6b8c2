"""The issue of the nightly run: one at most, with the tests that fail and the releases that they failed with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "nightly_issue.py"
TITLE = "The next releases of dependencies break tests"
FAILED = """<testsuites><testsuite>
<testcase classname="tests.ops.test_norm" name="test_a[bf16]">
<failure message="TypeError: cache&#10;more">x</failure></testcase>
<testcase classname="tests.ops.test_norm" name="test_b"/>
<testcase classname="tests.models.test_patch" name="test_c"><error message="">ImportError: gone</error></testcase>
<testcase classname="tests.ops.test_norm" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""
PASSED = """<testsuites><testsuite><testcase classname="tests.test_a" name="test_a"/></testsuite></testsuites>"""

GH = """#!{python}
import json, sys
text = sys.stdin.read() if "--body-file" in sys.argv else ""
with open({log!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], text]) + "\\n")
if sys.argv[2] == "list":
    print({listed!r})
"""


def issue_commands(
    folder: Path, report: str | None, open_issues: list[dict[str, object]]
) -> list[tuple[list[str], str]]:
    """What `gh` was told: words and standard input of each call."""
    log, command, file = folder / "log", folder / "gh", folder / "nightly.xml"
    command.write_text(GH.format(python=sys.executable, log=str(log), listed=json.dumps(open_issues)), encoding="utf-8")
    command.chmod(0o755)
    if report is not None:
        file.write_text(report, encoding="utf-8")
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, str(SCRIPT), str(file), "--run", "URL"], env=environment, check=True)
    return [tuple(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]


def test_failures_open_an_issue_that_lists_them_with_the_releases(tmp_path: Path) -> None:
    _, (words, text) = issue_commands(tmp_path, FAILED, [])
    assert words == ["issue", "create", "--title", f"{TITLE}: 2", "--body-file", "-"]
    assert "- `test_a[bf16]`: TypeError: cache\n" in text and "- `test_c`: ImportError: gone\n" in text
    assert "test_b" not in text and "test_d" not in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text and "Run: URL" in text


def test_open_issue_gets_the_new_list(tmp_path: Path) -> None:
    others = [{"number": 3, "title": "Another"}, {"number": 7, "title": f"{TITLE}: 90"}]
    _, (words, text) = issue_commands(tmp_path, FAILED, others)
    assert words[:5] == ["issue", "edit", "7", "--title", f"{TITLE}: 2"] and "test_c" in text


@pytest.mark.parametrize(("open_issues", "closed"), [([{"number": 7, "title": f"{TITLE}: 90"}], ["7"]), ([], [])])
def test_run_without_failures_closes_the_issue_if_there_is_one(
    tmp_path: Path, open_issues: list[dict[str, object]], closed: list[str]
) -> None:
    first, *rest = issue_commands(tmp_path, PASSED, open_issues)
    assert first[0][1] == "list" and [words[1:3] for words, _ in rest] == [["close", number] for number in closed]


def test_missing_report_is_news_too(tmp_path: Path) -> None:
    _, (words, text) = issue_commands(tmp_path, None, [])
    assert words[1] == "create" and "could not be installed" in text


def test_long_list_fits_into_an_issue(tmp_path: Path) -> None:
    case = '<testcase classname="tests.a" name="test_{}"><failure message="' + 150 * "x" + '"/></testcase>'
    many = "".join(case.format(i) for i in range(2000))
    _, (words, text) = issue_commands(tmp_path, f"<testsuite>{many}</testsuite>", [])
    assert words[3] == f"{TITLE}: 2000" and len(text) < 65_536 and text.endswith("the run has them all.")
