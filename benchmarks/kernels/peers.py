"""Other libraries, tigon with other settings and on other problems, and the products that bound a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.suites import SUITES
from tigon.bench.impls import LIGER, LIGER_NAMES, LIMITS, PEERS, Catalogue, Impl, peers, products
from tigon.ops import OPS

GIB = 1 << 30


# --- tigon with other settings and on other problems ------------------------------------------------------------------


def _half_ignored(inputs: dict[str, Any]) -> dict[str, Any]:
    target = inputs["target"].clone()
    target.view(-1)[1::2] = -100
    return {**inputs, "target": target}


def _half_masked(inputs: dict[str, Any]) -> dict[str, Any]:
    ids = inputs["ids"]
    mask = torch.arange(ids.numel(), device=ids.device).view(ids.shape) % 2 == 0
    return {**inputs, "mask": mask}


def _with_entropy(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    result = f(hidden, weight, ids, outputs=("entropy",))
    return result.logprob + result.entropy  # type: ignore[no-any-return]


def _tigon(op: str, name: str, **fields: Any) -> Impl:
    return Impl(name=f"tigon {name}", op=op, **{"target": OPS[op].call, "role": "ours", **fields})


_LOSS, _LOGPROBS, _FROZEN_WEIGHT = "linear_cross_entropy", "linear_logprobs", ("x", "lora_a", "lora_b")
TIGON = (
    _tigon("cross_entropy", "new gradient", fixed={"inplace": False}),
    _tigon(_LOSS, "one chunk", fixed={"chunk_bytes": 1024 * GIB}),
    _tigon(_LOSS, "16-bit sums", fixed={"chunk_bytes": GIB, "fp32_accumulate": False}),
    _tigon(_LOSS, "small chunks", fixed={"chunk_bytes": 5 * GIB // 16, "fp32_accumulate": False}),
    _tigon(_LOSS, "half ignored", role="variant", vary=_half_ignored),
    _tigon(_LOSS, "frozen head", role="variant", grads=("hidden",)),
    _tigon(_LOSS, "eval", role="variant", grads=()),
    _tigon(_LOGPROBS, "kept logits", fixed={"chunk_bytes": 4 * GIB}),
    _tigon(_LOGPROBS, "recomputed logits", fixed={"chunk_bytes": GIB // 2}),
    _tigon(_LOGPROBS, "with entropy", role="variant", adapt=_with_entropy),
    _tigon(_LOGPROBS, "half masked", role="variant", vary=_half_masked),
    _tigon(_LOGPROBS, "frozen head", role="variant", grads=("hidden",)),
    _tigon(_LOGPROBS, "eval", role="variant", grads=()),
    _tigon("lora_linear", "frozen weight", role="variant", grads=_FROZEN_WEIGHT),
    Impl(
        name="eager frozen weight",
        op="lora_linear",
        role="variant",
        target=OPS["lora_linear"].oracle,
        grads=_FROZEN_WEIGHT,
    ),
)


# --- other libraries --------------------------------------------------------------------------------------------------


def _liger_portable(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    # temperature, ignored id, entropies
    return -f(hidden, weight, ids, 1.0, -100, False)  # type: ignore[no-any-return]


def _trl_logprobs(f: Any, hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
    # bias, ids, temperature, columns per chunk (the trainers' value in TRL 1.16), softcap, logit scale, other outputs
    return f(hidden, weight, None, ids, 1.0, 32768, None, 1.0, ())[0]


def _trl_divergence(
    f: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str
) -> Tensor:
    # hidden, weight and bias of the student, then of the teacher
    return f(hidden, weight, None, teacher_hidden, teacher_weight, None, _BETA[kind])[0]  # type: ignore[no-any-return]


def _liger_divergence(
    f: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str
) -> Tensor:
    return f(hidden, weight, teacher_hidden, teacher_weight, jsd_beta=_BETA[kind])  # type: ignore[no-any-return]


_TEACHER = ("teacher_hidden", "teacher_weight")
_BETA = {"jsd": 0.5, "forward": 0.0, "reverse": 1.0}
"""The divergence in TRL's and Liger's terms: the teacher's share of the mixture."""
_LIGER_CUTE, _LIGER_SCALED, _QUACK = (
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
    "liger_kernel.ops.fused_linear_scaled_cross_entropy",
    "quack.linear_cross_entropy",
)
_CUTE: dict[str, Any] = {"keywords": {"impl": "nvidia-cutedsl"}, "overwrites": True}
_WAITS = {"overwrites": True, "capturable": False}
_SCALED = "LigerFusedLinearScaledCrossEntropyFunction.apply"
_CHUNKED = {_LOSS: "chunked_linear_cross_entropy"}

OTHERS: tuple[Impl, ...] = (
    *peers(
        "liger fp32",
        LIGER,
        {_LOSS: "liger_fused_linear_cross_entropy"},
        keywords={"accum_dtype": torch.float32},
        **_WAITS,
    ),
    # Opt-in CuTe kernels, which need nvidia-cutlass-dsl and a Hopper GPU or newer.
    *peers(
        "liger cute",
        "liger_kernel.functional",
        {op: name.removeprefix("liger_") for op, name in LIGER_NAMES.items()},
        **_CUTE,
    ),
    *peers(
        "liger cute",
        "liger_kernel.functional",
        {"cross_entropy": "cross_entropy"},
        adapt=lambda f, logits, target: f(logits, target)[0],
        capturable=False,
        **_CUTE,
    ),
    *peers("liger cute", _LIGER_CUTE, {_LOSS: "liger_fused_linear_cross_entropy_sm90"}, **_WAITS),
    *peers(
        "liger scaled",
        _LIGER_SCALED,
        {_LOSS: _SCALED},
        adapt=lambda f, hidden, weight, target: f(hidden, weight, target).mean(),
        **_WAITS,
    ),
    *peers(
        "liger scaled",
        _LIGER_SCALED,
        {_LOGPROBS: _SCALED},
        adapt=lambda f, hidden, weight, ids: -f(hidden, weight, ids),
        **_WAITS,
    ),
    # On Hopper the function above needs CuTe and does not fall back. This is what it runs elsewhere.
    *peers(
        "liger portable", _LIGER_SCALED, {_LOGPROBS: "_FusedLinearPPOFallbackFunction.apply"}, adapt=_liger_portable
    ),
    *peers("trl", "trl.kernels", {_LOGPROBS: "ChunkedLogProbFunction.apply"}, adapt=_trl_logprobs),
    *peers(
        "trl",
        "trl.kernels.chunked_divergence",
        {"linear_kl": "ChunkedDivergenceFunction.apply"},
        adapt=_trl_divergence,
        frozen=_TEACHER,
    ),
    # It computes the gradient in the forward. The backward compares the upstream gradient with 1 on the host.
    *peers(
        "liger jsd",
        LIGER,
        {"linear_kl": "liger_fused_linear_jsd"},
        adapt=_liger_divergence,
        capturable=False,
        mean_only=True,
        frozen=_TEACHER,
    ),
    *peers("quack", "quack.rmsnorm", {"rms_norm": "rmsnorm"}),
    *peers(
        "quack",
        "quack.rmsnorm",
        {"add_rms_norm": "rmsnorm"},
        adapt=lambda f, x, residual, weight, eps=1e-6: f(x, weight, residual=residual, eps=eps, prenorm=True),
    ),
    *peers(
        "quack",
        "quack.cross_entropy",
        {"cross_entropy": "cross_entropy"},
        keywords={"inplace_backward": True},
        overwrites=True,
    ),
    *peers("quack", _QUACK, _CHUNKED, overwrites=True),
    *peers("quack base", _QUACK, _CHUNKED, keywords={"use_scaled_exp": False}, overwrites=True),
    # The default skips blocks whose softmax is small, which is fast but not the exact gradient. `cce exact` skips none.
    *peers("cce", "cut_cross_entropy", {_LOSS: "linear_cross_entropy"}, capturable=False),
    *peers(
        "cce exact",
        "cut_cross_entropy",
        {_LOSS: "linear_cross_entropy"},
        keywords={"filter_eps": None},
        capturable=False,
    ),
)


# --- limits -----------------------------------------------------------------------------------------------------------


def _four_of_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return products(hidden, weight, logits_twice=True)


def _six_of_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any) -> Tensor:
    teacher_NH = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    for _pass in ("forward", "backward"):
        torch.mm(teacher_NH, teacher_weight.t())
    return products(hidden, weight, logits_twice=True)


def _eight_of_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any) -> Tensor:
    products(teacher_hidden, teacher_weight, logits_twice=True)
    return products(hidden, weight, logits_twice=True)


def _four_of_kl(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **_: Any) -> Tensor:
    torch.mm(teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), teacher_weight.t())
    return products(hidden, weight)


def _two_of_lora(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    """y = x Wᵀ and dx = dy W: the products of a frozen layer without its adapter."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.mm(torch.mm(rows, weight.t()), weight)


def _three_in_16_bits(x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The products of a linear layer without FP8, with y in place of dy."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight.t())
    return torch.mm(y, weight), torch.mm(y.t(), rows)


# The first limit of an op is the bound of its rows.
MORE_LIMITS = tuple(
    Impl(name=name, op=op, role="limit", target=target)
    for name, op, target in (
        ("four products", _LOGPROBS, _four_of_logprobs),
        ("six products", "linear_kl", _six_of_kl),
        ("eight products", "linear_kl", _eight_of_kl),
        ("products once", "linear_kl", _four_of_kl),
        ("two products", "lora_linear", _two_of_lora),
        ("16-bit products", "fp8_linear", _three_in_16_bits),
    )
)
CATALOGUE = Catalogue(SUITES, (*TIGON, *PEERS, *OTHERS, *LIMITS, *MORE_LIMITS))
