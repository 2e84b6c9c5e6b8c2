"""docs/post-training-ops.md: the functions for each framework give the same log-probabilities."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[2] / "docs" / "post-training-ops.md"


def test_functions_of_all_frameworks_agree() -> None:
    page: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)), page)
    hidden, weight, ids = (page[name] for name in ("hidden", "weight", "ids"))
    logits = hidden @ weight.t()
    log_p = torch.log_softmax(logits / 0.7, -1)
    want, entropy = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    flat = page["linear_cross_entropy"](hidden, weight, ids, 0.7)
    torch.testing.assert_close(flat, (want.flatten(), entropy.flatten()))
    for name in ("fused_linear_for_ppo", "log_probs_from_hidden"):
        torch.testing.assert_close(page[name](hidden, weight, ids, 0.7), (want, entropy))
    torch.testing.assert_close(page["log_probs_from_logits"](logits, ids, 0.7), want)
    shifted = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(page["compute_logprobs"](logits, ids), shifted)
    torch.testing.assert_close(page["compute_logprobs_of_hidden"](hidden, weight, ids)[0], shifted)
