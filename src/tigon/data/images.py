"""Turns rows with images into tokens, and makes batches with the model's own processor.

The processor writes each image as many tokens into the text. Every image is read once before training, to count them,
and again in each batch. Only the tokens of answers are learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tigon.data import tokenizer
from tigon.data.chat import row_notes
from tigon.data.chat.chat_template import Rendering, segments_of, template_of
from tigon.data.documents import BadRows, Document, Segment
from tigon.data.image_rows import Picture, short
from tigon.data.packing import Collator, Packed, Sample, pack
from tigon.data.tokenizer import IGNORE_INDEX, Encoded, Ending, forget_loading
from tigon.errors import DataError, RecipeError, UsageError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# --- the processor ----------------------------------------------------------------------------------------------------


def load_processor(name: str, *, revision: str | None, trust_remote_code: bool) -> ProcessorMixin:
    """The processor of a checkpoint, whose tokenizer has its chat template.

    Raises:
        RecipeError: The checkpoint has no processor of images, or a package that it needs is missing.
    """
    from transformers import AutoProcessor

    try:
        import PIL  # noqa: F401
    except ImportError:
        raise RecipeError("data.images needs Pillow, which is not installed: pip install pillow") from None
    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # ImportError for torchvision, OSError for missing files, and many others
        raise RecipeError(
            f"model.name: {name}: no processor of images could be loaded ({short(error)}); give a folder with the "
            "model's preprocessor_config.json and tokenizer, or set data.images: 0"
        ) from None
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise RecipeError(
            f"model.name: {name} has a tokenizer, but no processor of images (preprocessor_config.json); add the "
            "model's own, or set data.images: 0"
        )
    forget_loading(processor.tokenizer)
    template = getattr(processor, "chat_template", None)
    if template and not processor.tokenizer.chat_template:
        processor.tokenizer.chat_template = template
    return processor


def image_tokens(processor: ProcessorMixin) -> tuple[str, ...]:
    """The texts that stand for one image in a chat before the processor replaces them."""
    names = (getattr(processor, name, None) for name in ("image_token", "boi_token"))
    return tuple(dict.fromkeys(str(name) for name in names if name))


# --- rows as tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """What has the images of document `row` of `rows`. They are read each time they are used."""

    text: str
    """The text before the processor has replaced the images' places by tokens."""
    rows: Sequence[Document]
    row: int
    digest: bytes
    """A digest of the images' bytes."""

    @property
    def images(self) -> tuple[Picture, ...]:
        return self.rows[self.row].images


@dataclass(frozen=True, kw_only=True)
class EncodedPictures(Pictured, Encoded):
    """A document with images as tokens."""


@dataclass(frozen=True)
class Encoder:
    """Turns documents into tokens, those with images by the processor.

    vocab_size: the model's vocabulary.
    size: most pixels of an image's longer side.
    bad: the policy for rows that cannot be used.
    """

    processor: ProcessorMixin
    rendering: Rendering
    vocab_size: int
    size: int | None
    bad: BadRows

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """The documents as tokens; those without images first."""
        plain = [document for document in documents if not document.images]
        encoded = tokenizer.encode(
            plain, self.processor.tokenizer, vocab_size=self.vocab_size, bad=self.bad, rendering=self.rendering
        )
        for row, document in enumerate(documents):
            if document.images:
                try:
                    encoded.append(self._with_images(document, documents, row))
                except DataError as error:
                    self.bad.take(error)
        return encoded

    def _with_images(self, document: Document, rows: Sequence[Document], row: int) -> EncodedPictures:
        tok, where = self.processor.tokenizer, document.origin
        segments = list(segments_of(document, tok, self.rendering))
        written = "".join(segment.text for segment in segments)
        template = template_of(document, tok, self.rendering)
        notes = row_notes.of_chat(document, written, template, None)  # the places of images are special tokens
        ending = Ending(tok, frozenset(i for i in (tok.eos_token_id, *self.rendering.ends) if i is not None))
        last = document.messages[-1]
        if tok.eos_token and last.role == "assistant" and last.learned and not ending.ends_text(written):
            segments.append(Segment(tok.eos_token, True))
        text, places = "".join(segment.text for segment in segments), image_tokens(self.processor)
        n_places = max(text.count(token) for token in places)
        if n_places != len(document.images):
            raise DataError(
                f"{where}: the chat template writes {n_places} places for {len(document.images)} images; use the "
                f"model's own template, and keep {' and '.join(places)} out of the texts"
            )
        read = [(image.read(), image.decoded(self.size)) for image in document.images]
        tokens, offsets = self._processed(text, [image for _, image in read], where)
        spans = self._spans(segments, [image for _, image in read], offsets[-1][1], where)
        if self.rendering.learn == "all":
            spans = [(0, offsets[-1][1])]
        special = set(getattr(self.processor, "image_token_ids", None) or ()) | {
            tok.convert_tokens_to_ids(token) for token in places
        }
        # As in `tokenizer.encode`: a token is learned if it holds a character that is.
        labels = [
            token
            if token not in special and any(begin < max(b + 1, e) and b < stop for begin, stop in spans)
            else IGNORE_INDEX
            for token, (b, e) in zip(tokens, offsets, strict=True)
        ]
        labels = ending.with_ends(tokens, labels)
        if (largest := max(tokens)) >= self.vocab_size:
            raise DataError(
                f"{where}: the processor gives id {largest}, but the model's vocabulary has {self.vocab_size}; use the "
                "model's own processor"
            )
        digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content, _ in read)).digest()
        return EncodedPictures(tokens, labels, where, False, notes, text=text, rows=rows, row=row, digest=digest)

    def _spans(self, segments: Sequence[Segment], images: list[Any], length: int, where: str) -> list[tuple[int, int]]:
        """The learned characters of the text in which the images' places are replaced, as (begin, end).

        length: of that text.
        """
        places = image_tokens(self.processor)
        counts = [max(segment.text.count(token) for token in places) for segment in segments]
        sizes = [0 if n else len(segment.text) for n, segment in zip(counts, segments, strict=True)]
        with_images = [i for i, n in enumerate(counts) if n]
        if any(segments[i].learned for i in with_images) and self.rendering.learn != "all":
            raise DataError(f"{where}: a text that is learned holds {' or '.join(places)}; remove it")
        first = 0
        for i in with_images if len(with_images) > 1 else ():  # one text's length follows from that of all
            own = images[first : first + counts[i]]
            sizes[i] = self._processed(segments[i].text, own, where)[1][-1][1]
            first += counts[i]
        if len(with_images) == 1:
            sizes[with_images[0]] = length - sum(sizes)
        if sum(sizes) != length:
            raise DataError(f"{where}: the answers cannot be found in the processor's text; set data.learn: all")
        spans, done = [], 0
        for segment, size in zip(segments, sizes, strict=True):
            if segment.learned:
                spans.append((done, done + size))
            done += size
        return spans

    def _processed(self, text: str, images: list[Any], where: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(tokens, place of each token in the text with replaced images)."""
        try:
            made = self.processor(text=[text], images=[images], add_special_tokens=False, return_offsets_mapping=True)
        except Exception as error:  # processors raise many types for images that they do not take
            raise DataError(f"{where}: the model's processor refuses the row: {short(error)}") from None
        return [int(i) for i in made["input_ids"][0]], [(int(a), int(b)) for a, b in made["offset_mapping"][0]]


# --- samples and batches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PicturedSample(Pictured, Sample):
    """A sample with images. Its tensors are those of `Sample`."""

    def more_bytes(self) -> bytes:
        return self.digest


def samples(encoded: Sequence[Encoded], length: int, *, too_long: str) -> Packed:
    """Samples of at most `length` tokens, each of one document.

    too_long: error or drop, for a document with images of more than `length` tokens.

    Raises:
        DataError: `too_long` is error and a document is too long.
    """
    plain = [each for each in encoded if not isinstance(each, EncodedPictures)]
    packed = pack(plain, length, packing=False, cross_document=False, too_long=too_long)
    made, n_dropped = list(packed.samples), packed.n_dropped
    for each in encoded:
        if not isinstance(each, EncodedPictures):
            continue
        n_tokens = len(each.tokens)
        if n_tokens > length and too_long == "error":
            raise DataError(
                f"{each.origin}: {n_tokens} tokens with those of its images, over data.sequence_length {length}; raise "
                "it, lower data.image_size, or set data.too_long: drop"
            )
        if n_tokens > length or all(label == IGNORE_INDEX for label in each.labels[1:]):
            n_dropped += 1
            continue
        (sample,) = pack([each], length, packing=False, cross_document=False, too_long="error").samples
        made.append(PicturedSample(**vars(sample), text=each.text, rows=each.rows, row=each.row, digest=each.digest))
    return Packed(made, sum(len(sample.tokens_T) for sample in made), packed.n_truncated, n_dropped)


@dataclass(frozen=True, kw_only=True)
class PicturedCollator(Collator):
    """Turns samples into the model's keyword arguments: those of `Collator`, padded, and the processor's for images."""

    processor: ProcessorMixin
    size: int | None = None
    """Most pixels of an image's longer side."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        batch = super().__call__(samples)
        rows = [row for row, sample in enumerate(samples) if isinstance(sample, PicturedSample)]
        pictured = [sample for sample in samples if isinstance(sample, PicturedSample)]
        made = self._processed(
            [sample.text for sample in pictured] or ["a"],
            [[image.decoded(self.size) for image in sample.images] for sample in pictured],
        )
        ids = made["input_ids"]
        for row, sample in zip(ids, pictured, strict=False):
            if not torch.equal(row[: len(sample.tokens_T)].int(), sample.tokens_T.int()):
                where = sample.images[0].where
                raise DataError(
                    f"{where}: the row gives other tokens than before training; keep its images as they are"
                )
        for name, value in made.items():
            if name in ("input_ids", "attention_mask"):
                continue
            if isinstance(value, Tensor) and value.shape == ids.shape:  # of each token, such as its kind
                whole = value.new_zeros(batch["input_ids"].shape)
                for row, own in zip(rows, value, strict=False):
                    whole[row, : len(own)] = own
                value = whole
            batch[name] = value
        return batch

    def _processed(self, texts: list[str], images: list[list[Any]]) -> Mapping[str, Any]:
        more = {"images": images} if images else {}
        made: Mapping[str, Any] = self.processor(
            text=texts, **more, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
        )
        return made


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The model's arguments for one row with images, without pixels. Equal layouts make equal traces."""

    prompt: tuple[int, ...]
    """The tokens of a question with its images."""
    n_image_tokens: int
    token_kinds: tuple[tuple[str, tuple[int, ...]], ...]
    """Name -> values of the arguments that have one value per token, such as whether it is an image's."""
    tensors: tuple[tuple[str, tuple[int, ...], str, tuple[int, ...]], ...]
    """(name, shape, dtype, values) of the other arguments. Values are left out for pixels and their masks."""

    @classmethod
    def of(cls, processor: ProcessorMixin, n_images: int, size: int) -> Layout:
        """The layout of a row with `n_images` blank images of `size` x `size` pixels.

        Raises:
            DataError: The processor refuses it.
        """
        from PIL import Image

        tok = processor.tokenizer
        chat = [{"role": "user", "content": [*[{"type": "image"}] * n_images, {"type": "text", "text": "a"}]}]
        try:
            text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            made = processor(
                text=[text],
                images=[[Image.new("RGB", (size, size), "grey")] * n_images],
                add_special_tokens=False,
                return_tensors="pt",
            )
        except Exception as error:  # templates and processors raise many types
            raise DataError(f"{n_images} images of {size} x {size} pixels cannot be planned: {short(error)}") from None
        ids = made["input_ids"]
        own = {tok.convert_tokens_to_ids(getattr(processor, "image_token", None) or image_tokens(processor)[0])}
        own |= {token for token in getattr(processor, "image_token_ids", None) or () if token is not None}
        others = {n: v for n, v in made.items() if isinstance(v, Tensor) and n not in ("input_ids", "attention_mask")}
        kinds = {name: value for name, value in others.items() if value.shape == ids.shape}
        return cls(
            tuple(ids[0].tolist()),
            sum(token in own for token in ids[0].tolist()),
            tuple((name, tuple(value[0].tolist())) for name, value in kinds.items()),
            tuple(
                (name, tuple(value.shape), str(value.dtype).removeprefix("torch."), _values(value))
                for name, value in others.items()
                if name not in kinds
            ),
        )

    def inputs(self, batch: int, seq: int) -> dict[str, Tensor]:
        """The arguments for `batch` rows of `seq` tokens. Tensors without values are not initialised.

        Raises:
            UsageError: The images have more tokens than a row.
        """
        n_text = seq - len(self.prompt)
        if n_text < 1:
            raise UsageError(
                f"seq is {seq}, but a question with its images has {len(self.prompt)} tokens, {self.n_image_tokens} of "
                "them of images; raise seq, or lower image_size or images"
            )
        rows: dict[str, Any] = {"input_ids": [*self.prompt, *self.prompt[-1:] * n_text]}
        rows |= {name: [*values, *[0] * n_text] for name, values in self.token_kinds}
        made = {name: torch.tensor([values] * batch) for name, values in rows.items()}
        made["attention_mask"] = torch.ones(batch, seq, dtype=torch.int64)
        made["labels"] = torch.empty(batch, seq, dtype=torch.int64)
        for name, shape, dtype, values in self.tensors:
            whole = (batch * shape[0], *shape[1:])
            made[name] = (
                torch.tensor(list(values) * batch, dtype=getattr(torch, dtype)).reshape(whole)
                if values
                else torch.empty(whole, dtype=getattr(torch, dtype))
            )
        return made


def _values(tensor: Tensor) -> tuple[int, ...]:
    """The values of a table of integers, such as the sizes of images; () for pixels and their masks."""
    if tensor.is_floating_point() or tensor.ndim > 2:
        return ()
    return tuple(int(value) for value in tensor.flatten().tolist())


def prompt_inputs(
    sample: Sample, collate: Callable[[Sequence[Sample]], dict[str, Any]], n_prompt: int
) -> dict[str, Any]:
    """The keyword arguments besides tokens with which a model continues the first `n_prompt` tokens of a sample."""
    batch = collate([sample])
    shape = batch["input_ids"].shape
    return {
        name: value[:, :n_prompt] if isinstance(value, Tensor) and value.shape == shape else value
        for name, value in batch.items()
        if name not in ("input_ids", "labels", "attention_mask")
    }
