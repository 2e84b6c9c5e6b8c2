"""The engines: which one a run gets, what each holds, and that nothing else in an estimate asks which one it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planner.planner_helpers import BARE, request_of
from tigon.planner import estimate as pipeline
from tigon.planner.engines.choose import engine_of
from tigon.planner.simulate.model_states import model_weights

PLANNER = Path(pipeline.__file__).parent
STAGES = ("engine_of", "model_weights", "step_tapes", "SimulatedRun", "step_seconds")


def test_stage_3_divides_the_weights_and_earlier_stages_do_not():
    model = model_weights(request_of(precision="bf16"))
    one, two, three = (
        engine_of(request.settings).placement(request, model).weights
        for request in (request_of(zero=stage, gpus=4) for stage in (1, 2, 3))
    )
    assert one == two == model.weight_bytes and three == -(-model.weight_bytes // 4)


def test_only_engines_read_which_engine_a_run_has():
    files = [PLANNER / "estimate.py", PLANNER / "simulated_run.py", PLANNER / "step_time.py"]
    files += [*(PLANNER / "simulate").glob("*.py"), *(PLANNER / "trace").glob("*.py")]
    for path in files:
        read = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not read & {"zero", "fsdp", "reshard"}, path.name


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"gpus": 2}, True), ({"zero": 1}, True), ({"zero": 3}, False), ({"fsdp": True}, False)],
    ids=str,
)
def test_gradients_stay_until_the_step_unless_the_engine_reduces_them(settings, kept):
    request = request_of(**settings)
    placement = engine_of(request.settings).placement(request, model_weights(request_of(precision="bf16")))
    assert placement.gradients.kept == kept


def test_copies_of_shards_take_the_memory_of_fewer_gpus_and_more_traffic():
    """Four GPUs with two copies hold as much as two GPUs with one."""
    two, hybrid = request_of(fsdp=True, gpus=2), request_of(fsdp=True, gpus=4, replicas=2)
    peaks = [pipeline.estimate(request, gpu=BARE).peak_allocated_bytes for request in (two, hybrid)]
    assert peaks[0] == peaks[1]
    traffic = [engine_of(r.settings).placement(r, model_weights(r)).traffic.peers for r in (two, hybrid)]
    assert traffic[1] > traffic[0]
