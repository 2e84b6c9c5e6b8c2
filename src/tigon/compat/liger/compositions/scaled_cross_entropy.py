"""The loss per token of a head with a temperature, for policy training, through `tigon.linear_logprobs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import ops
from tigon.errors import OptionError


class LigerFusedLinearScaledCrossEntropyFunction:
    """-log p(target), then the entropy and the log-probabilities of more ids if requested; 0 for ignored tokens."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if not isinstance(return_entropy, bool):
            raise OptionError(f"return_entropy={return_entropy!r} must be True or False.")
        valid = target != ignore_index
        ids = target[:, None]
        if selected_token_ids is not None:
            selected = selected_token_ids.to(ids.dtype).expand(len(target), -1)
            ids = torch.cat((ids, selected.masked_fill(~valid[:, None], ignore_index)), 1)
        found = ops.linear_logprobs(
            _input, weight, ids, temperature=temperature, ignore_index=ignore_index,
            outputs=("entropy",) if return_entropy else (),
        )  # fmt: skip
        logprob = found if isinstance(found, Tensor) else found.logprob
        results = [-logprob[:, 0]]
        if not isinstance(found, Tensor) and found.entropy is not None:
            results.append(found.entropy)
        if selected_token_ids is not None:
            results.append(logprob[:, 1:])
        return results[0] if len(results) == 1 else tuple(results)
