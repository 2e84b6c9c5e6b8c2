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
    "cache_implementation": "hybrid",  # of older checkpoints; transformers ignores it
}
"""The values with which these options change nothing. Others change nothing as None, False or 0, except token ids."""


def objection(config: GenerationConfig, model_config: GenerationConfig | None = None) -> str | None:
    """The options that the generator does not know, in one clause; None if it knows all of them.

    model_config: The model's own config, from which transformers' `generate` takes the options that `config` leaves
    out.
    """
    given = {} if model_config is None else model_config.to_diff_dict()
    given |= {name: value for name, value in config.to_dict().items() if value is not None}
    others = sorted(name for name, value in given.items() if _is_unknown(name, value))
    return f"the generation config sets {', '.join(others)}" if others else None


def _is_unknown(name: str, value: object) -> bool:
    if name in _TAKEN or name.startswith("_"):
        return False
    if name.endswith("_token_id"):
        return value is not None
    return bool(value) and value != _NEUTRAL.get(name)


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
