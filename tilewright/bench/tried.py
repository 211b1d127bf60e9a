"""What the net of torch's operators tried, by overload: `evidence/aten/<where>.jsonl`, and the table of it in docs/aten.md.

A row is an overload's: how many calls of it the tests made while it was replaced, how many of these were ours in tests that passed,
why others were aten's, and which tests failed that it was called in. The tests write a log as they run, from which
`python3 -m tests.aten.tried` makes the rows. A row is stale once the kernels of a plain call of its overload have changed. The
table also has each overload's engine, the dtypes with which a plain call is ours, and what measurements say of it in mode "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..aten import table as replaced
from ..aten import verdicts
from ..aten.plans import Run
from ..aten.row import TAKEN, Declined
from ..check.provided.aten import call_as, call_of
from ..core.target import TARGETS, pretend
from ..core.tensor import name_of
from ..core.triton_versions import release
from ..runtime.kernel import collect
from ..runtime.source import hashed
from .evidence import lines_of
from .markdown import code, table, wrapped

Row = dict[str, Any]
FOLDER, PAGE = Path("evidence/aten"), Path("docs/aten.md")
INTERPRETER = "interpreter"  # what stands in the place of a GPU
BEGIN, END = "<!-- tried -->", "<!-- /tried -->"
FIELDS: dict[str, type] = {
    "overload": str, "tried": int, "passed": int, "declined": dict, "failed": list, "where": str, "torch": str, "triton": str,
    "date": str, "source": str,
}  # fmt: skip


def problem(row: Any) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return "is not an object"
    if row.keys() != FIELDS.keys():
        return f"has fields other than {', '.join(FIELDS)}"
    for name, kind in FIELDS.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            return f"has {name} = {row[name]!r}"
    if not all(isinstance(why, str) and type(n) is int for why, n in row["declined"].items()):
        return "has a reason without a count"
    if row["passed"] + sum(row["declined"].values()) > row["tried"]:
        return "has more outcomes than calls"
    return None


def read(root: Path) -> dict[str, list[Row]]:
    """The rows of each place where the net ran; raises `evidence.Damaged` with the line that is none."""
    return {path.stem: lines_of(path, problem) for path in sorted((root / FOLDER).glob("*.jsonl"))}


@cache
def source(name: str) -> str:
    """Stands for the kernels of a plain call of an overload, with all that they call."""
    args, kwargs = call_of(name, lambda shape, dtype=torch.float32: torch.empty(shape, dtype=dtype))
    with Run(), pretend(TARGETS["sm_90"]), collect() as wanted:
        replaced.FORMS[name](*args, **kwargs)
    return hashed(wanted)


@cache
def declines(name: str) -> dict[torch.dtype, str]:
    """The dtypes with which a plain call of an overload is aten's, and why; with all others of `TAKEN` it is ours."""
    found: dict[torch.dtype, str] = {}
    for dtype in TAKEN:
        args, kwargs = call_as(name, dtype, lambda shape, own: torch.zeros(shape, dtype=own, device="cpu"))
        with Run(), pretend(TARGETS["sm_90"]), collect():
            try:
                replaced.FORMS[name](*args, **kwargs)
            except Declined as reason:
                found[dtype] = str(reason)
    return found


FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "float64"}


def taken_dtypes(name: str) -> str:
    """The dtypes with which a plain call of an overload is ours, in words."""
    left = declines(name)
    floats = [word for dtype, word in FLOATS.items() if dtype not in left]
    whole = sorted(name_of(d) for d in TAKEN if d not in FLOATS and d != torch.bool and d not in left)
    words = ["floats"] if len(floats) == len(FLOATS) else floats
    words += ["integers"] if len(whole) == len(TAKEN) - len(FLOATS) - 1 else whole
    return ", ".join([*words, *(["bool"] if torch.bool not in left else [])]) if left else "all"


def section(places: Mapping[str, Sequence[Row]], source: Callable[[str], str] = source) -> str:
    """A table for each GPU; of the interpreter's only where there is none."""
    shown = {place: rows for place, rows in places.items() if place != INTERPRETER} or places
    lines = [BEGIN]
    for rows in shown.values():
        lines += ["", *_place({row["overload"]: row for row in rows}, source)]
    if not shown:
        lines += ["", "Nothing is recorded."]
    return "\n".join([*lines, "", END])


def _place(rows: Mapping[str, Row], source: Callable[[str], str]) -> list[str]:
    stale = {name for name, row in rows.items() if name not in replaced.FORMS or source(name) != row["source"]}
    missing = sorted(replaced.FORMS.keys() - rows.keys())
    failing = sum(bool(row["failed"]) for row in rows.values())
    first = next(iter(rows.values()))
    tried, ours = (sum(row[what] for row in rows.values()) for what in ("tried", "passed"))
    words = (
        f"{first['where']}, torch {first['torch']}, Triton {first['triton']}, {first['date'][:10]}: {tried} calls of"
        f" {len(rows)} overloads, {ours} of them ours and right; {failing} overloads were called in tests that failed."
        f" {len(stale)} rows are stale, {len(missing)} overloads have none."
    )
    said = judged(first)
    if said is not None:
        words += f" Verdicts are those of {said.place.gpu}."
    made = [
        (*_line(row, row["overload"] in stale), "" if said is None else said.verdict(name))
        for name, row in sorted(rows.items())
    ]
    heads = ("overload", "engine", "dtypes", "tried", "passed", "fell back, and why", "failed in", "verdict")
    return [*wrapped(words), "", *table(heads, made)]


def judged(row: Row) -> verdicts.Verdicts | None:
    """What shipped measurements say on the GPU of a row, with its torch and its Triton, or of the interpreter's rows on the first
    GPU that there are any of, with theirs; None where there are none."""
    for arch in TARGETS:
        measured = verdicts.read(verdicts.path_of(arch))
        about = row if row["where"] != INTERPRETER else next(({**one, "where": one["gpu"]} for one in measured), None)
        if about is None:
            continue
        place = verdicts.Place(arch, about["where"], release(about["torch"]), release(about["triton"]))
        found = verdicts.Verdicts(place, measured)
        if found.rows:
            return found
    return None


def _line(row: Row, stale: bool) -> tuple[str, ...]:
    why = "; ".join(
        f"{n}: {reason}" for reason, n in sorted(row["declined"].items(), key=lambda one: (-one[1], one[0]))
    )
    name, mark = row["overload"], " (stale)" if stale else ""
    about = (replaced.ENGINE[name], taken_dtypes(name)) if name in replaced.FORMS else ("", "")
    return code(name) + mark, *about, str(row["tried"]), str(row["passed"]), why, ", ".join(map(code, row["failed"]))
