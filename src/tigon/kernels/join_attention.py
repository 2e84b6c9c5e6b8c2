"""Attention over some keys, joined with attention over other keys.

    L = log(exp(l_1) + exp(l_2))      out = o_1 · exp(l_1 - L) + o_2 · exp(l_2 - L)

with o_i and l_i, the output and the log-sum-exp of each part. Everything is fp32 and rounded once. The first part is
overwritten. PyTorch's operators write the first product in fp32 and read it again, which is 2.3 times the memory
traffic. The backward needs no kernel (ops/shared_prefix_attention.py).
"""

import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch, next_power_of_2

# N tokens, h heads, E width of the values.

_BLOCK = 2048


@triton.jit
def join_attention_kernel(
    Out,  # (N, h, E)
    Lse,  # (h, N)
    PartOut,  # (N, h, E)
    PartLse,  # (h, N)
    N,
    h,
    E,
    stride_n,
    stride_h,
    stride_lse,
    stride_part_n,
    stride_part_h,
    stride_part_lse,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_E)
    there = rows < N * h
    n, head = rows // h, rows % h
    to = Lse + head * stride_lse + n
    before = tl.load(to, mask=there, other=0.0)
    added = tl.load(PartLse + head * stride_part_lse + n, mask=there, other=0.0)
    largest = tl.maximum(before, added)
    lse = largest + tl.log(tl.exp(before - largest) + tl.exp(added - largest))
    places = Out + (n * stride_n + head * stride_h)[:, None] + cols[None, :]
    part_places = PartOut + (n * stride_part_n + head * stride_part_h)[:, None] + cols[None, :]
    inside = there[:, None] & (cols < E)[None, :]
    x = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(part_places, mask=inside, other=0.0).to(tl.float32)
    joined = x * tl.exp(before - lse)[:, None] + y * tl.exp(added - lse)[:, None]
    tl.store(places, joined.to(Out.dtype.element_ty), mask=inside)
    tl.store(to, lse, mask=there)


def join_attention(out_NhE, lse_hN, part_NhE, part_lse_hN):
    """Make `out` and `lse`, attention over some keys, attention over those of the part too.

    The columns of the outputs, and the tokens of the log-sum-exps, which are fp32, lie side by side.
    """
    N, h, E = out_NhE.shape
    block_e = next_power_of_2(E)
    rows = max(1, _BLOCK // block_e)
    launch(
        join_attention_kernel, (cdiv(N * h, rows),), out_NhE,
        Out=out_NhE, Lse=lse_hN, PartOut=part_NhE, PartLse=part_lse_hN, N=N, h=h, E=E,
        stride_n=out_NhE.stride(0), stride_h=out_NhE.stride(1), stride_lse=lse_hN.stride(0),
        stride_part_n=part_NhE.stride(0), stride_part_h=part_NhE.stride(1), stride_part_lse=part_lse_hN.stride(0),
        ROWS=rows, BLOCK_E=block_e, num_warps=4,
    )  # fmt: skip
