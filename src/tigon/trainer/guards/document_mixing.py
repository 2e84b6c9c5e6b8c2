"""Refuses a packed run whose model mixes the documents of a sample.

models/packed_documents.py refuses the families that are known to, before anything is loaded. This guard finds the
others: before the first step it compares the loss of a packed document with its loss alone, on the model that will
train, with the attention, the precision and the processes of the run. Processes that shard the model run these forwards
as they run an evaluation: each takes the same documents, so that all of them gather the same weights.

It costs a forward of at most 512 tokens and one of at most 256, without a backward.

Processes that share rows (sharding.sequence) make the mask of the documents themselves, and refuse a model that does
not use it, so these runs are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import TrainerCallback

from tigon._trunk import decoder_layers
from tigon.data.packing import Sample
from tigon.data.tokenizer import IGNORE_INDEX
from tigon.errors import RecipeError
from tigon.techniques.keys.settings import Settings
from tigon.techniques.precision import NUMBER_FORMATS, number_format
from tigon.trainer.distributed import launch

if TYPE_CHECKING:
    from tigon.trainer.guarded import GuardedTrainer

MOST_TOKENS = 256
"""The first tokens of a document that are compared."""
_TF32, _INT8 = 2**-10, 2**-7


class DocumentMixing(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Before the first step: raises RecipeError if packing changes the loss of a document."""

    def __init__(self, trainer: GuardedTrainer, samples: Sequence[Sample], name: str, settings: Settings) -> None:
        """Set up the check.

        Args:
            trainer: The trainer of the run.
            samples: Its samples.
            name: `model.name`, for the message.
            settings: The techniques' keys.
        """
        self.trainer, self.name = trainer, name
        self.documents = two_documents(samples)
        self.eps = eps_of(settings, tf32=bool(trainer.args.tf32))

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if self.documents is None:
            return
        before, document = self.documents
        packed, alone = (self.trainer.token_mean.own_loss(sample) for sample in (joined(before, document), document))
        if not math.isfinite(packed) or not math.isfinite(alone):
            return  # guards/nan_guard.py names a loss that is not finite
        n_tokens = len(document.tokens_T) - 1
        bound = rounding(self.eps, len(decoder_layers(self.trainer.model)), n_tokens, alone)
        if abs(packed - alone) <= bound:
            return
        if launch.rank() > 0:
            raise SystemExit(2)
        raise RecipeError(
            f"data.packing is true, but {self.name} mixes the documents of a sample: {n_tokens} tokens of a document "
            f"have loss {alone:.5f} alone, and {packed:.5f} after another document, which is more than rounding "
            f"({bound:.1g}); set data.packing: false, or data.cross_document_attention: true to let it"
        )


def two_documents(samples: Sequence[Sample]) -> tuple[Sample, Sample] | None:
    """The first document, without labels, and the longest other one of the first sample that holds several; or None.

    A document is cut after its first tokens. Every token of the second one is learned, except the first.
    """
    for sample in samples:
        starts = (sample.positions_T == 0).nonzero().flatten().tolist()
        bounds = [slice(*pair) for pair in zip(starts, [*starts[1:], len(sample.tokens_T)], strict=True)]
        longest = max(bounds[1:], key=lambda bound: bound.stop - bound.start, default=slice(0, 0))
        if longest.stop - longest.start > 1:
            return _document(sample, bounds[0], learned=False), _document(sample, longest, learned=True)
    return None


def _document(sample: Sample, bounds: slice, *, learned: bool) -> Sample:
    stretch = slice(bounds.start, min(bounds.stop, bounds.start + MOST_TOKENS))
    tokens_T = sample.tokens_T[stretch]
    labels_T = tokens_T.clone() if learned else torch.full_like(tokens_T, IGNORE_INDEX)
    labels_T[0] = IGNORE_INDEX
    return Sample(tokens_T, labels_T, sample.positions_T[stretch])


def joined(before: Sample, document: Sample) -> Sample:
    """One packed sample of two documents."""
    names = ("tokens_T", "labels_T", "positions_T")
    return Sample(*(torch.cat([getattr(before, name), getattr(document, name)]) for name in names))


def eps_of(settings: Settings, *, tf32: bool) -> float:
    """The rounding of a product's factors in this run."""
    formats = number_format(settings)
    eps = _TF32 if tf32 and formats.compute_dtype == torch.float32 else formats.eps
    if settings.lora.quantize and settings.lora.quantize_to == "int8":  # which also rounds the other factor
        return max(eps, _INT8)
    return eps


def rounding(eps: float, layers: int, n_tokens: int, loss: float) -> float:
    """The largest difference of two mean losses over the same tokens that rounding explains.

    The rounding errors of layers add up like a random walk, and those of tokens average out: four standard deviations
    of their mean are 4 · eps · sqrt(layers / tokens). The softmax and the sum of the losses are in fp32 in every run,
    and are off by some units in the last place of the loss.
    """
    return 4 * eps * math.sqrt(max(layers, 1) / n_tokens) + 64 * NUMBER_FORMATS["fp32"].eps * max(1.0, loss)
