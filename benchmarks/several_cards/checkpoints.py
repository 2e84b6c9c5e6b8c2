"""Checkpoints with the shape of a preset, for rows that read files.

A run of adapters on divided weights saves a preset's random weights and reads them again. For the 70B these are 140 GB
per row. These files are made once for all rows instead. Layers without random values take no room on the disk: their
matrices are holes of the file, which read as 0.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tigon.recipe.keys import ModelConfig
from tigon.trainer import model as models

TILE = 16 * 2**20
"""Values of a random matrix until they repeat."""
STD = 0.02
_LAYER = re.compile(r"\.layers\.(\d+)\.")

Shapes = Mapping[str, tuple[int, ...]]


class Checkpoints:
    """The checkpoints of a call, each of which is written when a row first needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

    def path(self, model: Mapping[str, Any], dense_layers: int) -> Path:
        """The folder of a bf16 checkpoint.

        Args:
            model: The `model` section of a recipe that names a preset.
            dense_layers: How many layers have random values. The matrices of the others are 0.
        """
        shape = json.dumps([model["name"], model.get("config"), dense_layers])
        folder = self._folder / "".join(c if c.isalnum() else "-" for c in shape)
        with self._lock:
            if not (folder / "config.json").exists():
                _write(ModelConfig(name=model["name"], config=model.get("config")), folder, dense_layers)
        return folder


def _write(model: ModelConfig, folder: Path, dense_layers: int) -> None:
    folder.mkdir(parents=True)
    config = models.load_config(model)
    built = models.without_data(config)
    files = _files(models.shapes_of(built))
    tile = (torch.randn(TILE, generator=torch.Generator().manual_seed(0)) * STD).to(torch.bfloat16)
    data = _bytes(tile)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda file: _write_file(folder / file, files[file], data, dense_layers), files))
    index = {name: file for file, shapes in files.items() for name in shapes}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    config.dtype, config.architectures = torch.bfloat16, [type(built).__name__]
    config.save_pretrained(folder)  # the last file: with it the checkpoint is complete


def _files(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """A file per layer, and one of all else."""
    files: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        layer = _layer(name)
        files["model-rest.safetensors" if layer is None else f"model-layer-{layer:05}.safetensors"][name] = shape
    return files


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _write_file(path: Path, shapes: Shapes, data: memoryview, dense_layers: int) -> None:
    """A file of bf16 tensors in safetensors' format: the length of the header, the header, the tensors."""
    ends = list(itertools.accumulate((2 * math.prod(shape) for shape in shapes.values()), initial=0))
    places = dict(zip(shapes, itertools.pairwise(ends), strict=True))
    header = {
        name: {"dtype": "BF16", "shape": list(shape), "data_offsets": list(places[name])}
        for name, shape in shapes.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + ends[-1])
        file.flush()
        for name, (at, stop) in places.items():
            for offset, part in _parts(name, shapes[name], stop - at, data, dense_layers):
                os.pwrite(file.fileno(), part, begin + at + offset)


def _parts(
    name: str, shape: tuple[int, ...], n_bytes: int, data: memoryview, dense_layers: int
) -> Iterator[tuple[int, memoryview]]:
    """Pieces of a tensor that are not 0, with their places in it."""
    if len(shape) == 1:
        if name.endswith("norm.weight"):
            yield 0, _bytes(torch.ones(shape, dtype=torch.bfloat16))
        return
    if (layer := _layer(name)) is None or layer < dense_layers:
        for offset in range(0, n_bytes, len(data)):
            yield offset, data[: min(len(data), n_bytes - offset)]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
