"""Pages in a real browser: what it logs, what it made of the page, and a picture of it.

Chromium runs headless, once for each look. `script` runs in the page after its own scripts; the page under test must
allow it, so it goes into a copy without the content security policy. Looks without a script see the page as it is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed here")
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


@dataclass(frozen=True)
class Look:
    """What one visit saw."""

    dom: str
    console: tuple[str, ...]
    """Messages of the page's scripts and of the browser about the page."""

    def said(self, name: str) -> str:
        """The text that a script left in `<pre id=name>`."""
        found = re.search(rf'<pre id="{name}">(.*?)</pre>', self.dom, re.DOTALL)
        assert found, f"the page has no {name}: {self.console}"
        return found[1]


_SAY = """const say = (id, text) => {
  const said = document.createElement("pre");
  said.id = id;
  said.textContent = text;
  document.body.append(said);
};"""


def look(
    page: Path,
    *,
    width: int = 1200,
    height: int = 900,
    dark: bool = False,
    script: str = "",
    picture: Path | None = None,
) -> Look:
    """Open a file. script: JavaScript that may call `say(name, text)`. picture: a PNG of the window, instead of the
    DOM, is written there."""
    assert CHROMIUM is not None
    visited = page
    if script:
        text = _POLICY.sub("", page.read_text(encoding="utf-8"))
        visited = page.with_name(f"scripted-{page.name}")
        visited.write_text(text.replace("</body>", f"<script>{_SAY}\n{script}</script></body>"), encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--window-size={width},{height}", "--virtual-time-budget=2000", f"--user-data-dir={page.parent / 'chromium'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    command += [f"--screenshot={picture}"] if picture else ["--dump-dom"]
    done = subprocess.run([*command, visited.as_uri()], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    console = tuple(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return Look(done.stdout, console)
