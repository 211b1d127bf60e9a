"""What the recorded rows say: each row beside its goal, and each goal beside the rows that it is about.

A goal is stated for one shape, or for the geometric mean over several; the other shapes of its family are held to a little less
(`cases.SLACK`). The README, the report and `tilewright bench --against goals` count goals by `standings` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import Case, Goal

Row = Mapping[str, Any]
Goals = Mapping[str, tuple[str, float]]


@dataclass(frozen=True)
class Rival:
    name: str
    us: float
    ratio: float  # its time over ours: above 1, ours is faster


@dataclass(frozen=True)
class Result:
    """A row as the page shows it; what the row lacks, or has no use for, is None or empty."""

    case: str
    op: str
    gpu: str
    dims: str
    us: float | None
    floor: float | None
    fraction: float | None
    rate: float | None  # GB/s over the compulsory bytes
    rivals: tuple[Rival, ...]  # fastest first
    metric: str
    goal: float | None
    measured: float | None
    error: float | None
    host: float | None
    extra: float | None
    torch: str
    triton: str
    date: str
    source: str
    method: str
    direction: str
    stale: bool
    id: str = ""

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        if self.measured is None:
            return "unmeasured"
        return "reached" if self.measured >= self.goal else "short"

    @property
    def gap(self) -> float | None:
        """How far above the goal; below it, negative."""
        return None if self.goal is None or self.measured is None else self.measured - self.goal

    @property
    def drawn(self) -> bool:
        """Whether it has a place on the roofline."""
        return None not in (self.us, self.floor, self.fraction)

    @property
    def best(self) -> Rival | None:
        return self.rivals[0] if self.rivals else None

    @property
    def lost(self) -> bool:
        return self.best is not None and self.best.ratio < 1.0

    @property
    def flags(self) -> str:
        held = (("short", self.verdict == "short"), ("lost", self.lost), ("stale", self.stale))
        return " ".join(name for name, is_so in held if is_so)


def text_of(value: Any) -> str:
    """Text that UTF-8 can hold: JSON may smuggle in half a surrogate pair."""
    return "" if value is None else str(value).encode("utf-8", "replace").decode("utf-8")


def number_of(value: Any) -> float | None:
    """A finite number, or None; JSON as Python reads it knows NaN, Infinity and integers past any float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive(value: Any) -> float | None:
    found = number_of(value)
    return found if found is not None and found > 0.0 else None


def ratio_of(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else positive(over / under)


def mapping_of(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def understand(row: Row, goals: Goals, stale: Collection[tuple[str, str]]) -> Result:
    """What a row says, beside its goal."""
    case, gpu = text_of(row.get("case")), text_of(row.get("gpu")) or "unknown GPU"
    us, floor = positive(row.get("us")), positive(row.get("floor_us"))
    fraction = positive(row.get("fraction")) or ratio_of(floor, us)
    times = {text_of(name): positive(time) for name, time in mapping_of(row.get("rivals")).items()}
    rivals = [Rival(name, time, ratio) for name, time in times.items() if (ratio := ratio_of(time, us)) and time]
    traffic = row.get("bytes")
    moved = sum(number_of(part) or 0.0 for part in traffic) if isinstance(traffic, (list, tuple)) else None
    metric, goal = goals.get(case, ("", None))
    measured = measured_by(fraction, rivals, metric)
    return Result(
        case=case,
        op=text_of(row.get("op")),
        gpu=gpu,
        dims=", ".join(f"{text_of(name)} {text_of(size)}" for name, size in mapping_of(row.get("dims")).items()),
        us=us,
        floor=floor,
        fraction=fraction,
        rate=ratio_of(positive(moved), us and us * 1e3),
        rivals=tuple(sorted(rivals, key=lambda rival: (rival.us, rival.name))),
        metric=metric,
        goal=goal,
        measured=measured,
        error=number_of(row.get("error")),
        host=positive(row.get("host_us")),
        extra=number_of(row.get("extra_bytes")),
        torch=text_of(row.get("torch")),
        triton=text_of(row.get("triton")),
        date=text_of(row.get("date")),
        source=text_of(row.get("source")),
        method=text_of(row.get("method")),
        direction=text_of(row.get("direction")),
        stale=(gpu, case) in stale,
    )


# --------------------------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True)
class Standing:
    """A goal on one GPU. `value` is None until every shape that the goal is stated for was measured."""

    goal: Goal
    own: tuple[Result, ...]  # at the shapes that it is stated for
    others: tuple[Result, ...]  # at the other shapes of its family, each held to its own, lower goal
    known: bool  # whether there are cases for it at all
    value: float | None

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured" if self.known else "no case yet"
        return "reached" if self.value >= self.goal.goal else "short"


def standings(results: Sequence[Result], goals: Iterable[Goal], cases: Collection[Case]) -> list[Standing]:
    """How every goal stands, by the results of one GPU."""
    here = {result.case: result for result in results}
    found = []
    for goal in goals:
        family = [case for case in cases if case.family == goal.case]
        stated = [case for case in family if case.own or case.mean]
        own = tuple(here[case.name] for case in stated if case.name in here)
        others = tuple(here[case.name] for case in family if case not in stated and case.name in here)
        values = [value for result in own if (value := measured_by(result.fraction, result.rivals, goal.metric))]
        whole = bool(stated) and len(values) == len(stated)
        value = math.exp(sum(map(math.log, values)) / len(values)) if whole else None
        found.append(Standing(goal, own, others, bool(family), value))
    return found


def tally(standings: Iterable[Standing]) -> str:
    """How many goals are short, in the words of every page that counts them."""
    measured = [one for one in standings if one.value is not None]
    short = sum(one.verdict == "short" for one in measured)
    others = [result for one in measured for result in one.others]
    lower = sum(result.verdict == "short" for result in others)
    return (
        f"{short} of {len(measured)} measured goals are short at the shapes that they are stated for; of {len(others)} rows"
        f" at other shapes, held to a little less, {lower} are short."
    )


def measured_by(fraction: float | None, rivals: Iterable[Rival], metric: str) -> float | None:
    """The value of `fraction` or `vs:RIVAL`."""
    if metric == "fraction":
        return fraction
    return next((rival.ratio for rival in rivals if rival.name == metric.removeprefix("vs:")), None)
