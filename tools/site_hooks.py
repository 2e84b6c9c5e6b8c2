"""Hooks of mkdocs: the pages outside docs/, the generated pages, and links that work in the files and on the site.

Links in docs/ are relative paths in the repository. On the site, those to a page lead to the page, and those to other
files lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools"), str(ROOT)]

import site_pages  # noqa: E402

OUTSIDE = {
    "README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md", "examples/README.md": "examples.md", "benchmarks/README.md": "records.md",
}  # fmt: skip
"""Page of the repository outside docs/ -> its place on the site."""
SOURCES = {place: page for page, place in OUTSIDE.items()}
_LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """The words OPS and API of the navigation stand for the generated pages."""
    generated = sorted(site_pages.pages())
    places = {
        name: [place for place in generated if place.startswith(f"reference/{name.lower()}/")]
        for name in ("OPS", "API")
    }

    def expanded(item: Any) -> Any:
        if isinstance(item, list) and len(item) == 1 and item[0] in places:
            return places[item[0]]
        if isinstance(item, list):
            return [expanded(one) for one in item]
        return {name: expanded(below) for name, below in item.items()} if isinstance(item, dict) else item

    config["nav"] = expanded(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    for page, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / page).read_text(encoding="utf-8")))
    for place, text in site_pages.pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Without the comments that hold tests' preambles, and with links of the site."""
    place = page.file.src_uri
    source = SOURCES.get(place, f"docs/{place}")
    parts = _CODE.split(_without_comments(markdown))
    parts[::2] = [_LINK.sub(lambda link: _link(link, source, place, config), text) for text in parts[::2]]
    return "".join(parts)


def _without_comments(markdown: str) -> str:
    """Comments may hold code fences, and code fences may hold comments: whichever begins first counts."""
    both = re.compile(f"{_CODE.pattern}|{_COMMENT.pattern}", re.MULTILINE | re.DOTALL)
    return both.sub(lambda found: found[0] if found[1] else "\n", markdown)


def _link(link: re.Match[str], source: str, place: str, config: Any) -> str:
    path, anchor = link[2] or "", link[3] or ""
    if not path or re.match(r"[a-z]+:", path):
        return link[0]
    if place.startswith("reference/"):  # generated: its links are already those of the site
        return link[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target in OUTSIDE:
        inside = OUTSIDE[target]
    elif target.startswith("docs/") and (ROOT / target).is_file():
        inside = target.removeprefix("docs/")
    elif not (ROOT / target).exists():
        return link[0]  # mkdocs names it
    else:
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{link[1]}{config['repo_url']}/{kind}/main/{target}{anchor}{link[4]}"
    return f"{link[1]}{posixpath.relpath(inside, posixpath.dirname(place) or '.')}{anchor}{link[4]}"
