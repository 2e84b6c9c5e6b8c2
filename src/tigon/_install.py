"""The command that installs one of tigon's extras, from wherever this tigon was installed.

pip records the origin of a package that does not come from an index (direct_url.json,
https://packaging.python.org/en/latest/specifications/direct-url). Messages name that origin, so that their command
works for a checkout, a wheel and a git URL.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """The pip command that installs tigon with `extra`, from the place that tigon itself came from."""
    try:
        text = importlib.metadata.distribution("tigon").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return f"pip install -e {shlex.quote(f'{Path(__file__).parents[2]}[{extra}]')}"
    return f"pip install {_requirement(extra, json.loads(text) if text else None)}"


def _requirement(extra: str, origin: dict[str, Any] | None) -> str:
    if origin is None:  # from an index
        return shlex.quote(f"tigon[{extra}]")
    url = str(origin["url"])
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        return shlex.quote(f"tigon[{extra}] @ {version['vcs']}+{url}@{version['commit_id']}")
    if not url.startswith("file:"):
        return shlex.quote(f"tigon[{extra}] @ {url}")
    path = url2pathname(urlsplit(url).path)
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"{editable}{shlex.quote(f'{path}[{extra}]')}"
