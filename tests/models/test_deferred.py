"""`outputs.logits` of a patched training step looks like a tensor and is computed only if its values are read."""

from __future__ import annotations

import copy
import io
import threading
import warnings

import pytest
import torch
from models_helpers import VOCAB, batch, call, llama, loss_and_gradients, twins
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.errors import PatchError
from tigon.models import DeferredLogits, MaterializedLogitsWarning, patch

pytestmark = pytest.mark.filterwarnings("ignore::tigon.models.MaterializedLogitsWarning")
INPUTS = batch()
SHAPE = (2, 19, VOCAB)


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor an operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.numel += [t.numel() for t in leaves if isinstance(t, torch.Tensor) and not t.is_meta]
        return result


def step():
    """A patched model, its twin, and both outputs of a training step."""
    patched, original = twins()
    patch(patched)
    return patched, original, patched(**INPUTS), original(**INPUTS)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(300)}, {"logits_to_keep": 252}], ids=str)
def test_no_tensor_of_tokens_by_vocabulary_exists_in_a_training_step(options):
    # 4 MiB of fp32 weight gradient and 16 MiB of chunk are less than the 31 MiB of all logits.
    rows, tokens, vocab = 1, 256, 32000
    model = llama(vocab_size=vocab, num_hidden_layers=1)
    patch(model)
    ids = torch.randint(3, vocab, (rows, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids[:, -options["logits_to_keep"] :] if "logits_to_keep" in options else ids
    with Sizes() as sizes:
        outputs = model(input_ids=ids, labels=labels, **options)
        assert outputs.logits.shape[-1] == vocab and outputs.logits.dtype == torch.float32
        outputs.loss.backward()
    smallest_logits = labels.numel() * vocab
    largest = max(n for n in sizes.numel if n != vocab * 32)  # the weight and its gradient are not activations
    assert largest <= smallest_logits * 0.6, largest

    with Sizes() as sizes:  # the count can fail: the same step unpatched
        llama(vocab_size=vocab, num_hidden_layers=1)(input_ids=ids, labels=ids).loss.backward()
    assert max(sizes.numel) >= tokens * vocab


def test_looking_at_the_logits_computes_nothing():
    model = llama()
    patch(model)
    with Sizes() as sizes, warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = model(**INPUTS)
        before = len(sizes.numel)
        logits = outputs.logits
        assert isinstance(logits, torch.Tensor) and type(logits) is DeferredLogits
        assert logits.shape == SHAPE and logits.size(-1) == VOCAB and logits.ndim == 3 and len(logits) == 2
        assert logits.numel() == 2 * 19 * VOCAB and logits.dtype == torch.float32 and logits.is_floating_point()
        assert logits.device.type == "cpu" and not logits.is_cuda and logits.requires_grad
        assert "DeferredLogits" in repr(logits) and str(SHAPE) in repr(logits)
        assert logits.detach().float().to(torch.bfloat16).contiguous().clone().dtype == torch.bfloat16
        assert logits.to("cpu", torch.float16).dtype == torch.float16 and not logits.detach().requires_grad
        assert max(sizes.numel[before:], default=0) <= 1


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits + 0,
        lambda logits: logits[:, -1],
        lambda logits: logits.argmax(-1),
        lambda logits: torch.softmax(logits, dim=-1),
        lambda logits: logits.float().log_softmax(-1),
        lambda logits: torch.cat([logits, logits]),
        lambda logits: torch.einsum("btv->bt", logits),
        lambda logits: logits.view(-1, VOCAB),
        lambda logits: logits.to(torch.float64) * 2,
        lambda logits: torch.tensor(logits.tolist()),
        lambda logits: torch.from_numpy(logits.detach().cpu().numpy()),
        lambda logits: torch.stack(list(logits)),
        lambda logits: copy.deepcopy(logits.detach()),
        lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(38, dtype=torch.long)),
    ],
)
def test_reading_the_logits_in_any_way_gives_their_values(read):
    _, _, outputs, expected = step()
    got = read(outputs.logits)
    assert type(got) is torch.Tensor
    want = read(expected.logits)
    torch.testing.assert_close(got, want)
    assert got.requires_grad == want.requires_grad


def test_outputs_can_be_indexed_unpacked_and_saved():
    _, _, outputs, expected = step()
    assert outputs["logits"] is outputs.logits and outputs[1] is outputs.logits
    assert [type(v) for v in outputs.to_tuple()[:2]] == [torch.Tensor, DeferredLogits]
    buffer = io.BytesIO()
    with pytest.warns(MaterializedLogitsWarning):
        torch.save(outputs.logits.detach(), buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer), expected.logits.detach())


def test_first_read_warns_once_at_the_reading_line_and_later_ones_do_not():
    model, _, outputs, _ = step()
    with pytest.warns(MaterializedLogitsWarning, match=r"\(2, 19, 97\)") as caught:
        outputs.logits.sum()
        outputs.logits.sum()
        model(**INPUTS).logits.sum()
    assert len(caught) == 1 and caught[0].filename == __file__


def test_read_logits_carry_gradients():
    """An entropy bonus on outputs.logits, as reinforcement learning adds it."""

    def run(model):
        outputs = model(**INPUTS)
        probabilities = outputs.logits.softmax(-1)
        return outputs.loss + 0.3 * (probabilities * probabilities.log()).sum(-1).mean()

    patched, original = twins()
    patch(patched)
    want = loss_and_gradients(original, run)
    got = loss_and_gradients(patched, run)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-7)


def test_reading_first_without_gradients_does_not_lose_them_later():
    _, _, outputs, expected = step()
    with torch.no_grad():
        assert not outputs.logits.sum().requires_grad
    got = outputs.logits.square().sum()
    assert got.requires_grad
    torch.testing.assert_close(got, expected.logits.square().sum())


def test_writing_into_read_logits_is_kept():
    _, _, outputs, _ = step()
    with torch.no_grad():
        logits = outputs.logits
        logits[:, 0] = 7.0
        assert bool((logits[:, 0] == 7).all()) and bool((outputs.logits[:, 0] == 7).all())
        copied = logits.clone()
        copied[:, 1] = 9.0
        assert not bool((logits[:, 1] == 9).any())


def test_logits_under_autocast_are_computed_under_it_even_when_read_outside():
    patched, original = twins()
    patch(patched)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, expected = patched(**INPUTS), original(**INPUTS)
    assert outputs.logits.dtype == expected.logits.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.logits + 0, expected.logits, rtol=0.05, atol=0.05)


def test_accelerate_casts_the_outputs_of_a_bf16_run_without_computing_logits():
    from accelerate.utils.operations import convert_outputs_to_fp32
    from transformers.trainer_pt_utils import nested_detach

    model = llama()
    patch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))(**INPUTS)
        assert type(outputs.logits) is DeferredLogits and outputs.logits.dtype == torch.float32
        assert type(nested_detach(outputs.logits)) is DeferredLogits
    assert outputs.loss.dtype == torch.float32
    outputs.loss.backward()
    assert model.lm_head.weight.grad is not None


def test_logits_of_weights_that_have_changed_are_refused():
    model, _, outputs, _ = step()
    outputs.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(PatchError, match=r"before optimizer\.step"):
        outputs.logits.sum()


def test_gradient_of_uncomputed_logits_is_refused():
    _, _, outputs, _ = step()
    with pytest.raises(PatchError, match="skip_logits=False"):
        outputs.logits.retain_grad()
    with pytest.raises(PatchError, match="skip_logits=False"):
        _ = outputs.logits.grad


def test_custom_autograd_function_on_uncomputed_logits_is_refused_not_ignored():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.detach() * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    _, _, outputs, _ = step()
    with pytest.raises(PatchError, match="custom autograd function"):
        (outputs.loss + Double.apply(outputs.logits).sum()).backward()


def test_skip_logits_overrides_the_mode_of_the_model():
    patched, original = twins()
    patch(patched)
    want = loss_and_gradients(original, call(**INPUTS))
    outputs = patched(**INPUTS, skip_logits=False)
    assert type(outputs.logits) is torch.Tensor
    assert loss_and_gradients(patched, call(**INPUTS, skip_logits=False)).keys() == want.keys()
    torch.testing.assert_close(outputs.loss, want["loss"].detach(), check_stride=False)
    patched.eval()
    with torch.no_grad():
        outputs = patched(**INPUTS, skip_logits=True)
    assert type(outputs.logits) is DeferredLogits
    torch.testing.assert_close(outputs.loss, want["loss"])


def test_threads_training_two_models_at_once_keep_their_own_losses():
    models = [llama(), llama(vocab_size=131)]
    inputs = [batch(seed=1), batch(seed=2)]
    want = []
    for model, kwargs in zip(models, inputs, strict=True):
        patch(model)
        want.append(loss_and_gradients(model, call(**kwargs))["loss"].item())
    losses: list[list[float]] = [[], []]

    def work(i):
        for _ in range(10):
            losses[i].append(models[i](**inputs[i]).loss.item())

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert losses == [[w] * 10 for w in want]


def test_a_model_called_inside_another_models_forward_keeps_its_own_loss():
    outer, inner = llama(), llama(vocab_size=131)
    patch(outer), patch(inner)
    inner_inputs = batch(seed=2)
    want_outer, want_inner = outer(**INPUTS).loss, inner(**inner_inputs).loss
    seen = []
    handle = outer.model.layers[0].register_forward_hook(lambda *_: seen.append(inner(**inner_inputs).loss))
    assert torch.equal(outer(**INPUTS).loss, want_outer) and torch.equal(seen[0], want_inner)
    handle.remove()


def test_forward_that_raises_leaves_no_call_behind():
    model = llama()
    patch(model)
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**INPUTS)
    handle.remove()
    hidden = torch.randn(1, 3, 32)
    assert model.lm_head(hidden).shape == (1, 3, VOCAB)
