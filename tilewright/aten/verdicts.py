"""Where our kernels are known to be no slower than aten's, by measurements: what `mode="auto"` goes by.

`data/aten_<arch>.jsonl`, and a file of that name in the user's cache folder, hold a row for each measured kind of call: overload,
dtypes, layout and bytes (`signature.py`), and of either way of calling, eager and in a graph, microseconds of ours and of aten and
the least that the quotient of the two is with confidence. Other rows say what a call costs that is declined. `tilewright bench
aten --record` measures them. They count on the very GPU that they are of and with this version of the library; with another
release of torch or Triton only as far as ours won by far, and only until the same is measured with the release that is here.

Of a kind of call ours are taken from the size on from which no measurement is slower, and one is a win. An overload is *closed* if
that is every size of every kind that was measured, contiguous operands and slow ones among them, *sized* if it is some, else
*never*. A call that is declined takes longer than one of an overload that is not replaced. So what is closed takes every call that
its row does, whether or not that very kind was measured, and what is only sized pays for programs alone whose calls are known.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .. import __version__
from ..core.target import INTERPRETING, Target
from ..core.triton_versions import release
from ..runtime.config import LONGEST, SHIPPED, distrusted, folder
from .row import Declined
from .signature import Signature

Row = dict[str, Any]
EVEN, WIN, FAR = 1.0, 1.05, 1.3  # aten's time over ours: no slower, a win, and one that outlives a release
SMALL = 64 << 10  # bytes, up to which a call takes as long as its launch: what holds there holds below
SIZES = 3  # of every kind of call, that were measured of an overload which is closed
MARGIN = 1.05  # by which gains must exceed what falling back costs
FLOATS = {"bfloat16", "float32"}  # of which neither is taken for the other
# Those of FLOATS that an overload takes, where it does not take both
ONLY = {"_flash_attention_forward": {"bfloat16"}, "polar": {"float32"}}
CPU = "cpu"  # in the place of a chip where there is none
# Words of a layout that make a call slow: most have none of them, and an overload that is closed was measured with and without
SLOW = ("turned", "strided", "dim first", "dim middle")
WAYS = ("eager", "graph")
KIND = {"overload": str, "dtype": str, "layout": str, "bytes": int}
PLACE = {"gpu": str, "torch": str, "triton": str, "version": str, "date": str}
CELL = {*KIND, *WAYS, *PLACE, "source"}
FALLBACK = {*PLACE, "call", "own", "aten"}
MEASURE = "`tilewright bench aten --record` measures it, which takes minutes"


# ---- rows ------------------------------------------------------------------------------------------------------------


def path_of(arch: str) -> Path:
    return SHIPPED / f"aten_{arch}.jsonl"


@cache
def table(arch: str) -> tuple[Row, ...]:
    """The well-formed rows of a chip: those of the user in the place of shipped ones."""
    return tuple(merged([*read(path_of(arch)), *read(folder() / path_of(arch).name)]))


def read(path: Path) -> list[Row]:
    """The well-formed rows of a file; anything else in it costs a warning and nothing more."""
    try:
        why = distrusted(path)
        with path.open("rb") as file:
            lines = file.read(LONGEST).decode(errors="replace").splitlines() if why is None else []
    except OSError:
        return []
    if why is not None:
        warnings.warn(f"{path} ignored: {why}", stacklevel=2)
    found = [row for row in map(row_of, lines) if row is not None]
    if len(found) < len(lines):
        warnings.warn(f"{path}: {len(lines) - len(found)} damaged row(s) ignored", stacklevel=2)
    return found


def row_of(line: str) -> Row | None:
    """A line's row, None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and problem(row) is None else None


def problem(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row, or None."""
    if row.keys() not in (CELL, FALLBACK):
        return "has other fields"
    words = {**PLACE, **(KIND if "overload" in row else {"call": str})}
    for name, kind in words.items():
        if type(row[name]) is not kind:
            return f"has {name} = {row[name]!r}"
    if "overload" not in row:
        return None if all(map(is_time, (row["own"], row["aten"]))) else "has no times"
    if row["bytes"] < 0 or type(row["source"]) is not str:
        return "has no bytes, or no source"
    for way in WAYS:
        times = row[way]
        if times is None and way == "graph":  # a call that reads a size cannot be in one
            continue
        if (
            not isinstance(times, dict)
            or times.keys() != {"own", "aten", "least"}
            or not all(map(is_time, times.values()))
        ):
            return f"has {way} = {times!r}"
        if times["least"] > times["aten"] / times["own"] * 1.001:
            return f"has more confidence than its {way} times give"
    return None


def is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def subject(row: Mapping[str, Any]) -> tuple:
    """What a row measures: a kind of call, or one that is declined."""
    return tuple(row[name] for name in (KIND if "overload" in row else ("call",)))


def releases(row: Mapping[str, Any]) -> tuple[str, str]:
    return release(row["torch"]), release(row["triton"])


def key_of(row: Mapping[str, Any]) -> tuple:
    """Of rows with one key the last counts, whatever the kernels were that it is of."""
    return row["gpu"], *releases(row), *subject(row)


def merged(rows: Iterable[Row]) -> list[Row]:
    found: dict[tuple, Row] = {}
    for row in rows:
        found.pop(key_of(row), None)
        found[key_of(row)] = row
    return list(found.values())


def text_of(rows: Iterable[Row]) -> str:
    """A file of rows, sorted."""
    rows = list(rows)
    for row in rows:
        wrong = problem(row)
        if wrong is not None:
            raise ValueError(f"a row {wrong}: {json.dumps(row)}")
    ordered = sorted(merged(rows), key=lambda row: tuple(map(str, key_of(row))))
    return "".join(f"{json.dumps(row)}\n" for row in ordered)


# ---- what they say ---------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where calls are made."""

    arch: str
    gpu: str
    torch: str = release(torch.__version__)
    triton: str = release(triton.__version__)

    @property
    def releases(self) -> tuple[str, str]:
        return self.torch, self.triton

    @staticmethod
    def here() -> Place:
        if INTERPRETING or not torch.cuda.is_available():
            return Place(CPU, "interpreter" if INTERPRETING else CPU)
        return Place(Target.of(torch.cuda.current_device()).arch, torch.cuda.get_device_name())


class Rule(NamedTuple):
    """Of one kind of call: the bytes from which ours are taken, and of each measured size what a call gains, in microseconds."""

    least: int
    gains: tuple[tuple[int, float], ...]

    def gain(self, nbytes: int) -> float:
        """That of the next smaller size that was measured, which larger calls have too."""
        below = [us for size, us in self.gains if size <= nbytes]
        return below[-1] if below else self.gains[0][1]


def sure(row: Mapping[str, Any], place: Place) -> float:
    """How many times as fast as aten's ours is at the least, by a row; 0 where it does not count."""
    least = min(row[way]["least"] for way in WAYS if row[way] is not None)
    return least if releases(row) == place.releases or least >= FAR else 0.0


def rule_of(rows: Iterable[Mapping[str, Any]], place: Place) -> Rule | None:
    """The rule that rows of one kind of call make; None if ours are never to be taken."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(row["bytes"], []).append((sure(row, place), row["eager"]["aten"] - row["eager"]["own"]))
    cells = {size: tuple(map(min, zip(*one))) for size, one in sorted(found.items())}
    taken: list[int] = []
    for size in reversed(cells):
        if cells[size][0] < EVEN:
            break
        taken.insert(0, size)
    if not any(cells[size][0] >= WIN for size in taken):
        return None
    anyway = taken == list(cells) and taken[0] <= SMALL
    return Rule(0 if anyway else taken[0], tuple((size, cells[size][1]) for size in taken))


def are_whole(name: str, kinds: Collection[tuple[str, str]]) -> bool:
    """Whether measured kinds of call of an overload, by dtypes and layout, stand for those that were not: of contiguous operands
    and of slow ones, each in all of FLOATS that it takes, or in none."""
    slow = {kind: any(word in kind[1] for word in SLOW) for kind in kinds}
    dtypes = [
        {word for (dtype, _), is_so in slow.items() if is_so == side for word in dtype.split("+")}
        for side in (True, False)
    ]
    floats = set.union(*dtypes) & FLOATS
    return all(found and (not floats or found >= ONLY.get(name, FLOATS)) for found in dtypes)


class Verdicts:
    """What rows say of calls in one place: those of its releases in the place of others about the same."""

    def __init__(self, place: Place, rows: Iterable[Row]) -> None:
        self.place = place
        every = [row for row in rows if row["gpu"] == place.gpu and row["version"] == __version__]
        own = {subject(row) for row in every if releases(row) == place.releases}
        every = [row for row in every if releases(row) == place.releases or subject(row) not in own]
        self.rows = [row for row in every if "overload" in row]
        self.fallbacks = [row for row in every if "overload" not in row]

    @staticmethod
    def here() -> Verdicts:
        place = Place.here()
        return Verdicts(place, table(place.arch))

    @cached_property
    def rules(self) -> dict[str, dict[tuple[str, str], Rule | None]]:
        """By overload, of each kind of call that was measured."""
        kinds: dict[str, dict[tuple[str, str], list[Row]]] = {}
        for row in self.rows:
            kinds.setdefault(row["overload"], {}).setdefault((row["dtype"], row["layout"]), []).append(row)
        return {
            name: {kind: rule_of(rows, self.place) for kind, rows in own.items()} for name, own in kinds.items()
        }  # fmt: skip

    @cached_property
    def fallback_us(self) -> float | None:
        """What a call costs more that is declined: the most that was measured; None where nothing was."""
        return max((max(0.0, row["own"] - row["aten"]) for row in self.fallbacks), default=None)

    def verdict(self, name: str) -> str:
        """`closed`, `sized` or `never`, of an overload."""
        kinds = self.rules.get(name, {})
        if not any(kinds.values()):
            return "never"
        open_ = [kind for kind, rule in kinds.items() if rule is None or rule.least or len(rule.gains) < SIZES]
        return "closed" if not open_ and are_whole(name, kinds) else "sized"

    def least(self, name: str) -> int:
        """Bytes below which no call of an overload is ours, of whatever kind."""
        return min((rule.least for rule in self.rules.get(name, {}).values() if rule is not None), default=0)

    @cached_property
    def closed(self) -> frozenset[str]:
        """The overloads of which every call is ours that can be."""
        return frozenset(name for name in self.rules if self.verdict(name) == "closed")

    def gain(self, call: Signature) -> float:
        """Microseconds that a call gains by being ours, as far as that is known. Raises `Declined` where it is to be aten's."""
        kinds = self.rules.get(call.overload, {})
        about = f"{call.dtype}, {call.layout}"
        if (call.dtype, call.layout) not in kinds:
            if call.overload in self.closed:
                return 0.0
            raise Declined(f"nothing is measured of {about}")
        rule = kinds[call.dtype, call.layout]
        if rule is None:
            raise Declined(f"aten is as fast at {about}")
        if call.bytes < rule.least:
            raise Declined(f"aten is as fast at {about} below {rule.least} bytes")
        return rule.gain(call.bytes)

    def foreign(self, name: str) -> str | None:
        """With which other releases rows of an overload were measured, in words."""
        others = {f"torch {release(row['torch'])} and Triton {release(row['triton'])}" for row in self.rows
                  if row["overload"] == name} - {f"torch {self.place.torch} and Triton {self.place.triton}"}  # fmt: skip
        return f"measured with {', '.join(sorted(others))}" if others else None

    def pays(self, name: str, calls: Mapping[Signature, int]) -> bool:
        """Whether calls of an overload gain more than those of them that are declined lose."""
        gained = lost = 0.0
        for call, count in calls.items():
            try:
                gained += count * self.gain(call)
            except Declined:
                if self.fallback_us is None:
                    return False
                lost += count * self.fallback_us
        return gained > MARGIN * lost

    def chosen(self, observed: Mapping[Signature, int] | None = None) -> frozenset[str]:
        """The overloads to replace: those that are closed; and, of a program whose calls are known, of those that it calls the ones
        that pay."""
        by_name: dict[str, dict[Signature, int]] = {}
        for call, count in (observed or {}).items():
            by_name.setdefault(call.overload, {})[call] = count
        return self.closed | {name for name in self.rules.keys() & by_name.keys() if self.pays(name, by_name[name])}

    def silence(self, asked: Collection[str], observed: bool = False) -> str:
        """Why none of some overloads is replaced, and what mends it."""
        if not self.rows and self.place.arch == CPU:
            return f"nothing is measured in the interpreter, whose times tell nothing; on a GPU {MEASURE}"
        if not self.rows:
            return f"nothing is measured on {self.place.gpu}: {MEASURE}"
        count, gpu = len(self.rules.keys() & asked), self.place.gpu
        why = "pays for the calls that were observed" if observed else "is closed: see `tw.aten.observe`"
        return f"of {count} overloads that are asked for and measured on {gpu} none {why}"
