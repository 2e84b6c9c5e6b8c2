"""Estimates of the KL divergence per token, from the log-probabilities of the sampled tokens alone."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from tigon.errors import ShapeError
from tigon.losses._checks import as_float, check_choice
from tigon.losses.numerics import expm1_bounded

KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def kl_estimate(logps: Tensor, ref_logps: Tensor, kl_estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(π || π_ref) for each token that was sampled from π.

    With d = log π - log π_ref: k1 = d, k2 = d² / 2, k3 = e^-d - 1 + d (Schulman 2020, "Approximating KL divergence").
    k1 and k3 are unbiased as values, and k3 is never negative. The gradient of k1 is 0 on average. The gradient of k2
    is on average that of KL(π || π_ref). GRPO has k3 (arXiv 2402.03300). Its exponential goes on as its tangent from
    -d = 30 on.

    Args:
        logps, ref_logps: log-probabilities of the sampled tokens, of one shape.
        kl_estimator: "k1", "k2" or "k3".

    Returns:
        The estimate per token, of the same shape.

    Raises:
        OptionError: the estimator is unknown.
        ShapeError: the shapes differ.
        DtypeError: a tensor is not floating-point.
    """
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    logps, ref_logps = as_float("logps", logps), as_float("ref_logps", ref_logps)
    if logps.shape != ref_logps.shape:
        raise ShapeError(f"ref_logps is {tuple(ref_logps.shape)}; it must be {tuple(logps.shape)}, as logps is.")
    d = logps - ref_logps
    if kl_estimator == "k1":
        return d
    if kl_estimator == "k2":
        return 0.5 * d * d
    return expm1_bounded(-d) + d
