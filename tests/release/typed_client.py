"""A typed program, as a user writes it. Every checker must accept it and know the types that it asserts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import tigon
from tigon import PatchReport
from tigon.errors import TigonError
from tigon.losses import DPOLoss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = tigon.nn.RMSNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss = tigon.linear_cross_entropy(hidden, self.head.weight, labels)
        assert isinstance(loss, Tensor)  # with `outputs`, the op returns a LossOutput
        return loss


def patch(model: nn.Module) -> PatchReport | None:
    try:
        report = tigon.patch(model)
    except TigonError as error:
        print(error)
        return None
    assert_type(report, PatchReport)
    report.undo()
    return report


x = torch.randn(4, 16)
assert_type(tigon.rms_norm(x, torch.ones(16)), Tensor)
assert_type(tigon.__version__, str)
print(Model().loss(x, torch.tensor([1, 2, 3, 4])))
print(DPOLoss)
