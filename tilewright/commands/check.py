"""`tilewright check`: the properties of every op on this machine; with `--models`, every op at the sizes of real models."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import INTERRUPTED, Json, bar, fail, find, show

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
    at_models: Annotated[
        bool,
        typer.Option("--models", help="Instead, every op at the sizes of real models, against float64 on the GPU."),
    ] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="With --models: only this model; may be given several times.")
    ] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="With --models: the I-th of N parts.")] = "1/1",
    again: Annotated[bool, typer.Option("--again", help="With --models: also what was right before.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="With --models: write what was covered into evidence/models/.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="With --models: the file that outcomes are kept in. Yours for this GPU, if not given."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="With --models: how many calls are made side by side, where they fit into memory."),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Every property of ops: on the GPU, or in the interpreter where there is none. A line each; status 1 if one fails.

    With --models every op, forward and backward, at the dimensions of every model of data/models.json, for 1, 7, 128 and 4096
    tokens and with each optional argument that selects another compiled variant. Outcomes are kept as they come: a run that was
    stopped goes on where it was. Status 1 if a call is wrong, 3 if time ran out before the last.
    """
    import torch

    from .. import catalogue
    from ..check.guarded import NoWorker, supervise
    from ..check.worker import properties
    from ..core.target import INTERPRETING

    ops = [find(name).name for name in names] if names else sorted(catalogue())
    if at_models:
        from ..bench import evidence
        from ..check.model_run import gpu, in_interpreter, read_rows

        if not interpreter and not torch.cuda.is_available():
            fail("check --models needs a GPU, and there is none here; --interpreter runs its small form")
        if interpreter and record:
            fail("--record is of calls on a GPU, not in the interpreter")
        end = time.monotonic() + 60 * minutes
        made = _models(ops, model, in_interpreter() if interpreter else gpu(), shard, state, again, jobs)
        interrupted = _hold(made, end, jobs, as_json)
        if record:
            path = evidence.path_of(made.here.name, evidence.folder() / "models")
            with evidence.locked(path):
                rows = {row["call"]: row for row in (*read_rows(path), *made.rows())}
                evidence.write(path, [rows[call] for call in sorted(rows)])
        status = _told(made, as_json)
        raise typer.Exit(INTERRUPTED if interrupted else status)
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


# ---------------------------------------------------------------- at models' sizes


def _part(shard: str) -> tuple[int, int]:
    part, _, parts = shard.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        fail(f"--shard is I/N with I from 1 to N, got {shard}")
    return int(part), int(parts)


def _models(
    ops: list[str], model: list[str] | None, here: Any, shard: str, state: Path | None, again: bool, jobs: int
) -> Any:
    """The calls of a part, and what is known of them already."""
    from ..bench import evidence
    from ..check.model_run import Run
    from ..check.models import known

    for one in model or ():
        if one not in known():
            fail(f"--model {one} is not one of {', '.join(known())}")
    folder = evidence.folder()
    path = state or folder.parent / ".cache" / f"models-{evidence.path_of(here.name, folder).name}"
    made = Run(ops, model, here, _part(shard), path, again, jobs)
    if not made.planned:
        fail(f"{', '.join(ops)} has no place in {', '.join(model or ())}")
    return made


def _hold(made: Any, end: float, jobs: int, as_json: bool) -> bool:
    """Run what is left to run, with a line for each call that was not right; whether Ctrl-C ended it."""
    from ..check.guarded import NoWorker, supervise

    command = [sys.executable, "-m", "tilewright.check.worker", *(["--interpreter"] if made.here.interpreter else [])]
    with bar(len(made.pending)) as shown:
        try:
            # What runs side by side fits together, as each call alone does
            for row in made.go(
                lambda requests: supervise(
                    requests, command, LIMIT, jobs=jobs, weight=made.weights.__getitem__, most=made.here.most
                ),
                end,
            ):
                shown.step(row["op"])
                if row["outcome"] not in ("held", "skipped") and not as_json:
                    typer.echo(
                        _line(
                            {"op": row["op"], "property": "", **row, "wall_s": row["seconds"], "status": row["outcome"]}
                        )
                    )
        except KeyboardInterrupt:
            shown.say("interrupted; what was run is kept")
            return True
        except NoWorker as error:
            fail(str(error))
        except OSError as error:
            fail(f"cannot write {made.kept.path}: {error.strerror or error}")
    return False


def _told(made: Any, as_json: bool) -> int:
    """Say what is known of the calls now; the exit status."""
    rows, total = made.rows(), Counter(one.op for one in made.planned)
    counts = {op: Counter(row["outcome"] for row in rows if row["op"] == op) for op in total}
    bad = sum(n for found in counts.values() for what, n in found.items() if what not in ("held", "skipped"))
    skipped, left = sum(found["skipped"] for found in counts.values()), len(made.planned) - len(rows)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        table = [
            {"op": op, "calls": total[op], "held": found["held"], "skipped": found["skipped"],
             "failed": found.total() - found["held"] - found["skipped"], "left": total[op] - found.total()}
            for op, found in counts.items()
        ]  # fmt: skip
        show(table, "calls at the sizes of real models", False)
        held = len(rows) - bad - skipped
        typer.echo(f"{held} held, {bad} failed, {skipped} skipped, {left} not run, on {made.here.name}")
    return 1 if bad else 3 if left else 0
