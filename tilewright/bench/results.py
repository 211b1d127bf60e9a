"""What the recorded rows say: each row beside its goal, and each goal beside the rows that it is about.

A goal is stated for one shape, or for the geometric mean over several; the other shapes of its family are held to a little less
(`cases.SLACK`). The README, the report and `tilewright bench --against goals` count goals by `standings` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.triton_versions import age, release
from .cases import BASE, Case, Goal, is_for, rival_of

Row = Mapping[str, Any]
Goals = Mapping[str, tuple[str, float]]


@dataclass(frozen=True)
class Rival:
    name: str
    us: float
    ratio: float  # its time over ours: above 1, ours is faster
    memory: float | None = None  # its bytes beside its results over ours, at the peak: above 1, ours takes less


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
    absent: Mapping[str, str]  # why others were not timed
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
    # By the way of calling, pairs of ours and another's
    runs: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    id: str = ""

    @property
    def verdict(self) -> str:
        """Of the row beside its goal; where the rival that the goal names is absent there is nothing to judge."""
        if self.goal is None:
            return ""
        if self.measured is None:
            return "unmeasured"
        return "reached" if self.measured >= self.goal else "short"

    def by(self, metric: str) -> float | None:
        """What a metric says of the row."""
        return measured_by(self.fraction, self.rivals, metric)

    @property
    def lacks(self) -> str:
        """Why the rival that the goal names has no time, where it has none."""
        return self.absent.get(rival_of(self.metric) or "", "")

    @property
    def label(self) -> str:
        """The case, with the release of Triton where that is not the one of most goals."""
        return self.case + ("" if release(self.triton) in (BASE, "") else f" (Triton {release(self.triton)})")

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


def rivals_of(row: Row) -> list[Rival]:
    """The rivals that a row has times of."""
    us, ours, theirs = positive(row.get("us")), number_of(row.get("extra_bytes")), mapping_of(row.get("rival_bytes"))
    found = []
    for name, time in mapping_of(row.get("rivals")).items():
        ratio, size = ratio_of(positive(time), us), number_of(theirs.get(name))
        # A call that takes nothing counts as taking one byte, so that two of them are equal
        memory = None if size is None or ours is None else ratio_of(max(1.0, size), max(1.0, ours))
        if ratio is not None:
            found.append(Rival(text_of(name), float(time), ratio, memory))
    return found


Key = tuple[str, str, str]


def key_of(row: Row) -> Key:
    """What a row is of: the GPU, the case and the Triton. No two rows of evidence have the same."""
    return text_of(row.get("gpu")) or "unknown GPU", text_of(row.get("case")), release(text_of(row.get("triton")))


def understand(row: Row, goals: Goals, stale: Collection[Key]) -> Result:
    """What a row says, beside its goal. `stale` has the keys of rows that are."""
    gpu, case, _ = key_of(row)
    us, floor = positive(row.get("us")), positive(row.get("floor_us"))
    fraction = positive(row.get("fraction")) or ratio_of(floor, us)
    rivals = rivals_of(row)
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
        absent={text_of(name): text_of(why) for name, why in mapping_of(row.get("absent")).items()},
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
        stale=key_of(row) in stale,
        runs=mapping_of(row.get("runs")),
    )


# --------------------------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True)
class Standing:
    """A goal on one GPU. `value` is None until every shape that the goal is stated for was measured, with a Triton that it is
    for and beside the rival that it names; of a partial mean beside that rival wherever it can be had."""

    goal: Goal
    own: tuple[Result, ...]  # at the shapes that it is stated for
    others: tuple[Result, ...]  # at the other shapes of its family, each held to its own, lower goal
    known: bool  # whether there are cases for it at all
    value: float | None
    newest: bool = False  # whether it is for a Triton newer than BASE

    @property
    def absent(self) -> str:
        """Why the rival that the goal names has no time, where it has none."""
        name = rival_of(self.goal.metric) or ""
        return next((r.absent[name] for r in self.own if name in r.absent), "")

    @property
    def verdict(self) -> str:
        if self.value is None and self.known:
            waits = f"waits for a Triton newer than {BASE}" if self.newest and not self.own else "not measured"
            return "rival absent" if self.absent else waits
        if self.value is None:
            return "no case yet"
        return "reached" if self.value >= self.goal.goal else "short"


def by_case(results: Sequence[Result], cases: Collection[Case]) -> dict[str, Result]:
    """Of results of one GPU that of each case: the row of Triton BASE, or that of the newest, where the case is for a newer one or
    there is no other."""
    here: dict[str, Result] = {}
    of = {case.name: case for case in cases}
    for result in sorted(results, key=lambda one: age(one.triton)):
        case = of.get(result.case)
        if case is not None and is_for(case, result.triton):
            if case.triton is None and case.name in here and release(here[case.name].triton) == BASE:
                continue
            here[case.name] = result
    return here


def standings(results: Sequence[Result], goals: Iterable[Goal], cases: Collection[Case]) -> list[Standing]:
    """How every goal stands, by the results of one GPU."""
    here = by_case(results, cases)
    found = []
    for goal in goals:
        family = [case for case in cases if case.family == goal.case]
        stated = [case for case in family if case.own or case.mean]
        own = tuple(here[case.name] for case in stated if case.name in here)
        others = tuple(here[case.name] for case in family if case not in stated and case.name in here)
        values = [value for result in own if (value := result.by(goal.metric))]
        partial = {case.name for case in stated if case.partial}
        without = [r for r in own if r.case in partial and (rival_of(goal.metric) or "") in r.absent]
        whole = bool(values) and len(values) + len(without) == len(stated)
        value = math.exp(sum(map(math.log, values)) / len(values)) if whole else None
        newest = any(case.triton is not None for case in family)
        found.append(Standing(goal, own, others, bool(family), value, newest))
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
    """The value of `fraction`, `vs:RIVAL` or `memory:RIVAL`; None where it cannot be told."""
    kind, _, name = metric.partition(":")
    if kind == "fraction":
        return fraction
    found = next((rival for rival in rivals if rival.name == name), None)
    return None if found is None else found.memory if kind == "memory" else found.ratio
