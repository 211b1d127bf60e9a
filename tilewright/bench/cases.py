"""The benchmark cases: which op, in which direction, at which named dimensions, held to which goal.

Cases are data. A suite is a file of `suites/`, a family of cases a line of it: `dims` is the shape that the goal is stated
for, `also` names further shapes in `suites/dims.json`, which may stay `slack` (or SLACK) under the goal. A goal for the
geometric mean over several shapes has these in `over`, and `least` for each of them. The goals are in `data/goals.tsv`, and
only there; a family without one names its op itself.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

SUITES = Path(__file__).parent / "suites"
GOALS_FILE = Path(__file__).parent.parent / "data" / "goals.tsv"
SLACK = 0.05
# A step is a forward and its backward, through autograd; training is that of a whole model
Direction = Literal["forward", "backward", "step", "host", "train"]
# With memory given for the result, forward and backward through autograd, or with quantised operands
Way = Literal["out", "step", "quantised"]


class Goal(NamedTuple):
    """A line of goals.tsv. `metric` is `fraction` (of the floor's speed) or `vs:RIVAL` (its time over ours)."""

    case: str
    op: str
    shape: str
    metric: str
    goal: float


@dataclass(frozen=True)
class Case:
    """One call to measure. `options` steer the op's own `inputs`, `arguments` replace what they drew."""

    name: str
    family: str
    suite: str
    op: str
    direction: Direction
    dims: dict[str, int]
    metric: str = "fraction"
    goal: float | None = None
    own: bool = True  # at the shape that the goal is stated for
    mean: bool = False  # the goal is for the geometric mean over the family; `goal` is the least of each
    ours: bool = False  # kernels of ours are measured, even where a library's would be taken
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    grad_format: str | None = None
    dtype: str = "bfloat16"
    way: Way | None = None  # in which the host's time is taken, where it is not that of a plain call
    parts: list[dict[str, Any]] = field(
        default_factory=list
    )  # of a model: what its ops are, each as a case's own fields


def _goals() -> dict[str, Goal]:
    with GOALS_FILE.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {r["case"]: Goal(r["case"], r["op"], r["shape"], r["metric"], float(r["goal"])) for r in rows}


def _cases() -> dict[str, Case]:
    further = json.loads((SUITES / "dims.json").read_text())
    found: dict[str, Case] = {}
    for path in sorted(SUITES.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            for case in _family(json.loads(line), path.stem, further):
                found[case.name] = case
    return found


def _family(row: dict[str, Any], suite: str, further: dict[str, list[dict[str, int]]]) -> list[Case]:
    family, own, over = row.pop("case"), row.pop("dims", None), row.pop("over", [])
    also, slack, least = row.pop("also", None), row.pop("slack", SLACK), row.pop("least", None)
    goal = GOALS.get(family)
    op = row.pop("op", None) or GOALS[family].op
    metric = row.pop("metric", None) or (goal.metric if goal else "fraction")
    made = []
    for dims in (*over, *([own] if own else []), *(further[also] if also else ())):
        limit = None
        if dims in over:
            limit = least
        elif goal is not None:
            limit = goal.goal if dims is own else round(goal.goal - slack, 4)
        name = f"{family}/{'x'.join(map(str, dims.values()))}"
        about = {"metric": metric, "goal": limit, "own": dims is own, "mean": dims in over}
        made.append(Case(name, family, suite, op, dims=dims, **about, **row))
    return made


GOALS: dict[str, Goal] = _goals()  # by family
CASES: dict[str, Case] = _cases()  # by name, in the order of the suites


def select(words: Sequence[str]) -> list[Case]:
    """The cases that the words name: an op, a suite, a family or a pattern of either or of a whole name (all, if none).

    Raises KeyError with similar names.
    """
    chosen: set[str] = set()
    for word in words:
        hits = {c.name for c in CASES.values() if any(fnmatch.fnmatchcase(n, word) for n in names(c))}
        if not hits:
            known = {n for c in CASES.values() for n in names(c)}
            similar = difflib.get_close_matches(word, known, cutoff=0.5) or sorted({c.op for c in CASES.values()})
            raise KeyError(f"no case, op or suite matches {word!r}; perhaps {', '.join(similar)}")
        chosen |= hits
    return [c for c in CASES.values() if not words or c.name in chosen]


def names(case: Case) -> tuple[str, ...]:
    """The names by which a case can be selected."""
    return case.name, case.family, case.op, case.suite
