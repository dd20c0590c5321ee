"""Puts a page together: one file with its style, its script and its data, that asks nothing of anyone."""

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


# Text and numbers as the report shows them. What a model wrote may hold anything; here it becomes harmless to read.

# Characters that act instead of showing: controls, direction overrides, zero-width spaces.
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x2060, 0xFEFF, 0x2028, 0x2029)
_VISIBLE = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in _BIDI}
)


def visible(text: Any, limit: int | None = None) -> str:
    """The text with acting characters made visible, cut after `limit` characters with a word on what is missing."""
    full = text if isinstance(text, str) else as_text(text)
    cut = full if limit is None or len(full) <= limit else full[:limit]
    shown = cut  # most texts only show, and to look each of their characters up takes long
    if not cut.isprintable():
        shown = cut.translate(_VISIBLE).encode("utf-8", errors="backslashreplace").decode("utf-8")
    return shown if cut is full else f"{shown}… ({len(full) - len(cut):,} more characters)"


def as_text(value: Any) -> str:
    """A config value or a field of a generation: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def number(value: Any, digits: int = 3) -> str:
    """A number for people: about four significant digits, thousands separators, powers of ten where they help."""
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
    """Seconds as `42 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
