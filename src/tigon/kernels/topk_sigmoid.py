"""The router of DeepSeek-V3, GLM and Kimi: sigmoid, a bias for the choice, groups of experts, and normalisation.

    s = σ(l)        c = s + b        the choice: the K largest c in the groups whose two largest c sum to the most
    w_k = scale · s_{e_k} / D        D = Σ_k s_{e_k} + eps if normalised, else 1

backward, for e = e_k, with dw_k:
    ds_e = scale · (dw_k - Σ_j dw_j · s_{e_j} / D) / D, or scale · dw_k without normalisation
    dl_e = ds_e · s_e · (1 - s_e), and 0 for the other experts. The bias gets no gradient.

A program holds whole rows of E logits, as in kernels/topk_softmax.py. Everything is fp32.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import next_power_of_2
from tigon.kernels.topk_softmax import (
    empty_choice,
    gradients_of_chosen,
    largest_left,
    launch_rows,
    nan_of,
    store_choice,
)


@triton.jit
def outside_groups(c, cols, there, E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Whether each expert is in no chosen group. Of equal groups the first is chosen."""
    size = E // GROUPS
    gs = tl.arange(0, BLOCK_G)
    scores = tl.sum(tl.where(there, c, 0.0), axis=1)[:, None] * 0.0 + tl.where(gs < GROUPS, 0.0, float("-inf"))[None, :]
    for g in tl.static_range(GROUPS):
        other = (cols < g * size) | (cols >= (g + 1) * size)
        taken = other[None, :] | (there == 0)
        largest, first = largest_left(c, taken, cols, E)
        second = tl.max(tl.where(taken | (cols[None, :] == first[:, None]), float("-inf"), c), axis=1)
        scores = tl.where((gs == g)[None, :], (largest + second)[:, None], scores)
    done = (gs >= GROUPS)[None, :] | (scores != scores)
    outside = there | (there == 0)
    for _ in tl.static_range(TOP_GROUPS):
        _, group = largest_left(scores, done, gs, GROUPS)
        done = done | (gs[None, :] == group[:, None])
        outside = outside & (cols[None, :] // size != group[:, None])
    return outside


@triton.jit
def topk_sigmoid_fwd_kernel(
    Logits,  # (T, E)
    Bias,  # (E,) or None
    Weights,  # (T, TOP_K)
    Index,  # (T, TOP_K)
    T,
    E,
    stride_t,
    scale,
    eps,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols, ks = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    there = (rows < T)[:, None] & (cols < E)[None, :]
    x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=0.0).to(tl.float32)
    s = tl.sigmoid(x)
    c = s
    if HAS_BIAS:
        c += tl.load(Bias + cols, mask=cols < E, other=0.0).to(tl.float32)[None, :]
    taken = (cols >= E)[None, :] | (rows < 0)[:, None]
    if GROUPS > 1:
        taken = taken | outside_groups(c, cols, taken == 0, E, GROUPS, TOP_GROUPS, BLOCK_G)
    weights = tl.zeros([ROWS, BLOCK_K], dtype=tl.float32)
    index = tl.zeros([ROWS, BLOCK_K], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        _, first = largest_left(c, taken, cols, E)
        here = cols[None, :] == first[:, None]
        taken = taken | here
        weights = tl.where((ks == k)[None, :], tl.sum(tl.where(here, s, 0.0), axis=1)[:, None], weights)
        index = tl.where((ks == k)[None, :], first[:, None], index)
    weights = weights + nan_of(x)[:, None]
    if NORMALISED:
        weights = weights / (tl.sum(tl.where((ks < TOP_K)[None, :], weights, 0.0), axis=1) + eps)[:, None]
    store_choice(Weights, Index, weights * scale, index, rows, ks, T, TOP_K)


@triton.jit
def topk_sigmoid_bwd_kernel(
    Logits,  # (T, E)
    DWeights,  # (T, TOP_K)
    Index,  # (T, TOP_K)
    DLogits,  # (T, E)
    T,
    E,
    stride_t,
    scale,
    eps,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_E)
    there = (rows < T)[:, None] & (cols < E)[None, :]
    x = tl.load(Logits + rows[:, None] * stride_t + cols[None, :], mask=there, other=0.0).to(tl.float32)
    g, chosen = gradients_of_chosen(DWeights, Index, rows, cols, T, TOP_K, ROWS, BLOCK_E)
    s = tl.sigmoid(x)
    if NORMALISED:
        top = tl.where(chosen != 0, s, 0.0)
        total = (tl.sum(top, axis=1) + eps)[:, None]
        g = tl.where(chosen != 0, (g - tl.sum(g * top, axis=1)[:, None] / total) / total, 0.0)
    d = g * scale * s * (1.0 - s)
    tl.store(DLogits + rows[:, None] * E + cols[None, :], d.to(DLogits.dtype.element_ty), mask=there)


def topk_sigmoid_fwd(logits, bias, options):
    """Launch the router of (T, E); options: a `TopkSigmoidOptions`. Returns fp32 weights and the experts, (T, K)."""
    top_k, groups, top_groups, normalised, scale, eps = options
    weights, index = empty_choice(logits, top_k, torch.float32)
    if weights.numel():
        launch_rows(
            topk_sigmoid_fwd_kernel,
            logits,
            {"Bias": None if bias is None else bias.contiguous(), "Weights": weights, "Index": index},
            scale=scale,
            eps=eps,
            TOP_K=top_k,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            NORMALISED=normalised,
            HAS_BIAS=bias is not None,
            BLOCK_K=next_power_of_2(top_k),
            BLOCK_G=next_power_of_2(groups),
        )
    return weights, index


def topk_sigmoid_bwd(dweights, logits, index, options):
    """Launch the gradient of the logits."""
    _, _, _, normalised, scale, eps = options
    dlogits = logits.new_empty(logits.shape)
    if dlogits.numel():
        launch_rows(
            topk_sigmoid_bwd_kernel,
            logits,
            {"DWeights": dweights.contiguous(), "Index": index, "DLogits": dlogits},
            scale=scale,
            eps=eps,
            TOP_K=index.shape[1],
            NORMALISED=normalised,
        )
    return dlogits
