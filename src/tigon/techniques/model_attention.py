"""Which attention implementation the model runs."""

from __future__ import annotations

from tigon.ops.attention_with_sinks import BY_DEFAULT
from tigon.techniques import model_kernels
from tigon.techniques.records.choices import Choices
from tigon.techniques.records.condition import Condition, Exclusion
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration

# The planner changes it only on request, because the others are slower or need a package.
_ATTENTION = Setting(
    field="attention", key="model.attention",
    help="Attention implementation. The flash implementations need their package and a GPU.",
    words=("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
    flag=Flag(name="attention", help="sdpa or eager.", words=("sdpa", "eager")), traced=True,
)  # fmt: skip

# If it were off by default, a recipe that asks for it would be refused where it has no effect.
_SINKS = Setting(
    field="attention_sinks", key="model.attention_sinks",
    help="Compute attention with sinks, such as GPT-OSS's, without a matrix of scores, in models "
    "that have them and run `model.attention: eager`.",
    traced=True,
    flag=Flag(
        name="attention-sinks", help="Attention with sinks without a matrix of scores.",
        implies=(("attention", "eager"),),
    ),
    label=lambda choices: "attention with sinks" if choices.attention_sinks and not BY_DEFAULT else "",
)  # fmt: skip
_WITH_SINKS = Condition("attention_sinks", "is", True)


def sinks_flag(choices: Choices) -> bool | None:
    """The flag `attention_sinks` of `tigon.patch` for these choices."""
    return None if choices.attention_sinks == BY_DEFAULT else choices.attention_sinks


DECLARATION = Declaration(
    settings=(_ATTENTION, _SINKS),
    exclusions=()
    if BY_DEFAULT
    else (
        Exclusion(
            when=(_WITH_SINKS, Condition("attention", "is not", "eager")),
            reason="it takes the place of transformers' eager attention",
            instead="model.attention: eager, or model.attention_sinks: false",
            source="models/seams/attention_sinks.py",
        ),
        Exclusion(
            when=(_WITH_SINKS, Condition("kernels", "is not one of", tuple(sorted(model_kernels.OF_TIGON)))),
            reason="tigon.patch installs it",
            instead="model.kernels: tigon, or model.attention_sinks: false",
            source="models/seams/attention_sinks.py",
        ),
    ),
)
