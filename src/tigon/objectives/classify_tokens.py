"""Token classification: one label for each word, such as named entities."""

from __future__ import annotations

from typing import ClassVar

from tigon.models.loading.classifier import TOKEN
from tigon.objectives.classify import Classify


class ClassifyTokens(Classify):
    """Trains a head that labels each word at its first token."""

    task: ClassVar[str] = TOKEN


OBJECTIVE = ClassifyTokens
