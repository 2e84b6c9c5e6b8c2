"""torch.compile sees a patched training step as one graph with tigon's named ops, and the loss of eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from models_helpers import VOCAB, assert_close, batch, call, llama, loss_and_gradients, twins

from second_proofs import proved_by
from tigon.errors import PatchError
from tigon.models import MODELS, patch
from tigon.models.verification.tiny import tiny_batch, tiny_model


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs the graph as it is and keeps it."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, example_inputs):
        self.graphs.append(graph)
        return graph.forward

    def targets(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes]


def test_training_step_is_one_graph_of_named_ops_without_logits():
    model = llama()
    patch(model)
    backend = Graphs()
    outputs = torch.compile(model, backend=backend, fullgraph=True)(**batch(), use_cache=False)
    targets = backend.targets()
    assert len(backend.graphs) == 1
    counts = {
        op: sum(f"tigon.{op}" in t for t in targets) for op in ("rms_norm", "rope", "glu", "linear_cross_entropy")
    }
    assert counts == {"rms_norm": 5, "rope": 2, "glu": 2, "linear_cross_entropy": 1}, targets
    assert outputs.loss.requires_grad
    for use in (lambda x: x.shape, lambda x: x[0], lambda x: torch.softmax(x, -1), lambda x: x.float()):
        with pytest.raises(PatchError, match="compiled training step"):
            use(outputs.logits)


def test_lengths_that_change_recompile_at_most_once():
    patched, original = twins()
    patch(patched)
    backend = Graphs()
    compiled = torch.compile(patched, backend=backend, fullgraph=True)
    for tokens in (19, 23, 11, 31):
        inputs = batch(tokens=tokens)
        items = torch.tensor(tokens)
        got = compiled(**inputs, num_items_in_batch=items, use_cache=False).loss
        torch.testing.assert_close(got, original(**inputs, num_items_in_batch=items).loss)
    assert len(backend.graphs) <= 2


def test_compiled_model_in_eval_mode_returns_logits_and_loss():
    patched, original = twins()
    patch(patched)
    compiled = torch.compile(patched.eval(), backend="aot_eager", fullgraph=True)
    original.eval()
    with torch.no_grad():
        got, want = compiled(**batch(), use_cache=False), original(**batch())
    torch.testing.assert_close(got.logits, want.logits)
    torch.testing.assert_close(got.loss, want.loss)


def test_eager_training_still_works_after_a_compiled_step():
    patched, original = twins()
    patch(patched)
    torch.compile(patched, backend="eager", fullgraph=True)(**batch(), use_cache=False)
    want = loss_and_gradients(original, call(**batch()))
    assert_close(loss_and_gradients(patched, call(**batch())), want)


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_compiled_family_is_one_graph_and_equals_eager(name):
    original = tiny_model(name, MODELS[name].tiny)
    patched = copy.deepcopy(original)
    patch(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    inputs = tiny_batch(torch.device("cpu"))
    for labels in (inputs["labels"], inputs["input_ids"], torch.full_like(inputs["labels"], -100)):
        kwargs = {"input_ids": inputs["input_ids"], "labels": labels, "use_cache": False}
        got = loss_and_gradients(patched, lambda _, kwargs=kwargs: compiled(**kwargs).loss)
        assert_close(got, loss_and_gradients(patched, call(**kwargs)), 2e-5)
        if (labels != -100).any():
            assert_close(got, loss_and_gradients(original, call(**kwargs)), 2e-5)
        else:
            assert all(not t.any() for t in got.values())


@pytest.mark.parametrize("name", proved_by(["gemma2"], ["gemma2", "granite"], "a factor in the place of a cap"))
def test_compiled_step_of_a_family_with_mapped_logits_makes_no_logits(name):
    model = tiny_model(name, MODELS[name].tiny)
    patch(model)
    backend = Graphs()
    inputs = tiny_batch(torch.device("cpu"))
    torch.compile(model, backend=backend, fullgraph=True)(**inputs, use_cache=False)
    sizes = [node.meta["example_value"].numel() for g in backend.graphs for node in g.graph.nodes
             if isinstance(node.meta.get("example_value"), torch.Tensor) and node.op == "call_function"]  # fmt: skip
    assert max(sizes) < inputs["labels"].numel() * VOCAB, max(sizes)
    assert sum("tigon.linear_cross_entropy" in target for target in backend.targets()) == 1


def test_compiled_model_counts_undeclared_steps_between_head_and_loss():
    """Nothing says that these logits are halved; the graph then computes them."""
    patched, original = twins()
    for model in (patched, original):
        model.lm_head.register_forward_hook(lambda m, args, logits: logits * 0.5)
    patch(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    kwargs = {**batch(), "use_cache": False}
    got = loss_and_gradients(patched, lambda _: compiled(**kwargs).loss)
    assert_close(got, loss_and_gradients(original, call(**kwargs)), 2e-5)
