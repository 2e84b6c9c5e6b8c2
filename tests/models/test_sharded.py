"""The head whose weight is not whole: partitioned, sharded, split among ranks. Right, or refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models_helpers import HEADS, VOCAB, assert_close, batch, call, llama, loss_and_gradients, twins
from torch import nn

from partitioned import Partitioned
from second_proofs import proved_by
from tigon.errors import PatchError
from tigon.models import DeferredLogits, MaterializedLogitsWarning, patch
from tigon.models.seams.base import PatchedModule

INPUTS = batch()
each_head = pytest.mark.parametrize("family", HEADS)


@each_head
def test_head_partitioned_outside_its_own_forward_trains_as_whole(family):
    patched, original = twins(family, tie_word_embeddings=False)
    patch(patched)
    want = loss_and_gradients(original, call(**INPUTS))
    shard = Partitioned(patched.lm_head)
    outputs = patched(**INPUTS)
    assert patched.lm_head.weight.numel() == 0 and type(outputs.logits) is DeferredLogits
    outputs.loss.backward()
    assert shard.gathers == 2  # once for the forward, once for the backward
    got = {"loss": outputs.loss.detach(), **{n: p.grad for n, p in patched.named_parameters()}}
    assert_close(got, want)
    shard.release()
    with pytest.warns(MaterializedLogitsWarning):  # reading calls the module, so its hooks gather once more
        torch.testing.assert_close(outputs.logits.detach() + 0, original(**INPUTS).logits.detach())
    assert shard.gathers == 3


def test_head_that_nobody_gathered_is_refused_by_name():
    model = llama()
    patch(model)
    model.lm_head.weight.data = torch.empty(0)
    with pytest.raises(PatchError, match=r"lm_head\.weight.*ZeRO-3"):
        model(**INPUTS)


def test_tensor_parallel_head_with_gathered_logits_has_the_loss_of_the_whole_head():
    """Each rank holds V/2 rows and an output hook gathers the logits of all ranks."""
    patched, original = twins()
    patch(patched)
    rest = patched.lm_head.weight.data[VOCAB // 2 :].clone()
    patched.lm_head.weight = nn.Parameter(patched.lm_head.weight.data[: VOCAB // 2].clone())
    patched.lm_head.register_forward_hook(lambda m, args, out: torch.cat([out, args[0] @ rest.T], dim=-1))
    with pytest.warns(UserWarning, match="full logits.*shard"):
        outputs = patched(**INPUTS)
    assert type(outputs.logits) is torch.Tensor
    torch.testing.assert_close(outputs.loss, original(**INPUTS).loss)


@each_head
@pytest.mark.parametrize("local", [True, False], ids=["logits-local", "logits-DTensor"])
def test_tensor_parallel_head_of_dtensors_trains_with_the_fused_loss(mesh, local, family):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    patched, original = twins(family, tie_word_embeddings=False)
    patch(patched)
    layout = ColwiseParallel(output_layouts=Replicate(), use_local_output=local)
    parallelize_module(patched.lm_head, mesh, layout)
    assert isinstance(patched.lm_head.weight, DTensor)
    targets = nn.functional.pad(INPUTS["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    want = loss_and_gradients(original, call(**INPUTS))
    shift_labels = targets if local else distribute_tensor(targets, mesh, [Replicate()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = patched(**INPUTS, shift_labels=shift_labels)
        assert type(outputs.logits) is DeferredLogits
        outputs.loss.backward()
    got = {"loss": outputs.loss.detach(), **{n: p.grad for n, p in patched.named_parameters()}}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}
    assert_close(whole, want)
    with pytest.warns(MaterializedLogitsWarning):  # in the layout that the hooks give logits
        logits = outputs.logits.detach() + 0
    assert isinstance(logits, DTensor) is not local
    torch.testing.assert_close(logits if local else logits.full_tensor(), original(**INPUTS).logits.detach())


def test_logits_of_a_tensor_parallel_head_cannot_be_read_after_an_update(mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = llama(tie_word_embeddings=False)
    patch(model)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    outputs = model(**INPUTS)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(PatchError, match=r"optimizer\.step"):
        outputs.logits.sum()


def test_compiled_tensor_parallel_head_computes_its_own_logits(mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch._dynamo.reset()
    patched, original = twins(tie_word_embeddings=False)
    patch(patched)
    parallelize_module(patched.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    loss = torch.compile(patched, backend="eager")(**INPUTS, use_cache=False).loss
    torch._dynamo.reset()
    torch.testing.assert_close(loss, original(**INPUTS).loss)


@each_head
@pytest.mark.parametrize("unit", ["root", "own"])
@pytest.mark.parametrize("order", ["patch-then-shard", "shard-then-patch"])
def test_fsdp2_trains_with_the_fused_loss(mesh, unit, order, family):
    from torch.distributed.fsdp import fully_shard

    patched, original = twins(family, tie_word_embeddings=False)
    want = loss_and_gradients(original, call(**INPUTS))
    if order == "patch-then-shard":
        patch(patched)
    for module in (*patched.model.layers, *([patched.lm_head] if unit == "own" else []), patched):
        fully_shard(module, mesh=mesh)
    if order == "shard-then-patch":
        assert patch(patched).counts["linear_cross_entropy"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = patched(**INPUTS)
        assert type(outputs.logits) is DeferredLogits
        outputs.loss.backward()
    got = {n: p.grad.full_tensor() for n, p in patched.named_parameters()}
    assert_close({"loss": outputs.loss.detach(), **got}, want)
    if unit == "own":  # calling lm_head gathers its weight again
        with pytest.warns(MaterializedLogitsWarning):
            torch.testing.assert_close(outputs.logits.detach() + 0, original(**INPUTS).logits.detach())
    else:
        with pytest.raises(PatchError, match="Read the logits before backward"):
            outputs.logits.sum()


def test_fsdp2_logits_can_be_read_before_backward(mesh):
    from torch.distributed.fsdp import fully_shard

    patched, original = twins()
    patch(patched)
    for module in (*patched.model.layers, patched):
        fully_shard(module, mesh=mesh)
    outputs = patched(**INPUTS)
    with pytest.warns(MaterializedLogitsWarning):
        torch.testing.assert_close(outputs.logits.detach() + 0, original(**INPUTS).logits.detach())


def test_fsdp1_trains_with_the_fused_loss(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    patched, original = twins()
    want = loss_and_gradients(original, call(**INPUTS))
    patch(patched)
    patched.lm_head = FSDP(patched.lm_head, use_orig_params=True, device_id=torch.device("cpu"))
    model = FSDP(patched, use_orig_params=True, device_id=torch.device("cpu"))
    outputs = model(**INPUTS)
    assert type(outputs.logits) is DeferredLogits
    outputs.loss.backward()
    got = {n.replace("_fsdp_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    assert_close({"loss": outputs.loss.detach(), **got}, want)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel_trains_with_the_fused_loss(mesh, options):
    patched, original = twins()
    want = loss_and_gradients(original, call(**INPUTS))
    patch(patched)
    model = nn.parallel.DistributedDataParallel(patched, **options)
    for _ in range(2):  # static_graph takes another path from the second step on
        with warnings.catch_warnings():
            warnings.simplefilter("error", MaterializedLogitsWarning)
            outputs = model(**INPUTS)
            patched.zero_grad(set_to_none=True)
            outputs.loss.backward()
        got = {n: p.grad.clone() for n, p in patched.named_parameters()}
        assert_close({"loss": outputs.loss.detach(), **got}, want)
    assert patch(model).notes  # seen through the wrapper: already patched


def test_data_parallel_replicas_are_patched():
    model = llama()
    patch(model)
    replica = model._replicate_for_data_parallel()
    assert (
        isinstance(replica, PatchedModule) and copy.copy(model.lm_head).forward.__func__ is type(model.lm_head).forward
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "glm4"])
def test_patched_layers_of_dtensors_compute_the_same_as_before(mesh, family):
    """Sequence and tensor parallelism: tigon's operators have no sharding rules, PyTorch's have."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

    patched, _ = twins(family)
    report = patch(patched)
    paths = [path for row in report.replaced if row.op in ("rms_norm", "layer_norm", "swiglu") for path in row.paths]
    for path in paths:
        module = patched.get_submodule(path)
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
        want = module(x)
        distribute_module(module, mesh)
        got = module(distribute_tensor(x, mesh, [Replicate()]))
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("family", proved_by(["gemma2"], ["llama", "gemma2"], "a head whose logits are mapped too"))
def test_compiled_fsdp2_gathers_the_head_for_backward(mesh, family):
    """The head is a separate unit: a hook on its output has to gather its weight for the backward."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    patched, original = twins(family, tie_word_embeddings=False)
    want = loss_and_gradients(original, call(**INPUTS))
    patch(patched)
    for module in (*patched.model.layers, patched.lm_head, patched):
        fully_shard(module, mesh=mesh)
    loss = torch.compile(patched, backend="aot_eager")(**INPUTS, use_cache=False).loss
    loss.backward()
    got = {name: p.grad.full_tensor() for name, p in patched.named_parameters()}
    torch._dynamo.reset()
    assert_close({"loss": loss.detach(), **got}, want, 2e-5)
