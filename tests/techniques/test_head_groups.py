"""Attention whose heads take turns in the backward: the same gradients, less scratch, one model's business."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from small_llama import loss_and_gradients, small_llama
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig

from tigon.errors import RecipeError
from tigon.techniques.head_groups import _KERNELS, _Grouped, _kernel_for, check_groups

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


def llama(*, key_heads: int, groups: int, **options: Any) -> Any:
    return small_llama({"train.attention_groups": groups}, kernels=False, num_key_value_heads=key_heads, **options)


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "block-mask"])
@pytest.mark.parametrize(("key_heads", "groups"), [(4, 2), (4, 4), (2, 2)])
def test_groups_keep_loss_and_gradients(key_heads, groups, documents, monkeypatch):
    called = []
    on_cpu = ("cpu", SDPBackend.FLASH_ATTENTION)
    kernel = _KERNELS[on_cpu]
    counted = kernel._replace(backward=lambda *args: called.append(args[1].shape[1]) or kernel.backward(*args))
    monkeypatch.setitem(_KERNELS, on_cpu, counted)
    want = loss_and_gradients(llama(key_heads=key_heads, groups=1), documents=documents)
    assert not called
    got = loss_and_gradients(llama(key_heads=key_heads, groups=groups), documents=documents)
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{name}: {text}")
    by_kernel = key_heads == 4 and not documents  # on the CPU it takes neither a mask nor shared key heads
    assert called == ([4 // groups] * (2 * groups) if by_kernel else [])


@pytest.mark.parametrize("strides", ["heads first", "tokens first"])
def test_gradient_of_the_groups_is_the_derivative(strides):
    shape = (1, 2, 6, 8) if strides == "heads first" else (1, 6, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    if strides == "tokens first":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    kernel = _kernel_for(*inputs)
    assert torch.autograd.gradcheck(lambda q, k, v: _Grouped.apply(q, k, v, kernel, 2, 0.3), inputs)


def _shares_key_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention whose key heads serve several query heads, as kernels of GPUs compute it."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(
        torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf
    )
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_gradient_of_groups_that_divide_the_query_heads_of_a_key_head(groups):
    calls = []

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rest: Any, scale: float) -> Any:
        calls.append((q.shape[1], k.shape[1]))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(_shares_key_heads(*inputs, scale), inputs, dout)

    def forward(q: Any, k: Any, v: Any, scale: float) -> Any:
        return _shares_key_heads(q, k, v, scale), torch.zeros(q.shape[:3]), ()

    kernel = _KERNELS["cuda", SDPBackend.CUDNN_ATTENTION]._replace(forward=forward, backward=backward)
    q, k, v = (torch.randn(1, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (8, 2, 2))
    out = _Grouped.apply(q, k, v, kernel, groups, 0.3)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), upstream)
    want = torch.autograd.grad(_shares_key_heads(q, k, v, 0.3), (q, k, v), upstream)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [(8 // groups, max(1, 2 // groups))] * groups


def test_more_groups_than_key_heads_keep_loss_and_gradients_without_the_kernel():
    """The CPU's kernel takes no shared key heads, so whole key heads take turns."""
    want = loss_and_gradients(llama(key_heads=2, groups=1))
    for name, expected in loss_and_gradients(llama(key_heads=2, groups=4)).items():
        torch.testing.assert_close(expected, want[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("key_heads", "groups"), [(2, 3), (1, 8), (4, 8)])
def test_groups_that_divide_no_heads_evenly_are_refused(key_heads, groups):
    with pytest.raises(RecipeError, match=f"attention_groups is {groups}, and the model has {key_heads} key heads"):
        llama(key_heads=key_heads, groups=groups)


def test_groups_apply_to_their_model_only_and_are_not_saved():
    one, other = llama(key_heads=4, groups=2), llama(key_heads=4, groups=1)
    assert one.config._attn_implementation == "sdpa_in_2_groups"
    assert other.config._attn_implementation == "sdpa"
    assert "sdpa_in" not in one.config.to_json_string()


def test_groups_that_do_not_divide_the_key_heads_are_refused():
    with pytest.raises(RecipeError, match="attention_groups is 3, and the model has 4 key heads"):
        llama(key_heads=4, groups=3)


CUDA_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_KERNELS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "block-mask"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_groups_keep_the_gradient_of_the_kernel(key_heads, documents, backend, monkeypatch):
    options = {"width": 256, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    called = []
    kernel = _KERNELS["cuda", backend]
    counted = kernel._replace(backward=lambda *args: called.append(args[1].shape[1]) or kernel.backward(*args))
    monkeypatch.setitem(_KERNELS, ("cuda", backend), counted)
    with sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION]):
        want = loss_and_gradients(llama(key_heads=key_heads, groups=1, **options), tokens=512, documents=documents)
        got = loss_and_gradients(llama(key_heads=key_heads, groups=2, **options), tokens=512, documents=documents)
    assert bool(called) == (not documents), "a mask is not the kernel's, and the kernel is PyTorch's choice without"
    for name, expected in want.items():
        # over the whole tensor: the kernel adds dQ up in any order, and single small elements are all rounding
        error = (got[name].double() - expected.double()).norm() / expected.double().norm()
        assert error <= 1e-2, f"{name}: {float(error):.1e}"


def test_gradients_of_a_group_are_freed_before_those_of_the_next(monkeypatch):
    """Three gradients of a group are small beside the whole, but at 524,288 tokens they are 0.38 GiB."""
    inputs = [torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3)]
    kernel, alive, made = _kernel_for(*inputs), [], []

    def backward(*args: Any) -> Any:
        alive.append(sum(one() is not None for one in made))
        gradients = kernel.backward(*args)
        made.extend(weakref.ref(one) for one in gradients)
        return gradients

    out = _Grouped.apply(*inputs, kernel._replace(backward=backward), 4, None)
    out.sum().backward()
    assert alive == [0, 0, 0, 0]


def heads_64_wide(tokens: int) -> list[torch.Tensor]:
    return [
        torch.randn(1, tokens, h, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for h in (16, 4, 4)
    ]


@pytest.mark.gpu
def test_groups_use_the_kernel_that_pytorch_chooses():
    q, k, v = heads_64_wide(256)
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)
    assert _kernel_for(q, k, v) is _KERNELS["cuda", SDPBackend(choice)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_KERNELS, ids=lambda backend: backend.name)
def test_scratch_memory_is_that_of_one_group(backend):
    """With shared key heads the scratch memory is 8 bytes per element of Q; four groups need only two."""
    found = {}
    q, k, v = heads_64_wide(32768)
    for groups in (1, 4):
        out = _Grouped.apply(q, k, v, _KERNELS["cuda", backend], groups, None)
        upstream = torch.ones_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, (q, k, v), upstream)
        found[groups] = torch.cuda.max_memory_allocated() - before
    assert found[1] - found[4] >= 0.7 * 8 * q.numel() * 0.75


def test_family_without_attention_heads_is_refused_by_name_only_if_heads_are_divided() -> None:
    mamba = AutoConfig.for_model("mamba")
    check_groups(mamba, 1)
    with pytest.raises(RecipeError, match=r"train\.attention_groups divides attention heads, and mamba has none"):
        check_groups(mamba, 2)
