"""Compile every kernel the ops launch for GPUs that are not here, and print as JSON what came out.

    python tests/kernels/aot.py                        what the tests check, some minutes on two cores
    python tests/kernels/aot.py --target gfx942 --every    all cases of the records instead of a covering choice

No launch is written down by hand. Each op of `OPS` runs its cases forward and backward on CPU tensors. Triton binds and
specialises the launches for a driver that claims to be the target, and `jit_cache_hook` takes the code to compile. The
kernels never run, so the values that flow through the ops are meaningless.

It runs in a separate process because Triton decides about the interpreter when a kernel is decorated.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# Before torch. The first for virtual machines that advertise AMX and trap on its first instruction; the second because
# this process forks.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script finds only the modules of its own folder

from tests.ops.cases import cases_of
from tigon.kernels import chips
from tigon.ops import OPS, Case, Op, VocabParallelOptions, dispatch, gradient_sums, known_amax, products
from tigon.ops.decode_attention import decode_attention

ALL_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    """The most shared memory (LDS) of one program: CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability" (less 1 KiB that CUDA keeps on 8.0 and later); AMD CDNA 2, 3 and 4 ISA guides; for RDNA the limit of a
    work-group in the LLVM AMDGPU guide."""
    dtypes: tuple[str, ...] = ("bfloat16",)
    """The first is compiled with the small cases and the flags too, the others with the large cases."""
    once: bool = False
    """Each kernel once, in the launch that does the most, rather than every way through it: a chip close to another."""

    @property
    def gpu(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.warp_size)

    @property
    def chip(self) -> chips.Chip | None:
        return chips.chip_of_arch(divmod(self.arch, 10) if isinstance(self.arch, int) else self.arch)


# Cards of sm_75 have no bf16 arithmetic, so their runs are in fp16.
TARGETS = {
    "sm_75": Target("cuda", 75, 32, 64 << 10, ("float16",), once=True),
    "sm_80": Target("cuda", 80, 32, 163 << 10, once=True),
    "sm_86": Target("cuda", 86, 32, 99 << 10, once=True),
    "sm_89": Target("cuda", 89, 32, 99 << 10, once=True),
    "sm_90": Target("cuda", 90, 32, 227 << 10, ALL_DTYPES),
    "sm_100": Target("cuda", 100, 32, 227 << 10, once=True),
    "sm_120": Target("cuda", 120, 32, 99 << 10, once=True),
    "gfx90a": Target("hip", "gfx90a", 64, 64 << 10, once=True),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, ALL_DTYPES),
    "gfx950": Target("hip", "gfx950", 64, 160 << 10, once=True),
    "gfx1100": Target("hip", "gfx1100", 32, 64 << 10, once=True),
    "gfx1151": Target("hip", "gfx1151", 32, 64 << 10, once=True),
    "gfx1201": Target("hip", "gfx1201", 32, 64 << 10, once=True),
}
IN_BF16 = "sm_90, bfloat16"
EACH_KERNEL_ONCE = "gfx942, each kernel once"
ALL_TARGETS = {
    **TARGETS,
    IN_BF16: replace(TARGETS["sm_90"], dtypes=("bfloat16",)),
    EACH_KERNEL_ONCE: replace(TARGETS["gfx942"], dtypes=("bfloat16",), once=True),
}
"""The chips, and the less that `make test` compiles for two of them."""


# Ways through the kernels, and widths of today's models, that no record has a case for.
MORE_CASES = {
    "rms_norm": (
        Case(id="hidden-16384", shape=(16, 16384)),
        Case(id="wide-no-weight", shape=(3, 20000), options={"weighted": False}),
        Case(id="amax", shape=(16, 4096), options={"find_amax": True}),
        Case(id="amax-16384", shape=(16, 16384), options={"find_amax": True}),
        Case(id="amax-wide", shape=(3, 20000), options={"find_amax": True}),
    ),
    "add_rms_norm": (
        Case(id="hidden-16384", shape=(16, 16384)),
        Case(id="amax", shape=(16, 2048), options={"find_amax": True}),
        Case(id="fp8", shape=(16, 4096), options={"find_amax": True}),
    ),
    "rope": (
        Case(id="fp8", shape=(2, 32, 16, 128), options={"kv_heads": 8}),
        Case(id="fp8-partial", shape=(2, 32, 16, 80), options={"rotary": 32, "interleaved": True}),
    ),
    "layer_norm": (Case(id="hidden-16384", shape=(16, 16384)),),
    # Each row has 16 bytes, but fewer than 16 elements.
    "linear_cross_entropy": (Case(id="hidden-8", shape=(2, 16, 8, 100)),),
    "cross_entropy": (
        Case(id="inplace", shape=(16, 128256), options={"inplace": True}),
        Case(id="outputs", shape=(16, 128256), options={"outputs": ("entropy", "predicted")}),
        Case(id="one-row", shape=(1, 128256), options={"inplace": True}),
    ),
    # For FP8 layers the kernels also find the largest magnitudes.
    "swiglu": (
        Case(id="amax", shape=(16, 4096), options={"find_amax": True}),
        Case(id="amax-packed", shape=(16, 8192), options={"find_amax": True, "packed": True}),
    ),
    # The weights of the record's other cases are dense.
    "lora_linears": (Case(id="4-bit", shape=(16, 64, 24, 16, 8), options={"nf4": True}),),
    "experts": (Case(id="mxfp4", shape=(16, 2, 4, 64), options={"inner": 32, "mxfp4": True}),),
    # Its kernel runs twice, with an exchange between processes in between.
    "linear_kl": tuple(
        Case(
            id=f"divided-{kind}",
            shape=(16, 64, V),
            options={"kind": kind, "vocab_parallel": VocabParallelOptions(0, V)},
        )
        for kind, V in (("forward", 32000), ("jsd", 4099))
    ),
}

FP8_CASES = frozenset({("add_rms_norm", "fp8"), ("rope", "fp8"), ("rope", "fp8-partial")})
"""FP8 layers compute the inputs of these, so that the backward also finds the largest magnitudes of the gradients."""

# Dimensions before the last enter the products and the grid; a cap leaves the kernels as they are.
MAX_ROWS = 16


# --- recording --------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One specialisation of a kernel, and the first case that led to it."""

    op: str
    case: str
    dtype: str
    target: str
    aligned: bool
    """The rows are wide, and allow 16-byte loads."""
    whole: bool
    """All gradients were wanted."""
    function: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    key: str
    also: tuple[tuple[str, str], ...] = ()
    """(op, case) of launches of the same kernel that are left out because this one does the most."""

    @property
    def kernel(self) -> str:
        return str(self.function.__name__)

    @property
    def flags(self) -> dict[str, Any]:
        """The constexpr parameters by name."""
        names = self.function.arg_names
        annotated = {p.name for p in self.function.params if p.is_constexpr}
        return {names[at]: value for (at,), value in self.constants.items() if names[at] in annotated}

    @property
    def form(self) -> tuple[Any, ...]:
        """The compiled signature, without the divisors of sizes and strides that Triton finds out."""
        pointers = [t for t in self.signature.values() if t.startswith("*")]
        return self.kernel, *self.flags.items(), *pointers, self.options["num_warps"], self.aligned

    @property
    def demand(self) -> tuple[bool, int]:
        """How much of its kernel a launch uses: rows of a model rather than others, then the flags that are set."""
        return self.aligned and self.whole, sum(value is True for value in self.flags.values())

    @property
    def ways(self) -> set[tuple[str, str, Any]]:
        """The properties that change the compiled code: flags, types of pointers, alignment. Sizes are left out."""
        flags = {(self.kernel, name, v) for name, v in self.flags.items() if isinstance(v, (bool, str))}
        types = {(self.kernel, name, t) for name, t in self.signature.items() if t.startswith("*")}
        return flags | types | {(self.kernel, "aligned", self.aligned)}


class Pretence:
    """The part of a driver that a launch asks for; the device's index is the target's name."""

    target = ""

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return ALL_TARGETS[self.target].gpu


@contextlib.contextmanager
def recording(targets: list[str], launches: list[dict[str, Any]]) -> Iterator[None]:
    """Launches go to `launches` instead of a GPU, once for every target; all targets have one warp size, as much shared
    memory and one tile for the logits."""
    from tigon.kernels import _launch, glu, norm

    pretence, run = Pretence(), JITFunction.run

    def run_for_each(self: JITFunction[Any], *args: Any, **options: Any) -> None:
        for pretence.target in targets:
            run(self, *args, **options)

    def take(*, key: str, repr: str, fn: Any, compile: Any, **_: Any) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        launches.append(
            {
                "target": compile["device"],
                "function": fn.jit_function,
                "signature": compile["signature"],
                "constants": compile["constants"],
                "attributes": compile["configs"][0],
                # JSON turns tuples into lists, and Triton needs hashable values.
                "options": {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()},
                "key": key,
            }
        )
        return True  # handled: Triton compiles nothing and launches nothing

    lanes, shared, chip = (
        ALL_TARGETS[targets[0]].warp_size,
        ALL_TARGETS[targets[0]].shared_bytes,
        ALL_TARGETS[targets[0]].chip,
    )
    for cached in (norm.bwd_tile, norm._backward, glu._fwd_launch, glu._bwd_launch):
        cached.cache_clear()  # they depend on the chip
    driver.set_active(pretence)  # type: ignore[arg-type]
    with (
        patch.object(JITFunction, "run", run_for_each),
        patch.object(knobs.runtime, "jit_cache_hook", take),
        patch.object(dispatch, "INTERPRET", True),  # CPU tensors take the kernels
        patch.object(_launch, "lanes", lambda: lanes),
        patch.object(_launch, "shared_bytes", lambda index: shared),
        patch.object(_launch, "multiprocessors", lambda index: 1),
        patch.object(chips, "chip", lambda index: chip),
        # The launches do not depend on the values, and products of a model's size take minutes on a CPU.
        patch.object(products, "_product_into", lambda a, b, out, accumulate: None),
        patch.object(products, "F", SimpleNamespace(linear=lambda x, w, bias: x.new_empty(*x.shape[:-1], w.shape[0]))),
    ):
        yield


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone. It has no threads, which this process's forks would not have."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def backward(op: Op, inputs: dict[str, Any], wanted: Iterable[str], of_fp8_layers: bool) -> None:
    """The op's forward, and its backward towards `wanted`, which FP8 layers may have computed."""
    leaves = {name: t.detach() if isinstance(t, Tensor) else t for name, t in inputs.items()}
    for name in wanted:
        leaves[name].requires_grad_()
        if of_fp8_layers:
            known_amax.want_for_gradient(leaves[name])
    results = op.call(**leaves)
    results = (results,) if isinstance(results, Tensor) else results
    outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def accumulated(grad_dtype: torch.dtype, dtype: torch.dtype, width: int) -> None:
    """What gradient accumulation fusion adds to a gradient; no op's backward does it without a `.grad`."""
    grad, scale = torch.zeros(MAX_ROWS, width, dtype=grad_dtype), torch.ones(())
    for x_dtype in {dtype, torch.float32}:
        gradient_sums.add_scaled_(grad, grad.to(x_dtype), scale)
    ids = torch.zeros(4 * MAX_ROWS, dtype=torch.int64)
    gradient_sums.add_rows_(grad, torch.zeros(len(ids), width, dtype=dtype), ids, -1)


def record_accumulation(dtype: str, targets: list[str]) -> Iterator[Launch]:
    """The launches of the additions to a gradient of the dtype, and to one in fp32."""
    own: torch.dtype = getattr(torch, dtype)
    for grad_dtype in {own, torch.float32}:
        for width in (2048, 20):
            found: list[dict[str, Any]] = []
            with recording(targets, found):
                accumulated(grad_dtype, own, width)
            for launch in found:
                yield Launch(ACCUMULATION, f"hidden-{width}", dtype, aligned=width > 20, whole=True, **launch)


def record_decoding(dtype: str, targets: list[str]) -> Iterator[Launch]:
    """The launches of a decoding step's attention: heads of 128, and narrow ones with a softcap and sinks."""
    own: torch.dtype = getattr(torch, dtype)
    bounds = torch.zeros(4, 6, dtype=torch.int32)
    for width, softcap, sinks in ((128, 0.0, None), (20, 30.0, torch.zeros(4, dtype=own))):
        found: list[dict[str, Any]] = []
        with recording(targets, found):
            q, k = torch.zeros(4, 4, width, dtype=own), torch.zeros(2, 64, width, dtype=own)
            decode_attention(q, k, k, bounds, sinks, 0.1, softcap, 1024, 256, 4)
        for launch in found:
            yield Launch(DECODING, f"head-{width}", dtype, aligned=width > 20, whole=True, **launch)


ACCUMULATION, DECODING = "accumulation fusion", "decoding"
"""The names under which launches appear that belong to no op of the registry."""


def is_aligned(case: Case) -> bool:
    """Whether a case has the rows of a model, which start at a multiple of 16 bytes."""
    return case.shape[-1] % 16 == 0 and (not case.small or case.shape[-1] >= 1024)


def repeated(*shape: Any, draw: Any = torch.randn, **options: Any) -> Tensor:
    """A few random values over and over. Drawing all of a model's would take longer than recording its launches."""
    shape = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
    size = shape.numel()
    few = draw(min(size, 1 << 14), **options)
    return few.repeat(-(-size // max(1, few.numel())))[:size].view(shape)


def record(op: Op, case: Case, dtype: str, targets: list[str]) -> Iterator[Launch]:
    """All launches of a case, of its forward and backward."""
    shape = (*(min(size, MAX_ROWS) for size in case.shape[:-1]), case.shape[-1])
    torch.manual_seed(20)  # a few launches depend on how many rows are chosen
    with patch.object(torch, "randn", repeated):
        inputs = op.make(
            Case(id=case.id, shape=shape, options=case.options), getattr(torch, dtype), torch.device("cpu")
        )
    if is_aligned(case) and "target" in inputs:
        # None ignored: how many rows are left decides how wide the loads over them are, and that would be chance.
        inputs["target"].clamp_(min=0)
    named = [name for name in op.grads if isinstance(inputs.get(name), Tensor)]
    # Then each gradient alone: frozen parameters, and inputs that need none. Flags again, for which rows of a model do.
    for wanted in (named, *([name] for name in named if is_aligned(case) and len(named) > 1)):
        found: list[dict[str, Any]] = []
        group = process_group() if "vocab_parallel" in case.options else contextlib.nullcontext()
        with group, recording(targets, found):
            backward(op, inputs, wanted, (op.name, case.id) in FP8_CASES)
        for launch in found:
            yield Launch(op.name, case.id, dtype, aligned=is_aligned(case), whole=wanted is named, **launch)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    return list({(x.op, x.target, x.kernel, x.key): x for x in reversed([*launches])}.values())[::-1]


def covering(launches: list[Launch]) -> Iterator[Launch]:
    """The rows of models, then as few more as go every way through every kernel that any launch goes."""
    rows = {launch.form: launch for launch in reversed(launches) if launch.aligned and launch.whole}
    yield from rows.values()
    left = [launch for launch in launches if launch.form not in rows]
    seen = {way for launch in rows.values() for way in launch.ways}
    while left:
        best = max(left, key=lambda launch: len(launch.ways - seen))
        if best.ways <= seen:
            return
        seen |= best.ways
        yield best


def one_of_each_kernel(launches: list[Launch]) -> Iterator[Launch]:
    """For each kernel, the launch that does the most; it names what launches the others."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(launch.kernel, []).append(launch)
    for alike in by_kernel.values():
        most = max(alike, key=lambda launch: launch.demand)
        yield replace(most, also=tuple((x.op, x.case) for x in alike if x is not most))


def all_launches(targets: list[str], every: bool) -> Iterator[Launch]:
    def launching_of(target: Target) -> tuple[Any, ...]:
        tile = target.chip and target.chip.logits_tile
        return target.backend, target.warp_size, target.shared_bytes, tile, target.dtypes[0]

    for launching in dict.fromkeys(launching_of(ALL_TARGETS[name]) for name in targets):
        for dtype in ALL_DTYPES:
            alike = [t for t in targets if launching_of(ALL_TARGETS[t]) == launching]
            chosen = [name for name in alike if dtype in ALL_TARGETS[name].dtypes]
            if not chosen:
                continue
            # Flags do not depend on the dtype: once is enough, and the large cases for the others.
            thorough = every or dtype == ALL_TARGETS[chosen[0]].dtypes[0]
            cases = (
                (op, case)
                for op in OPS.values()
                for case in sorted(
                    (*cases_of(op), *MORE_CASES.get(op.name, ())), key=lambda case: -math.prod(case.shape)
                )
                if thorough or not case.small
            )
            of_ops = (x for op, case in cases for x in record(op, case, dtype, chosen))
            launches = distinct((*of_ops, *record_accumulation(dtype, chosen), *record_decoding(dtype, chosen)))
            for name in chosen:
                here = [launch for launch in launches if launch.target == name and (thorough or launch.whole)]
                if every:
                    yield from here
                elif ALL_TARGETS[name].once or not thorough:
                    yield from one_of_each_kernel(here)
                else:
                    yield from covering(here)


# --- compiling --------------------------------------------------------------------------------------------------------


@dataclass
class Binary:
    """The result of compiling one launch."""

    kernel: str
    target: str
    dtype: str
    aligned: bool
    flags: dict[str, Any]
    num_warps: int
    used_by: list[tuple[str, str]]
    """(op, case)"""
    error: str | None = None
    spills: int | None = None
    """Bytes on NVIDIA, registers on AMD; None where the compiler did not say."""
    stack_bytes: int | None = None
    shared_bytes: int = 0
    registers: int | None = None
    fp64_instructions: int = 0
    load_bytes: list[int] = field(default_factory=list)
    """Widths of a thread's loads from global memory, one entry for each in the code."""
    byte_stores: int = 0
    """Stores of one byte into shared memory (PTX)."""

    @classmethod
    def of(cls, launch: Launch, used_by: list[tuple[str, str]], error: str | None = None) -> Binary:
        num_warps = launch.options["num_warps"]
        return cls(launch.kernel, launch.target, launch.dtype, launch.aligned, launch.flags, num_warps, used_by, error)


def total(pattern: str, text: str) -> int | None:
    """Sum of the numbers found; None if there are none."""
    numbers = [int(n) for n in re.findall(pattern, text)]
    return sum(numbers) if numbers else None


def read_ptx(ptx: str, ptxas_log: str) -> dict[str, Any]:
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx)
    # Loads ahead of time, into shared memory.
    copies = [int(n, 16) for n in re.findall(r"cp\.async\.\w+\.shared\.global\S* \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)]
    return {
        "spills": total(r"(\d+) bytes spill (?:stores|loads)", ptxas_log),
        "stack_bytes": total(r"(\d+) bytes stack frame", ptxas_log),
        "registers": total(r"Used (\d+) registers", ptxas_log),
        "fp64_instructions": len(re.findall(r"\.f64\b", ptx)),
        "load_bytes": sorted([int(count or 1) * int(bits) // 8 for count, bits in loads] + copies),
        "byte_stores": len(re.findall(r"st\.shared\.[bsu]8\b", ptx)),
    }


AMD_LOADS = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


def amd_loads(asm: str) -> list[int]:
    """Bytes of each load from global memory, without scalar loads (s_load), which fetch arguments and shared values."""
    load = r"\b(?:global|buffer|flat)_load_"
    cdna = re.findall(rf"{load}(ubyte|sbyte|ushort|sshort|short|dword)\w*?(?:x(\d))?\s", asm)
    rdna = re.findall(rf"{load}(?:d16_)?(?:hi_)?[bui](\d+)\s", asm)  # by bits since gfx11: global_load_b128
    return sorted([AMD_LOADS[kind] * int(count or 1) for kind, count in cdna] + [int(bits) // 8 for bits in rdna])


def read_amdgcn(asm: str) -> dict[str, Any]:
    return {
        "spills": total(r"\.[vs]gpr_spill_count:\s+(\d+)", asm),
        "stack_bytes": total(r"\.private_segment_fixed_size:\s+(\d+)", asm),
        "registers": total(r"\.vgpr_count:\s+(\d+)", asm),
        "fp64_instructions": len(re.findall(r"\bv_\w*f64", asm)),
        "load_bytes": amd_loads(asm),
    }


def compile_launch(launch: Launch, used_by: list[tuple[str, str]]) -> Binary:
    binary = Binary.of(launch, used_by)
    pretence = Pretence()
    pretence.target = launch.target
    driver.set_active(pretence)  # type: ignore[arg-type]  # kernels ask for the target while they are compiled
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    known = _folder and _folder / f"{key_of(source, launch)}.json"
    if known and known.exists():
        facts = json.loads(known.read_text(encoding="utf-8"))
    else:
        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                compiled = triton.compile(source, target=ALL_TARGETS[launch.target].gpu, options=launch.options)
        except Exception:
            binary.error = traceback.format_exc()[-2000:]
            return binary
        text = compiled.asm
        facts = read_ptx(text["ptx"], log.getvalue()) if "ptx" in text else read_amdgcn(text["amdgcn"])
        facts["shared_bytes"] = compiled.metadata.shared
        if known:
            write(known, json.dumps(facts))
    for name, value in facts.items():
        setattr(binary, name, value)
    return binary


_folder: Path | None = None
"""Keeps the facts about each binary, for the next run."""


@functools.cache
def own_text() -> str:
    return Path(__file__).read_text(encoding="utf-8")


def key_of(source: ASTSource, launch: Launch) -> str:
    """Triton's own key for a compilation (compilers, kernel with what it calls, types, options), and this file."""
    backend = make_backend(ALL_TARGETS[launch.target].gpu)
    key = get_cache_key(
        source, backend, backend.parse_options(launch.options), env_vars=get_cache_invalidating_env_vars()
    )
    return hashlib.sha256(f"{key}{own_text()}".encode()).hexdigest()


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


# --- kernels with every fault, for the test that faults are seen ------------------------------------------------------


@triton.jit
def faulty_kernel(X, Y, stride, SIZE: tl.constexpr):
    """fp64 arithmetic, 2-byte loads, more values alive than there are registers, a transposition of 512 KiB."""
    offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(X + offs * stride).to(tl.float64)
    y = tl.exp(x - tl.max(tl.max(x, axis=1), axis=0)) * tl.trans(x)
    tl.store(Y + offs, (y * x).to(Y.dtype.element_ty))


@triton.jit
def uncompilable_kernel(X, Y, stride, SIZE: tl.constexpr):
    tl.store(Y + tl.arange(0, SIZE - 1), 0.0)


def faulty_launches(targets: list[str]) -> list[Launch]:
    """Launches of 2048 threads, which no chip takes."""
    found: list[dict[str, Any]] = []
    x = torch.empty(1 << 16, dtype=torch.bfloat16)
    for name in targets:
        with recording([name], found):
            for kernel in (faulty_kernel, uncompilable_kernel):
                kernel[(1,)](x, x, 3, SIZE=256, num_warps=2048 // ALL_TARGETS[name].warp_size)
    return [Launch("faulty", "faulty", "bfloat16", aligned=True, whole=True, **launch) for launch in found]


# --- the command ------------------------------------------------------------------------------------------------------

_work: list[tuple[Launch, list[tuple[str, str]]]] = []


def _compile_one(at: int) -> Binary:
    return compile_launch(*_work[at])


def _fork(jobs: Iterable[int], processes: int) -> dict[int, Binary]:
    """Binaries by job; without those that were waiting or running when a compiler took its process down."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        futures = {at: pool.submit(_compile_one, at) for at in jobs}
    return {at: f.result() for at, f in futures.items() if not isinstance(f.exception(), BrokenProcessPool)}


def compile_all(launches: Iterable[Launch]) -> list[Binary]:
    """One binary for each distinct launch, on two processes."""
    users: dict[Any, list[tuple[str, str]]] = {}
    first: dict[Any, Launch] = {}
    for launch in launches:
        key = (launch.target, launch.kernel, launch.key)
        users.setdefault(key, []).extend([(launch.op, launch.case), *launch.also])
        # One user with aligned rows is enough for the launch to be one.
        if key not in first or launch.aligned:
            first[key] = launch
    # A launch holds live functions, which a fork hands on and a pickle would not.
    _work[:] = [(launch, users[key]) for key, launch in first.items()]
    done = _fork(range(len(_work)), 2)
    for at, (launch, used_by) in enumerate(_work):
        if at not in done:
            # LLVM aborts on what it cannot compile. Alone in a process, the culprit is told from the others.
            aborted = Binary.of(launch, used_by, error="the compiler aborted")
            done[at] = _fork([at], 1).get(at, aborted)
    return [done[at] for at in range(len(_work))]


def kernels() -> list[str]:
    """Names of all kernels in tigon.kernels that a launcher can launch."""
    import tigon.kernels

    names = []
    for module in pkgutil.iter_modules(tigon.kernels.__path__, "tigon.kernels."):
        members = vars(__import__(module.name, fromlist=["_"])).items()
        names += [n for n, f in members if isinstance(f, JITFunction) and n.endswith("_kernel")]
    return sorted(set(names))


def main() -> None:
    global _folder
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=ALL_TARGETS, help="a chip; all of them if left out")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="compile only what FOLDER has no facts about")
    parser.add_argument("--every", action="store_true", help="all cases, not only those that cover the ways")
    options = parser.parse_args()
    if knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: the kernels are decorated for the interpreter. Unset it.")
    targets = options.target or list(TARGETS)
    knobs.nvidia.dump_ptxas_log, _folder = True, options.keep
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        # One of each vendor shows whether a fault is seen.
        faulty = compile_all(
            faulty_launches([*{ALL_TARGETS[name].backend: name for name in reversed(targets)}.values()])
        )
        binaries = compile_all(all_launches(targets, options.every))
    report = {
        "kernels": kernels(),
        "binaries": [asdict(b) for b in binaries],
        "faulty": [asdict(b) for b in faulty],
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
