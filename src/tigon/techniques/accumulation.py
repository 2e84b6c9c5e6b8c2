"""Gradient accumulation: several micro-batches per optimizer step, with equal weight for each token."""

from __future__ import annotations

from tigon.techniques.records.condition import Condition
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration, Technique

_ACCUMULATE = Setting(
    field="accumulate", key="train.gradient_accumulation", help="Micro-batches per optimizer step.", minimum=1,
    flag=Flag(name="accumulate", metavar="N", help="Micro-batches per step."), search="split", always_written=True,
    label=lambda choices: f"{choices.accumulate} micro-batches" if choices.accumulate > 1 else "",
)  # fmt: skip

DECLARATION = Declaration(
    pages={"accumulation": "Gradient accumulation"},
    settings=(_ACCUMULATE,),
    techniques=(
        Technique(
            name="accumulation", page="accumulation",
            saves="Activations of all micro-batches except one.",
            costs="Each pass has less work. Below a few thousand tokens per micro-batch the GPU idles.",
            effect_on_result="None, except for rounding: losses are sums divided by the trained tokens of the whole "
            "step, so "
            "every split of the step's samples into micro-batches gives the same gradient.",
            recipe={"train.gradient_accumulation": 4}, chosen=(Condition("accumulate", "is at least", 2),),
            arguments=lambda choices, run_info: {"gradient_accumulation_steps": choices.accumulate},
            source="transformers 5.17 trainer.py: num_items_in_batch",
        ),
    ),
)  # fmt: skip
