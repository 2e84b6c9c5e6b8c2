"""Every causal language model of transformers trains, or is refused in one line that says why."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import transformers

from benchmarks.pages.model_families import training_table
from second_proofs import proved_by
from tigon.cli.commands.models import train
from tigon.errors import OptionError
from tigon.trainer.family_training import (
    HEADING,
    NOT_BUILT,
    REFUSED,
    TRAINS,
    Attempt,
    TrainedFamily,
    all_families,
    text_line,
    trained_family,
)

pytest.importorskip("peft")
PAGE = Path(__file__).parents[2] / "docs" / "models-trained.md"
KINDS = ("qwen3_5", "gemma3", "mamba", "llama4_text", "falcon_h1", "laguna")
"""A composite checkpoint whose text part is loaded, one that is loaded whole, a family without attention, a router that
returns a tuple, a weight that a kernel reads, and adapters that PEFT would not find again."""
PAGE_LINES = PAGE.read_text(encoding="utf-8").partition("<!-- trained -->\n")[2].partition("\n<!-- /trained -->")[0]
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE_LINES.splitlines()[4:]}


@pytest.fixture(scope="module", autouse=True)
def frozen_objects():
    """The Trainer collects garbage twice per run, which would visit every object of transformers and the tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "name", proved_by(KINDS, sorted({*all_families(), *KINDS}), "each kind of fault has a family that stands for it")
)
def test_family_trains_or_is_refused_in_one_line_as_the_page_says(name, here, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")  # so that what a run sets ends with the test
    family = trained_family(name, here)  # raises what is no refusal
    for attempt in (family.full, family.lora):
        refusals = () if attempt is None else attempt.refusals
        assert all(len(refusal.splitlines()) == 1 for refusal in refusals)
        assert not any("have loss" in refusal for refusal in refusals), "known before the model is loaded"
    if f"transformers {transformers.__version__}:" in PAGE_LINES:
        line = training_table([family]).splitlines()[-1]
        assert ROWS[name] == line, "run `python -m benchmarks.pages.model_families trained`"


def test_page_lists_every_family_of_the_installed_transformers():
    if f"transformers {transformers.__version__}:" not in PAGE_LINES:
        pytest.skip("the page was made with another version of transformers")
    assert set(ROWS) == set(all_families())


def test_outcome_names_the_keys_and_the_reason():
    keys = {"data.packing": "false"}
    family = TrainedFamily(
        "mamba", Attempt(True, keys, ("packing",)), Attempt(False, keys, ("packing", "no | adapters"))
    )
    assert (family.outcome("full"), family.outcome("lora"), family.why) == (TRAINS, REFUSED, "no | adapters")
    line = training_table([family]).splitlines()[-1]
    assert line == "| mamba | trains | refused | `data.packing: false` | no / adapters |"
    assert text_line(family).split() == ["mamba", "trains", "refused", "data.packing:", "false;", "no", "|", "adapters"]
    absent = TrainedFamily("dbrx", None, None, "too large")
    assert (absent.outcome("full"), absent.outcome("lora"), absent.why) == (NOT_BUILT, NOT_BUILT, "too large")


def test_command_trains_the_named_families(capsys, monkeypatch, here):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    train(["gpt2"])
    heading, line = capsys.readouterr().out.splitlines()
    assert heading == HEADING and line.split() == ["gpt2", "trains", "trains"]


def test_family_that_does_not_exist_is_refused():
    with pytest.raises(OptionError, match="nothing is no causal"):
        train(["nothing"])
