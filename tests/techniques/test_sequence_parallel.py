"""Rows shared by two processes: the loss and gradients of one process, packed documents, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import tigon
import two_ranks
from tests.short_names import settings_of
from tigon.errors import RecipeError
from tigon.models import MODELS, DeferredLogits
from tigon.models.verification.tiny import tiny_config, tiny_model
from tigon.techniques.checkpointing.layer_checkpointing import apply
from tigon.techniques.keys.settings import Settings
from tigon.techniques.sequence_parallel import method, ring_attention, sequence_parallel
from tigon.techniques.sequence_parallel.sequence_parallel import cut_rows, document_mask, share_rows
from two_ranks import RANKS, Scenarios, gradients_of

pytest.importorskip("transformers")

BATCH, TOKENS = 2, 21  # odd: the shards are padded
DOCUMENTS = (5, 9, 7)


def batch(*, packed: bool) -> dict[str, Tensor]:
    """Two rows. Packed ones hold documents, whose first tokens have no label; others end with padding."""
    tokens = torch.randint(3, 97, (BATCH, TOKENS), generator=torch.Generator().manual_seed(7))
    labels = tokens.clone()
    labels[1, 4:8] = -100
    if packed:
        positions = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(BATCH, -1).contiguous()
        return {"input_ids": tokens, "labels": labels.where(positions > 0, -100), "position_ids": positions}
    mask = torch.ones_like(tokens)
    labels[1, -6:], mask[1, -6:] = -100, 0
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def fresh(family: str = "llama", *, patched: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(family, MODELS[family].tiny).to(dtype).train()
    model.set_attn_implementation("sdpa")
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # PyTorch's grouped product has no fp64
    if patched:
        tigon.patch(model)
    return model


def outputs_of(model: nn.Module, rows: dict[str, Tensor], *, autocast: bool = False) -> Any:
    items = (rows["labels"][:, 1:] != -100).sum()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(**rows, num_items_in_batch=items, use_cache=False)


def whole(
    family: str, rows: dict[str, Tensor], *, patched: bool, dtype: torch.dtype, autocast: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    model = fresh(family, patched=patched, dtype=dtype)
    loss = outputs_of(model, rows, autocast=autocast).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def farthest_from(exact: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
    assert grads.keys() == exact.keys()
    return max(float((grads[name].double() - want).norm() / want.norm()) for name, want in exact.items())


def shared(
    rank: int,
    mesh: Any,
    *,
    family: str = "llama",
    packed: bool = True,
    patched: bool = True,
    engine: str = "ddp",
    recompute: bool = False,
    method: str = "ulysses",
    autocast: bool = False,
) -> float:
    """The error of the gradients against fp64, as a multiple of the error of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rows = batch(packed=packed)
    exact_loss, exact = whole(family, rows, patched=False, dtype=torch.float64)
    loss_alone, alone = whole(family, rows, patched=patched, dtype=torch.float32, autocast=autocast)
    model = fresh(family, patched=patched)
    share_rows(model, dist.group.WORLD, method)
    if recompute:
        apply(model, ("full", "mlp"))
    wrapped: Any = model
    if engine == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
    output = outputs_of(wrapped, rows, autocast=autocast)
    assert isinstance(output.logits, DeferredLogits) == patched
    (output.loss * RANKS).backward()
    loss = output.loss.detach().clone()
    dist.all_reduce(loss)
    rounding = RANKS * torch.finfo(torch.float32).eps * float(exact_loss)  # that of each rank's loss
    loss_error = abs(float(loss - exact_loss)) / max(abs(float(loss_alone - exact_loss)), rounding)
    return max(loss_error, farthest_from(exact, gradients_of(model)) / farthest_from(exact, alone))


SCENARIOS: Scenarios = {
    "packed documents": shared,
    "padded rows": partial(shared, packed=False),
    "without tigon's kernels": partial(shared, patched=False),
    "FSDP2": partial(shared, engine="fsdp2"),
    "recomputed layers": partial(shared, recompute=True),
    "experts": partial(shared, family="mixtral"),
    "latent attention, whose values are narrower": partial(shared, family="deepseek_v3"),
}


def has_ring() -> bool:
    """Whether this PyTorch has the functions that a ring calls."""
    try:
        ring_attention.check()
    except RecipeError:
        return False
    return True


RING: Scenarios = {
    "ring": partial(shared, packed=False, method="ring"),
    "ring without tigon's kernels": partial(shared, packed=False, patched=False, method="ring"),
    # transformers' rotary embedding then gives queries and keys in fp32, and values are bf16
    "ring without tigon's kernels, under autocast": partial(
        shared, packed=False, patched=False, method="ring", autocast=True
    ),
    "ring under FSDP2 with recomputed layers": partial(
        shared, packed=False, engine="fsdp2", recompute=True, method="ring"
    ),
}
if has_ring():
    SCENARIOS |= RING


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="tried with torch 2.13")
def test_this_pytorch_has_the_functions_of_a_ring() -> None:
    assert has_ring()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return two_ranks.run(SCENARIOS | INPUTS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_share_rows_with_the_gradients_of_one(scenario: str, found: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(found):
        error = results[scenario]
        assert isinstance(error, float), f"rank {rank}:\n{error}"
        assert error <= 2, f"rank {rank}: {error:.2f} times the error of one process"


# --- rows ------------------------------------------------------------------------------------------------------------


def cut(rank: int, mesh: Any) -> float:
    """1.0 if this rank's part of the packed rows is right."""
    rows = batch(packed=True)
    got = cut_rows({**rows, "num_items_in_batch": 3}, dist.group.WORLD)
    size = (TOKENS + 1) // RANKS
    own = slice(rank * size, (rank + 1) * size)
    following = torch.cat([rows["labels"][:, 1:], torch.full((BATCH, 1), -100)], dim=1)
    for name, value, fill in (
        ("input_ids", rows["input_ids"], 0), ("labels", rows["labels"], -100), ("shift_labels", following, -100),
        ("position_ids", rows["position_ids"], DOCUMENTS[-1]),
    ):  # fmt: skip
        assert torch.equal(got[name], F.pad(value, (0, 1), value=fill)[:, own]), name
    assert got["num_items_in_batch"] == 3
    return 1.0


def cut_for_a_ring(rank: int, mesh: Any) -> float:
    """1.0 if this rank has an early and a late chunk of the padded rows, with the labels of the tokens behind each."""
    rows = batch(packed=False)
    got = cut_rows(rows, dist.group.WORLD, "ring")
    chunk = (TOKENS + 3) // (2 * RANKS)
    numbers = (rank, 2 * RANKS - 1 - rank)
    places = torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for number in numbers])
    following = torch.cat([rows["labels"][:, 1:], torch.full((BATCH, 1), -100)], dim=1)
    assert torch.equal(got["input_ids"], F.pad(rows["input_ids"], (0, 3))[:, places])
    assert torch.equal(got["shift_labels"], F.pad(following, (0, 3), value=-100)[:, places])
    assert torch.equal(got["position_ids"], places.expand(BATCH, -1))
    return 1.0


def uncut(rank: int, mesh: Any) -> float:
    """1.0 if a call without labels computes whole rows, in one process alone."""
    if rank:
        return 1.0
    tokens, model = batch(packed=True)["input_ids"], fresh().eval()
    with torch.no_grad():
        want = model(tokens).logits
        share_rows(model, dist.group.WORLD)
        assert torch.equal(model(tokens).logits, want)
        assert model.generate(tokens[:1], max_new_tokens=3, do_sample=False).shape == (1, TOKENS + 3)
    return 1.0


def refused(rank: int, mesh: Any) -> float:
    """1.0 if inputs that cannot be cut, and layers that would not see whole rows, raise."""
    rows = batch(packed=False)
    with pytest.raises(TypeError, match="padding is at the right"):
        cut_rows({**rows, "attention_mask": rows["attention_mask"].flip(1)}, dist.group.WORLD)
    with pytest.raises(TypeError, match="not both"):
        cut_rows({**rows, "position_ids": rows["input_ids"]}, dist.group.WORLD)
    with pytest.raises(RecipeError, match="ring has no mask that separates packed documents"):
        cut_rows(batch(packed=True), dist.group.WORLD, "ring")
    narrow = fresh("deepseek_v3")
    share_rows(narrow, dist.group.WORLD, "ring")
    with pytest.raises(RecipeError, match="a width of values of its own"):
        outputs_of(narrow, rows)
    model = fresh("nemotron")  # its attention is not that of transformers' interface
    share_rows(model, dist.group.WORLD)
    with pytest.raises(TypeError, match="1 unnamed"):
        model(rows["input_ids"], labels=rows["labels"])
    for packed in (False, True):
        with pytest.raises(RecipeError, match="0 of the model's 2 layers"):
            outputs_of(model, batch(packed=packed))
    return 1.0


def few_key_heads(rank: int, mesh: Any) -> float:
    """1.0 if a ring keeps and sends keys with their own two heads, and has the gradients of the whole row."""
    if not has_ring():
        return 1.0
    draw = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, heads, 16, 8, generator=draw, dtype=torch.float64).float() for heads in (6, 2, 2)]
    places = torch.cat([torch.arange(16)[own] for own in ring_attention.own_tokens(rank, RANKS, 16)])
    own = [x[:, :, places].requires_grad_() for x in whole]
    kept: list[torch.Size] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ring_attention.ring_attention(*own, dist.group.WORLD)
    assert [shape[1] for shape in kept[:3]] == [6, 2, 2]
    out.square().sum().backward()
    for x in whole:
        x.requires_grad_()
    want = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    want.square().sum().backward()
    assert torch.allclose(out, want[:, :, places], atol=1e-5)
    for got, of_row in zip(own, whole, strict=True):
        assert of_row.grad is not None and got.grad is not None
        assert torch.allclose(got.grad, of_row.grad[:, :, places], atol=1e-4)
    return 1.0


INPUTS: Scenarios = {
    "cut": cut, "cut for a ring": cut_for_a_ring, "uncut": uncut, "refused": refused, "few key heads": few_key_heads
}  # fmt: skip


@pytest.mark.parametrize("scenario", INPUTS)
def test_rows_are_cut_in_calls_with_labels_alone(scenario: str, found: list[dict[str, Any]]) -> None:
    assert [results[scenario] for results in found] == [1.0] * RANKS


def test_mask_separates_documents_and_is_absent_for_one_document() -> None:
    one = torch.arange(4, 9).expand(2, -1)
    assert document_mask(one) is None
    two = torch.tensor([[0, 1, 0, 1], [3, 4, 5, 6]])
    mask = document_mask(two)
    assert mask is not None and mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mask[1, 0], torch.ones(4, 4).tril().bool())


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {"gpus": 3}, r"sharding.gpus 3 is not a multiple of it; set sharding.gpus to 4"),
        (
            {},
            {"gpus": 4, "sequence_shards": 4, "sequence_method": "ulysses"},
            r"4 heads and 2 key heads.*choose a divisor of both",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            {"sequence_method": "ulysses"},
            r"6 heads and 3 key heads",
        ),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {}, r"layers of sliding_attention"),
        ({"sliding_window": 8}, {}, r"sliding window of 8"),
        (
            {"attention_dropout": 0.1},
            {"sequence_method": "ring"},
            r"dropout; set model.config.attention_dropout: 0 instead of 0.1, or sharding.sequence_method: ulysses",
        ),
        ({"attention_dropout": 0.1}, {"gpus": 4, "sequence_shards": 4}, r"instead of 0.1, or sharding.sequence: 2"),
        ({"output_router_logits": True}, {}, r"router's loss is not a sum over tokens"),
    ],
)
def test_models_whose_rows_cannot_be_shared_are_refused(
    changes: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    config = tiny_config("llama")
    config.update(changes)
    with pytest.raises(RecipeError, match=reason):
        sequence_parallel.check(config, settings_of({"sharding.gpus": 2, "sharding.sequence": 2, **settings}))


def test_model_of_text_and_images_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"llava takes images or sound too"):
        sequence_parallel.check(
            tiny_config("llava", MODELS["llava"].tiny), Settings.of({"sharding.gpus": 2, "sharding.sequence": 2})
        )


@pytest.mark.parametrize(
    ("size", "heads", "key_heads", "expected"),
    [(2, 4, 2, "ulysses"), (4, 4, 2, "ring"), (2, 6, 3, "ring"), (3, 6, 3, "ulysses"), (2, 3, 2, "ring")],
)
def test_auto_takes_ulysses_if_the_processes_divide_all_heads(
    size: int, heads: int, key_heads: int, expected: str
) -> None:
    config = tiny_config("llama")
    config.update({"num_attention_heads": heads, "num_key_value_heads": key_heads})
    settings = Settings.of({"sharding.gpus": size, "sharding.sequence": size})
    assert method.resolved(settings, config).sharding.sequence_method == expected
    words = (
        f"{size} processes {'divide' if expected == 'ulysses' else 'cannot divide'} {heads} heads and {key_heads} key"
    )
    assert words in method.reason(config, size)
    assert method.resolved(Settings.of({}), config) == Settings.of({}), "rows of one process have no method"
    asked = settings.having({"sharding.sequence_method": "ring"})
    assert method.resolved(asked, config) == asked


def test_auto_refuses_packed_documents_in_a_ring_and_names_the_most_processes_of_ulysses() -> None:
    config = tiny_config("llama")  # 4 heads and 2 key heads
    of_four = Settings.of({"sharding.gpus": 4, "sharding.sequence": 4})
    with pytest.raises(RecipeError, match=r"4 processes cannot divide .*, or sharding\.sequence: 2$"):
        method.check_documents(of_four, config)
    method.check_documents(of_four.having({"sharding.sequence": 2}), config)


def test_other_models_are_accepted() -> None:
    sequence_parallel.check(tiny_config("llama"), Settings.of({"sharding.gpus": 4, "sharding.sequence": 2}))
    odd = tiny_config("llama")
    odd.update({"num_attention_heads": 3, "num_key_value_heads": 3})
    sequence_parallel.check(odd, Settings.of({}))
