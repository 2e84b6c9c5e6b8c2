"""The section `lora`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, Section, key

LINEAR, HEAD, EMBEDDINGS, EXPERTS = "all-linear", "head", "embeddings", "experts"
WORDS = (LINEAR, "linear", HEAD, EMBEDDINGS, EXPERTS)
SUBSPACE_INITS = ("pissa", "olora")
"""Initialisations that move a part of the frozen weight into the adapter, so that the rest of it stays frozen."""
LOFTQ = "loftq"
"""The initialisation that moves a part of the rounding error of a 4-bit weight into the adapter."""
DIFFERENCE_INITS = (*SUBSPACE_INITS, LOFTQ)
"""Initialisations whose trained adapter is saved as the difference from the initial one."""
# Initialisations of PEFT that tigon does not offer, and why.
_NO_INITS: Mapping[str, str] = {
    "eva": "it needs a pass over the data for activations, which tigon does not make",
    "corda": "it needs a pass over the data for activations, which tigon does not make",
    "lora_ga": "it needs a pass over the data for gradients, which tigon does not make",
}


def _invalid_target(target: str) -> str | None:
    """Returns why a text cannot be a target (it is no regular expression), as the end of a sentence; None if it can."""
    if target in WORDS:
        return None
    try:
        re.compile(target)
    except re.error as error:
        return f"it is not a regular expression ({error}); write a pattern such as .*_proj, or a module's name"
    return None


@dataclass(frozen=True, config=CONFIG)
class LoraConfig(Section):
    """LoRA: train small adapters next to the model's frozen weights, and save them in PEFT's layout."""

    rank: int | None = key(None, minimum=1, maximum=4096, traced=True)
    """Rank of the adapters; none: full fine-tuning."""
    alpha: float | None = key(None, above=0, planned=False)
    """The adapters' output is scaled by alpha / rank; null: 2 x rank."""
    targets: tuple[str, ...] = key(
        ("linear",), choices=(*WORDS, "NAME", "PATTERN"), pattern=".+", invalid=_invalid_target, traced=True
    )
    """Modules with adapters: `all-linear` or `linear` (every linear module of the language model except `lm_head`),
    `head` (`lm_head`), `embeddings`, `experts` (the three-dimensional weights of mixtures of experts), the name or path
    of a module such as `q_proj`, or a regular expression for whole paths such as `.*\\.[qv]_proj`."""
    dropout: float = key(0.0, minimum=0, maximum=0.9, traced=True)
    """Probability with which an adapter's input is dropped."""
    rslora: bool = key(False)
    """Rank-stabilised LoRA (arXiv 2312.03732): scale the adapters' output by alpha / sqrt(rank)."""
    dora: bool = key(False, traced=True)
    """DoRA (arXiv 2402.09353): the adapters change the direction of a weight, and a trained vector its magnitude."""
    loraplus_lr_ratio: float = key(1.0, minimum=1, maximum=1000, planned=False)
    """LoRA+ (arXiv 2402.12354): the learning rate of the matrices B, as a multiple of the others'."""
    modules_to_save: tuple[str, ...] = key((), traced=True)
    """Names of modules that are trained whole and saved beside the adapters, e.g. `[lm_head, embed_tokens]`."""
    bias: str = key("none", choices=("none", "lora_only", "all"), traced=True)
    """Biases to train: `lora_only`: those of modules with adapters; `all`: every bias of the model."""
    init: str = key(
        "default",
        choices=("default", "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_N", LOFTQ),
        pattern="default|gaussian|orthogonal|olora|pissa|pissa_niter_[0-9]{1,3}|loftq|" + "|".join(_NO_INITS),
        invalid=_NO_INITS.get,
    )
    """Initial adapters, by PEFT's names. `default`: random A, and B = 0; `pissa`, `pissa_niter_N`, `olora`: the largest
    part of the weight, which is subtracted from the frozen weight; `loftq`: with `quantize`, that of the rounding
    error."""
    base: str = key("auto", choices=("auto", "fp32"), traced=True)
    """Dtype of frozen weights. `auto`: that of the matmuls, so bf16 with `amp-bf16`; `fp32`: fp32 with `amp-bf16` and
    `amp-fp16` too."""
    adapter_dtype: str = key("auto", choices=("auto", "fp32", "bf16"), traced=True)
    """Dtype of the adapters while they are trained. `auto`: fp32, and bf16 with `train.precision: bf16`; `bf16`: with
    other precisions too, as TRL's trainers do over 4-bit weights."""
    quantize: bool = key(False, traced=True)
    """QLoRA: keep the frozen weights of linear modules except `lm_head` in 4 or 8 bits (`quantize_to`); with 4 bits
    also those of experts."""
    quantize_to: str = key("nf4", choices=("nf4", "int8", "mxfp4"), traced=True)
    """`nf4`: 4 bits with double quantisation; `int8`: 8 bits (arXiv 2208.07339); `mxfp4`: experts stay in 4 bits as the
    checkpoint stores them, and all other weights in 16 bits."""
    base_offload: bool = key(False)
    """Keep the frozen weights of the decoder layers in pinned host memory, and copy each layer to the GPU before it
    computes. Two layers are on the GPU at a time."""

    @property
    def used(self) -> bool:
        """Whether the run trains adapters instead of all weights."""
        return self.rank is not None
