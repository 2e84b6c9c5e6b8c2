"""The arguments that norms refuse. test_accuracy.py checks their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops import add_rms_norm, layer_norm, rms_norm


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_parameter_that_does_not_fit_is_refused(norm: Any, backend: Any) -> None:
    x = torch.randn(3, 8, device=backend.device)
    with pytest.raises(ShapeError, match=r"must be \(8,\)"):
        norm(x, torch.ones(7, device=backend.device))
    with pytest.raises(ShapeError, match="0-dim"):
        norm(x[0, 0], None)
    with pytest.raises(ShapeError, match="is on meta"):
        norm(x, torch.ones(8, device="meta"))
    with pytest.raises(DtypeError, match="float64"):
        norm(x, torch.ones(8, device=backend.device, dtype=torch.float64))
    with pytest.raises(DtypeError, match="not supported"):
        norm(x.to(torch.int32), None)


def test_unknown_casting_and_mismatched_residual_are_refused(backend: Any) -> None:
    x = torch.randn(3, 8, device=backend.device)
    with pytest.raises(OptionError, match="casting='qwen'"):
        rms_norm(x, None, casting="qwen")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="must agree"):
        add_rms_norm(x, x[:2])
    with pytest.raises(ShapeError, match="must agree"):
        add_rms_norm(x, x.half())
