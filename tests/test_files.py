"""Files that a user names: regular ones are read, everything else is refused at once by what it is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tigon._files import open_regular, read_text
from tigon.bench.record import RunRecord
from tigon.bench.record import load as load_record
from tigon.data.source import sources
from tigon.errors import TigonError
from tigon.models.loading.config import load_config
from tigon.objectives import recipe_checks
from tigon.profiler.render import result
from tigon.recipe import recipe_file
from tigon.sweep import definition

pytestmark = pytest.mark.skipif(
    not hasattr(os, "mkfifo") or not Path("/proc").exists(), reason="special files of Linux"
)
SPECIAL = {
    "fifo": "a named pipe",
    "socket": "a socket",
    "/dev/zero": "a character device",
    "/proc/kmsg": "a file that the kernel generates",
    "/proc/self/environ": "a file that the kernel generates",
}


@pytest.fixture(params=SPECIAL)
def special(request, tmp_path, monkeypatch):
    """Returns the path of a special file and the text that names its kind."""
    monkeypatch.chdir(tmp_path)  # a socket's path has 107 bytes at most
    if request.param == "fifo":
        os.mkfifo("fifo")
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("socket")
    return Path(request.param), SPECIAL[request.param]


def test_special_file_is_refused_with_its_kind_and_without_waiting(special):
    path, what = special
    with pytest.raises(OSError, match=what):
        open_regular(path)
    link = Path("link")
    link.symlink_to(path.absolute())
    with pytest.raises(OSError, match=what):
        open_regular(link)


READERS = {
    "a recipe": lambda path: recipe_checks.load(path, gpu_present=lambda: False),
    "a sweep": definition.load,
    "a bench record": lambda path: load_record(path, RunRecord),
    "a profile": result.read,
    "a config.json": lambda path: load_config(str(path)),
    "data.source": lambda path: sources.check([sources.Source(str(path))]),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_every_reader_refuses_a_special_file(special, reader):
    path, what = special
    with pytest.raises(TigonError, match=what) as caught:
        reader(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_over_the_limit_is_refused_before_it_is_read_whole(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(OSError, match=f"{2**40} bytes is over the limit of 1000 bytes"):
        read_text(path, 1000)
    with pytest.raises(TigonError, match=f"{2**40} bytes is over the limit of {recipe_file.MAX_RECIPE_BYTES} bytes"):
        recipe_checks.load(path, gpu_present=lambda: False)
