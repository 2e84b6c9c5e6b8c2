"""A report as one HTML file that loads nothing, and as the files of a folder.

Jinja2's autoescape escapes every text. Only the style sheet, the charts and a report's script are exempt, because they
are tigon's own. The content security policy forbids all loading and every script except the report's, by its hash. In
the script's data `<`, `>` and `&` are escaped, so that no text can end the element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tigon.report import markdown
from tigon.report.blocks import Columns, Report
from tigon.report.chart import Drawn, on_page, style_variables

_HERE = Path(__file__).parent


def render(report: Report, charts: Mapping[str, Drawn]) -> str:
    """The HTML page.

    Args:
        report: The report.
        charts: The charts that its blocks name, by name.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((_HERE / "page.html.j2").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(report.script.encode()).digest()).decode()
    return template.render(
        report=report,
        style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        light=Markup(style_variables(dark=False)),
        dark=Markup(style_variables(dark=True)),
        is_wide=any(isinstance(block, Columns) for block in report.blocks),
        charts={name: [Markup(on_page(svg)) for svg in (drawn.wide, drawn.phone)] for name, drawn in charts.items()},
        script=Markup(report.script),
        script_hash=digest,
        data=Markup(_json(report.data)),
    )


def write(report: Report, charts: Mapping[str, Drawn], write_text: Callable[[str, str], None]) -> None:
    """Write report.html, report.md and charts/*.svg. write_text: writes (name of the file, text) into a folder."""
    for name, drawn in charts.items():
        write_text(f"charts/{name}.svg", drawn.wide)
    write_text("report.html", render(report, charts))
    write_text("report.md", markdown.render(report))


def _json(value: Mapping[str, object]) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
