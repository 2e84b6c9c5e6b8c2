from collections import namedtuple

import torch
from torch.nn import functional as F

Logprobs = namedtuple("Logprobs", "logprob lse entropy predicted topk_logprob topk_ids")


def logprobs(logits, ids, *, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100, mask=None, outputs=(), top_k=0):
    z = logits.float() * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    keep = ids != ignore_index
    if mask is not None:
        keep = keep & mask
    lp = z.log_softmax(-1)
    logprob = lp.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~keep, 0)
    if not outputs:
        return logprob
    return Logprobs(
        logprob,
        z.logsumexp(-1).masked_fill(~keep, 0) if "lse" in outputs else None,
        -(lp.exp() * lp).sum(-1).masked_fill(~keep, 0) if "entropy" in outputs else None,
        z.argmax(-1) if "predicted" in outputs else None,
        None,
        None,
    )


def linear_logprobs(hidden, weight, ids, *, bias=None, chunk_bytes=None, **rest):
    return logprobs(F.linear(hidden, weight, bias), ids, **rest)


def linear_kl(hidden, weight, teacher_hidden, teacher_weight, *, kind="forward", beta=0.5, bias=None, teacher_bias=None,
              temperature=1.0, softcap=None, teacher_softcap=None, logit_scale=1.0, teacher_logit_scale=1.0, mask=None):
    def lp(h, w, b, scale, cap):
        z = F.linear(h, w, b).float() * scale
        if cap is not None:
            z = cap * torch.tanh(z / cap)
        return (z / temperature).log_softmax(-1)

    s = lp(hidden, weight, bias, logit_scale, softcap)
    t = lp(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    if kind == "forward":
        return (t.exp() * (t - s)).sum(-1)
    if kind == "reverse":
        return (s.exp() * (s - t)).sum(-1)
    m = torch.log((1 - beta) * s.exp() + beta * t.exp())
    return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)
