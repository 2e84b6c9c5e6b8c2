"""The GGUF file of an export, with an Ollama Modelfile: by the package `gguf`, or else by llama.cpp's converter."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tigon.errors import OptionError, UsageError
from tigon.trained import gguf_file, gguf_tokenizer, ollama, readers
from tigon.trained.find import TrainedModel
from tigon.trained.load import load_config_of, load_tokenizer_of, writes_no_text
from tigon.trained.verify import Verification

CONVERTER, CONVERTER_FOLDER = "convert_hf_to_gguf.py", "LLAMA_CPP"
AUTO = "auto"
TYPES = (*gguf_file.TYPES, AUTO)
_CONVERTERS_TYPES = ("f32", "f16", "bf16", "q8_0", AUTO)


@dataclass(frozen=True)
class Target:
    """Where the file goes."""

    folder: Path
    """The folder under its scratch name."""
    final: Path
    """The folder's name after the export."""
    kind: str
    """One of `TYPES`."""

    @property
    def file(self) -> Path:
        return self.folder / f"{self.final.name}-{self.kind}.gguf"


def check_type(kind: str) -> None:
    """Raise OptionError for a type that no program here writes."""
    if kind not in TYPES:
        raise OptionError(f"--gguf {kind} is not known; choose one of {', '.join(TYPES)}.")


def check(trained: TrainedModel, kind: str) -> None:
    """Refuse a file that neither `gguf` nor llama.cpp's converter can write, before weights are loaded.

    Raises:
        OptionError: A package or a converter is missing, the converter does not know the type, or the adapters are
            those of a reward model or classifier.
    """
    if writes_no_text(trained):
        raise OptionError(
            f"--gguf {kind}: tigon writes no GGUF file of a reward model or classifier; leave --gguf out."
        )
    config = load_config_of(trained)
    reason = _uncovered(config, load_tokenizer_of(trained))
    if reason is None:
        gguf_file.check_package()
    else:
        if kind not in _CONVERTERS_TYPES:
            raise OptionError(f"--gguf {kind}: {reason}, and {CONVERTER} writes {', '.join(_CONVERTERS_TYPES)}.")
        find_converter(reason)


def rounds(config: Any, tokenizer: Any, kind: str | None) -> bool:
    """Whether a file is asked for that tigon writes from weights in memory, in another dtype than theirs."""
    return kind not in (None, AUTO) and _uncovered(config, tokenizer) is None


def _uncovered(config: Any, tokenizer: Any) -> str | None:
    """Why tigon cannot write the file; None if it can."""
    if (reason := gguf_file.covers(config)) is not None:
        return f"tigon does not write {reason}"
    try:
        gguf_tokenizer.of(tokenizer, config.vocab_size)
    except UsageError as error:
        return str(error).removeprefix("--gguf: ")
    return None


def find_converter(reason: str) -> Path:
    """llama.cpp's converter, in $LLAMA_CPP or on PATH. Raises OptionError if there is none.

    reason: Why it is needed.
    """
    if folder := os.environ.get(CONVERTER_FOLDER):
        converter = Path(folder) / CONVERTER
        if converter.is_file():
            return converter
        raise OptionError(f"{CONVERTER_FOLDER}={folder} holds no {CONVERTER}; name a checkout of llama.cpp.")
    if on_path := shutil.which(CONVERTER):
        return Path(on_path)
    raise OptionError(
        f"--gguf: {reason}, and llama.cpp's {CONVERTER} is not on PATH; git clone "
        f"https://github.com/ggml-org/llama.cpp, install its requirements, and set {CONVERTER_FOLDER} to that folder."
    )


def write(model: Any, tokenizer: Any, target: Target, checked: Verification | None) -> list[str]:
    """Write the file and its Modelfile, and compare what transformers reads with what was written.

    Args:
        model: The model that the folder holds; its weights become those of the file.
        tokenizer: Its tokenizer.
        target: Where the file goes.
        checked: The comparison with the trained model; None: without.

    Returns:
        Lines for the user: the comparison, what was left out, and the commands that use the file.

    Raises:
        UsageError: The file cannot be written, or reads back otherwise.
    """
    if (reason := _uncovered(model.config, tokenizer)) is not None:
        _convert(target, reason)
        lines = [f"not verified: {target.file.name} is from llama.cpp's converter, because {reason}"]
    else:
        lines = _write(model, tokenizer, target, checked)
    modelfile = ollama.modelfile(model, tokenizer, target.file.name)
    (target.folder / ollama.FILE).write_text(modelfile.text, encoding="utf-8")
    name, folder = ollama.model_name(target.final.name), target.final
    return [
        *lines,
        *modelfile.notes,
        f"Ollama     ollama create {name} -f {shlex.quote(str(folder / ollama.FILE))} && ollama run {name}",
        f"llama.cpp  llama-cli -m {shlex.quote(str(folder / target.file.name))} --jinja",
    ]


def _write(model: Any, tokenizer: Any, target: Target, checked: Verification | None) -> list[str]:
    kind = target.kind
    if kind == AUTO:
        kind = {"float32": "f32", "float16": "f16"}.get(str(model.dtype).removeprefix("torch."), "bf16")
    stored = gguf_file.write(model, tokenizer, target.file, kind, name=target.final.name)
    lines = []
    if stored.wider:
        lines.append(f"note       {len(stored.wider)} matrices are F16, because their rows are no multiple of 32")
    if stored.uneven:
        n, rest = len(stored.uneven), "because their rows are no multiple of 256, as in llama.cpp's files"
        lines.append(f"note       {n} matrices are Q5_0 or Q8_0, {rest}")
    if checked is None:
        return [*lines, f"not verified: {target.file.name} was not read back"]
    ends = tuple(stored.tokenizer.special[name] for name in ("eos", "eot") if name in stored.tokenizer.special)
    expected = checked.expect_rounded(model)
    model.to("meta")  # the weights of the reader take their place in memory
    further = [i for i in expected.ends if i not in ends]
    if further:
        words = ", ".join(repr(tokenizer.decode([i])) for i in further)
        lines.append(f"note       a GGUF file names two stop tokens; the Modelfile has {words} too")
    reader = readers.of_gguf(
        target.file, model, (*ends, *further), splits_text=stored.tokenizer.split.read_by_transformers
    )
    return [*lines, checked.check(reader, expected)]


def _convert(target: Target, reason: str) -> None:
    command = [sys.executable, str(find_converter(reason)), str(target.folder)]
    command += ["--outfile", str(target.file), "--outtype", target.kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not target.file.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[-1]
        raise UsageError(f"{CONVERTER} failed (exit code {done.returncode}): {last}")
