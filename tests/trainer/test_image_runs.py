"""Runs of `tigon train` on rows with images: both towers learn, runs resume, adapters stay in the language model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_technique_runs import succeeds
from trainer_helpers import cut_back, losses, records

pytest.importorskip("PIL")

from forks import forks
from tigon.data.packing import Sample
from tigon.errors import DataError
from tigon.techniques.keys.settings import Settings
from tigon.trainer.run import train
from tigon.trainer.run_data import check_every_row_has_images
from vision import example, llava, smolvlm, without_images, write


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a model of text alone, and rows with images."""
    folder = tmp_path_factory.mktemp("vision")
    smolvlm(folder / "model")
    llava(folder / "llava")
    without_images(folder / "text-model")
    example().save_rows(folder / "shapes.jsonl", 40)
    return folder


@pytest.fixture
def run(here: Path, tigon: Any, made: Path) -> Callable[..., Any]:
    """run(sets...): `tigon train` on the rows."""
    mapping = {
        "model": {"name": str(made / "model")},
        "data": {
            "source": str(made / "shapes.jsonl"), "images": 1, "sequence_length": 80, "eval_fraction": 0.1,
            "cache": False,
        },
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "device": "cpu"},
        "output": {"name": "r", "sample_tokens": 0},
    }  # fmt: skip

    def train(*sets: str, resume: bool = False) -> Any:
        path = here / "recipe.yaml"
        path.write_text(yaml.safe_dump(mapping), encoding="utf-8")
        words = [word for text in sets for word in ("--set", text)]
        return tigon("train", path, *words, *(["--resume"] if resume else []))

    return train


def test_a_run_trains_both_towers_and_saves_model_and_processor(run, here, made):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    outcome = run("train.eval_steps=2", "output.sample_tokens=4")
    assert outcome.code == 0, outcome.err
    assert "images   one per row, read by Idefics3Processor" in outcome.out
    folder = here / "runs" / "r"
    assert [record["eval_loss"] for record in records(folder, "eval")][-1] < losses(folder)[0]
    before, after = (load_file(place / "model.safetensors") for place in (made / "model", folder / "model"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert {name.split(".")[1] for name in changed if name.startswith("model.")} == {
        "vision_model", "connector", "text_model",
    }  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    processor = AutoProcessor.from_pretrained(folder / "model")
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
        add_generation_prompt=True,
    )
    image = example().drawn("red", "circle", random.Random(0))
    inputs = processor(text=[text], images=[[image]], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


def test_kernels_give_the_losses_of_the_models_own_code(run, here):
    outcome = run("comparison.steps=3", "comparison.kernels=[none,no-flce,tigon]", "train.steps=1")
    assert outcome.code == 0, outcome.err
    rows = json.loads((here / "runs" / "r" / "summary.json").read_text(encoding="utf-8"))["comparison"]
    assert [row["error"] for row in rows] == [None] * 3
    for row in rows[1:]:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)


def test_a_resumed_run_ends_as_an_uninterrupted_one(run, here):
    sets = ("train.save_steps=2", "output.name=whole")
    assert run(*sets).code == 0
    runs = here / "runs"
    shutil.rmtree(cut_back(runs / "whole", "cut", 4) / "model")
    recipe = runs / "cut" / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("name: whole", "name: cut"), encoding="utf-8")
    outcome = run("train.save_steps=2", "output.name=cut", resume=True)
    assert outcome.code == 0, outcome.err
    want, got = (load_file(runs / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert losses(runs / "cut")[-2:] == losses(runs / "whole")[-2:]


def test_other_images_end_a_resumed_run(run, here, made):
    rows = here / "rows"
    shutil.copytree(made / "images", rows / "images")
    shutil.copy(made / "shapes.jsonl", rows / "shapes.jsonl")
    sets = ("data.source=rows/shapes.jsonl", "train.save_steps=2")
    assert run(*sets).code == 0
    (here / "runs" / "r" / "summary.json").unlink()
    shutil.rmtree(here / "runs" / "r" / "checkpoints" / "checkpoint-4")
    example().drawn("white", "bar", random.Random(9)).save(rows / "images" / "0000.png")
    assert "data" in run(*sets, resume=True).error_line()


def test_adapters_are_on_the_language_model_alone(run, here):
    pytest.importorskip("peft")
    outcome = run("lora.rank=4", "train.checkpointing=full", "output.merge=true")
    assert outcome.code == 0, outcome.err
    adapters = load_file(here / "runs" / "r" / "adapters" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 7, "A and B of seven modules in two layers"
    assert all(".text_model.layers." in name for name in adapters)
    cards = [(here / "runs" / "r" / name / "README.md").read_text(encoding="utf-8") for name in ("adapters", "model")]
    for card in cards:
        assert "pipeline_tag: image-text-to-text" in card and "= AutoModelForImageTextToText.from_pretrained" in card
    assert "model = PeftModel.from_pretrained(base" in cards[0]
    assert losses(here / "runs" / "r")[-1] < losses(here / "runs" / "r")[0]
    assert (here / "runs" / "r" / "model" / "processor_config.json").exists()


@forks
def test_two_processes_train_a_model_that_leaves_a_layer_out(run, here, made):
    """LLaVA does not use the last layer of its vision tower, so that its weights have no gradient."""
    one = ("train.batch_size=8", "data.sequence_length=96", f"model.name={made}/llava", "train.steps=2")
    assert run(*one, "output.name=one").code == 0
    sets = [*one, "train.batch_size=4", "sharding.gpus=2"]
    succeeds(lambda rank: train(here / "recipe.yaml", sets), here, 2)
    assert losses(here / "runs" / "r") == pytest.approx(losses(here / "runs" / "one"), rel=1e-5)


def test_rows_without_images_are_refused_in_two_processes(run, here, made):
    good = (made / "shapes.jsonl").read_text(encoding="utf-8").replace('"images/', f'"{made}/images/')
    row = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}
    (here / "some.jsonl").write_text(good + (json.dumps(row) + "\n") * 9, encoding="utf-8")
    assert run("data.source=some.jsonl", "train.steps=1").code == 0
    text = Sample(*(torch.zeros(4, dtype=torch.int32) for _ in range(3)))
    with pytest.raises(DataError, match="1 of 1 rows have no image"):
        check_every_row_has_images([text], Settings.of({"sharding.gpus": 2}))
    check_every_row_has_images([text], Settings.of({}))


def test_recomputed_layers_give_the_same_losses(run, here):
    assert run("output.name=plain").code == 0
    assert run("train.checkpointing=full").code == 0
    assert losses(here / "runs" / "r") == pytest.approx(losses(here / "runs" / "plain"), rel=1e-6)


REFUSED = {
    "a model of text": (("model.name={made}/text-model",), "reads text alone"),
    "rows with images without the key": (("data.images=0",), "set data.images to the most images of a row"),
    "template": (("data.template=plain",), "data.template: plain has no place for data.images"),
    "truncated rows": (("data.too_long=truncate",), "could cut through an image's tokens"),
    "post-training": (("train.objective=dpo",), "data.images trains the next token's loss"),
    "heads": (("heads.stage=1",), "data.images has not been tried with heads.stage"),
    "prompts": (("eval.generate=[a]",), "write prompts without images"),
    "a size without images": (("data.images=0", "data.image_size=64"), "part of type 'image'"),
    "short samples": (("data.sequence_length=20",), "over data.sequence_length 20"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_is_refused_in_one_line(run, here, made, case):
    sets, reason = REFUSED[case]
    if case == "post-training":
        pytest.importorskip("trl")
    assert reason in run(*(text.format(made=made) for text in sets)).error_line()
    assert not (here / "runs").exists()


def test_a_missing_image_ends_the_run_before_it_begins(run, here, made):
    part = [{"type": "image", "path": "none.png"}, {"type": "text", "text": "q"}]
    row = {"messages": [{"role": "user", "content": part}, {"role": "assistant", "content": "a"}]}
    write(here / "bad.jsonl", row)
    line = run("data.source=bad.jsonl", "data.eval_fraction=0").error_line()
    assert "bad.jsonl:1" in line
    assert "none.png: no such file" in line


def test_a_model_without_its_processor_is_refused(run, here, made):
    shutil.copytree(made / "model", here / "bare")
    for name in ("processor_config.json", "chat_template.jinja"):
        (here / "bare" / name).unlink(missing_ok=True)
    assert "no processor of images" in run("model.name=bare").error_line()


def test_bad_rows_are_left_out_on_request(run, here, made):
    good = (made / "shapes.jsonl").read_text(encoding="utf-8").replace('"images/', f'"{made}/images/')
    (here / "some.jsonl").write_text(good + good.splitlines()[0].replace(".png", ".jpg") + "\n", encoding="utf-8")
    outcome = run("data.source=some.jsonl", "data.bad_rows=skip", "train.steps=1")
    assert outcome.code == 0, outcome.err
    assert "1 rows left out" in outcome.out


def test_a_checkpoint_with_images_can_be_trained_on_text_alone(run, here, made):
    rows = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": f"say {i}"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": f"{i}"}]}]}
        for i in range(20)
    ]  # fmt: skip
    write(here / "text.jsonl", *rows)
    outcome = run("data.source=text.jsonl", "data.images=1")
    assert outcome.code == 0, outcome.err


def test_a_model_trained_on_images_chats_and_is_exported_with_its_processor(run, here, tigon, monkeypatch):
    from transformers import AutoProcessor

    assert run().code == 0
    shown = []
    from tigon.trained.chat import Conversation

    encode = Conversation._encode

    def look(self: Any, messages: Any) -> Any:
        ids = encode(self, messages)
        shown.append(self.loaded.tokenizer.decode(ids))
        return ids

    monkeypatch.setattr(Conversation, "_encode", look)
    outcome = tigon("chat", "runs/r", "--prompt", "What is it?", "--max-tokens", "2")
    assert outcome.code == 0, outcome.err
    assert shown == ["User: What is it?<end_of_utterance>\nAssistant:"]
    outcome = tigon("export", "runs/r", "exported")
    assert outcome.code == 0, outcome.err
    assert type(AutoProcessor.from_pretrained(here / "exported")).__name__ == "Idefics3Processor"
