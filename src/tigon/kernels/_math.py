"""Device functions that several kernels use: tanh, which Triton's libdevice lacks on some targets, and magnitudes.

An FP8 product needs the largest magnitude of each factor, of which kernels/fp8.py would read the factor once more. A
kernel that writes the factor can find it. Each program takes the maximum of its part into one of 512 numbers, which are
0 before. It is the integer maximum of bits, as in kernels/fp8.py, so the order of the programs does not matter.
"""

import triton
import triton.language as tl
from triton import knobs

# Whether kernels run as Python on the CPU (TRITON_INTERPRET=1). Some operations round differently there, or fail.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def tanh(x):
    """(tanh x, its derivative) in fp32, from e = exp(-2|x|).

    (1 - e) / (1 + e) cancels near 0: its error of 6e-8 is not small relative to x. There the odd Taylor polynomial to
    x^9 has a relative error of at most 5e-8. The derivative is 4e / (1 + e)^2, because 1 - tanh^2 cancels when tanh
    saturates.
    """
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = x * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * 0.0218694885))))
    t = tl.where(s < 0.0625, small, tl.where(x < 0.0, -large, large))
    return t, 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def magnitude_bits(x):
    """The bits of |x| in fp32, as int32: they grow with |x|, and NaN is above infinity. x: as it is stored."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def take_amax(AMAX, bits, PARTS: tl.constexpr):
    """Let one of the PARTS numbers at AMAX (int32) be at least the largest of the `magnitude_bits` of a tile."""
    tl.atomic_max(AMAX + tl.program_id(0) % PARTS, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
