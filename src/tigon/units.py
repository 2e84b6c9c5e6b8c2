"""Formats bytes, FLOP/s, times and prediction errors for readers."""

from __future__ import annotations


def in_bytes(nbytes: float) -> str:
    """Format a size in the largest unit whose value is at least 1."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:,.{digits}f} {unit}"
    return f"{nbytes / 1024:,.1f} KiB" if abs(nbytes) >= 1024 else f"{nbytes:.0f} B" if nbytes else "0"


def in_flops(flops_per_s: float) -> str:
    """Format a rate in TFLOP/s if it is at least 1 TFLOP/s, otherwise in GFLOP/s; "" for 0."""
    if not flops_per_s:
        return ""
    return f"{flops_per_s / 1e12:,.1f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def in_ms(time_ms: float) -> str:
    """Format a time in milliseconds, or in seconds if it is at least 1 s, with three digits or more."""
    if time_ms >= 1000:
        return f"{time_ms / 1000:,.2f} s"
    return f"{time_ms:.3g} ms" if time_ms < 100 else f"{time_ms:.0f} ms"


def in_parameters(n: int) -> str:
    """Format a number of parameters, in millions from 100,000 on."""
    return f"{n / 1e6:,.1f} M parameters" if n >= 100_000 else f"{n:,} parameters"


def off_by(predicted: float, measured: float) -> str:
    """Format the error of a prediction relative to the measurement, such as +1.5%; "" if that is 0."""
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def in_clock(seconds: float) -> str:
    """Format as minutes:seconds, or hours:minutes:seconds from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
