"""Additions to a gradient that exists: of a scaled tensor, and of the rows of an embedding that occur.

    grad += scale · x                                (x fp32 or of the gradient's dtype)
    grad[id] += Σ_{i: ids_i = id} dy_i               (each row of grad once)

The sums are fp32, and each element of the gradient is rounded once. The order of the sums is fixed, so that two runs
give the same bits.
"""

import triton
import triton.language as tl

from tigon.kernels import _device
from tigon.kernels._launch import launch

# N tokens, H hidden.
# (elements, warps) of a program. 16 elements per thread: two loads of 16 bytes in bf16, four in fp32.
SCALED = (4096, 8)
# (rows at a time, columns, warps) of a program. All positions of a frequent token are summed by one program per column
# block. 16 rows at a time keep as many loads in flight, so that a token at a twelfth of 8192 places takes 43 turns.
ROWS = (16, 256, 4)


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
    DY, Order, Ids, Grad, N, H, stride_dy, stride_grad, padding, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grad[id] += the sum of the rows DY[Order[i]] with Ids[i] = id; Ids is sorted, and `padding` gets nothing.

    One program per position and block of columns. Only the program of an id's first position works.
    """
    first = tl.program_id(0)
    id = tl.load(Ids + first)
    before = tl.load(Ids + first - 1, mask=first > 0, other=-1)
    if (id != before) & (id != padding):
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        start = first
        more = True
        while more:
            places = start + tl.arange(0, ROWS)
            same = tl.load(Ids + places, mask=places < N, other=-1) == id
            rows = tl.load(Order + places, mask=same, other=0).to(tl.int64)
            dy = tl.load(
                DY + rows[:, None] * stride_dy + cols[None, :], mask=same[:, None] & (cols < H)[None, :], other=0.0
            )
            total += tl.sum(dy.to(tl.float32), axis=0)
            start += ROWS
            more = tl.sum(same.to(tl.int32), axis=0) == ROWS
        to = Grad + id.to(tl.int64) * stride_grad + cols
        grad = tl.load(to, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(to, (grad + total).to(Grad.dtype.element_ty), mask=cols < H)


def add_scaled_(grad, x, scale):
    """grad += scale · x, both contiguous and of one shape; `scale` is 0-dim."""
    if n := grad.numel():
        block, warps = SCALED
        launch(
            add_scaled_kernel, (_device.cdiv(n, block),), grad,
            X=x, Scale=scale, Grad=grad, N=n, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def add_rows_(grad_VH, dy_NH, ids_N, padding):
    """grad[id] += the sum of dy's rows at id's places, for every id but `padding`; ids are not negative."""
    (N, H), (rows, block, warps) = dy_NH.shape, ROWS
    if not N or not H:
        return
    dy_NH = dy_NH if dy_NH.stride(1) == 1 else dy_NH.contiguous()
    # A 32-bit key halves the passes of the sort.
    ids_N, order_N = (ids_N.int() if grad_VH.shape[0] < 1 << 31 else ids_N).sort(stable=True)
    block = min(block, _device.next_power_of_2(H))
    launch(
        add_rows_kernel, (N, _device.cdiv(H, block)), grad_VH,
        DY=dy_NH, Order=order_N, Ids=ids_N, Grad=grad_VH, N=N, H=H, stride_dy=dy_NH.stride(0),
        stride_grad=grad_VH.stride(0), padding=padding, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
