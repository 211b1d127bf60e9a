"""What rows of torch's operators are held to together, beside the goals: so many of them, of all that there are cases for.

None of a mean's calls under a least, a share of calls ahead of another library's, no step of a model that a run was slower in. The
results page and `tilewright bench --against goals` say how these stand, by the rows of one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .cases import Case, rival_of
from .results import Result, by_case

OP = "aten"
AHEAD, SHARE = "flaggems", 0.95  # whose calls ours are to be ahead of, and in how many
STEADY = 0.97  # of the other's speed: one and the same program, timed in turn with itself, is as far apart


class Tally(NamedTuple):
    """How many cases are as they should be; `told` has None for those that were not measured."""

    name: str
    words: str
    wanted: float  # the share of them
    told: list[bool | None]

    @property
    def measured(self) -> list[bool]:
        return [one for one in self.told if one is not None]

    @property
    def verdict(self) -> str:
        if sum(self.measured) < self.wanted * len(self.measured):
            return "short"
        return "not measured" if None in self.told else "reached"

    def __str__(self) -> str:
        if not self.measured:
            return f"{self.words}: none of {len(self.told)} is measured."
        mark = " (short)" if self.verdict == "short" else ""
        left = f"; {self.told.count(None)} more are not measured" if None in self.told else ""
        return f"{self.words}: {sum(self.measured)} of {len(self.measured)}{mark}, {self.wanted:.0%} are to be{left}."


def tallies(results: Sequence[Result], cases: Collection[Case]) -> Iterator[Tally]:
    """By the results of one GPU."""
    here = by_case(results, cases)
    replaced = [case for case in cases if case.op == OP]
    held: dict[tuple[str, str, float], list[bool | None]] = {}
    for case in replaced:
        if case.mean and case.goal is not None:
            told = held.setdefault((case.family, case.metric, case.goal), [])
            value = here[case.name].by(case.metric) if case.name in here else None
            told.append(None if value is None else value >= case.goal)
    for (family, metric, least), told in held.items():
        yield Tally(f"{family}_least", f"Calls of `{family}` at {least} {metric} or more", 1.0, told)
    beside = [here.get(case.name) for case in replaced if rival_of(case.metric) == AHEAD]
    told = [None if r is None else is_ahead(r) for r in beside if r is None or AHEAD not in r.absent]
    if beside:
        yield Tally(f"{OP}_ahead", f"Calls of torch's operators ahead of {AHEAD}, of those that it makes", SHARE, told)
    steps = [here.get(case.name) for case in replaced if case.direction == "model" and case.options["mode"] == "auto"]
    if steps:
        told = [None if r is None or not r.runs.get("steps") else not slower(r.runs["steps"]) for r in steps]
        yield Tally(f"{OP}_no_slower", 'Steps of whole models in mode "auto" that no run was slower in', 1.0, told)


def is_ahead(r: Result) -> bool | None:
    return next((rival.ratio > 1.0 for rival in r.rivals if rival.name == AHEAD), None)


def slower(pairs: Iterable[Sequence[float]]) -> int:
    """In how many runs of (ours, another) ours was the slower, by more than runs of one program are apart."""
    return sum(other / own < STEADY for own, other in pairs)
