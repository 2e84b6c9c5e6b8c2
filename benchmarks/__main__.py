"""`python -m benchmarks CASE [--tiny] [--json RECORD] ...`: measure one of `benchmarks/cases/`."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from benchmarks import cases
from benchmarks.harness import Bench, Case


def names() -> list[str]:
    """The names that the command line takes."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(cases.__path__))


def main(arguments: list[str]) -> None:
    name = arguments[0] if arguments else ""
    if name not in names():
        sys.exit(f"usage: python -m benchmarks CASE [--tiny] [--json RECORD] ...\ncases: {', '.join(names())}")
    module = importlib.import_module(f"benchmarks.cases.{name.replace('-', '_')}")
    case: Case = module.CASE
    case.measure(Bench(name, case, module.__doc__ or "", arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
