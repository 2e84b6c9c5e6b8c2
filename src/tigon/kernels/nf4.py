"""Weights stored in NF4 with double quantisation (Dettmers et al. 2023, arXiv 2305.14314), made dense in one pass.

    scale_b = CODE_OF_SCALES[q_b] · S[b // 256] + offset          b: a block of 64 weights
    w_i     = CODE[n_i] · scale_b                                 n_i: 4 bits; the high half of a byte comes first

bitsandbytes takes three passes: one for the scales, one for the offset and one for the weights. Everything is fp32; the
scale may differ from bitsandbytes' in the last bit, because product and sum are one instruction here.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch

BLOCK, OUTER_BLOCK = 64, 256
# Blocks of weights per program: 4096 weights, 2 KiB read and 8 KiB written in 16 bits. Not tuned.
BLOCKS, WARPS = 64, 4


@triton.jit
def nf4_weight_kernel(
    CODE,  # (16,)
    PACKED,  # (N · HALF,)
    SCALES,  # (N,)
    CODE_OF_SCALES,  # (256,)
    OUTER_SCALES,  # (N / OUTER_BLOCK,)
    OFFSET,  # ()
    W,  # (N · 2 · HALF,)
    N,
    BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    OUTER_BLOCK: tl.constexpr,
):
    """N blocks of 2 · HALF weights."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = blocks < N
    scale = tl.load(CODE_OF_SCALES + tl.load(SCALES + blocks, mask=mask, other=0).to(tl.int32))
    scale = scale * tl.load(OUTER_SCALES + blocks // OUTER_BLOCK, mask=mask, other=0.0) + tl.load(OFFSET)
    bytes_ = blocks[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(PACKED + bytes_, mask=mask[:, None], other=0).to(tl.int32)
    high = tl.load(CODE + (packed >> 4)) * scale[:, None]
    low = tl.load(CODE + (packed & 15)) * scale[:, None]
    w = tl.join(high, low).reshape(BLOCKS, 2 * HALF)
    place = blocks[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(W + place, w.to(W.dtype.element_ty), mask=mask[:, None])


def nf4_weight(code, packed, scales, code_of_scales, outer_scales, offset, rows, columns, dtype):
    w = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    if w.numel():
        n = w.numel() // BLOCK
        launch(
            nf4_weight_kernel,
            (cdiv(n, BLOCKS),),
            packed,
            CODE=code,
            PACKED=packed,
            SCALES=scales,
            CODE_OF_SCALES=code_of_scales,
            OUTER_SCALES=outer_scales,
            OFFSET=offset,
            W=w,
            N=n,
            BLOCKS=BLOCKS,
            HALF=BLOCK // 2,
            OUTER_BLOCK=OUTER_BLOCK,
            num_warps=WARPS,
        )
    return w
