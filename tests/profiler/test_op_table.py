"""Operators of a real run on the CPU, and of one on CUDA as the profiler would describe it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from tigon.ops.expert_operators import grouped_product, grouped_weight_gradient
from tigon.profiler.render.op_table import op_table
from tigon.units import in_bytes, in_flops, in_ms, off_by


def test_flops_of_products_on_the_cpu_are_counted():
    a, b = torch.randn(16, 32), torch.randn(32, 8)
    q = torch.randn(2, 4, 64, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        _ = a @ b
        _ = torch.addmm(torch.ones(8), a, b)
        _ = torch.baddbmm(torch.ones(3, 16, 8), a.expand(3, 16, 32), b.expand(3, 32, 8))
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    rows = {row.name: row for row in op_table(profiler.events(), on_cuda=False)}
    assert rows["aten::mm"].flops == rows["aten::addmm"].flops == 2 * 16 * 32 * 8
    assert rows["aten::baddbmm"].flops == 3 * 2 * 16 * 32 * 8
    forward = rows["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert forward.flops == 2 * 2 * 4 * 64 * 64 * 32 and forward.launches == 1
    assert rows["aten::_scaled_dot_product_flash_attention_for_cpu_backward"].flops == 2.5 * forward.flops
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert rows["aten::mm"].flops_per_s == pytest.approx(1000 * rows["aten::mm"].flops / rows["aten::mm"].time_ms)
    assert not any(name.startswith("autograd::engine") for name in rows)


M, K, N, E = 16, 32, 8, 3
A, B, ACC = torch.randn(M, K), torch.randn(K, N), torch.zeros(M, N)
BATCH_A, BATCH_B, BATCH_ACC = torch.randn(E, M, K), torch.randn(E, K, N), torch.zeros(E, M, N)
ORDER, OFFSETS = torch.arange(M), torch.tensor([0, 5, 5, M], dtype=torch.int32)
EXPERTS_EOI = torch.randn(E, N, K)
ONE, MANY = 2 * M * K * N, 2 * E * M * K * N
PRODUCTS = {
    "mm": (lambda: torch.mm(A, B), ONE),
    "mm out": (lambda: torch.mm(A, B, out=torch.empty(M, N)), ONE),
    "bmm": (lambda: torch.bmm(BATCH_A, BATCH_B), MANY),
    "bmm out": (lambda: torch.bmm(BATCH_A, BATCH_B, out=torch.empty(E, M, N)), MANY),
    "matmul": (lambda: BATCH_A @ B, MANY),
    "einsum": (lambda: torch.einsum("mk,kn->mn", A, B), ONE),
    "linear": (lambda: torch.nn.functional.linear(A, B.t()), ONE),
    "linear with a bias": (lambda: torch.nn.functional.linear(A, B.t(), torch.zeros(N)), ONE),
    "linear in bf16": (lambda: torch.nn.functional.linear(A.bfloat16(), B.t().bfloat16()), ONE),
    "addmm": (lambda: torch.addmm(ACC, A, B), ONE),
    "addmm in place": (lambda: torch.zeros(M, N).addmm_(A, B), ONE),
    "addmm out": (lambda: torch.addmm(ACC, A, B, out=torch.empty(M, N)), ONE),
    "baddbmm": (lambda: torch.baddbmm(BATCH_ACC, BATCH_A, BATCH_B), MANY),
    "baddbmm in place": (lambda: torch.zeros(E, M, N).baddbmm_(BATCH_A, BATCH_B), MANY),
    "addbmm": (lambda: torch.addbmm(ACC, BATCH_A, BATCH_B), MANY),
    "addbmm in place": (lambda: torch.zeros(M, N).addbmm_(BATCH_A, BATCH_B), MANY),
    "matrix by vector": (lambda: A @ torch.ones(K), 2 * M * K),
    "addmv in place": (lambda: torch.zeros(M).addmv_(A, torch.ones(K)), 2 * M * K),
    "dot": (lambda: torch.ones(K) @ torch.ones(K), 2 * K),
    "8-bit integers": (lambda: torch._int_mm(torch.ones(32, 32).char(), torch.ones(32, 8).char()), 2 * 32 * 32 * 8),
    "experts": (
        lambda: grouped_product(A, EXPERTS_EOI, None, None, None, ORDER, OFFSETS, 1, False, False), ONE,
    ),
    "gradient of experts": (
        lambda: grouped_weight_gradient(torch.randn(M, N), A, OFFSETS, EXPERTS_EOI), ONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_way_to_multiply_matrices_counts_its_flops_once(name):
    multiply, expected = PRODUCTS[name]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        multiply()
    assert sum(row.flops for row in op_table(profiler.events(), on_cuda=False)) == expected


def test_kernel_of_experts_counts_the_product_with_the_adapters_too():
    shapes = [[M, K], [E, N, K], [], [M, 4], [E, N, 4], [M], [E + 1], [], [], []]
    (row,) = op_table([on_cpu("tigon::grouped_product", [("grouped_product_kernel", 3.0)], shapes)], on_cuda=True)
    assert row.flops == 2 * M * N * (K + 4)


def test_attention_on_a_gpu_counts_in_the_row_of_the_operator_that_launches_its_kernel():
    BTHD = [[2, 64, 4, 16]] * 3
    inner = on_cpu("aten::_flash_attention_forward", [("flash_fwd", 9.0)], BTHD)
    outer = on_cpu("aten::_scaled_dot_product_flash_attention", (), [[2, 4, 64, 16]] * 3)
    outer.cpu_children.append(inner)
    (row,) = op_table([outer, inner], on_cuda=True)
    assert row.name == inner.name and row.flops == 2 * 2 * 4 * 64 * 64 * 32
    packed = on_cpu("aten::_flash_attention_forward", [("flash_fwd", 9.0)], [[128, 4, 16]] * 3)
    assert op_table([packed], on_cuda=True)[0].flops == 0, "the lengths of packed documents are unknown"


def on_cpu(name, kernels=(), shapes=()):
    return SimpleNamespace(
        name=name, device_type=DeviceType.CPU, input_shapes=list(shapes), self_cpu_time_total=1.0,
        is_user_annotation=False, cpu_children=[],
        kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
    )  # fmt: skip


def on_gpu(name, us, annotation=False):
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, is_user_annotation=annotation,
                           time_range=SimpleNamespace(elapsed_us=lambda: us))  # fmt: skip


def test_kernel_without_an_operator_is_kept_and_every_kernel_counts_once():
    events = [
        on_cpu("aten::mm", [("gemm", 30.0), ("splitk", 5.0)], [[1024, 1024], [1024, 1024]]),
        on_cpu("aten::mm", [("gemm", 35.0)], [[1024, 1024], [1024, 1024]]),
        on_cpu("aten::view"),
        on_cpu("cudaLaunchKernel", [("gemm", 30.0)]),  # the runtime's call, of the same kernel
        on_cpu("cuLaunchKernelEx"),
        on_gpu("gemm", 30.0), on_gpu("splitk", 5.0), on_gpu("gemm", 35.0),
        on_gpu("_norm_fwd_kernel", 10.0), on_gpu("_norm_fwd_kernel", 20.0),
        on_gpu("ProfilerStep#3", 500.0, annotation=True),
    ]  # fmt: skip
    rows = op_table(events, on_cuda=True)
    assert [(row.name, row.time_ms, row.launches) for row in rows] == [
        ("aten::mm", 0.07, 3),
        ("_norm_fwd_kernel", 0.03, 2),
    ]
    assert rows[0].flops_per_s == pytest.approx(2 * 2 * 1024**3 / 70e-6)
    assert rows[0].share == pytest.approx(0.7)


def test_numbers_are_shown_in_readable_units():
    assert [in_bytes(n) for n in (0, 500, 2**20, 3 * 2**30)] == ["0", "500 B", "1.0 MiB", "3.00 GiB"]
    assert [in_flops(n) for n in (0, 2.5e9, 3.21e12)] == ["", "2.5 GFLOP/s", "3.2 TFLOP/s"]
    assert [in_ms(n) for n in (0.01234, 12.34, 123.4, 1234)] == ["0.0123 ms", "12.3 ms", "123 ms", "1.23 s"]
    assert (off_by(11, 10), off_by(1, 0)) == ("+10.0%", "")
