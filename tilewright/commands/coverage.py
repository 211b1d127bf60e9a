"""`tilewright coverage`: the lists of operations that the library is held to, and what is there of them."""

from __future__ import annotations

import difflib
import json
from typing import Annotated

import typer

from .console import Json, fail, show


def coverage(
    lists: Annotated[list[str] | None, typer.Argument(metavar="LIST", help="Only these lists.")] = None,
    as_json: Json = False,
) -> None:
    """The lists of operations that the library is held to: what provides each row, natively or not, and what is missing."""
    from ..check.coverage import LISTS, counts, everything

    for name in lists or ():
        if name not in LISTS:
            near = difflib.get_close_matches(name, LISTS) or list(LISTS)
            fail(f"there is no list {name!r}; perhaps {', '.join(near)}")
    try:
        found = {name: rows for name, rows in everything().items() if not lists or name in lists}
    except (OSError, ValueError) as error:
        fail(f"the lists cannot be read: {error}; install tilewright anew")
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    totals = [{"list": name, "holds": LISTS[name], **counts(rows)} for name, rows in found.items()]
    show(totals, "rows of each list", False)
    for name, rows in found.items():
        there = [row for row in rows if row["status"] != "missing"]
        missing = [row["name"] for row in rows if row["status"] == "missing"]
        if there:
            show([{k: row[k] for k in ("name", "status", "provided_by", "note")} for row in there], name, False)
        if missing:
            typer.echo(f"{name}, {len(missing)} missing: {', '.join(missing)}\n")
