"""The load of a mixture's experts, for the load-balancing loss: sums of probabilities and counts of choices.

    p = softmax(l)      sums_e = Σ_t m_t p_te      counts_e = Σ_t m_t [e is one of the k largest of row t]
    backward            dl = m · p · (d − Σ_e p_e d_e), with d = dsums

A program holds whole rows of E logits, and visits every PROGRAMS-th tile of them. It adds the rows of a tile after its
last tile, because a sum over rows makes its warps wait for each other. PyTorch adds the sums of the programs, so that
the order of every sum is fixed. The first of equal logits counts. Everything is fp32.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch
from tigon.kernels.topk_softmax import largest_left, row_tile, unit_stride_rows

# Programs at most. A tile's k largest are found one after another, so that many programs have to hide the waiting. 64
# programs took 0.5 ms for 32,768 rows of 128 logits on an H200. 512 write 1 MiB of sums for 128 experts.
PROGRAMS = 512


@triton.jit
def expert_load_kernel(
    Logits,  # (T, E)
    Mask,  # (T,) or None
    Sums,  # (PROGRAMS, 2, E)
    T,
    E,
    stride_t,
    TOP_K: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_E)
    sums = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    counts = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, T, PROGRAMS * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        there = (rows < T)[:, None] & (cols < E)[None, :]
        x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=float("-inf")).to(tl.float32)
        weight = tl.where(rows < T, 1.0, 0.0)
        if MASKED:
            weight = tl.load(Mask + rows, mask=rows < T, other=0.0).to(tl.float32)
        largest = tl.max(x, axis=1)
        p = tl.exp(x - tl.where(rows < T, largest, 0.0)[:, None])
        p = p / tl.where(rows < T, tl.sum(p, axis=1), 1.0)[:, None]
        # A row that does not count adds 0, even if it holds NaN.
        sums += tl.where((weight != 0)[:, None], p * weight[:, None], 0.0)
        taken = (cols >= E)[None, :] | (rows < 0)[:, None]
        for _ in tl.static_range(TOP_K):
            _, first = largest_left(x, taken, cols, E)
            taken = taken | (cols[None, :] == first[:, None])
        counts += tl.where(taken, weight[:, None], 0.0)
    place = tl.program_id(0) * 2 * E + cols
    tl.store(Sums + place, tl.sum(sums, axis=0), mask=cols < E)
    tl.store(Sums + place + E, tl.sum(counts, axis=0), mask=cols < E)


@triton.jit
def expert_load_bwd_kernel(
    DSums,  # (E,)
    Logits,  # (T, E)
    Mask,  # (T,) or None
    DLogits,  # (T, E)
    T,
    E,
    stride_t,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_E)
    there = (rows < T)[:, None] & (cols < E)[None, :]
    x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=float("-inf")).to(tl.float32)
    d = tl.load(DSums + cols, mask=cols < E, other=0.0).to(tl.float32)[None, :]
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = p / tl.sum(p, axis=1)[:, None]
    dx = p * (d - tl.sum(p * d, axis=1)[:, None])
    if MASKED:
        weight = tl.load(Mask + rows, mask=rows < T, other=0.0).to(tl.float32)[:, None]
        dx = tl.where(weight != 0, dx * weight, 0.0)
    tl.store(DLogits + rows[:, None] * E + cols[None, :], dx.to(DLogits.dtype.element_ty), mask=there)


def expert_load(logits, mask, top_k):
    """Launch the sums of (T, E). Returns (2, E): the sums of probabilities, and the counts."""
    logits, (T, E) = unit_stride_rows(logits), logits.shape
    rows, block, warps = row_tile(E, logits.itemsize)
    programs = min(PROGRAMS, cdiv(T, rows))
    sums = torch.empty((programs, 2, E), dtype=torch.float32, device=logits.device)
    if programs:
        launch(
            expert_load_kernel, (programs,), logits, num_warps=warps,
            Logits=logits, Mask=None if mask is None else mask.contiguous(), Sums=sums, T=T, E=E,
            stride_t=logits.stride(0), TOP_K=top_k, MASKED=mask is not None, ROWS=rows, BLOCK_E=block,
            PROGRAMS=programs,
        )  # fmt: skip
    return sums.sum(0)


def expert_load_bwd(dsums, logits, mask):
    """Launch the gradient of the logits; dsums (E,) is that of the sums of probabilities."""
    logits, (T, E) = unit_stride_rows(logits), logits.shape
    dlogits = logits.new_empty((T, E))
    if dlogits.numel():
        rows, block, warps = row_tile(E, logits.itemsize)
        launch(
            expert_load_bwd_kernel,
            (cdiv(T, rows),),
            logits,
            num_warps=warps,
            DSums=dsums.contiguous(),
            Logits=logits,
            Mask=None if mask is None else mask.contiguous(),
            DLogits=dlogits,
            T=T,
            E=E,
            stride_t=logits.stride(0),
            MASKED=mask is not None,
            ROWS=rows,
            BLOCK_E=block,
        )
    return dlogits
