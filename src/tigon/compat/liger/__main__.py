"""Runs a script in which `import liger_kernel` uses tigon.

python -m tigon.compat.liger [--loss-dtype DTYPE] SCRIPT.py [ARGS...]
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from tigon.compat.liger.import_hook import install
from tigon.compat.liger.loss_dtype import LOSS_DTYPE_OPTION, LOSS_DTYPES, set_loss_dtype
from tigon.errors import UsageError

_USAGE = f"python -m tigon.compat.liger [{LOSS_DTYPE_OPTION} {'|'.join(LOSS_DTYPES)}] SCRIPT.py [ARGS...]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the message and the usage in one line."""
        self.exit(2, f"tigon: {message}. {self.format_usage()}")


def main() -> None:
    """Run the script as Python would: its arguments in `sys.argv`, its folder first on `sys.path`, its exit code."""
    about = "Run a script in which `import liger_kernel` means tigon."
    parser = _Parser(usage=_USAGE, description=about, allow_abbrev=False)
    parser.add_argument(LOSS_DTYPE_OPTION, default="fp32")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.script.is_file():
        parser.error(f"no such file: {given.script}")
    try:
        set_loss_dtype(given.loss_dtype)
        install()
    except UsageError as error:
        parser.error(str(error).rstrip("."))
    sys.argv = [str(given.script), *given.arguments]
    # As with `python script.py`; run_path keeps the folder in which `python -m` was started.
    sys.path[0] = str(given.script.resolve().parent)
    runpy.run_path(str(given.script), run_name="__main__")


main()
