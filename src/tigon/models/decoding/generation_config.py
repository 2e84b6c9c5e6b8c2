"""What the generator reads of a generation config of transformers, and which of its options it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tigon.models.decoding.rows import Limits
from tigon.models.decoding.sampling import Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_TOP_K = 50
"""transformers' own, if neither the config nor a call sets `top_k`."""
_TAKEN = frozenset(
    {
        "max_new_tokens",
        "max_length",  # max_new_tokens goes before it
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "transformers_version",
        "disable_compile",
        "use_cache",
    }
)
"""What the generator reads, or may ignore."""
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
}
"""The values with which these options change nothing. Others change nothing as None, False or 0."""


def objection(config: GenerationConfig) -> str | None:
    """The options that the generator does not know, in one clause; None if it knows all of them."""
    others = sorted(
        name
        for name, value in config.to_diff_dict().items()
        if value and name not in _TAKEN and not name.startswith("_") and value != _NEUTRAL.get(name)
    )
    return f"the generation config sets {', '.join(others)}" if others else None


def settings_of(config: GenerationConfig) -> tuple[Limits, Sampling]:
    """When completions end and how tokens are chosen. PyTorch's generator of random numbers gives the seed."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    sampling = Sampling(
        temperature=float(1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0,
        top_k=DEFAULT_TOP_K if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        seed=int(torch.randint(2**62, ())),
    )
    limits = Limits(new_tokens=config.max_new_tokens, ends=tuple(end for end in ends if end is not None))
    return limits, sampling
