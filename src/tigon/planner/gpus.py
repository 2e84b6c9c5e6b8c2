"""The known GPUs: usable memory and speed of each.

The H200's rates were measured with a large bf16 matmul and a device copy (8192³ matmul of random data, torch 2.11,
driver 580). It reached 0.69 of its data sheet's tensor rate and 0.89 of its bandwidth. The rates of the other GPUs are
their data sheets' rates times these shares.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tigon.errors import UsageError

GIB = 1 << 30
MIB = 1 << 20
_TERA, _GIGA = 10**12, 10**9

_MATMUL_SHARE = 687 / 989
_COPY_SHARE = 4274 / 4800


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int
    """The device's total memory as CUDA reports it, including the CUDA context."""
    context_bytes: int
    """The CUDA context with the kernels of a training run loaded, outside the caching allocator
    (engines/non_allocator_memory.py)."""
    lone_group_bytes: int
    """NCCL's memory for a group of one process."""
    group_bytes: int
    """NCCL's memory for a group of several processes."""
    deepspeed_bytes: int
    """DeepSpeed's own streams and kernels, in addition to NCCL."""
    matmul_flops: float
    """16-bit matmuls with fp32 accumulation, FLOP/s."""
    fp32_flops: float
    """fp32 matmuls with torch's default settings (no TF32), FLOP/s."""
    copy_bytes_s: float
    """Device memory bandwidth, reads plus writes."""
    link_bytes_s: float
    """To and from pinned host memory, one direction."""
    peer_bytes_s: float
    """To the other GPUs, one direction."""
    arch: tuple[int, int]
    """CUDA's compute capability; (0, 0) on AMD."""
    sm_count: int
    cublas_workspace_bytes: int
    """PyTorch allocates this once per cuBLAS handle and stream."""
    source: str
    host_copies_bytes: int = 208 * MIB
    """What a process without an engine holds beside the context if activations or frozen layers wait on the host
    (engines/non_allocator_memory.py)."""
    host_s: float = 3e-6
    """CPU time of an operator with its autograd, in eager PyTorch, on the hosts of this GPU that were measured.

    3e-6 was fitted to a CPU-bound run on an H200's host (`roofline.py`), and is assumed for the other GPUs."""
    engine_s: float = 3e-6
    """CPU time of one of the operators in which the host time of FSDP2 and DeepSpeed is counted (`engines`).

    Most of it is Python, so it does not grow by the same factor as `host_s` from host to host. The counts are those of
    H200s' hosts. On H100s' hosts FSDP2 and ZeRO-2 took 5.7 and 5.3 us each, in CPU-bound runs beside DDP
    (benchmarks/results/nvidia-h100/several-gpus/several-cards.json)."""

    def __str__(self) -> str:
        return self.name

    @property
    def has_fp8(self) -> bool:
        """Whether tigon uses its FP8 matmuls: NVIDIA's from Ada (8.9) on."""
        return self.arch >= (8, 9)

    @property
    def fp8_flops(self) -> float:
        """FP8 matmuls with fp32 accumulation, FLOP/s.

        Predicted, not measured: the data sheets' dense rate is twice the 16-bit rate on every GPU that has FP8, and the
        same share of it is assumed. FP8 matmuls of Llama-3.1-8B with other kernels reached 1.06 times this on an H200.
        """
        return 2 * self.matmul_flops

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 matrices: NVIDIA's from Ampere (8.0) on, and AMD's of this table."""
        return self.arch == (0, 0) or self.arch >= (8, 0)


def _gpu(
    name: str,
    memory_gib: float,
    tensor_tflops: float,
    fp32_tflops: float,
    bandwidth_gbs: float,
    *,
    arch: tuple[int, int],
    sm_count: int,
    link_gbs: float,
    peer_gbs: float,
) -> Gpu:
    """A GPU from its data sheet: dense 16-bit tensor rate, fp32 rate, bandwidth; in the data sheet's decimal units."""
    return Gpu(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        # Measured on the H200; assumed for the other GPUs.
        context_bytes=768 * MIB,
        lone_group_bytes=560 * MIB,
        group_bytes=848 * MIB,
        deepspeed_bytes=432 * MIB,
        matmul_flops=tensor_tflops * _TERA * _MATMUL_SHARE,
        fp32_flops=fp32_tflops * _TERA * _MATMUL_SHARE,
        copy_bytes_s=bandwidth_gbs * _GIGA * _COPY_SHARE,
        link_bytes_s=link_gbs * _GIGA,
        peer_bytes_s=peer_gbs * _GIGA,
        arch=arch,
        sm_count=sm_count,
        # torch 2.x, CUDABlas: `:4096:8:16:8` KiB before Hopper, 32 MiB from Hopper on
        cublas_workspace_bytes=32 * MIB if arch >= (9, 0) else 8_519_680,
        source="data sheet, scaled by the H200's measured share",
    )


_ROWS = (
    replace(
        _gpu("h200", 139.8, 989, 67, 4800, arch=(9, 0), sm_count=132, link_gbs=50, peer_gbs=370),
        source="matmul and copy rates measured; memory as CUDA reports it",
    ),
    # CPU-bound steps on three hosts of H100s took 7.9 to 11.5 us per operator (docs/planner-method.md).
    replace(
        _gpu("h100", 79.1, 989, 67, 3350, arch=(9, 0), sm_count=132, link_gbs=50, peer_gbs=370),
        host_s=9e-6,
        engine_s=5.5e-6,
    ),
    _gpu("h100-pcie", 79.1, 756, 51, 2000, arch=(9, 0), sm_count=114, link_gbs=50, peer_gbs=50),
    _gpu("b200", 178.4, 2250, 75, 8000, arch=(10, 0), sm_count=148, link_gbs=50, peer_gbs=750),
    _gpu("a100-80gb", 79.1, 312, 19.5, 2039, arch=(8, 0), sm_count=108, link_gbs=24, peer_gbs=250),
    _gpu("a100-40gb", 39.4, 312, 19.5, 1555, arch=(8, 0), sm_count=108, link_gbs=24, peer_gbs=250),
    _gpu("l40s", 44.4, 362, 91.6, 864, arch=(8, 9), sm_count=142, link_gbs=24, peer_gbs=24),
    _gpu("rtx-6000-ada", 47.4, 364, 91.1, 960, arch=(8, 9), sm_count=142, link_gbs=24, peer_gbs=24),
    _gpu("a6000", 47.4, 155, 38.7, 768, arch=(8, 6), sm_count=84, link_gbs=24, peer_gbs=24),
    _gpu("rtx-5090", 31.4, 209.5, 104.8, 1792, arch=(12, 0), sm_count=170, link_gbs=50, peer_gbs=50),
    _gpu("rtx-4090", 23.5, 165.2, 82.6, 1008, arch=(8, 9), sm_count=128, link_gbs=24, peer_gbs=24),
    # GeForce: NVIDIA's white papers on GA102, Ada and Blackwell rate 16-bit products with fp32 sums at twice fp32.
    _gpu("rtx-5080", 15.5, 112.6, 56.3, 960, arch=(12, 0), sm_count=84, link_gbs=50, peer_gbs=50),
    _gpu("rtx-4080", 15.6, 97.5, 48.7, 717, arch=(8, 9), sm_count=76, link_gbs=24, peer_gbs=24),
    # 4060 Ti: NVIDIA's specification of 22.06 fp32 TFLOP/s, 34 SMs, 288 GB/s and 8 lanes of PCIe 4.
    _gpu("rtx-4060-ti", 15.6, 44.1, 22.1, 288, arch=(8, 9), sm_count=34, link_gbs=12, peer_gbs=12),
    _gpu("rtx-4060-ti-8gb", 7.6, 44.1, 22.1, 288, arch=(8, 9), sm_count=34, link_gbs=12, peer_gbs=12),
    _gpu("rtx-4070", 11.6, 58.3, 29.1, 504, arch=(8, 9), sm_count=46, link_gbs=24, peer_gbs=24),
    _gpu("rtx-3060", 11.6, 25.4, 12.7, 360, arch=(8, 6), sm_count=28, link_gbs=24, peer_gbs=24),
    _gpu("rtx-3090", 23.6, 71, 35.6, 936, arch=(8, 6), sm_count=82, link_gbs=24, peer_gbs=24),
    _gpu("l4", 22.2, 121, 30.3, 300, arch=(8, 9), sm_count=58, link_gbs=24, peer_gbs=24),
    _gpu("a10", 22.2, 125, 31.2, 600, arch=(8, 6), sm_count=72, link_gbs=24, peer_gbs=24),
    _gpu("t4", 14.6, 65, 8.1, 320, arch=(7, 5), sm_count=40, link_gbs=12, peer_gbs=12),
    # NVIDIA's V100 data sheet (SXM2); it has no bf16.
    _gpu("v100-32gb", 31.7, 125, 15.7, 900, arch=(7, 0), sm_count=80, link_gbs=12, peer_gbs=130),
    _gpu("v100-16gb", 15.8, 125, 15.7, 900, arch=(7, 0), sm_count=80, link_gbs=12, peer_gbs=130),
    _gpu("mi300x", 191.7, 1307, 163.4, 5300, arch=(0, 0), sm_count=304, link_gbs=50, peer_gbs=370),
)

GPUS: Mapping[str, Gpu] = {row.name: row for row in _ROWS}

# What people type -> the row's name.
_SHORT_NAMES = {
    "a100": "a100-80gb",
    "h100-sxm": "h100",
    "6000-ada": "rtx-6000-ada",
    "v100": "v100-16gb",
    "4060ti": "rtx-4060-ti",
    "4060ti-8gb": "rtx-4060-ti-8gb",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
_LETTERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_bytes(text: str) -> int | None:
    """Bytes of a size such as `24GiB`, `912.00 MiB` or `80GB`; None if `text` is not a size."""
    size = _SIZE.fullmatch(text.strip())
    return int(float(size[1]) * (1024 if size[3] else 1000) ** _LETTERS[size[2].lower()]) if size else None


def row_of(name: str, total_bytes: int) -> Gpu:
    """The row for the driver's name of a GPU (`NVIDIA A100-SXM4-80GB`), or else for a GPU with as much memory."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    rows = [row for row in GPUS.values() if set(row.name.split("-")) <= words]
    return max(rows, key=lambda row: len(row.name)) if rows else find_gpu(f"{total_bytes / GIB:.2f}GiB")


def find_gpu(text: str) -> Gpu:
    """The GPU with this name (`h200`, `RTX 4090`), or a GPU with this much memory (`24GiB`, `80GB`).

    A size takes its rates from the known GPU with bf16 and the nearest memory. Raises UsageError for an unknown name,
    and for a size below 1 GiB.
    """
    memory_bytes = size_bytes(text)
    if memory_bytes is not None:
        if memory_bytes < GIB:
            raise UsageError(f"gpu {text!r} is less than 1 GiB; give a size such as 24GiB, or a name.")
        like = min((row for row in _ROWS if row.has_bf16), key=lambda row: abs(row.memory_bytes - memory_bytes))
        return replace(like, name=text.strip(), memory_bytes=memory_bytes, source=f"rates of the {like.name}")
    name = re.sub(r"[\s_]+", "-", text.strip().lower())
    for prefix in ("nvidia-", "tesla-", "geforce-", "rtx-", "rtx"):
        name = name.removeprefix(prefix)
    for known in (name, f"rtx-{name}", _SHORT_NAMES.get(name, name)):
        if known in GPUS:
            return GPUS[known]
    near = difflib.get_close_matches(name, GPUS, n=1)
    hint = f"the nearest is {near[0]}" if near else f"known are {', '.join(GPUS)}"
    raise UsageError(f"gpu {text!r} is not known; {hint}. You can also give a size such as 24GiB.")
