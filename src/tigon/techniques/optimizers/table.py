"""The optimizers that a run can choose, one row each. planner/simulate/optimizer_cost.py has what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tigon.techniques.condition import Condition


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A row of the table."""

    name: str
    trainer_name: str | None
    """Its name in transformers' TrainingArguments; None: tigon's own, given to the Trainer as a class."""
    package: str | None = None
    """The package it needs beyond PyTorch and transformers: a key of PACKAGE_EXTRAS."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_backward: bool = False
    """It updates each weight in the backward pass, so it can neither accumulate nor clip."""
    averages: bool = False
    """It evaluates and saves averages of the weights, and takes the place of the learning rate schedule."""
    needs_compiler: bool = False
    """It uses torch.compile, which needs a C++ compiler on a CPU."""
    searched: bool = False
    """Whether the planner may choose it if the user names no optimizer. Rows that change the result less come first."""
    effect_on_result: str = ""
    change_rank: int = 0
    last_resort: bool = False
    searched_with: tuple[Condition, ...] = ()
    """As in Technique."""

    @property
    def recipe(self) -> Mapping[str, object]:
        """The recipe lines that choose it."""
        clipping = {"train.max_grad_norm": 0} if self.in_backward else {}
        schedule = {"train.schedule": "constant"} if self.averages else {}
        return {"train.optimizer": self.name, **clipping, **schedule}

    @property
    def has_plain_states(self) -> bool:
        """Whether its states are plain tensors that belong to one parameter each: PyTorch's and transformers' own."""
        return self.package is None and self.trainer_name is not None


_BNB, _TORCHAO = "bitsandbytes", "torchao"
_ADEMAMIX = (
    "Another algorithm: AdamW with a second, slow average of the gradient (decay 0.9999), which counts five times."
)
_ROWS = (
    # torch.optim.AdamW(fused=True); arXiv 1711.05101
    Optimizer(name="adamw", trainer_name="adamw_torch_fused", searched=True),
    # torch.optim.AdamW: _multi_tensor_adam
    Optimizer(name="adamw-foreach", trainer_name="adamw_torch"),
    # arXiv 2110.02861
    Optimizer(
        name="adamw-8bit",
        trainer_name="adamw_bnb_8bit",
        package=_BNB,
        searched=True,
        change_rank=1,
        effect_on_result="Moments are rounded to 8 bits in blocks of 256. Those of embeddings and of parameters "
        "below 4,096 elements are fp32.",
    ),
    # arXiv 2305.14314 §3
    Optimizer(name="paged-adamw", trainer_name="paged_adamw_32bit", package=_BNB, devices=("cuda",)),
    Optimizer(
        name="paged-adamw-8bit",
        trainer_name="paged_adamw_8bit",
        package=_BNB,
        devices=("cuda",),
        change_rank=1,
        effect_on_result="As `adamw-8bit`.",
    ),
    # arXiv 2302.06675
    Optimizer(
        name="lion-8bit",
        trainer_name="lion_8bit",
        package=_BNB,
        change_rank=4,
        effect_on_result="Another algorithm: updates are the sign of a moment, which is rounded to 8 bits in blocks "
        "of 256.",
    ),
    # bitsandbytes.optim.AdEMAMix; arXiv 2409.03137
    Optimizer(name="ademamix", trainer_name="ademamix", package=_BNB, change_rank=3, effect_on_result=_ADEMAMIX),
    Optimizer(
        name="ademamix-8bit",
        trainer_name="ademamix_8bit",
        package=_BNB,
        change_rank=4,
        effect_on_result="As `ademamix`, with moments rounded as in `adamw-8bit`.",
    ),
    Optimizer(
        name="paged-ademamix",
        trainer_name="paged_ademamix_32bit",
        package=_BNB,
        devices=("cuda",),
        change_rank=3,
        effect_on_result="As `ademamix`.",
    ),
    Optimizer(
        name="paged-ademamix-8bit",
        trainer_name="paged_ademamix_8bit",
        package=_BNB,
        devices=("cuda",),
        change_rank=4,
        effect_on_result="As `ademamix-8bit`.",
    ),
    # schedulefree.AdamWScheduleFree; arXiv 2405.15682
    Optimizer(
        name="schedule-free",
        trainer_name="schedule_free_adamw",
        package="schedulefree",
        averages=True,
        change_rank=3,
        effect_on_result="Another algorithm: AdamW's first moment is replaced by a running average of the weights, and "
        "this average is evaluated and saved.",
    ),
    # torchao.optim.AdamW8bit
    Optimizer(
        name="adamw-torchao-8bit",
        trainer_name="adamw_torch_8bit",
        package=_TORCHAO,
        needs_compiler=True,
        searched=True,
        searched_with=(Condition("sharding.fsdp", "is", True),),  # elsewhere `adamw-8bit` does it without a compiler
        change_rank=1,
        effect_on_result="As `adamw-8bit`. If a parameter's size is not divisible by 256, its moments keep its dtype.",
    ),
    # torchao.optim.AdamW4bit; arXiv 2309.01507
    Optimizer(
        name="adamw-torchao-4bit",
        trainer_name="adamw_torch_4bit",
        package=_TORCHAO,
        needs_compiler=True,
        searched=True,
        last_resort=True,
        change_rank=2,
        effect_on_result="Moments are rounded to 16 levels in blocks of 256.",
    ),
    # transformers.Adafactor; arXiv 1804.04235
    Optimizer(
        name="adafactor",
        trainer_name="adafactor",
        searched=True,
        last_resort=True,
        change_rank=4,
        effect_on_result="Another algorithm: no first moment, a second moment of rank 1, updates clipped to an RMS "
        "of 1.",
    ),
    Optimizer(
        name="sgd",
        trainer_name="sgd",
        change_rank=5,
        effect_on_result="Another algorithm: no moments, and weight decay is an L2 term.",
    ),
    # muon.py; torch.optim.Muon; arXiv 2502.16982
    Optimizer(
        name="muon",
        trainer_name=None,
        change_rank=4,
        effect_on_result="Another algorithm: the updates of linear layers are orthogonal matrices with the RMS of "
        "AdamW's updates. Other weights are trained by AdamW.",
    ),
    # galore.py; arXiv 2403.03507
    Optimizer(
        name="galore",
        trainer_name=None,
        searched=True,
        last_resort=True,
        change_rank=4,
        effect_on_result="Another algorithm: updates of linear layers have rank `train.galore_rank`. Other "
        "weights are trained by AdamW.",
    ),
    Optimizer(
        name="galore-layerwise",
        trainer_name=None,
        in_backward=True,
        searched=True,
        last_resort=True,
        change_rank=5,
        effect_on_result="As `galore`, and the gradient's norm is not clipped.",
    ),
)

OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in _ROWS}
