"""Text and numbers as the report shows them. What a model wrote may hold anything; here it becomes harmless to read."""

import json
import math
from typing import Any

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
