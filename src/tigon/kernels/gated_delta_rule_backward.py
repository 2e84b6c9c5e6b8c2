"""The backward of the chunked gated delta rule. `gated_delta_rule.py` has its formulas and the forward."""

import torch
import triton
import triton.language as tl

from tigon.kernels.gated_delta_rule import (
    Problem,
    decay,
    place_of,
    product,
    rows_of,
    sequence_of,
    states,
    store,
    sums_of,
    tile,
)


@triton.jit
def du_kernel(
    DO,  # (tokens, HEADS, VALUES)
    Q,  # (tokens, H, WIDTH)
    K,  # (tokens, H, WIDTH)
    GAMMA,  # (tokens, HEADS) fp32
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    DOCUMENTS,  # (chunks,) or None
    DU,  # (tokens, HEADS, VALUES): the part of du that needs no state
    T,
    HEADS,
    GROUP,
    stride_do,
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
        a = (product(k, tl.trans(q)) * decay(gamma, CHUNK, True) * scale).to(K.dtype.element_ty)
        for v in tl.static_range(0, VALUES, BLOCK_V):
            cols = v + tl.arange(0, BLOCK_V)
            du = product(a, tile(DO + head * VALUES, rows, cols, stride_do, VALUES, end))
            store(DU + head * VALUES, du, rows, cols, HEADS * VALUES, VALUES, end)


@triton.jit
def state_gradients_kernel(
    DO,  # (tokens, HEADS, VALUES)
    DFINAL,  # (N, HEADS, WIDTH, VALUES) or None
    Q,  # (tokens, H, WIDTH)
    K,  # (tokens, H, WIDTH)
    GAMMA,  # (tokens, HEADS) fp32
    BETA,  # (tokens, HEADS)
    INVERSE,  # (chunks, HEADS, CHUNK, CHUNK)
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    DU,  # (tokens, HEADS, VALUES): in: the part of du that needs no state; out: dr
    DS,  # (chunks, HEADS, WIDTH, VALUES): the gradient of the state after each chunk
    DSTATE,  # (N, HEADS, WIDTH, VALUES) or None
    T,
    HEADS,
    GROUP,
    stride_do,
    stride_q,
    stride_k,
    scale,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VARLEN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    WANT_DSTATE: tl.constexpr,
):
    n = tl.program_id(1)
    head = tl.program_id(0) // tl.cdiv(VALUES, BLOCK_V)
    cols = (tl.program_id(0) % tl.cdiv(VALUES, BLOCK_V)) * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end, chunk = sequence_of(CU, OFFSETS, n, T, CHUNK, VARLEN)
    t, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    Q += (head // GROUP) * WIDTH
    K += (head // GROUP) * WIDTH
    DO += head * VALUES
    DU += head * VALUES
    of_sequence = (n.to(tl.int64) * HEADS + head) * WIDTH * VALUES
    ds = tl.zeros([BLOCK, BLOCK_V], dtype=tl.float32)
    if HAS_DFINAL:
        ds += tile(DFINAL + of_sequence, d, cols, VALUES, VALUES, WIDTH).to(tl.float32)
    dtype: tl.constexpr = K.dtype.element_ty
    chunks = tl.cdiv(end - begin, CHUNK)
    for back in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - back
        at = (chunk + i) * HEADS + head
        rows = begin + i * CHUNK + t
        there = rows < end
        store(DS + at * WIDTH * VALUES, ds, d, cols, VALUES, VALUES, WIDTH)
        q = tile(Q, rows, d, stride_q, WIDTH, end)
        k = tile(K, rows, d, stride_k, WIDTH, end)
        do = tile(DO, rows, cols, stride_do, VALUES, end).to(tl.float32)
        x = tile(INVERSE + at * CHUNK * CHUNK, t, t, CHUNK, CHUNK, CHUNK)
        gamma = sums_of(GAMMA, rows, HEADS, head, end)
        last = tl.load(GAMMA + (tl.minimum(begin + (i + 1) * CHUNK, end) - 1) * HEADS + head)
        beta = tl.load(BETA + rows * HEADS + head, mask=there, other=0.0).to(tl.float32)
        rest = tl.where(there, tl.exp(tl.where(there, last - gamma, 0.0)), 0.0)
        du = tile(DU, rows, cols, HEADS * VALUES, VALUES, end).to(tl.float32)
        du += rest[:, None] * product(k, ds.to(dtype))
        dr = product(tl.trans(x), du.to(dtype))
        store(DU, dr, rows, cols, HEADS * VALUES, VALUES, end)
        since = tl.exp(gamma)
        ds = ds * tl.exp(last) + product(tl.trans(q), ((scale * since)[:, None] * do).to(dtype))
        ds -= product(tl.trans(k), ((beta * since)[:, None] * dr).to(dtype))
    if WANT_DSTATE:
        store(DSTATE + of_sequence, ds, d, cols, VALUES, VALUES, WIDTH)


@triton.jit
def outer(A, B, rows, stride_a, stride_b, end, VALUES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr):
    """a · bᵀ, summed over V: (CHUNK, CHUNK)."""
    total = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for v in range(0, VALUES, BLOCK_V):
        cols = v + tl.arange(0, BLOCK_V)
        a = tile(A, rows, cols, stride_a, VALUES, end)
        total += product(a, tl.trans(tile(B, rows, cols, stride_b, VALUES, end)))
    return total


@triton.jit
def by_state(
    A,
    S,
    rows,
    d,
    stride_a,
    end,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """a · sᵀ, summed over V: (CHUNK, BLOCK)."""
    total = tl.zeros([CHUNK, BLOCK], dtype=tl.float32)
    for v in range(0, VALUES, BLOCK_V):
        cols = v + tl.arange(0, BLOCK_V)
        a = tile(A, rows, cols, stride_a, VALUES, end)
        total += product(a, tl.trans(tile(S, d, cols, VALUES, VALUES, WIDTH)))
    return total


@triton.jit
def gradients_kernel(
    DO,  # (tokens, HEADS, VALUES)
    Q,  # (tokens, H, WIDTH)
    K,  # (tokens, H, WIDTH)
    V,  # (tokens, HEADS, VALUES)
    GAMMA,  # (tokens, HEADS) fp32
    BETA,  # (tokens, HEADS)
    S,  # (chunks, HEADS, WIDTH, VALUES)
    U,  # (tokens, HEADS, VALUES)
    DR,  # (tokens, HEADS, VALUES)
    DS,  # (chunks, HEADS, WIDTH, VALUES)
    CU,  # (N + 1,) or None
    OFFSETS,  # (N,) or None
    DOCUMENTS,  # (chunks,) or None
    DQ,  # (tokens, HEADS, WIDTH)
    DK,  # (tokens, HEADS, WIDTH)
    DV,  # (tokens, HEADS, VALUES)
    DG,  # (tokens, HEADS)
    DBETA,  # (tokens, HEADS)
    T,
    HEADS,
    GROUP,
    stride_do,
    stride_q,
    stride_k,
    stride_v,
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
        t = tl.arange(0, CHUNK)
        rows = first + t
        there = rows < end
        gamma = sums_of(GAMMA, rows, HEADS, head, end)
        beta = tl.load(BETA + rows * HEADS + head, mask=there, other=0.0).to(tl.float32)
        last = tl.load(GAMMA + (tl.minimum(first + CHUNK, end) - 1) * HEADS + head)
        since, rest = tl.exp(gamma), tl.where(there, tl.exp(tl.where(there, last - gamma, 0.0)), 0.0)
        stride: tl.constexpr = VALUES
        dense = HEADS * stride
        DO += head * VALUES
        U += head * VALUES
        DR += head * VALUES
        V += head * VALUES
        DV += head * VALUES
        K += (head // GROUP) * WIDTH
        Q += (head // GROUP) * WIDTH
        DQ += head * WIDTH
        DK += head * WIDTH
        at = (c * HEADS + head) * WIDTH * VALUES
        dtype: tl.constexpr = K.dtype.element_ty

        # D ∘ do·uᵀ and D ∘ dL, and both transposed. A token's own term has no decay. It stays out of dγ, where it would
        # cancel all but its rounding.
        before, after = t[:, None] > t[None, :], t[:, None] < t[None, :]
        a = outer(DO, U, rows, stride_do, dense, end, VALUES, CHUNK, BLOCK_V) * decay(gamma, CHUNK, False) * scale
        own = tl.sum(tl.where(t[:, None] == t[None, :], a, 0.0), axis=1)
        of_q = tl.where(before, a, 0.0).to(dtype)
        a = outer(U, DO, rows, dense, stride_do, end, VALUES, CHUNK, BLOCK_V) * decay(gamma, CHUNK, True) * scale
        of_k = tl.where(after, a, 0.0).to(dtype)
        a = outer(DR, U, rows, dense, dense, end, VALUES, CHUNK, BLOCK_V) * decay(gamma, CHUNK, False)
        of_row = tl.where(before, -a, 0.0).to(dtype)
        a = outer(U, DR, rows, dense, dense, end, VALUES, CHUNK, BLOCK_V) * decay(gamma, CHUNK, True) * beta[None, :]
        of_column = tl.where(after, -a, 0.0).to(dtype)

        dgamma = tl.zeros([CHUNK], dtype=tl.float32)
        of_last = tl.zeros([CHUNK], dtype=tl.float32)
        of_beta = tl.zeros([CHUNK], dtype=tl.float32)
        kept = 0.0
        for w in tl.range(0, WIDTH, BLOCK, num_stages=1):
            d = w + tl.arange(0, BLOCK)
            k = tile(K, rows, d, stride_k, WIDTH, end)
            q = tile(Q, rows, d, stride_q, WIDTH, end)
            wide = k.to(tl.float32)
            dq = by_state(DO, S + at, rows, d, stride_do, end, WIDTH, VALUES, CHUNK, BLOCK, BLOCK_V)
            dq = scale * since[:, None] * dq + product(of_q, k)
            dgamma += tl.sum(q.to(tl.float32) * dq, axis=1)
            store(DQ, dq + own[:, None] * wide, rows, d, HEADS * WIDTH, WIDTH, end)
            dk = product(of_k, q) + product(of_column, k)
            dgamma -= tl.sum(wide * dk, axis=1)
            later = by_state(U, DS + at, rows, d, dense, end, WIDTH, VALUES, CHUNK, BLOCK, BLOCK_V)
            later = rest[:, None] * later
            of_last += tl.sum(wide * later, axis=1)
            dk += later + own[:, None] * q.to(tl.float32)
            x = by_state(DR, S + at, rows, d, dense, end, WIDTH, VALUES, CHUNK, BLOCK, BLOCK_V)
            x = product(of_row, k) - since[:, None] * x
            of_beta += tl.sum(wide * x, axis=1)
            store(DK, dk + beta[:, None] * x, rows, d, HEADS * WIDTH, WIDTH, end)
            for v in tl.static_range(0, VALUES, BLOCK_V):
                cols = v + tl.arange(0, BLOCK_V)
                s = tile(S + at, d, cols, VALUES, VALUES, WIDTH).to(tl.float32)
                ds = tile(DS + at, d, cols, VALUES, VALUES, WIDTH).to(tl.float32)
                kept += tl.sum(tl.sum(s * ds, axis=1), axis=0)
        dgamma += beta * of_beta

        for v in tl.static_range(0, VALUES, BLOCK_V):
            cols = v + tl.arange(0, BLOCK_V)
            dr = tile(DR, rows, cols, dense, VALUES, end).to(tl.float32)
            of_beta += tl.sum(dr * tile(V, rows, cols, stride_v, VALUES, end).to(tl.float32), axis=1)
            store(DV, beta[:, None] * dr, rows, cols, dense, VALUES, end)
        tl.store(DBETA + rows * HEADS + head, of_beta.to(DBETA.dtype.element_ty), mask=there)
        # The sum over the tokens before each one, added up without what it would subtract again.
        earlier = tl.sum(tl.where(after, of_last[:, None], 0.0), axis=0)
        dg = tl.cumsum(dgamma, axis=0, reverse=True) + earlier + kept * tl.exp(last)
        tl.store(DG + rows * HEADS + head, dg.to(DG.dtype.element_ty), mask=there)


# --- the launches ---


def gated_delta_rule_bwd(do, dfinal, q, k, v, gamma, beta, inverse, state, cu_seqlens, scale):
    """Launch the backward; returns (dq, dk, dv, dg in fp32, dbeta, dstate or None)."""
    do, q, k, v = rows_of(do), rows_of(q), rows_of(k), rows_of(v)
    beta = beta.contiguous()
    state = None if state is None else state.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    p = Problem(q, k, v, cu_seqlens)
    dq, dk = (k.new_empty((p.B, p.T, p.heads, p.width)) for _ in range(2))
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    dg, dbeta = torch.empty_like(gamma), torch.empty_like(beta)
    dstate = None if state is None else torch.empty_like(state)
    if not v.numel():
        dstate = dstate if dstate is None else (dstate.zero_() if dfinal is None else dstate.copy_(dfinal))
        return torch.zeros_like(q), torch.zeros_like(k), dv, dg.zero_(), dbeta.zero_(), dstate
    s, u = states(p, k, v, gamma, beta, inverse, state, None)
    strides = {"stride_do": do.stride(1), "stride_q": q.stride(1), "stride_k": k.stride(1)}
    sizes, scaled = p.sizes(p.columns), {"scale": float(scale)}
    dr, ds = torch.empty_like(dv), torch.empty_like(s)
    shared = {**p.numbers, **strides}
    p.per_chunk(du_kernel, k, "du", DO=do, Q=q, K=k, GAMMA=gamma, **p.bounds(), DU=dr, **shared, **scaled, **sizes)
    p.per_sequence(
        state_gradients_kernel,
        k,
        "state_gradients",
        DO=do,
        DFINAL=dfinal,
        Q=q,
        K=k,
        GAMMA=gamma,
        BETA=beta,
        INVERSE=inverse,
        **p.bounds(documents=False),
        DU=dr,
        DS=ds,
        DSTATE=dstate,
        **shared,
        **scaled,
        **p.sizes(p.state_columns),
        STAGES=p.stages,
        HAS_DFINAL=dfinal is not None,
        WANT_DSTATE=dstate is not None,
    )
    # All 128 columns of K at once would spill registers.
    p.per_chunk(
        gradients_kernel,
        k,
        "gradients",
        DO=do,
        Q=q,
        K=k,
        V=v,
        GAMMA=gamma,
        BETA=beta,
        S=s,
        U=u,
        DR=dr,
        DS=ds,
        **p.bounds(),
        DQ=dq,
        DK=dk,
        DV=dv,
        DG=dg,
        DBETA=dbeta,
        **shared,
        stride_v=v.stride(1),
        **scaled,
        **{**sizes, "BLOCK": min(p.block, p.columns)},
    )
    if p.group > 1:
        dq, dk = (x.unflatten(2, (-1, p.group)).sum(3) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dstate
