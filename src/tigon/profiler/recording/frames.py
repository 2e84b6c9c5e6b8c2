"""Python frames for readers: paths relative to their package, without frames that every call passes through."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

KEPT_FRAMES = 8
# Call machinery between a model's line and PyTorch's operator. It does not say what the memory is for.
_MACHINERY = re.compile(
    r"^(torch/(_dynamo/|_compile\.py|_ops\.py|_library/|nn/modules/module\.py|utils/_contextlib\.py|"
    r"utils/_python_dispatch\.py|utils/_device\.py|autograd/|_tensor\.py|overrides\.py)|"
    r"tigon/(profiler/|ops/dispatch\.py)|accelerate/|contextlib\.py|functools\.py|<)"
)
# The training loop. Frames above it are left out, because its callers do not say what the memory is for.
_LOOP = ("transformers/trainer.py", "tigon/trainer/", "tigon/cli/")
_ROOTS = re.compile(r"^.*/(?:site-packages|dist-packages|src|lib/python3\.\d+)/")


@functools.lru_cache(maxsize=4096)
def short_path(filename: str) -> str:
    """The path relative to the package, or folder and name for a file outside any package."""
    path = filename.replace("\\", "/")
    rooted = _ROOTS.sub("", path)
    return rooted if rooted != path else "/".join(path.split("/")[-2:])


def readable(frames: Iterable[tuple[str, int, str]]) -> tuple[str, ...]:
    """(file, line, function), innermost first -> `file.py:12 function` for the informative frames."""
    lines: list[str] = []
    in_backward = False
    for filename, line, function in frames:
        path = short_path(filename)
        in_loop = path.startswith(_LOOP)
        in_backward |= path.startswith("torch/autograd/")
        if not _MACHINERY.match(path) and not (in_loop and (lines or in_backward)):
            lines.append(f"{path}:{line} {function}")
        if in_loop or len(lines) == KEPT_FRAMES:
            break
    return tuple(lines)
