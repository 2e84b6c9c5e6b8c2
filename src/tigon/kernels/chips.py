"""GPU architectures, the measurements that their launch settings come from, and the settings that only some chips have.

The tiles of the norms, the gated units, rope and cross entropy are the same on all chips. They are chosen by width and
were tuned on an H200. They shrink if shared memory or a workgroup's threads do not suffice (kernels/_launch.py). A chip
that was not measured uses the same tiles, and its `measured` says so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class LogitsTile:
    """The tile of the matrix product that writes exponentials (kernels/linear_cross_entropy.py)."""

    tokens: int
    vocab: int
    hidden: int
    warps: int
    stages: int
    group_bytes: int
    """Bytes of hidden states that stay in L2 while the product reads the weight."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU architecture. `arch` is CUDA's compute capability or AMD's gfx name."""

    names: str
    arch: tuple[int, int] | str
    measured: str = NOT_MEASURED
    """GPU, versions and date of the measurements that chose this chip's settings."""
    logits_tile: LogitsTile | None = None
    """None: cuBLAS or hipBLAS computes the logits, and a second pass reads them. A chip gets a tile only if it has
    tensor descriptors (TMA) and Triton's product was measured to be as fast as the vendor's on it."""
    spills: frozenset[str] = frozenset()
    """Ops whose kernels spill registers on it, so that their path in PyTorch runs."""
    wide_expert_tiles: bool = False
    """Whether products of experts take tiles of 128 x 256 elements instead of 128 x 128: 1.2 to 1.5 times as fast on an
    H200. Triton spills registers with them for 8.0 and 10.0."""

    @property
    def casts_to_fp8(self) -> bool:
        """Whether it has instructions for OCP FP8 and FP8 tensor cores that tigon uses: NVIDIA's from Ada (8.9) on."""
        return isinstance(self.arch, tuple) and self.arch >= (8, 9)


_DELTA_RULE = frozenset({"gated_delta_rule"})  # 0.9 to 34 KiB per thread on sm_75, 16 to 293 registers on AMD's chips
CHIPS = (
    Chip(names="RTX 20, T4", arch=(7, 5), spills=_DELTA_RULE),
    Chip(names="A100", arch=(8, 0)),
    Chip(names="RTX 30", arch=(8, 6)),
    Chip(names="RTX 40, L4, L40S", arch=(8, 9)),
    Chip(
        names="H100, H200, GH200",
        arch=(9, 0),
        measured="H200, torch 2.11+cu130, triton 3.6, 2026-11-21; H100 not measured",
        logits_tile=LogitsTile(tokens=128, vocab=256, hidden=64, warps=8, stages=4, group_bytes=24 << 20),
        wide_expert_tiles=True,
    ),
    Chip(names="B200, GB200", arch=(10, 0)),
    Chip(names="RTX 50, RTX PRO 6000", arch=(12, 0)),
    Chip(names="MI210, MI250X", arch="gfx90a", spills=_DELTA_RULE),
    Chip(names="MI300X, MI325X", arch="gfx942", spills=_DELTA_RULE),
    Chip(names="MI350X, MI355X", arch="gfx950", spills=_DELTA_RULE),
    Chip(names="RX 7900, PRO W7900", arch="gfx1100", spills=_DELTA_RULE),
    Chip(names="Ryzen AI Max", arch="gfx1151", spills=_DELTA_RULE),
    Chip(names="RX 9070, AI PRO R9700", arch="gfx1201", spills=_DELTA_RULE),
)
_INTERPRETER = Chip(
    names="Triton's interpreter",
    arch="",
    logits_tile=LogitsTile(tokens=16, vocab=64, hidden=16, warps=4, stages=1, group_bytes=1024),
)


@functools.cache
def chip(index: int | None) -> Chip | None:
    """The `Chip` of a CUDA device, or None if the table lacks it. `index` None means the interpreter on the CPU."""
    if index is None:
        return _INTERPRETER
    if torch.version.hip:
        arch: tuple[int, int] | str = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    else:
        arch = torch.cuda.get_device_capability(index)
    return chip_of_arch(arch)


def chip_of_arch(arch: tuple[int, int] | str) -> Chip | None:
    """The `Chip` of a compute capability or gfx name, or None if the table lacks it."""
    return next((row for row in CHIPS if row.arch == arch), None)
