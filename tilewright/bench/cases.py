"""The benchmark cases: which op, in which direction, at which named dimensions, held to which goal.

Cases are data. A suite is a file of `suites/`, a family of cases a line of it: `dims` is the shape that the goal is stated
for, `also` names further shapes in `suites/dims.json`, which may stay `slack` (or SLACK) under the goal. A goal for the
geometric mean over several shapes has these in `over`, and `least` for each of them, as a family without a goal may have for its
own. A goal for several calls of torch's operators has these in `calls`, each with its own `dims`; with `partial` it is for those of
them that its rival has. The goals are in `data/goals.tsv`, and only there; a family without one names its op itself. A line that
says `like` has everything from the line of that family but what it says anew. Goals are stated for Triton BASE, those of lines with
`"triton": "newest"` for any that is newer: such a case waits where there is none. Rivals in `beside` are timed whenever a case is,
with the one that its metric names.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..core.triton_versions import age

SUITES = Path(__file__).parent / "suites"
GOALS_FILE = Path(__file__).parent.parent / "data" / "goals.tsv"
SLACK = 0.05
BASE = "3.6"
# A step is a forward and its backward, through autograd; training is that of a whole model
# Memory is the peak of each of many calls, of which the worst counts; queued are calls of a framework that has its own streams
# A choice is between ours and aten's: both are timed in several runs, eager and in a graph
Direction = Literal["forward", "backward", "step", "host", "train", "memory", "queued", "choice", "worst", "model"]
# With memory given for the result, forward and backward through autograd, with quantised operands, with results stored over
# the arguments that they may lie on, or, of attention, by codes, which the call makes
Way = Literal["out", "step", "quantised", "over", "int8", "fp8_pv"]
CODED = ("int8", "fp8_pv")  # ways that are attention's `math`


class Goal(NamedTuple):
    """A line of goals.tsv. `metric` is `fraction` (of the floor's speed), `vs:RIVAL` (its time over ours) or `memory:RIVAL` (its
    peak of bytes beside its results over ours)."""

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
    partial: bool = False  # of a mean: calls that the rival does not make, or makes otherwise, are left out of it
    ours: bool = False  # kernels of ours are measured, even where a library's would be taken
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)  # rivals that are timed whenever it is
    floor: Literal["bytes", "bf16"] = "bytes"  # moving what it must, or multiplying at the best rate of a dtype
    grad_format: str | None = None
    dtype: str = "bfloat16"
    call: str | None = None  # of torch's operators, by its name in `replaced.CALLS`
    way: Way | None = None  # in which it is called, where that is not plainly
    triton: Literal["newest"] | None = None  # the Triton it is for, where that is not BASE
    parts: list[dict[str, Any]] = field(
        default_factory=list
    )  # of a model: what its ops are, each as a case's own fields


def _goals() -> dict[str, Goal]:
    with GOALS_FILE.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {r["case"]: Goal(r["case"], r["op"], r["shape"], r["metric"], float(r["goal"])) for r in rows}


def _cases() -> dict[str, Case]:
    further = json.loads((SUITES / "dims.json").read_text())
    read = [
        (path.stem, json.loads(line))
        for path in sorted(SUITES.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    lines = {row["case"]: row for _, row in read}
    found: dict[str, Case] = {}
    for suite, row in read:
        for case in _family(whole(row, lines), suite, further):
            found[case.name] = case
    return found


def whole(row: Mapping[str, Any], lines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A line with all that it has from the one that it is `like`."""
    own = {name: value for name, value in row.items() if name != "like"}
    if "like" not in row:
        return own
    if row["like"] not in lines:
        raise KeyError(f"{row['case']} is like {row['like']}, which no suite has")
    return {**whole(lines[row["like"]], lines), **own}


def _family(row: dict[str, Any], suite: str, further: dict[str, list[dict[str, int]]]) -> list[Case]:
    family, own, over = row.pop("case"), row.pop("dims", None), row.pop("over", [])
    also, slack, least = row.pop("also", None), row.pop("slack", SLACK), row.pop("least", None)
    goal = GOALS.get(family)
    op = row.pop("op", None) or GOALS[family].op
    metric = row.pop("metric", None) or (goal.metric if goal else "fraction")
    made = []
    for one in row.pop("calls", []):
        about = {"metric": metric, "goal": least, "own": False, "mean": True, **row, **one}
        made.append(Case(f"{family}/{one['call']}/{sizes(one['dims'])}", family, suite, op, **about))
    for dims in (*over, *([own] if own else []), *(further[also] if also else ())):
        if goal is None or dims in over:
            limit = least
        else:
            limit = goal.goal if dims is own else round(goal.goal - slack, 4)
        name = f"{family}/{sizes(dims)}"
        about = {"metric": metric, "goal": limit, "own": dims is own, "mean": dims in over}
        made.append(Case(name, family, suite, op, dims=dims, **about, **row))
    return made


def sizes(dims: Mapping[str, int]) -> str:
    return "x".join(map(str, dims.values()))


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


def rival_of(metric: str) -> str | None:
    """The rival that a metric names."""
    return metric.partition(":")[2] or None


def variants_of(case: Case) -> list[str]:
    """Which steps of a model a case measures, by their names in `models.VARIANTS`: transformers' own, by which others are judged,
    ours, which is the case's time, the rival that the metric names, and those beside."""
    return list(dict.fromkeys(["plain", own_of(case), *filter(None, [rival_of(case.metric)]), *case.beside]))


def own_of(case: Case) -> str:
    """The variant of a model's step that is the case's time."""
    return "fp8" if case.options.get("fp8") else "bf16"


def is_for(case: Case, version: str) -> bool:
    """Whether a case can be measured with a version of Triton."""
    return case.triton is None or age(version) > age(BASE)


def waits(case: Case, version: str) -> str | None:
    """Why a case is not measured with a version of Triton, or None."""
    return None if is_for(case, version) else f"it is for a Triton newer than {BASE}, and here is {version}"
