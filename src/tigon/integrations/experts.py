"""Register tigon's experts in transformers' interface: `from_pretrained(..., experts_implementation="tigon")`."""

from __future__ import annotations

from tigon.models.seams.experts import experts_forward

NAME = "tigon"


def register() -> None:
    """Let transformers know the experts implementation "tigon". Registering twice does nothing new.

    Models then take it as `experts_implementation="tigon"` or with `set_experts_implementation("tigon")`.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
