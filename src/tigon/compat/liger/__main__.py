"""Runs a script in which `import liger_kernel` uses tigon.

python -m tigon.compat.liger [--loss-dtype DTYPE] SCRIPT.py [ARGS...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tigon.compat.liger.aliases import install
from tigon.compat.liger.loss_dtype import LOSS_DTYPE_OPTION, LOSS_DTYPES, set_loss_dtype
from tigon.errors import UsageError

_USAGE = f"usage: python -m tigon.compat.liger [{LOSS_DTYPE_OPTION} {'|'.join(LOSS_DTYPES)}] SCRIPT.py [ARGS...]"


def main() -> None:
    """Run the script as Python would: its arguments in `sys.argv`, its folder first on `sys.path`, its exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\nRun a script in which `import liger_kernel` means tigon.")
        return
    loss_dtype, arguments = _loss_dtype(arguments)
    if not arguments:
        _fail(_USAGE)
    script = Path(arguments[0])
    if not script.is_file():
        _fail(f"no such file: {script}. {_USAGE}")
    try:
        set_loss_dtype(loss_dtype)
        install()
    except UsageError as error:
        _fail(str(error))
    sys.argv = arguments
    # As with `python script.py`; run_path keeps the folder in which `python -m` was started.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _loss_dtype(arguments: list[str]) -> tuple[str, list[str]]:
    """(value of --loss-dtype if it precedes the script, else "fp32"; the remaining arguments)."""
    name, equals, value = arguments[0].partition("=") if arguments else ("", "", "")
    if name != LOSS_DTYPE_OPTION:
        return "fp32", arguments
    if equals:
        return value, arguments[1:]
    if len(arguments) < 2:
        _fail(f"{LOSS_DTYPE_OPTION} needs a value. {_USAGE}")
    return arguments[1], arguments[2:]


def _fail(message: str) -> NoReturn:
    print(f"tigon: {message}", file=sys.stderr)
    sys.exit(2)


main()
