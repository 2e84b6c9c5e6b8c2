"""Every kernel, compiled for chips that are not here: does it compile, does it fit, and is it what we meant to write?

`aot.py`, beside this file, says how. It runs in a process without the interpreter. The first proofs compile every way
through the kernels for sm_90 in bf16, and each kernel once for gfx942. The second proofs compile every way for both in
all dtypes, and for the other chips.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: there are no kernels on this platform")

import triton
from aot import ACCUMULATION, ALL_TARGETS, DECODING, EACH_KERNEL_ONCE, IN_BF16, Binary, amd_loads, read_ptx
from filelock import FileLock  # torch depends on it

import tigon
from second_proofs import proved_by
from tigon.ops import OPS

FIRST = (IN_BF16, EACH_KERNEL_ONCE)
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon-tests" / "aot"
"""A binary is compiled again only if its kernel, its launch or a compiler has changed."""
each_target = pytest.mark.parametrize(
    "target", proved_by(FIRST, ALL_TARGETS, "sm_90 goes every way through the kernels, in bf16")
)

# The most threads of a program, on every chip here.
MAX_THREADS = 1024
# ptxas spills a few registers to fit one more program per SM. The spills are 8 to 24 bytes in kernels that use 64 of
# 255 registers.
PTXAS_TRADE_BYTES = 32


@dataclass(frozen=True)
class Report:
    kernels: list[str]
    binaries: list[Binary]
    faulty: list[Binary]

    def of(self, op: str, target: str) -> list[Binary]:
        """The binaries of the kernels that the op launches; of what another op makes of a kernel too."""
        kernels = {b.kernel for b in self.binaries if op in {name for name, _ in b.used_by}}
        found = [b for b in self.binaries if b.target == target and b.kernel in kernels]
        assert found, f"{op} launches no kernel for {target}"
        return found


@pytest.fixture(scope="session")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """report_of(target): what came out for the target, and for the others of its half."""
    folder = tmp_path_factory.getbasetemp()
    # xdist's workers have a folder each, and one above that they share.
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    @functools.cache
    def compiled(first: bool) -> Report:
        file = folder / f"aot-{'first' if first else 'second'}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                targets = [target for target in ALL_TARGETS if (target in FIRST) == first]
                file.write_text(_compile(targets), encoding="utf-8")
        raw = json.loads(file.read_text(encoding="utf-8"))
        return Report(raw["kernels"], *([Binary(**b) for b in raw[name]] for name in ("binaries", "faulty")))

    return lambda target: compiled(target in FIRST)


def _compile(targets: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    source = str(Path(tigon.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))
    script = Path(__file__).with_name("aot.py")
    command = [
        sys.executable,
        str(script),
        "--keep",
        str(KEPT),
        *(word for target in targets for word in ("--target", target)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# --- what may be wrong with a binary ----------------------------------------------------------------------------------


def spills(b: Binary) -> bool:
    if b.spills is None or b.stack_bytes is None:
        return True  # the compiler's output was not understood
    return b.spills > (PTXAS_TRADE_BYTES if ALL_TARGETS[b.target].backend == "cuda" else 0)


# The divergence reads each row's logit in the other's largest column, and the router's backward the gradients of a
# row's weights.
OWN_LOADS = {"divergence_kernel": 2, "topk_softmax_bwd_kernel": 10}


def has_narrow_loads(b: Binary) -> bool:
    """Rows that allow 16-byte loads are read in smaller ones, or some of them element by element."""
    # Some narrow loads are a row's own: the label's logit. A tile that is read element by element has 8 or more.
    return b.aligned and (16 not in b.load_bytes or b.load_bytes.count(2) > OWN_LOADS.get(b.kernel, 1))


def has_too_many_threads(b: Binary) -> bool:
    return b.num_warps * ALL_TARGETS[b.target].warp_size > MAX_THREADS


def does_not_fit(b: Binary) -> bool:
    return b.shared_bytes > ALL_TARGETS[b.target].shared_bytes


def computes_in_fp64(b: Binary) -> bool:
    return b.fp64_instructions > 0


def does_not_compile(b: Binary) -> bool:
    return b.error is not None


FAULTS = (does_not_compile, spills, has_narrow_loads, has_too_many_threads, does_not_fit, computes_in_fp64)


@dataclass(frozen=True)
class Known:
    """A fault that stays for now, and what it comes from."""

    fault: Callable[[Binary], bool]
    kernel: str
    backend: str
    cause: str
    flags: dict[str, Any] = field(default_factory=dict)
    since: tuple[int, int] = (0, 0)
    """The Triton with which it came."""
    dtype: str = "bfloat16"
    """A fault of fp32 alone is seen among what the second proofs compile."""

    def explains(self, b: Binary) -> bool:
        same = b.kernel == self.kernel and ALL_TARGETS[b.target].backend == self.backend
        same = same and (self.dtype == "bfloat16" or b.dtype == self.dtype)
        return same and self.flags.items() <= b.flags.items()


_ROW = "32 columns a thread, with x, dy and two fp32 sums of each alive, in the 128 registers that 16 warps leave"
_TILE = "a tile of 1024 elements leaves 4 to each of the 256 lanes of 4 warps"

INSTALLED = tuple(map(int, triton.__version__.split(".")[:2]))
_UNMASKED = "indices that are cut off at the edge: a mask would let Triton transpose bytes, and lose some"
_GATES = "a gate and a beta for each token of a chunk, whose heads lie next to each other"
_TF32 = "each factor in fp32 is two of TF32, both in registers; models train in 16 bits"
_PTXAS = "ptxas of CUDA 13.4, which Triton 3.9 brings, where 3.6's spills nothing"

_ALL_KNOWN = (
    Known(spills, "norm_bwd_kernel", "cuda", _ROW, {"BLOCK": 16384}),
    Known(spills, "norm_bwd_dx_wide_kernel", "cuda", _ROW, {"BLOCK": 16384}),
    Known(
        spills,
        "exp_logits_kernel",
        "cuda",
        "a slope beside each of a thread's 64 exponentials; 3.6 spills nothing, 3.7 and 3.8 were not compared",
        {"HAS_SOFTCAP": True},
        since=(3, 9),
    ),
    Known(
        spills,
        "decode_attention_kernel",
        "hip",
        "a few scalar registers: begin and end per row beside the addresses of keys and values",
    ),
    Known(has_narrow_loads, "rope_kernel", "hip", _TILE),
    Known(has_narrow_loads, "glu_bwd_kernel", "hip", _TILE),
    Known(has_narrow_loads, "scale_rows_kernel", "hip", _TILE),
    Known(
        has_narrow_loads,
        "exp_logits_kernel",
        "cuda",
        "the tiles come through tensor descriptors; threads load a row's label and shift, and the bias",
    ),
    *(
        Known(has_narrow_loads, kernel, "cuda", "four channels a thread, faster on an H100 than eight")
        for kernel in ("causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel")
    ),
    *(
        Known(has_narrow_loads, kernel, "cuda", _GATES)
        for kernel in ("prepare_kernel", "states_kernel", "state_gradients_kernel", "gradients_kernel")
    ),
    *(
        Known(spills, kernel, "cuda", _TF32, dtype="float32")
        for kernel in ("outputs_kernel", "states_kernel", "state_gradients_kernel", "gradients_kernel")
    ),
    Known(has_narrow_loads, "cast_kernel", "cuda", _UNMASKED, {"EVEN": False, "WANT_COLUMNS": True}, since=(3, 7)),
    Known(has_narrow_loads, "cast_kernel", "hip", _UNMASKED, {"EVEN": False, "WANT_COLUMNS": True}, since=(3, 7)),
    # docs/support.md has both compilers' registers and spills.
    Known(spills, "exp_logits_kernel", "cuda", _PTXAS, {"HAS_BIAS": True}, since=(3, 9)),
    Known(spills, "grouped_product_kernel", "cuda", _PTXAS, {"BLOCK_M": 128, "BLOCK_N": 256}, since=(3, 9)),
)
KNOWN = tuple(known for known in _ALL_KNOWN if known.since <= INSTALLED)


# Kernels of chips whose product writes exponentials.
EXPONENTIALS = {
    "label_logit_kernel", "exp_logits_kernel", "row_factors_kernel", "scaled_product_kernel", "label_order_kernel",
    "label_rows_kernel", "scaled_rows_kernel",
}  # fmt: skip
_RULE = "prepare states outputs du state_gradients gradients"
DELTA_RULE = {f"{name}_kernel" for name in _RULE.split()}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@each_target
@pytest.mark.parametrize("op", [*(name for name, op in OPS.items() if op.has_kernel), ACCUMULATION, DECODING])
def test_kernel_compiles_without_unexplained_faults(
    report_of: Callable[[str], Report], op: str, target: str, fault: Callable[[Binary], bool]
) -> None:
    chip = ALL_TARGETS[target].chip
    if chip and op in chip.spills:
        pytest.skip(f"PyTorch runs {op} on {chip.names}")
    explained = [known for known in KNOWN if known.fault is fault]
    faulty = [b for b in report_of(target).of(op, target) if fault(b)]
    unexplained = [b for b in faulty if not any(known.explains(b) for known in explained)]
    assert not unexplained, "\n".join(str(b) for b in unexplained)


_IN_FP32 = pytest.mark.second_proof("a fault of fp32 alone; the first proofs compile sm_90 in bf16")


@pytest.mark.parametrize(
    "known",
    [pytest.param(known, marks=[_IN_FP32] if known.dtype == "float32" else []) for known in KNOWN],
    ids=[f"{known.kernel}-{known.backend}-{known.fault.__name__}-{known.dtype}" for known in KNOWN],
)
def test_every_known_fault_still_occurs(report_of: Callable[[str], Report], known: Known) -> None:
    """Then its row must go too, or it would hide the next one."""
    target = "sm_90" if known.dtype == "float32" else FIRST[0]
    assert any(known.fault(b) and known.explains(b) for b in report_of(target).binaries)


def test_no_tile_is_transposed_byte_by_byte(report_of: Callable[[str], Report]) -> None:
    """Triton 3.6 to 3.9 lose bytes of such a tile on sm_90: an H100 found a quarter of an FP8 cast in wrong places."""
    wrong = [b for b in report_of(FIRST[0]).binaries if b.byte_stores]
    assert not wrong, "\n".join(str(b) for b in wrong)
    assert read_ptx("st.shared.b8 [%r1], %rs1; st.shared.v2.b8 [%r2], {%rs1, %rs2};", "")["byte_stores"] == 1


def test_op_without_kernels_launches_none(report_of: Callable[[str], Report]) -> None:
    launching = {name for b in report_of(FIRST[0]).binaries for name, _ in b.used_by}
    # The products of lora_linears are the vendor's; reading NF4 weights is a kernel.
    assert launching - {"lora_linears", ACCUMULATION, DECODING} == {name for name, op in OPS.items() if op.has_kernel}


@each_target
def test_every_kernel_is_launched_by_a_case(report_of: Callable[[str], Report], target: str) -> None:
    report, chip = report_of(target), ALL_TARGETS[target].chip
    elsewhere = set() if chip and chip.logits_tile else EXPONENTIALS
    elsewhere = elsewhere | (DELTA_RULE if chip and "gated_delta_rule" in chip.spills else set())
    launched = {b.kernel for b in report.binaries if b.target == target}
    assert launched == set(report.kernels) - elsewhere


def test_widths_of_loads_are_read_from_both_spellings_of_amds_assembler() -> None:
    cdna = """
    global_load_dwordx4 v[0:3], v4, s[0:1]
    buffer_load_ushort v5, v6, s[0:3], 0 offen
    s_load_dwordx2 s[0:1], s[4:5], 0x0
    """
    rdna = """
    global_load_b128 v[0:3], v4, s[0:1]
    global_load_d16_hi_b16 v5, v6, s[0:1]
    s_load_b64 s[0:1], s[4:5], 0x0
    """
    assert amd_loads(cdna) == amd_loads(rdna) == [2, 16]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("target", FIRST)
def test_each_fault_is_seen_in_kernels_that_have_all(
    report_of: Callable[[str], Report], target: str, fault: Callable[[Binary], bool]
) -> None:
    faulty = [b for b in report_of(target).faulty if ALL_TARGETS[b.target].backend == ALL_TARGETS[target].backend]
    assert any(fault(b) for b in faulty)
    # The first compiles: its faults are read from what the compiler made. ptxas (Triton 3.6) makes it without spills.
    assert faulty[0].error is None
    assert fault(faulty[0]) or fault in (does_not_compile, spills), faulty[0]
