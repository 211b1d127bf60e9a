"""The lists of operations that the library is held to, and what provides each row of them.

A list is `data/coverage/<list>.tsv`: `name`, `provided_by` (the call, as one would write it after `from tilewright import *`;
several are parted by `; `), `status`, `note`, and what else the list knows. For every row that is not missing
`provided.CHECKS[list][name]` makes that call and holds its result against an independent truth. Adding a row is one line
there and one here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "data" / "coverage"
LISTS = {
    "training": "the fused operations of a training benchmark",
    "training_more": "what else training of large models fuses",
    "flashrt": "an inference engine's catalogue",
    "gn_kernels": "quantised matrix products and attention",
    "aten": "torch's own operators, replaced",
    "flaggems_features": "what a library of replaced operators offers",
    "linghe_more": "what else a library of fused training kernels offers",
}
STATUSES = {
    "native": "kernels, in the chip's own arithmetic",
    "emulated": "kernels, in the arithmetic of another number format",
    "reference": "PyTorch code only",
    "missing": "not there",
}
FIELDS = ("name", "provided_by", "status", "note")

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """The rows of one list; a malformed one raises ValueError naming file and line."""
    head, *lines = path.read_text().splitlines()
    columns = head.split("\t")
    if tuple(columns[: len(FIELDS)]) != FIELDS:
        raise ValueError(f"{path.name}: the first columns must be {', '.join(FIELDS)}, not {head!r}")
    rows: list[Row] = []
    for number, line in enumerate(lines, 2):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise ValueError(f"{path.name}:{number} has {len(cells)} columns, not {len(columns)}")
        row = dict(zip(columns, cells))
        if row["status"] not in STATUSES:
            raise ValueError(f"{path.name}:{number}: status {row['status']!r} is not one of {', '.join(STATUSES)}")
        if bool(row["provided_by"]) == (row["status"] == "missing"):
            raise ValueError(f"{path.name}:{number}: a row names what provides it, or is missing")
        rows.append(row)
    twice = [name for name, count in Counter(row["name"] for row in rows).items() if count > 1]
    if twice:
        raise ValueError(f"{path.name}: {twice[0]!r} stands there twice")
    return rows


def everything() -> dict[str, list[Row]]:
    """Every list by name, in the lists' own order."""
    return {name: read(FOLDER / f"{name}.tsv") for name in LISTS}


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows have each status."""
    found = Counter(row["status"] for row in rows)
    return {status: found[status] for status in STATUSES}


def unchecked(lists: dict[str, list[Row]], checks: dict[str, dict]) -> list[str]:
    """What is wrong between rows and checks: a row that nothing checks, a check of a row that is missing or unknown."""
    wrong = []
    for name, rows in lists.items():
        there = {row["name"] for row in rows if row["status"] != "missing"}
        known = set(checks.get(name, {}))
        wrong += [f"{name}: nothing checks {one!r}" for one in sorted(there - known)]
        wrong += [f"{name}: {one!r} is checked, but no row says that it is there" for one in sorted(known - there)]
    return wrong + [f"there is no list {name!r}" for name in sorted(set(checks) - set(lists))]
