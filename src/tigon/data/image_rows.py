"""Rows with images: parts of messages, as in `{"type": "image", "path": "cat.png"}`, or a column `images`.

Paths are relative to the file that names them. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tigon._files import open_regular
from tigon.data.chat.messages import IMAGE_PARTS
from tigon.data.documents import Document, Message
from tigon.data.source import formats
from tigon.errors import DataError

COLUMNS = ("images", "image")
"""Columns that hold a row's images."""
MARK = "<image>"
"""Stands for an image in the text of a row with a column of images, as in LLaVA's data."""
MAX_IMAGE_BYTES = 2**28
_TURNS = ("messages", "conversations", "prompt", "completion")
"""Columns that may hold a list of messages."""
_REFERENCES = ("image", "path", "url", "image_url", "base64", "bytes")
"""Keys that may hold an image, by the names of transformers, TRL, OpenAI and the package datasets."""


@dataclass(frozen=True)
class Picture:
    """One image of a row: a file, or the bytes of one."""

    where: str
    """The row that names it, for messages."""
    path: Path | None = None
    data: bytes = b""

    def read(self) -> bytes:
        """The image's bytes as they are stored.

        Raises:
            DataError: The file cannot be read, or is too large.
        """
        if self.path is None:
            return self.data
        try:
            with open_regular(self.path) as handle:
                content = handle.read(MAX_IMAGE_BYTES + 1)
        except FileNotFoundError:
            raise DataError(
                f"{self.where}: image {self.path}: no such file; a relative path begins at the folder of the file that "
                "names it"
            ) from None
        except OSError as error:
            raise DataError(f"{self.where}: image {self.path}: cannot be read: {error.strerror}") from None
        if len(content) > MAX_IMAGE_BYTES:
            raise DataError(f"{self.where}: image {self.path}: over the limit of {MAX_IMAGE_BYTES // 2**20} MiB")
        return content

    def decoded(self, size: int | None) -> Any:
        """The image in RGB.

        Args:
            size: Most pixels of its longer side. A larger image is scaled down. None: no limit.

        Raises:
            DataError: Pillow cannot read it.
        """
        from PIL import Image, ImageOps

        content = self.read()
        try:
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        except Exception as error:  # Pillow's decoders raise many types for a damaged file
            name = self.path or f"of {len(content):,} bytes"
            raise DataError(f"{self.where}: image {name}: Pillow cannot read it: {short(error)}; repair it") from None
        if size is not None:
            image.thumbnail((size, size))
        return image


_Parts = list["str | Picture | None"]
"""The content of a message: texts, images, and places of images that the row's column holds (None)."""


@dataclass(frozen=True)
class PicturedRows:
    """Reads rows of the formats of `tigon.data.source.formats`, each with up to `most` images."""

    most: int
    format: str = "auto"

    def read(self, row: dict[str, Any], where: str) -> Document:
        """The document of a row.

        Raises:
            DataError: The row cannot be used, or has more than `most` images.
        """
        folder = Path(where.rpartition(":")[0]).parent
        column = _column(row, where, folder)
        plain, turns = _texts_of(row, where, folder, marked=bool(column))
        name = formats.detect(plain, where, {}) if self.format == "auto" else self.format
        document = formats.read_row(name, plain, where)
        if not document.messages:
            if column:
                raise DataError(f"{where}: images beside plain text; write the row as messages")
            return document
        messages = document.messages
        # Messages that a column adds to those of the row, such as a system prompt, come first.
        own = [*(_split(m.content, marked=bool(column)) for m in messages[: len(messages) - len(turns)]), *turns]
        images = list(_placed(messages, own, column, where))
        if len(images) > self.most:
            raise DataError(
                f"{where}: {len(images)} images, and data.images is {self.most}; raise data.images, or remove images"
            )
        for number, (message, parts) in enumerate(zip(messages, own, strict=True)):
            if message.role == "assistant" and any(not isinstance(part, str) for part in parts):
                raise DataError(f"{where}: message {number}: an image of the assistant cannot be learned; remove it")
        written = tuple(replace(m, parts=_as_parts(parts)) for m, parts in zip(messages, own, strict=True))
        return replace(document, segments=(), messages=written, images=tuple(images))

    def toy_rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Raises DataError: the built-in data set has no images."""
        raise DataError("data.source: toy-answers has no images; name .jsonl files, or set data.images: 0")


def _column(row: Mapping[str, Any], where: str, folder: Path) -> list[Picture]:
    """The images in the row's column."""
    name = next((name for name in COLUMNS if row.get(name)), None)
    if name is None:
        return []
    values = row[name] if isinstance(row[name], (list, tuple)) else [row[name]]
    return [_picture(value, f"{where}: column {name!r}", folder) for value in values]


def _texts_of(row: Mapping[str, Any], where: str, folder: Path, *, marked: bool) -> tuple[dict[str, Any], list[_Parts]]:
    """The row with texts in place of parts, and the parts of each message that stands in a list."""
    plain = {name: value for name, value in row.items() if name not in COLUMNS}
    every: list[_Parts] = []
    for name in _TURNS:
        turns = plain.get(name)
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            continue
        plain[name] = []
        for number, turn in enumerate(turns):
            key = "value" if "from" in turn else "content"
            parts, rest = _read_parts(turn.get(key), f"{where}: message {number}", folder, marked=marked)
            every.append(parts)
            text = "".join(part for part in parts if isinstance(part, str))
            plain[name].append({**turn, key: rest if rest is not None else text})
    return plain, every


def _read_parts(content: object, where: str, folder: Path, *, marked: bool) -> tuple[_Parts, Any]:
    """The parts of a message's content; and the content itself if it is for `read_messages` to refuse, else None."""
    if isinstance(content, str):
        return _split(content, marked=marked), None
    if not isinstance(content, list):
        return [], content
    parts: _Parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            held = any(part.get(key) is not None for key in _REFERENCES)
            parts.append(_picture(part, where, folder) if held else None)
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            return [], content
    return parts, None


def _split(text: str, *, marked: bool) -> _Parts:
    """The parts of a text in which `MARK` stands for images, if `marked`."""
    if not marked or MARK not in text:
        return [text]
    parts: _Parts = []
    for number, piece in enumerate(text.split(MARK)):
        parts += ([None] if number else []) + ([piece] if piece.strip() else [])
    return parts


def _placed(messages: Sequence[Message], own: list[_Parts], column: Sequence[Picture], where: str) -> Iterator[Picture]:
    """The images in their order. The column's images fill the open places; without any, they begin the first question.

    own: the parts of each message; open places are added to it.
    """
    n_open = sum(part is None for parts in own for part in parts)
    if column and not n_open and not any(isinstance(part, Picture) for parts in own for part in parts):
        first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
        own[first] = [*[None] * len(column), *own[first]]
        n_open = len(column)
    if n_open != len(column):
        raise DataError(
            f"{where}: the messages have {n_open} places for images, but the row's column has {len(column)} images; "
            'give each place, {"type": "image"}, one image'
        )
    waiting = iter(column)
    for parts in own:
        for part in parts:
            if not isinstance(part, str):
                yield part if part is not None else next(waiting)


def _as_parts(parts: _Parts) -> tuple[Mapping[str, Any], ...]:
    return tuple({"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts)


def _picture(value: object, where: str, folder: Path) -> Picture:
    """The image that a row names: a path, an object that holds one, or the bytes of a file."""
    if isinstance(value, Mapping):
        held = next((value[key] for key in (*_REFERENCES[-1:], *_REFERENCES) if value.get(key) is not None), None)
        if held is not None:
            return _picture(held, where, folder)
    if isinstance(value, bytes):
        return Picture(where, data=value)
    if callable(save := getattr(value, "save", None)):  # an image of Pillow, as the package datasets decodes them
        content = io.BytesIO()
        save(content, format="PNG")
        return Picture(where, data=content.getvalue())
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: an image is {type(value).__name__}; write its path")
    if value.startswith("data:"):
        return Picture(where, data=_of_base64(value.partition(",")[2], where))
    if value.startswith(("http://", "https://")):
        raise DataError(f"{where}: image {value}: tigon downloads no images; save it and write its path")
    return Picture(where, path=folder / value.removeprefix("file://"))


def _of_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: an image is no valid base64 text: {error}; write its path") from None


def short(error: Exception) -> str:
    """The error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
