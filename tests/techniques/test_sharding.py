"""What sharding asks of the engines: DeepSpeed's configuration from the model, and optimizers on sharded weights."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tigon.models.config import build_on_meta, load_config
from tigon.techniques.choices import Choices
from tigon.techniques.matrix import refusals
from tigon.techniques.optimizers import OPTIMIZERS
from tigon.techniques.sharding import deepspeed_config, nvme_buffers
from tigon.techniques.technique import Facts

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def facts(name: str, processes: int = 1) -> Facts:
    config = load_config(name)
    shapes = {path: tuple(p.shape) for path, p in build_on_meta(name, config).named_parameters()}
    return Facts(shapes=shapes, hidden_size=config.hidden_size, processes=processes, nvme_folder="swap")


def test_nvme_buffers_are_too_small_or_too_few_for_the_model():
    """A layer of Llama has seven matrices; its norms stay, being smaller than a block of the disk."""
    choices = Choices(zero=3, offload="nvme")
    one = nvme_buffers(choices, facts("llama-3.2-1b"))
    assert one["buffer_size"] >= 128256 * 2048 and one["buffer_size"] % 1024 == 0
    assert one["buffer_count"] == 2 * 7 + 1 + 1  # two layers, the tied embedding, one to spare
    two = nvme_buffers(choices, facts("llama-3.2-1b", processes=2))
    assert two["buffer_size"] == one["buffer_size"] // 2
    untied = nvme_buffers(choices, facts("llama-3.1-8b"))
    assert untied["buffer_count"] == 2 * 7 + 2 + 1 and untied["buffer_size"] >= 128256 * 4096


def test_offload_of_a_choice_is_missing_from_the_configuration():
    zero = deepspeed_config(Choices(zero=3, offload="nvme"), facts("llama-3.2-1b"))["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "swap"
    assert zero["sub_group_size"] >= 128256 * 2048
    # else every weight that is used again within 1e9 elements keeps its buffer, and the second step finds none free
    assert zero["stage3_max_reuse_distance"] == 0
    second = deepspeed_config(Choices(zero=2, offload="cpu"), facts("llama-3.2-1b"))["zero_optimization"]
    assert second["offload_optimizer"]["device"] == "cpu" and "offload_param" not in second


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "amp-fp16", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_refuses_the_configuration(stage, precision):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = deepspeed_config(Choices(zero=stage, precision=precision), facts("llama-3.2-1b"))
    config |= {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "train_batch_size": 1,
    }  # fmt: skip
    read = DeepSpeedConfig(config)
    assert read.zero_config.stage == stage
    assert read.bfloat16_config.enabled == (precision in ("amp-bf16", "bf16"))


# --- two processes ---------------------------------------------------------------------------------------------------

_TRAIN = """
import json, os, sys
import deepspeed, torch
import torch.distributed as dist
from tigon import patch
from tigon.models import MODELS, DeferredLogits
from tigon.models.tiny import tiny_batch, tiny_model
from tigon.techniques import TECHNIQUES
from tigon.techniques.choices import Choices
from tigon.techniques.sharding import deepspeed_config
from tigon.techniques.technique import Facts

stage, tile_tokens, ranks = int(sys.argv[1]), int(sys.argv[2]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = tiny_model("llama", MODELS["llama"].tiny)
patch(model)
facts = Facts(device="cpu", processes=ranks)
choices = Choices(zero=stage, precision="fp32", gpus=ranks, checkpointing="full", mlp_tile_tokens=tile_tokens)
for name in ("checkpointing-full", "tiled-mlp") if tile_tokens else ():
    model = TECHNIQUES[name].model(model, choices, facts)
config = deepspeed_config(choices, facts)
config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
config |= {"train_micro_batch_size_per_gpu": 2 // ranks, "train_batch_size": 2, "gradient_accumulation_steps": 1,
           "gradient_clipping": 1.0}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
batch = tiny_batch(torch.device("cpu"))
items = (batch["labels"][:, 1:] != -100).sum()
share = {name: t[rank * 2 // ranks : (rank + 1) * 2 // ranks] for name, t in batch.items()}
losses, deferred, head = [], [], []
for _ in range(4):
    head.append(model.get_output_embeddings().weight.numel())
    out = engine(**share, num_items_in_batch=items)
    deferred.append(isinstance(out.logits, DeferredLogits))
    engine.backward(out.loss * ranks)
    engine.step()
    total = out.loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())
if rank == 0:
    print("RESULT" + json.dumps({"losses": losses, "deferred": deferred, "head": head}), flush=True)
dist.destroy_process_group()
"""


def train(stage: int, ranks: int, tile_tokens: int, script: Path) -> dict[str, list[Any]]:
    script.write_text(_TRAIN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(script), str(stage), str(tile_tokens)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1].splitlines()[0])


@pytest.mark.parametrize(("stage", "tile_tokens"), [(1, 0), (2, 0), (3, 5)], ids=["1", "2", "3-in-tiles"])
def test_two_ranks_of_zero_train_otherwise_than_one_or_with_logits(stage, tile_tokens, tmp_path):
    """The two of stage 3 recompute their layers, with MLPs in tiles of tokens."""
    pytest.importorskip("deepspeed")
    one = train(stage, 1, 0, tmp_path / "train.py")
    two = train(stage, 2, tile_tokens, tmp_path / "train.py")
    assert two["deferred"] == [True] * 4
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["losses"][-1] < two["losses"][0] - 0.1
    assert (two["head"] == [0] * 4) == (stage == 3), "stage 3 alone partitions the head"


# --- optimizers on the sharded tensors of FSDP2 ----------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    if not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def losses(name: str, folder: Path, mesh: Any = None) -> list[float]:
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
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


BY_TRAINER = [row.name for row in OPTIMIZERS.values() if row.trainer_name and "cpu" in row.devices]


@pytest.mark.parametrize("name", BY_TRAINER)
def test_optimizer_on_sharded_weights_is_neither_refused_nor_the_same(name, mesh, tmp_path):
    row = OPTIMIZERS[name]
    if row.package and importlib.util.find_spec(row.package) is None:
        pytest.skip(f"{row.package} is not installed")
    if refusals(Choices(optimizer=name, fsdp=True)):
        with pytest.raises(RuntimeError, match=r"DTensor|sharding strategy"):
            losses(name, tmp_path, mesh)
    else:
        assert losses(name, tmp_path, mesh) == pytest.approx(losses(name, tmp_path), rel=1e-6)
