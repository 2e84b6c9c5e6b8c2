"""Quantises weights to Q4_K and Q6_K, the types of `q4_k_m`. The package `gguf` reads both and writes neither.

A superblock is 256 weights of a row. Q4_K divides it into 8 blocks with a scale and an offset of 6 bits each, Q6_K into
16 blocks with a scale of 8 bits. Two fp16 numbers, or one, multiply the scales of a superblock. The scale of a block is
fitted by least squares to the codes of a few step sizes. The weights of the fit favour large values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

SUPERBLOCK = 256
_CHUNK = 2**9  # superblocks at a time, so that their arrays stay in the cache
_STEPS_4, _STEPS_6 = (13.5, 14.25, 15.0, 15.75), (30.5, 31.25, 32.0, 32.75)
"""Steps between a block's ends, for the codes from which its scale is fitted."""

# N superblocks, B blocks of a superblock, E elements of a block.
_Array = np.ndarray[Any, np.dtype[Any]]


def quantize(values: _Array, name: str) -> _Array:
    """The bytes of a weight in a GGUF file.

    Args:
        values: (..., columns) in fp32. Columns are a multiple of `SUPERBLOCK`.
        name: A key of `QUANTISERS`.

    Returns:
        (..., bytes of a row), uint8.
    """
    blocks = values.reshape(-1, SUPERBLOCK)

    def packed(start: int) -> _Array:
        with np.errstate(all="ignore"):  # a block of zeros divides by 0, and a value too large for fp16 becomes inf
            return QUANTISERS[name](blocks[start : start + _CHUNK])

    with ThreadPoolExecutor() as pool:  # NumPy computes without Python's lock
        return np.concatenate([*pool.map(packed, range(0, len(blocks), _CHUNK))]).reshape(*values.shape[:-1], -1)


def _q4_k(x_N: _Array) -> _Array:
    x = x_N.reshape(-1, 8, 32)
    scale, offset = _fit_affine(x)
    d, scales = _shared(scale, 63)
    d_offset, offsets = _shared(offset, 63)
    step, low = d * scales, d_offset * offsets
    codes = _codes((x + low[..., None]) / step[..., None], 0, 15)
    return pack_q4_k(d, d_offset, scales, offsets, codes)


def _q6_k(x_N: _Array) -> _Array:
    x = x_N.reshape(-1, 16, 16)
    scale = _fit_scale(x)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(-1)[:, None], -1)
    d = (largest / -128).astype(np.float16).astype(np.float32)
    scales = _codes(scale / d, -128, 127)
    return pack_q6_k(d, scales, _codes(x / (d * scales)[..., None], -32, 31))


QUANTISERS: Mapping[str, Callable[[_Array], _Array]] = {"Q4_K": _q4_k, "Q6_K": _q6_k}
"""gguf's name of a type -> superblocks (N, 256) as bytes (N, bytes of a superblock)."""


def _codes(exact: _Array, lowest: int, highest: int) -> _Array:
    """The nearest integers; 0 for a division by 0."""
    codes: _Array = np.clip(np.rint(np.where(np.isfinite(exact), exact, 0)), lowest, highest).astype(np.float32)
    return codes


def _shared(values_NB: _Array, highest: int) -> tuple[_Array, _Array]:
    """A factor (N, 1) that fp16 holds, and integers (N, B) whose products with it are near to values of at least 0."""
    factor = (values_NB.max(-1, keepdims=True) / highest).astype(np.float16).astype(np.float32)
    return factor, _codes(values_NB / factor, 0, highest)


def _fit_affine(x: _Array) -> tuple[_Array, _Array]:
    """Scale and offset (N, B), both at least 0, with which scale x code - offset is near to x."""
    w = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low = np.minimum(x.min(-1, keepdims=True), 0)
    span = x.max(-1, keepdims=True) - low
    best_scale, best_offset = span[..., 0] / 15, -low[..., 0]
    best = np.full_like(best_scale, np.inf)
    sum_w, sum_x = w.sum(-1), (w * x).sum(-1)
    for steps in _STEPS_4:
        q = _codes((x - low) / span * steps, 0, 15)
        sum_q, sum_qq, sum_qx = (w * q).sum(-1), (w * q * q).sum(-1), (w * q * x).sum(-1)
        scale = (sum_w * sum_qx - sum_q * sum_x) / (sum_w * sum_qq - sum_q**2)
        offset = (sum_q * scale - sum_x) / sum_w
        scale, offset = np.where(offset < 0, sum_qx / sum_qq, scale), np.maximum(offset, 0)
        error = (w * (scale[..., None] * q - offset[..., None] - x) ** 2).sum(-1)
        better = (error < best) & (scale > 0)
        best, best_scale, best_offset = (
            np.where(better, new, old) for new, old in ((error, best), (scale, best_scale), (offset, best_offset))
        )
    return best_scale, best_offset


def _fit_scale(x: _Array) -> _Array:
    """The scale (N, B), of either sign, with which scale x code is near to x."""
    w = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best_scale, best = np.zeros_like(x[..., 0]), np.full_like(x[..., 0], np.inf)
    for steps in _STEPS_6:
        q = _codes(x / largest * -steps, -32, 31)
        scale = (w * q * x).sum(-1) / (w * q * q).sum(-1)
        error = (w * (scale[..., None] * q - x) ** 2).sum(-1)
        better = error < best
        best, best_scale = np.where(better, error, best), np.where(better, scale, best_scale)
    return best_scale


def pack_q4_k(d: _Array, d_offset: _Array, scales: _Array, offsets: _Array, codes: _Array) -> _Array:
    """Superblocks whose weights are d x scales x codes - d_offset x offsets.

    Args:
        d: (N, 1).
        d_offset: (N, 1).
        scales: (N, 8), integers from 0 to 63.
        offsets: Those of `scales`.
        codes: (N, 8, 32), integers from 0 to 15.
    """
    s, m = scales.astype(np.uint8), offsets.astype(np.uint8)
    nibbles = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    return np.concatenate(
        [
            _as_bytes(d),
            _as_bytes(d_offset),
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | m[:, 4:] << 4,
            (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128),
        ],
        axis=-1,
    )


def pack_q6_k(d: _Array, scales: _Array, codes: _Array) -> _Array:
    """Superblocks whose weights are d x scales x codes.

    Args:
        d: (N, 1).
        scales: (N, 16), integers from -128 to 127.
        codes: (N, 16, 16), integers from -32 to 31.
    """
    q = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # two halves of four runs
    low, high = q & 15, q >> 4
    low_bits = low[:, :, :2] | low[:, :, 2:] << 4
    high_bits = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        [
            low_bits.reshape(-1, 128),
            high_bits.reshape(-1, 64),
            scales.astype(np.int8).view(np.uint8),
            _as_bytes(d),
        ],
        axis=-1,
    )


def _as_bytes(d: _Array) -> _Array:
    return d.astype(np.float16).view(np.uint8)
