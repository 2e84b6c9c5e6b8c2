"""The table of optimizers against the optimizers themselves: bytes of state, bytes of the step."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from tigon.planner.simulate.optimizer_cost import COSTS, Parameter
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques.optimizers import galore, muon
from tigon.techniques.optimizers.galore import GaLoreAdamW
from tigon.techniques.optimizers.muon import MuonAdamW
from tigon.techniques.optimizers.table import OPTIMIZERS

transformers = pytest.importorskip("transformers")

# below and above 4096 elements, multiples of 256 and not, matrices and vectors
SHAPES = ((1000,), (64, 100), (128, 256), (70,), (33, 500))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
by_name = pytest.mark.parametrize("name", [row.name for row in OPTIMIZERS.values() if row.trainer_name])


class Model(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.embedding = nn.Embedding(128, 64)

    def described(self) -> list[Parameter]:
        weights = {id(self.embedding.weight)}
        return [Parameter(tuple(p.shape), p.element_size(), embedding=id(p) in weights) for p in self.parameters()]


def made_by_trainer(name: str, model: nn.Module, folder: object) -> torch.optim.Optimizer:
    """The optimizer as the Trainer makes it, stepped once."""
    row = OPTIMIZERS[name]
    if row.package and importlib.util.find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    args = transformers.TrainingArguments(
        output_dir=str(folder), optim=row.trainer_name, use_cpu=True, report_to=[], weight_decay=0.1
    )
    model.config = None
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    trainer.args, trainer.model, trainer.optimizer, trainer.optimizer_cls_and_kwargs = args, model, None, None
    optimizer = trainer.create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    if OPTIMIZERS[name].averages:
        optimizer.train()
    optimizer.step()
    return optimizer


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the state, shared ones once, but the step counters that stay on the CPU."""
    seen: dict[int, int] = {}

    def add(tensor: torch.Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):
            for part in tensor.__tensor_flatten__()[0]:
                add(getattr(tensor, part))
        else:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value) and (key != "step" or optimizer.defaults.get("fused")):
                add(value)
    return sum(seen.values())


@by_name
@each_dtype
def test_table_has_the_bytes_that_an_optimizer_holds(name, dtype, tmp_path):
    model = Model().to(dtype)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles each shape for seconds
        optimizer = made_by_trainer(name, model, tmp_path)
    cost, parameters = COSTS[name], model.described()
    expected = cost.state_bytes(parameters) + cost.state_bytes(parameters, place="managed")
    assert held_bytes(optimizer) == expected


def test_small_parameters_of_paged_optimizers_are_counted_on_the_device():
    cost = COSTS["paged-adamw-8bit"]
    small, large = Parameter((99_999,), 4), Parameter((100_000,), 4)
    assert {tensor.place for tensor in cost.state_tensors(small)} == {"device"}
    assert [tensor.place for tensor in cost.state_tensors(large)] == ["managed", "managed", "device", "device"]


@each_dtype
@pytest.mark.parametrize(("shape", "rank"), [((96, 160), 0), ((96, 160), 8), ((160, 96), 8), ((96, 96), 8)])
def test_table_has_the_bytes_of_galores_state(shape, rank, dtype):
    weight = nn.Parameter(torch.randn(shape, dtype=dtype))
    optimizer = GaLoreAdamW([{"params": [weight], "rank": rank}], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    cost = replace(COSTS["galore"], rank=rank)
    assert held_bytes(optimizer) == cost.state_bytes([Parameter(shape, dtype.itemsize, projected=rank > 0)])


class Layers(nn.Module):
    """Linear layers of several shapes, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 48), nn.Linear(48, 64, bias=False)
        self.wide, self.tall, self.norm = nn.Linear(48, 96), nn.Linear(96, 48, bias=False), nn.LayerNorm(48)
        self.layers, self.score = nn.ModuleList([self.wide, self.tall]), nn.Linear(48, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@each_dtype
def test_table_has_the_bytes_of_muons_state(dtype):
    model = Layers().to(dtype)
    optimizer = muon.build(model, [], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    layers = {id(model.wide.weight), id(model.tall.weight)}
    parameters = [Parameter(tuple(p.shape), p.element_size(), by_muon=id(p) in layers) for p in model.parameters()]
    held = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    assert held == COSTS["muon"].state_bytes(parameters)


@each_dtype
@pytest.mark.parametrize("shape", [(256, 512), (512, 256)])
def test_table_has_the_bytes_that_a_step_of_muon_needs(shape, dtype):
    weights = [nn.Parameter(torch.randn(shape, dtype=dtype)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    group = {"params": weights, "muon": True, "weight_decay": 0.1}
    other = {"params": [nn.Parameter(torch.zeros(1))], "muon": False, "weight_decay": 0.0}
    found = step_bytes(MuonAdamW([group, other], lr=1e-3, betas=(0.9, 0.95)), weights)
    parameters = [Parameter(shape, dtype.itemsize, by_muon=True) for _ in weights]
    expected, packed = COSTS["muon"].step_peak_bytes(parameters), 2 * weights[0].numel()
    # A CPU's product in bf16 may copy its second matrix, in parts or whole. A GPU's does not.
    assert expected <= found <= 1.01 * (expected + packed)


def step_bytes(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> int:
    """The peak memory that the second step adds."""
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
    meter = PeakMeter(torch.device("cpu"))
    meter.start([*weights, *(weight.grad for weight in weights), *states])
    optimizer.step()
    return meter.stop().step_bytes


def makers(rank: int):
    from transformers import Adafactor

    return {
        "adamw": lambda ws: torch.optim.AdamW(ws, fused=True),
        "adamw-foreach": lambda ws: torch.optim.AdamW(ws, foreach=True),
        "sgd": lambda ws: torch.optim.SGD(ws, lr=1e-3, weight_decay=0.1, foreach=True),
        "adafactor": lambda ws: Adafactor(ws, lr=1e-3, scale_parameter=False, relative_step=False),
        "galore": lambda ws: GaLoreAdamW([{"params": ws, "rank": rank}], lr=1e-3),
    }


@each_dtype
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "sgd", "adafactor", "galore"])
def test_table_has_the_bytes_that_a_step_needs(name, rank, dtype):
    weights = [nn.Parameter(torch.randn(256, 512, dtype=dtype)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    found = step_bytes(makers(rank)[name](weights), weights)
    parameters = [Parameter((256, 512), dtype.itemsize, projected=rank > 0) for _ in weights]
    expected = replace(COSTS[name], rank=rank).step_peak_bytes(parameters)
    assert found == pytest.approx(expected, rel=0.02, abs=4096)


@each_dtype
def test_table_has_the_bytes_that_a_step_of_schedule_free_needs(dtype):
    weights = [nn.Parameter(torch.randn(256, 512, dtype=dtype)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(weights, weight_decay=0.1)
    optimizer.train()
    found = step_bytes(optimizer, weights)
    expected = COSTS["schedule-free"].step_peak_bytes([Parameter((256, 512), dtype.itemsize) for _ in weights])
    assert found == pytest.approx(expected, rel=0.02, abs=4096)


@each_dtype
@pytest.mark.parametrize("rank", [0, 16])
def test_galore_step_needs_less_than_one_fp32_weight(rank, dtype, monkeypatch):
    """With turns of 16 rows: what is alive at a time, where the table says so and where it does."""
    monkeypatch.setattr(galore, "ELEMENTS", 16 * 512)
    weight = nn.Parameter(torch.randn(256, 512, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    found = step_bytes(GaLoreAdamW([{"params": [weight], "rank": rank}], lr=1e-3), [weight])
    parameter = Parameter((256, 512), dtype.itemsize, projected=rank > 0)
    if not rank:
        assert found == pytest.approx(COSTS["galore"].step_peak_bytes([parameter]), rel=0.02, abs=4096)
    assert found < weight.numel() * 4


def test_every_optimizer_has_a_cost():
    assert COSTS.keys() == OPTIMIZERS.keys()


def test_every_trainer_name_is_known_to_the_trainer():
    known = {word.value for word in transformers.training_args.OptimizerNames}
    assert {row.trainer_name for row in OPTIMIZERS.values() if row.trainer_name} <= known
