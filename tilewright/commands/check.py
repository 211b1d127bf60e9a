"""`tilewright check`: the properties of every op on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .console import INTERRUPTED, Json, bar, fail, find

LIMIT = 600.0  # seconds one property of one op may take: a kernel that hangs would take for ever
REASON = 12  # lines of a failure that are shown


def check(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="All ops, if none is named.")] = None,
    prop: Annotated[
        list[str] | None, typer.Option("--property", help="Only this property; may be given several times.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Begin no property after this time.")] = 60.0,
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="In Triton's interpreter, even where there is a GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Every property of ops: on the GPU, or in the interpreter where there is none. A line each; status 1 if one fails."""
    import torch

    from .. import catalogue
    from ..check.guarded import NoWorker, supervise
    from ..check.worker import properties
    from ..core.target import INTERPRETING

    ops = [find(name).name for name in names] if names else sorted(catalogue())
    interpreter = interpreter or INTERPRETING or not torch.cuda.is_available()
    known = properties(interpreter)
    for one in prop or ():
        if one not in known:
            fail(f"there is no property {one!r}; there are {', '.join(known)}")
    wanted = [{"op": op, "property": one} for op in ops for one in prop or known]
    command = [sys.executable, "-m", "tilewright.check.worker", *(["--interpreter"] if interpreter else [])]
    rows: list[dict[str, Any]] = []
    interrupted = False
    with bar(len(wanted)) as shown:
        try:
            for row in supervise(_in_time(wanted, minutes, shown), command, LIMIT):
                rows.append({**json.loads(row.pop("case")), **row})
                shown.step()
                if not as_json:
                    typer.echo(_line(rows[-1]))
        except KeyboardInterrupt:
            interrupted = True
            shown.say(f"interrupted: {len(wanted) - len(rows)} of {len(wanted)} properties left")
        except NoWorker as error:
            fail(str(error))
    bad = [row for row in rows if row["status"] != "ok"]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        left = len(wanted) - len(rows)
        where = "in the interpreter" if interpreter else f"on {torch.cuda.get_device_name()}"
        typer.echo(f"{len(rows) - len(bad)} held, {len(bad)} failed, {left} not run, {where}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if bad:
        raise typer.Exit(1)


def _in_time(wanted: list[dict[str, str]], minutes: float, shown: Any) -> Iterator[str]:
    end = time.monotonic() + 60 * minutes
    for one in wanted:
        if time.monotonic() >= end:
            return
        shown.step(f"{one['op']} {one['property']}", 0)
        yield json.dumps(one)


def _line(row: dict[str, Any]) -> str:
    text = f"{row['op']:<24} {row['property']:<20} {row['wall_s']:7.1f} s  "
    if row["status"] == "ok":
        return text + "held"
    lines = str(row.get("why", "")).strip().splitlines()[:REASON]
    return text + f"{row['status'].upper()}\n" + "\n".join(f"    {line[:400]}" for line in lines)
