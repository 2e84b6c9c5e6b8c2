"""The same parity on a GPU, where the ops are kernels and the labels are counted asynchronously."""

from __future__ import annotations

import pytest
import torch
from models_helpers import CONFIGS, batch, call, llama, loss_and_gradients, relative_errors

from tigon.models import MODELS, DeferredLogits, patch
from tigon.models.verification.tiny import tiny_model

pytestmark = pytest.mark.gpu


def worse_than_unpatched(got, baseline, truth, floor):
    """Gradients whose error against fp64 is more than twice the unpatched model's."""
    base, errors = relative_errors(baseline, truth), relative_errors(got, truth)
    return {name: (error, base[name]) for name, error in errors.items() if error > 2 * max(base[name], floor)}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype, floor", [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)], ids=["fp32", "bf16"])
def test_error_is_at_most_twice_that_of_the_unpatched_model(config, dtype, floor):
    inputs = {name: t.cuda() for name, t in batch(4, 64).items()}
    items = (inputs["labels"][:, 1:] != -100).sum()
    for extra in ({}, {"num_items_in_batch": items}, {"num_items_in_batch": items.cpu()}):
        run = call(**inputs, **extra)
        truth = loss_and_gradients(llama(config).double().cuda(), run)
        baseline = loss_and_gradients(llama(config, dtype).cuda(), run)
        patched = llama(config, dtype).cuda()
        patch(patched)
        assert not worse_than_unpatched(loss_and_gradients(patched, run), baseline, truth, floor)
        assert type(run(patched)) is torch.Tensor and type(patched(**inputs).logits) is DeferredLogits


def test_labels_on_the_cpu_work_with_a_model_on_the_gpu():
    inputs = batch()
    patched, original = llama().cuda(), llama().cuda()
    patch(patched)
    run = call(input_ids=inputs["input_ids"].cuda(), labels=inputs["labels"])
    torch.testing.assert_close(run(patched), run(original))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere"])
def test_model_compiled_with_inductor_equals_eager(name):
    inputs = {key: t.cuda() for key, t in batch(4, 64).items()}
    patched = tiny_model(name, {**MODELS[name].tiny, "max_position_embeddings": 128}).cuda()
    patch(patched)
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True)
    for labels in (inputs["labels"], inputs["input_ids"]):
        kwargs = {"input_ids": inputs["input_ids"], "labels": labels, "use_cache": False}
        want = loss_and_gradients(patched, call(**kwargs))
        got = loss_and_gradients(patched, lambda _, kwargs=kwargs: compiled(**kwargs).loss)
        assert all(error <= 1e-4 for error in relative_errors(got, want).values())
    torch._dynamo.reset()
