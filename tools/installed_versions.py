"""Print as JSON with what tigon was installed: Python, system, packages. tools/release_check.sh calls it at its end."""

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


print(
    json.dumps(
        {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "versions": {
                name: installed(name) for name in ("tigon", "torch", "triton", "transformers", "accelerate", "peft")
            },
        },
        indent=1,
    )
)
