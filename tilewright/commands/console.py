"""What every command does alike: tables or JSON, one line for an error, ops found by name."""

from __future__ import annotations

import contextlib
import difflib
import json
import textwrap
from collections.abc import Iterator, Sequence, Set
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended


def fail(text: str) -> NoReturn:
    """One clear line on standard error, and exit status 2."""
    typer.echo(f"tilewright: {text}", err=True)
    raise typer.Exit(2)


def show(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    """A table, or JSON. Where the window is too narrow for a table of whole words, each row is a list of its fields."""
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 200  # nobody's window
    names = list(rows[0]) if rows else []
    cells = [[_words(value) for value in row.values()] for row in rows]
    longest = [max(len(word) for text in column for word in text.split()) for column in zip(names, *cells)]
    spare = console.width - (sum(longest) + 3 * len(names) + 1)  # a border and a space on either side of each
    if spare < 0:
        for line in _fields(title, names, cells, console.width):
            typer.echo(line)
        return
    whole = [max(map(len, column)) for column in zip(names, *cells)]
    table = Table(title=Text(title), title_justify="left")  # Text: brackets are no markup
    for name, width in zip(names, _widths(longest, whole, spare)):
        table.add_column(Text(name), width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(least: Sequence[int], most: Sequence[int], spare: int) -> list[int]:
    """Widths of columns: of what is spare, those that want least have all they want, and the others share the rest."""
    widths = list(least)
    order = sorted(range(len(widths)), key=lambda i: most[i] - least[i])
    for done, i in enumerate(order):
        more = min(most[i] - least[i], spare // (len(order) - done))
        widths[i] += more
        spare -= more
    return widths


def _fields(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Each row under its first cell, a field a line, broken between words alone."""
    yield title
    margin = max(map(len, names[1:]), default=0) + 4
    for first, *others in rows:
        yield first
        for name, text in zip(names[1:], others):
            lines = [part for line in text.splitlines() for part in _wrapped(line, max(width - margin, 1))]
            yield from (f"  {head:<{margin - 4}}  {line}" for head, line in zip([name, *[""] * len(lines)], lines))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{k}={_words(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    return (
        {True: "yes", False: "no", None: ""}.get(value, str(value))
        if isinstance(value, (bool, type(None)))
        else str(value)
    )


def find(name: str) -> Any:
    """The op of this name; an unknown one lists its near matches."""
    from .. import catalogue

    ops = catalogue()
    if name not in ops:
        near = difflib.get_close_matches(name, ops) or sorted(ops)
        fail(f"there is no op {name!r}; perhaps {', '.join(near)}")
    return ops[name]


def dimensions(texts: list[str] | None) -> dict[str, int]:
    """`--dim tokens=8192 --dim hidden=2048` as numbers by name."""
    dims = {}
    for text in texts or []:
        name, _, value = text.partition("=")
        if not name or not value.isdigit():
            fail(f"--dim {text} is not of the form tokens=8192")
        dims[name] = int(value)
    return dims


def expect(op: str, what: str, given: Set[str], known: Set[str]) -> None:
    """Raise `ValueError` for a name that an op does not know."""
    unknown = sorted(given - known)
    if unknown:
        raise ValueError(f"{op} has no {what} {unknown[0]}; it has {', '.join(sorted(known))}")


class Bar:
    """How far long work has come, on standard error; nothing but what is said where that is no terminal."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("", total=total)

    def step(self, text: str = "", count: int = 1) -> None:
        self._progress.update(self._task, advance=count, description=text)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def bar(total: int) -> Iterator[Bar]:
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bar(progress, total)
