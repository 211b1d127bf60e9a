"""`tilewright report`: the recorded evidence as one HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .console import fail


def report(
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    folder: Annotated[Path, typer.Option("--evidence", help="The folder of evidence rows.")] = Path("evidence"),
) -> None:
    """Write the recorded rows as one page that needs no network: rooflines, rivals, goals, what is stale, every row."""
    from ..bench import cases, evidence
    from ..bench.report import page
    from ..bench.results import standings

    if not folder.is_dir():
        fail(f"there is no folder {folder}; `tilewright bench --record` makes one, --evidence names another")
    try:
        rows = evidence.everything(folder)
        stale = evidence.stale_keys(rows)
        goals = {name: (case.metric, case.goal) for name, case in cases.CASES.items() if case.goal is not None}
        judge = partial(standings, goals=cases.GOALS.values(), cases=cases.CASES.values())
        out.write_text(page(rows, goals=goals, stale=stale, judge=judge), encoding="utf-8")
    except (OSError, ValueError) as error:
        fail(str(error).partition("\n")[0])
    chips = len({row["gpu"] for row in rows})
    typer.echo(f"{out}: rows {len(rows)}, GPUs {chips}, stale {len(stale)}")
