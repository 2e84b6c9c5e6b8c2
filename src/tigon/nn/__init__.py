"""`torch.nn` modules that call `tigon.ops`, for custom models that `tigon.patch` does not support."""

from __future__ import annotations

from tigon.nn.layers import GeGLUMLP, LayerNorm, RMSNorm, SwiGLUMLP
from tigon.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "GeGLUMLP", "LayerNorm", "LinearCrossEntropyLoss", "RMSNorm", "SwiGLUMLP"]
