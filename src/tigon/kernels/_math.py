"""Device functions that Triton's libdevice lacks on some targets, written so that every target can run them."""

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
