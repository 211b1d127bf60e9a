"""The table of `gemm/preference.py` is made here from the evidence, of every recorded product that our kernels and cuBLASLt made
in one run. So is the table of `attention/preference.py`, of every recorded call of attention that a chip's own kernels and the
portable ones made in one run, and cuDNN perhaps; and how near what `backend="auto"` takes by these tables comes to the fastest.

`tilewright docs` writes `data/preference_<arch>.jsonl` and `data/attention_<arch>.jsonl` anew for each chip that there is evidence
of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import tilewright as tw

from ..attention import library as attending
from ..attention import preference as attended
from ..attention.hopper import coded
from ..attention.hopper.backward import fits_backward
from ..attention.hopper.forward import fits
from ..check.variants import Blank
from ..core.target import Target
from ..core.triton_versions import offered_gluon, release
from ..gemm import library, preference
from . import evidence
from .cases import CASES, CODED, Case
from .results import understand
from .work import arguments

NAMES = {"scaled_mm": library.pair_of, "matmul": library.pair_of_matmul}
CACHED = "cached_attention"
ATTENTION = ("attention", "attention_lse", CACHED)
ATTENTION_FITS = {"forward": fits, "backward": fits_backward}
LEAST = 0.97  # of the fastest's speed, which `auto` has to reach in every recorded product and call of attention
WITH_LSE = "cudnn_lse"  # the rival that is our own call with cuDNN's forward


class Both(NamedTuple):
    """A recorded product of ours and of the library: its row, its name in the table, M, N and K, microseconds by backend."""

    row: Mapping[str, Any]
    pair: str
    sizes: tuple[int, int, int]
    times: dict[str, float]

    @property
    def auto(self) -> float:
        """The speed of what `auto` takes over that of the faster."""
        with_triton = release(self.row["triton"])
        taken = preference.decide(evidence.target_of(self.row), self.pair, *self.sizes, with_triton).best
        return min(self.times.values()) / self.times[taken]


def pair_of(case: Case) -> str | None:
    """The name under which `preference.py` knows a case's operands; None if the case does not say which of two is faster."""
    if not case.ours or case.direction != "forward" or case.op not in NAMES:
        return None
    source = Blank(tw.catalogue()[case.op], case.dims, case.options, dtype=getattr(torch, case.dtype))
    return NAMES[case.op](SimpleNamespace(**arguments(case, source)))


def measured(recorded: Iterable[Mapping[str, Any]], cases: Mapping[str, Case] = CASES) -> Iterator[Both]:
    """The rows that tell which of two is faster."""
    for row in recorded:
        case = cases.get(row["case"])
        theirs = row["rivals"].get(preference.LIBRARY, row["rivals"].get("cublas"))
        pair = pair_of(case) if case is not None and theirs is not None else None
        if pair is not None:
            sizes = tuple(row["dims"][name] for name in ("tokens", "columns", "hidden"))
            yield Both(row, pair, sizes, {preference.OWN: row["us"], preference.LIBRARY: theirs})


def rows_of(
    recorded: Iterable[Mapping[str, Any]], arch: str, cases: Mapping[str, Case] = CASES
) -> list[dict[str, Any]]:
    """Rows of the table for a chip."""
    return [
        preference.made(one.row["op"], one.pair, one.sizes, one.times, one.row["date"][:10], one.row["triton"])
        for one in measured(recorded, cases)
        if one.row["arch"] == arch and offered_gluon(one.row["triton"])  # the table is of our kernels as they are meant
    ]


def tables(recorded: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What the table of each chip that there is evidence of should hold, by the name of its file."""
    recorded = list(recorded)
    found = {}
    for arch in sorted({row["arch"] for row in recorded}):
        for of, rows in ((preference, rows_of(recorded, arch)), (attended, attention_rows(recorded, arch))):
            if rows:
                found[of.path_of(arch).name] = of.text_of(rows)
    return found


class Attended(NamedTuple):
    """A recorded call of attention by several backends: its row, direction and arguments, microseconds by backend."""

    row: Mapping[str, Any]
    direction: str
    given: SimpleNamespace
    times: dict[str, float]

    @property
    def auto(self) -> float:
        """The speed of what `auto` takes over that of the fastest."""
        target, with_triton = evidence.target_of(self.row), release(self.row["triton"])
        if self.row["op"] == CACHED:
            taken = next(one.name for one in tw.catalogue()[CACHED].implementations if takes(one, target, self.given))
        else:
            taken = attended.decide(target, self.direction, self.given, with_triton).best
        return min(self.times.values()) / self.times[taken]


def attention_rows(
    recorded: Iterable[Mapping[str, Any]], arch: str, cases: Mapping[str, Case] = CASES
) -> list[dict[str, Any]]:
    """Rows of the table of attention for a chip."""
    return [
        attended.made(one.direction, one.given, one.times, one.row["date"][:10], one.row["triton"])
        for one in attention_measured(recorded, cases)
        if one.row["arch"] == arch
    ]


def attention_measured(recorded: Iterable[Mapping[str, Any]], cases: Mapping[str, Case] = CASES) -> Iterator[Attended]:
    """The rows that tell which of several is the fastest: a case names the chip's kernels, and the portable ones are its rival, and
    cuDNN where it takes such a forward, and over caches others of the chip's own. Every recorded row was right. A backward that the
    chip's kernels leave to the portable ones tells nothing."""
    for row in recorded:
        case, theirs = cases.get(row["case"]), row["rivals"].get(attended.PORTABLE)
        asked = None if case is None or case.op not in ATTENTION else case.arguments.get("backend")
        if theirs is None or asked is None or case.direction not in ATTENTION_FITS:
            continue
        op = tw.catalogue()[case.op]
        drawn = arguments(case, Blank(op, case.dims, case.options, dtype=getattr(torch, case.dtype)))
        given, target = SimpleNamespace(**drawn), evidence.target_of(row)
        taken = partial(takes_by_name, asked) if case.op == CACHED else ATTENTION_FITS[case.direction]
        if case.way in CODED:
            given, taken = of_codes(given, case.way), coded.fits
        if target is not None and taken(target, given):
            times = (
                {asked: row["us"], attended.PORTABLE: theirs}
                | by_library(row, case, given)
                | by_others(row, case, given)
            )
            yield Attended(row, case.direction, given, times)


def by_library(row: Mapping[str, Any], case: Case, given: SimpleNamespace) -> dict[str, float]:
    """cuDNN's time of a recorded forward, if it takes such calls as they are: by our own call, which has lse too, or else by
    torch's, which had none to write."""
    if case.op == CACHED or case.way in CODED or case.direction != "forward" or attending.refusal(given):
        return {}
    found = row["rivals"].get(WITH_LSE, row["rivals"].get(attended.LIBRARY))
    return {} if found is None else {attended.LIBRARY: found}


def takes(one: Any, target: Target, a: SimpleNamespace, backend: str = "auto") -> bool:
    """Whether an implementation takes a call over caches that asks for a backend."""
    return one.takes(target, SimpleNamespace(**{**vars(a), "backend": backend}))


def takes_by_name(backend: str, target: Target, a: SimpleNamespace) -> bool:
    """Whether a backend takes a call over caches that asks for it."""
    named = (one for one in tw.catalogue()[CACHED].implementations if one.name == backend)
    return any(takes(one, target, a, backend) for one in named)


def by_others(row: Mapping[str, Any], case: Case, given: SimpleNamespace) -> dict[str, float]:
    """Times of a recorded call over caches by further kernels of its chip, which were rivals of the one that the case names."""
    if case.op != CACHED:
        return {}
    target = evidence.target_of(row)
    named = {one.name for one in tw.catalogue()[case.op].implementations}
    return {name: us for name, us in row["rivals"].items() if name in named and takes_by_name(name, target, given)}


def of_codes(a: SimpleNamespace, way: str) -> SimpleNamespace:
    """A call of attention as the kernels of codes get it: its keys are codes with scales, and its values perhaps."""
    kind = torch.int8 if way.startswith("int8") else torch.float8_e4m3fn
    given = {**vars(a), "k_mean": None, "v_scale": None}
    for name in ("k", "v") if way.endswith("_pv") else ("k",):
        t = given[name]
        given |= {
            name: t.new_empty(t.shape, dtype=kind),
            f"{name}_scale": t.new_empty(t.shape[:-1], dtype=torch.float32),
        }
    return SimpleNamespace(**given)


def forget() -> None:
    """Read the tables anew when they are next asked."""
    for of in (preference, attended):
        of.table.cache_clear()
        of.nearest.cache_clear()


def auto_line(found: Iterable[Both]) -> str | None:
    """What `auto` reaches over recorded products, in a sentence; None where there are none."""
    ratios = {understand(one.row, {}, ()).label: one.auto for one in found}
    if not ratios:
        return None
    return f'`backend="auto"` in {len(ratios)} products that both our kernels and cuBLASLt made in one run: {reached(ratios)}'


def attention_line(found: Iterable[Attended]) -> str | None:
    """The same of recorded forwards of attention that cuDNN made too."""
    with_library = [one for one in found if attended.LIBRARY in one.times]
    ratios = {understand(one.row, {}, ()).label: one.auto for one in with_library}
    if not ratios:
        return None
    return f'`backend="auto"` in {len(ratios)} forwards of attention that our kernels and cuDNN made in one run: {reached(ratios)}'


def reached(ratios: Mapping[str, float]) -> str:
    mean, worst = math.exp(sum(map(math.log, ratios.values())) / len(ratios)), min(ratios, key=ratios.get)
    return f"{mean:.3f} of the faster's speed in the geometric mean, {ratios[worst]:.3f} at the least (`{worst}`)."
