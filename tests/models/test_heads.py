"""The head as it occurs: wrapped, hooked, sharded, quantised. Right, or refused; never silently something else."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models_helpers import VOCAB, assert_close, batch, call, llama, loss_and_gradients, twins
from torch import nn

from tigon.errors import PatchError
from tigon.models import DeferredLogits, MaterializedLogitsWarning, patch
from tigon.models.seam import PatchedModule

INPUTS = batch()
TRUNK = ("q_proj", "gate_proj")


def lora(model, targets, kind="lora", **options):
    peft = pytest.importorskip("peft")
    adapter = options.pop("adapter_name", "default")
    torch.manual_seed(3)
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options),
        "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=True, **options),
        "ia3": lambda: peft.IA3Config(
            target_modules=targets, feedforward_modules=[], init_ia3_weights=False, **options
        ),
    }
    return peft.get_peft_model(model, configs[kind](), adapter_name=adapter)


def test_forward_and_pre_hooks_on_the_head_run_once_and_act():
    patched, original = twins()
    patch(patched)
    want_calls, got_calls = [], []
    for model, calls in ((original, want_calls), (patched, got_calls)):
        model.lm_head.register_forward_pre_hook(lambda m, args, calls=calls: (calls.append("pre"), (args[0] * 1.5,))[1])
        model.lm_head.register_forward_hook(lambda m, args, out, calls=calls: calls.append(tuple(out.shape)))
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert got_calls == want_calls == ["pre", (2, 19, VOCAB)]


@pytest.mark.filterwarnings("ignore::tigon.models.MaterializedLogitsWarning")
def test_hook_that_changes_the_logits_changes_the_loss():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        model.lm_head.register_forward_hook(lambda m, args, logits: logits * 0.5)
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


def test_full_backward_hook_on_the_head_fires_with_the_gradient_of_hidden():
    patched, original = twins()
    patch(patched)
    seen = []
    for model in (original, patched):
        model.lm_head.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_in[0]))
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    torch.testing.assert_close(seen[1].view_as(seen[0]), seen[0], rtol=1e-4, atol=1e-7)
    assert type(patched(**INPUTS).logits) is DeferredLogits


def test_hook_with_its_own_autograd_function_is_refused_not_trained_wrong():
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    model = llama()
    patch(model)
    model.lm_head.register_forward_hook(lambda m, args, logits: Gather.apply(logits))
    with pytest.warns(MaterializedLogitsWarning):
        loss = model(**INPUTS).loss
    with pytest.raises(PatchError, match="custom autograd function"):
        loss.backward()
    model.zero_grad(set_to_none=True)
    model(**INPUTS, skip_logits=False).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_adapter_on_the_head_is_trained_through_full_logits(kind, order):
    plain, model = twins()
    want = loss_and_gradients(original := lora(plain, [*TRUNK, "lm_head"], kind), call(**INPUTS))
    assert any("lm_head" in name for name in want)
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, [*TRUNK, "lm_head"], kind)
        with pytest.warns(UserWarning, match="full logits.*lm_head became"):
            got = loss_and_gradients(wrapped, call(**INPUTS))
    else:
        wrapped = lora(model, [*TRUNK, "lm_head"], kind)
        report = patch(wrapped)
        assert report.counts["cross_entropy"] == 1 and "linear_cross_entropy" not in report.counts
        assert any(row.paths == ("lm_head",) and "peft" in row.reason for row in report.left_alone)
        got = loss_and_gradients(wrapped, call(**INPUTS))
    assert_close(got, want, 2e-5)
    assert type(wrapped(**INPUTS).logits) is torch.Tensor
    assert original is not wrapped


@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_adapters_in_the_trunk_keep_the_fused_loss(order):
    plain, model = twins()
    want = loss_and_gradients(lora(plain, list(TRUNK)), call(**INPUTS))
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, list(TRUNK))
    else:
        wrapped = lora(model, list(TRUNK))
        assert patch(wrapped).counts["linear_cross_entropy"] == 1
    assert_close(loss_and_gradients(wrapped, call(**INPUTS)), want, 2e-5)
    assert type(wrapped(**INPUTS).logits) is DeferredLogits


@pytest.mark.parametrize("adapter", ["default", "foo"])
@pytest.mark.parametrize("order", ["patch-then-wrap", "wrap-then-patch"])
def test_modules_to_save_on_the_head_trains_its_copy_with_the_fused_loss(adapter, order):
    plain, model = twins()
    options = {"modules_to_save": ["lm_head"], "adapter_name": adapter}
    original = lora(plain, list(TRUNK), **options)
    if order == "patch-then-wrap":
        patch(model)
        wrapped = lora(model, list(TRUNK), **options)
    else:
        wrapped = lora(model, list(TRUNK), **options)
        assert patch(wrapped).counts["linear_cross_entropy"] == 2
    # The copy differs from the original head, so that using the wrong one shows.
    for m in (original, wrapped):
        with torch.no_grad():
            m.get_base_model().lm_head.modules_to_save[adapter].weight.mul_(1.5)
    want = loss_and_gradients(original, call(**INPUTS))
    assert f"base_model.model.lm_head.modules_to_save.{adapter}.weight" in want
    assert_close(loss_and_gradients(wrapped, call(**INPUTS)), want, 2e-5)
    assert type(wrapped(**INPUTS).logits) is DeferredLogits
    with original.disable_adapter(), wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(**INPUTS).loss, original(**INPUTS).loss)


def test_merging_an_adapter_on_the_head_brings_the_fused_loss_back():
    peft = pytest.importorskip("peft")
    plain, model = twins()
    patch(model)
    merged = lora(model, ["lm_head"]).merge_and_unload()
    want = lora(plain, ["lm_head"]).merge_and_unload()
    assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in merged.modules())
    merged.requires_grad_(True), want.requires_grad_(True)
    assert_close(loss_and_gradients(merged, call(**INPUTS)), loss_and_gradients(want, call(**INPUTS)), 2e-5)
    assert type(merged(**INPUTS).logits) is DeferredLogits


def test_quantised_head_is_left_to_its_own_forward():
    """A stand-in for bitsandbytes: an nn.Linear subclass whose weight is not what it multiplies by."""

    class Linear8bit(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.detach() * 2)

    patched, original = twins()
    for model in (patched, original):
        model.lm_head.__class__ = Linear8bit
    report = patch(patched)
    (left,) = report.left_alone
    assert left.paths == ("lm_head",) and "Linear8bit" in left.reason
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)


@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_head_trains_its_parametrization(when):
    patched, original = twins()
    if when == "after":
        patch(patched)
    for model in (patched, original):
        nn.utils.parametrizations.weight_norm(model.lm_head)
    if when == "before":
        assert any("parametrized" in row.reason for row in patch(patched).left_alone)
    want = loss_and_gradients(original, call(**INPUTS))
    assert sum("lm_head" in name for name in want) == 2
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want, 2e-5)


def test_resized_head_is_noticed_and_patching_again_takes_it():
    patched, original = twins()
    patch(patched)
    for model in (patched, original):
        torch.manual_seed(0)
        model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    want = loss_and_gradients(original, call(**INPUTS))
    if not isinstance(patched.lm_head, PatchedModule):
        with pytest.warns(UserWarning, match=r"patch\(model\) again"):
            assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
        assert patch(patched).counts == {"linear_cross_entropy": 1}
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert type(patched(**INPUTS).logits) is DeferredLogits


def test_accelerate_device_map_hooks_keep_working_and_are_kept_by_undo():
    accelerate = pytest.importorskip("accelerate")
    patched, original = twins()
    for model in (patched, original):
        for module in model.modules():
            if not list(module.children()):
                accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(io_same_device=True))
    report = patch(patched)
    assert report.counts["rms_norm"] == 5 and report.counts["linear_cross_entropy"] == 1
    want = loss_and_gradients(original, call(**INPUTS))
    assert_close(loss_and_gradients(patched, call(**INPUTS)), want)
    assert type(patched(**INPUTS).logits) is DeferredLogits
    report.undo()
    got = loss_and_gradients(patched, call(**INPUTS))
    assert all(torch.equal(got[k], want[k]) for k in want)


# --- sharded weights --------------------------------------------------------------------------------------------------


class Partitioned:
    """What DeepSpeed ZeRO-3 does to a module: its weight exists only between its own hooks, forward and backward.

    The backward half hangs on the tensors the module returns, through an autograd function, as in
    deepspeed/runtime/zero/parameter_offload.py.
    """

    def __init__(self, module):
        self.full = module.weight.data.clone()
        self.weight = module.weight
        self.gathers = 0
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.after_forward)
        self.release()

    def gather(self):
        self.gathers += 1
        self.weight.data = self.full

    def release(self):
        self.weight.data = torch.empty(0)

    def after_forward(self, module, args, output):
        self.release()
        partitioned = self

        class PreBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, output):
                return output.detach()

            @staticmethod
            def backward(ctx, grad):
                partitioned.gather()
                return grad

        return PreBackward.apply(output)


def test_head_partitioned_outside_its_own_forward_trains_as_whole():
    patched, original = twins()
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


def test_half_of_a_tensor_parallel_head_is_not_taken_for_the_head():
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


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """One rank: parameters are DTensors, and are freed and gathered as on many."""
    if not dist.is_gloo_available():
        pytest.skip("gloo is not built in")
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("local", [True, False], ids=["logits-local", "logits-DTensor"])
def test_tensor_parallel_head_of_dtensors_computes_its_own_logits(mesh, local):
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    patched, original = twins()
    patch(patched)
    layout = ColwiseParallel(output_layouts=Replicate(), use_local_output=local)
    parallelize_module(patched.lm_head, mesh, layout)
    assert isinstance(patched.lm_head.weight, DTensor)
    targets = nn.functional.pad(INPUTS["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    want = loss_and_gradients(original, call(**INPUTS))
    shift_labels = targets if local else distribute_tensor(targets, mesh, [Replicate()])
    with pytest.warns(UserWarning, match="full logits.*shard"):
        got = loss_and_gradients(patched, call(**INPUTS, shift_labels=shift_labels))
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in got.items()}
    assert_close(whole, want)


@pytest.mark.parametrize("unit", ["root", "own"])
@pytest.mark.parametrize("order", ["patch-then-shard", "shard-then-patch"])
def test_fsdp2_trains_with_the_fused_loss(mesh, unit, order):
    from torch.distributed.fsdp import fully_shard

    patched, original = twins()
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
