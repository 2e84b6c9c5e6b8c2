"""Combinations of versions and devices that are known to fail, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tigon.doctor.environment import Environment
from tigon.doctor.finding import Finding, Level

# The versions tigon is tested with, as pyproject.toml declares them (a test compares the two).
OLDEST: Mapping[str, str] = MappingProxyType(
    {
        "torch": "2.8",
        "triton": "3.4",
        "transformers": "5.8",
        "accelerate": "1.10",
        "peft": "0.18",
        "deepspeed": "0.19",
        "bitsandbytes": "0.50",
        "trl": "1.16",
    }
)
UNTESTED_FROM: Mapping[str, str] = MappingProxyType({"transformers": "5.25", "trl": "1.17"})

# pyproject.toml sets no limit for these two: a limit in a library would hold back everything else that needs them.
UNTRIED_FROM: Mapping[str, str] = MappingProxyType({"torch": "2.15", "triton": "3.10"})


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """A known failure. It holds if every package is installed in a matching version and every condition is met."""

    id: str
    level: Level = "problem"
    packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Package -> version specifier (PEP 440); the empty specifier matches any version."""
    conditions: tuple[str, ...] = ()
    """Keys of `environment.CONDITIONS`."""
    what: str
    fix: str
    source: str

    def holds(self, environment: Environment) -> bool:
        """Whether the row holds in this environment."""
        from packaging.specifiers import SpecifierSet

        def matches(package: str, specifier: str) -> bool:
            version = environment.packages.get(package)
            return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)

        return set(self.conditions) <= environment.conditions and all(matches(p, s) for p, s in self.packages.items())

    def finding(self) -> Finding:
        """The row as a finding."""
        return Finding(level=self.level, id=self.id, what=self.what, fix=self.fix, source=self.source)


ROWS: tuple[KnownBad, ...] = (
    KnownBad(
        id="interpreter-numpy",
        packages={"triton": "<3.7", "numpy": ">=2.4"},
        conditions=("interpreter",),
        what="Triton's interpreter up to 3.6 cannot index with numpy 2.4 arrays: most kernels raise a TypeError.",
        fix="pip install 'numpy<2.4', or unset TRITON_INTERPRET.",
        source="https://github.com/triton-lang/triton/issues/9171",
    ),
    KnownBad(
        id="interpreter-on-gpu",
        conditions=("interpreter", "gpu"),
        what="TRITON_INTERPRET=1 runs every kernel in Python on the CPU, about a thousand times slower than this GPU.",
        fix="unset TRITON_INTERPRET.",
        source="https://triton-lang.org/main/programming-guide/chapter-3/debugging.html",
    ),
    KnownBad(
        id="bf16-amx",
        conditions=("bf16-product-traps",),
        what="PyTorch's own bf16 matrix product ends with an illegal instruction. This CPU, usually a virtual one, "
        "advertises AMX but traps on it.",
        fix="export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 (or AVX512_CORE_BF16) before Python starts.",
        source="https://github.com/uxlfoundation/oneDNN/issues/5689 and the self-test below",
    ),
    KnownBad(
        id="gpu-not-seen",
        conditions=("gpu-not-seen",),
        what="An NVIDIA driver is loaded, but PyTorch sees no GPU: it is a CPU build, was built for a newer driver, or "
        "CUDA_VISIBLE_DEVICES is empty.",
        fix="compare nvidia-smi with the version after + in torch's; install the build for your CUDA version.",
        source="https://pytorch.org/get-started/locally",
    ),
    KnownBad(
        id="architecture-not-built",
        conditions=("architecture-not-built",),
        what="This PyTorch was built without code for this GPU's architecture, so PyTorch's own operators fail on it.",
        fix="install a PyTorch built for a CUDA version that supports the GPU.",
        source="torch.cuda.get_arch_list()",
    ),
    KnownBad(
        id="gpu-without-triton",
        conditions=("gpu", "no-triton"),
        what="There is a GPU, but triton is not installed. Every op runs its composite path: correct, but slow.",
        fix="pip install triton (triton-windows on Windows).",
        source="https://github.com/triton-lang/triton#quick-installation",
    ),
    KnownBad(
        id="no-c-compiler",
        conditions=("gpu", "no-compiler"),
        what="Triton needs a C compiler for the launcher of each kernel at its first launch, and none was found.",
        fix="install gcc or clang, or set CC.",
        source="https://github.com/apple/ml-cross-entropy/issues/5",
    ),
    KnownBad(
        id="before-ampere",
        level="warning",
        conditions=("before-ampere",),
        what="Triton supports NVIDIA GPUs from compute capability 8.0 (Ampere) on; this one is older and has no bf16.",
        fix="train in fp16 or fp32, and trust the self-test below rather than this version list.",
        source="https://github.com/triton-lang/triton#compatibility",
    ),
    KnownBad(
        id="patched-globally",
        conditions=("patched-globally",),
        what="Another library has replaced names of transformers or torch for the whole process (listed above). "
        "Before tigon replaces a module, it compares its op with the module's forward. It leaves such modules alone.",
        fix="do not call the other patcher (use_liger_kernel=False), and start a new process.",
        source="measured: Liger Kernel 0.8.5 assigns into transformers' modules, torch.nn and torch.nn.functional",
    ),
    KnownBad(
        id="liger-installed",
        level="note",
        packages={"liger_kernel": ""},
        what="liger_kernel is installed too. use_liger_kernel=True and its apply_ functions patch the whole process; "
        "only one of the two libraries can patch a model.",
        fix="leave use_liger_kernel off in runs that call tigon.patch.",
        source="measured: Liger Kernel 0.8.5, docs/hazards.md",
    ),
    KnownBad(
        id="add-adapter-needs-newer-peft",
        level="note",
        packages={"transformers": ">=5.24", "peft": "<0.22"},
        what="transformers from 5.24 on refuses PEFT below 0.22 in its own `add_adapter`, `set_adapter` and "
        "`disable_adapters`. tigon adds and loads adapters through PEFT, which is not affected.",
        fix="add adapters with peft.get_peft_model.",
        source="measured: transformers 5.24.0, PEFT 0.21.2",
    ),
    *(
        KnownBad(
            id=f"{package}-older-than-supported",
            packages={package: f"<{version}"},
            what=f"{package} older than {version} is not supported: tigon is written against and tested with {version} "
            "and newer.",
            fix=f"pip install --upgrade '{package}>={version}'.",
            source="pyproject.toml",
        )
        for package, version in OLDEST.items()
    ),
    *(
        KnownBad(
            id=f"{package}-newer-than-tested",
            level="warning",
            packages={package: f">={version}"},
            what=f"{package} {version} and newer have not been tested. Modules whose formula changed are left alone "
            "and reported; the docs may be out of date.",
            fix=f"pip install '{package}<{version}' if something is odd, or a newer tigon.",
            source="pyproject.toml",
        )
        for package, version in UNTESTED_FROM.items()
    ),
    *(
        KnownBad(
            id=f"{package}-newer-than-tried",
            level="note",
            packages={package: f">={version}"},
            what=f"{package} {version} and newer have not been tried with tigon. The self-test below compares the ops "
            "with fp64.",
            fix=f"pip install '{package}<{version}' if something is odd, or a newer tigon.",
            source="docs/support.md",
        )
        for package, version in UNTRIED_FROM.items()
    ),
)


def matching(environment: Environment) -> Iterator[Finding]:
    """The findings of the rows that hold in this environment."""
    return (row.finding() for row in ROWS if row.holds(environment))
