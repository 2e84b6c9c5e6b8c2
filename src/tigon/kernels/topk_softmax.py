"""The router of a mixture of experts: softmax over the experts, the k largest probabilities, and their normalisation.

    p = softmax(l)        w_k = p_{e_k} / s        s = Σ_k p_{e_k} if normalised, else 1

    backward, with g_e = dw_k for e = e_k and 0 elsewhere, and q = p / s:
    normalised      dl = q · (g − Σ_k w_k dw_k) for the chosen experts, 0 elsewhere
    otherwise       dl = p · (g − Σ_k w_k dw_k)

A program holds whole rows of E logits. It takes the largest of them k times, the first of equal ones. Everything is
fp32. The backward computes the softmax again from the logits, which the model keeps anyway.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, next_power_of_2

TILE = 1024  # logits of a program


@triton.jit
def largest_left(x, taken, cols, E):
    """The largest logit of each row that is not taken, and its expert; of equal ones the first."""
    left = tl.where(taken, float("-inf"), x)
    value = tl.max(left, axis=1)
    # A row of NaN alone finds no largest; its expert must exist, so that the NaN of its weights goes on.
    first = tl.min(tl.where((left == value[:, None]) & (taken == 0), cols[None, :], E - 1), axis=1)
    return value, first


@triton.jit
def nan_of(x):
    """NaN for a row that holds one, else 0. The largest of a row on a GPU passes NaN over."""
    return tl.sum(tl.where(x == x, 0.0, x), axis=1)


@triton.jit
def gradients_of_chosen(DWeights, Index, rows, cols, T, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """(the gradient of each expert's weight, which is 0 for those that were not chosen, and which were chosen)"""
    g = tl.zeros([ROWS, BLOCK_E], dtype=tl.float32)
    chosen = tl.zeros([ROWS, BLOCK_E], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(Index + rows * TOP_K + k, mask=rows < T, other=0).to(tl.int32)
        dw = tl.load(DWeights + rows * TOP_K + k, mask=rows < T, other=0.0).to(tl.float32)
        here = cols[None, :] == expert[:, None]
        g = tl.where(here, dw[:, None], g)
        chosen = tl.where(here, 1, chosen)
    return g, chosen


@triton.jit
def store_choice(Weights, Index, weights, index, rows, ks, T, TOP_K: tl.constexpr):
    inside = (rows < T)[:, None] & (ks < TOP_K)[None, :]
    place = rows[:, None] * TOP_K + ks[None, :]
    tl.store(Weights + place, weights.to(Weights.dtype.element_ty), mask=inside)
    tl.store(Index + place, index.to(tl.int64), mask=inside)


@triton.jit
def topk_softmax_fwd_kernel(
    Logits,  # (T, E)
    Weights,  # (T, TOP_K)
    Index,  # (T, TOP_K)
    T,
    E,
    stride_t,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols, ks = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    there = (rows < T)[:, None] & (cols < E)[None, :]
    x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=1)
    taken = (cols >= E)[None, :] | (rows < 0)[:, None]
    top = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    index = tl.zeros([ROWS, BLOCK_K], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        value, first = largest_left(x, taken, cols, E)
        taken = taken | (cols[None, :] == first[:, None])
        top = tl.where((ks == k)[None, :], value[:, None], top)
        index = tl.where((ks == k)[None, :], first[:, None], index)
    top = tl.exp(top - largest[:, None])
    if NORMALISED:
        total = tl.sum(tl.where((ks < TOP_K)[None, :], top, 0.0), axis=1) + nan_of(x)
    else:
        total = tl.sum(tl.exp(x - largest[:, None]), axis=1)
    store_choice(Weights, Index, top / total[:, None], index, rows, ks, T, TOP_K)


@triton.jit
def topk_softmax_bwd_kernel(
    Logits,  # (T, E)
    DWeights,  # (T, TOP_K)
    Index,  # (T, TOP_K)
    DLogits,  # (T, E)
    T,
    E,
    stride_t,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_E)
    there = (rows < T)[:, None] & (cols < E)[None, :]
    x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=float("-inf")).to(tl.float32)
    g, chosen = gradients_of_chosen(DWeights, Index, rows, cols, T, TOP_K, ROWS, BLOCK_E)
    p = tl.exp(x - tl.max(x, axis=1)[:, None])
    if NORMALISED:
        p = tl.where(chosen != 0, p, 0.0) + nan_of(x)[:, None]
    p = p / tl.sum(p, axis=1)[:, None]
    mean = tl.sum(p * g, axis=1)
    d = p * (g - mean[:, None])
    tl.store(DLogits + rows[:, None] * E + cols[None, :], d.to(DLogits.dtype.element_ty), mask=there)


def row_tile(E, itemsize):
    """(rows and columns of a program's tile, warps)"""
    block = next_power_of_2(E)
    rows = max(TILE // block, 1)
    per_lane = 16 // itemsize  # what one load of 16 bytes gives to a lane
    return rows, block, max(min(rows * block // (per_lane * _launch.lanes()), 8), 1)


def unit_stride_rows(logits):
    return logits if logits.stride(1) == 1 else logits.contiguous()


def empty_choice(logits, top_k, dtype):
    """Memory for the weights in `dtype` and the experts of each token, (T, K)."""
    shape, device = (logits.shape[0], top_k), logits.device
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=torch.int64, device=device)


def launch_rows(kernel, logits, tensors, **numbers):
    """Launch a router's kernel for logits (T, E), of which a program holds whole rows. tensors: the others."""
    logits, (T, E) = unit_stride_rows(logits), logits.shape
    rows, block, warps = row_tile(E, logits.itemsize)
    launch(
        kernel,
        (cdiv(T, rows),),
        logits,
        num_warps=warps,
        Logits=logits,
        **tensors,
        T=T,
        E=E,
        stride_t=logits.stride(0),
        **numbers,
        ROWS=rows,
        BLOCK_E=block,
    )


def topk_softmax_fwd(logits, top_k, normalised, dtype):
    """Launch the router of (T, E). Returns the weights (T, K) in `dtype` and the experts (T, K)."""
    weights, index = empty_choice(logits, top_k, dtype)
    if weights.numel():
        launch_rows(
            topk_softmax_fwd_kernel,
            logits,
            {"Weights": weights, "Index": index},
            TOP_K=top_k,
            NORMALISED=normalised,
            BLOCK_K=next_power_of_2(top_k),
        )
    return weights, index


def topk_softmax_bwd(dweights, logits, index, normalised):
    """Launch the gradient of the logits."""
    dlogits = logits.new_empty(logits.shape)
    if dlogits.numel():
        tensors = {"DWeights": dweights.contiguous(), "Index": index, "DLogits": dlogits}
        launch_rows(topk_softmax_bwd_kernel, logits, tensors, TOP_K=index.shape[1], NORMALISED=normalised)
    return dlogits
