"""`python -m tigon.compat.liger SCRIPT.py [ARGS...]`: run a script in which `import liger_kernel` means tigon."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tigon.compat.liger.aliases import install
from tigon.errors import UsageError

_USAGE = "usage: python -m tigon.compat.liger SCRIPT.py [ARGS...]"


def main() -> None:
    """Run the script as Python would: its arguments in `sys.argv`, its folder first on `sys.path`, its exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{_USAGE}\nRun a script in which `import liger_kernel` means tigon.")
        return
    if not arguments:
        _fail(_USAGE)
    script = Path(arguments[0])
    if not script.is_file():
        _fail(f"no such file: {script}. {_USAGE}")
    try:
        install()
    except UsageError as error:
        _fail(str(error))
    sys.argv = arguments
    # As for `python script.py`; run_path leaves it at the folder in which `python -m` was started.
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


def _fail(message: str) -> None:
    print(f"tigon: {message}", file=sys.stderr)
    sys.exit(2)


main()
