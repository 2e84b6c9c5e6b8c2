"""Rows with images: the forms in which people store them, their tokens and labels, batches, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from PIL import Image

from tigon.data.chat.chat_template import Rendering
from tigon.data.documents import BadRows
from tigon.data.image_rows import PicturedRows
from tigon.data.images import (
    Encoder,
    PicturedCollator,
    PicturedSample,
    load_processor,
    samples,
)
from tigon.data.packing import fingerprint
from tigon.data.source.reading import read
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import DataError, RecipeError
from vision import FAMILIES, checkpoint_in, example, without_images, write

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "What is it?"}
ANSWER = {"role": "assistant", "content": "A dog."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (20, 12), colour).save(tmp_path / name)
    return tmp_path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """checkpoint(family): a checkpoint with its processor, made once."""
    return partial(checkpoint_in, tmp_path_factory.mktemp("vision"))


def processor_of(folder: Path) -> Any:
    return load_processor(str(folder), revision=None, trust_remote_code=False)


def test_saved_processor_does_not_say_how_this_machine_loaded_it(checkpoint: Any, tmp_path: Path) -> None:
    processor = processor_of(checkpoint("smolvlm"))
    processor.save_pretrained(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.json"):
        assert not {"local_files_only", "is_local"} & json.loads(file.read_text()).keys(), file


def documents(folder: Path, *rows: Any, most: int = 2) -> list[Any]:
    return read([str(write(folder / "rows.jsonl", *rows))], PicturedRows(most), None)


def encoded(folder: Path, processor: Any, *rows: Any, **how: Any) -> list[Any]:
    encoder = Encoder(processor, Rendering(**how), len(processor.tokenizer), None, BadRows())
    return encoder.encode(documents(folder, *rows))


def chat(*content: Any, answer: Any = ANSWER, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, answer], **columns}


def data_url(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


FORMS = {
    "a path in a part": lambda f: chat({**IMAGE, "path": "a.png"}, TEXT),
    "TRL's key": lambda f: chat({**IMAGE, "image": "a.png"}, TEXT),
    "an absolute path": lambda f: chat({**IMAGE, "path": str(f / "a.png")}, TEXT),
    "a file URL": lambda f: chat({**IMAGE, "url": f"file://{f / 'a.png'}"}, TEXT),
    "OpenAI's part": lambda f: chat({"type": "image_url", "image_url": {"url": data_url(f / "a.png")}}, TEXT),
    "a column that fills a place": lambda f: chat(IMAGE, TEXT, images=["a.png"]),
    "the column of the package datasets": lambda f: chat(IMAGE, TEXT, images=[{"bytes": None, "path": "a.png"}]),
    "a column and plain text": lambda f: {
        "messages": [{"role": "user", "content": "What is it?"}, ANSWER], "image": "a.png",
    },
    "LLaVA's mark": lambda f: {
        "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A dog."}],
        "image": "a.png",
    },
    "a prompt and its completion": lambda f: {"prompt": "What is it?", "completion": "A dog.", "images": ["a.png"]},
    "Alpaca's columns": lambda f: {"instruction": "What is it?", "output": "A dog.", "images": "a.png"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_row_gives_the_same_messages_and_image(folder, form):
    (document,) = documents(folder, FORMS[form](folder))
    assert [message.as_mapping()["content"] for message in document.messages] == [
        [IMAGE, TEXT], [{"type": "text", "text": "A dog."}],
    ]  # fmt: skip
    (image,) = document.images
    assert image.read() == (folder / "a.png").read_bytes()


def test_images_keep_their_order_over_turns_and_system_messages(folder):
    turns = [
        {"role": "user", "content": [TEXT, IMAGE]}, ANSWER,
        {"role": "user", "content": [{**IMAGE, "path": "b.png"}, TEXT]}, ANSWER,
    ]  # fmt: skip
    (document,) = documents(folder, {"messages": turns, "system": "Be brief.", "images": ["a.png"]})
    assert [image.path.name for image in document.images] == ["a.png", "b.png"]
    assert [[part["type"] for part in message.parts] for message in document.messages] == [
        ["text"], ["text", "image"], ["text"], ["image", "text"], ["text"],
    ]  # fmt: skip


WRONG = {
    "too many images": (chat(IMAGE, IMAGE, IMAGE, images=["a.png"] * 3), "3 images, and data.images is 2"),
    "more places than images": (chat(IMAGE, IMAGE, TEXT, images=["a.png"]), "2 places for images, but the row's"),
    "a place without image": (chat(IMAGE, TEXT), "1 places for images, but the row's column has 0"),
    "an image of the assistant": (
        chat({**IMAGE, "path": "a.png"}, answer={"role": "assistant", "content": [{**IMAGE, "path": "b.png"}, TEXT]}),
        "message 1: an image of the assistant cannot be learned",
    ),
    "an address": (chat({**IMAGE, "url": "https://x.org/a.png"}, TEXT), "tigon downloads no images"),
    "a video": (chat({"type": "video", "path": "a.mp4"}, TEXT), "a part of type 'video'"),
    "plain text": ({"text": "t", "images": ["a.png"]}, "images beside plain text"),
    "damaged base64": (chat({**IMAGE, "url": "data:image/png;base64,&&&&"}, TEXT), "no valid base64"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(folder, case):
    row, reason = WRONG[case]
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as refused:
        documents(folder, chat({**IMAGE, "path": "a.png"}, TEXT), row)
    assert reason in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_answers_tokens_are_learned_and_images_become_tokens(folder, checkpoint, family):
    processor = processor_of(checkpoint(family))
    turns = [
        {"role": "user", "content": [TEXT, {**IMAGE, "path": "a.png"}]}, ANSWER,
        {"role": "user", "content": [{**IMAGE, "path": "b.png"}, TEXT]}, {**ANSWER, "content": "A blue cat."},
    ]  # fmt: skip
    one, two = encoded(folder, processor, chat({**IMAGE, "path": "a.png"}, TEXT), {"messages": turns})
    for row, answers in ((one, [" A dog."]), (two, [" A dog.", " A blue cat."])):
        learned = [token for token in row.labels if token != IGNORE_INDEX]
        assert processor.tokenizer.decode(learned) == "".join(f"{text}<end_of_utterance>\n" for text in answers)
        assert [t for t, label in zip(row.tokens, row.labels, strict=True) if label != IGNORE_INDEX] == learned
    n_images = [row.tokens.count(processor.image_token_id) for row in (one, two)]
    assert n_images[0] > 1
    assert n_images[1] == 2 * n_images[0]


def test_all_tokens_but_the_images_are_learned_on_request(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    (row,) = encoded(folder, processor, chat({**IMAGE, "path": "a.png"}, TEXT), learn="all")
    ignored = {token for token, label in zip(row.tokens, row.labels, strict=True) if label == IGNORE_INDEX}
    assert ignored == {processor.image_token_id}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_what_the_processor_makes_with_labels_and_padding(folder, checkpoint, family):
    processor = processor_of(checkpoint(family))
    rows = (
        chat({**IMAGE, "path": "a.png"}, TEXT), {"messages": [{"role": "user", "content": "Hello?"}, ANSWER]},
        chat({**IMAGE, "path": "a.png"}, {**IMAGE, "path": "b.png"}, TEXT),
    )  # fmt: skip
    made = samples(encoded(folder, processor, *rows), 256, too_long="error").samples
    pictured = [sample for sample in made if isinstance(sample, PicturedSample)]
    assert len(made) == 3
    assert len(pictured) == 2
    collate = PicturedCollator(0, packing=False, processor=processor)
    batch = collate(made)
    own = processor(
        text=[sample.text for sample in pictured],
        images=[[image.decoded(None) for image in sample.images] for sample in pictured],
        add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt",
    )  # fmt: skip
    rows_with_images = [number for number, sample in enumerate(made) if isinstance(sample, PicturedSample)]
    width = own["input_ids"].shape[1]
    for name, value in own.items():
        if value.shape == own["input_ids"].shape:
            assert torch.equal(batch[name][rows_with_images, :width], value), name
        else:
            assert torch.equal(batch[name], value), name
    assert batch["attention_mask"].sum() == sum(len(sample.tokens_T) for sample in made)
    assert ((batch["labels"] == batch["input_ids"]) | (batch["labels"] == IGNORE_INDEX)).all()
    alone = collate([sample for sample in made if not isinstance(sample, PicturedSample)])
    assert "pixel_values" not in alone


def test_a_large_image_is_scaled_down_and_other_modes_become_rgb(folder):
    Image.new("RGBA", (64, 48), "red").save(folder / "large.png")
    (document,) = documents(folder, chat({**IMAGE, "path": "large.png"}, TEXT))
    image = document.images[0].decoded(32)
    assert (image.size, image.mode) == ((32, 24), "RGB")


def test_bytes_and_decoded_images_of_the_package_datasets_are_read(folder):
    content = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(content, format="PNG")
    for value in ({"bytes": content.getvalue(), "path": None}, Image.new("RGB", (8, 8), "red")):
        document = PicturedRows(1).read(chat(IMAGE, TEXT, images=[value]), "set/train:1")
        assert document.images[0].decoded(None).getpixel((0, 0)) == (255, 0, 0)


def test_images_of_a_data_set_stay_the_bytes_of_their_files(folder):
    datasets = pytest.importorskip("datasets")
    from tigon.data.source.rows import with_stored_images

    content = (folder / "a.png").read_bytes()
    held = {"bytes": content, "path": None}
    row = chat(IMAGE, TEXT)
    features = datasets.Features({"image": datasets.Image(), "images": datasets.List(datasets.Image())})
    rows = datasets.Dataset.from_dict({"image": [held], "images": [[held]]}, features=features)
    (read_row,) = with_stored_images(rows)
    for name in ("image", "images"):
        document = PicturedRows(1).read({**row, name: read_row[name]}, "set/train:1")
        assert document.images[0].read() == content


def test_missing_and_damaged_images_are_named(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    (folder / "bad.png").write_bytes(b"no image")
    for name, reason in (("none.png", "no such file"), ("bad.png", "Pillow cannot read it")):
        with pytest.raises(DataError, match=r"rows\.jsonl:1") as refused:
            encoded(folder, processor, chat({**IMAGE, "path": name}, TEXT))
        assert reason in str(refused.value)
        assert name in str(refused.value)


def test_an_image_token_in_the_text_is_refused(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    row = chat({**IMAGE, "path": "a.png"}, {"type": "text", "text": "<image>?"})
    with pytest.raises(DataError, match="2 places for 1 images"):
        encoded(folder, processor, row)


def test_rows_longer_than_a_sample_are_refused_or_dropped(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    rows = encoded(folder, processor, chat({**IMAGE, "path": "a.png"}, TEXT))
    with pytest.raises(DataError, match=r"over data\.sequence_length 16"):
        samples(rows, 16, too_long="error")
    dropped = samples(rows, 16, too_long="drop")
    assert (dropped.samples, dropped.n_dropped) == ([], 1)


def test_the_fingerprint_changes_with_an_image(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    row = chat({**IMAGE, "path": "a.png"}, TEXT)
    before = fingerprint(samples(encoded(folder, processor, row), 96, too_long="error").samples)
    Image.new("RGB", (20, 12), "green").save(folder / "a.png")
    assert fingerprint(samples(encoded(folder, processor, row), 96, too_long="error").samples) != before


def test_an_image_that_changes_its_size_during_training_is_refused(folder, checkpoint):
    processor = processor_of(checkpoint("smolvlm"))
    processor.image_processor.do_image_splitting = True
    processor.image_processor.size = {"longest_edge": 64}
    Image.new("RGB", (60, 20), "green").save(folder / "a.png")
    made = samples(encoded(folder, processor, chat({**IMAGE, "path": "a.png"}, TEXT)), 256, too_long="error").samples
    Image.new("RGB", (20, 60), "green").save(folder / "a.png")
    with pytest.raises(DataError, match="other tokens than before training"):
        PicturedCollator(0, packing=False, processor=processor)(made)


def test_a_checkpoint_without_processor_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="processor"):
        processor_of(without_images(tmp_path / "text"))


def test_the_example_draws_every_shape(tmp_path):
    made = example()
    made.save_rows(tmp_path / "rows.jsonl", 40)
    rows = read([str(tmp_path / "rows.jsonl")], PicturedRows(1), None)
    assert {row.messages[1].content.split()[2].rstrip(".") for row in rows} == set(made.SHAPES)
    assert all(row.images[0].decoded(None).size == (made.SIZE, made.SIZE) for row in rows)
