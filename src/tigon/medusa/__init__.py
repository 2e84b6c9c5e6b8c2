"""Heads that predict several tokens ahead, trained beside or on top of a causal language model.

spec.py      which heads, and how they are trained
heads.py     the modules: Medusa's residual blocks (arXiv 2401.10774), DeepSeek-V3's MTP modules (arXiv 2412.19437)
loss.py      their losses, fused or plain
attach.py    a model with heads: the same model, with another forward in training
planned.py   heads as the planner sees them
record.py    losses and accuracies of the heads, summed until they are logged
layout.py    heads on disk, as FasterDecoding/Medusa and vLLM read them
generate.py  decoding with the heads: the text of greedy decoding in fewer forward passes
"""

from __future__ import annotations

from tigon.medusa.attach import attach, detach, heads_of
from tigon.medusa.generate import Generated, medusa_generate
from tigon.medusa.layout import load_heads, save_heads
from tigon.medusa.planned import Attachment, planned
from tigon.medusa.spec import HeadsSpec, Objective

__all__ = [
    "Attachment", "Generated", "HeadsSpec", "Objective", "attach", "detach", "heads_of", "load_heads",
    "medusa_generate", "planned", "save_heads",
]  # fmt: skip
