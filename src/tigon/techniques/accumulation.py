"""Several micro-batches in an optimizer step, each token weighing the same."""

from __future__ import annotations

from tigon.techniques.condition import Condition
from tigon.techniques.technique import Technique

TECHNIQUES = (
    Technique(
        name="accumulation", page="accumulation",
        saves="Activations of all micro-batches but one.",
        costs="Less work at a time; below a few thousand tokens a micro-batch the GPU idles.",
        precision="None: losses are sums divided by the learned tokens of the whole step, so that any split of a batch "
        "gives the same gradient to rounding.",
        recipe={"train.gradient_accumulation": 4}, chosen=(Condition("accumulate", "is at least", 2),),
        arguments=lambda choices, facts: {"gradient_accumulation_steps": choices.accumulate},
        source="transformers 5.17 trainer.py: num_items_in_batch",
    ),
)  # fmt: skip
