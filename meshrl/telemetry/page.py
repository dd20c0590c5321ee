"""Puts a page together: one file with its style, its script and its data, that asks nothing of anyone."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.telemetry.report_text import visible

_FOLDER = Path(__file__).parent


def render_sections(**context: Any) -> dict[str, str]:
    """The parts of a page by name, as HTML; `context` is what report_sections.html asks for."""
    module = _environment().get_template("report_sections.html").module
    return {name: str(getattr(module, name)(**values)) for name, values in context.items()}


def render_page(title: str, sections: Mapping[str, str], data: Mapping[str, Any], live: bool = False) -> str:
    """A whole page: sections as they are, `data` for its script. Only a live one may ask its server for more."""
    script = _part("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return (
        _environment()
        .get_template("report_template.html")
        .render(
            title=title,
            sections=sections,
            policy="; ".join(f"{name} {value}" for name, value in policy.items()),
            style=_part("report.css"),
            script=script,
            data=script_data({**data, "live": live}),
        )
    )


def script_data(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a `<script>` element: nothing in it can end the element."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _part(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Only what this package draws or writes itself may pass unescaped.
    environment.filters["drawn"] = Markup
    environment.filters["visible"] = visible
    return environment
