"""A trained model is found by its run, folder or hub id, and everything else is refused in one line."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tigon.errors import RunFolderError, UsageError
from tigon.trained.find import TrainedModel, find


def test_a_checkpoint_is_its_own_weights_and_tokenizer(checkpoint):
    assert find(str(checkpoint)) == TrainedModel(weights=str(checkpoint), tokenizer=str(checkpoint))


def test_adapters_name_their_base_and_use_its_tokenizer(checkpoint, adapter):
    assert find(str(adapter)) == TrainedModel(weights=str(checkpoint), tokenizer=str(checkpoint), adapter=adapter)


def test_a_run_holds_its_model(run, checkpoint):
    shutil.copytree(checkpoint, run / "model")
    found = find(str(run))
    assert (found.weights, found.adapter, found.heads) == (str(run / "model"), None, None)


def test_a_run_of_adapters_is_loaded_through_them_even_beside_a_merged_model(run, checkpoint, adapter):
    shutil.copytree(checkpoint, run / "model")
    shutil.copytree(adapter, run / "adapters")
    found = find(str(run))
    assert (found.weights, found.adapter) == (str(checkpoint), run / "adapters")


def test_a_run_of_heads_alone_uses_the_checkpoint_of_its_recipe(run, checkpoint):
    (run / "heads").mkdir()
    (run / "heads" / "config.json").write_text("{}")
    found = find(str(run))
    assert (found.weights, found.tokenizer) == (str(checkpoint), str(run / "tokenizer"))
    assert found.heads == run / "heads"


def test_a_hub_id_is_passed_on():
    assert find("owner/model").weights == "owner/model"


def test_a_run_that_does_not_exist_is_no_hub_id_and_those_that_do_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"runs/mine is not a folder, and there is no folder runs; give"):
        find("runs/mine")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"runs/mine is not a folder, and runs holds 1 folder: first; give"):
        find("runs/mine")


@pytest.mark.parametrize("name", ["no-such-folder", "", "a/b/c", "llama-3.2-1b"])
def test_other_names_are_refused_with_what_to_give(name):
    with pytest.raises(UsageError, match="give a run folder"):
        find(name)


def test_a_gguf_file_is_refused_with_the_programs_that_run_it(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"which Ollama and llama\.cpp run; give the folder"):
        find(str(tmp_path / "m.gguf"))


def test_an_unfinished_run_says_how_to_finish_it(run):
    with pytest.raises(RunFolderError, match=r"tigon train .*recipe.yaml --resume"):
        find(str(run))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no recipe\.yaml, config\.json or adapter_config\.json"):
        find(str(tmp_path))


@pytest.mark.parametrize("base", [None, "", "gone/away/entirely"])
def test_adapters_whose_base_cannot_be_found_are_refused(tmp_path, adapter, base):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    declared = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(declared | {"base_model_name_or_path": base}))
    with pytest.raises(UsageError, match="base_model_name_or_path"):
        find(str(folder))


@pytest.mark.parametrize(("part", "config"), [("adapters", "adapter_config.json"), ("heads", "config.json")])
def test_a_part_of_a_run_that_is_not_complete_is_not_passed_over(run, checkpoint, adapter, part, config):
    """The merged model beside it is another result."""
    shutil.copytree(checkpoint, run / "model")
    shutil.copytree(adapter if part == "adapters" else checkpoint, run / part)
    (run / part / config).unlink()
    with pytest.raises(RunFolderError, match=rf"{part} is not complete: it has no {config}"):
        find(str(run))
    shutil.rmtree(run / part)
    assert find(str(run)).weights == str(run / "model")


@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_an_adapter_config_that_cannot_be_read_is_not_passed_over(tmp_path, checkpoint, kind):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    place = folder / "adapter_config.json"
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        find(str(folder))
