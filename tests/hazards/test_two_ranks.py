"""Weights spread over two processes: the gradients of one process, or an error that names the parameter.

tests/models/test_sharded.py has the same wrappers in one process, where a shard is all of the tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
import two_ranks
from helpers import farthest
from tigon.models import MODELS, DeferredLogits
from tigon.models.verification.tiny import tiny_batch, tiny_model
from two_ranks import RANKS, Scenarios, gradients_of

pytest.importorskip("transformers")


def fresh(family: str = "llama") -> Any:
    return tiny_model(family, MODELS[family].tiny)


def whole(family: str = "llama", wrap: Callable[[Any], Any] = lambda model: model) -> dict[str, Tensor]:
    """The gradients of one process over the whole batch, never patched."""
    model = wrap(fresh(family))
    batch = tiny_batch(torch.device("cpu"))
    model(**batch, num_items_in_batch=items(batch)).loss.backward()
    return gradients_of(model)


def items(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def shared(model: Any, rank: int, named: nn.Module | None = None) -> dict[str, Tensor]:
    """The gradients after this rank's row; `named` is the module whose parameters carry the unwrapped names."""
    batch = tiny_batch(torch.device("cpu"))
    row = {name: t[rank : rank + 1] for name, t in batch.items()}
    outputs = model(**row, num_items_in_batch=items(batch))
    assert type(outputs.logits) is DeferredLogits, "the loss was not fused"
    (outputs.loss * RANKS).backward()  # what averages gradients over ranks divides by their number
    return gradients_of(named or model)


def shard(model: Any, mesh: Any, own_head: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    layers = model.get_decoder().layers
    for module in (*layers, *([model.get_output_embeddings()] if own_head else []), model):
        fully_shard(module, mesh=mesh)


def lora(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    wrapped.get_base_model().lm_head.weight.requires_grad_()
    return wrapped


def fsdp2(rank: int, mesh: Any, *, family: str, own_head: bool, patch_first: bool) -> float:
    model = fresh(family)
    if patch_first:
        tigon.patch(model)
    shard(model, mesh, own_head)
    if not patch_first:
        tigon.patch(model)
    return farthest(shared(model, rank), whole(family))


def fsdp2_with_lora(rank: int, mesh: Any, *, own_head: bool) -> float:
    model = fresh()
    tigon.patch(model)
    wrapped = lora(model)
    shard(model, mesh, own_head)
    return farthest(shared(wrapped, rank), whole(wrap=lora))


def data_parallel(rank: int, mesh: Any) -> float:
    model = fresh()
    tigon.patch(model)
    return farthest(shared(nn.parallel.DistributedDataParallel(model), rank, named=model), whole())


def tensor_parallel_head(rank: int, mesh: Any) -> float:
    """Each rank holds half of the vocabulary: the fused loss is of both halves."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, batch = fresh(), tiny_batch(torch.device("cpu"))
    tigon.patch(model)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    outputs = model(**batch, num_items_in_batch=items(batch))
    assert type(outputs.logits) is DeferredLogits, "the loss was not fused"
    outputs.loss.backward()
    return farthest(gradients_of(model), whole())


def nobody_gathers(rank: int, mesh: Any) -> float:
    """FSDP2 with the head's own unit, called around its hooks: a shard of the weight arrives at the forward."""
    from torch.distributed.fsdp import fully_shard

    model = fresh()
    tigon.patch(model)
    fully_shard(model.lm_head, mesh=mesh)
    model.lm_head._forward_pre_hooks.clear()  # what would gather the weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = model(**tiny_batch(torch.device("cpu"))).loss
        except Exception as error:
            said = [str(error), *(str(warning.message) for warning in caught)]
            assert any("lm_head.weight" in text for text in said), said
            return 0.0
    # Nothing raised, so it has to be the loss.
    want = fresh()(**tiny_batch(torch.device("cpu"))).loss
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    return float((loss - want).abs() / want)


SCENARIOS: Scenarios = {
    **{
        f"fsdp2 {family}, head {'a unit' if own else 'in the root'}, {'patched first' if first else 'sharded first'}": (
            lambda rank, mesh, family=family, own=own, first=first: fsdp2(
                rank, mesh, family=family, own_head=own, patch_first=first
            )
        )
        for family, own, first in (
            ("llama", False, True), ("llama", True, True), ("llama", True, False), ("gemma2", False, True),
        )
    },
    "fsdp2 with lora": lambda rank, mesh: fsdp2_with_lora(rank, mesh, own_head=False),
    "fsdp2 with lora, head a unit": lambda rank, mesh: fsdp2_with_lora(rank, mesh, own_head=True),
    "distributed data parallel": data_parallel,
    "tensor-parallel head": tensor_parallel_head,
    "shard that nobody gathered": nobody_gathers,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("peft")
    return two_ranks.run(SCENARIOS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_two_ranks_are_those_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    two_ranks.assert_right(found, scenario)
