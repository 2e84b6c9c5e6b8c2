"""The keys of `model` that techniques read."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, Section, key

KERNELS = ("none", "no-flce", "tigon", "liger")
OF_TIGON = frozenset({"tigon", "no-flce"})
"""Values of `model.kernels` that patch the model with tigon's ops."""


@dataclass(frozen=True, config=CONFIG)
class ModelKeys(Section):
    kernels: str = key("tigon", choices=KERNELS, traced=True)
    """`tigon`: patch every op; `no-flce`: patch all ops except the linear cross entropy; `none`: do not patch; `liger`:
    use Liger Kernel instead, for comparison."""
    attention: str = key("sdpa", choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3"), traced=True)
    """Attention implementation. The flash implementations need their package and a GPU."""
    attention_sinks: bool = key(True, traced=True)
    """Compute attention with sinks, such as GPT-OSS's, without a matrix of scores, in models that have them and run
    `model.attention: eager`."""

    @property
    def patched(self) -> bool:
        """Whether tigon's ops replace the model's own."""
        return self.kernels in OF_TIGON

    @property
    def flash_attention(self) -> bool:
        return self.attention.startswith("flash")
