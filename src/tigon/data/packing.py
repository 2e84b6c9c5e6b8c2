"""Packs encoded documents into samples of `sequence_length` tokens. The collator makes batches of them.

Plain text is a stream: documents follow one another and are cut where a sample ends. Every sample except the last
is full, and no token is lost. A prompt and its answer stay together: best-fit packing puts each pair into the fullest
sample that has room.

Attention does not cross documents unless `cross_document_attention` is set. Every document, and every piece that
continues in the next sample, restarts `position_ids` at 0. transformers builds the block mask from these positions.
The first token of a piece cannot be predicted from anything, so its label is IGNORE_INDEX.

Legend: N samples, B samples per micro-batch, T tokens per sample.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.errors import DataError

BLANK = -1  # the index of a sample without labels, in a SampleDataset


@dataclass(frozen=True)
class Sample:
    """One sequence of tokens: (T,) int32 tensors of tokens, labels, and positions that restart at every piece."""

    tokens_T: Tensor
    labels_T: Tensor
    positions_T: Tensor

    def more_bytes(self) -> bytes:
        """What identifies the sample besides its tensors."""
        return b""


@dataclass(frozen=True)
class Packed:
    """The samples of a data set, and counts of what packing changed."""

    samples: list[Sample]
    n_tokens: int
    n_truncated: int
    n_dropped: int


class SampleDataset(Dataset[Sample]):
    """Samples as a Dataset for a DataLoader. The index `BLANK` gives a sample without labels."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        if index == BLANK:
            first = self.samples[0]
            return replace(first, labels_T=torch.full_like(first.labels_T, IGNORE_INDEX))
        return self.samples[index]


class BlankPadded(Sampler[int]):
    """A sampler with `BLANK` added to a multiple of the samples that all processes take in one micro-batch.

    Accelerate would repeat samples at the end of an epoch, so that an epoch would depend on the number of processes.
    """

    def __init__(self, sampler: Any, multiple: int) -> None:
        self.sampler, self.multiple = sampler, multiple

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[int]:
        yield from self.sampler
        yield from [BLANK] * (len(self) - len(self.sampler))

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)


def pack(
    documents: Sequence[Encoded], length: int, *, packing: bool, cross_document: bool, too_long: str,
    keep_unlearned: bool = False,
) -> Packed:  # fmt: skip
    """Pack documents into samples of at most `length` tokens: text first, then prompts with answers.

    Args:
        documents: The encoded documents.
        length: The most tokens per sample.
        packing: Whether a sample may hold several documents.
        cross_document: Whether tokens attend to earlier documents in their sample.
        too_long: error, truncate or drop, for a prompt with its answer of more than `length` tokens.
        keep_unlearned: Whether to keep samples without a learned token, such as a prompt alone.

    Raises:
        DataError: `too_long` is error and a prompt with its answer is too long; the message names the first one.
    """
    text = [d for d in documents if d.is_text]
    prompted, n_truncated, n_dropped = _shorten([d for d in documents if not d.is_text], length, too_long)
    if packing:
        samples = [_sample(pieces, cross_document) for pieces in _stream(text, length)]
        samples += [_sample(pieces, cross_document) for pieces in _best_fit(prompted, length)]
    else:
        pieces = [_slice(d, i, i + length) for d in text for i in range(0, len(d.tokens), length)]
        samples = [_sample([piece], cross_document) for piece in [*pieces, *prompted]]
    if not keep_unlearned:
        samples = [sample for sample in samples if bool((sample.labels_T != IGNORE_INDEX).any())]
    return Packed(samples, sum(len(sample.tokens_T) for sample in samples), n_truncated, n_dropped)


def _shorten(documents: Sequence[Encoded], length: int, too_long: str) -> tuple[list[Encoded], int, int]:
    fitting: list[Encoded] = []
    n_truncated = n_dropped = 0
    for document in documents:
        if len(document.tokens) <= length:
            fitting.append(document)
            continue
        if too_long == "error":
            n_over = sum(len(d.tokens) > length for d in documents)
            raise DataError(
                f"{document.origin}: {len(document.tokens)} tokens, over data.sequence_length {length} "
                f"({n_over} documents are); raise it, or set data.too_long to truncate or drop"
            )
        cut = _slice(document, 0, length)
        if too_long == "drop" or all(label == IGNORE_INDEX for label in cut.labels):  # only prompt is left
            n_dropped += 1
        else:
            n_truncated += 1
            fitting.append(cut)
    return fitting, n_truncated, n_dropped


def _slice(document: Encoded, start: int, stop: int) -> Encoded:
    return Encoded(document.tokens[start:stop], document.labels[start:stop], document.origin, document.is_text)


def _stream(documents: Sequence[Encoded], length: int) -> Iterable[list[Encoded]]:
    """Pieces of consecutive documents, `length` tokens at a time. The last sample may be shorter."""
    pieces: list[Encoded] = []
    free = length
    for document in documents:
        start = 0
        while start < len(document.tokens):
            piece = _slice(document, start, start + free)
            pieces.append(piece)
            start += len(piece.tokens)
            free -= len(piece.tokens)
            if free == 0:
                yield pieces
                pieces, free = [], length
    if pieces:
        yield pieces


def _best_fit(documents: Sequence[Encoded], length: int) -> list[list[Encoded]]:
    """Best fit, longest first: each goes into the sample with the least sufficient room. O(N log N) by bisection."""
    samples: list[list[Encoded]] = []
    room: list[tuple[int, int]] = []  # (free tokens, index of the sample), sorted
    for document in sorted(documents, key=lambda d: -len(d.tokens)):
        size = len(document.tokens)
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            free, index = length, len(samples)
            samples.append([])
        else:
            free, index = room.pop(at)
        samples[index].append(document)
        bisect.insort(room, (free - size, index))
    return samples


def _sample(pieces: Sequence[Encoded], cross_document: bool) -> Sample:
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for piece in pieces:
        restart = not cross_document or not tokens
        first = 0 if restart else len(tokens)
        positions += range(first, first + len(piece.tokens))
        tokens += piece.tokens
        labels += [IGNORE_INDEX, *piece.labels[1:]] if restart else piece.labels
    return Sample(*(torch.tensor(values, dtype=torch.int32) for values in (tokens, labels, positions)))


@dataclass(frozen=True)
class Collator:
    """Turns samples into the model's keyword arguments, int64 on the CPU.

    - packed: input_ids, labels, position_ids of shape (B, T). An attention mask is not needed, because the positions
      mark the documents. Padding of short samples restarts the positions, so no token attends to it.
    - packed, with attention across documents: as packed, without position_ids if no row restarts them. The model then
      makes the same positions, and a patched model makes its mask without asking the GPU (models/seams/mask.py).
    - padded: input_ids, labels, attention_mask of shape (B, T). T is the longest sample; padding is on the right.
    - flatten: joined into one sequence (1, B*T), as the variable-length flash kernels require, with the documents' ends
      and the longest document's length. Without these, every layer of transformers derives them from the positions
      again, and the host waits for the GPU each time.
    """

    pad_id: int
    packing: bool
    flatten: bool = False
    cross_document: bool = False

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.tokens_T) for sample in samples)
        padding = [longest - len(sample.tokens_T) for sample in samples]
        tokens = _stack([sample.tokens_T for sample in samples], padding, self.pad_id)
        labels = _stack([sample.labels_T for sample in samples], padding, IGNORE_INDEX)
        if not self.packing:
            mask = _stack([torch.ones_like(sample.tokens_T) for sample in samples], padding, 0)
            return {"input_ids": tokens, "labels": labels, "attention_mask": mask}
        positions = torch.stack(
            [torch.cat([sample.positions_T, torch.arange(n)]) for sample, n in zip(samples, padding, strict=True)]
        ).long()
        batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        if not self.flatten:
            if self.cross_document and bool((positions == torch.arange(longest)).all()):
                del batch["position_ids"]
            return batch
        return {name: value.reshape(1, -1) for name, value in batch.items()} | _document_bounds(positions)


def _document_bounds(positions: Tensor) -> dict[str, Any]:
    """The arguments of transformers for documents that follow one another: every 0 in `positions` starts one."""
    starts = (positions.reshape(-1) == 0).nonzero().reshape(-1)
    bounds = torch.cat([starts, torch.tensor([positions.numel()])]).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _stack(samples: Sequence[Tensor], padding: Sequence[int], fill: int) -> Tensor:
    return torch.stack(
        [torch.nn.functional.pad(row, (0, n), value=fill) for row, n in zip(samples, padding, strict=True)]
    ).long()


def unigram_entropy(samples: Iterable[Sample]) -> float:
    """Entropy in nats per learned token of the best predictor without context: H = -sum_v p_v ln p_v."""
    labels = torch.cat([sample.labels_T[sample.labels_T != IGNORE_INDEX] for sample in samples]).long()
    counts = torch.bincount(labels)
    p = counts[counts > 0].double() / labels.numel()
    return float(-(p * p.log()).sum())


def fingerprint(samples: Iterable[Sample]) -> str:
    """SHA-256 of tokens, labels and images. A resumed run must see the same data."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens_T.numpy().tobytes())
        digest.update(sample.labels_T.numpy().tobytes())
        digest.update(sample.more_bytes())
    return digest.hexdigest()
