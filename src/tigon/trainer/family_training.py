"""Trains a small random model of a family as `tigon train` does, for `tigon models --train` and docs/models-trained.md.

Each family is trained in full, and with adapters that are merged. A recipe that is refused with a next step, such as
`set data.packing: false`, is tried again with it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tigon.errors import TigonError
from tigon.models.table import MODELS
from tigon.models.verification.small_models import NotBuilt, families_without_a_row, small_model
from tigon.trainer.run import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINS, REFUSED, NOT_BUILT = "trains", "refused", "not built"
NAME = "checkpoint"  # the folder of the model, as messages name it
_WORDS = ("karan", "lotis", "mivel", "nedor", "puran", "kadol", "loren", "tis")
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# Next steps that a refusal may name, as `set model.attention: eager`.
_NEXT_STEP = re.compile(r"set ((?:model|data|train)\.[a-z_]+): (\w+)")
_RECIPE: Mapping[str, Any] = {
    # packing: true, so that a family that mixes the documents of a sample is refused and its key stands in the table.
    "data": {"sequence_length": 48, "eval_fraction": 0, "cache": False, "packing": True},
    "train": {"steps": 1, "batch_size": 1, "device": "cpu", "report_to": "none"},
    "comparison": {"steps": 0},
}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4}, "output": {"merge": True}},
}


@dataclass(frozen=True)
class Attempt:
    """One run of a family."""

    trains: bool
    keys: Mapping[str, str] = field(default_factory=dict)
    """Recipe keys that the family needs, because the run without them was refused with this next step."""
    refusals: tuple[str, ...] = ()
    """The messages that refused the runs without these keys, and the last message if no run trains."""


@dataclass(frozen=True)
class TrainedFamily:
    """What `tigon train` does with a family."""

    model_type: str
    full: Attempt | None
    """The run that trains every weight; None: no small model could be built."""
    lora: Attempt | None
    """The run with adapters and `output.merge`."""
    reason: str = ""
    """Why no small model could be built."""

    @property
    def keys(self) -> str:
        """The recipe keys that the family needs, as text."""
        attempts = [attempt for attempt in (self.full, self.lora) if attempt is not None]
        needed = dict(item for attempt in attempts for item in attempt.keys.items())
        return ", ".join(f"{key}: {value}" for key, value in sorted(needed.items()))

    def outcome(self, kind: str) -> str:
        """TRAINS, REFUSED or NOT_BUILT. kind: full or lora."""
        attempt = self.full if kind == "full" else self.lora
        if attempt is None:
            return NOT_BUILT
        return TRAINS if attempt.trains else REFUSED

    @property
    def why(self) -> str:
        """The refusals, or the reason why no model could be built."""
        attempts = (attempt for attempt in (self.full, self.lora) if attempt is not None)
        return self.reason or "; ".join(
            dict.fromkeys(attempt.refusals[-1] for attempt in attempts if not attempt.trains)
        )


def all_families() -> list[str]:
    """The model types of transformers' causal language models, and of tigon's table."""
    return sorted({*MODELS, *families_without_a_row()})


def trained_families(names: Iterable[str] = ()) -> Iterator[TrainedFamily]:
    """Yield the outcome of each family, or of the named ones, in a temporary folder."""
    gc.freeze()  # the Trainer collects garbage twice per run, which would visit every object of transformers
    for name in list(names) or all_families():
        with TemporaryDirectory(prefix="tigon-") as folder:
            yield trained_family(name, Path(folder))


def trained_family(model_type: str, folder: Path) -> TrainedFamily:
    """Save a small checkpoint of a family in an empty folder, and train it there.

    Errors other than refusals are raised: they are bugs.
    """
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            model: PreTrainedModel = small_model(model_type)[0]
        except NotBuilt as error:
            return TrainedFamily(model_type, None, None, str(error))
        model.save_pretrained(folder / NAME)
        letters().save_pretrained(folder / NAME)
        rows = [{"prompt": f"say {word}", "completion": f"{word} {word}"} for word in _WORDS]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return TrainedFamily(model_type, full=_attempt(folder, "full"), lora=_attempt(folder, "lora"))


def _attempt(folder: Path, kind: str) -> Attempt:
    import yaml

    keys: dict[str, str] = {}
    refusals: list[str] = []
    while True:
        name = f"{kind}-{len(keys)}"
        recipe = {**_RECIPE, **_KINDS[kind]}
        recipe["model"] = {"name": str(folder / NAME)}
        recipe["data"] = {**_RECIPE["data"], "source": str(folder / "rows.jsonl")}
        recipe["output"] = {**recipe.get("output", {}), "name": name, "folder": str(folder), "sample_tokens": 0}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        try:
            train(path, [f"{key}={value}" for key, value in keys.items()])
            return Attempt(True, keys, tuple(refusals))
        except TigonError as error:
            refusals.append(str(error).replace(f"{folder}/", ""))
            step = _NEXT_STEP.search(refusals[-1])
            if step is None or step[1] in keys:
                return Attempt(False, keys, tuple(refusals))
            keys = {**keys, step[1]: step[2]}


def letters() -> Any:
    """A tokenizer with one token per letter, so that its vocabulary fits a small model."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*_SPECIAL, " ", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


# --- as text ----------------------------------------------------------------------------------------------------------

HEADING = f"{'family':24s}{'full':12s}{'LoRA, merged':14s}recipe keys, and why not"


def text_line(family: TrainedFamily) -> str:
    """The line of a family for the terminal."""
    outcomes = f"{family.outcome('full'):12s}{family.outcome('lora'):14s}"
    return f"{family.model_type:24s}{outcomes}{'; '.join(filter(None, (family.keys, family.why)))}".rstrip()
