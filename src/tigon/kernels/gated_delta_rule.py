"""The chunked gated delta rule with one gate per head: a state of K x V numbers, read and corrected by each token.

    S_t = e^{g_t} · S_{t-1} + k_t · u_tᵀ      u_t = β_t · (v_t - e^{g_t} · S_{t-1}ᵀ · k_t)      o_t = scale · S_tᵀ · q_t

A chunk has CHUNK tokens, γ is the sum of g from its first token on, S the state before it, and S' the state after it.
D_{tj} = e^{γ_t - γ_j} for j ≤ t and 0 otherwise. With rows for tokens:

    (I + L) · u = r        r = β · (v - e^γ · (k · S))        L_{tj} = β_t · D_{tj} · (k_t · k_j) for j < t
    u = T · r              T = (I + L)⁻¹
    o = scale · (e^γ · (q · S) + (D ∘ q·kᵀ) · u)
    S' = e^{γ_C} · S + kᵀ · (e^{γ_C - γ} · u)

backward, from the gradients do of the chunk's outputs and dS' of the state after it:

    du = scale · (D ∘ q·kᵀ)ᵀ · do + e^{γ_C - γ} · (k · dS')        dr = Tᵀ · du        dv = β · dr
    dS = e^{γ_C} · dS' + qᵀ · (scale · e^γ · do) - kᵀ · (e^γ · β · dr)
    dq = scale · (e^γ · (do · Sᵀ) + (D ∘ do·uᵀ) · k)
    x = (D ∘ dL) · k,  dL = -dr·uᵀ for j < t        n = dr · Sᵀ
    dk = dk_row + dk_col
        dk_row = β · (x - e^γ · n)
        dk_col = scale · (D ∘ do·uᵀ)ᵀ · q + (D ∘ dL)ᵀ · (β · k) + e^{γ_C - γ} · (u · dS'ᵀ)
    dβ = dr·v - e^γ · (k·n) + k·x
    dγ = q·dq + k·dk_row - k·dk_col, without the terms of j = t, and without n' = e^{γ_C - γ} · k·(u · dS'ᵀ) in dk_col
    dg is the sum of dγ from the token to the end of the chunk, of n' before the token, and e^{γ_C} · <S, dS'>

Each column of the state has its own recurrence, so a program of the recurrent kernels has a few columns of one head and
walks over the chunks. All other products run in one program for each chunk. Only T and γ stay for the backward, which
computes S and u again: both are 2.5 times as large as what the model keeps of v.

No product takes the transpose of another product's result, because Triton 3.4 to 3.7.0 compiles that wrongly for
Hopper. Transposed products are computed from transposed factors instead.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tigon.kernels import _launch
from tigon.kernels._launch import cdiv, launch, next_power_of_2

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
CHUNK = 64  # tokens of a chunk; the shapes of the results depend on it
WARPS = {"prepare": 4, "states": 4, "outputs": 4, "du": 4, "state_gradients": 4, "gradients": 8}


@triton.jit
def product(a, b):
    """a · b in fp32. Factors in fp32 are multiplied in fp32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    if is_cuda():
        return tl.dot(a, b, input_precision="tf32x3")  # three products of TF32 for factors in fp32
    return tl.dot(a, b, input_precision="ieee")  # AMD's matrix units have fp32


@triton.jit
def place_of(CU, OFFSETS, DOCUMENTS, c, T, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """First token of chunk c, and the end of its sequence, which comes before it if there is no chunk c."""
    if VARLEN:
        n = tl.load(DOCUMENTS + c)
        first = tl.load(CU + n).to(tl.int64) + (c - tl.load(OFFSETS + n)) * CHUNK
        end = tl.load(CU + n + 1).to(tl.int64)
    else:
        chunks = tl.cdiv(T, CHUNK)
        n = (c // chunks).to(tl.int64)
        first = n * T + (c % chunks) * CHUNK
        end = n * T + T
    return first, end


@triton.jit
def sequence_of(CU, OFFSETS, n, T, CHUNK: tl.constexpr, VARLEN: tl.constexpr):
    """First token of sequence n, its end, and its first chunk."""
    if VARLEN:
        begin = tl.load(CU + n).to(tl.int64)
        end = tl.load(CU + n + 1).to(tl.int64)
        chunk = tl.load(OFFSETS + n).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        end = begin + T
        chunk = n.to(tl.int64) * tl.cdiv(T, CHUNK)
    return begin, end, chunk


@triton.jit
def tile(X, rows, cols, stride, width, end):
    """(rows, cols) of X, which has `stride` numbers per row; zero from row `end` and column `width` on."""
    mask = (rows < end)[:, None] & (cols < width)[None, :]
    return tl.load(X + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store(X, value, rows, cols, stride, width, end):
    mask = (rows < end)[:, None] & (cols < width)[None, :]
    tl.store(X + rows[:, None] * stride + cols[None, :], value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def sums_of(GAMMA, rows, HEADS, head, end):
    """γ of the rows. Rows after the end have the last token's: e^{0 - γ} would be infinite for a small γ."""
    return tl.load(GAMMA + tl.minimum(rows, end - 1) * HEADS + head)


@triton.jit
def decay(gamma, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """D, or Dᵀ. gamma: (CHUNK,)"""
    t = tl.arange(0, CHUNK)
    if TRANSPOSED:
        there = t[:, None] <= t[None, :]
        exponent = gamma[None, :] - gamma[:, None]
    else:
        there = t[:, None] >= t[None, :]
        exponent = gamma[:, None] - gamma[None, :]
    return tl.where(there, tl.exp(tl.where(there, exponent, 0.0)), 0.0)


@triton.jit
def inverse(lower, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(I + lower)⁻¹ of a strictly lower triangle in fp32.

    The blocks of BLOCK rows on the diagonal are eliminated column by column, all at once. Then two neighbours A and C
    with B below A become one: the part below A⁻¹ is -C⁻¹ · B · A⁻¹. CHUNK is BLOCK or four times BLOCK.
    """
    t = tl.arange(0, CHUNK)
    row, col = t[:, None], t[None, :]
    own = row // BLOCK == col // BLOCK
    x = tl.where(row == col, 1.0, 0.0)
    diagonal = tl.where(own, lower, 0.0)
    for i in range(BLOCK):
        factors = tl.sum(tl.where(col % BLOCK == i, diagonal, 0.0), axis=1)
        pivots = tl.sum(tl.where(row % BLOCK == i, x, 0.0), axis=0)
        x -= tl.where(own, factors[:, None] * pivots[None, :], 0.0)
    if BLOCK < CHUNK:
        pairs = row // (2 * BLOCK) == col // (2 * BLOCK)
        x -= product(product(x, tl.where(pairs & (row // BLOCK > col // BLOCK), lower, 0.0)), x)
        x -= product(product(x, tl.where(pairs, 0.0, lower)), x)
    return x


@triton.jit
def prepare_kernel(
    K,  # (tokens, H, WIDTH)
    G,  # (tokens, HEADS)
    BETA,  # (tokens, HEADS)
    GAMMA,  # (tokens, HEADS) fp32
    INVERSE,  # (chunks, HEADS, CHUNK, CHUNK)
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    DOCUMENTS,  # (chunks,) or None
    T,
    HEADS,
    GROUP,
    stride_k,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    VARLEN: tl.constexpr,
    ELIMINATED: tl.constexpr,
):
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = place_of(CU, OFFSETS, DOCUMENTS, c, T, CHUNK, VARLEN)
    if first < end:
        t = tl.arange(0, CHUNK)
        rows = first + t
        there = rows < end
        gamma = tl.cumsum(tl.load(G + rows * HEADS + head, mask=there, other=0.0).to(tl.float32), axis=0)
        tl.store(GAMMA + rows * HEADS + head, gamma, mask=there)
        beta = tl.load(BETA + rows * HEADS + head, mask=there, other=0.0).to(tl.float32)
        k = tile(K + (head // GROUP) * WIDTH, rows, tl.arange(0, BLOCK), stride_k, WIDTH, end)
        lower = product(k, tl.trans(k)) * decay(gamma, CHUNK, False) * beta[:, None]
        x = inverse(tl.where(t[:, None] > t[None, :], lower, 0.0), CHUNK, ELIMINATED)
        at = INVERSE + (c * HEADS + head) * CHUNK * CHUNK
        store(at, x, t, t, CHUNK, CHUNK, CHUNK)


@triton.jit
def states_kernel(
    K,  # (tokens, H, WIDTH)
    V,  # (tokens, HEADS, VALUES)
    GAMMA,  # (tokens, HEADS) fp32
    BETA,  # (tokens, HEADS)
    INVERSE,  # (chunks, HEADS, CHUNK, CHUNK)
    STATE,  # (N, HEADS, WIDTH, VALUES) or None
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    S,  # (chunks, HEADS, WIDTH, VALUES): the state before each chunk
    U,  # (tokens, HEADS, VALUES)
    FINAL,  # (N, HEADS, WIDTH, VALUES) fp32 or None
    T,
    HEADS,
    GROUP,
    stride_k,
    stride_v,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VARLEN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_STATE: tl.constexpr,
    WANT_FINAL: tl.constexpr,
):
    n = tl.program_id(1)
    head = tl.program_id(0) // tl.cdiv(VALUES, BLOCK_V)
    cols = (tl.program_id(0) % tl.cdiv(VALUES, BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end, chunk = sequence_of(CU, OFFSETS, n, T, CHUNK, VARLEN)
    t, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    K += (head // GROUP) * WIDTH
    V += head * VALUES
    U += head * VALUES
    of_sequence = (n.to(tl.int64) * HEADS + head) * WIDTH * VALUES
    s = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    if HAS_STATE:
        s += tile(STATE + of_sequence, d, cols, VALUES, VALUES, WIDTH).to(tl.float32)
    dtype: tl.constexpr = K.dtype.element_ty
    for i in tl.range(0, tl.cdiv(end - begin, CHUNK), num_stages=STAGES):
        at = (chunk + i) * HEADS + head
        rows = begin + i * CHUNK + t
        there = rows < end
        store(S + at * WIDTH * VALUES, s, d, cols, VALUES, VALUES, WIDTH)
        k = tile(K, rows, d, stride_k, WIDTH, end)
        v = tile(V, rows, cols, stride_v, VALUES, end).to(tl.float32)
        x = tile(INVERSE + at * CHUNK * CHUNK, t, t, CHUNK, CHUNK, CHUNK)
        gamma = sums_of(GAMMA, rows, HEADS, head, end)
        last = tl.load(GAMMA + (tl.minimum(begin + (i + 1) * CHUNK, end) - 1) * HEADS + head)
        beta = tl.load(BETA + rows * HEADS + head, mask=there, other=0.0).to(tl.float32)
        r = beta[:, None] * (v - tl.exp(gamma)[:, None] * product(k, s.to(dtype)))
        u = product(x, r.to(dtype))
        store(U, u, rows, cols, HEADS * VALUES, VALUES, end)
        rest = tl.where(there, tl.exp(tl.where(there, last - gamma, 0.0)), 0.0)
        s = s * tl.exp(last) + product(tl.trans(k), (rest[:, None] * u).to(dtype))
    if WANT_FINAL:
        store(FINAL + of_sequence, s, d, cols, VALUES, VALUES, WIDTH)


@triton.jit
def outputs_kernel(
    Q,  # (tokens, H, WIDTH)
    K,  # (tokens, H, WIDTH)
    GAMMA,  # (tokens, HEADS) fp32
    S,  # (chunks, HEADS, WIDTH, VALUES)
    U,  # (tokens, HEADS, VALUES)
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    DOCUMENTS,  # (chunks,) or None
    O,  # (tokens, HEADS, VALUES)
    T,
    HEADS,
    GROUP,
    stride_q,
    stride_k,
    scale,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VARLEN: tl.constexpr,
):
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = place_of(CU, OFFSETS, DOCUMENTS, c, T, CHUNK, VARLEN)
    if first < end:
        d = tl.arange(0, BLOCK)
        rows = first + tl.arange(0, CHUNK)
        q = tile(Q + (head // GROUP) * WIDTH, rows, d, stride_q, WIDTH, end)
        k = tile(K + (head // GROUP) * WIDTH, rows, d, stride_k, WIDTH, end)
        gamma = sums_of(GAMMA, rows, HEADS, head, end)
        dtype: tl.constexpr = K.dtype.element_ty
        a = (product(q, tl.trans(k)) * decay(gamma, CHUNK, False)).to(dtype)
        at = S + (c * HEADS + head) * WIDTH * VALUES
        for v in tl.static_range(0, VALUES, BLOCK_V):
            cols = v + tl.arange(0, BLOCK_V)
            s = tile(at, d, cols, VALUES, VALUES, WIDTH)
            u = tile(U + head * VALUES, rows, cols, HEADS * VALUES, VALUES, end)
            o = tl.exp(gamma)[:, None] * product(q, s) + product(a, u)
            store(O + head * VALUES, scale * o, rows, cols, HEADS * VALUES, VALUES, end)


# --- launches ---


def tiles(x):
    """(columns of the state, columns of V, chunks that are loaded ahead, rows of a block of the inverse) of a program.

    They depend on the chip's shared memory and the width of a number. The products of an inverse by blocks spill
    registers on RTX 30 and A100.
    """
    shared = _launch.shared_bytes(x.device.index)
    if shared >= 200 << 10:
        return (32, 64, 3, CHUNK // 4) if x.itemsize == 2 else (16, 32, 1, CHUNK // 4)
    return (32, 32, 1, CHUNK) if shared >= 96 << 10 else (16, 16, 1, CHUNK)


def chunks_of(cu_seqlens, B, T, chunk):
    """(most chunks there can be, first chunk of each document, document of each chunk), without waiting for the GPU."""
    if cu_seqlens is None:
        return B * cdiv(T, chunk), None, None
    counts = (cu_seqlens[1:] - cu_seqlens[:-1] + (chunk - 1)) // chunk
    ends = counts.cumsum(0)
    most = T // chunk + counts.numel()
    numbers = torch.arange(most, device=ends.device)
    documents = torch.searchsorted(ends, numbers, right=True).clamp_(max=counts.numel() - 1)
    return most, (ends - counts).int(), documents.int()


def rows_of(x):
    """x (B, T, heads, D) with all heads of a token in one piece, and the tokens of all rows at one distance."""
    B, T, heads, D = x.shape
    fits = x.stride(3) == 1 and (heads == 1 or x.stride(2) == D) and (B == 1 or x.stride(0) == T * x.stride(1))
    # `contiguous` would return x itself if T is 1, whatever the distance of its tokens.
    return x if fits or not x.numel() else x.clone(memory_format=torch.contiguous_format)


class Problem:
    """The shapes of a call, and its arguments in the order of the kernels."""

    def __init__(self, q, k, v, cu_seqlens):
        (self.B, self.T, H, self.width), (self.heads, self.values) = k.shape, v.shape[2:]
        self.chunk, self.group = CHUNK, self.heads // H
        self.state_columns, self.columns, self.stages, self.eliminated = tiles(k)
        self.cu = cu_seqlens
        self.chunks, self.offsets, self.documents = chunks_of(cu_seqlens, self.B, self.T, self.chunk)
        self.sequences = self.B if cu_seqlens is None else cu_seqlens.numel() - 1
        self.block = max(next_power_of_2(self.width), 16)
        self.numbers = {"T": self.T, "HEADS": self.heads, "GROUP": self.group}

    def bounds(self, documents=True):
        given = {"CU": self.cu, "OFFSETS": self.offsets}
        return {**given, "DOCUMENTS": self.documents} if documents else given

    def sizes(self, columns):
        block_v = min(max(next_power_of_2(self.values), 16), columns)
        values = {"VALUES": self.values, "CHUNK": self.chunk, "BLOCK": self.block, "BLOCK_V": block_v}
        return {"WIDTH": self.width, **values, "VARLEN": self.cu is not None}

    def per_chunk(self, kernel, x, name, **arguments):
        launch(kernel, (self.chunks, self.heads), x, num_warps=WARPS[name], **arguments)

    def per_sequence(self, kernel, x, name, **arguments):
        grid = (self.heads * cdiv(self.values, arguments["BLOCK_V"]), self.sequences)
        launch(kernel, grid, x, num_warps=WARPS[name], **arguments)


def states(p, k, v, gamma, beta, inverse, state, final):
    """The state before each chunk, and u."""
    s = k.new_empty((p.chunks, p.heads, p.width, p.values))
    u = torch.empty_like(v, memory_format=torch.contiguous_format)
    p.per_sequence(
        states_kernel,
        k,
        "states",
        K=k,
        V=v,
        GAMMA=gamma,
        BETA=beta,
        INVERSE=inverse,
        STATE=state,
        **p.bounds(documents=False),
        S=s,
        U=u,
        FINAL=final,
        **p.numbers,
        stride_k=k.stride(1),
        stride_v=v.stride(1),
        **p.sizes(p.state_columns),
        STAGES=p.stages,
        HAS_STATE=state is not None,
        WANT_FINAL=final is not None,
    )
    return s, u


def gated_delta_rule_fwd(q, k, v, g, beta, state, cu_seqlens, scale, want_final):
    """Launch the forward; returns (o, final state or None, γ, T)."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    g, beta = g.contiguous(), beta.contiguous()
    state = None if state is None else state.contiguous()
    p = Problem(q, k, v, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    gamma = g.new_empty(g.shape, dtype=torch.float32)
    inverse = k.new_empty((p.chunks, p.heads, p.chunk, p.chunk))
    final = k.new_empty((p.sequences, p.heads, p.width, p.values), dtype=torch.float32) if want_final else None
    if not v.numel():
        return o, (final.zero_() if state is None else final.copy_(state)) if want_final else None, gamma, inverse
    sizes = p.sizes(p.columns)
    narrow = {name: sizes[name] for name in ("WIDTH", "CHUNK", "BLOCK", "VARLEN")}
    shared = {**p.bounds(), **p.numbers, "stride_k": k.stride(1), **narrow}
    given = {"K": k, "G": g, "BETA": beta, "GAMMA": gamma, "INVERSE": inverse}
    p.per_chunk(prepare_kernel, k, "prepare", **given, **shared, ELIMINATED=p.eliminated)
    s, u = states(p, k, v, gamma, beta, inverse, state, final)
    strides = {"stride_q": q.stride(1), "stride_k": k.stride(1), "scale": float(scale)}
    p.per_chunk(
        outputs_kernel,
        k,
        "outputs",
        Q=q,
        K=k,
        GAMMA=gamma,
        S=s,
        U=u,
        **p.bounds(),
        O=o,
        **p.numbers,
        **strides,
        **sizes,
    )
    return o, final, gamma, inverse
