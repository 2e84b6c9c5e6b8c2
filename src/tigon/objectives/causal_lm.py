"""Next-token prediction by the model's own loss. It takes every recipe that no other objective takes."""

from __future__ import annotations

from tigon.objectives.base import Objective

OBJECTIVE = Objective
