"""Layers with a state instead of attention: which code runs them, and what to install for fused kernels.

tigon has ops for the short convolution and the gated delta rule. transformers runs the rest by another library's
kernels if it finds that library, and by its own PyTorch code otherwise, without a word in most versions. Since 5.16 a
decorator in transformers/integrations/hub_kernels.py chooses. Earlier versions bind the library's function, or None, in
the file of the model.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tigon.kernels import chips
from tigon.ops.gated_delta_rule import MAX_WIDTH

PYTORCH = "PyTorch"
TIGON = "tigon"
HUB = "kernels of the hub"


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, and the kernel that transformers looks for.

    Args:
        name: what the field calls it.
        calls: the functions that its class calls, in any version of transformers; one of them is enough.
        module: the module of the library that has the kernel.
        function: the kernel's name there.
        library: the name under which pip installs the library.
        bounds: the argument of the layer by which the library's kernel gets where documents begin; "": none that was
            tried. transformers 5.24 renames the gated delta rule's, and hands Kimi delta attention's on.
    """

    name: str
    calls: frozenset[str]
    module: str
    function: str
    library: str
    bounds: str = ""


KINDS = (
    LayerKind(
        "gated delta rule",
        frozenset({"chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"}),
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        "flash-linear-attention",
        bounds="cu_seq_lens_q",
    ),
    LayerKind(
        "Kimi delta attention",
        frozenset({"chunk_kda", "chunk_kimi_delta_attention"}),
        "fla.ops.kda",
        "chunk_kda",
        "flash-linear-attention",
        bounds="cu_seqlens",
    ),
    LayerKind(
        "Mamba scan",
        frozenset({"selective_scan_fn", "mamba_selective_scan"}),
        "mamba_ssm.ops.selective_scan_interface",
        "selective_scan_fn",
        "mamba-ssm",
    ),
    LayerKind(
        "Mamba 2 scan",
        frozenset({"mamba_chunk_scan_combined", "mamba2_chunk_scan"}),
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        "mamba-ssm",
    ),
    LayerKind(
        "short convolution",
        frozenset({"causal_conv1d_fn"}),
        "causal_conv1d",
        "causal_conv1d_fn",
        "causal-conv1d",
    ),
)
DELTA_RULE = KINDS[0]
CONVOLUTION = KINDS[-1]
BUILT_BY_PIP = frozenset({"mamba-ssm", "causal-conv1d"})
"""Libraries that pip compiles with the CUDA compiler against the installed PyTorch."""
WRONG_ON_HOPPER = ">=3.4,<3.7.1"
"""Triton whose code for the backward of flash-linear-attention's gated delta rule is wrong on Hopper (its issue 640).

flash-linear-attention 0.6 raises there, unless tilelang is installed."""


@dataclass(frozen=True)
class LayerPath:
    """The layers of one kind, and the code that runs them: the name of a library, `PYTORCH`, `TIGON` or `HUB`."""

    kind: str
    layers: int
    runs: str
    library: str
    """The library with the fused kernel."""

    def __str__(self) -> str:
        return f"{self.described}: {self.runs}"

    @property
    def described(self) -> str:
        return f"{self.kind} ({self.layers} layer{'s' if self.layers > 1 else ''})"


def counts_of(model: nn.Module) -> dict[str, int]:
    """Number of layers of each kind; the kinds that the model lacks are left out."""
    return {kind.name: len(classes) for kind, classes in _layers(model).items()}


def paths_of(model: nn.Module, *, fused: bool = False) -> tuple[LayerPath, ...]:
    """Which code runs the layers of each kind in this model. It may be on the meta device, and patched.

    fused: The model will be patched.
    """
    in_hub = bool(getattr(model, "use_kernels", False))
    width = max((getattr(module, "head_k_dim", 0) for module in model.modules()), default=0) if fused else 0
    return tuple(
        LayerPath(
            kind.name,
            len(classes),
            HUB if in_hub else _fused(kind, runs_in(kind, classes[0]), width) if fused else runs_in(kind, classes[0]),
            kind.library,
        )
        for kind, classes in _layers(model).items()
    )


def _fused(kind: LayerKind, runs: str, width: int, arch: tuple[int, int] | None = None) -> str:
    """What runs layers of a kind in a patched model.

    The ops take the place of PyTorch's convolution and gated delta rule, and of the library's gated delta rule where it
    cannot train.

    Args:
        runs: what runs them without the patch.
        width: the numbers of a key of the gated delta rule.
        arch: the GPU's compute capability; None for the GPU of this process.
    """
    if kind not in (CONVOLUTION, DELTA_RULE) or runs == TIGON or not _calls_globals():
        return runs
    if kind is DELTA_RULE and rule_objection(width, arch) is not None:
        return runs
    refused = kind is DELTA_RULE and runs == kind.library and refused_on(arch) is not None
    return TIGON if runs == PYTORCH or refused else runs


def rule_objection(width: int, arch: tuple[int, int] | None = None) -> str | None:
    """Why tigon's gated delta rule cannot run keys of `width` numbers on a GPU, or None. arch: as for `_fused`."""
    if width > MAX_WIDTH:
        return f"its keys have {width} numbers; the op's limit is {MAX_WIDTH}"
    here = torch.cuda.current_device() if torch.cuda.is_available() else None
    chip = chips.chip(here) if arch is None else chips.chip_of_arch(arch)
    if chip is not None and "gated_delta_rule" in chip.spills:
        return f"the op's kernels spill registers on {chip.names}"
    return None


def rule_left(model: nn.Module) -> str | None:
    """One sentence if tigon's op cannot run the gated delta rule of a patched model: why, and what runs."""
    kinds_of = _kinds_of(model)
    layers = [module for module in model.modules() if DELTA_RULE in kinds_of[type(module)]]
    if not layers or (reason := rule_objection(getattr(layers[0], "head_k_dim", 0))) is None:
        return None
    return f"gated_delta_rule: {reason}; {runs_in(DELTA_RULE, type(layers[0]))} runs these layers"


@functools.cache
def _calls_globals() -> bool:
    """Whether layers call the functions that the ops replace by a global name, as they do since transformers 5.16."""
    import transformers  # loads transformers
    from packaging.version import Version  # loads packaging

    return Version(transformers.__version__) >= Version("5.16")


def runs_of(model: nn.Module) -> list[tuple[str, nn.Module, dict[LayerKind, str]]]:
    """Path and module of each layer with a state, and what runs its parts of each kind."""
    in_hub, kinds_of = getattr(model, "use_kernels", False), _kinds_of(model)
    return [
        (path, module, {kind: HUB if in_hub else runs_in(kind, type(module)) for kind in kinds})
        for path, module in model.named_modules()
        if (kinds := kinds_of[type(module)])
    ]


def takes_documents(runs: Mapping[str, str]) -> bool:
    """Whether layers of these kinds take all documents of a packed sample in one call.

    runs: name of each kind -> what runs it. tigon's op takes the place of PyTorch's convolution for them.
    """
    scans = [kind for kind in KINDS if kind.name in runs and kind is not CONVOLUTION]
    if not scans:
        return runs.get(CONVOLUTION.name) in (PYTORCH, TIGON)
    return all(kind.bounds and runs[kind.name] in (kind.library, TIGON) for kind in scans)


@functools.cache
def found_libraries() -> tuple[str, ...]:
    """The libraries with kernels that Python finds, without importing them."""
    packages = {kind.library: kind.module.partition(".")[0] for kind in KINDS}
    return tuple(library for library, package in packages.items() if importlib.util.find_spec(package) is not None)


def paths_of_counts(
    counts: Mapping[str, int], *, fused: bool = False, width: int = 0, arch: tuple[int, int] | None = None
) -> tuple[LayerPath, ...]:
    """`paths_of` a model that need not be built, by the libraries that are installed.

    Args:
        width: the numbers of a key of the gated delta rule.
        arch: the compute capability of the run's GPU; None for the GPU of this process.
    """
    runs = {kind: _installed(kind) for kind in KINDS if kind.name in counts}
    return tuple(
        LayerPath(kind.name, counts[kind.name], _fused(kind, run, width, arch) if fused else run, kind.library)
        for kind, run in runs.items()
    )


def install_command(paths: Iterable[LayerPath]) -> str:
    """The command that installs the kernels of the layers that PyTorch runs; empty if there are none.

    Libraries that pip compiles come last, because a failed build must not keep the others away.
    """
    libraries = dict.fromkeys(path.library for path in paths if path.runs == PYTORCH)
    ready, built = ([name for name in libraries if (name in BUILT_BY_PIP) == is_built] for is_built in (False, True))
    commands = [f"pip install {' '.join(ready)}"] if ready else []
    return " && ".join([*commands, f"pip install {' '.join(built)} --no-build-isolation"] if built else commands)


def library_among(modules: Iterable[str]) -> str | None:
    """The library with a kernel of this file that one of these modules belongs to."""
    packages = {name.partition(".")[0] for name in modules}
    return next((kind.library for kind in KINDS if kind.module.partition(".")[0] in packages), None)


def slow_layers(paths: Iterable[LayerPath]) -> str | None:
    """One sentence about the layers that PyTorch runs, with the command that installs their kernels."""
    slow = [path for path in paths if path.runs == PYTORCH]
    if not slow:
        return None
    names = " and ".join(path.described for path in slow)
    return f"PyTorch runs {names}, which is slow; `{install_command(slow)}` installs their kernels"


def arch_here() -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU of this process, or (0, 0)."""
    nvidia = torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability() if nvidia else (0, 0)


def refused_backward(paths: Iterable[LayerPath], arch: tuple[int, int] | None = None) -> str | None:
    """One sentence if the first backward pass would raise on a GPU of this compute capability: why; what to do.

    arch: None for the GPU of this process.
    """
    from packaging.specifiers import SpecifierSet  # loads packaging

    library = DELTA_RULE.library
    refused = [path for path in paths if path.kind == DELTA_RULE.name and path.runs == library]
    if not refused or (arch or arch_here())[0] != 9 or importlib.util.find_spec("tilelang") is not None:
        return None
    triton = importlib.metadata.version("triton")
    if not SpecifierSet(WRONG_ON_HOPPER).contains(triton, prereleases=True):
        return None
    return (
        f"{refused[0].described} cannot train: {library} refuses its backward pass on Hopper with Triton {triton}, "
        "whose compiled code is wrong there; install Triton 3.7.1 or newer, or tilelang, which needs nvcc, or "
        f"uninstall {library}: PyTorch then runs the layers, slowly"
    )


def refused_on(arch: tuple[int, int] | None = None) -> str | None:
    """The sentence of `refused_backward` if the library's gated delta rule cannot train there. None: on this GPU."""
    library = DELTA_RULE.library
    return refused_backward([LayerPath(DELTA_RULE.name, 1, library, library)], arch)


def _layers(model: nn.Module) -> dict[LayerKind, list[type[nn.Module]]]:
    """The classes of the layers of each kind that the model has, one per layer."""
    kinds_of = _kinds_of(model)
    classes = [type(module) for module in model.modules()]
    found = {kind: [cls for cls in classes if kind in kinds_of[cls]] for kind in KINDS}
    return {kind: layers for kind, layers in found.items() if layers}


def _kinds_of(model: nn.Module) -> dict[type[nn.Module], list[LayerKind]]:
    """Class of the model's modules -> the kinds that its methods call."""
    called = {cls: _calls(cls) for cls in {type(module) for module in model.modules()}}
    return {cls: [kind for kind in KINDS if kind.calls & names] for cls, names in called.items()}


def _calls(cls: type[nn.Module]) -> frozenset[str]:
    """The names in the methods of a class."""
    values = [value for part in cls.__mro__ for value in vars(part).values() if inspect.isfunction(value)]
    return frozenset(name for value in values for name in inspect.unwrap(value).__code__.co_names)


def runs_in(kind: LayerKind, layer: type[nn.Module]) -> str:
    """What runs this kind's part of a layer of this class."""
    seams = [vars(part).get("_tigon_seam") for part in layer.__mro__]
    of_states = [seam for seam in seams if seam is not None and seam.flag == "convolution"]
    replaced = {CONVOLUTION: "convolves", DELTA_RULE: "rule"}.get(kind)
    if replaced is not None and any(getattr(seam, replaced) for seam in of_states):
        return TIGON
    for part in layer.__mro__:
        bound = getattr(sys.modules.get(part.__module__), kind.function, part)
        if bound is None:
            return PYTORCH
        if bound is not part and bound.__module__ != part.__module__:
            return kind.library
    return _installed(kind)


def _installed(kind: LayerKind) -> str:
    """The kind's library if it can be imported and has the kernel, otherwise PYTORCH."""
    try:
        return kind.library if hasattr(importlib.import_module(kind.module), kind.function) else PYTORCH
    except Exception:  # a build for another CUDA raises any type of error, and transformers then runs its own code
        return PYTORCH
