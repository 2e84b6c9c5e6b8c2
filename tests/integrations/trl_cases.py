"""The table of docs/trainers.md: a trainer of TRL, an option, and whether tigon's head runs with it.

`test_trl_trainers.py` runs every row twice, without and with `fuse`, and fails if the state is not the one of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from trl_runs import FUSED_FORWARD_SINCE, four_bits, model, trl_version

FUSED, UNFUSED, REFUSED = "fused", "unfused", "refused"


@dataclass(frozen=True)
class Case:
    """One row: what `trl_runs.train` is given, and what must come of it."""

    trainer: str
    option: str
    state: str = FUSED
    reason: str = ""
    """Words of the warning or of TRL's error, for an unfused or refused row."""
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    note: str = ""
    """The page's remark on the row."""
    before_1_15: tuple[str, str] = ("", "")
    """(state, reason) with an earlier TRL, if another. The state SKIPPED leaves the row out."""

    @property
    def id(self) -> str:
        return f"{self.trainer}-{self.option}".replace(" ", "_").replace("`", "")


SKIPPED = "skipped"
READS_LOGITS = ("ORPO", "CPO", "GKD", "Distillation")
"""Trainers that compute their loss from logits before TRL 1.15, and stay with TRL."""


def cases_of_this_trl() -> list[Case]:
    """The rows of CASES, with the states of the installed version."""
    version = trl_version()
    if version < FUSED_FORWARD_SINCE:
        return [_before_1_15(case) for case in CASES]
    return [_in_1_15(case) for case in CASES] if version == (1, 15) else CASES


def _in_1_15(case: Case) -> Case:
    if case.trainer == "Distillation":
        # TRL 1.15 imports the divergence inside the loss, where no trainer can have another one.
        return replace(case, state=UNFUSED, reason="not the code of TRL that tigon knows")
    return case


def _before_1_15(case: Case) -> Case:
    if case.trainer in READS_LOGITS:
        return replace(case, state=UNFUSED, reason="_compute_loss" if case.trainer == "Distillation" else "logits")
    state, reason = case.before_1_15
    return replace(case, state=state, reason=reason) if state else case


def lora(**options: Any) -> Any:
    """LoRA on the trunk, made when the case runs."""

    def make() -> Any:
        import peft

        return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "gate_proj"], **options})

    return make


def of(family: str, **overrides: Any) -> Callable[[], Any]:
    return lambda: model(family, **overrides)


EVERY: dict[str, dict[str, Any]] = {
    "full training": {"evaluate": True},
    "LoRA": {"lora": lora()},
    "QLoRA (NF4)": {"lora": lora(), "policy": lambda: four_bits(torch.float32)},
    "QLoRA (NF4), bf16 autocast": {"lora": lora(), "policy": lambda: four_bits(torch.bfloat16), "bf16": True},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "activation checkpointing": {"gradient_checkpointing": True},
    "softcap (Gemma 2)": {"policy": of("gemma2", final_logit_softcapping=3.0, query_pre_attn_scalar=8)},
    "scaled logits (Granite)": {"policy": of("granite", logits_scaling=3.0)},
    "tied head": {"policy": of("llama", tie_word_embeddings=True)},
}
"""Options that every trainer with a language model is run with."""

GENERATING = ("GRPO", "RLOO")
LANGUAGE_MODELS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO", "GKD", "Distillation")


def _every() -> list[Case]:
    cases = []
    for trainer in LANGUAGE_MODELS:
        for option, given in EVERY.items():
            options = dict(given)
            if trainer in (*GENERATING, "GKD", "Distillation", "ORPO", "CPO"):
                options.pop("evaluate", None)
            if trainer in GENERATING and option == "gradient accumulation":
                options["steps_per_generation"] = 2
            if trainer in GENERATING and "bf16" in given:
                options["max_steps"] = 1  # in the second step the terms of the gradient cancel to a thousandth
            # RLOO's terms cancel in the second step with TRL 1.8: its gradients are 0.001 times the first step's, and
            # the rounding is as large. In fp64 the gradients agree.
            # Over 4-bit weights TRL makes the adapters bf16, to which their gradients are rounded.
            rounded = (trainer, option) == ("RLOO", "LoRA") or "QLoRA" in option
            tolerance = 0.05 if "bf16" in given else 1e-3 if rounded else 1e-4
            cases.append(Case(trainer, option, options=options, tolerance=tolerance))
    return cases


ADAPTER = "its trainers read the head's weight, and would pass the adapter by"

CASES: list[Case] = [
    *_every(),
    Case("SFT", "bf16 autocast", options={"bf16": True}, tolerance=0.05),
    Case("SFT", "scaled logits (Cohere)", options={"policy": of("cohere", logit_scale=0.3)}),
    Case("SFT", "mixture of experts with auxiliary loss", options={
        "policy": of("mixtral", num_local_experts=2, num_experts_per_tok=1, output_router_logits=True),
    }),
    Case("SFT", "`padding_free`", options={"padding_free": True, "max_length": None}),
    Case("SFT", "`packing`", options={"packing": True, "packing_strategy": "wrapped", "data": "plain"}),
    Case("SFT", "`assistant_only_loss`", options={"assistant_only_loss": True, "data": "chat"}),
    Case("SFT", "`loss_type=\"dft\"`", options={"loss_type": "dft"}, before_1_15=(UNFUSED, "model's logits")),
    Case("SFT", "head trained beside LoRA (`modules_to_save`)", options={"lora": lora(modules_to_save=["lm_head"])}),
    Case("SFT", "head with a bias", options={"policy": of("phi", partial_rotary_factor=0.5)}),
    Case("SFT", "`label_smoothing_factor`", UNFUSED, "label_smoothing_factor", {"label_smoothing_factor": 0.1},
         note="TRL computes this loss from all logits; entropy and token accuracy are fused",
         before_1_15=(SKIPPED, "TRL itself fails: it logs num_valid_tokens, which this loss does not have")),
    Case("SFT", "LoRA on the head", REFUSED, "lm_head", {"lora": lora(target_modules=["q_proj", "lm_head"])},
         note=ADAPTER),
    Case("DPO", "`label_smoothing`", options={"label_smoothing": 0.1}),
    Case("DPO", "`loss_type`: robust, IPO, APO, SFT together", options={
        "loss_type": ["robust", "ipo", "apo_zero", "sft"], "loss_weights": [0.5, 0.2, 0.2, 0.1], "label_smoothing": 0.1,
    }),
    Case("DPO", "`use_weighting` (WPO)", options={"use_weighting": True}),
    Case("DPO", "`ld_alpha`", options={"ld_alpha": 0.5}),
    Case("DPO", "`precompute_ref_log_probs`", UNFUSED, "precompute_ref_log_probs", {"precompute_ref_log_probs": True},
         note="TRL's own head computes the reference before `fuse`, and the policy's has to round alike",
         before_1_15=(SKIPPED, "the second run finds the first run's cached reference, whose file is gone")),
    Case("DPO", "`padding_free`", options={"padding_free": True}),
    Case("DPO", "LoRA on the head", REFUSED, "lm_head", {"lora": lora(target_modules=["q_proj", "lm_head"])},
         note=ADAPTER, before_1_15=(UNFUSED, "the head is a peft.tuners.lora.layer.Linear")),
    Case("KTO", "class weights", options={"desirable_weight": 1.5, "undesirable_weight": 0.7}),
    Case("KTO", "`loss_type=\"apo_zero_unpaired\"`", options={"loss_type": "apo_zero_unpaired"}),
    *(
        Case("GRPO", f"`loss_type=\"{kind}\"`", options={"loss_type": kind})
        for kind in ("grpo", "dr_grpo", "bnpo", "cispo")
    ),
    Case("GRPO", "`importance_sampling_level=\"sequence\"` (GSPO)", options={"importance_sampling_level": "sequence"}),
    Case("GRPO", "`num_iterations` above 1", options={"num_iterations": 2}),
    Case("GRPO", "`top_entropy_quantile`", options={"top_entropy_quantile": 0.5}),
    Case("GRPO", "`beta=0`, no reference", options={"beta": 0.0}),
    Case("GRPO", "`cast_lm_head_to_fp32`", options={"cast_lm_head_to_fp32": True}),
    Case("RLOO", "`num_iterations` above 1", options={"num_iterations": 2}),
    Case("CPO", "`loss_type=\"simpo\"`", options={"loss_type": "simpo", "cpo_alpha": 0.0}),
    Case("CPO", "`loss_type=\"ipo\"`", options={"loss_type": "ipo"}),
    Case("GKD", "forward KL (`beta=0`)", options={"beta": 0.0}),
    Case("GKD", "reverse KL (`beta=1`)", options={"beta": 1.0}),
    Case("Distillation", "forward KL (`beta=0`)", options={"beta": 0.0}),
    Case("Distillation", "Jensen-Shannon (`beta=0.3`)", options={"beta": 0.3}),
    Case("Reward", "full training", UNFUSED, "no head over a vocabulary",
         note="a reward model has no head over a vocabulary"),
    Case("Reward", "QLoRA (NF4), bf16 autocast", UNFUSED, "no head over a vocabulary", {
        "lora": lora(task_type="SEQ_CLS"), "policy": lambda: four_bits(torch.bfloat16, scores=True), "bf16": True,
    }, 0.05, "a reward model has no head over a vocabulary"),
]  # fmt: skip

FSDP2 = dict.fromkeys(LANGUAGE_MODELS, FUSED)
"""The state of each trainer under FSDP2, with a reference model sharded too, and a whole teacher in each process."""
SHARDED_TEACHER = "the teacher's head is sharded"
ZERO3 = {
    **dict.fromkeys(("SFT", "DPO", "KTO", "GRPO", "RLOO", "ORPO", "CPO"), FUSED),
    **dict.fromkeys(("GKD", "Distillation"), UNFUSED),
}
"""The state of each trainer under DeepSpeed ZeRO-3, with its reference model or teacher sharded too."""
