"""The examples of the documentation: reads them, runs them, writes their output again.

    python tests/docs/page_examples.py              # rewrite what differs; `make pages` does it
    python tests/docs/page_examples.py README.md    # of one page only

A page holds examples in these forms. `test_page_examples.py` refuses a fenced block of any other kind.

- A ```console block starts with `$ command`; the rest is what the command prints on stdout.
- A ```python block runs. Blocks of a page share their names and run in order. A comment that begins with
  `<!-- python` holds code that runs and is not shown: what the reader has at hand, such as a model.
- What Python prints stands below it, in an ```output block or, as Markdown, between `<!-- prints -->` and
  `<!-- /prints -->`.
- A ```sh block holds commands without output. They are not run; their flags, files and keys are looked up.

A comment `<!-- file: PATH -->` or `<!-- row: PATH -->` above a ```python block makes it a file of the repository or a
row of a table in one. `tests/test_adding.py` writes it into a copy and runs that.

Comments directly above a ```console block change how it is compared:

- `<!-- shown: FILTER -->`: the page shows what this shell command leaves of the output, `head -20` for instance.
- `<!-- varies: REGEX -->`: what matches may differ between machines.
- `<!-- slow: REASON -->`: `make pages` runs it, the test does not.
- `<!-- no-gpu -->`: the output is that of a machine without a GPU.
- `<!-- made with torch V, transformers V -->`: written by this program. With these versions the output must be the
  same. With others its numbers may differ by OTHER_VERSIONS.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
OTHER_VERSIONS = 0.05
"""How far a number may be from the page's with other versions, as in tests/planner/test_plan_accuracy.py."""
COLUMNS = 120
"""Width of the terminal that the pages show."""
# test_math.py checks the blocks of the maths. The log keeps what a command printed on its day.
ELSEWHERE = (
    "docs/math.md",
    "docs/math-losses.md",
    "docs/math-logprobs.md",
    "docs/math-hybrid.md",
    "docs/log/2026-11.md",
)

_FENCE = re.compile(
    r"(?P<marks>(?:^<!-- (?:shown: |varies: |slow: |no-gpu|made with |file: |row: )[^\n]*-->\n)*)"
    r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$"
    r"|^<!-- python\n(?P<hidden>.*?)^-->$"
    r"|^<!-- prints -->\n(?P<printed>.*?)^<!-- /prints -->$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block, hidden piece of code or printed region of a page."""

    page: str
    line: int
    kind: str
    """The fence's language; `hidden` for code in a comment, `printed` for Markdown that code prints."""
    body: str
    marks: str
    whole: str
    """The text in the page from its first mark to its closing fence."""

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def command(self) -> str:
        return self.body.partition("\n")[0].removeprefix("$ ")

    @property
    def output(self) -> str:
        return self.body.partition("\n")[2] if self.kind == "console" else self.body

    def mark(self, name: str) -> str | None:
        """The text of a mark: empty for a mark without a text, None if there is no such mark."""
        found = re.search(rf"^<!-- {name}:? ?(.*?) ?-->$", self.marks, re.MULTILINE)
        return found[1] if found else None

    def written(self, output: str) -> str:
        """The block with this output."""
        if self.kind == "printed":
            return f"<!-- prints -->\n{output}<!-- /prints -->"
        if self.kind == "output":
            return f"```output\n{output}```"
        kept = [line for line in self.marks.splitlines() if not line.startswith("<!-- made with ")]
        return "\n".join([*kept, f"<!-- made with {versions()} -->", "```console", f"$ {self.command}\n{output}```"])

    def difference(self, output: str) -> str:
        """The difference between the page and `output`; empty if they agree."""
        old, new = self.output, output
        if pattern := self.mark("varies"):
            old, new = (re.sub(pattern, "#", text) for text in (old, new))
        if old == new:
            return ""
        if self.kind == "console" and self.mark("made with") != versions() and _agree_to(OTHER_VERSIONS, old, new):
            return ""
        return f"{self.id} shows\n{self.output}\nbut it prints\n{output}\nmake pages writes it again"


def _agree_to(share: float, old: str, new: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by at most this share. Blanks align columns."""
    if _NUMBER.sub("#", old).split() != _NUMBER.sub("#", new).split():
        return False
    pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    values = [tuple(float(number.replace(",", "")) for number in pair) for pair in pairs]
    return all(abs(a - b) <= share * max(abs(a), abs(b)) for a, b in values)


def versions() -> str:
    """Versions that predictions depend on, without the build."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))


def pages() -> list[str]:
    """Every page, as a path from the root of the repository."""
    files = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "README.md",
    ]
    names = {file.relative_to(ROOT).as_posix() for file in files}
    return sorted(names - set(ELSEWHERE))


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def read_blocks(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page in order."""
    text = text_of(page) if text is None else text
    return [_block(page, match, text.count("\n", 0, match.start()) + 1) for match in _FENCE.finditer(text)]


def _block(page: str, match: re.Match[str], line: int) -> Block:
    found = match.groupdict()
    if found["kind"] is not None:
        return Block(page, line, found["kind"], found["body"], found["marks"], match[0])
    kind, body = ("hidden", found["hidden"]) if found["hidden"] is not None else ("printed", found["printed"])
    return Block(page, line, kind, body, "", match[0])


# --- running ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder like a checkout, as the current one, into which examples may write."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        for linked in ("recipes", "benchmarks", "docs", "examples"):
            (Path(name) / linked).symlink_to(ROOT / linked)
        os.chdir(name)
        try:
            with mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}):
                yield Path(name)
        finally:
            os.chdir(before)


def run_command(command: str, shown: str | None = None) -> str:
    """stdout of `tigon ...`, run in this process, and what the shell command `shown` leaves of it.

    Raises AssertionError for another program and for an exit code that is not 0.
    """
    from tigon.cli import app

    program, *arguments = shlex.split(command)
    assert program == "tigon", f"`{command}` is not a command of tigon's"
    out, err = io.StringIO(), io.StringIO()
    with (
        workspace(), mock.patch.object(sys, "argv", ["tigon", *arguments]),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            app.main()
        except SystemExit as stop:
            assert not stop.code, f"`{command}` ends with exit code {stop.code}: {err.getvalue()}"
    printed = out.getvalue()
    if shown:
        printed = subprocess.run(["sh", "-c", shown], input=printed, capture_output=True, text=True, check=True).stdout
    return _without_trailing_blanks(printed)


def run_python(blocks: Sequence[Block]) -> list[tuple[Block, str]]:
    """Runs the Python of one page in order; (block, output) of each that shows what the code above it prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown: list[tuple[Block, str]] = []
    printed: str | None = None
    with workspace(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            if block.mark("file") is not None or block.mark("row") is not None:
                continue
            if block.kind in ("python", "hidden"):
                printed = _run_block(block, namespace)
            elif block.kind in ("output", "printed"):
                assert printed is not None, f"{block.id} has no Python above it"
                shown.append((block, printed))
    return shown


def _run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Runs a block and returns what it prints; the names it defines go into `namespace`."""
    out, first = io.StringIO(), 1 if block.kind == "hidden" else 1 + block.marks.count("\n")
    tree = ast.increment_lineno(ast.parse(block.body, block.page), block.line + first - 1)
    with contextlib.redirect_stdout(out):
        exec(compile(tree, str(ROOT / block.page), "exec"), namespace)
    return _without_trailing_blanks(out.getvalue())


def _without_trailing_blanks(text: str) -> str:
    """rich fills a table's last column; editors and reviews take blanks at the end of a line for a mistake."""
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


def rewrite(page: str) -> bool:
    """Writes the outputs of a page anew where they differ; whether any did."""
    text = before = text_of(page)
    blocks = read_blocks(page)
    outputs = [(block, run_command(block.command, block.mark("shown"))) for block in blocks if block.kind == "console"]
    for block, output in [*outputs, *run_python(blocks)]:
        stale = block.kind == "console" and block.mark("made with") != versions()
        if stale or block.difference(output):
            text = text.replace(block.whole, block.written(output), 1)
    if text != before:
        (ROOT / page).write_text(text, encoding="utf-8")
    return text != before


def main(arguments: Sequence[str]) -> None:
    unknown = set(arguments) - set(pages())
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))} is none of the pages {', '.join(pages())}")
    for page in arguments or pages():
        if rewrite(page):
            print(f"wrote {page}")


if __name__ == "__main__":
    main(sys.argv[1:])
