"""Heads that predict several tokens ahead, trained together with a causal language model or on a frozen one.

spec.py      the shape of the heads, and their training objective
heads.py     the modules: Medusa's residual blocks (arXiv 2401.10774), DeepSeek-V3's MTP modules (arXiv 2412.19437)
loss.py      the losses of the heads, fused or plain
attach.py    attaches heads to a model, which gets another forward in training
record.py    losses and accuracies of the heads, summed until they are logged
layout.py    files of heads, in the formats of FasterDecoding/Medusa and vLLM
callback.py  trains heads inside a Trainer: schedule, metrics, checkpoints, final files
generate.py  decoding with the heads: the output of greedy decoding in fewer forward passes
"""

from __future__ import annotations

from tigon.medusa.attach import attach, detach, heads_of
from tigon.medusa.generate import Generated, medusa_generate
from tigon.medusa.layout import load_heads, save_heads
from tigon.medusa.spec import HeadsSpec, Objective

__all__ = [
    "Generated",
    "HeadsSpec",
    "Objective",
    "attach",
    "detach",
    "heads_of",
    "load_heads",
    "medusa_generate",
    "save_heads",
]
