"""Real points: what is measured is the training of `tigon train`, and the counts are those of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from forks import forks, python
from tigon.errors import DataError, RecipeError
from tigon.sweep import definition, failures, points
from tigon.sweep.worker.measure import measure

SMALL = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 128,
}  # fmt: skip


RECIPE = {
    "model": {"name": "tigon-demo", "config": SMALL},
    "data": {"sequence_length": 64, "max_text_mib": 0.05, "vocab_size": 1000},
    "train": {"device": "cpu", "precision": "fp32", "batch_size": 8, "learning_rate": 0.01},
}


@pytest.fixture
def run_point(write_sweep, here):
    """Measures, in this process, the one point that a sweep file with these keys has."""

    def run(how: str = "random", wrong_ops: Sequence[str] = (), **keys: object) -> dict:
        path = write_sweep(recipe=RECIPE, grid={}, steps=3, rows=how, set=keys)
        (point,) = points.expand(
            definition.load(path), (), memory_limit_bytes=None, gpu_present=lambda: False, scratch=here
        )
        assert not point.refused
        return measure(
            point.recipe, how_rows=how, unchecked=False, limit_bytes=None, folder=here,
            wrong_ops=dict.fromkeys(wrong_ops, "wrong"),
        )  # fmt: skip

    return run


def test_fused_kernels_lower_the_peak_of_a_point_and_keep_its_losses(run_point):
    """The logits of 8 x 64 tokens over 4096 words are 8 MiB in fp32; the unfused loss holds several of them."""
    plain, fused = (run_point(**{"model.kernels": kernels}) for kernels in ("none", "tigon"))
    logits_bytes = 8 * 64 * 4096 * 4
    assert plain["peak_allocated_bytes"] - fused["peak_allocated_bytes"] > 1.5 * logits_bytes
    assert plain["losses"] == pytest.approx(fused["losses"], rel=1e-5)
    for found in (plain, fused):
        assert found["positions"] == [512] * 3 and len(found["step_s"]) == len(found["losses"]) == 3
        assert found["updated"] == [True] * 3
        assert found["parameters"] == 4096 * 32 + 32 + 2 * 32 + 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64


def test_op_that_the_self_test_found_wrong_is_left_out_of_the_point(run_point):
    keys = {"model.kernels": "tigon"}
    fused, without = run_point(**keys), run_point(wrong_ops=["linear_cross_entropy", "rms_norm"], **keys)
    logits_bytes = 8 * 64 * 4096 * 4
    assert without["peak_allocated_bytes"] - fused["peak_allocated_bytes"] > logits_bytes
    assert without["losses"] == pytest.approx(fused["losses"], rel=1e-5)


def test_point_has_the_losses_of_tigon_train(run_point, here):
    from tigon.trainer.run import train

    keys = {"train.schedule": "constant"}
    point = run_point("recipe", **keys)
    keys |= {"data.eval_fraction": 0, "train.log_steps": 1, "train.steps": 3}
    path = here / "r.yaml"
    path.write_text(json.dumps(RECIPE | {"output": {"save_model": False, "sample_tokens": 0}}))
    run = train(path, [f"{key}={value}" for key, value in keys.items()])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert point["losses"] == [record["loss"] for record in records if record["event"] == "train"]


def test_positions_of_all_accumulated_micro_batches_are_counted(run_point):
    assert run_point(**{"train.gradient_accumulation": 2})["positions"] == [1024] * 3


@pytest.mark.parametrize("how", ["recipe", "alpaca"])
def test_sequences_of_text_fill_every_step_alike_and_are_learned(how, run_point):
    found = run_point(how, **{"data.cross_document_attention": True, "data.sequence_length": 128})
    assert all(800 < positions <= 1024 for positions in found["positions"])
    assert found["losses"][-1] < found["losses"][0], "nothing was learned of real rows"


def test_vocabulary_smaller_than_the_tokenizer_is_refused(run_point):
    """On a GPU it is a failed assertion on the device, which says nothing of a vocabulary."""
    with pytest.raises(RecipeError, match=r"the tokenizer has 1000 tokens, but .* has a vocabulary of 512; set"):
        run_point("recipe", **{"model.config.vocab_size": 512})


def test_bad_row_of_a_file_ends_a_point_unless_it_is_to_be_skipped(run_point, here):
    lines = [json.dumps({"text": "words and more of them, and the same again " * 20})] * 40
    (here / "rows.jsonl").write_text("\n".join([*lines, json.dumps({"nothing": 1})]), encoding="utf-8")
    keys = {"data.source": [str(here / "rows.jsonl")], "data.vocab_size": 300}
    with pytest.raises(DataError):
        run_point("recipe", **keys)
    assert len(run_point("recipe", **keys, **{"data.bad_rows": "skip"})["losses"]) == 3


def test_refusal_of_this_machine_and_divergence_have_different_statuses(here):
    """A worker gives them different statuses; it runs in this process."""
    import yaml

    from tigon.sweep.worker import worker

    def result(refused: str = "", **train: object) -> tuple[str, str]:
        recipe = {
            "model": {"name": "tigon-demo", "config": SMALL}, "data": {"sequence_length": 16},
            "train": {"steps": 3, "device": "cpu", "batch_size": 2, "precision": "fp32", "max_grad_norm": 0, **train},
        }  # fmt: skip
        (here / "r.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        order = {"recipe": str(here / "r.yaml"), "rows": "random", "unchecked": False, "limit_bytes": None}
        tried = {"dtype": "fp32", "wrong_ops": {}, "refused": refused}
        found = worker._carry_out({**order, "folder": str(here), "self_test": tried})
        return found["status"], found["detail"]

    assert result(precision="amp-fp16") == (
        failures.REFUSED, "train.precision: amp-fp16 needs a GPU, and this run is on the CPU"
    )  # fmt: skip
    wrong = "kernels that give wrong results on this device: rope"  # with model.self_test: strict
    assert result(refused=wrong) == (failures.REFUSED, wrong)
    status, detail = result(learning_rate=1e38)
    assert status == failures.FAILED and "not finite" in detail


def test_command_measures_a_point_once_and_writes_its_report(write_sweep, tigon, here):
    """Runs a worker process, reads its record and report; a second run measures nothing."""
    recipe = {
        "model": {"name": "tigon-demo", "config": SMALL}, "data": {"sequence_length": 16},
        "train": {"device": "cpu", "precision": "fp32", "batch_size": 2},
    }  # fmt: skip
    path = write_sweep(recipe=recipe, grid={}, steps=2)
    code, out, err = tigon("sweep", path, "--memory-limit", "8GiB")
    assert code == 0, err
    found = json.loads((here / "runs/sweeps/s/results.json").read_text(encoding="utf-8"))
    (row,) = found["points"]
    assert row["status"] == failures.OK, row["detail"]
    assert row["peak_allocated_bytes"] > 4 * row["parameters"] * 4 and row["tokens_per_step"] == 32
    assert found["memory_limit_bytes"] == 8 << 30 and "limited to 8.0 GiB, of the process's data segment" in out
    assert (here / "runs/sweeps/s/report.html").exists()
    code, out, _ = tigon("sweep", path, "--memory-limit", "8GiB")
    assert code == 0 and "0 measurements to do" in out


@forks
def test_memory_limit_of_a_cpu_ends_a_point_as_out_of_memory():
    """Runs in a fork, because a memory limit cannot be undone."""
    code = """
import torch
from tigon.sweep import failures
from tigon.sweep.worker.limit import cap
from tigon.techniques.keys.settings import Settings
cap(torch.device("cpu"), 4 << 30, Settings.of({}))
try:
    torch.ones(3 << 30)
except RuntimeError as error:
    print(failures.status_of_exception(error)[0])
"""
    done = python(code=code)
    assert done.stdout.strip() == failures.OUT_OF_MEMORY, done.stderr[-500:]
