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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.data.tokens import Tokens
from tigon.errors import DataError

Ints = npt.NDArray[np.int64]
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
class Pieces:
    """Which parts of documents each sample has, as arrays.

    Piece `i` begins at token `begins[i]` of the sequence of all tokens. Sample `k` has the pieces `ends[k - 1]` to
    `ends[k]`.
    """

    begins: Ints
    sizes: Ints
    ends: Ints

    @classmethod
    def alone(cls, begins: Ints, sizes: Ints) -> Pieces:
        """One piece per sample."""
        return cls(begins, sizes, np.arange(1, len(begins) + 1))

    def then(self, other: Pieces) -> Pieces:
        """These samples and those of `other`."""
        pairs = ((self.begins, other.begins), (self.sizes, other.sizes), (self.ends, other.ends + len(self.begins)))
        return Pieces(*(np.concatenate(pair) for pair in pairs))

    def learned(self, tokens: Tokens, *, cross_document: bool) -> Pieces:
        """The samples with a learned token. The first of a document is not learned, because nothing predicts it."""
        starts = np.concatenate([[0], self.ends[:-1]]).astype(int)
        skipped = np.full(len(self.begins), 0 if cross_document else 1)
        skipped[starts[: len(self.ends)]] = 1
        parts = zip(self.begins + skipped, self.sizes - skipped, strict=True)
        learn = np.fromiter((size > 0 and tokens.span(begin, size)[1].any() for begin, size in parts), bool)
        if learn.all():
            return self
        kept = np.logical_or.reduceat(learn, starts)
        counts = self.ends - starts
        of_kept = np.repeat(kept, counts)
        return Pieces(self.begins[of_kept], self.sizes[of_kept], np.cumsum(counts[kept]))


class Samples(Sequence[Sample]):
    """Samples that are made of the tokens each time they are read, so that the tokens may be larger than the memory."""

    def __init__(self, tokens: Tokens, pieces: Pieces, *, cross_document: bool) -> None:
        self.tokens, self.pieces, self.cross_document = tokens, pieces, cross_document

    @property
    def n_tokens(self) -> int:
        return int(self.pieces.sizes.sum())

    def __len__(self) -> int:
        return len(self.pieces.ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        own = slice(self.pieces.ends[i - 1] if i else 0, self.pieces.ends[i])
        sizes = self.pieces.sizes[own]
        spans = [self.tokens.span(*piece) for piece in zip(self.pieces.begins[own], sizes, strict=True)]
        tokens_T, learned_T = (np.concatenate(parts) for parts in zip(*spans, strict=True))
        starts = np.zeros(1, dtype=int) if self.cross_document else np.cumsum(sizes) - sizes
        learned_T[starts] = False
        positions_T = np.arange(len(tokens_T), dtype=np.int32)
        positions_T -= np.repeat(starts, np.diff([*starts, len(tokens_T)])).astype(np.int32)
        labels_T = np.where(learned_T, tokens_T, np.int32(IGNORE_INDEX))
        return Sample(*(torch.from_numpy(values) for values in (tokens_T, labels_T, positions_T)))


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
    documents: Sequence[Encoded],
    length: int,
    *,
    packing: bool,
    cross_document: bool,
    too_long: str,
    keep_unlearned: bool = False,
) -> Packed:
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
    text = tokens.begins[tokens.are_text], tokens.sizes[tokens.are_text]
    prompted, n_truncated, n_dropped = _shorten(tokens, length, too_long)
    if packing:
        pieces = _stream(*text, length).then(_best_fit(*prompted, length))
    else:
        pieces = _cut(*text, length).then(Pieces.alone(*prompted))
    if not keep_unlearned:
        pieces = pieces.learned(tokens, cross_document=cross_document)
    samples = Samples(tokens, pieces, cross_document=cross_document)
    return Packed(samples, samples.n_tokens, n_truncated, n_dropped)


def _shorten(tokens: Tokens, length: int, too_long: str) -> tuple[tuple[Ints, Ints], int, int]:
    """((begins, sizes) of the prompts with their answers, how many are truncated, how many are dropped)."""
    is_over = (tokens.sizes > length) & ~tokens.are_text
    if too_long == "error" and is_over.any():
        first = tokens[int(np.argmax(is_over))]
        raise DataError(
            f"{first.origin}: {len(first.tokens)} tokens, over data.sequence_length {length} "
            f"({is_over.sum()} documents are); raise it, or set data.too_long to truncate or drop"
        )
    is_kept = ~tokens.are_text
    for i in np.flatnonzero(is_over):
        if too_long == "drop" or not tokens.span(tokens.begins[i], length)[1].any():  # only prompt is left
            is_kept[i] = False
    n_truncated = int((is_over & is_kept).sum())
    kept = tokens.begins[is_kept], np.minimum(tokens.sizes[is_kept], length)
    return kept, n_truncated, int(is_over.sum()) - n_truncated


def _stream(begins: Ints, sizes: Ints, length: int) -> Pieces:
    """Consecutive documents, `length` tokens at a time. The last sample may be shorter."""
    document_ends = np.cumsum(sizes)
    n_tokens = int(sizes.sum())
    sample_ends = np.minimum(np.arange(length, n_tokens + length, length), n_tokens)
    ends = np.union1d(document_ends[document_ends > 0], sample_ends)
    starts = np.concatenate([np.zeros(1, dtype=int), ends])[: len(ends)]
    document = np.searchsorted(document_ends, starts, side="right")
    inside = starts - (document_ends - sizes)[document]
    return Pieces(begins[document] + inside, ends - starts, np.searchsorted(ends, sample_ends, side="right"))


def _cut(begins: Ints, sizes: Ints, length: int) -> Pieces:
    """Documents cut into samples of `length` tokens. The last sample of each may be shorter."""
    counts = -(-sizes // length)
    inside = length * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    return Pieces.alone(np.repeat(begins, counts) + inside, np.minimum(np.repeat(sizes, counts) - inside, length))


def _best_fit(begins: Ints, sizes: Ints, length: int) -> Pieces:
    """Best fit, longest first: each goes into the sample with the least sufficient room, the first of several.

    O(N log N) for N documents, if far fewer than N different sizes of room occur.
    """
    order = np.argsort(-sizes, kind="stable")
    sample_of = np.zeros(len(order), dtype=int)
    n_samples = 0
    with_room: dict[int, list[int]] = {}
    """Free tokens -> a heap of the samples that have them."""
    rooms: list[int] = []  # its keys, sorted
    for number, size in enumerate(map(int, sizes[order])):
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            free, sample = length, n_samples
            n_samples += 1
        else:
            free = rooms[at]
            sample = heapq.heappop(with_room[free])
            if not with_room[free]:
                del with_room[free], rooms[at]
        sample_of[number] = sample
        free -= size
        if free not in with_room:
            with_room[free] = []
            bisect.insort(rooms, free)
        heapq.heappush(with_room[free], sample)
    places = order[np.argsort(sample_of, kind="stable")]
    return Pieces(begins[places], sizes[places], np.cumsum(np.bincount(sample_of, minlength=n_samples)))


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
