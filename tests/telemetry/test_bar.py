"""A bar for counted work: shown where someone watches, and gone afterwards."""

import io

from rich.console import Console

from meshrl.telemetry.console import counting_bar


def text_of(terminal: bool) -> str:
    out = io.StringIO()
    with counting_bar("tokenizing", Console(file=out, force_terminal=terminal, width=80)) as show:
        for done in (100, 200, 250):
            show(done, 250)
    return out.getvalue()


def test_it_counts_on_a_terminal_only():
    shown = text_of(True)
    assert "tokenizing" in shown
    assert "250/250" in shown
    assert text_of(False).strip() == ""
