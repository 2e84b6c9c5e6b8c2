"""The keys of `model` that techniques read."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, Section, key

KERNELS = ("none", "no-flce", "tigon", "liger")


@dataclass(frozen=True, config=CONFIG)
class ModelKeys(Section):
    kernels: str = key(
        "tigon", "`tigon`: patch every op; `no-flce`: patch all ops except the linear cross entropy; `none`: do not "
        "patch; `liger`: use Liger Kernel instead, for comparison.", choices=KERNELS, traced=True,
    )  # fmt: skip
    attention: str = key(
        "sdpa", "Attention implementation. The flash implementations need their package and a GPU.",
        choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3"), traced=True,
    )  # fmt: skip
    attention_sinks: bool = key(
        True, "Compute attention with sinks, such as GPT-OSS's, without a matrix of scores, in models that have them "
        "and run `model.attention: eager`.", traced=True,
    )  # fmt: skip
