"""Attention of one new token per row over a pool of keys and values, of which rows may share a part.

A row reads two ranges of the pool: its prefix, such as the prompt of its group, and its own tokens. Rows of one group
form a tile: a program reads a prefix once for all of them. Each range is cut into splits, so that a few rows fill a GPU
too (flash-decoding). A split's program writes its output and log-sum-exp; a second kernel joins them:

    out = Σ_i out_i · exp(lse_i − L)        L = log(exp(sink) + Σ_i exp(lse_i))

`Bounds` holds six numbers per row: the prefix's begin and end, the row's own begin and end, and a tile's first row and
its count of rows. Row i holds tile i; tiles that do not exist have a count of 0.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import chips
from tigon.kernels._launch import cdiv, launch, multiprocessors, next_power_of_2
from tigon.kernels._math import INTERPRETED, tanh

MOST_BLOCK_N = 64  # keys of a turn
BLOCK_BYTES = 16384  # of the keys of a turn: they and the values are in shared memory for three turns at once
MOST_SPLITS = 16


@triton.jit
def product(a, b):
    """a @ b in fp32, never in TF32: greedy decoding in fp32 has to take the tokens of unfused attention."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def decode_attention_kernel(
    Q,  # (S, HEADS, D)
    K,  # (KEY_HEADS, N, D)
    V,  # (KEY_HEADS, N, E)
    Bounds,  # (S, 6)
    Parts,  # (S, HEADS, SPLITS, E)
    Lse,  # (S, HEADS, SPLITS)
    N,
    SCALE,
    SOFTCAP,
    FIRST_SPLIT,  # numbers that follow from the longest prompt are no constants: each would compile the kernel again
    SPLITS,
    CHUNK,
    KEY_HEADS: tl.constexpr,
    SHARED_BY: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    IS_PREFIX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    tile = tl.program_id(0) // KEY_HEADS
    head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(1)
    if IS_PREFIX:
        first, count = tl.load(Bounds + tile * 6 + 4), tl.load(Bounds + tile * 6 + 5)
    else:
        first, count = tile, 1
    m = tl.arange(0, BLOCK_M)
    there = m < count * SHARED_BY
    row = first + m // SHARED_BY
    query = (row * KEY_HEADS + head) * SHARED_BY + m % SHARED_BY
    column = 0 if IS_PREFIX else 2
    begin_M = tl.load(Bounds + row * 6 + column, mask=there, other=2147483647)
    end_M = tl.load(Bounds + row * 6 + column + 1, mask=there, other=0)
    begin = tl.min(begin_M, axis=0) + split * CHUNK
    end = tl.minimum(tl.max(end_M, axis=0), begin + CHUNK)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q = tl.load(Q + query[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if count > 0:
        for start in range(begin, end, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            place = head.to(tl.int64) * N + n
            inside = n < end
            k = tl.load(K + place[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
            s = product(q, tl.trans(k)) * SCALE
            if HAS_SOFTCAP:
                s = SOFTCAP * tanh(s / SOFTCAP)[0]
            seen = (n[None, :] >= begin_M[:, None]) & (n[None, :] < tl.minimum(end_M, end)[:, None])
            s = tl.where(seen, s, float("-inf"))
            higher = tl.maximum(highest, tl.max(s, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(s - base[:, None])
            kept = tl.exp(highest - base)
            total = total * kept + tl.sum(p, axis=1)
            v = tl.load(V + place[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
            out = out * kept[:, None] + product(p.to(v.dtype), v)
            highest = higher
    lse = tl.where(total > 0, highest + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    part = query * SPLITS + FIRST_SPLIT + split
    tl.store(Lse + part, lse, mask=there)
    tl.store(Parts + part[:, None] * E + e[None, :], out, mask=there[:, None] & (e < E)[None, :])


@triton.jit
def join_kernel(
    Parts,  # (S, HEADS, SPLITS, E)
    Lse,  # (S, HEADS, SPLITS)
    Sinks,  # (HEADS,) or None
    Out,  # (S, HEADS, E)
    HEADS,
    SPLITS,
    E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    query = tl.program_id(0)
    split, e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_E)
    lse = tl.load(Lse + query * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    if Sinks is not None:
        sink = tl.load(Sinks + query % HEADS).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weights = tl.exp(lse - highest)
    total = tl.sum(weights, axis=0)
    if Sinks is not None:
        total += tl.exp(sink - highest)
    place = (query * SPLITS + split)[:, None] * E + e[None, :]
    parts = tl.load(Parts + place, mask=(split < SPLITS)[:, None] & (e < E)[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / total
    tl.store(Out + query * E + e, out.to(Out.dtype.element_ty), mask=e < E)


def _splits(tokens, programs, block_n, device):
    """How many programs a range of at most `tokens` keys is divided among, and the keys of each."""
    tokens = max(tokens, 1)
    wanted = cdiv(2 * multiprocessors(device.index), programs)
    n = min(MOST_SPLITS, wanted, cdiv(tokens, block_n))
    chunk = cdiv(cdiv(tokens, n), block_n) * block_n
    return cdiv(tokens, chunk), chunk


def _has_tensor_cores(k):
    """Whether Triton uses them: in 16 bits, and on NVIDIA from 8.0 on."""
    chip = chips.chip(k.device.index)
    old = chip is not None and isinstance(chip.arch, tuple) and chip.arch < (8, 0)
    return k.dtype != torch.float32 and not old


def decode_attention(q, k, v, bounds, sinks, scale, softcap, prefix_tokens, own_tokens, tile_rows):
    S, heads, D = q.shape
    key_heads, N, E = k.shape[0], k.shape[1], v.shape[2]
    shared_by = heads // key_heads
    block_d, block_e = (max(16, next_power_of_2(width)) for width in (D, E))
    has_tensor_cores = _has_tensor_cores(k)  # without them a product takes more registers
    key_bytes = max(block_d, block_e) * (k.element_size() if has_tensor_cores else 4)
    block_n = max(16, min(MOST_BLOCK_N, BLOCK_BYTES // key_bytes))
    prefix_splits, prefix_chunk = _splits(prefix_tokens, cdiv(S, tile_rows) * key_heads, block_n, q.device)
    own_splits, own_chunk = _splits(own_tokens, S * key_heads, block_n, q.device)
    splits = prefix_splits + own_splits
    parts = torch.empty(S, heads, splits, E, dtype=torch.float32, device=q.device)
    lse = torch.empty(S, heads, splits, dtype=torch.float32, device=q.device)
    out = torch.empty(S, heads, E, dtype=q.dtype, device=q.device)
    fixed = {
        "KEY_HEADS": key_heads,
        "SHARED_BY": shared_by,
        "D": D,
        "E": E,
        "SPLITS": splits,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "HAS_SOFTCAP": softcap > 0,
    }
    ranges = (
        (True, 0, prefix_splits, prefix_chunk, tile_rows * shared_by),
        (False, prefix_splits, own_splits, own_chunk, shared_by),
    )
    for is_prefix, first_split, n, chunk, queries in ranges:
        values = {
            **fixed,
            "IS_PREFIX": is_prefix,
            "FIRST_SPLIT": first_split,
            "CHUNK": chunk,
            "BLOCK_M": max(16, next_power_of_2(queries)),
        }
        names = decode_attention_kernel.arg_names[9:]
        launch(
            decode_attention_kernel,
            (S * key_heads, n),
            q,
            Q=q,
            K=k,
            V=v,
            Bounds=bounds,
            Parts=parts,
            Lse=lse,
            N=N,
            SCALE=float(scale),
            SOFTCAP=float(softcap),
            **{name: values[name] for name in names},
            num_warps=4 if has_tensor_cores else 8,
        )
    launch(
        join_kernel,
        (S * heads,),
        q,
        Parts=parts,
        Lse=lse,
        Sinks=sinks,
        Out=out,
        HEADS=heads,
        SPLITS=splits,
        E=E,
        BLOCK_S=2 * MOST_SPLITS,
        BLOCK_E=block_e,
        num_warps=1,
    )
    return out
