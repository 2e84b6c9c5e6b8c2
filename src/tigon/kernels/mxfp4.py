"""Weights stored in MXFP4 (Open Compute Project, Microscaling Formats 1.0), made dense in one pass.

    w_i = CODE[n_i] · 2^(s_b − 127)        b: a block of 32 weights; n_i: 4 bits; the low half of a byte comes first

CODE has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Products with
powers of two are exact in fp32, so that a weight is rounded once, to its own dtype.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch

BLOCK = 32
# Blocks of weights per program: 4096 weights, 2 KiB read and 8 KiB written in 16 bits. Not tuned.
BLOCKS, WARPS = 128, 4


@triton.jit
def mxfp4_weight_kernel(CODE, PACKED, SCALES, W, N, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    """N blocks of 2 · HALF weights."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = blocks < N
    exponent = tl.load(SCALES + blocks, mask=mask, other=127).to(tl.int32)
    # 2^(s - 127) by its bits; 2^-127 has no normal number in fp32.
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    bytes_ = blocks[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(PACKED + bytes_, mask=mask[:, None], other=0).to(tl.int32)
    low = tl.load(CODE + (packed & 15)) * scale[:, None]
    high = tl.load(CODE + (packed >> 4)) * scale[:, None]
    w = tl.join(low, high).reshape(BLOCKS, 2 * HALF)
    place = blocks[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(W + place, w.to(W.dtype.element_ty), mask=mask[:, None])


def mxfp4_weight(code, packed, scales, dtype):
    packed, scales = packed.contiguous(), scales.contiguous()
    w = torch.empty((*scales.shape[:-1], scales.shape[-1] * BLOCK), dtype=dtype, device=packed.device)
    if n := scales.numel():
        launch(
            mxfp4_weight_kernel,
            (cdiv(n, BLOCKS),),
            packed,
            CODE=code,
            PACKED=packed,
            SCALES=scales,
            W=w,
            N=n,
            BLOCKS=BLOCKS,
            HALF=BLOCK // 2,
            num_warps=WARPS,
        )
    return w
