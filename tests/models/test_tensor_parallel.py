"""A model on two processes whose head is divided by vocabulary trains with the fused loss of the whole head."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tigon
import two_ranks
from helpers import farthest
from tigon.models import MODELS, DeferredLogits, MaterializedLogitsWarning
from tigon.models.verification.tiny import tiny_batch, tiny_model
from two_ranks import Scenarios, gradients_of

transformers = pytest.importorskip("transformers")

VOCAB = 83
"""Of which a process has 42 rows and the other 41."""


def whole_model(family: str = "llama") -> Any:
    torch.manual_seed(0)
    model = tiny_model(family, {**MODELS[family].tiny, "tie_word_embeddings": False})
    model.resize_token_embeddings(VOCAB)
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    ids = tiny_batch(torch.device("cpu"))
    return {name: t % VOCAB if name == "input_ids" else torch.where(t < 0, t, t % VOCAB) for name, t in ids.items()}


def fused_like(model: Any, original: Any) -> float:
    """The largest error of the loss, of a gradient and of the logits that are read afterwards."""
    inputs = {name: t for name, t in batch().items() if name in ("input_ids", "labels")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        outputs = model(**inputs)
        assert type(outputs.logits) is DeferredLogits, "the loss was not fused"
        outputs.loss.backward()
    want = original(**inputs)
    want.loss.backward()
    with pytest.warns(MaterializedLogitsWarning):
        logits = outputs.logits.detach() + 0
    return max(
        float((outputs.loss - want.loss).abs()),
        farthest(gradients_of(model), gradients_of(original)),
        float((logits - want.logits.detach()).norm() / want.logits.detach().norm()),
    )


def colwise_parallel(rank: int, mesh: Any) -> float:
    model = whole_model()
    tigon.patch(model)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    return fused_like(model, whole_model())


def softcapped_colwise_parallel(rank: int, mesh: Any) -> float:
    model = whole_model("gemma2")
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    tigon.patch(model)
    return fused_like(model, whole_model("gemma2"))


def tp_plan_of_transformers(rank: int, folder: Path) -> float:
    mesh = dist.device_mesh.init_device_mesh("cpu", (two_ranks.RANKS,), mesh_dim_names=("tp",))
    if rank == 0:
        whole_model().save_pretrained(folder)
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh).train()
    before = vars(model.lm_head).get("forward")
    report = tigon.patch(model)
    error = fused_like(model, whole_model())
    report.undo()
    assert vars(model.lm_head).get("forward") is before
    inputs = batch()
    want = whole_model()(input_ids=inputs["input_ids"]).logits
    return max(error, float((model(input_ids=inputs["input_ids"]).logits - want).norm() / want.norm()))


HAS_TP_PLAN = importlib.util.find_spec("transformers.distributed.tensor_parallel") is not None
NAMES = (
    "colwise_parallel",
    "softcapped_colwise_parallel",
    pytest.param(
        "tp_plan_of_transformers",
        marks=pytest.mark.skipif(not HAS_TP_PLAN, reason="this transformers has another tensor parallelism"),
    ),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    scenarios: Scenarios = {
        "colwise_parallel": colwise_parallel,
        "softcapped_colwise_parallel": softcapped_colwise_parallel,
    }
    if HAS_TP_PLAN:
        scenarios["tp_plan_of_transformers"] = lambda rank, mesh: tp_plan_of_transformers(rank, folder)
    return two_ranks.run(scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", NAMES)
def test_model_with_a_divided_head_has_loss_gradients_and_logits_of_the_whole_one(
    found: list[dict[str, Any]], scenario: str
) -> None:
    two_ranks.assert_right(found, scenario)
