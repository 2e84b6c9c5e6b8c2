"""The short causal convolution of each channel, with its activation.

    z_t = b + Σ_k w_k · x_{t-k}        y = f(z),   f(z) = z or z · σ(z)

backward, with e = dy · f'(z), which the kernel computes again from x:
    dx_t = Σ_k w_k · e_{t+k}           dw_k = Σ_t e_t · x_{t-k}        db = Σ_t e_t

The sums stay inside a document: k counts only if t - k is in t's document. Tokens before the first are zero, or those
of the given state.

A program walks over the tokens of a few channels, four at a time. The last three values of x, and the three sums of dx
that are not complete, stay in registers. So each pass reads each tensor once, and computes one sigmoid per value. The
backward walks three tokens into the next chunk, because they add to the last three dx. There are always four taps; a
shorter filter has zeros.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels import _launch, chips
from tigon.kernels._launch import cdiv, launch, next_power_of_2

TAPS = 4
CHUNKS = (32, 512)  # the fewest and the most tokens of a program
PROGRAMS_PER_SM = 32


@triton.jit
def tap(w, columns, k, WIDTH: tl.constexpr):
    """The weights of the token k before; zero if the filter is shorter. w: (BLOCK, 4)."""
    return tl.sum(tl.where(columns == WIDTH - 1 - k, w, 0.0), axis=1)


@triton.jit
def taps_of(W, BIAS, cols, there, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The weights of a token and of the one, two and three before it, and the bias; W is (D, WIDTH)."""
    columns = tl.arange(0, 4)[None, :]
    w = tl.load(W + cols[:, None] * WIDTH + columns, mask=there[:, None] & (columns < WIDTH), other=0.0).to(tl.float32)
    w0, w1 = tap(w, columns, 0, WIDTH), tap(w, columns, 1, WIDTH)
    b = w0 * 0.0
    if HAS_BIAS:
        b = tl.load(BIAS + cols, mask=there, other=0.0).to(tl.float32)
    return w0, w1, tap(w, columns, 2, WIDTH), tap(w, columns, 3, WIDTH), b


@triton.jit
def token(X, STATE, t, end, stride_t, cols, there, D, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr):
    """x_t in fp32; the state's for t < 0, and zero without a state or from `end` on."""
    x = tl.load(X + t * stride_t + cols, mask=there & (t >= 0) & (t < end), other=0.0).to(tl.float32)
    if HAS_STATE:
        row = t + (WIDTH - 1)
        x += tl.load(STATE + row * D + cols, mask=there & (t < 0) & (row >= 0), other=0.0).to(tl.float32)
    return x


@triton.jit
def document(SEQ, t, T, HAS_SEQ: tl.constexpr):
    """The document of a token; the state belongs to the first."""
    number = 0
    if HAS_SEQ:
        number = tl.load(SEQ + tl.minimum(tl.maximum(t, 0), T - 1)).to(tl.int32)
    return number


@triton.jit
def within(x, other, same, HAS_SEQ: tl.constexpr):
    """x if two tokens are in one document."""
    if HAS_SEQ:
        x = tl.where(other == same, x, 0.0)
    return x


@triton.jit
def conv_step(x0, x1, x2, x3, w0, w1, w2, w3, b, d0, d1, d2, d3, HAS_SEQ: tl.constexpr):
    """(z, and the three values before x0 that are in its document)"""
    x1 = within(x1, d1, d0, HAS_SEQ)
    x2 = within(x2, d2, d0, HAS_SEQ)
    x3 = within(x3, d3, d0, HAS_SEQ)
    return b + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3, x1, x2, x3


@triton.jit
def four(X, t, end, stride_t, cols, there, D, WIDTH: tl.constexpr):
    """The values of four tokens from t on."""
    xa = token(X, None, t, end, stride_t, cols, there, D, WIDTH, False)
    xb = token(X, None, t + 1, end, stride_t, cols, there, D, WIDTH, False)
    xc = token(X, None, t + 2, end, stride_t, cols, there, D, WIDTH, False)
    xd = token(X, None, t + 3, end, stride_t, cols, there, D, WIDTH, False)
    return xa, xb, xc, xd


@triton.jit
def four_documents(SEQ, t, T, HAS_SEQ: tl.constexpr):
    da, db = document(SEQ, t, T, HAS_SEQ), document(SEQ, t + 1, T, HAS_SEQ)
    return da, db, document(SEQ, t + 2, T, HAS_SEQ), document(SEQ, t + 3, T, HAS_SEQ)


@triton.jit
def before(X, STATE, t, end, stride_t, cols, there, D, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr):
    """The values of the three tokens before t, the last of them first."""
    x1 = token(X, STATE, t - 1, end, stride_t, cols, there, D, WIDTH, HAS_STATE)
    x2 = token(X, STATE, t - 2, end, stride_t, cols, there, D, WIDTH, HAS_STATE)
    return x1, x2, token(X, STATE, t - 3, end, stride_t, cols, there, D, WIDTH, HAS_STATE)


@triton.jit
def documents_before(SEQ, t, T, HAS_SEQ: tl.constexpr):
    return document(SEQ, t - 1, T, HAS_SEQ), document(SEQ, t - 2, T, HAS_SEQ), document(SEQ, t - 3, T, HAS_SEQ)


@triton.jit
def place_of(D, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A program's channels, which of them exist, its chunk among those of all rows, its row, and its first token."""
    tiles = tl.cdiv(D, BLOCK)
    cols = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) // tiles
    return cols, cols < D, at, (at // chunks).to(tl.int64), ((at % chunks) * CHUNK).to(tl.int64)


@triton.jit
def causal_conv1d_fwd_kernel(
    X,  # (B, T, D)
    W,  # (D, WIDTH)
    BIAS,  # (D,) or None
    SEQ,  # (B, T) or None
    STATE,  # (B, WIDTH - 1, D) or None
    Y,  # (B, T, D)
    T,
    D,
    chunks,
    stride_b,
    stride_t,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SEQ: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # `_at` and not `_`, which the loop assigns tensors to: the compiler refuses a variable that changes its type.
    cols, there, _at, batch, first = place_of(D, chunks, CHUNK, BLOCK)
    X += batch * stride_b
    Y += batch * T * D
    if HAS_SEQ:
        SEQ += batch * T
    if HAS_STATE:
        STATE += batch * (WIDTH - 1) * D
    w0, w1, w2, w3, b = taps_of(W, BIAS, cols, there, WIDTH, HAS_BIAS)
    end = tl.minimum(first + CHUNK, T)
    x1, x2, x3 = before(X, STATE, first, end, stride_t, cols, there, D, WIDTH, HAS_STATE)
    d1, d2, d3 = documents_before(SEQ, first, T, HAS_SEQ)
    for t in range(first, end, 4):
        # The loads of four tokens come before the stores, which they must not be moved across.
        xa, xb, xc, xd = four(X, t, end, stride_t, cols, there, D, WIDTH)
        da, db, dc, dd = four_documents(SEQ, t, T, HAS_SEQ)
        za, _, _, _ = conv_step(xa, x1, x2, x3, w0, w1, w2, w3, b, da, d1, d2, d3, HAS_SEQ)
        zb, _, _, _ = conv_step(xb, xa, x1, x2, w0, w1, w2, w3, b, db, da, d1, d2, HAS_SEQ)
        zc, _, _, _ = conv_step(xc, xb, xa, x1, w0, w1, w2, w3, b, dc, db, da, d1, HAS_SEQ)
        zd, _, _, _ = conv_step(xd, xc, xb, xa, w0, w1, w2, w3, b, dd, dc, db, da, HAS_SEQ)
        if SILU:
            za *= tl.sigmoid(za)
            zb *= tl.sigmoid(zb)
            zc *= tl.sigmoid(zc)
            zd *= tl.sigmoid(zd)
        y = Y + t * D + cols
        dtype: tl.constexpr = Y.dtype.element_ty
        tl.store(y, za.to(dtype), mask=there)
        tl.store(y + D, zb.to(dtype), mask=there & (t + 1 < end))
        tl.store(y + 2 * D, zc.to(dtype), mask=there & (t + 2 < end))
        tl.store(y + 3 * D, zd.to(dtype), mask=there & (t + 3 < end))
        x1, x2, x3 = xd, xc, xb
        d1, d2, d3 = dd, dc, db


@triton.jit
def store_dx(DX, DSTATE, dx, t, first, end, cols, there, D, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr):
    """Store dx of token t, if it is one of the chunk's, or of the state's gradient."""
    tl.store(DX + t * D + cols, dx.to(DX.dtype.element_ty), mask=there & (t >= first) & (t < end))
    if HAS_STATE:
        row = t + (WIDTH - 1)
        mask = there & (first == 0) & (t < 0) & (row >= 0)
        tl.store(DSTATE + row * D + cols, dx.to(DSTATE.dtype.element_ty), mask=mask)


@triton.jit
def error_of(z, dy, inside, SILU: tl.constexpr):
    """e = dy · f'(z), zero after the last token."""
    if SILU:
        s = tl.sigmoid(z)
        dy *= s * (1.0 + z * (1.0 - s))
    return tl.where(inside, dy, 0.0)


@triton.jit
def causal_conv1d_bwd_kernel(
    DY,  # (B, T, D)
    X,  # (B, T, D)
    W,  # (D, WIDTH)
    BIAS,  # (D,) or None
    SEQ,  # (B, T) or None
    STATE,  # (B, WIDTH - 1, D) or None
    DX,  # (B, T, D)
    DW,  # (B · chunks, TAPS + 1, D) fp32, or None: dw_0 to dw_3, and db
    DSTATE,  # (B, WIDTH - 1, D) or None
    T,
    D,
    chunks,
    stride_b,
    stride_t,
    stride_dy_b,
    stride_dy_t,
    WANT_DW: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SEQ: tl.constexpr,
    HAS_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols, there, at, batch, first = place_of(D, chunks, CHUNK, BLOCK)
    X += batch * stride_b
    DY += batch * stride_dy_b
    DX += batch * T * D
    if HAS_SEQ:
        SEQ += batch * T
    if HAS_STATE:
        STATE += batch * (WIDTH - 1) * D
        DSTATE += batch * (WIDTH - 1) * D
    w0, w1, w2, w3, b = taps_of(W, BIAS, cols, there, WIDTH, HAS_BIAS)
    end = tl.minimum(first + CHUNK, T)
    last = tl.minimum(end + 3, T)
    x1, x2, x3 = before(X, STATE, first, last, stride_t, cols, there, D, WIDTH, HAS_STATE)
    d1, d2, d3 = documents_before(SEQ, first, T, HAS_SEQ)
    zero = w0 * 0.0
    p1, p2, p3 = zero, zero, zero  # incomplete dx of the three tokens before t
    g0, g1, g2, g3, gb = zero, zero, zero, zero, zero
    for t in range(first, end + 3, 4):
        xa, xb, xc, xd = four(X, t, last, stride_t, cols, there, D, WIDTH)
        ya, yb, yc, yd = four(DY, t, last, stride_dy_t, cols, there, D, WIDTH)
        da, db, dc, dd = four_documents(SEQ, t, T, HAS_SEQ)
        for i in tl.static_range(4):
            x0, dy, d0 = xa, ya, da
            if i == 1:
                x0, dy, d0 = xb, yb, db
            if i == 2:
                x0, dy, d0 = xc, yc, dc
            if i == 3:
                x0, dy, d0 = xd, yd, dd
            z, v1, v2, v3 = conv_step(x0, x1, x2, x3, w0, w1, w2, w3, b, d0, d1, d2, d3, HAS_SEQ)
            e = error_of(z, dy, t + i < last, SILU)
            dx = p3 + within(w3 * e, d3, d0, HAS_SEQ)
            p3 = p2 + within(w2 * e, d2, d0, HAS_SEQ)
            p2 = p1 + within(w1 * e, d1, d0, HAS_SEQ)
            p1 = w0 * e
            store_dx(DX, DSTATE, dx, t + i - 3, first, end, cols, there, D, WIDTH, HAS_STATE)
            if WANT_DW:
                e = tl.where(t + i < end, e, 0.0)
                g0 += e * x0
                g1 += e * v1
                g2 += e * v2
                g3 += e * v3
                gb += e
            x1, x2, x3 = x0, x1, x2
            d1, d2, d3 = d0, d1, d2
    if WANT_DW:
        DW += at.to(tl.int64) * 5 * D
        tl.store(DW + cols, g0, mask=there)
        tl.store(DW + D + cols, g1, mask=there)
        tl.store(DW + 2 * D + cols, g2, mask=there)
        tl.store(DW + 3 * D + cols, g3, mask=there)
        tl.store(DW + 4 * D + cols, gb, mask=there)


def _tile(x):
    """(channels of a program, its tokens, the chunks of a row)"""
    B, T, D = x.shape
    block = min(16 // x.element_size() * _launch.lanes(), max(next_power_of_2(D), 32))
    programs = PROGRAMS_PER_SM * _launch.multiprocessors(x.device.index)
    tokens = min(max(next_power_of_2(B * T * cdiv(D, block) // programs), CHUNKS[0]), CHUNKS[1])
    return block, tokens, cdiv(T, tokens)


def _unit_stride(x):
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _channels_per_thread(x):
    """On an H100 eight in bf16 take 10 % more time in the backward and 19 % with dw. On AMD four spill registers."""
    chip = chips.chip(x.device.index)
    return 8 if chip is not None and isinstance(chip.arch, str) and chip.arch else 4


def _launch_on(kernel, x, before, after, arguments, flags):
    """Launch a kernel for x. before, after: its tensors around those of `arguments`; flags: its own numbers."""
    weight, bias, seq_idx, state, silu = arguments
    block, tokens, chunks = _tile(x)
    B, T, D = x.shape
    launch(
        kernel,
        (B * chunks * cdiv(D, block),),
        x,
        num_warps=max(block // (_channels_per_thread(x) * _launch.lanes()), 1),
        **before,
        W=weight.contiguous(),
        BIAS=None if bias is None else bias.contiguous(),
        SEQ=None if seq_idx is None else seq_idx.contiguous(),
        STATE=None if state is None else state.contiguous(),
        **after,
        T=T,
        D=D,
        chunks=chunks,
        stride_b=x.stride(0),
        stride_t=x.stride(1),
        **flags,
        WIDTH=weight.shape[1],
        SILU=silu,
        HAS_BIAS=bias is not None,
        HAS_SEQ=seq_idx is not None,
        HAS_STATE=state is not None and state.numel() > 0,
        CHUNK=tokens,
        BLOCK=block,
    )


def causal_conv1d_fwd(x, weight, bias, seq_idx, state, silu):
    """Launch the forward of x (B, T, D)."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        x = _unit_stride(x)
        _launch_on(causal_conv1d_fwd_kernel, x, {"X": x}, {"Y": y}, (weight, bias, seq_idx, state, silu), {})
    return y


def causal_conv1d_bwd(dy, x, weight, bias, seq_idx, state, silu, want_dw):
    """Launch the backward; returns (dx, dweight, dbias, dstate), with None for what is not wanted or not there."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dstate = None if state is None else torch.zeros_like(state, memory_format=torch.contiguous_format)
    if not dx.numel():
        sums = (torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias))
        return dx, *(sums if want_dw else (None, None)), dstate
    x, dy, (D, width) = _unit_stride(x), _unit_stride(dy), weight.shape
    rows = x.shape[0] * _tile(x)[2]
    partial = x.new_empty((rows, TAPS + 1, D), dtype=torch.float32) if want_dw else None
    after = {"DX": dx, "DW": partial, "DSTATE": dstate}
    strides = {"stride_dy_b": dy.stride(0), "stride_dy_t": dy.stride(1), "WANT_DW": want_dw}
    arguments = (weight, bias, seq_idx, state, silu)
    _launch_on(causal_conv1d_bwd_kernel, x, {"DY": dy, "X": x}, after, arguments, strides)
    if not want_dw:
        return dx, None, None, dstate
    sums = partial.sum(0)
    dweight = sums[:width].flip(0).t().contiguous().to(weight.dtype)
    return dx, dweight, None if bias is None else sums[TAPS].to(bias.dtype), dstate
