"""The texts on which an exported model is compared with the trained one: the run's own data, or built-in prompts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.data.chat import chat_template
from tigon.data.chat.render_chat import render_chat
from tigon.data.documents import BadRows, Document, RowReader
from tigon.data.labelled_rows import LabelledRows
from tigon.data.source import reading
from tigon.errors import TigonError, UsageError
from tigon.models.loading.classifier import SEQUENCE, TOKEN
from tigon.objectives.recipe_checks import loads_saved
from tigon.objectives.rules.classify import classifies
from tigon.trainer.folder.run_folder import RECIPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

N_TEXTS, N_TOKENS = 4, 128
"""A 7B model in bf16 takes about a second of a CPU for each 100 tokens."""
_MAX_CHARACTERS, _MAX_DATA_MIB = 2000, 8.0
BUILT_IN = (
    "What is the capital of France? Answer in one sentence.",
    'def mean(values):\n    """The mean of some numbers."""\n    return sum(values) / len(values)\n',
    "Naïve café, 東京, Привет — it's 1,234.5 km; don't round 0.0075 to 0.01!",
    "The first paragraph ends here.\n\n  - an item\n  - another item\n\nThe second paragraph follows.",
)
_QUESTION, _ANSWER, _AGAIN = (
    {"role": role, "content": BUILT_IN[i]} for i, role in enumerate(("user", "assistant", "user"))
)
CHATS = ([_QUESTION], [_QUESTION, _ANSWER, _AGAIN])


@dataclass(frozen=True)
class Probe:
    """A text. If it is a chat, the template has written its special tokens as text."""

    text: str
    is_chat: bool

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens of the text."""
        if self.is_chat:
            return list(tokenizer(self.text, add_special_tokens=False)["input_ids"])
        return list(tokenizer(self.text)["input_ids"])


@dataclass(frozen=True)
class Probes:
    """The texts, and where they are from."""

    texts: tuple[Probe, ...]
    origin: str
    """On which texts, in words."""


def probes_of(run: Path | None, tokenizer: Any) -> Probes:
    """The first texts of the data that a run trained on; built-in prompts if there is no run or no data.

    Args:
        run: The run folder, if the model is that of a run.
        tokenizer: The tokenizer of the trained model.
    """
    texts = list(itertools.islice(_of_data(run, tokenizer), N_TEXTS)) if run is not None else []
    if texts:
        return Probes(tuple(texts), "on the run's data")
    chats = [Probe(text, True) for text in rendered(tokenizer, CHATS)]
    plain = [Probe(text, False) for text in BUILT_IN]
    return Probes(tuple([*chats, *plain][:N_TEXTS]), "on tigon's own texts")


def rendered(tokenizer: Any, chats: Iterable[Sequence[dict[str, str]]]) -> Iterator[str]:
    """The chats that the tokenizer's template accepts, as text that asks for an answer."""
    for chat in chats if chat_template.has_template(tokenizer) else ():
        try:
            yield render_chat(tokenizer, chat, add_generation_prompt=True)
        except UsageError:  # the template demands another order or a list of parts
            continue


def _of_data(run: Path, tokenizer: Any) -> Iterator[Probe]:
    try:
        recipe = loads_saved(run / RECIPE)
        data, bad = recipe.data, BadRows("skip")
        rendering = chat_template.choose(tokenizer, data.template, data.learn)
        layout: str | RowReader = data.format
        if classifies(recipe):
            layout = LabelledRows(SEQUENCE if recipe.train.objective == "classify" else TOKEN)
        for document in reading.read(data.sources(), layout, _MAX_DATA_MIB, bad):
            if (probe := _probe(document, tokenizer, rendering)) is not None:
                yield probe
    except (TigonError, OSError) as error:  # the data have moved, or are rows of another objective
        reason = " ".join(str(error).split())
        print(f"note     the run's data are not read ({reason}); built-in prompts are compared", file=sys.stderr)


def _probe(document: Document, tokenizer: Any, rendering: chat_template.Rendering) -> Probe | None:
    text = "".join(part.text for part in chat_template.segments_of(document, tokenizer, rendering))[:_MAX_CHARACTERS]
    return Probe(text, chat_template.is_chat(document, tokenizer, rendering)) if text.strip() else None
