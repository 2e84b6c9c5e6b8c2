import torch
from torch.nn import functional as F


def linear_kl(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    *,
    kind="forward",
    beta=0.5,
    bias=None,
    teacher_bias=None,
    temperature=1.0,
    softcap=None,
    teacher_softcap=None,
    logit_scale=1.0,
    teacher_logit_scale=1.0,
    mask=None,
):
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
