"""Folders and files of `data.source`: which are read, in which order, and which are refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tigon.data.documents import BadRows
from tigon.data.source import reading, rows, sources
from tigon.data.source.reading import read
from tigon.errors import DataError


@pytest.fixture
def data(tmp_path):
    """A folder with files at several depths, and one file outside."""
    folder = tmp_path / "data"
    for name in ("b/2.txt", "b.txt", "a/1.md", "c.bin"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    (tmp_path / "outside.txt").write_text("outside", encoding="utf-8")
    return folder


def texts(folder, bad=None, limit=None):
    return [d.text for d in read([str(folder)], "auto", limit, bad)]


def test_folders_are_walked_in_the_order_of_their_paths(data):
    assert texts(data) == [p.read_text() for p in sorted(data.rglob("*")) if p.suffix in (".txt", ".md")]


@pytest.mark.parametrize("source", ["", " "])
def test_an_empty_source_does_not_mean_the_current_folder(data, monkeypatch, source):
    monkeypatch.chdir(data)
    with pytest.raises(DataError, match=r"data\.source: '.*' names no file"):
        read([source], "auto", None)


@pytest.mark.parametrize("limit", [None, 0.001])
def test_the_root_and_the_home_folder_are_refused_before_they_are_listed(data, monkeypatch, limit):
    monkeypatch.setenv("HOME", str(data))
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} was listed"))
    for source, what in (("/", "the root"), (str(data / "a" / ".."), "your home"), ("/proc", "of the kernel")):
        with pytest.raises(DataError, match=f"{what}.* name the folders with data"):
            read([source], "auto", limit, key="data.eval_source")


def test_a_link_out_of_the_folder_is_named_and_not_followed(data, tmp_path):
    for name, target in (("z.txt", tmp_path / "outside.txt"), ("up", tmp_path)):
        link = data / name
        link.symlink_to(target)
        with pytest.raises(DataError, match=f"{name}: a link out of the folder .*, to {tmp_path}.*name its target"):
            texts(data)
        bad = BadRows("skip")
        assert "outside" not in texts(data, bad) and len(bad.problems) == 1 and name in bad.problems[0]
        link.unlink()


def test_a_link_that_the_recipe_names_is_followed(data, tmp_path):
    (tmp_path / "link").symlink_to(data)
    assert texts(tmp_path / "link") == texts(data)


def test_a_link_inside_the_folder_adds_no_text_twice(data):
    plain = texts(data)
    (data / "loop").symlink_to(data)
    (data / "again.txt").symlink_to(data / "b.txt")
    assert texts(data) == plain
    (data / "blob.txt").symlink_to(data / "c.bin")  # as in the cache of the Hugging Face hub
    (data / "blob2.txt").symlink_to(data / "c.bin")
    assert sorted(texts(data)) == sorted([*plain, "c.bin"])


def test_a_snapshot_in_the_hubs_cache_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "datasets--a--b" / "blobs", tmp_path / "datasets--a--b" / "snapshots" / "0f" / "part"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "9a").write_text("from the hub", encoding="utf-8")
    (snapshot / "a.txt").symlink_to("../../../blobs/9a")
    assert texts(snapshot.parent) == texts(snapshot) == ["from the hub"]
    (snapshot / "b.txt").symlink_to("/etc/passwd")
    with pytest.raises(DataError, match=r"b\.txt: a link out of the folder"):
        texts(snapshot)


def test_links_that_lead_nowhere_are_named(data):
    (data / "gone.txt").symlink_to(data / "none")
    with pytest.raises(DataError, match=r"gone\.txt: a link to .*none, which leads nowhere"):
        texts(data)
    (data / "gone.txt").unlink()
    (data / "self").symlink_to(data / "self")
    with pytest.raises(DataError, match=r"self: a link to .*self, which leads nowhere"):
        texts(data)


def test_special_files_and_closed_folders_inside_are_named(data, monkeypatch):
    os.mkfifo(data / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt: cannot be read: a named pipe"):
        texts(data)
    (data / "pipe.txt").unlink()
    scandir = os.scandir

    def closed(path):
        if not isinstance(path, int) and Path(path).name == "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(DataError, match="b: cannot be read: Permission denied; fix"):
        texts(data)
    assert texts(data, BadRows("skip")) == ["a/1.md", "b.txt"]


def test_a_folder_of_too_many_files_is_refused_unless_the_limit_is_reached_before(data, monkeypatch):
    (data / "z").mkdir()
    for number in range(10):
        (data / "z" / f"{number}.txt").touch()
    monkeypatch.setattr(sources, "MAX_ENTRIES", 8)
    with pytest.raises(DataError, match=r"more than 8 files and folders, at .*z; name the folders"):
        texts(data)
    assert texts(data, limit=10 / 2**20) == ["a/1.md"]


def test_a_text_over_the_limit_is_refused_before_it_is_read(data):
    os.truncate(data / "b.txt", 2**41)
    assert texts(data, limit=1.0) == ["a/1.md", "b/2.txt"]
    with pytest.raises(DataError, match=r"b\.txt: the first document has at least 1\.05e\+06 MiB of text, over"):
        texts(data / "b.txt", limit=1.0)


def test_the_newlines_of_windows_do_not_count_for_the_limit(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"a\r\n" * 100)
    assert texts(path, limit=200 / 2**20) == ["a\n" * 100]
    with pytest.raises(DataError, match="the first document has"):
        texts(path, limit=199 / 2**20)


def test_a_row_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 2**20)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b" " * 2**21)
    with pytest.raises(DataError, match=r"t\.jsonl:2: a row of more than 1 MiB"):
        texts(path)


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl"])
def test_a_file_that_grows_is_read_as_it_was_opened(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    opened = reading.open_regular

    def growing(file):
        handle = opened(file)
        os.fstat(handle.fileno())
        inner = handle.readline

        class Growing:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                handle.close()

            fileno, read = handle.fileno, handle.read

            def readline(self, *size):
                with path.open("a", encoding="utf-8") as more:
                    more.write('{"text": "b"}\n')
                return inner(*size)

        return Growing()

    for module in (reading, rows):
        monkeypatch.setattr(module, "open_regular", growing)
    assert len(texts(path)) == 1
