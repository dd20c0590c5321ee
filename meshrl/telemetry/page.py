"""HTML pages of the report: one file each with its style, script and data, without external resources.

render_page, render_sections:  the page and its parts, from Jinja templates
visible, number, duration:     text and numbers in the form that the report shows
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def render_sections(**context: Any) -> dict[str, str]:
    """Render the parts of a page as HTML, by name.

    `context` maps the name of a macro in report_sections.html to the macro's arguments.
    """
    module = _environment().get_template("report_sections.html").module
    return {name: str(getattr(module, name)(**values)) for name, values in context.items()}


def render_page(title: str, sections: Mapping[str, str], data: Mapping[str, Any], live: bool = False) -> str:
    """Render a whole page from rendered sections and from `data` for its script.

    The page's content security policy only allows a `live` page to send requests to its server.
    """
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
    """Serialise data to JSON that is safe in a `<script>` element, because nothing in the JSON can end the element."""
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
    # Only HTML and SVG that this package has generated may pass unescaped.
    environment.filters["drawn"] = Markup
    environment.filters["visible"] = visible
    return environment


# Text and numbers in the form that the report shows. Text from a model may contain anything; `visible` makes it
# harmless to read.

# Invisible characters with an effect: control characters, direction overrides, zero-width spaces.
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x2060, 0xFEFF, 0x2028, 0x2029)
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in _BIDI}
)


def visible(text: Any, limit: int | None = None) -> str:
    """Replace control and other invisible characters by visible ones.

    A text longer than `limit` characters is cut, and a note says how many characters are missing.
    """
    full = text if isinstance(text, str) else as_text(text)
    cut = full if limit is None or len(full) <= limit else full[:limit]
    shown = cut  # most texts are printable, and translating every character takes long
    if not cut.isprintable():
        shown = cut.translate(_VISIBLE).encode("utf-8", errors="backslashreplace").decode("utf-8")
    return shown if cut is full else f"{shown}… ({len(full) - len(cut):,} more characters)"


def as_text(value: Any) -> str:
    """Return a config value or a field of a sample as text: strings unchanged, all other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number(value: Any, digits: int = 3) -> str:
    """Format a number for readers: about four significant digits, with thousands separators.

    Very small and very large numbers are formatted with powers of ten.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return visible(value, 40)
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0 or (size >= 1 and float(value).is_integer() and size < 1e7):
        return f"{int(value):,}"
    if size < 10**-digits or size >= 1e7:
        return f"{value:.2e}"
    return f"{value:,.{digits if size < 100 else 1}f}"


def duration(seconds: float) -> str:
    """Format seconds as `42 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
