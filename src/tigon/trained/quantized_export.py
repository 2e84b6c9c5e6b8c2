"""Weights in FP8, int4 or MXFP4, in compressed-tensors' format, which vLLM and transformers read.

The safetensors files and the `quantization_config` are written here, so that an export needs no further package.
Reading them back, by transformers, needs compressed-tensors.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tigon._install import install_command
from tigon.errors import OptionError, RecipeError
from tigon.techniques.qat.formats import FORMATS, WeightFormat, linear_layers, rounded_input, rounded_layers
from tigon.trained import readers
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_config_of
from tigon.trained.verify import Verification
from tigon.trainer import model as models

PACKAGE, EXTRA = "compressed_tensors", "compressed"


@dataclass(frozen=True)
class Rounded:
    """A model whose weights were rounded in place."""

    model: Any
    chosen: WeightFormat
    group: int | None
    """Elements of a row that share a scale; None: a row."""
    state: dict[str, Tensor]
    """The tensors of the files."""


def check_format(name: str) -> None:
    """Raise OptionError for a format that is not known."""
    if name not in FORMATS:
        raise OptionError(f"--format {name} is not known; choose one of {', '.join(FORMATS)}.")


def check(trained: TrainedModel, name: str, *, verified: bool) -> None:
    """Refuse a model that the format does not cover, before weights are loaded.

    Raises:
        OptionError: The model has experts, no linear layers, or rows that the format does not divide, or the package
            that reads the files back is missing.
    """
    if verified and importlib.util.find_spec(PACKAGE) is None:
        raise OptionError(
            f"--format {name} is read back with compressed-tensors, which is not installed here: "
            f"{install_command(EXTRA)}; or add --no-verify."
        )
    try:
        rounded_layers(models.without_data(load_config_of(trained)), FORMATS[name])
    except (RecipeError, ValueError) as error:
        raise OptionError(f"--format {name}: {error}; leave --format out.") from None


def round_weights(model: Any, name: str) -> Rounded:
    """Round the decoder's linear layers in place, and return the tensors that the files store for them."""
    chosen = FORMATS[name]
    layers, group = rounded_layers(model, chosen)
    state = dict(model.state_dict())
    for path, layer in layers.items():
        codes = chosen.codes(layer.weight.detach(), group)
        del state[f"{path}.weight"]
        state |= {f"{path}.{end}": tensor.contiguous() for end, tensor in chosen.pack(codes).items()}
        layer.weight.data = codes.weight()
    return Rounded(model, chosen, group, state)


def finish(rounded: Rounded, folder: Path, target: Path, checked: Verification | None) -> list[str]:
    """Write the format into config.json, and compare what transformers reads with the rounded model.

    Args:
        rounded: The model of the folder. Its weights leave memory before they are read back.
        folder: The folder under its scratch name.
        target: Its name after the export.
        checked: The comparison with the trained model; None: without.

    Returns:
        Lines for the user: the comparison, and the commands that use the folder.

    Raises:
        UsageError: The files cannot be read, or read back otherwise.
    """
    model, chosen = rounded.model, rounded.chosen
    layers = linear_layers(model)
    ignored = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path not in layers]
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = chosen.config(rounded.group, ignored)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    lines = [f"not verified: the files in {chosen.name} were not read back"]
    if checked is not None:
        for layer in layers.values() if chosen.rounds_inputs else ():
            layer.register_forward_pre_hook(lambda _, entering: (rounded_input(entering[0]),))
        expected = checked.expect_rounded(model)
        rounded.state.clear()
        model.to("meta")  # the weights of the reader take their place in memory
        lines = [checked.check(readers.of_compressed(type(model), folder), expected)]
    scales = (
        f"one scale per {rounded.group} weights" if rounded.group else "one scale per row, inputs rounded per token"
    )
    return [
        f"rounded    {len(layers)} linear layers to {chosen.name}, {scales}; embeddings and head stay in bf16",
        *lines,
        f"vLLM       vllm serve {shlex.quote(str(target))}",
    ]
