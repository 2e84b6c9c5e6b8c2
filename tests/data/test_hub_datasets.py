"""Data sets of the hub: what `datasets` is asked for, and what each of its errors says. No test uses the network."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from tigon.data.source import sources
from tigon.data.source.reading import read
from tigon.data.source.sources import Source
from tigon.errors import DataError
from tigon.models.loading import hub
from tigon.recipe.keys import Recipe
from tigon.trainer import prepare

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub_rows(monkeypatch):
    """A stand-in for `load_dataset`: returns the rows in `hub_rows`, and keeps the arguments of the calls."""
    rows = [{"instruction": "q", "input": None, "output": "a"}, {"instruction": "r", "input": "i", "output": "b"}]
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter(rows) if kwargs["streaming"] else datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize("streaming", [False, True])
def test_the_rows_of_a_data_set_are_read(hub_rows, streaming):
    source = Source("owner/name", subset="small", split="test[:2]", revision="v1", streaming=streaming)
    documents = read([source], "auto", None)
    assert [d.origin for d in documents] == ["owner/name/test[:2]:1", "owner/name/test[:2]:2"]
    assert [d.format for d in documents] == ["alpaca", "alpaca"]
    assert hub_rows == [(("owner/name", "small"), {"split": "test[:2]", "revision": "v1", "streaming": streaming})]


def test_the_training_split_is_the_default(hub_rows):
    read(["owner/name"], "auto", None)
    assert hub_rows[0][1]["split"] == "train"


def test_a_stream_is_read_no_further_than_the_limit(monkeypatch):
    seen = []

    def endless(*args, **kwargs):
        while True:
            seen.append(1)
            yield {"text": "x" * 1024}

    monkeypatch.setattr(datasets, "load_dataset", endless)
    assert len(read([Source("owner/name", streaming=True)], "auto", 1 / 64)) == 16 and len(seen) == 17


class DatasetNotFoundError(FileNotFoundError):
    pass


def caused_by_network():
    error = ValueError("cannot load")
    error.__cause__ = ConnectionError("no route")
    return error


ERRORS = {
    "no network": (ConnectionError("Couldn't reach the Hub"), "the hub cannot be reached.*hf download"),
    "no network underneath": (caused_by_network(), "the hub cannot be reached"),
    "no such data set": (DatasetNotFoundError("doesn't exist"), "nor a data set of the hub that you may read.*log in"),
    "no subset": (ValueError("Config name is missing. Pick one of ['en', 'de']"), "set data.subset to one.*'en', 'de'"),
    "no split": (
        ValueError("Unknown split \"tran\". Should be one of ['train']"),
        "data.split is 'train'.*Unknown split",
    ),
    "anything else": (RuntimeError("Dataset scripts\nare no longer supported"), "RuntimeError: Dataset scripts are no"),
}


@pytest.mark.parametrize("error, message", ERRORS.values(), ids=ERRORS.keys())
def test_an_error_is_one_line_that_says_what_to_do(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=f"^owner/name: .*{message}") as caught:
        read(["owner/name"], "auto", None)
    assert "\n" not in str(caught.value)


def test_the_package_itself_says_offline_in_one_line(monkeypatch, tmp_path):
    """The real `load_dataset`, with the network switched off as a run does it."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match=r"^owner/name: neither a local path nor downloaded before.*name its files$"):
        read(["owner/name"], "auto", None)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"data\.source needs the package datasets, .*pip install .*\[train\]"):
        sources.check([Source("owner/name")])


@pytest.mark.parametrize("name", ["data/train.jsonl", "a/b.parquet", "./a/b", "/a/b", "a/b/c", "name"])
def test_a_path_is_no_data_set_of_the_hub(name):
    with pytest.raises(DataError, match=f"{name}: no such file or folder"):
        sources.check([Source(name)])


@pytest.fixture
def asked(monkeypatch):
    """Each call of `set_offline_mode`: the names, and whether the hub is needed whatever they are."""
    calls = []
    monkeypatch.setattr(hub, "set_offline_mode", lambda names, *, needed: calls.append(([*names], needed)))
    return calls


def test_a_data_set_of_the_hub_allows_the_network(asked):
    recipe = Recipe()
    prepare.quiet_libraries(recipe)
    data = dataclasses.replace(recipe.data, source=("owner/name",), eval_source=({"source": "owner/other"},))
    prepare.quiet_libraries(dataclasses.replace(recipe, data=data))
    (plain, plain_needed), (named, _) = asked
    assert not any(map(hub.is_hub_id, plain)) and not plain_needed
    assert {"owner/name", "owner/other"} <= set(named)


def test_tasks_of_an_evaluation_need_the_hub(asked):
    recipe = Recipe()
    prepare.quiet_libraries(dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, lm_eval=("piqa",))))
    assert asked[0][1] is True
