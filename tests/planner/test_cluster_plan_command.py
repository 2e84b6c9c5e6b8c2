"""`tigon plan --nodes`: what it prints and refuses. Without --nodes and --link nothing changes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from tigon.cli import plan, plan_cluster
from tigon.cli.plan_request import Flags, problem_of
from tigon.errors import TigonError
from tigon.planner.gpus import find_gpu

ASKED = {"model": "llama-3.1-8b", "gpus": 8, "nodes": 4, "link": "400Gb", "batch": 1, "seq": 4096}


@pytest.fixture(autouse=True)
def _full_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # test processes have it, and tables would wrap


def printed(capsys, **changes):
    plan.run(**{**ASKED, **changes})
    return capsys.readouterr().out


def test_table_marks_the_divisions_that_tigon_does_not_run(capsys):
    text = printed(capsys)
    assert "4 x 8 h100" in text and "400 Gb/s per GPU between nodes" in text
    rows = {line.split("  ")[1].strip(): line for line in text.splitlines() if line.lstrip()[:1].isdigit()}
    assert all(" tigon " in rows[name] for name in ("FSDP2", "FSDP2 + TP 8", "FSDP2 within nodes"))
    pipelines = [row for name, row in rows.items() if "PP" in name]
    assert pipelines and all(" others " in row for row in pipelines)
    assert "all-gather of weights" in text and "The fastest that tigon runs" in text


def test_json_has_memory_traffic_and_time_of_every_division(capsys):
    answer = json.loads(printed(capsys, as_json=True))
    assert answer["cluster"]["gpus"] == 32 and answer["samples"] == 32
    for one in answer["divisions"]:
        assert sum(one["memory"].values()) == one["device_bytes"]
        assert sum(one["step_parts_s"].values()) == pytest.approx(one["step_s"])
        assert all(row["over_link_bytes"] <= row["received_bytes"] * 1.001 for row in one["traffic"])
    fsdp = next(one for one in answer["divisions"] if one["division"] == "FSDP2")
    moved = sum(row["received_bytes"] for row in fsdp["traffic"])
    assert fsdp["runs"] and moved == pytest.approx((2 * 2 + 4) * answer["parameters"] * 31 / 32)


def test_effective_batch_is_the_samples_of_a_step(capsys):
    answer = json.loads(printed(capsys, as_json=True, effective_batch=128, precision="fp8"))
    assert answer["samples"] == 128 and answer["fp8"] and answer["states"] == "bf16"


def test_one_node_needs_no_link(capsys):
    assert "1 x 8 h100 (79.1 GiB)" in printed(capsys, nodes=1, link=None)


WRONG = {
    "no GPUs": ({"gpus": 0}, "--gpus is 0"),
    "GPUs of a node left out": ({"gpus": None}, "--nodes 4 requires --gpus"),
    "no nodes": ({"nodes": 0}, "--nodes is 0; it must be at least 1"),
    "too many nodes": ({"nodes": 10**6}, "at most 131072 GPUs"),
    "no link": ({"link": None}, "--nodes 4 requires --link"),
    "a link that is none": ({"link": "fast"}, "--link is 'fast'"),
    "a link without a unit": ({"link": "400"}, "--link is '400'"),
    "a link without nodes": ({"nodes": None}, "--link 400Gb requires --nodes"),
    "batch": ({"batch": 0}, "--batch is 0"),
    "positions": ({"seq": 10**6}, "max_position_embeddings"),
    "a recipe": ({"model": "recipe.yaml"}, "recipe.yaml is a recipe"),
    "adapters": ({"lora_rank": 8}, "is for a plan of one node"),
    "method": ({"method": "lora"}, "leave --method lora out"),
    "objective": ({"objective": "dpo"}, "leave --objective and --medusa out"),
    "an engine": ({"zero": 3}, "--zero is for a plan of one node"),
    "optimizer": ({"optimizer": "lion"}, "--optimizer is 'lion'"),
    "precision": ({"precision": "fp32"}, "choose one of amp-bf16, bf16, fp8"),
    "longest": ({"longest": True}, "--longest is for a plan of one node"),
    "explain": ({"explain": True}, "--explain is for a plan of one node"),
    "no bf16": ({"gpu": "v100"}, "v100-16gb has no bf16"),
    "experts": ({"model": "gpt-oss-20b"}, "gpt-oss-20b has experts"),
    "host memory": ({"host_memory": "much"}, "give a size such as 64GiB"),
    "model": ({"model": "llama-3.1-9b"}, "neither a file"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_in_one_line(changes, words):
    with pytest.raises(TigonError) as caught:
        plan.run(**{**ASKED, **changes})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_gpu_may_be_left_out_only_with_nodes():
    with pytest.raises(TigonError, match="--gpu is missing; give a GPU's name"):
        plan.run(model="tigon-demo")


def test_plan_of_one_node_asks_the_same_question_as_without_the_cluster_options(capsys, monkeypatch):
    """Its answer and print are untouched. The examples of docs/planner.md hold the printed bytes."""
    asked = []
    monkeypatch.setattr(plan_cluster, "run", lambda *_, **__: pytest.fail("asked for a cluster"))
    monkeypatch.setattr(plan, "plan", lambda problem, **how: asked.append((problem, how)))
    monkeypatch.setattr(plan, "_print", lambda answer, rows, *_: print("printed", answer, rows))
    plan.run(model="tigon-demo", gpu="1.25GiB", batch=4, seq=64, gpus=2, zero=2)
    flags = Flags(target="tigon-demo", gpu=find_gpu("1.25GiB"), batch=4, seq=64, given={"gpus": 2, "zero": 2})
    assert asked == [(problem_of(flags), {"method": "trace", "by": "search"})]
    assert capsys.readouterr().out == "printed None ()\n"
