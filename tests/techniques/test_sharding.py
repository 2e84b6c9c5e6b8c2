"""What sharding asks of the engines: DeepSpeed's configuration from the model, and optimizers on sharded weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forks import forks, in_forks, need_deepspeed
from second_proofs import DIFFERENT, proved_by
from tests.short_names import settings_of
from tigon._trunk import decoder_layers
from tigon.errors import RecipeError
from tigon.models import MODELS, DeferredLogits, patch
from tigon.models.loading.config import build_on_meta, load_config
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.techniques import TECHNIQUES
from tigon.techniques.keys.settings import Settings
from tigon.techniques.matrix import refusals
from tigon.techniques.optimizers.table import OPTIMIZERS
from tigon.techniques.sharding.deepspeed_config import deepspeed_config, gathers_layers, nvme_buffers
from tigon.techniques.technique import RunInfo

transformers = pytest.importorskip("transformers")


def run_info(name: str, processes: int = 1) -> RunInfo:
    config = load_config(name)
    shapes = {path: tuple(p.shape) for path, p in build_on_meta(name, config).named_parameters()}
    return RunInfo(shapes=shapes, hidden_size=config.hidden_size, processes=processes)


def test_nvme_buffers_hold_the_largest_weight_and_two_layers():
    """A layer of Llama has seven matrices; its norms stay, being smaller than a block of the disk. Every thread takes
    the same share of a buffer, in whole KiB."""
    settings = Settings.of({"sharding.zero": 3, "sharding.offload": "nvme", "train.precision": "amp-bf16"})
    threads = deepspeed_config(settings, run_info("llama-3.2-1b"))["aio"]["intra_op_parallelism"]
    one = nvme_buffers(settings, run_info("llama-3.2-1b"))
    assert one["buffer_size"] >= 128256 * 2048 and one["buffer_size"] * 2 % (1024 * threads) == 0
    assert one["buffer_count"] == 2 * 7 + 1 + 1  # two layers, the tied embedding, one to spare
    two = nvme_buffers(settings, run_info("llama-3.2-1b", processes=2))
    assert two["buffer_size"] == one["buffer_size"] // 2
    untied = nvme_buffers(settings, run_info("llama-3.1-8b"))
    assert untied["buffer_count"] == 2 * 7 + 2 + 1 and untied["buffer_size"] >= 128256 * 4096


def test_configuration_has_the_offload_of_the_choice():
    settings = Settings.of({"sharding.zero": 3, "sharding.offload": "nvme", "sharding.nvme_folder": "swap"})
    zero = deepspeed_config(settings, run_info("llama-3.2-1b"))["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "swap"
    assert zero["sub_group_size"] >= 128256 * 2048
    # else every weight that is used again within 1e9 elements keeps its buffer, and the second step finds none free
    assert zero["stage3_max_reuse_distance"] == 0
    second = deepspeed_config(Settings.of({"sharding.zero": 2, "sharding.offload": "cpu"}), run_info("llama-3.2-1b"))[
        "zero_optimization"
    ]
    assert second["offload_optimizer"]["device"] == "cpu" and "offload_param" not in second


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_accepts_the_configuration(stage, precision):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = deepspeed_config(
        Settings.of({"sharding.zero": stage, "train.precision": precision}), run_info("llama-3.2-1b")
    )
    config |= {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "train_batch_size": 1,
    }  # fmt: skip
    read = DeepSpeedConfig(config)
    assert read.zero_config.stage == stage
    assert read.bfloat16_config.enabled == (precision in ("amp-bf16", "bf16"))


# --- two processes ---------------------------------------------------------------------------------------------------

STAGES = {"1": (1, 0, False), "2": (2, 0, False), "3-in-tiles": (3, 5, False), "3-layers-in-tiles": (3, 5, True)}
"""ZeRO's stage, the tokens of a tile, and whether weights are gathered by layer. With tiles, layers are recomputed."""
STEPS, RANKS, LEARNING_RATE, CLIP = 4, 2, 1e-2, 1.0


def train_in_ranks(rank: int, stage: int, tile_tokens: int, by_layer: bool) -> dict[str, list[Any]]:
    """What one of two ranks sees of a training of one row each."""
    import deepspeed

    model = tiny_model("llama", MODELS["llama"].tiny)
    patch(model)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    own = RunInfo(device="cpu", processes=RANKS, shapes=shapes, runs_layers_once=by_layer)
    settings = Settings.of(
        {
            "sharding.zero": stage,
            "train.precision": "fp32",
            "sharding.gpus": RANKS,
            "train.checkpointing": "full",
            "train.mlp_tile_tokens": tile_tokens,
        }
    )
    for name in (f"zero-{stage}", *(("checkpointing-full", "tiled-mlp") if tile_tokens else ())):
        model = TECHNIQUES[name].model(model, settings, own)
    config = deepspeed_config(settings, own)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": RANKS, "gradient_accumulation_steps": 1,
               "gradient_clipping": CLIP}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = tiny_batch(torch.device("cpu"))
    items = (batch["labels"][:, 1:] != -100).sum()
    hooked = sum(bool(module._forward_pre_hooks) for module in decoder_layers(model)[0].modules())
    found: dict[str, list[Any]] = {"losses": [], "deferred": [], "head": [], "hooked": [hooked]}
    for _ in range(STEPS):
        found["head"].append(model.get_output_embeddings().weight.numel())
        out = engine(**{name: t[rank : rank + 1] for name, t in batch.items()}, num_items_in_batch=items)
        found["deferred"].append(isinstance(out.logits, DeferredLogits))
        engine.backward(out.loss * RANKS)
        engine.step()
        total = out.loss.detach().clone()
        dist.all_reduce(total)
        found["losses"].append(total.item())
    return found


def train_alone() -> list[float]:
    """The losses of one process that has both rows, without DeepSpeed and without a patch."""
    model = tiny_model("llama", MODELS["llama"].tiny)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch, losses = tiny_batch(torch.device("cpu")), []
    for _ in range(STEPS):
        loss = model(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """What rank 0 saw in each of STAGES, one after the other in the same two processes."""
    need_deepspeed()
    folder = tmp_path_factory.mktemp("zero")

    def act(rank: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        dist.init_process_group("gloo")
        found = {name: train_in_ranks(rank, *stage) for name, stage in STAGES.items()}
        if rank == 0:
            (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
        dist.destroy_process_group()

    said = folder / "stderr"
    assert in_forks(act, RANKS, said=said) == [0] * RANKS, said.read_text()[-3000:]
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@forks
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_of_zero_train_as_one_and_without_logits(stage, trained):
    one, two = train_alone(), trained[stage]
    assert two["deferred"] == [True] * STEPS
    assert two["losses"] == pytest.approx(one, rel=1e-5)
    assert two["losses"][-1] < two["losses"][0] - 0.1
    assert (two["head"] == [0] * STEPS) == (STAGES[stage][0] == 3), "stage 3 alone partitions the head"
    if STAGES[stage][0] == 3:
        assert (two["hooked"] == [1]) == STAGES[stage][2], "with whole layers, a layer's modules have no hooks"


def layer_calls(family: str) -> list[tuple[int, bool]]:
    """The layers of a small model in the order of their calls, and whether a positional input has a gradient."""
    model = tiny_model(family, MODELS[family].tiny).train()
    calls: list[tuple[int, bool]] = []

    def see(layer: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((id(layer), any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)))

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(see)
    model(**tiny_batch(torch.device("cpu")), use_cache=False)
    return calls


@pytest.mark.parametrize("family", proved_by(DIFFERENT, MODELS, "transformers calls layers alike in most families"))
def test_family_runs_each_layer_once_on_a_positional_input(family):
    """Otherwise DeepSpeed's hook on a layer's gradients would run before the gradients are there."""
    calls = layer_calls(family)
    assert calls and all(has_gradient for _, has_gradient in calls)
    assert len({layer for layer, _ in calls}) == len(calls)


def test_frozen_weights_before_whole_layers_are_refused():
    pytest.importorskip("deepspeed")
    settings = Settings.of({"sharding.zero": 3, "sharding.gpus": 2, "train.precision": "fp32"})
    for frozen in (False, True):
        model = tiny_model("llama", MODELS["llama"].tiny).train()
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        model.get_input_embeddings().weight.requires_grad_(not frozen)
        TECHNIQUES["zero-3"].model(model, settings, RunInfo(processes=2, shapes=shapes, runs_layers_once=True))
        with torch.no_grad():
            model(**tiny_batch(torch.device("cpu")))
        if frozen:
            with pytest.raises(RecipeError, match="gets no input with a gradient"):
                model(**tiny_batch(torch.device("cpu")))
        else:
            model(**tiny_batch(torch.device("cpu")))


@pytest.mark.parametrize(
    ("changed", "info", "expected"),
    [
        ({}, {}, True),
        ({}, {"processes": 1}, False),
        ({}, {"runs_layers_once": False}, False),
        ({"offload": "cpu"}, {}, False),
        ({"lora_rank": 8}, {}, False),
        ({"zero_copy_ranks": 2}, {}, False),
        ({"zero": 2}, {}, False),
        ({}, {"shapes": {"model.layers.0.experts": (8, 10_000, 10_000)}}, False),
    ],
    ids=["plain", "one process", "post-training", "offload", "LoRA", "ZeRO++", "stage 2", "a layer too large"],
)
def test_whole_layers_are_gathered_with_buckets_that_hold_one(changed, info, expected):
    settings = settings_of({"sharding.zero": 3, "sharding.gpus": 2, "train.precision": "bf16", **changed})
    about = dataclasses.replace(run_info("llama-3.1-8b", processes=2), **{"runs_layers_once": True, **info})
    assert gathers_layers(settings, about) == expected
    zero = deepspeed_config(settings, about)["zero_optimization"]
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert (zero["reduce_bucket_size"] == layer) == expected


# --- optimizers on the sharded tensors of FSDP2 ----------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def losses(name: str, folder: Path, mesh: Any = None) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of three steps, and the whole weights after them."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    if mesh is not None:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    args = transformers.TrainingArguments(
        output_dir=str(folder), optim=OPTIMIZERS[name].trainer_name, use_cpu=True, report_to=[], learning_rate=1e-2
    )
    cls, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer, found = cls(model.parameters(), **options), []
    if OPTIMIZERS[name].averages:
        optimizer.train()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return found, [w.detach().clone() for w in weights]


BY_TRAINER = [row.name for row in OPTIMIZERS.values() if row.trainer_name and "cpu" in row.devices]


@pytest.mark.parametrize("name", BY_TRAINER)
def test_optimizer_on_sharded_weights_is_refused_or_trains_to_the_same_weights(name, mesh, tmp_path):
    """An optimizer that the matrix refuses works on whole weights and fails on sharded ones."""
    row = OPTIMIZERS[name]
    if row.package and importlib.util.find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    want, weights = losses(name, tmp_path)
    assert want[-1] < want[0] and all(w.isfinite().all() for w in weights)
    if reasons := refusals(Settings.of({"train.optimizer": name, "sharding.fsdp": True})):
        assert any(name in reason for reason in reasons)
        with pytest.raises(RuntimeError, match=r"DTensor|sharding strategy"):
            losses(name, tmp_path, mesh)
    else:
        got, sharded = losses(name, tmp_path, mesh)
        assert got == pytest.approx(want, rel=1e-6)
        assert len(sharded) == len(weights) == 4
        for a, b in zip(sharded, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_keys_of_zero_plus_plus_reach_deepspeed() -> None:
    settings = {"zero_copy_ranks": 4, "zero_int8_weights": True, "zero_int4_gradients": True}
    plain, plus = (
        deepspeed_config(settings_of({"sharding.zero": 3, "sharding.gpus": 8, **one}), run_info("llama-3.2-1b"))[
            "zero_optimization"
        ]
        for one in ({}, settings)
    )
    keys = {"zero_hpz_partition_size": 4, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert plus == {**plain, **keys} and not keys.keys() & plain.keys()
