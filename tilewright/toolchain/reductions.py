"""Which reductions of a compiled kernel Triton before 3.7 lowers wrongly.

A tile's layout says which bits of a lane's number, and of a warp's, walk along which dimension. Those releases do not read the
bits along the reduced axis from the layout: they count them and guess where they are. The guess is right for every layout that
a load or a matrix product has. It can be wrong after a `tl.reshape` that joins two dimensions, for the joined one may then own
bits on both sides of another's. The kernel compiles, runs and gives wrong numbers; only the layouts in its TTGIR tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from ..core.triton_versions import MISREADS_REDUCTIONS as AFFECTED

__all__ = ["AFFECTED", "Layout", "Reduction", "fault", "layout_of", "misread", "reductions"]

Bases = tuple[tuple[int, ...], ...]


class Layout(NamedTuple):
    """How far each bit of a lane's number and of a warp's moves along each dimension. A bit that moves along none is that of
    threads which hold the same elements."""

    lanes: Bases
    warps: Bases


class Reduction(NamedTuple):
    """A reduction of a kernel: the lines that it comes from, the innermost first, its axis, and what it reduces."""

    lines: str
    axis: int
    tile: str
    layout: Layout


def fault(layout: Layout, axis: int) -> str | None:
    """What Triton before 3.7 gets wrong when it reduces a tile of this layout along an axis; None if nothing.

    Within a warp it shuffles over as many neighbouring bits as walk along the axis, beginning with the first that does. So these
    bits must be neighbours: of lanes 0, 3 and 4 it would combine 0, 1 and 2.

    Where several warps share the axis, each stores its part. Who stores it, and in which place, follows from the numbers of lane
    and warp taken apart as if all bits of one dimension came first, then all of the next, in the order in which dimensions first
    appear, bits of equal threads left out. So the bits along the axis must be where that puts them, in lanes and in warps.
    """
    along = _along(layout.lanes, axis)
    if along and along != list(range(along[0], along[0] + len(along))):
        return f"lane bits {along} are no neighbours"
    if not _along(layout.warps, axis):
        return None
    for kind, bases in (("lane", layout.lanes), ("warp", layout.warps)):
        moving = [basis for basis in bases if any(basis)]
        dims = [next(d for d, step in enumerate(basis) if step) for basis in moving]
        grouped = sorted(dims, key=dims.index)
        if [d == axis for d in dims] != [d == axis for d in grouped]:
            return f"{kind} bits {_along(bases, axis)} are mixed with those of other dimensions"
    return None


def _along(bases: Bases, axis: int) -> list[int]:
    return [bit for bit, basis in enumerate(bases) if basis[axis]]


# ---------------------------------------------------------------- what TTGIR says


def misread(text: str) -> list[str]:
    """One sentence for each reduction in a kernel's TTGIR that Triton before 3.7 lowers wrongly."""
    found = ((one, fault(one.layout, one.axis)) for one in reductions(text))
    return [f"{one.lines} reduces axis {one.axis} of {one.tile}: {why}" for one, why in found if why]


def reductions(text: str) -> Iterator[Reduction]:
    """Every `tt.reduce` of a kernel's TTGIR; sums, extremes with or without index, and sorts are made of it."""
    named = dict(re.findall(r"^#(\w+) = (#ttg\..*)$", text, re.MULTILINE))
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    whole = (
        r'"tt\.reduce"\([^\n]*<\{axis = (\d+) : i32[^\n]*\n.*?^\s*\}\) : \(tensor<([^\n]*?)>[,)][^\n]*loc\(([^\n]*)\)$'
    )
    for axis, tensor, place in re.findall(whole, text, re.MULTILINE | re.DOTALL):
        sizes, encoding = re.match(r"((?:\d+x)+)[^,]*, (.*)", tensor).groups()
        shape = tuple(map(int, sizes.split("x")[:-1]))
        spelt = re.sub(r"#(\w+)(?![\w.])", lambda name: named.get(name[1], name[0]), encoding)
        own = [(file, line) for file, line in _frames(place, places) if "/triton/language/" not in file]
        lines = " from ".join(f"{PurePosixPath(file).name}:{line}" for file, line in own)
        yield Reduction(lines, int(axis), f"{list(shape)} in {spelt}", layout_of(spelt, shape))


def _frames(place: str, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Files and lines of a location, the innermost first."""
    for name, file, line in re.findall(r'(#loc\d*)|"([^"]*)":(\d+):\d+', place):
        if name:
            yield from _frames(places.get(name, ""), places)
        else:
            yield file, line


def layout_of(encoding: str, shape: Sequence[int]) -> Layout:
    """The layout of a tile whose encoding TTGIR spells so."""
    kind, body = re.match(r"#ttg\.(\w+)<\{(.*)\}>$", encoding).groups()
    if kind == "slice":
        dim, parent = re.match(r"dim = (\d+), parent = (.*)$", body).groups()
        outer = layout_of(parent, (*shape[: int(dim)], 1, *shape[int(dim) :]))
        return Layout(*(tuple((*b[: int(dim)], *b[int(dim) + 1 :]) for b in bases) for bases in outer))
    if kind == "linear":
        return Layout(*(_inside(_bases(body, name, len(shape)), shape) for name in ("lane", "warp")))
    if kind == "blocked":
        field = {name: _numbers(body, name) for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")}
        return _grouped(*field.values(), shape)
    if kind == "nvidia_mma":  # a tile's lanes are 8 rows by 4 columns, these first
        threads = (*[1] * (len(shape) - 2), 8, 4)
        tile = _numbers(body, "instrShape")[: len(shape)]
        own = tuple(max(1, size // count) for size, count in zip(tile, threads))
        return _grouped(own, threads, _numbers(body, "warpsPerCTA"), tuple(reversed(range(len(shape)))), shape)
    raise ValueError(f"a reduction has the layout {encoding}, which is not known here")


def _grouped(
    own: Sequence[int], lanes: Sequence[int], warps: Sequence[int], order: Sequence[int], shape: Sequence[int]
) -> Layout:
    """The layout in which a thread has `own` elements along each dimension, a warp so many lanes and a program so many warps, with
    dimensions in an order."""
    reach, out = list(own), []
    for counts in (lanes, warps):
        bases = []
        for dim in order:
            for _ in range(counts[dim].bit_length() - 1):
                bases.append(tuple(reach[dim] * (d == dim) for d in range(len(shape))))
                reach[dim] *= 2
        out.append(_inside(bases, shape))
    return Layout(*out)


def _inside(bases: Sequence[Sequence[int]], shape: Sequence[int]) -> Bases:
    """Steps beyond a tile's end do not move: those threads hold what others do."""
    return tuple(tuple(step if step < size else 0 for step, size in zip(basis, shape)) for basis in bases)


def _numbers(body: str, name: str) -> tuple[int, ...]:
    return tuple(map(int, re.search(rf"\b{name} = \[([\d, ]*)\]", body)[1].split(",")))


def _bases(body: str, name: str, rank: int) -> list[tuple[int, ...]]:
    listed = re.search(rf"\b{name} = \[((?:\[[\d, ]*\](?:, )?)*)\]", body)[1]
    steps = list(map(int, re.findall(r"\d+", listed)))
    return [tuple(steps[at : at + rank]) for at in range(0, len(steps), rank)]
