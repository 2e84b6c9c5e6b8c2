"""`tigon medusa`, as typed: both stages one after the other, what is left behind, resuming, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import records, tree

from tigon.medusa import HeadsSpec, load_heads

safetensors = pytest.importorskip("safetensors.torch")

QUICK = {"output": {"sample_tokens": 0}}
STAGE_1: dict[str, Any] = {
    "model": {"kernels": "tigon"},
    "train": {"steps": 4, "learning_rate": 0.01},
    "heads": {"stage": 1, "count": 2, "base_steps": 3},
    "output": {"name": "one", "save_model": True, "sample_tokens": 8},
}
STAGE_2: dict[str, Any] = {
    "model": {"name": "runs/one/model", "config": None},
    "data": {"tokenizer": "runs/one/tokenizer"},
    "heads": {"stage": 2, "start": "runs/one/heads", "base_steps": 0},
    "output": {"name": "two"},
}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        for section, values in part.items():
            found[section] = {**found.get(section, {}), **values}
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.load_file(folder / "model.safetensors")


@pytest.mark.charts
def test_stage_2_follows_stage_1(here: Path, recipe: Any, tigon: Any) -> None:
    done = tigon("medusa", recipe("one.yaml", **STAGE_1))
    assert done.code == 0, done.err
    one = here / "runs" / "one"
    assert "2 Medusa heads of 1 residual blocks" in done.out and "the model is frozen" in done.out
    assert torch.equal(weights(one / "model")["model.norm.weight"], weights(one / "base")["model.norm.weight"])
    spec, before = load_heads(one / "heads")
    assert spec == HeadsSpec(count=2, shared=True)
    assert not [name for name in weights(one / "model") if "heads" in name]
    train = records(one, "train")
    assert {"head1_loss", "head2_loss", "head1_top1", "head2_top5"} <= train[0].keys() and "model_loss" not in train[0]
    assert {"eval_loss", "head1_loss", "head2_top3"} <= records(one, "eval")[-1].keys()
    summary = json.loads((one / "summary.json").read_text())
    assert summary["decoded"]["same_text"] == summary["decoded"]["prompts"] > 0
    chart = (one / "charts" / "heads.svg").read_text()
    assert all(words in chart for words in ("head 2", "eval", "unigram entropy")), "a mark without its name"
    report = (one / "report.md").read_text()
    assert "head 2, 3 tokens ahead" in report and "tokens per pass" in report

    done = tigon("medusa", recipe("two.yaml", **merged(STAGE_1, STAGE_2)))
    assert done.code == 0, done.err
    two = here / "runs" / "two"
    after = load_heads(two / "heads")[1]
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items() if name.endswith("weight"))
    assert not torch.equal(weights(two / "model")["model.norm.weight"], weights(one / "model")["model.norm.weight"])
    assert "model_loss" in records(two, "train")[0]
    assert records(two, "train")[0]["model_loss"] < records(two, "train")[0]["loss"]


def test_resumed_run_of_heads_equals_the_uninterrupted_one(here: Path, recipe: Any, tigon: Any) -> None:
    changes = {
        "train": {"steps": 6, "save_steps": 2, "log_steps": 3},  # the record of step 6 begins before checkpoint-4
        "heads": {"stage": 2, "output": "separate", "schedule": "sine", "base_steps": 2},
    }
    path = recipe(**merged(STAGE_1, changes, QUICK))
    assert tigon("medusa", path).code == 0
    one = here / "runs" / "one"
    whole, heads = records(one, "train"), load_heads(one / "heads")[1]
    base = weights(one / "base")
    for name in ("summary.json", "report.md"):
        (one / name).unlink()
    shutil.rmtree(one / "checkpoints" / "checkpoint-6")
    done = tigon("medusa", path, "--resume")
    assert done.code == 0 and ", from checkpoint-4" in done.out, done.err
    resumed = records(one, "train")
    for name in ("head2_loss", "head2_top5"):
        assert [r[name] for r in resumed] == pytest.approx([r[name] for r in whole], rel=1e-6)
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole], rel=1e-6)
    for name, tensor in load_heads(one / "heads")[1].items():
        torch.testing.assert_close(tensor, heads[name])
    assert all(torch.equal(base[name], tensor) for name, tensor in weights(one / "base").items()), "trained anew"


def test_checkpoint_of_stage_1_holds_the_heads_alone(here: Path, recipe: Any, tigon: Any) -> None:
    changes = {"train": {"steps": 4, "save_steps": 2}, "heads": {"base_steps": 0}}
    path = recipe(**merged(STAGE_1, changes, QUICK))
    assert tigon("medusa", path).code == 0
    one = here / "runs" / "one"
    names = set(weights(one / "checkpoints" / "checkpoint-2"))
    assert names and all(name.startswith("draft_heads.") for name in names)
    whole = records(one, "train")
    (one / "summary.json").unlink()
    shutil.rmtree(one / "checkpoints" / "checkpoint-4")
    assert ", from checkpoint-2" in tigon("medusa", path, "--resume").out
    assert [r["loss"] for r in records(one, "train")] == pytest.approx([r["loss"] for r in whole], rel=1e-6)


def test_adapters_and_heads_are_both_saved_and_resumed(here: Path, recipe: Any, tigon: Any) -> None:
    pytest.importorskip("peft")
    changes = {"heads": {"stage": 2}, "lora": {"rank": 2}, "train": {"steps": 4, "save_steps": 2}}
    path = recipe(**merged(STAGE_1, changes, QUICK))
    done = tigon("medusa", path)
    assert done.code == 0, done.err
    one = here / "runs" / "one"
    assert (one / "checkpoints" / "checkpoint-2" / "heads.safetensors").is_file()
    final, base = weights(one / "model"), weights(one / "base")
    assert not torch.equal(final["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(final["model.norm.weight"], base["model.norm.weight"]), "more than the adapters learned"
    whole, heads = records(one, "train"), load_heads(one / "heads")[1]
    (one / "summary.json").unlink()
    shutil.rmtree(one / "checkpoints" / "checkpoint-4")
    assert ", from checkpoint-2" in tigon("medusa", path, "--resume").out
    assert [r["loss"] for r in records(one, "train")] == pytest.approx([r["loss"] for r in whole], rel=1e-6)
    for name, tensor in load_heads(one / "heads")[1].items():
        torch.testing.assert_close(tensor, heads[name])


def test_mtp_module_is_trained(here: Path, recipe: Any, tigon: Any) -> None:
    path = recipe(**merged(STAGE_1, {"heads": {"stage": 2, "kind": "mtp", "count": 1, "base_steps": 0}}))
    done = tigon("medusa", path)
    assert done.code == 0, done.err
    one = here / "runs" / "one"
    assert "1 MTP modules" in done.out
    assert load_heads(one / "heads")[0] == HeadsSpec(kind="mtp", count=1, shared=True)
    losses = [r["head1_loss"] for r in records(one, "train")]
    assert losses[-1] < losses[0]


def test_only_sharegpt_answers_are_learned(here: Path, recipe: Any, tigon: Any) -> None:
    """The model reads the user's turns, and no head is scored on them."""
    turns = [{"from": "human", "value": "lo mi ne?"}, {"from": "gpt", "value": "ka ran ka ran ka ran ka ran"}]
    rows_of = [json.dumps({"conversations": turns}) for _ in range(24)]
    (here / "chat.jsonl").write_text("\n".join(rows_of), encoding="utf-8")
    changes = {"data": {"source": "chat.jsonl", "sequence_length": 64}, "heads": {"base_steps": 0}}
    done = tigon("train", recipe(**merged(STAGE_1, changes)))
    assert done.code == 0, done.err
    one = here / "runs" / "one"
    from tigon.data.source.reading import read
    from tigon.data.tokenizer import encode, load_tokenizer

    tokenizer = load_tokenizer(str(one / "tokenizer"), revision=None, trust_remote_code=False)
    (encoded, *_) = encode(read(("chat.jsonl",), "auto", None), tokenizer)
    learned = tokenizer.decode([label for label in encoded.labels if label != -100])
    assert learned.strip().startswith("ka ran") and "lo mi" not in learned


REFUSED = {
    "no heads": ({"heads": {"stage": None}}, r"heads\.stage is not given; set it to 1 .* use tigon train"),
    "no such heads": ({"heads": {"start": "nowhere"}}, r"heads\.start: nowhere has no config\.json"),
    "nothing to learn": ({"heads": {"layers": 0, "output": "shared"}}, r"no weights to train; set heads\.layers to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_heads_recipe_is_refused_and_leaves_nothing_behind(
    case: str, here: Path, recipe: Any, tigon: Any
) -> None:
    changes, said = REFUSED[case]
    path = recipe(**merged(STAGE_1, changes))
    before = tree(here)
    line = tigon("medusa", path).error_line()
    assert re.search(said, line), line
    assert tree(here) == before


def test_base_steps_for_a_checkpoint_are_refused(here: Path, recipe: Any, tigon: Any) -> None:
    assert tigon("medusa", recipe("one.yaml", **STAGE_1)).code == 0
    again = merged(STAGE_1, STAGE_2, {"heads": {"base_steps": 3}})
    assert "has trained weights" in tigon("medusa", recipe("two.yaml", **again)).error_line()


def test_heads_of_another_model_are_refused(here: Path, recipe: Any, tigon: Any) -> None:
    from tigon.medusa import save_heads

    state = {"blocks.0.layers.0.weight": torch.zeros(16, 16), "blocks.0.layers.0.bias": torch.zeros(16)}
    save_heads(
        HeadsSpec(count=1, shared=True), state, here / "other", head=torch.zeros(8, 16), base="other", n_layers=1
    )
    path = recipe(**merged(STAGE_1, {"heads": {"start": "other"}}))
    before = tree(here)
    assert "hidden states of width 16, but tigon-demo has width 32" in tigon("medusa", path).error_line()
    assert tree(here) == before


@pytest.mark.parametrize("name, wanted", [("kind", "mtp"), ("count", 3), ("layers", 2), ("output", "separate")])
def test_key_that_contradicts_the_heads_in_the_folder_is_refused(
    name: str, wanted: Any, here: Path, recipe: Any, tigon: Any
) -> None:
    from tigon.medusa import save_heads

    state = {"blocks.0.layers.0.weight": torch.zeros(32, 32), "blocks.0.layers.0.bias": torch.zeros(32)}
    save_heads(HeadsSpec(count=1, shared=True), state, here / "one", head=torch.zeros(8, 32), base="one", n_layers=1)
    path = recipe(**merged(STAGE_1, {"heads": {"start": "one", "count": 1, name: wanted}}))
    line = tigon("medusa", path).error_line()
    assert f"heads.{name} is {wanted}, but the heads in one have {name}" in line, line


@pytest.mark.parametrize("wrong", ["vocabulary", "count"])
def test_heads_file_that_does_not_fit_is_refused_before_the_run(
    wrong: str, here: Path, recipe: Any, tigon: Any
) -> None:
    from safetensors.torch import load_file, save_file

    from tigon.medusa import save_heads

    state = {"blocks.0.layers.0.weight": torch.zeros(32, 32), "blocks.0.layers.0.bias": torch.zeros(32)}
    state["lm_heads.0.weight"] = torch.zeros(8, 32)  # of the model's words a few
    save_heads(HeadsSpec(count=1), state, here / "one", head=torch.zeros(8, 32), base="one", n_layers=1)
    if wrong == "count":
        kept = load_file(here / "one" / "model.safetensors")
        save_file({name: t for name, t in kept.items() if "lm_heads" not in name}, here / "one" / "model.safetensors")
    path = recipe(**merged(STAGE_1, {"heads": {"start": "one", "count": 1}}))
    before = tree(here)
    assert "the file of heads does not fit: lm_heads.0.weight" in tigon("medusa", path).error_line()
    assert tree(here) == before


@pytest.mark.parametrize("found", ["3", True, -1])
def test_invalid_number_of_heads_is_refused_in_one_line(found: Any, here: Path, recipe: Any, tigon: Any) -> None:
    (here / "one").mkdir()
    (here / "one" / "config.json").write_text(json.dumps({"medusa_num_heads": found}))
    line = tigon("medusa", recipe(**merged(STAGE_1, {"heads": {"start": "one"}}))).error_line()
    assert f"medusa_num_heads is {found!r}; it must be a whole number" in line
