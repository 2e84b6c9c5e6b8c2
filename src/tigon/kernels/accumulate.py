"""Additions to a gradient that exists: of a scaled tensor, and of the rows of an embedding that occur.

    grad += scale · x                                (x fp32 or of the gradient's dtype)
    grad[id] += Σ_{i: ids_i = id} dy_i               (each row of grad once)

The sums are fp32, and each element of the gradient is rounded once. The order of the sums is fixed, so that two runs
give the same bits.
"""

import torch
import triton
import triton.language as tl

from tigon.kernels._launch import cdiv, launch, next_power_of_2

# N tokens, H hidden.
# (elements, warps) of a program. 16 elements per thread: two loads of 16 bytes in bf16, four in fp32.
SCALED = (4096, 8)
# (rows at a time, columns, warps) of a program. A program sums at most CHUNK rows, so that a token at many places is
# summed by many programs. On an H100 a program that summed 16 rows of 256 columns at a time, to the token's last place,
# took 0.46 ms for 8192 tokens with the frequencies of text and 1.73 ms for one token at all places.
ROWS = (4, 1024, 4)
CHUNK = 32
# (columns, warps) of a program that adds up the sums of one token.
PARTS = (512, 2)


@triton.jit
def add_scaled_kernel(X, Scale, Grad, N, BLOCK: tl.constexpr):
    """Grad += Scale · X. Triton contracts the product and the sum to one fma, as PyTorch's addcmul is compiled."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(X + offs, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(Grad + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(Grad + offs, (grad + x * tl.load(Scale).to(tl.float32)).to(Grad.dtype.element_ty), mask=mask)


@triton.jit
def add_rows_kernel(
    DY,  # (N, H)
    Order,  # (N,)
    Ids,  # (N,), sorted
    Part,  # (2 · chunks, H) fp32
    Grad,  # (V, H)
    N,
    H,
    stride_dy,
    stride_grad,
    padding,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grad[id] += the sum of the rows DY[Order[i]] with Ids[i] = id; Ids is sorted, and `padding` gets nothing.

    One program per position and block of columns. A program works at the first position of an id and at the first of
    each chunk. If the id has places in several chunks, the sums go to Part (2 · chunks, H), fp32: the even rows hold
    those that begin a chunk.
    """
    first = tl.program_id(0)
    id = tl.load(Ids + first)
    before = tl.load(Ids + first - 1, mask=first > 0, other=-1)
    begins = first % CHUNK == 0
    if ((id != before) | begins) & (id != padding):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        chunk = first // CHUNK
        stop = tl.minimum((chunk + 1) * CHUNK, N)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        start = first
        more = True
        while more:
            places = start + tl.arange(0, ROWS)
            same = tl.load(Ids + places, mask=places < stop, other=-1) == id
            rows = tl.load(Order + places, mask=same, other=0).to(tl.int64)
            dy = tl.load(
                DY + rows[:, None] * stride_dy + cols[None, :], mask=same[:, None] & (cols < H)[None, :], other=0.0
            )
            total += tl.sum(dy.to(tl.float32), axis=0)
            start += ROWS
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
        after = tl.load(Ids + stop, mask=stop < N, other=-1)
        if (id == before) | (id == after):
            row = (2 * chunk + tl.where(begins, 0, 1)).to(tl.int64)
            tl.store(Part + row * H + cols, total, mask=cols < H)
        else:
            to = Grad + id.to(tl.int64) * stride_grad + cols
            grad = tl.load(to, mask=cols < H, other=0.0).to(tl.float32)
            tl.store(to, (grad + total).to(Grad.dtype.element_ty), mask=cols < H)


@triton.jit
def add_parts_kernel(
    Part,  # (2 · chunks, H) fp32
    Ids,  # (N,), sorted
    Grad,  # (V, H)
    N,
    H,
    stride_grad,
    padding,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grad[id] += the sums of Part of an id with places in several chunks, in the order of the chunks.

    One program per chunk and block of columns. The program works whose chunk is the first that an id goes on into.
    """
    chunk = tl.program_id(0) + 1
    id = tl.load(Ids + chunk * CHUNK)
    goes_on = tl.load(Ids + chunk * CHUNK - 1) == id
    began = tl.load(Ids + (chunk - 1) * CHUNK)
    earlier = tl.load(Ids + (chunk - 1) * CHUNK - 1, mask=chunk > 1, other=-1)
    if goes_on & (earlier != id) & (id != padding):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = (2 * (chunk - 1) + tl.where(began == id, 0, 1)).to(tl.int64)
        total = tl.load(Part + row * H + cols, mask=cols < H, other=0.0)
        more = True
        while more:
            total += tl.load(Part + (2 * chunk).to(tl.int64) * H + cols, mask=cols < H, other=0.0)
            chunk += 1
            more = tl.load(Ids + chunk * CHUNK, mask=chunk * CHUNK < N, other=-1) == id
        to = Grad + id.to(tl.int64) * stride_grad + cols
        grad = tl.load(to, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(to, (grad + total).to(Grad.dtype.element_ty), mask=cols < H)


def add_scaled_(grad, x, scale):
    """grad += scale · x, both contiguous and of one shape; `scale` is 0-dim."""
    if n := grad.numel():
        block, warps = SCALED
        launch(
            add_scaled_kernel,
            (cdiv(n, block),),
            grad,
            X=x,
            Scale=scale,
            Grad=grad,
            N=n,
            BLOCK=block,
            num_warps=warps,
        )


def add_rows_(grad_VH, dy_NH, ids_N, padding):
    """grad[id] += the sum of dy's rows at id's places, for every id but `padding`; ids are not negative."""
    (N, H), (rows, block, warps) = dy_NH.shape, ROWS
    if not N or not H:
        return
    dy_NH = dy_NH if dy_NH.stride(1) == 1 else dy_NH.contiguous()
    # A 32-bit key halves the passes of the sort.
    ids_N, order_N = (ids_N.int() if grad_VH.shape[0] < 1 << 31 else ids_N).sort(stable=True)
    block = min(block, next_power_of_2(H))
    chunks = cdiv(N, CHUNK)
    part = dy_NH.new_empty((2 * chunks if chunks > 1 else 0, H), dtype=torch.float32)
    launch(
        add_rows_kernel,
        (N, cdiv(H, block)),
        grad_VH,
        DY=dy_NH,
        Order=order_N,
        Ids=ids_N,
        Part=part,
        Grad=grad_VH,
        N=N,
        H=H,
        stride_dy=dy_NH.stride(0),
        stride_grad=grad_VH.stride(0),
        padding=padding,
        ROWS=rows,
        CHUNK=CHUNK,
        BLOCK=block,
        num_warps=warps,
    )
    if chunks > 1:
        block, warps = PARTS
        block = min(block, next_power_of_2(H))
        launch(
            add_parts_kernel,
            (chunks - 1, cdiv(H, block)),
            grad_VH,
            Part=part,
            Ids=ids_N,
            Grad=grad_VH,
            N=N,
            H=H,
            stride_grad=grad_VH.stride(0),
            padding=padding,
            CHUNK=CHUNK,
            BLOCK=block,
            num_warps=warps,
        )
