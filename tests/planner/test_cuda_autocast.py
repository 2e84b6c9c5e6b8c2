"""The trace's autocast is CUDA's: its lists are those of the installed PyTorch, and the CPU's come back."""

from __future__ import annotations

import pytest
import torch
from planner_helpers import H200
from torch.nn import functional as F
from transformers import GPT2Config

from tigon.planner.estimate import estimate
from tigon.planner.gpus import GIB
from tigon.planner.request import Request
from tigon.planner.trace.cuda_autocast import FP32, FP32_RESULT, WIDEST, cuda_autocast
from tigon.planner.trace.trace import trace
from tigon.techniques.keys.settings import Settings

# Operators of CUDA's lists that no language model calls, or that reach the CPU's lists through what they call: `einsum`
# and `mv` are products.
LEFT_OUT = (
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused", "upsample", "addmv", "addr", "bilinear",
    "chain_matmul", "convolution", "cross", "cudnn", "einsum", "frobenius_norm", "gru_cell", "lstm_cell",
    "linalg_matrix_norm", "linalg_multi_dot", "mv", "norm.Scalar", "nuclear_norm", "pdist", "renorm", "rnn_",
)  # fmt: skip


def has_kernel(operator: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


def test_lists_are_those_in_which_the_installed_pytorch_tells_cuda_from_the_cpu() -> None:
    known = {f"aten::{name}" for name in (*FP32, *FP32_RESULT, *WIDEST)}
    cuda = {name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, "AutocastCUDA")}
    differing = {name for name in cuda if name.startswith("aten::") and not has_kernel(name, "AutocastCPU")}
    assert known <= differing
    others = {name.removeprefix("aten::").lstrip("_") for name in differing - known}
    assert not {name for name in others if not name.startswith(tuple(word.lstrip("_") for word in LEFT_OUT))}


def test_powers_norms_softmax_and_sums_are_fp32_and_the_cpus_lists_come_back() -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    calls = {
        "power": lambda: x**3, "layer norm": lambda: F.layer_norm(x, (4,)), "softmax": lambda: x.softmax(-1),
        "sum": lambda: x.sum(-1), "softplus": lambda: F.softplus(x),
    }  # fmt: skip
    for enabled in (True, False, True):
        with cuda_autocast(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            dtypes = {name: call().dtype for name, call in calls.items()}
            assert set(dtypes.values()) == {torch.float32 if enabled else torch.bfloat16}, dtypes
            assert x.softmax(-1, dtype=torch.float64).dtype == torch.float64
            assert torch.ones(3, dtype=torch.int64).cumsum(0).dtype == torch.int64
        with torch.autocast("cpu", torch.bfloat16):
            assert {call().dtype for call in calls.values()} == {torch.bfloat16}


def test_tensors_of_two_widths_meet_in_the_wider() -> None:
    with cuda_autocast(), torch.autocast("cpu", torch.bfloat16):
        into = torch.zeros(4)
        assert into.scatter_add(0, torch.tensor([1, 2]), torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


def gpt2(**changes: float) -> GPT2Config:
    return GPT2Config(**{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes})


def test_gpt2_large_under_autocast_is_what_was_measured() -> None:
    """An H200: 25.60 GiB without dropout. With the CPU's lists the prediction was 21.25."""
    config = gpt2(n_embd=1280, n_layer=36, n_head=20)
    request = Request(
        model="gpt2-large", config=config, batch=4, seq=1024, settings=Settings.of({"train.precision": "amp-bf16"})
    )  # fmt: skip
    assert estimate(request, gpu=H200).peak_allocated_bytes / GIB == pytest.approx(25.60, rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16"])
def test_dropout_keeps_one_byte_for_each_element(precision: str) -> None:
    """On the CPU, dropout keeps its mask in the dtype of its input."""
    batch, seq, width = 2, 64, 64
    sizes = []
    for rate in (0.0, 0.1):
        config = gpt2(n_embd=width, n_layer=1, n_head=4, vocab_size=512, resid_pdrop=rate)
        request = Request(
            model="gpt2", config=config, batch=batch, seq=seq, settings=Settings.of({"train.precision": precision})
        )
        sizes.append(trace(request, H200, evaluating=False).tape.sizes)
    mask = batch * seq * width
    assert sizes[1].count(mask) - sizes[0].count(mask) == 2, "after attention, and after the MLP"
