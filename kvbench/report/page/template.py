"""Renders a template of this folder as one HTML file that loads nothing.

The content security policy of every page allows only the page's own stylesheet, the one script whose hash the policy
names, and pictures in `data:`. `_clean` hides secrets and escapes control characters in every text that the template
inserts, and Jinja escapes the text for HTML.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.report.page.text import shown
from kvbench.store.files import reason, replacing

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src '{script}'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def render(name: str, values: Mapping[str, Any], scripts: tuple[str, ...] = ()) -> str:
    """Return the HTML of a template. scripts: files that the page joins into its one script, in this order."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    script = "\n".join(map(_file, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_clean, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["markup"] = Markup
    return environment.from_string(_file(name)).render(
        values,
        policy=POLICY.format(script=f"sha256-{digest}" if scripts else "none"),
        script=Markup(script),
        style=Markup(_file("page.css")),
    )


def write(html: str, path: Path) -> Path:
    """Write a page to `path`. An older file there is replaced. Raises SetupError if the file cannot be written."""
    page = html.encode("utf-8", "backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as target:
            target.write(page)
    except OSError as error:
        raise SetupError(f"cannot write the page {quote(path)} ({reason(error)}). Give another file.") from None
    return path


def _clean(value: Any) -> Any:
    """Return a value of the template with secrets hidden and control characters escaped; "" for None. Markup stays
    unchanged, because it is HTML that kvbench made."""
    if value is None:
        return ""
    return shown(value) if type(value) is str else value


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
