"""Print as JSON with what tigon was installed: Python, system, packages. tools/release_check.sh calls it at its end.

    python tools/installed_versions.py [ENVIRONMENT ...]

Each environment is a folder named after one extra; it holds the packages of that extra.
"""

import datetime
import importlib.metadata
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE_OF = {"deepspeed": "deepspeed", "bnb": "bitsandbytes", "torchao": "torchao", "trl": "trl"}


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def of_extra(environment: Path) -> dict[str, str]:
    """The package that an extra brings, with its version in that environment."""
    package = PACKAGE_OF[environment.name]
    (place,) = environment.glob("lib/python*/site-packages")
    (found,) = importlib.metadata.distributions(name=package, path=[str(place)])
    return {package: found.version}


print(
    json.dumps(
        {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": {
                name: installed(name) for name in ("tigon", "torch", "triton", "transformers", "accelerate", "peft")
            },
            "extras": {Path(name).name: of_extra(Path(name)) for name in sys.argv[1:]},
        },
        indent=1,
    )
)
