"""Pieces of the generated pages, in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

COMMAND = "tilewright docs"
GENERATED = f"<!-- Generated: edit what it is made from, then run `{COMMAND}`. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def listed(names: Iterable[str]) -> str:
    return ", ".join(code(name) for name in names)


def wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
