"""Tables as HTML that can also be used without a mouse."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(rows: Sequence[Sequence[str]], label: str) -> str:
    """``rows``, the first being the head, as an HTML table ``label``; keys scroll large tables."""
    head, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    inside = head.replace("td>", "th>") + "</tr><tr>" + "</tr><tr>".join(body)
    group = f'<div class="scrolled" tabindex="0" role="group" aria-label="{escape(label)}">'
    return f"{group}<table><tr>{inside}</tr></table></div>"
