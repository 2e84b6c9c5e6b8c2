"""What several GPUs hold, in closed form, against DeepSpeed itself and against what partitioning has to do to bytes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.planner.planner_helpers import BARE, request_of
from tests.short_names import settings_of
from tigon.models.loading.config import load_config
from tigon.objectives.base import PlannedObjective
from tigon.planner.engines import choose
from tigon.planner.engines.base import Placement
from tigon.planner.engines.choose import engine_of
from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.request import Request
from tigon.planner.simulate.collectives import GatheredWeights, GatheringPlan
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights, Weight, model_weights
from tigon.planner.trace.tape import Where
from tigon.techniques.keys.settings import Settings
from tigon.trainer.distributed import launch

# DeepSpeed on one process: bytes of the optimizer's copy of the weights and of its states.
_HELD = """
import json, sys
import deepspeed, torch
from torch import nn
from tigon.techniques.keys.settings import Settings
from tigon.techniques.sharding.deepspeed_config import deepspeed_config
from tigon.techniques.technique import RunInfo

def optimizer_of(name, parameters):
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=True)
    import bitsandbytes
    return bitsandbytes.optim.AdamW8bit(parameters)

deepspeed.init_distributed("gloo")
found = []
for stage, precision, name in json.loads(sys.argv[1]):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters()}
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decays]} for decays in (True, False)]
    facts = RunInfo(device="cpu", shapes=shapes, hidden_size=64)
    config = deepspeed_config(Settings.of({"sharding.zero": stage, "train.precision": precision}), facts)
    config |= {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2, "gradient_accumulation_steps": 1,
               "gradient_clipping": 1.0}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    engine, optimizer, *_ = deepspeed.initialize(
        model=model.to(dtype), optimizer=optimizer_of(name, groups), config=config
    )
    engine.backward(engine(torch.ones(2, 64, dtype=dtype)).float().sum())
    engine.step()
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_partitioned_groups_flat
    tensors = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    tensors = [value for value in (*masters, *tensors) if torch.is_tensor(value)]
    found.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
print("RESULT" + json.dumps(found))
"""
_CASES = [
    (stage, precision, name)
    for stage, precision in ((1, "amp-bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16"))
    for name in ("adamw", "adamw-8bit")
]


def _predicted(stage: int, precision: str, optimizer: str) -> int:
    """The same model's, by the closed form."""
    itemsize = 4 if precision == "fp32" else 2
    weights = [
        Weight(f"{layer}.{name}", shape, numel, itemsize, trained=True, projected=False)
        for layer in range(4)
        for name, shape, numel in (("weight", (64, 64), 64 * 64), ("bias", (64,), 64))
    ]
    request: Request = request_of(zero=stage, precision=precision, optimizer=optimizer)
    return engine_of(request.settings).placement(request, ModelWeights(tuple(weights), 0, (64, 64), {})).optimizer


def test_planned_optimizer_of_a_zero_stage_holds_what_deepspeed_holds() -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("bitsandbytes")
    path = str(Path(__file__).parents[2] / "src")
    lone = {**os.environ, "PYTHONPATH": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", _HELD, json.dumps(_CASES)]
    with launch.reserved_address() as meeting:
        done = subprocess.run(command, env={**lone, **meeting}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    held = json.loads(done.stdout.split("RESULT")[1])
    # Apart from DeepSpeed's padding, and bitsandbytes' tables of levels, which are not in its state but once.
    assert [_predicted(*case) for case in _CASES] == pytest.approx(held, rel=0.02)


def _placed(**settings: object) -> Placement:
    request = request_of(shape={"hidden_size": 256, "intermediate_size": 704}, **settings)
    engine = engine_of(request.settings)
    return engine.placement(request, model_weights(replace(request, settings=engine.traced_settings())))


@pytest.mark.parametrize("sharding", [{"zero": 2}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("precision", ["amp-bf16", "bf16", "fp32"])
def test_8_bit_states_save_memory_under_zero(sharding: dict[str, int], precision: str) -> None:
    whole, eight = (
        _placed(gpus=4, precision=precision, optimizer=name, **sharding).optimizer for name in ("adamw", "adamw-8bit")
    )
    copy = 2 if precision == "bf16" else 4
    states = 4 if precision == "bf16" else 8
    assert eight / whole == pytest.approx((copy + 2 * (1 + 4 / 256)) / (copy + states), rel=0.01)


def test_8_bit_states_of_fsdp2_do_not_depend_on_the_weights_dtype() -> None:
    """Codes have a byte each whatever the weights are; of a weight below a block's size the states are like it."""
    amp, pure = (
        _placed(fsdp=True, gpus=2, precision=name, optimizer="adamw-torchao-8bit").optimizer
        for name in ("amp-bf16", "bf16")
    )
    assert amp == pytest.approx(pure, rel=0.02)


@pytest.mark.parametrize("sharding", [{"zero": 1}, {"zero": 2}, {"fsdp": True}], ids=str)
def test_temporaries_of_the_step_are_those_of_one_partition(sharding: dict[str, object]) -> None:
    two, eight = (
        sum(_placed(gpus=gpus, precision="bf16", optimizer="sgd", **sharding).step_tensor_bytes) for gpus in (2, 8)
    )
    assert two == pytest.approx(4 * eight, rel=0.01) and eight > 0


def test_fsdp2_keeps_whole_gradients_until_the_last_micro_batch() -> None:
    """It keeps whole gradients until then, in the dtype they are made in: so much more than a share of them."""
    one, four = (
        estimate(
            request_of(fsdp=True, gpus=4, precision="bf16", accumulate=count, batch=8), gpu=BARE
        ).peak_allocated_bytes
        for count in (1, 4)
    )
    model = model_weights(request_of(precision="bf16"))
    assert four - one > 0.7 * sum(weight.grad_bytes for weight in model.trained)


def test_accumulated_gradients_go_to_the_host_unit_by_unit() -> None:
    """FSDP2 reduces unit by unit after the last micro-batch too: beside whole gradients are copies of one."""
    one, four = (
        estimate(request_of(fsdp=True, offload="cpu", accumulate=count, batch=8), gpu=BARE).peak_allocated_bytes
        for count in (1, 4)
    )
    grads = sum(weight.grad_bytes for weight in model_weights(request_of(precision="bf16")).trained)
    assert four - one < 1.5 * grads


def test_zero_stages_hold_no_gradients_before_the_backward() -> None:
    """At the loss there is none yet, whatever the stage will keep of them."""
    zero_1, zero_2 = (estimate(request_of(zero=stage, gpus=4, batch=16, kernels="none"), gpu=BARE) for stage in (1, 2))
    assert zero_1.peak_phase == "loss" and zero_1.peak_allocated_bytes == zero_2.peak_allocated_bytes


def test_offload_of_zero_2_keeps_a_buffer_on_the_gpu() -> None:
    with_states, away = (_placed(zero=2, precision="bf16", offload=place).buffers for place in ("none", "cpu"))
    assert with_states == 0 and away == 2 * 1024 * 256  # the embeddings


def test_gathered_layers_are_freed_after_their_backward() -> None:
    ledger = Ledger()
    sizes: dict[str, Any] = {"outside": [300], "layer": [100], "last": [300], "most_bytes": 500, "beyond_bytes": 200}
    gathered = GatheredWeights(ledger, GatheringPlan(layers=4, head_stays=False, **sizes))
    held = []
    places = [("forward", None), ("forward", 0), ("forward", 3), ("loss", None), ("backward", 3), ("backward", 2)]
    for phase, layer in [*places, ("backward", 0), ("backward", None)]:
        gathered.enter(Where(phase, layer))
        held.append((len(gathered.layers), len([block for block in gathered.outside if block])))
    # two layers beside the embeddings; the last layer's backward has the embeddings' room, the one before it both
    assert held == [(0, 1), (1, 1), (2, 1), (2, 1), (4, 0), (3, 1), (1, 1), (0, 1)]
    gathered.close()
    assert ledger.live_bytes == 0


def test_ddps_first_broadcast_is_planned_in_pytorchs_buckets() -> None:
    """Adapters have buckets of their own, because their dtype differs."""
    shape = {"vocab_size": 100_000, "hidden_size": 1024, "intermediate_size": 20_000}
    request = request_of(precision="amp-bf16", lora_rank=4, gpus=2, shape=shape)
    model, dtypes = model_weights(request), {2: torch.bfloat16, 4: torch.float32}
    tensors = [torch.empty(one.numel, dtype=dtypes[one.itemsize]) for one in model.weights]
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [choose.BROADCAST_BUCKET_BYTES])
    copied = [sum(tensors[place].nbytes for place in bucket) for bucket in buckets if len(bucket) > 1]
    assert len(copied) > 2
    held = engine_of(request.settings).placement(request, model).gathered.registered
    assert sum(held) == max(map(sum, itertools.pairwise(copied)))


# --- what is loaded whole ---------------------------------------------------------------------------------------------


_CAUSAL_LM = PlannedObjective()
WHOLE_EMBEDDINGS = 128256 * 2048 * 4 / GIB


def _loaded_gib(model: str, gpu: str = "h200", *, objective: Any = _CAUSAL_LM, **settings: Any) -> float:
    request = Request(
        model=model, config=load_config("llama-3.2-1b"), batch=1, seq=128, objective=objective,
        settings=settings_of({"train.precision": "amp-bf16", **settings}),
    )  # fmt: skip
    return estimate(request, gpu=find_gpu(gpu)).phases["load"] / GIB


def test_loading_a_checkpoint_is_planned_in_partitions() -> None:
    half = 2.30 / 2
    # with the buffer of as many gradients
    assert _loaded_gib("org/model", zero=3, gpus=2) == pytest.approx(2 * half, rel=0.01)
    assert _loaded_gib("org/model", zero=3, offload="cpu") == 0.0
    # in fp32, with the whole embeddings, which accelerate holds until all are divided
    assert _loaded_gib("org/model", fsdp=True, gpus=2) == pytest.approx(2 * half + WHOLE_EMBEDDINGS, rel=0.01)
    assert _loaded_gib("org/model", fsdp=True, gpus=2, offload="cpu") == pytest.approx(WHOLE_EMBEDDINGS, rel=0.01)


class ReadsWholeWeights(PlannedObjective):
    """An objective that adds nothing to a model and still needs whole weights."""

    @property
    def reads_whole_weights(self) -> bool:
        return True


@pytest.mark.parametrize(
    "what", [{"lora_rank": 8}, {"objective": ReadsWholeWeights()}], ids=["adapters", "an objective"]
)
def test_loading_for_adapters_or_an_objective_is_planned_with_the_whole_model(what: dict[str, Any]) -> None:
    """DeepSpeed moves the whole model to the GPU, in 16 bits."""
    assert _loaded_gib("org/model", zero=3, offload="cpu", **what) == pytest.approx(2.30, rel=0.02)
    if "lora_rank" in what:  # a preset's weights are files by then, to be merged from
        assert _loaded_gib("llama-3.2-1b", zero=3, offload="cpu", **what) == pytest.approx(2.30, rel=0.02)
        with_shards = (2.30 + WHOLE_EMBEDDINGS) / 2  # frozen weights are in 16 bits
        assert _loaded_gib("llama-3.2-1b", fsdp=True, gpus=2, **what) == pytest.approx(with_shards, rel=0.02)


def test_weights_in_4_bits_are_planned_in_shards_with_whole_scales() -> None:
    """Half a byte per weight is divided, an eighth of a bit is not; adapters are fp32, frozen embeddings bf16."""
    keys = {"lora.rank": 8, "lora.quantize": True}
    held = {gpus: _placed(fsdp=True, gpus=gpus, precision="amp-bf16", **keys).weights for gpus in (1, 2, 4)}
    whole = model_weights(request_of(shape={"hidden_size": 256, "intermediate_size": 704}, precision="bf16", **keys))
    trained = sum(weight.nbytes for weight in whole.trained)
    assert held[1] == pytest.approx(whole.weight_bytes + trained, rel=0.01)  # computed in bf16, kept in fp32
    scales = sum(weight.nbytes - weight.packed_bytes for weight in whole.weights)
    assert scales > 0
    assert held[2] == pytest.approx(scales + (held[1] - scales) / 2, rel=0.01)
    assert held[4] == pytest.approx(scales + (held[1] - scales) / 4, rel=0.01)
    loaded = _loaded_gib("org/model", fsdp=True, gpus=4, **keys)
    one_gpu = _loaded_gib("org/model", **keys)
    assert loaded < 0.9 * one_gpu, "the whole model waits on the host"


def test_random_weights_are_planned_on_the_device_they_are_drawn_on() -> None:
    """fp32 with the head that is not tied yet; on a GPU without room, and for the host, on the host."""
    assert _loaded_gib("llama-3.2-1b", zero=3, gpus=2) == pytest.approx(5.58, rel=0.01)
    embeddings_part = 0.245  # the first weight that is partitioned, beside all whole ones
    assert _loaded_gib("llama-3.2-1b", "5GiB", zero=3, gpus=2) == pytest.approx(2.30 + embeddings_part, rel=0.01)
    assert _loaded_gib("llama-3.2-1b", zero=3, offload="cpu") == pytest.approx(2.30, rel=0.01)
    assert _loaded_gib("llama-3.2-1b", fsdp=True, gpus=2, offload="cpu") == pytest.approx(WHOLE_EMBEDDINGS, rel=0.01)


def test_draft_heads_are_planned_outside_the_layers() -> None:
    """FSDP2 gathers them with the rest of what is outside the layers, for both passes."""

    class Heads(PlannedObjective):
        own_parameters = "draft_heads."

        def attach(self, model: Any) -> Any:
            model.add_module("draft_heads", nn.ModuleList(nn.Linear(64, 64) for _ in range(3)))
            return model

    plain = model_weights(request_of(fsdp=True, gpus=2))
    found = model_weights(request_of(fsdp=True, gpus=2, objective=Heads()))
    new = {weight.name: weight.layer for weight in found.weights} | {w.name: None for w in plain.weights}
    assert len(new) > len(plain.weights) and set(new.values()) == {None}
    engine = engine_of(Settings.of({"sharding.fsdp": True, "sharding.gpus": 2}))
    placements = [
        engine.placement(request_of(fsdp=True, gpus=2, objective=one), m)
        for one, m in ((_CAUSAL_LM, plain), (Heads(), found))
    ]
    more = sum(weight.nbytes for weight in found.weights) - sum(weight.nbytes for weight in plain.weights)
    assert placements[1].gathered.both_passes - placements[0].gathered.both_passes == more
