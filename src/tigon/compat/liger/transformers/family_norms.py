"""`LigerRMSNorm` with the defaults of a model family: Liger's subclasses."""

from __future__ import annotations

from typing import Any

from tigon.compat.liger.transformers.modules import LigerRMSNorm


class LigerRMSNormForGemma(LigerRMSNorm):
    """1 + weight, in fp32; the weight starts at 0."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = True, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """Gemma's, with another default of `in_place`, which is ignored."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
        init_fn: str = "zeros", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    """As Gemma 2's."""


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """As Gemma 2's."""


class LigerRMSNormForGemma3(LigerRMSNorm):
    """Gemma's, whose size is called `dim`."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma", init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """The weight itself, in fp32; without a weight if with_scale=False."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma", init_fn: str = "ones",
        in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmer(LigerRMSNormForGemma4):
    """Gemma 4's; without a weight it needs no `dim`."""

    def __init__(
        self, dim: Any = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """Llama's, with another default of `in_place`, which is ignored."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = False, row_mode: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    """As OLMo 2's."""
