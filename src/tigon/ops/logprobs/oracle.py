"""The unfused formula of log-probabilities, and random ids for the records' cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops.logprobs.rows import Logprobs

# V vocabulary, K ids of a token.


def logprobs_oracle(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, mask: Tensor | None = None, outputs: tuple[str, ...] = (), top_k: int = 0,
) -> Tensor | Logprobs:  # fmt: skip
    """Log-softmax in at least fp32, then a gather; differentiated by autograd."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = torch.log_softmax(z / temperature, -1)
    one = ids.ndim < logits.ndim
    ids = ids.unsqueeze(-1) if one else ids
    if mask is not None:
        ids = torch.where(mask.unsqueeze(-1), ids, ignore_index)
    ignored = ids == ignore_index
    out = ignored.all(-1)
    logprob = log_p.gather(-1, ids.masked_fill(ignored, 0).long()).masked_fill(ignored, 0.0)
    logprob = logprob.squeeze(-1) if one else logprob
    if not outputs and not top_k:
        return logprob
    top = torch.topk(logits if logit_scale > 0 else -logits, top_k, -1).indices if top_k else None
    return Logprobs(
        logprob,
        lse=torch.logsumexp(z / temperature, -1).masked_fill(out, 0.0) if "lse" in outputs else None,
        entropy=(-(log_p.exp() * log_p).sum(-1)).masked_fill(out, 0.0) if "entropy" in outputs else None,
        predicted=z.argmax(-1).masked_fill(out, ignore_index) if "predicted" in outputs else None,
        topk_logprob=None if top is None else log_p.gather(-1, top).masked_fill(out.unsqueeze(-1), 0.0),
        topk_ids=None if top is None else top.masked_fill(out.unsqueeze(-1), ignore_index),
    )


def make_ids(options: dict[str, Any], rows: tuple[int, ...], V: int, device: torch.device) -> Tensor:
    """Random ids of a case.

    Takes "ids" (K), "masked" and "ignored" (shares of the tokens and of the ids) out of `options`, and adds the mask.
    """
    K, masked, share = options.pop("ids", None), options.pop("masked", 0.0), options.pop("ignored", 0.1)
    ids = torch.randint(V, rows if K is None else (*rows, K), device=device)
    ignored = torch.rand(ids.shape, device=device) < share
    if masked:
        options["mask"] = torch.rand(rows, device=device) >= masked
    return ids.masked_fill(ignored, options.get("ignore_index", -100))
