"""The table of `aten/verdicts.py` is made here from the evidence, of every recorded choice between a replacement and aten's own.

A row of the table is of the overload that the case's call reaches, found without a GPU; a call that reaches several tells of none.
What is stale makes no row. `tilewright docs` writes `data/aten_<arch>.jsonl` anew for each chip that there is evidence of, and
`tilewright bench --record`, where this is no checkout, the file of the user's cache folder.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .. import __version__
from ..aten import verdicts
from ..aten.signature import Signature
from ..core.target import Target
from ..runtime import config
from . import evidence
from .cases import CASES
from .replaced import reached
from .results import Key, key_of

CHOICE, FALLBACK = "choice", "aten_host_fallback"  # a direction, and a family
# Student's t at 95 %, of one side, by the number of runs
STUDENT = {3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 9: 1.860, 10: 1.833}


def least_of(pairs: Sequence[Sequence[float]]) -> float:
    """What aten's time over ours is at the least, with a confidence of 95 %, by runs of (ours, aten)."""
    if len(pairs) not in STUDENT:
        raise ValueError(f"a choice takes {min(STUDENT)} to {max(STUDENT)} runs, got {len(pairs)}")
    logs = [math.log(aten / own) for own, aten in pairs]
    return math.exp(statistics.fmean(logs) - STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs)))


def times_of(pairs: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Geometric means of runs, so that their quotient is that of the runs; None where there are none."""
    if not pairs:
        return None
    own, aten = (math.exp(statistics.fmean(map(math.log, times))) for times in zip(*pairs))
    return {"own": round(own, 3), "aten": round(aten, 3), "least": min(round(least_of(pairs), 4), round(aten / own, 4))}


@cache
def kind_of(case: str, target: Target) -> Signature | None:
    """The kind of call that a case is, by the one overload that it reaches on a chip."""
    return reached(CASES[case], target)


def row_of(recorded: Mapping[str, Any]) -> verdicts.Row | None:
    """The row that a recorded one makes; None if it tells nothing of a choice."""
    case, target = CASES.get(recorded["case"]), evidence.target_of(recorded)
    place = {name: recorded[name] for name in ("gpu", "torch", "triton")}
    place |= {"version": __version__, "date": recorded["date"][:10]}
    if case is None or target is None:
        return None
    if case.family == FALLBACK and "aten" in recorded["rivals"]:
        return {
            **place,
            "call": case.call,
            "own": round(recorded["us"], 3),
            "aten": round(recorded["rivals"]["aten"], 3),
        }
    kind = kind_of(case.name, target) if case.direction == CHOICE else None
    if kind is None:
        return None
    ways = {way: times_of(recorded["runs"].get(way, ())) for way in verdicts.WAYS}
    return {**kind._asdict(), **ways, **place, "source": recorded["source"]}


def rows_of(recorded: Iterable[Mapping[str, Any]], stale: Collection[Key]) -> dict[str, list[verdicts.Row]]:
    """The rows that recorded ones make, but for stale ones, by chip."""
    found: dict[str, list[verdicts.Row]] = {}
    for one in recorded:
        made = row_of(one) if key_of(one) not in stale else None
        if made is not None:
            found.setdefault(one["arch"], []).append(made)
    return {arch: rows for arch, rows in sorted(found.items()) if any("overload" in row for row in rows)}


def tables(recorded: Iterable[Mapping[str, Any]], stale: Collection[Key]) -> dict[str, str]:
    """What the table of each chip that there is evidence of should hold, by the name of its file."""
    return {verdicts.path_of(arch).name: verdicts.text_of(rows) for arch, rows in rows_of(recorded, stale).items()}


def put(recorded: Iterable[Mapping[str, Any]], stale: Collection[Key], where: Path = config.SHIPPED) -> list[Path]:
    """Write the package's own tables, as `tilewright docs` would; gives them."""
    written = []
    for name, text in tables(recorded, stale).items():
        (where / name).write_text(text)
        written.append(where / name)
    forget()
    return written


def keep(recorded: Iterable[Mapping[str, Any]], stale: Collection[Key] = (), where: Path | None = None) -> list[Path]:
    """Put what is recorded into the user's own tables, in the place of what these have of the same, and take out of them what is
    stale; gives the files that were written."""
    recorded, written = list(recorded), []
    fresh = rows_of(recorded, stale)
    for arch, rows in rows_of(recorded, ()).items():
        known = {verdicts.key_of(row) for row in rows}
        path = (where or config.folder()) / verdicts.path_of(arch).name
        path.parent.mkdir(parents=True, exist_ok=True)
        with evidence.locked(path):
            others = [row for row in verdicts.read(path) if verdicts.key_of(row) not in known]
            text = verdicts.text_of([*others, *fresh.get(arch, ())])
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text(text)
            beside.chmod(0o600)
            beside.replace(path)
        written.append(path)
    forget()
    return written


def forget() -> None:
    """Read the tables anew when they are next asked."""
    verdicts.table.cache_clear()
