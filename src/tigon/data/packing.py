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
import heapq
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.data.tokens import Tokens
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


_Piece = tuple[int, int]
"""(begin, size) of a part of one document, in the sequence of all tokens."""


class Samples(Sequence[Sample]):
    """Samples that are made of the tokens each time they are read, so that the tokens may be larger than the memory.

    Sample `i` has the pieces from `ends[i - 1]` to `ends[i]`; `begins` and `sizes` are those of the pieces.
    """

    def __init__(self, tokens: Tokens, begins: Any, sizes: Any, ends: Any, *, cross_document: bool) -> None:
        self.tokens, self.cross_document = tokens, cross_document
        self.begins, self.sizes, self.ends = begins, sizes, ends

    @classmethod
    def of(
        cls, tokens: Tokens, found: Iterable[Sequence[_Piece]], *, cross_document: bool, keep_unlearned: bool
    ) -> Samples:
        """The samples of these pieces, except those without a learned token."""
        begins, sizes, ends = array("q"), array("q"), array("q")
        for pieces in found:
            if keep_unlearned or _learns(tokens, pieces, cross_document):
                begins.extend(begin for begin, _ in pieces)
                sizes.extend(size for _, size in pieces)
                ends.append(len(begins))
        return cls(tokens, np.array(begins), np.array(sizes), np.array(ends), cross_document=cross_document)

    @property
    def n_tokens(self) -> int:
        return int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        places = range(self.ends[i - 1] if i else 0, self.ends[i])
        sizes = [int(self.sizes[place]) for place in places]
        spans = [self.tokens.span(int(self.begins[place]), size) for place, size in zip(places, sizes, strict=True)]
        tokens_T = np.concatenate([tokens for tokens, _ in spans])
        learned_T = np.concatenate([learned for _, learned in spans])
        starts = np.cumsum([0, *sizes[:-1]])
        if self.cross_document:
            starts = starts[:1]
        learned_T[starts] = False
        positions_T = np.arange(len(tokens_T), dtype=np.int32)
        positions_T -= np.repeat(starts, np.diff([*starts, len(tokens_T)])).astype(np.int32)
        labels_T = np.where(learned_T, tokens_T, np.int32(IGNORE_INDEX))
        return Sample(*(torch.from_numpy(values) for values in (tokens_T, labels_T, positions_T)))


def _learns(tokens: Tokens, pieces: Sequence[_Piece], cross_document: bool) -> bool:
    """Whether a token of the sample is learned. The first token of a document is not, because nothing predicts it."""
    for number, (begin, size) in enumerate(pieces):
        skipped = 0 if cross_document and number else 1
        if size > skipped and tokens.span(begin + skipped, size - skipped)[1].any():
            return True
    return False


@dataclass(frozen=True)
class Packed:
    """The samples of a data set, and counts of what packing changed."""

    samples: Sequence[Sample]
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
    tokens = Tokens.of(documents)
    text = [(int(begin), int(size)) for begin, size in _pieces(tokens, tokens.are_text)]
    prompted, n_truncated, n_dropped = _shorten(tokens, length, too_long)
    if packing:
        found: Iterable[Sequence[_Piece]] = itertools.chain(_stream(text, length), _best_fit(prompted, length))
    else:
        cut = ((begin + i, min(length, size - i)) for begin, size in text for i in range(0, size, length))
        found = ([piece] for piece in itertools.chain(cut, prompted))
    samples = Samples.of(tokens, found, cross_document=cross_document, keep_unlearned=keep_unlearned)
    return Packed(samples, samples.n_tokens, n_truncated, n_dropped)


def _pieces(tokens: Tokens, which: Any) -> Iterator[_Piece]:
    return zip(tokens.begins[which].tolist(), tokens.sizes[which].tolist(), strict=True)


def _shorten(tokens: Tokens, length: int, too_long: str) -> tuple[list[_Piece], int, int]:
    """(the prompts with their answers, how many of them are truncated, how many are dropped)."""
    is_over = (tokens.sizes > length) & ~tokens.are_text
    if too_long == "error" and is_over.any():
        first = tokens[int(np.argmax(is_over))]
        raise DataError(
            f"{first.origin}: {len(first.tokens)} tokens, over data.sequence_length {length} "
            f"({is_over.sum()} documents are); raise it, or set data.too_long to truncate or drop"
        )
    fitting: list[_Piece] = []
    n_truncated = n_dropped = 0
    for begin, size in _pieces(tokens, ~tokens.are_text):
        if size <= length:
            fitting.append((begin, size))
        elif too_long == "drop" or not tokens.span(begin, length)[1].any():  # only prompt is left
            n_dropped += 1
        else:
            n_truncated += 1
            fitting.append((begin, length))
    return fitting, n_truncated, n_dropped


def _stream(documents: Iterable[_Piece], length: int) -> Iterator[list[_Piece]]:
    """Pieces of consecutive documents, `length` tokens at a time. The last sample may be shorter."""
    pieces: list[_Piece] = []
    free = length
    for begin, size in documents:
        end = begin + size
        while begin < end:
            taken = min(free, end - begin)
            pieces.append((begin, taken))
            begin += taken
            free -= taken
            if free == 0:
                yield pieces
                pieces, free = [], length
    if pieces:
        yield pieces


def _best_fit(documents: Sequence[_Piece], length: int) -> list[list[_Piece]]:
    """Best fit, longest first: each goes into the sample with the least sufficient room, the first of several.

    O(N log N) for N documents, if far fewer than N different sizes of room occur.
    """
    samples: list[list[_Piece]] = []
    with_room: dict[int, list[int]] = {}
    """Free tokens -> a heap of the samples that have them."""
    rooms: list[int] = []  # its keys, sorted
    for piece in sorted(documents, key=lambda piece: -piece[1]):
        at = bisect.bisect_left(rooms, piece[1])
        if at == len(rooms):
            free, index = length, len(samples)
            samples.append([])
        else:
            free = rooms[at]
            index = heapq.heappop(with_room[free])
            if not with_room[free]:
                del with_room[free], rooms[at]
        samples[index].append(piece)
        free -= piece[1]
        if free not in with_room:
            with_room[free] = []
            bisect.insort(rooms, free)
        heapq.heappush(with_room[free], index)
    return samples


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
    counts = torch.zeros(0, dtype=torch.long)
    for sample in samples:
        own = torch.bincount(sample.labels_T[sample.labels_T != IGNORE_INDEX].long())
        if len(own) > len(counts):
            counts, own = own, counts
        counts[: len(own)] += own
    p = counts[counts > 0].double() / counts.sum()
    return float(-(p * p.log()).sum())


def fingerprint(samples: Iterable[Sample]) -> str:
    """SHA-256 of tokens, labels and images. A resumed run must see the same data."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens_T.numpy().tobytes())
        digest.update(sample.labels_T.numpy().tobytes())
        digest.update(sample.more_bytes())
    return digest.hexdigest()
