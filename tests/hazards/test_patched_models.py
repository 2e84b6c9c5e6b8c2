"""What goes wrong without an error when kernels are put into a model, tried on families that differ in every part.

Each test is named after what would be broken. docs/hazards.md lists them beside what happens elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tigon
from tigon.errors import LabelError, PatchError, ShardingError
from tigon.models import MODELS, DeferredLogits, MaterializedLogitsWarning
from tigon.models.seams.base import PatchedModule
from tigon.models.verification.tiny import tiny_batch, tiny_model
from tigon.ops import OPS

pytest.importorskip("transformers")

# SwiGLU and RoPE; capped logits, GeGLU and 1 + w; LayerNorm and no gate; experts; a packed gate; scaled logits.
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "phi3", "granite")
BATCH = tiny_batch(torch.device("cpu"))
LIMIT = 2e-5
for_families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums are taken in one order, so that two runs compare to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def twins(family: str) -> tuple[nn.Module, nn.Module]:
    """A model to patch and one to compare with."""
    model = tiny_model(family, MODELS[family].tiny)
    return model, copy.deepcopy(model)


def head_of(model: nn.Module) -> nn.Module:
    return model.get_output_embeddings()


Run = Callable[[nn.Module], Tensor]


def step(model: nn.Module) -> Tensor:
    return model(**BATCH).loss


def results(model: nn.Module, run: Run = step) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss = run(model)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Relative Frobenius error of every tensor; one of next to nothing is measured against the largest of all."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    least = 1e-4 * max(float(t.norm()) for t in want.values())
    errors = {name: float((got[name] - t).norm()) / max(float(t.norm()), least) for name, t in want.items()}
    assert all(error <= LIMIT for error in errors.values()), {n: e for n, e in errors.items() if not e <= LIMIT}


# --- the head ---------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module, kind: str) -> Any:
    """The model with an adapter of PEFT's `kind` on its head and nothing else."""
    import peft

    (head,) = (name for name, module in model.named_modules() if module is head_of(model))
    torch.manual_seed(4)
    wrapped = peft.get_peft_model(model, peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](target_modules=[head], **TUNERS[kind]))
    for parameter in wrapped.parameters():  # most adapters start as the identity, where being left out does not show
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped


# The tuners of PEFT 0.21 that can wrap this head, with the options that their configs require. AdaMSS is left out
# because it needs scikit-learn, RoAd because it needs an even number of outputs.
TUNERS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4}, "LOHA": {"r": 4}, "LOKR": {"r": 4}, "ADALORA": {"init_r": 4, "total_step": 10},
    "IA3": {"feedforward_modules": []}, "OFT": {"oft_block_size": 4}, "HRA": {"r": 4}, "VERA": {"r": 4},
    "FOURIERFT": {"n_frequency": 10}, "RANDLORA": {"r": 4}, "SHIRA": {"r": 4}, "DELORA": {"r": 4},
    "VBLORA": {"r": 2, "num_vectors": 8, "vector_length": 1, "topk": 2}, "C3A": {"block_size": 1}, "MISS": {"r": 1},
    "GRALORA": {"r": 4, "gralora_k": 1}, "WAVEFT": {"n_frequency": 10}, "OSF": {}, "BEFT": {},
    "BOFT": {"boft_block_size": 1}, "DEFT": {}, "FROD": {}, "GLORA": {"r": 4}, "HIRA": {"r": 4}, "LILY": {"r": 4},
    "PEANUT": {}, "PSOFT": {"r": 4}, "PVERA": {"r": 4}, "TINYLORA": {"r": 4}, "UNILORA": {"r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
}  # fmt: skip
# Those that take only modules whose class is nn.Linear itself, and say so: wrap first, then patch.
WANT_PLAIN_LINEAR = {"GLORA"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("order", ["patched before", "patched after"])
@pytest.mark.parametrize("kind", TUNERS)
def test_adapter_on_the_head_counts_in_the_loss_or_is_refused(kind: str, order: str) -> None:
    peft = pytest.importorskip("peft")
    if kind not in peft.PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip(f"this PEFT has no {kind}")
    patched, original = twins("granite" if kind == "LORA" else "llama")
    want_model = adapted(original, kind)
    want = results(want_model)
    assert len(want) > 1 and any(t.any() for name, t in want.items() if name != "loss")
    if order == "patched before":
        tigon.patch(patched)
        if kind in WANT_PLAIN_LINEAR:
            with pytest.raises(ValueError, match="plain"):
                adapted(patched, kind)
            return
    wrapped = adapted(patched, kind)
    if order == "patched after":
        tigon.patch(wrapped)
    assert_same(results(wrapped), want)
    with wrapped.disable_adapter(), want_model.disable_adapter():
        torch.testing.assert_close(step(wrapped), step(want_model))


@for_families
def test_bias_of_the_head_counts_in_the_loss_and_gets_a_gradient(family: str) -> None:
    patched, original = twins(family)
    for model in (patched, original):
        head = head_of(model)
        torch.manual_seed(5)
        head.bias = nn.Parameter(torch.randn(head.weight.shape[0]))
    assert tigon.patch(patched).counts["linear_cross_entropy"] == 1
    want = results(original)
    assert sum(name.endswith("head.bias") for name in want) == 1
    assert_same(results(patched), want)


@for_families
def test_hooks_on_the_head_are_called_and_take_effect(family: str) -> None:
    patched, original = twins(family)
    calls: list[tuple[str, Any]] = []
    for model in (original, patched):
        head_of(model).register_forward_pre_hook(lambda m, args: (args[0] * 1.25,))
        head_of(model).register_forward_hook(lambda m, args, out: calls.append(("forward", tuple(out.shape))))
        head_of(model).register_full_backward_hook(lambda m, grad_in, grad_out: calls.append(("backward", None)))
    tigon.patch(patched)
    want = results(original)
    assert_same(results(patched), want)
    assert len(calls) == 4 and calls[:2] == calls[2:]


@pytest.mark.filterwarnings("ignore::tigon.models.MaterializedLogitsWarning", "ignore::UserWarning")
@for_families
def test_hook_that_edits_the_logits_reaches_the_loss(family: str) -> None:
    patched, original = twins(family)
    for model in (patched, original):
        head_of(model).register_forward_hook(lambda m, args, logits: logits * 0.5 + 1e-2)
    tigon.patch(patched)
    assert_same(results(patched), results(original))


@for_families
def test_logits_of_a_training_step_can_be_read(family: str) -> None:
    patched, original = twins(family)
    tigon.patch(patched)
    outputs, want = patched(**BATCH), original(**BATCH)
    assert isinstance(outputs.logits, DeferredLogits) and outputs.logits.shape == want.logits.shape
    with pytest.warns(MaterializedLogitsWarning):
        torch.testing.assert_close(outputs.logits + 0, want.logits, rtol=1e-4, atol=1e-5)


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [97, -1, -101, 2**31, -(2**63)])
@for_families
def test_label_out_of_range_is_refused_with_its_value_and_position(family: str, label: int) -> None:
    patched, _ = twins(family)
    tigon.patch(patched)
    labels = BATCH["labels"].clone()
    labels[1, 5] = label
    position = labels.shape[1] + 4  # labels are shifted left by one
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(LabelError, match=rf"label {label} at position {position} "):
            patched(input_ids=BATCH["input_ids"], labels=labels)


@for_families
def test_batch_with_all_labels_ignored_gives_zero_loss_and_gradients(family: str) -> None:
    patched, _ = twins(family)
    tigon.patch(patched)
    if family == "mixtral":
        patched.config.output_router_logits = False  # the load-balancing loss of the experts needs no labels
    labels = torch.full_like(BATCH["labels"], -100)
    for extra in ({}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}):
        got = results(patched, lambda model, extra=extra: model(BATCH["input_ids"], labels=labels, **extra).loss)
        assert len(got) > 5 and all(not t.any() for t in got.values())


# --- autograd ---------------------------------------------------------------------------------------------------------


@for_families
def test_second_backward_gives_the_unpatched_gradients(family: str) -> None:
    def twice(model: nn.Module) -> Tensor:
        loss = model(**BATCH).loss
        loss *= 3.0
        loss.backward(retain_graph=True)
        return loss

    patched, original = twins(family)
    tigon.patch(patched)
    assert_same(results(patched, twice), results(original, twice))


@for_families
def test_penalty_on_inner_tensors_gets_the_unpatched_gradient(family: str) -> None:
    """A penalty on the inputs and outputs of every projection and norm: what is written over in place shows in it."""

    def penalised(model: nn.Module) -> Tensor:
        terms: list[Tensor] = []

        # Taken inside the hook, before the op that follows: its backward then runs after that op's.
        def penalise(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            terms.extend(t.square().mean() for t in (*args, out) if isinstance(t, Tensor) and t.is_floating_point())

        leaves = [m for m in model.modules() if not list(m.children()) and m is not head_of(model)]
        handles = [m.register_forward_hook(penalise) for m in leaves if list(m.parameters())]
        loss = model(**BATCH).loss
        for handle in handles:
            handle.remove()
        return loss + 1e-3 * torch.stack(terms).sum()

    patched, original = twins(family)
    tigon.patch(patched)
    want = results(original, penalised)
    assert abs(float(want["loss"] - step(original).detach())) > 1e-4
    assert_same(results(patched, penalised), want)


@for_families
def test_training_step_leaves_weights_inputs_and_labels_unmodified(family: str) -> None:
    patched, _ = twins(family)
    tigon.patch(patched)
    state = {**dict(patched.named_parameters()), **dict(patched.named_buffers()), **BATCH}
    before = {name: (t.detach().clone(), t._version) for name, t in state.items()}
    results(patched)
    patched.eval()
    with torch.no_grad():
        patched(**BATCH)
    for name, t in state.items():
        assert torch.equal(t.detach(), before[name][0]) and t._version == before[name][1], name


# --- scope ------------------------------------------------------------------------------------------------------------


def names_of_the_process(family: str) -> dict[str, Any]:
    """Every name of torch.nn, torch.nn.functional and the modeling module, and of each class in the last."""
    import importlib

    module = importlib.import_module(type(tiny_model(family, MODELS[family].tiny)).__module__)
    spaces: dict[str, Any] = {"torch": torch, "torch.nn": nn, "torch.nn.functional": F, module.__name__: module}
    spaces |= {f"{module.__name__}.{n}": c for n, c in vars(module).items() if isinstance(c, type)}
    spaces |= {"torch.nn.LayerNorm": nn.LayerNorm, "torch.nn.Linear": nn.Linear, "torch.Tensor": Tensor}
    return {f"{space}.{name}": value for space, owner in spaces.items() for name, value in vars(owner).items()}


@for_families
def test_patch_leaves_other_models_and_the_process_unchanged(family: str) -> None:
    earlier, patched = twins(family)
    want = results(earlier)
    before = names_of_the_process(family)
    report = tigon.patch(patched)
    results(patched)
    after = names_of_the_process(family)
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    later, _ = twins(family)
    for bystander in (earlier, later):
        assert not any(isinstance(m, PatchedModule) for m in bystander.modules())
        got = results(bystander)
        assert all(torch.equal(got[name], want[name]) for name in want)
    report.undo()
    got = results(patched)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert [type(m) for m in patched.modules()] == [type(m) for m in earlier.modules()]


@for_families
def test_optimizer_made_before_the_patch_trains_the_patched_model(family: str) -> None:
    patched, original = twins(family)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (patched, original)]
    tigon.patch(patched)
    for model, optimizer in zip((patched, original), optimizers, strict=True):
        results(model)
        optimizer.step()
    got, want = dict(patched.named_parameters()), dict(original.named_parameters())
    assert_same({n: p.detach() for n, p in got.items()}, {n: p.detach() for n, p in want.items()})


def test_patched_layer_norm_is_an_instance_of_torch_layer_norm() -> None:
    patched, _ = twins("gpt2")
    before = [name for name, m in patched.named_modules() if isinstance(m, nn.LayerNorm)]
    assert tigon.patch(patched).counts["layer_norm"] == len(before) > 0
    assert [name for name, m in patched.named_modules() if isinstance(m, nn.LayerNorm)] == before
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = get_parameter_names(patched, [nn.LayerNorm])
    assert decayed and not any(name.startswith(f"{norm}.") for norm in before for name in decayed)


# --- what does not match ----------------------------------------------------------------------------------------------


def test_renamed_eps_attribute_is_refused_and_changes_nothing() -> None:
    """transformers renames: the norm keeps its formula, and its eps has another name."""
    patched, _ = twins("llama")

    class Renamed(type(patched.model.norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.epsilon)
            return self.weight * scaled.to(x.dtype)

    for module in patched.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = Renamed
            module.epsilon = module.variance_epsilon
            del module.variance_epsilon
    classes = [type(m) for m in patched.modules()]
    with pytest.raises(PatchError, match="rms_norm: nothing in this LlamaForCausalLM can run it"):
        tigon.patch(patched)
    assert [type(m) for m in patched.modules()] == classes


def test_model_with_custom_code_trains_as_unpatched() -> None:
    """A model_type nobody knows, names everybody uses, and one formula that differs: only that is left alone."""
    patched, original = twins("llama")

    class TheirNorm(type(patched.model.norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1

    for model in (patched, original):
        model.config.model_type = "theirs"
        model.model.norm.__class__ = TheirNorm
    want = results(original)
    report = tigon.patch(patched)
    assert_same(results(patched), want)
    assert [row.cls for row in report.left_alone] == ["TheirNorm"] and report.counts["rms_norm"] == 4
    assert "structure" in str(report)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.has_kernel])
def test_dtensor_is_refused_by_every_op(name: str, mesh: Any) -> None:
    """PyTorch names the operator without a sharding rule or the placement, so no op returns a gathered or local result.

    The same inputs as ordinary tensors are accepted. An op of PyTorch's own products follows PyTorch's rules.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    def sharded(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(sharded, value))
        return (
            distribute_tensor(value.detach(), mesh, [Shard(0)]) if isinstance(value, Tensor) and value.ndim else value
        )

    op = OPS[name]
    inputs = op.make(op.case, torch.float32, torch.device("cpu"))
    op.call(**inputs)
    with pytest.raises(
        (NotImplementedError, RuntimeError, ShardingError), match=r"sharding strategy|placement|DTensor"
    ):
        op.call(**{key: sharded(value) for key, value in inputs.items()})
