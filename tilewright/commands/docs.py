"""`tilewright docs`: write the generated pages anew, or say which are out of date."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import fail


def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page is out of date.")] = False,
) -> None:
    """Write what is generated of docs/ and the README, the picture of results, the table of names and the package's stub, from the
    declarations, the lists and the evidence."""
    from ..bench import documents

    if not (documents.ROOT / documents.README).exists():
        fail("the pages are those of the project: run this in a checkout of it, not in an installed package")
    try:
        if check:
            wrong = documents.check()
            if wrong:
                fail("; ".join(wrong))
            typer.echo("every generated page is up to date")
            return
        changed = documents.write()
    except (OSError, ValueError) as error:
        fail(str(error).partition("\n")[0])
    typer.echo(f"written: {', '.join(map(str, changed))}" if changed else "every generated page was up to date")
