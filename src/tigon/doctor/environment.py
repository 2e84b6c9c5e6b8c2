"""The environment of this process: versions, device, and the conditions that the rows of `known_bad` name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from tigon import __version__
from tigon.ops import dispatch

PACKAGES = (
    *("tigon", "torch", "triton", "numpy", "transformers", "accelerate", "peft", "trl", "deepspeed", "bitsandbytes"),
    "liger_kernel",
)

# Libraries that replace classes and functions of transformers or torch for the whole process.
GLOBAL_PATCHERS = frozenset({"liger_kernel", "unsloth", "unsloth_zoo", "cut_cross_entropy"})

# Every condition that a row of `known_bad` may name -> its meaning.
CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        "gpu": "PyTorch sees a GPU",
        "interpreter": "TRITON_INTERPRET=1",
        "no-triton": "triton is not importable",
        "no-compiler": "no C compiler: neither $CC nor cc, gcc, clang or cl on PATH",
        "gpu-not-seen": "the NVIDIA driver is loaded, PyTorch sees no GPU",
        "before-ampere": "an NVIDIA GPU of compute capability below 8.0",
        "architecture-not-built": "PyTorch was built without code for this GPU",
        "patched-globally": "another library has replaced names of transformers or torch in this process",
        "bf16-product-traps": "PyTorch's bf16 matrix product ended the self-test with an illegal instruction",
    }
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The environment of a process; tests create artificial ones."""

    python: str
    platform: str
    packages: Mapping[str, str | None]
    """Package -> version, or None if it is not installed."""
    device: str
    """Text for the user: the GPUs with their memory, or "no GPU"."""
    runs: str
    """Text for the user: how ops run on this machine."""
    conditions: frozenset[str] = frozenset()
    foreign: tuple[str, ...] = ()
    """Names of transformers and torch that another library has replaced, as "module.name -> other module"."""


def current_environment() -> Environment:
    """The environment of this process."""
    foreign = tuple(replaced_names())
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages=MappingProxyType({name: _version(name) for name in PACKAGES}),
        device=_device(),
        runs=_runs(),
        conditions=frozenset(_conditions(bool(foreign))),
        foreign=foreign,
    )


def _version(package: str) -> str | None:
    if package == "tigon":
        return __version__
    if package == "torch":
        return str(torch.__version__)  # with the +cpu or +cu130 that some installers leave out of the metadata
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    parts = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = (
            getattr(properties, "gcnArchName", None)
            if torch.version.hip
            else f"sm_{properties.major}{properties.minor}"
        )
        parts.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {arch}")
    return "; ".join(parts)


def _runs() -> str:
    if not dispatch.HAS_TRITON:
        return "composite path of each op in PyTorch (triton is not installed)"
    if dispatch.INTERPRET:
        return "Triton kernels in the interpreter (TRITON_INTERPRET=1)"
    if torch.cuda.is_available():
        return "Triton kernels on the GPU; fp64 uses the composite path in PyTorch"
    return "composite path of each op in PyTorch, on the CPU"


def _conditions(foreign: bool) -> Iterable[str]:
    gpu = torch.cuda.is_available()
    checks = {
        "gpu": gpu,
        "interpreter": os.environ.get("TRITON_INTERPRET") == "1",
        "no-triton": not dispatch.HAS_TRITON,
        "no-compiler": not _has_compiler(),
        "gpu-not-seen": not gpu and Path("/proc/driver/nvidia/version").exists(),
        "before-ampere": gpu and not torch.version.hip and torch.cuda.get_device_capability() < (8, 0),
        "architecture-not-built": gpu and not torch.version.hip and not _built_for(torch.cuda.get_device_capability()),
        "patched-globally": foreign,
    }
    return (name for name, holds in checks.items() if holds)


def _has_compiler() -> bool:
    # The compiler names that triton/runtime/build.py looks for, and MSVC's.
    return "CC" in os.environ or any(shutil.which(name) for name in ("cc", "gcc", "clang", "cl"))


def _built_for(capability: tuple[int, int], architectures: Iterable[str] | None = None) -> bool:
    """Whether PyTorch has machine code of the same major version, or PTX of an older one, for a GPU.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Application Compatibility".
    """
    for name in torch.cuda.get_arch_list() if architectures is None else architectures:
        kind, _, digits = name.partition("_")
        number = "".join(c for c in digits if c.isdigit())  # sm_90a
        if not number:
            continue
        built = (int(number[:-1]), int(number[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def replaced_names() -> Iterable[str]:
    """Names in loaded transformers models, torch.nn and torch.nn.functional that another library has replaced.

    Only this process is examined. `tigon doctor` from a shell finds nothing; call `tigon.doctor.diagnose()` in the
    script instead.
    """
    watched = {n: m for n, m in list(sys.modules.items()) if n.startswith("transformers.models.") and ".modeling_" in n}
    watched |= {"torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
    for module_name, module in sorted(watched.items()):
        for name, value in sorted(vars(module).items()):
            owner = getattr(value, "__module__", None)
            if isinstance(owner, str) and owner.partition(".")[0] in GLOBAL_PATCHERS:
                yield f"{module_name}.{name} -> {owner}"
