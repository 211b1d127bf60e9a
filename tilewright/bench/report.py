"""The evidence as one HTML page that needs no network: a roofline per chip, what falls short, what is stale, every row.

`page` is a pure function of its arguments. The rows are data, perhaps another's: whatever a row holds ends as escaped
text or as a finite number, and the page's own policy lets no script run but the page's.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

import jinja2
from markupsafe import Markup

from .results import Goals, Key, Result, Rival, Row, Standing, tally, understand

# One shape a rival, so that colour is never all that tells two apart; ours is a disc. Drawn around (0, 0).
SHAPES = (
    "M-4.2-4.2H4.2V4.2H-4.2Z",
    "M0-5.4 5.2 4H-5.2Z",
    "M0-6 5 0 0 6-5 0Z",
    "M0 5.4 5.2-4H-5.2Z",
    "M-1.6-5.2H1.6V-1.6H5.2V1.6H1.6V5.2H-1.6V1.6H-5.2V-1.6H-1.6Z",
    "M-2.6-5H2.6L5.4 0 2.6 5H-2.6L-5.4 0Z",
    "M-5.2-2.9-2.9-5.2 0-2.3 2.9-5.2 5.2-2.9 2.3 0 5.2 2.9 2.9 5.2 0 2.3-2.9 5.2-5.2 2.9-2.3 0Z",
)
DISC = "M-4.6 0A4.6 4.6 0 1 1 4.6 0 4.6 4.6 0 1 1-4.6 0Z"
RING = DISC + "M-2.1 0A2.1 2.1 0 1 0 2.1 0 2.1 2.1 0 1 0-2.1 0Z"  # the hole winds the other way
COLOURS = 6
WIDE, NARROW = 1080, 380  # pixels across a plot; each is drawn for both, so that its letters keep their size


# --------------------------------------------------------------------------------------------------------------- plots


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    path: str
    kind: str  # its classes: ours or the rival's colour, short, stale, lost
    title: str
    row: str


@dataclass(frozen=True)
class Lane:
    name: str
    y: float


@dataclass
class Plot:
    """What the template draws: everything in pixels of the viewBox."""

    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    one: float  # where 1 lies: on the upright axis of a roofline, on the level one of a comparison
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    goals: list[tuple[float, float]] = field(default_factory=list)
    stems: list[tuple[float, float, float]] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)


class LogScale:
    """Numbers between two bounds to pixels, in equal steps for equal factors."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = math.log10(low), math.log10(high) - math.log10(low)
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        return round(self._start + (math.log10(value) - self._low) / self._span * self._length, 1)

    def ticks(self, at_most: int, unit: str = "") -> list[Tick]:
        """1, 2, 5, 10 ... if they fit, else powers of ten, as many of them as fit."""
        first, last = math.floor(self._low), math.ceil(self._low + self._span)
        fine = [(mantissa, power) for power in range(first, last + 1) for mantissa in (1, 2, 5)]
        inside = [pair for pair in fine if self._inside(pair)]
        if len(inside) > at_most:
            coarse = [pair for pair in inside if pair[0] == 1]
            inside = coarse[:: math.ceil(len(coarse) / at_most)]
        numbers = [float(f"{mantissa}e{power}") for mantissa, power in inside]
        return [Tick(self(number), f"{unit}{number:g}") for number in numbers]

    def _inside(self, pair: tuple[int, int]) -> bool:
        log = math.log10(pair[0]) + pair[1]
        return self._low - 1e-9 <= log <= self._low + self._span + 1e-9 and -300 < log < 300


def rounded_step(span: float, at_most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most so many parts."""
    power = math.floor(math.log10(span / at_most))
    steps = (float(f"{mantissa}e{p}") for p in (power, power + 1) for mantissa in (1, 2, 5))
    return next(step for step in steps if span / step <= at_most + 1e-9)


def mark_of(result: Result) -> tuple[str, str]:
    """Path and classes of our mark: a ring falls short, a broken outline is stale."""
    short = result.verdict == "short"
    return RING if short else DISC, " ".join(["ours", *["short"] * short, *["stale"] * result.stale])


def describe(result: Result) -> str:
    words = [f"{result.case}: {show(result.us)} µs"]
    if result.fraction is not None:
        words.append(f"{result.fraction:.3f} of the floor")
    if result.goal is not None:
        words.append(f"goal {result.metric} {result.goal:g} {result.verdict}")
    if result.rate is not None:
        words.append(f"{result.rate:,.0f} GB/s")
    return ", ".join(words + ["stale"] * result.stale)


def describe_rival(result: Result, rival: Rival) -> str:
    return f"{result.case}: {rival.name} {show(rival.us)} µs, ours {show(result.us)} µs ({show(rival.ratio, 3)} times)"


def rival_mark(names: Sequence[str], name: str, lost: bool = False) -> tuple[str, str]:
    """Path and classes of a rival's mark; an outline is faster than ours."""
    index = names.index(name)
    return SHAPES[index % len(SHAPES)], f"c{index % COLOURS}" + " lost" * lost


def roofline(results: Sequence[Result], names: Sequence[str], width: int) -> Plot | None:
    """The floor's time across, the part of the floor's speed reached upwards: ours, the rivals, the goals."""
    drawn = [r for r in results if r.drawn]
    if not drawn:
        return None
    heights = [r.fraction for r in drawn] + [r.floor / rival.us for r in drawn for rival in r.rivals]
    heights += [r.goal for r in drawn if r.metric == "fraction"]
    low = max(0.0, math.floor(min(heights) * 10 - 0.5) / 10)
    low = low if low >= 0.4 else 0.0  # a plot that is nearly whole may as well begin at nothing
    step = rounded_step(max(max(heights) * 1.03, 1.1) - low, 8)
    high = low + step * math.ceil((max(max(heights) * 1.03, 1.1) - low) / step - 1e-9)
    plot = Plot(width, 480 if width > NARROW else 440, 46.0, width - 14.0, 14.0, 0.0, 0.0)
    plot.bottom = plot.height - 44.0

    def up(value: float) -> float:
        return round(plot.bottom - (value - low) / (high - low) * (plot.bottom - plot.top), 1)

    floors = [r.floor for r in drawn]
    across = LogScale(min(min(floors) / 1.3, max(floors) / 4), max(floors) * 1.3, plot.left, plot.right)
    plot.one = up(1.0)
    plot.x_ticks = across.ticks(12 if width > NARROW else 8)
    plot.y_ticks = [Tick(up(low + n * step), f"{low + n * step:.3g}") for n in range(round((high - low) / step) + 1)]
    for result in drawn:
        x, own = across(result.floor), up(result.fraction)
        if result.metric == "fraction":
            plot.goals.append((x, up(result.goal)))
        for rival in result.rivals:
            path, kind = rival_mark(names, rival.name, rival.ratio < 1.0)
            y = up(result.floor / rival.us)
            plot.marks.append(Mark(x, y, path, kind, describe_rival(result, rival), result.id))
            plot.stems.append((x, own, y))
    for result in drawn:  # after the rivals, so that ours lie on top
        path, kind = mark_of(result)
        mark = Mark(across(result.floor), up(result.fraction), path, kind, describe(result), result.id)
        plot.marks.append(mark)
    return plot


def comparison(results: Sequence[Result], names: Sequence[str], width: int) -> Plot | None:
    """A lane for each rival, a mark for each case: the rival's time over ours, so that a lost case lies left of 1."""
    ratios = [rival.ratio for r in results for rival in r.rivals]
    if not ratios:
        return None
    lane = 44
    plot = Plot(width, 30 + lane * len(names) + 40, 14.0, width - 14.0, 10.0, 0.0, 0.0)
    plot.bottom = plot.height - 40.0
    across = LogScale(min(min(ratios) / 1.2, 0.48), max(max(ratios) * 1.2, 2.1), plot.left, plot.right)
    plot.one = across(1.0)
    plot.x_ticks = across.ticks(12 if width > NARROW else 8, "×")
    plot.lanes = [Lane(name, plot.top + 36.0 + lane * index) for index, name in enumerate(names)]
    for result in results:
        for rival in result.rivals:
            path, kind = rival_mark(names, rival.name, rival.ratio < 1.0)
            y = plot.lanes[names.index(rival.name)].y
            plot.marks.append(Mark(across(rival.ratio), y, path, kind, describe_rival(result, rival), result.id))
    return plot


# --------------------------------------------------------------------------------------------------------------- chips


@dataclass(frozen=True)
class Chip:
    """The rows of one GPU, and what they come to."""

    gpu: str
    results: list[Result]
    names: list[str]  # of its rivals
    rooflines: list[tuple[str, Plot]]
    comparisons: list[tuple[str, Plot]]
    unrecorded: list[str]  # cases with a goal and without a row
    goals: list[Standing]

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Name, path and class of every rival in the roofline."""
        drawn = {rival.name for r in self.results if r.drawn for rival in r.rivals}
        return [(name, *rival_mark(self.names, name)) for name in self.names if name in drawn]

    @property
    def short(self) -> list[Result]:
        return sorted((r for r in self.results if r.verdict == "short"), key=lambda r: (r.measured / r.goal, r.case))

    @property
    def lost(self) -> list[Result]:
        return sorted((r for r in self.results if r.lost), key=lambda r: (r.best.ratio, r.case))

    @property
    def stale(self) -> list[Result]:
        return [r for r in self.results if r.stale]

    @property
    def unmeasured(self) -> list[Result]:
        return [r for r in self.results if r.verdict == "unmeasured"]

    @property
    def held(self) -> int:
        """How many rows a goal holds."""
        return sum(r.goal is not None for r in self.results)

    @property
    def verdicts(self) -> list[str]:
        """Of the goals that were measured."""
        return [one.verdict for one in self.goals if one.value is not None]

    @property
    def tally(self) -> str:
        return tally(self.goals)

    @property
    def compared(self) -> int:
        return sum(bool(r.rivals) for r in self.results)

    @property
    def without_floor(self) -> int:
        return sum(not r.drawn for r in self.results)

    @property
    def median(self) -> float | None:
        fractions = [r.fraction for r in self.results if r.fraction is not None]
        return statistics.median(fractions) if fractions else None

    def versions(self, of: str) -> str:
        return ", ".join(sorted({getattr(r, of) for r in self.results} - {""})) or "unknown"

    @property
    def dates(self) -> str:
        days = sorted({day(r.date) for r in self.results} - {""})
        return "unknown" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def chip_of(gpu: str, results: list[Result], goals: Goals, standings: list[Standing]) -> Chip:
    names = sorted({rival.name for r in results for rival in r.rivals})
    widths = (("wide", WIDE), ("narrow", NARROW))
    rooflines = [(word, plot) for word, width in widths if (plot := roofline(results, names, width))]
    comparisons = [(word, plot) for word, width in widths if (plot := comparison(results, names, width))]
    unrecorded = sorted(set(goals) - {r.case for r in results})
    return Chip(gpu, results, names, rooflines, comparisons, unrecorded, standings)


# ---------------------------------------------------------------------------------------------------------------- page


def show(value: float | None, digits: int = 4) -> str:
    """A number to so many digits, never in powers of ten where it is of a usual size."""
    if value is None:
        return "–"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}" if value < 1e12 else f"{value:.{digits}g}"
    return f"{value:#.{digits}g}"


def show_bytes(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def day(date: str) -> str:
    return date.partition("T")[0]


def digest(text: str) -> str:
    """The text's name in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(show=show, show_bytes=show_bytes, day=day, digest=digest)
    return environment.from_string(_source("report.html.j2"))


def page(
    rows: Sequence[Row],
    *,
    goals: Goals,
    stale: Iterable[Key],
    judge: Callable[[list[Result]], list[Standing]] = lambda results: [],
) -> str:
    """The whole page. `goals`: case -> metric (`fraction`, `vs:RIVAL`) and goal; `stale`: keys of stale rows; `judge`: how
    the project's goals stand by one GPU's results."""
    known = set(stale)
    found = [understand(row, goals, known) for row in rows]
    found.sort(key=lambda r: (r.gpu, r.op, r.case, r.date))
    results = [replace(result, id=f"r{index}") for index, result in enumerate(found)]
    gpus = sorted({result.gpu for result in results})
    of = {gpu: [r for r in results if r.gpu == gpu] for gpu in gpus}
    chips = [chip_of(gpu, of[gpu], goals, judge(of[gpu])) for gpu in gpus]
    # A column that no row fills is left out.
    columns = {
        name: any(getattr(r, name) is not None for r in results) for name in ("rate", "error", "host", "extra", "goal")
    }
    mixed = any(len({(r.torch, r.triton) for r in chip.results}) > 1 for chip in chips)
    columns.update(gpu=len(gpus) > 1, rivals=any(r.rivals or r.absent for r in results), versions=mixed)
    return _template().render(
        chips=chips,
        results=results,
        columns=columns,
        disc=DISC,
        ring=RING,
        style=Markup(_source("report.css")),
        script=Markup(_source("report.js")),
    )
