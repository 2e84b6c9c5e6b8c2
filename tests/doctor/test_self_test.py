"""The self-test passes right ops, and names wrong, raising and crashing ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tigon.doctor import self_test
from tigon.doctor.self_test import CHECKS
from tigon.ops import OPS
from tigon.ops.self_test import DTYPES, PRODUCT, OpCheck, check_op, share_of_allowance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", (PRODUCT, *OPS))
def test_right_op_passes(name: str, dtype: str) -> None:
    check = check_op(name, dtype)
    assert check.passed, check


def slightly_wrong(op: Any, share: float) -> Any:
    """The op with its first output larger by a share of itself."""

    def call(**inputs: Any) -> Any:
        result = op.call(**inputs)
        return result * (1 + share) if isinstance(result, torch.Tensor) else (result[0] * (1 + share), *result[1:])

    return replace(op, call=call)


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 1e-5), ("bf16", 3e-2), ("fp16", 4e-3)])
@pytest.mark.parametrize("name", OPS)
def test_slightly_wrong_op_fails(name: str, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rounding steps of the dtype or fewer, and one place of a hundred thousand in fp32."""
    monkeypatch.setitem(OPS, name, slightly_wrong(OPS[name], share))
    check = check_op(name, dtype)
    assert check.error is None and check.share is not None and check.share > 1 and not check.passed


def test_op_that_raises_or_returns_nan_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(OPS, "rms_norm", replace(OPS["rms_norm"], call=broken))
    assert check_op("rms_norm", "fp32").error == "RuntimeError: no kernel image is available"
    norm = OPS["layer_norm"]
    monkeypatch.setitem(OPS, "layer_norm", replace(norm, call=lambda **inputs: norm.call(**inputs) * float("nan")))
    check = check_op("layer_norm", "fp32")
    assert "NaN where the formula has 0" in (check.error or "") and not check.passed


def test_result_of_another_shape_or_dtype_is_refused() -> None:
    truth = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="float16"):
        share_of_allowance(torch.ones(3).half(), truth, torch.ones(3), 2.0)
    with pytest.raises(ValueError, match=r"\(4,\)"):
        share_of_allowance(torch.ones(4), truth, torch.ones(3), 2.0)


def test_share_is_the_error_relative_to_the_allowance() -> None:
    """An error of exactly what the rule allows is 1: twice half a bf16 step, and twice an fp32 step, of the truth."""
    truth = torch.tensor([1.0], dtype=torch.float64)
    allowed = 2 * (2**-8 + 2**-23)
    got = torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)
    assert share_of_allowance(got, truth, truth.bfloat16(), 2.0) == pytest.approx(2**-7 / allowed)
    assert share_of_allowance(got, truth, got, 2.0) == pytest.approx(2**-7 / (2 * (2**-7 + 2**-23)))


# A child that answers as the real one, but dies of a signal at one op, as a wrong kernel can, and hangs at another.
FAULTY_CHILD = f"""
import json, os, signal, sys, time
for name, dtype in json.loads(sys.argv[1]):
    print(json.dumps({{"op": name, "dtype": dtype}}), flush=True)
    if (name, dtype) == ("rope", "bf16"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (name, dtype) == ("swiglu", "fp16"):
        print("out of memory", file=sys.stderr)
        sys.exit(7)
    if (name, dtype) == ("geglu", "fp16"):
        time.sleep(60)
    print(json.dumps({asdict(OpCheck(op="", dtype="", share=0.5))!r} | {{"op": name, "dtype": dtype}}), flush=True)
"""


def test_crash_fails_its_own_check_alone() -> None:
    checks = {(c.op, c.dtype): c for c in self_test.run_self_test(timeout_s=2.0, child=FAULTY_CHILD)}
    assert set(checks) == set(CHECKS)
    failed = {key: check.error for key, check in checks.items() if not check.passed}
    assert failed == {
        ("rope", "bf16"): "the process died of SIGKILL",
        ("swiglu", "fp16"): "the process ended with code 7: out of memory",
        ("geglu", "fp16"): "no answer for 2 s",
    }


def test_child_that_cannot_start_fails_every_check_with_its_reason() -> None:
    checks = self_test.run_self_test(child="import nothing_of_this_name")
    assert len(checks) == len(CHECKS) and not any(check.passed for check in checks)
    assert all("nothing_of_this_name" in (check.error or "") for check in checks)


def test_output_of_the_child_reads_back_as_checks(capsys: pytest.CaptureFixture[str]) -> None:
    self_test.main(json.dumps([["rope", "fp32"], [PRODUCT, "fp16"]]))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"op": "rope", "dtype": "fp32"} and OpCheck(**lines[1]).passed
    assert lines[2] == {"op": PRODUCT, "dtype": "fp16"} and OpCheck(**lines[3]).passed
