"""A process that waits too long is ended with its children, and says where each waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_stacks import descendants, end_with_stacks

CHILD = "import time\ndef waits_here():\n    open({path!r}, 'w').close(); time.sleep(60)\nwaits_here()"
PARENT = (
    "import subprocess, sys\ndef parent_waits():\n"
    "    subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)\nparent_waits()"
)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found as on Linux")
def test_stacks_of_a_process_and_its_child_in_another_session_are_returned(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = PARENT.format(child=CHILD.format(path=str(begun)))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip
    limit_s = time.monotonic() + 20
    while not begun.exists():
        assert time.monotonic() < limit_s
        time.sleep(0.05)
    (child,) = descendants(process.pid)
    printed = end_with_stacks(process)
    assert "in waits_here" in printed
    assert not Path("/proc", str(child)).exists()
