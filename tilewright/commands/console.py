"""What every command does alike: tables or JSON, one line for an error, ops found by name."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator, Set
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def fail(text: str) -> NoReturn:
    """One clear line on standard error, and exit status 2."""
    typer.echo(f"tilewright: {text}", err=True)
    raise typer.Exit(2)


def show(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_words(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # nobody's window: names are not to be folded
    console.print(table)


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
