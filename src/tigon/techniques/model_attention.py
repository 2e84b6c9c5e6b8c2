"""Which attention implementation the model runs."""

from __future__ import annotations

from tigon.techniques.records.setting import Flag, Setting
from tigon.techniques.records.technique import Declaration

# The planner changes it only on request, because the others are slower or need a package.
_ATTENTION = Setting(
    field="attention", key="model.attention",
    help="Attention implementation. The flash implementations need their package and a GPU.",
    words=("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
    flag=Flag(name="attention", help="sdpa or eager.", words=("sdpa", "eager")), traced=True,
)  # fmt: skip

DECLARATION = Declaration(settings=(_ATTENTION,))
