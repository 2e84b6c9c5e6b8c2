"""Which attention implementation the model runs."""

from __future__ import annotations

from tigon.techniques.records.choices import Choices
from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration

# The planner changes it only on request, because the others are slower or need a package.
_ATTENTION = Setting(
    field="attention", key="model.attention",
    help="Attention implementation. The flash implementations need their package and a GPU.",
    words=("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
    flag=Flag(name="attention", help="sdpa or eager.", words=("sdpa", "eager")), traced=True,
)  # fmt: skip

_SINKS = Setting(
    field="attention_sinks", key="model.attention_sinks",
    help="Compute attention with sinks, such as GPT-OSS's, without a matrix of scores, in models "
    "that have them and run `model.attention: eager`.",
    traced=True,
)  # fmt: skip


def sinks_flag(choices: Choices) -> bool | None:
    """The flag `attention_sinks` of `tigon.patch` for these choices. None leaves models without sinks alone."""
    return None if choices.attention_sinks else False


DECLARATION = Declaration(settings=(_ATTENTION, _SINKS))
