"""A vision-language model learns the same from images in two processes under each engine as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_engine_pairs import ENGINES, in_two
from trainer_helpers import records

pytest.importorskip("PIL")

from forks import forks, need_deepspeed
from vision import FAMILIES, example


@pytest.mark.second_proof("test_engine_pairs.py has the engines, and test_image_runs.py two processes with images")
@forks
@pytest.mark.parametrize(
    "family, engine",
    [
        pytest.param(family, engine, id=f"{engine.title}-{family}")
        for family in ("smolvlm", "llava")
        for engine in ENGINES
        if family == "smolvlm" or engine.title in ("FSDP2", "ZeRO-3")  # the others hold each model whole
    ],
)
def test_a_model_trains_on_images_under_each_engine_as_alone(family: str, engine: Any, here: Path, tigon: Any) -> None:
    if engine.title.startswith("ZeRO"):
        need_deepspeed()
    FAMILIES[family](here / "model")
    example().save_rows(here / "shapes.jsonl", 24)
    recipe = here / "one.yaml"
    train = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "log_steps": 1, "device": "cpu"}
    data = {"source": "shapes.jsonl", "images": 1, "sequence_length": 96, "eval_fraction": 0.1}
    recipe.write_text(
        yaml.safe_dump({
            "model": {"name": str(here / "model")}, "data": data, "train": train,
            "output": {"name": "one", "sample_tokens": 0},
        }), encoding="utf-8",
    )  # fmt: skip
    assert tigon("train", recipe).code == 0
    run = in_two(here, recipe, engine, "two")
    one, two = ([record["loss"] for record in records(folder, "train")] for folder in (here / "runs" / "one", run))
    assert two == pytest.approx(one, rel=1e-5)
    assert (run / "model" / "processor_config.json").exists()
