"""`tigon plan`: what it prints, what it refuses, and its charts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")
from tigon.cli.commands import plan
from tigon.errors import TigonError
from tigon.planner.render import as_recipe, terminal
from tigon.planner.request import Request
from tigon.techniques.keys.settings import Settings

pytestmark = pytest.mark.usefixtures("in_one_process")
DEMO = {"model": "tigon-demo", "gpu": "1.25GiB", "batch": 32, "seq": 1024, "optimizer": "adamw", "zero": 0,
        "offload": "none"}  # fmt: skip


def printed(capsys, **changes):
    plan.run(**{**DEMO, **changes})
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def answer(in_one_process):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.run(**DEMO, as_json=True)
    return json.loads(out.getvalue())


def test_evaluation_counts_because_a_recipe_evaluates(capsys):
    """Liger's loss is fused in training and computes all logits in evaluation."""
    from tigon.recipe.keys import DataConfig

    assert DataConfig().eval_fraction > 0, "the recipe's default evaluates, so the plan's default does"
    fixed = {"batch": 4, "checkpointing": "full", "accumulate": 1, "precision": "bf16"}
    found = json.loads(printed(capsys, **fixed, kernels="liger", as_json=True, explain=True))
    assert found["evaluated"] and found["peak_phase"] == "eval"
    assert found["peak_allocated_bytes"] == found["phases"]["eval"]
    assert any(line.startswith("evaluation") for line in found["explanation"])


def test_first_line_answers_for_auto_if_checkpointing_is_left_open(capsys):
    fixed = {"batch": 16, "precision": "bf16"}
    first, second = printed(capsys, **fixed).splitlines()[:2]
    assert first.startswith("tigon-demo fits 1.25GiB (1.25 GiB): 16 samples of 1,024 tokens") and "tokens/s" in first
    assert second.endswith("(checkpointing and micro-batches chosen by auto)")
    wide = {**fixed, "batch": 256, "gpu": "1GiB", "checkpointing": "none", "accumulate": 1}
    first = printed(capsys, **wide).splitlines()[0]
    assert first.startswith("tigon-demo does not fit 1GiB (1.00 GiB) with 256 samples of 1,024 tokens, and no recipe")


def test_adapters_that_were_asked_for_are_no_change_and_installed_packages_no_need(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # no cell of the table wraps
    fixed = {"batch": 4, "precision": "bf16", "checkpointing": "full", "accumulate": 1, "lora": 4}
    text = printed(capsys, **fixed)
    row = next(line for line in text.splitlines() if line.startswith("1  "))
    assert "LoRA 4" in row and row.split()[-1] == "nothing", "bf16 and the adapters were asked for"
    assert "It needs" not in text
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    assert "It needs peft, which this Python does not have." in printed(capsys, **fixed)


def test_longest_row_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    fixed = {"batch": 1, "precision": "bf16", "accumulate": 1}
    lines = printed(capsys, **fixed, longest=True).splitlines()
    tokens = [int(line.split()[0].replace(",", "")) for line in lines[3 : lines.index("")]]
    assert lines[0].startswith(f"tigon-demo on 1.25GiB (1.25 GiB): rows of up to {tokens[0]:,} tokens fit, with ")
    assert tokens == sorted(tokens, reverse=True)


def test_commands_name_the_checkpoint_of_a_preset():
    request = Request(model="llama-3.1-8b", config=None, batch=1, seq=64, settings=Settings.of({}))
    assert "--set model.name=meta-llama/Llama-3.1-8B-Instruct" in as_recipe.command(request)
    assert "name: meta-llama/Llama-3.1-8B-Instruct" in as_recipe.yaml_text(request)
    assert "--set model.name=tigon-demo" in as_recipe.command(replace(request, model="tigon-demo"))


def test_auto_plans_the_choice_and_leaves_it_free_in_the_recommendations(capsys):
    fixed = {"batch": 16, "accumulate": 1, "precision": "bf16"}
    shown = json.loads(printed(capsys, **fixed, checkpointing="auto", as_json=True))
    value = shown["choices"]["checkpointing"]
    assert shown["fits"] and value not in ("auto", "none")
    assert shown["recommended"][0]["choices"]["checkpointing"] == value


def test_json_has_consistent_totals_and_every_promised_key(answer):
    assert sum(answer["components"].values()) == answer["peak_allocated_bytes"] == max(answer["phases"].values())
    assert answer["device_bytes"] == answer["peak_reserved_bytes"] + answer["outside_bytes"]
    assert answer["fits"] == (answer["device_bytes"] <= answer["gpu"]["memory_bytes"]) and answer["fits"] is True
    first = answer["recommended"][0]
    wanted = {"command", "yaml", "peak_allocated_bytes", "step_s", "tokens_per_s", "precision_cost", "cheaper"}
    assert wanted <= set(first) and first["device_bytes"] <= 0.98 * answer["gpu"]["memory_bytes"]
    assert first["cheaper"] and all(other["reason"] for other in first["cheaper"])
    for name in ("largest_batch", "longest_sequence"):
        assert answer[name]["requested"] > 0 and answer[name]["recommended"] > 0


def test_recommended_recipe_says_whether_it_changes_the_numbers(answer):
    for one in answer["recommended"]:
        settings = one["choices"]
        changed = settings["precision"] == "bf16" or settings["optimizer"] != "adamw" or settings["zero"] > 0
        assert bool(one["precision_cost"]) == changed


def test_report_and_explanation_have_the_numbers_of_the_json(answer, capsys):
    text = " ".join(printed(capsys, explain=True).split())
    gib = answer["peak_allocated_bytes"] / 2**30
    assert f"Peak {gib:.2f} GiB allocated ({answer['peak_phase']})" in text and "tigon-demo fits 1.25GiB" in text
    for name, size in answer["components"].items():
        assert f"{name} {size / 2**30:.2f} GiB: " in text
    assert " ".join(answer["recommended"][0]["command"].split()) in text


def test_json_includes_the_explanation(capsys):
    said = json.loads(printed(capsys, explain=True, as_json=True, checkpointing="none"))["explanation"]
    assert any(line.startswith("weights ") for line in said)


def test_micro_batch_follows_from_effective_batch_and_accumulation(capsys):
    found = json.loads(printed(capsys, batch=None, accumulate=4, effective_batch=24, as_json=True))
    assert (found["batch"], found["choices"]["accumulate"]) == (6, 4)
    assert all(one["batch"] * one["choices"]["accumulate"] == 24 for one in found["recommended"])


def test_heads_reach_the_recommended_recipe(capsys, tmp_path):
    from tigon.objectives import recipe_checks

    def asked(**changes):
        fixed = {"batch": 4, "seq": 256, "precision": "bf16", "checkpointing": "none", "accumulate": 1}
        return json.loads(printed(capsys, **fixed, as_json=True, **changes))

    plain = asked()
    peaks = [plain["peak_allocated_bytes"]]
    for stage in (1, 2):
        found = asked(medusa=2, stage=stage)
        peaks.append(found["peak_allocated_bytes"])
        assert found["heads"]["heads.count"] == 2 and "Medusa" not in found["recommended"][0]["label"]
        (tmp_path / "recipe.yaml").write_text(found["recommended"][0]["yaml"])
        recipe = recipe_checks.load(tmp_path / "recipe.yaml", gpu_present=lambda: True)
        assert (recipe.heads.stage, recipe.heads.count) == (stage, 2)
        assert recipe.heads.output == found["heads"]["heads.output"] != "auto"
        assert f"--set heads.stage={stage}" in found["recommended"][0]["command"]
    assert plain["heads"] is None and peaks[1] < peaks[0] < peaks[2]


def test_qlora_alone_means_rank_16(capsys):
    fixed = {"batch": 1, "seq": 64, "precision": "bf16", "checkpointing": "none", "accumulate": 1}
    alone, both = (
        json.loads(printed(capsys, **fixed, as_json=True, qlora=True, **more)) for more in ({}, {"lora": 16})
    )
    assert alone == both
    assert "QLoRA 16" in json.dumps(alone)


WRONG = {
    "gpu": ({"gpu": "h2000"}, "nearest is h200"),
    "model": ({"model": "tigon-dmo"}, "neither a file"),
    "batch": ({"batch": 0}, "--batch is 0"),
    "sequence": ({"seq": 4096}, "max_position_embeddings 2048"),
    "precision": ({"precision": "fp4"}, "--precision is 'fp4'"),
    "optimizer": ({"optimizer": "adam"}, "--optimizer is 'adam'"),
    "checkpointing": ({"checkpointing": "every-0"}, "--checkpointing is 'every-0'"),
    "zero": ({"zero": 4}, "--zero is 4"),
    "kernels": ({"kernels": "fast"}, "--kernels is 'fast'"),
    "no micro-batch": ({"accumulate": 0}, "--accumulate is 0"),
    "lora": ({"lora": 0}, "--lora is 0"),
    "gpus": ({"gpus": -1}, "--gpus is -1"),
    "rows that do not agree": ({"batch": 8, "accumulate": 2, "effective_batch": 24}, "leave one of them out"),
    "micro-batches of no whole rows": ({"batch": None, "accumulate": 5, "effective_batch": 24}, "--accumulate 5"),
    "rows without end": ({"batch": 10**20}, "at most 1048576"),
    "more GPUs than train takes": ({"gpus": 65}, "--gpus is 65; it must be at least 1 and at most 64"),
    "a rank that train refuses": ({"lora": 4097}, "--lora is 4097; it must be at least 1 and at most 4,096"),
    "rows that train refuses": ({"seq": 7}, "--seq is 7; it must be at least 8"),
    "heads without end": ({"medusa": 17}, "--medusa is 17"),
    "no heads": ({"medusa": 0}, "--medusa is 0"),
    "stage": ({"medusa": 2, "stage": 3}, "--stage is 3"),
    "a stage of no heads": ({"stage": 1}, "add --medusa"),
    "heads and Liger": ({"medusa": 2, "kernels": "liger"}, "a loss over several heads, which Liger Kernel lacks"),
    "heads and adapters": ({"medusa": 2, "lora": 8}, "set heads.stage: 2"),
    "no name": ({"model": ""}, "neither a file"),
    "effective batch": ({"gpus": 4, "effective_batch": 6}, "not a multiple"),
    "pair": ({"optimizer": "galore", "zero": 3}, "projects whole matrices"),
    "offload": ({"offload": "cpu"}, "neither is on"),
    "method": ({"method": "guess"}, "--method is 'guess'; choose one of auto, full, lora, qlora"),
    "method and rank": ({"method": "full", "lora": 8}, "--lora contradicts --method full"),
    "method and 4 bits": ({"method": "lora", "qlora": True}, "--qlora contradicts --method lora"),
    "host memory": ({"host_memory": "much"}, "give a size such as 64GiB"),
    "no bf16": ({"gpu": "t4", "precision": "bf16"}, "t4 has no bf16"),
    "no fp8": ({"gpu": "a100", "precision": "fp8"}, "a100-80gb has no FP8 matmuls"),
    "a key of a recipe": ({"assignments": ["train.steps=3"]}, "requires a recipe"),
    "attention": ({"attention": "flash_attention_2"}, "sdpa, eager"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_in_one_line(changes, words):

    with pytest.raises(TigonError) as caught:
        plan.run(**{**DEMO, **changes})
    assert words in str(caught.value) and "\n" not in str(caught.value)


SHAPES = {
    "heads that do not divide": ({"num_key_value_heads": 3}, "does not divide its num_attention_heads 2"),
    "an activation that there is not": ({"hidden_act": "foo"}, "KeyError: 'foo'"),
    "a padding token beyond the vocabulary": ({"pad_token_id": 512}, "within num_embeddings"),
    "no layers": ({"num_hidden_layers": 0}, "at least one layer"),
    "empty products": ({"intermediate_size": 0}, "the shape (0, 32); no size may be 0"),
    "code that takes tuples": ({"return_dict": False}, "AttributeError"),
}


@pytest.mark.parametrize(("changes", "words"), SHAPES.values(), ids=SHAPES)
def test_config_that_describes_no_model_is_refused_in_one_line(changes, words, tmp_path):
    shape = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape | changes))
    with pytest.raises(TigonError) as caught:
        plan.run(**{**DEMO, "model": str(tmp_path)})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_input_exits_with_two_in_a_shell():
    arguments = [sys.executable, "-m", "tigon", "plan", "tigon-demo", "--gpu", "24GiB", "--lora", "0"]
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env={"PYTHONPATH": source})
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("tigon: --lora is 0")
    assert done.stderr.count("\n") == 1


def test_example_in_the_document_has_the_current_numbers():
    from tigon.models.loading.config import load_config
    from tigon.planner.estimate import PHASES, estimate
    from tigon.planner.gpus import find_gpu
    from tigon.planner.request import Request
    from tigon.techniques.keys.settings import Settings

    text = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    example = text.partition("$ tigon plan llama-3.2-1b --gpu 24GiB --batch 4 --seq 8192\n")[2].partition("```")[0]
    chosen = {"train.checkpointing": "full:15,mlp:1", "train.gradient_accumulation": 4}  # what auto chooses
    asked = Settings.of({**chosen, "train.gradient_accumulation_fusion": True})
    request = Request(
        model="llama-3.2-1b", config=load_config("llama-3.2-1b"), batch=1, seq=8192, settings=asked, masked=True
    )
    found = estimate(request, gpu=find_gpu("24GiB"))
    gib = {name: size / 2**30 for name, size in {**found.components, **found.phases}.items()}
    said = dict(re.findall(r"([a-z]+)(?: <)? +(\d+\.\d\d)(?= |$)", example.partition("\nfits, ")[0], re.MULTILINE))
    assert set(said) == set(gib) and set(PHASES) <= set(said)
    assert {name: float(value) for name, value in said.items()} == pytest.approx(gib, rel=0.003, abs=0.006)


def test_chart_is_drawn_with_the_limit_of_the_gpu(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("tigon.planner.render.charts.POINTS", 2)
    printed(capsys, precision="amp-bf16", checkpointing="none", plot=tmp_path / "charts")
    text = (tmp_path / "charts" / "memory.svg").read_text()
    assert text.startswith("<svg") and "1.25GiB" in text and "logits" in text
    assert (tmp_path / "charts" / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_chart_is_not_written_over_a_file(tmp_path):
    (tmp_path / "charts").write_text("mine")
    with pytest.raises(TigonError, match="is a file"):
        plan.run(**DEMO, plot=tmp_path / "charts")
