"""`tilewright bench`: ops beside their floor and their rivals, in one run, each output checked before it is timed."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import INTERRUPTED, Json, fail, show


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP|CASE|SUITE", help="All cases if none.")] = None,
    beside: Annotated[
        str, typer.Option("--rivals", help="eager, compile, liger, quack or a rival of single ops, with commas.")
    ] = "",
    record: Annotated[bool, typer.Option("--record", help="Write the rows to evidence/<gpu>.jsonl.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Only cases without a fresh row on this GPU.")] = False,
    against: Annotated[Literal["goals"] | None, typer.Option(help="Print goals beside what was measured.")] = None,
    folder: Annotated[Path | None, typer.Option("--evidence", help="The folder of recorded rows.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds a case may take.")] = 150.0,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Begin no case after this time; with --stale the rest comes later.")
    ] = 0.0,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes that compile all cases before the first is timed; 1: as they come.")
    ] = 1,
    only_list: Annotated[bool, typer.Option("--list", help="Show the cases and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Check, then time, cases on this GPU beside their floor and their rivals."""
    import torch

    from ..bench import cases, evidence, rivals, run
    from ..check import guarded

    try:
        asked = chosen = cases.select(names or [])
    except KeyError as error:
        fail(error.args[0])
    if only_list:
        show([describe(case) for case in chosen], "cases", as_json)
        return
    wanted = [name.strip() for name in beside.split(",") if name.strip()]
    for name in wanted:
        if rivals.missing(name) and name not in rivals.known():
            fail(str(rivals.missing(name)))
    if not torch.cuda.is_available():
        fail(run.NO_DEVICE)
    try:
        recorded = evidence.everything(folder)
        if stale:
            chosen = [case for case in chosen if not fresh_here(case.name, recorded)]
        also: dict[str, dict[str, float]] = {}  # what recorded rows have beside them, those that replace them must have
        for row in recorded if record else ():
            also.setdefault(row["case"], {}).update(row["rivals"])
        chosen = whole_overloads(chosen)
        end = time.monotonic() + 60 * minutes if minutes else math.inf
        if jobs > 1:
            compiled(chosen, jobs, limit, end)
        choosing = record and folder is None and any(case.direction == "choice" for case in asked)
        later = [case for case in chosen if choosing and goes_by_choices(case)]
        first = [case for case in chosen if case not in later]
        measure = partial(
            measured, beside=wanted, also=also, limit=limit, folder=folder if record else None, record=record, quiet=as_json,
            end=end,
        )  # fmt: skip
        rows = measure(first)
        if choosing:
            choose()
        if later and len(rows) == len(first) and time.monotonic() < end:  # by workers that read the new table
            rows += measure(later)
    except (evidence.Damaged, guarded.NoWorker) as error:
        fail(str(error))
    good = [row for row in rows if row["status"] == "ok"]
    waiting = [row for row in rows if row["status"] == run.WAITS]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        show([summary(row, wanted) for row in rows], "measured", False)
        for name in sorted({name for row in rows for name in row.get("absent", {})}):
            whys = sorted({row["absent"][name] for row in rows if name in row.get("absent", {})})
            typer.echo(f"rival {name}: not timed for some cases: {'; '.join(whys)}")
    if against == "goals" and not as_json:
        show(goals_table(good, recorded), "goals", False)
    if len(rows) < len(chosen):
        typer.echo(f"interrupted after {len(rows)} of {len(chosen)} cases: the same with --stale goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    if len(good) + len(waiting) < len(rows):
        raise typer.Exit(1)


def whole_overloads(chosen: list) -> list:
    """Cases, those of one call of torch's operators together: a run that ends early then leaves verdicts, not halves of them."""
    groups: dict[Any, list] = {}
    for case in chosen:
        groups.setdefault((case.family, case.call) if case.direction == "choice" else case.name, []).append(case)
    return list(chain.from_iterable(groups.values()))


def goes_by_choices(case: Any) -> bool:
    """Whether a case is about mode "auto", and so about the table that choices make."""
    return case.options.get("auto", False) or case.direction == "worst" or case.options.get("mode") == "auto"


def compiled(chosen: list, jobs: int, limit: float, end: float) -> None:
    """Have the kernels of cases in Triton's cache. What fails here is said of the case when it is timed."""
    from ..bench import run

    begin = time.monotonic()
    single = [case.name for case in chosen if case.direction not in ("train", "memory", "worst", "model")]
    names = (name for name in single if time.monotonic() < end)
    made = list(run.compile_all(names, jobs, limit=limit))
    good = sum(row["status"] == "ok" for row in made)
    seconds = time.monotonic() - begin
    typer.echo(f"compiled: {good} of {len(made)} cases, by {jobs} processes, in {seconds:.0f} s", err=True)


def choose() -> None:
    """Put choices that are recorded where `tw.aten` reads them: in a checkout the package's own table, elsewhere the user's."""
    from ..bench import choices, documents, evidence

    recorded = evidence.everything()
    stale = evidence.stale_keys(row for row in recorded if row["op"] == "aten")
    checkout = (documents.ROOT / documents.README).exists()
    written = choices.put(recorded, stale) if checkout else choices.keep(recorded, stale)
    if written:
        typer.echo(f"written: {', '.join(map(str, written))}", err=True)


def fresh_here(case: str, recorded: list[dict[str, Any]]) -> bool:
    """Whether there is a row of today's code for this case, this GPU and this release of Triton, beside the rival that its goal is
    about and those that are always timed with it, or the reason why one of these was not."""
    import torch
    import triton

    from ..bench import evidence
    from ..bench.cases import CASES, rival_of
    from ..core.triton_versions import release

    here = (torch.cuda.get_device_name() if torch.cuda.is_available() else None, case, release(triton.__version__))
    rival, beside = rival_of(CASES[case].metric), {*CASES[case].beside}
    own = [row for row in recorded if evidence.key_of(row) == here and (rival is None or rival in row["rivals"])]
    own = [row for row in own if beside <= {*row["rivals"], *row.get("steps", ()), *row.get("absent", ())}]
    return any(evidence.freshness(row) == "fresh" for row in own)


def measured(
    chosen: list,
    beside: list[str],
    also: dict[str, dict[str, float]],
    limit: float,
    folder: Path | None,
    record: bool,
    quiet: bool,
    end: float,
) -> list:
    """Run the cases, none of them begun after `end`, each row printed and recorded as it comes, so that a run that is interrupted
    keeps what it has."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..bench import evidence, models, run

    rows = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_stderr(), disable=quiet) as progress:
        task = progress.add_task("measuring", total=len(chosen))
        say = partial(progress.console.print, highlight=False, markup=False, soft_wrap=True)
        try:
            whole = [case for case in chosen if case.direction == "train"]
            ops = [case.name for case in chosen if case.direction != "train"]
            for row in chain(models.supervise(whole, limit, say), run.supervise(ops, beside, also, limit=limit)):
                rows.append(judged(row))
                if record and row["status"] == "ok":
                    kept = [*evidence.FIELDS, *(name for name in evidence.OPTIONAL if row.get(name))]
                    for refused in evidence.record([{name: row[name] for name in kept}], folder):
                        say(refused)
                progress.console.print(line(rows[-1]), highlight=False, markup=False)
                progress.advance(task)
                if time.monotonic() >= end:
                    break
        except KeyboardInterrupt:
            pass
    return rows


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its goal and whether it reaches it; a row without its goal's rival does neither."""
    from ..bench.cases import CASES

    case = CASES[row["case"]]
    if row["status"] != "ok" or case.goal is None:
        return {**row, "goal": case.goal}
    reached = None if row["measured"] is None else row["measured"] >= case.goal
    return {**row, "metric": case.metric, "goal": case.goal, "reached": reached}


def line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['case']}: {row['status'].upper()}: {row.get('why', '')}"
    short = f", short of {row['goal']:.2f}" if row.get("reached") is False else ""
    measured = (
        without_rival(row) if row["measured"] is None else f", {row['measured']:.3f}{short}"
    )  # a step without a rival has its time alone
    return f"{row['case']}: {row['us']:.2f} us{measured} ({row['wall_s']:g} s)"


def without_rival(row: dict[str, Any]) -> str:
    """What there is to say of a row that has not what its goal is about."""
    from ..bench.cases import rival_of

    name = rival_of(row.get("metric", ""))
    return f", {name} absent: {row['absent'][name]}" if name in row.get("absent", {}) else ""


def describe(case: Any) -> dict[str, Any]:
    return {
        "case": case.name, "op": case.op, "direction": case.direction, "suite": case.suite, "metric": case.metric,
        "goal": case.goal,
    }  # fmt: skip


def summary(row: dict[str, Any], beside: list[str]) -> dict[str, Any]:
    """A line of the table: the floor and the rivals beside ours."""
    if row["status"] != "ok":
        return {"case": row["case"], "us": row["status"].upper(), "floor": row.get("why", "")}
    verdict = {True: "reached", False: "short", None: "rival absent"}[row["reached"]] if "reached" in row else ""
    names = list(dict.fromkeys([*beside, *row["rivals"], *row.get("absent", {})]))
    return {
        "case": row["case"],
        "us": f"{row['us']:.2f}",
        "floor": "" if row["floor_us"] is None else f"{row['floor_us']:.2f}",
        "fraction": "" if row["fraction"] is None else f"{row['fraction']:.3f}",
        "goal": "" if row["goal"] is None else f"{row['goal']:.2f} {verdict}",
        "rivals": " ".join(f"{n} {row['rivals'][n]:.1f}" if n in row["rivals"] else f"{n} absent" for n in names),
        "TFLOP/s": rate(row.get("rates")),
        "host us": "" if row["host_us"] is None else f"{row['host_us']:.1f}",
        "error": f"{row['error']:.2e}",
        "extra bytes": row["extra_bytes"],
    }


def rate(rates: dict[str, Any] | None) -> str:
    """The rate of a matrix product: a burst, then sustained, at which clock."""
    if rates is None:
        return ""
    clock = f" at {rates['clock_mhz']} MHz" if rates["clock_mhz"] else ""
    return f"{rates['burst']:.0f}, sustained {rates['sustained']:.0f}{clock}"


def goals_table(rows: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal of the project, what was measured for it now or recorded before, and by how much it falls short; and what rows are
    held to together."""
    from ..bench.cases import CASES, GOALS
    from ..bench.results import key_of, standings, understand
    from ..bench.tallies import OP, tallies

    gpus = {row["gpu"] for row in rows}
    latest = {key_of(row)[1:]: row for row in (*recorded, *rows) if not gpus or row["gpu"] in gpus}
    results = [understand(row, {}, ()) for row in latest.values()]
    made = [
        {
            "goal": one.goal.case,
            "op": one.goal.op,
            "metric": one.goal.metric,
            "wanted": f"{one.goal.goal:.2f}",
            "measured": "" if one.value is None else f"{one.value:.3f}",
            "verdict": f"short by {one.goal.goal - one.value:.3f}" if one.verdict == "short" else one.verdict,
        }
        for one in standings(results, GOALS.values(), CASES.values())
    ]
    return made + [
        {
            "goal": one.name, "op": OP, "metric": "share", "wanted": f"{one.wanted:.2f}",
            "measured": f"{sum(one.measured)} of {len(one.measured)}", "verdict": one.verdict,
        }
        for one in tallies(results, CASES.values())
    ]  # fmt: skip
