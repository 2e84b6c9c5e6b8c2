"""Classification heads: which class of transformers loads a config's model, and the names of its labels.

A config declares its head by `architectures`, as transformers writes it into every saved model. So a saved classifier,
a reward model too, is loaded with its head by every command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tigon.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SEQUENCE, TOKEN = "sequence", "token"
_ENDINGS = {"ForSequenceClassification": SEQUENCE, "ForTokenClassification": TOKEN}
PEFT_TASKS = {SEQUENCE: "SEQ_CLS", TOKEN: "TOKEN_CLS"}
"""Task -> PEFT's name of it, which the file of a model's adapters holds."""


def task_of(config: PreTrainedConfig) -> str | None:
    """`sequence` or `token` if the config declares a model with a classification head; None for any other model."""
    declared = next(iter(getattr(config, "architectures", None) or ()), "")
    return next((task for ending, task in _ENDINGS.items() if declared.endswith(ending)), None)


def auto_classifier(task: str) -> Any:
    """The class of transformers that loads a model with this head."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    return AutoModelForSequenceClassification if task == SEQUENCE else AutoModelForTokenClassification


def as_classifier(config: PreTrainedConfig, task: str, labels: Sequence[str]) -> Any:
    """A copy of a config that declares a classification head with these labels.

    Raises:
        UsageError: transformers has no such head for this type of model.
    """
    known = auto_classifier(task)._model_mapping
    if type(config) not in known:
        raise UsageError(f"transformers has no {task} classification for {config.model_type} models")
    id2label = dict(enumerate(labels))
    classified = type(config).from_dict({**config.to_dict(), "id2label": id2label})
    classified.label2id = {label: number for number, label in id2label.items()}
    classified.architectures = [known[type(config)].__name__]
    classified._attn_implementation = config._attn_implementation
    classified._name_or_path = config._name_or_path
    return classified


def labels_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The names of a classifier's labels, in the order of its outputs."""
    return tuple(str(config.id2label[number]) for number in sorted(config.id2label))


def beside_adapters(config: PreTrainedConfig, adapters: Path) -> Any:
    """The config of the model that a run's adapters were trained in.

    Args:
        config: The config of their base model.
        adapters: Their folder, which has a config.json if the model has a classification head.

    Returns:
        `config`, or a copy of it with the head, the labels and the padding token of the adapters.
    """
    file = adapters / "config.json"
    if not file.is_file():
        return config
    declared = json.loads(file.read_text(encoding="utf-8"))
    own = type(config).from_dict(declared)
    task = task_of(own)
    if task is None:
        return config
    classified = as_classifier(config, task, labels_of(own))
    set_pad_id(classified, own.get_text_config().pad_token_id)
    return classified


def set_pad_id(config: PreTrainedConfig, pad_id: int | None) -> None:
    """Name the token that pads, by which a decoder with a head finds the last token of a sequence.

    A config that names one keeps it.
    """
    for part in (config, config.get_text_config()):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = pad_id


def of_layers(config: PreTrainedConfig, names: Iterable[str]) -> tuple[str, ...]:
    """The names of tensors that belong neither to a head nor to a pooler, which checkpoints of language models lack.

    Args:
        config: A classifier's config.
        names: The names of its tensors, or of those in a checkpoint.
    """
    task = task_of(config)
    assert task is not None, "the config declares no head"
    prefix = auto_classifier(task)._model_mapping[type(config)].base_model_prefix
    return tuple(name for name in names if name.startswith(f"{prefix}.") and "pooler" not in name.split("."))
