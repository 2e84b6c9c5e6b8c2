"""Open or update the issue that lists what the next releases of tigon's dependencies break; `make nightly-issue`.

    python tools/nightly_issue.py build/nightly.xml [--run URL] [--dry-run]

The report is pytest's (`--junitxml`). There is one open issue at most: it gets the new list, and is closed when all
tests pass. `gh`, GitHub's command, writes it; GH_TOKEN needs the permission `issues: write`. A report that is missing
says that the environment could not be installed, which is news too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

TITLE = "The next releases of dependencies break tests"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "tokenizers",
    "deepspeed",
    "kernels",
    "numpy",
)
# GitHub takes bodies of at most 65,536 characters.
LONGEST = 60_000
LONGEST_REASON = 200


def failures(report: Path) -> dict[str, list[tuple[str, str]]]:
    """File of tests -> (test, first line of its error)."""
    found = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            found[case.get("classname", "").replace(".", "/")].append(
                (case.get("name", ""), lines[0][:LONGEST_REASON] if lines else "no message")
            )
    return dict(found)


def installed() -> str:
    """The releases that the tests ran with."""

    def release(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return ", ".join(f"{package} {release(package)}" for package in PACKAGES)


def body(found: dict[str, list[tuple[str, str]]], run: str) -> str:
    """The issue's text: the releases, then each file with its tests and errors."""
    lines = [f"Installed: {installed()}.", f"Run: {run}" if run else "", ""]
    for file, tests in sorted(found.items(), key=lambda entry: -len(entry[1])):
        lines.append(f"### {file}: {len(tests)}")
        lines += [f"- `{test}`: {reason}" for test, reason in tests]
        lines.append("")
    text = "\n".join(lines)
    if len(text) > LONGEST:
        text = text[:LONGEST].rsplit("\n", 1)[0] + "\n\nMore failed; the run has them all."
    return text


def gh(*words: str, text: str | None = None) -> str:
    done = subprocess.run(["gh", "issue", *words], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gh issue {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def open_issue() -> str | None:
    """The number of the open issue."""
    listed = json.loads(gh("list", "--state", "open", "--search", f'in:title "{TITLE}"', "--json", "number,title"))
    return next((str(issue["number"]) for issue in listed if issue["title"].startswith(TITLE)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--run", default="", metavar="URL", help="page of the run, for the issue")
    parser.add_argument("--dry-run", action="store_true", help="print the issue instead of writing it")
    options = parser.parse_args()
    if options.report.exists():
        found = failures(options.report)
    else:
        found = {"setup": [("make setup", "the environment could not be installed, or the tests did not end")]}
    text, count = body(found, options.run), sum(map(len, found.values()))
    title = f"{TITLE}: {count}"
    if options.dry_run:
        print(f"{title}\n\n{text}")
        return
    number = open_issue()
    if not found:
        if number:
            gh("close", number, "--comment", f"All tests pass. {body({}, options.run)}")
    elif number:
        gh("edit", number, "--title", title, "--body-file", "-", text=text)
    else:
        gh("create", "--title", title, "--body-file", "-", text=text)


if __name__ == "__main__":
    main()
