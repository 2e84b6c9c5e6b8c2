"""LoftQ (arXiv 2310.08659): initial adapters that make up for the rounding of 4-bit weights, as well as their rank can.

One iteration, as in PEFT's `replace_lora_weights_loftq`: the weight is quantised, and the adapter is the largest part
of the error. PEFT 0.21 computes it on a GPU only, and its adapter is not divided by the scale that `lora.alpha` sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"  # PEFT's name of a model's first adapter


@torch.no_grad()
def initialise(wrapped: Any, whole: PreTrainedModel) -> int:
    """Set the adapters of all 4-bit linear layers in place.

    Args:
        wrapped: The PEFT model. Its adapters are new.
        whole: The same model without adapters, in 16 or 32 bits, on any device.

    Returns:
        The number of layers.
    """
    from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]
    from peft.tuners.lora.bnb import Linear4bit

    weights = dict(whole.named_parameters(remove_duplicate=False))
    layers = [
        (path, layer) for path, layer in wrapped.get_base_model().named_modules() if isinstance(layer, Linear4bit)
    ]
    for path, layer in layers:
        a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        stored = layer.get_base_layer().weight
        rounded = dequantize_4bit(stored.data, stored.quant_state).float()
        error = weights[f"{path}.weight"].to(device=rounded.device, dtype=torch.float32) - rounded
        left, right = factors(error, layer.r[_ADAPTER])
        a.copy_(right / layer.scaling[_ADAPTER] ** 0.5)
        b.copy_(left / layer.scaling[_ADAPTER] ** 0.5)
    return len(layers)


def factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The nearest matrix of `rank`, as a product of two factors of equal norms.

    The eigenvectors of the smaller of M Mᵀ and Mᵀ M take half of the time of a singular value decomposition: 1.2 s of
    2.6 s for 2048 x 2048 on one CPU thread, and for 8192 x 2048 hardly more. Quantisation errors have no small singular
    values, so that the squares in M Mᵀ lose nothing that counts.

    Args:
        matrix: (out, in), fp32.
        rank: At most the smaller size of `matrix`.

    Returns:
        (out, rank) and (rank, in).
    """
    if matrix.shape[0] > matrix.shape[1]:
        right, left = factors(matrix.T, rank)
        return left.T, right.T
    squares, vectors = torch.linalg.eigh(matrix @ matrix.T)
    basis = vectors[:, -rank:]
    root = squares[-rank:].clamp_min(torch.finfo(matrix.dtype).tiny) ** 0.25
    return basis * root, (basis.T @ matrix) / root[:, None]
