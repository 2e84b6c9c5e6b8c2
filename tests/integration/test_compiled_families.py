"""torch.compile(fullgraph=True) of patched models of several families: one graph, and the loss of eager mode.

tests/models/test_compile.py looks into a Llama's graph. Here labels change between calls of one compiled model, from
none ignored to all: a graph made for the first labels would be wrong for the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_runs import VOCAB, model
from torch import Tensor, nn

import tigon
from second_proofs import proved_by

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    # Caps small enough to matter, and a window shorter than the rows.
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 8},
}
IDS = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def labels() -> dict[str, Tensor]:
    some = IDS.clone()
    some[0, :9] = -100
    # Labels are clones because labels that are the same tensor as the ids get another graph.
    return {"none": IDS.clone(), "some": some, "all but few": IDS.where(IDS % 7 == 0, -100),
            "none again": IDS.clone(), "all": torch.full_like(IDS, -100)}  # fmt: skip


def loss_and_gradients(call: Any, parameters: nn.Module, **inputs: Tensor) -> dict[str, Tensor]:
    parameters.zero_grad(set_to_none=True)
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in parameters.named_parameters()}}


def largest_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Relative, of the tensor with the largest; absolute where the wanted one is nothing."""
    assert got.keys() == want.keys()
    return max(float((got[n] - t).norm() / (t.norm() if t.norm() > 1e-9 else 1.0)) for n, t in want.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", proved_by(["gemma2"], FAMILIES, "test_compile.py compiles a Llama"))
def test_compiled_loss_equals_eager_with_and_without_ignored_labels(family: str, backend: str) -> None:
    device = "cuda" if backend == "inductor" else "cpu"
    patched, original = (model(family, **FAMILIES[family]).to(device) for _ in range(2))
    assert tigon.patch(patched).counts["linear_cross_entropy"] == 1
    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    limit = 1e-4 if device == "cuda" else 2e-5
    for ignored, target in labels().items():
        inputs = {"input_ids": IDS.to(device), "labels": target.to(device)}
        got = loss_and_gradients(compiled, patched, **inputs)
        eager = loss_and_gradients(patched, patched, **inputs)
        assert largest_error(got, eager) < limit, ignored
        if ignored == "all":  # transformers divides 0 by 0 here
            assert all(not t.any() for t in got.values())
        else:
            assert largest_error(got, loss_and_gradients(original, original, **inputs)) < limit, ignored
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1, "the labels' values have recompiled it"


def test_batches_of_any_size_share_at_most_three_graphs() -> None:
    """The attention of this family has a window, so it depends on the length too."""
    family = "gemma2"
    patched, original = (model(family, **FAMILIES[family]) for _ in range(2))
    tigon.patch(patched)
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    for rows, tokens in ((2, 17), (2, 23), (3, 12), (4, 31)):
        ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
        got = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(got, original(input_ids=ids, labels=ids).loss)
    # The first sizes are taken for constants, then each dimension becomes a symbol the first time it changes.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
