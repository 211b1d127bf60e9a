"""The pointwise engine: one function of numbers, over operands of any strides that broadcast.

Operands are brought to the fewest loops (`layout.py`). One loop of which every operand has all elements in a row, or one for all,
is `flat`; anything else is `tiles`: the innermost loop along the columns of a tile, the next along its rows, where an operand may
be turned in shared memory, and up to two more outside. What is deeper is launched for each index of the outer loops.

Numbers reach a kernel as 64 bits, float64 or int64, so that they are exact and no part of a compiled variant.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.memory import overlapping, same_memory, self_overlapping, span
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import functions, layout, plans
from .layout import Ints
from .plans import bits_of, cast_bits, own
from .row import TAKEN, Declined, Row, compute_dtype, kind_of, taken, taken_as

MOST, LOOPS = 3, 4  # operands, and numbers; loops of a launch
MOST_LAUNCHES = 64  # for the outer loops of one call
SMALL = 1 << 16  # elements, below which a call takes as long as its launch
WORDS = 16  # elements, which are whole words of any dtype
BLOCK = 1024  # elements a program of a flat launch
SMALL_TILE = (32, 32)  # rows and columns of a tile, of a small call
TURN = (64, 64)  # of one of which an operand is turned: lines of the memory on both sides; half as far for 8 bytes
TURN_BYTES = (128, 128)  # of a copy of bytes: lines of the memory on both sides
# Integers that no variant is compiled for
NUMBERS = ("P0", "P1", "P2", "S0", "S1", "S2")
SIZES = ("N0", "N1", "N2", "N3")
STRIDES = tuple(f"{tensor}{i}" for tensor in "oabc" for i in range(LOOPS))
STARTS = tuple(f"{tensor}_start" for tensor in "oabc")
IN_TRITON = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64,
    torch.int8: tl.int8, torch.uint8: tl.uint8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.bool: tl.int1,
}  # fmt: skip


# ---- kernels ---------------------------------------------------------------------------------------------------------


def text_of(how: Iterable[Any]) -> str:
    """What Triton knows a constant by on disk: functions by their text. Of one in a tuple it would take the name alone, and find
    what an earlier text was compiled to."""
    return "-".join([getattr(value, "cache_key", str(value)) for value in how])


class How(NamedTuple):
    """What a kernel is compiled for, beside where operands lie: the function, how many operands and numbers it takes, the dtype
    that operands are promoted to and the one that is computed in; whether numbers in operands' places are promoted too."""

    FUNCTION: Any
    OPERANDS: int
    NUMBERS: int
    COMMON: Any
    COMPUTE: Any
    ROUNDED: bool

    @property
    def cache_key(self) -> str:
        return text_of(self)


@triton.jit
def number(bits, COMPUTE: tl.constexpr):
    """A number from its 64 bits."""
    if COMPUTE.is_int():
        return bits.to(tl.int64)
    else:
        return bits.to(tl.int64).to(tl.float64, bitcast=True).to(COMPUTE)


@triton.jit
def promoted_value(x, HOW: tl.constexpr):
    """A loaded value, promoted, in the compute dtype: a bool is 0 or 1."""
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    if tl.int1 == HOW.COMMON:
        x = (x != 0).to(tl.int32)
    else:
        x = x.to(HOW.COMMON)
    return x.to(HOW.COMPUTE)


@triton.jit
def operand_number(bits, HOW: tl.constexpr):
    """A number in an operand's place."""
    value = number(bits, HOW.COMPUTE)
    if HOW.ROUNDED:
        value = promoted_value(value, HOW)
    return value


@triton.jit
def applied(x, y, z, S0, S1, S2, HOW: tl.constexpr):
    """The function of the operands that there are and the numbers that it takes."""
    FUNCTION: tl.constexpr = HOW.FUNCTION
    if HOW.NUMBERS == 0:
        given = ()
    elif HOW.NUMBERS == 1:
        given = (number(S0, HOW.COMPUTE),)
    elif HOW.NUMBERS == 2:
        given = (number(S0, HOW.COMPUTE), number(S1, HOW.COMPUTE))
    else:
        given = (number(S0, HOW.COMPUTE), number(S1, HOW.COMPUTE), number(S2, HOW.COMPUTE))
    if HOW.OPERANDS == 0:
        return FUNCTION(*given)
    elif HOW.OPERANDS == 1:
        return FUNCTION(x, *given)
    elif HOW.OPERANDS == 2:
        return FUNCTION(x, y, *given)
    else:
        return FUNCTION(x, y, z, *given)


@triton.jit
def stored(value, P):
    """A computed value as a result of P's dtype holds it: integers wrap, and a bool is whether it is not 0."""
    if P.dtype.element_ty == tl.int1:
        return value != 0
    else:
        return value.to(P.dtype.element_ty)


@triton.jit
def whole_words(n, EVEN: tl.constexpr):
    """A number, in a form by which the compiler knows, if it is EVEN, that it counts whole words: it moves words then."""
    return n // 16 * 16 if EVEN else n


@triton.jit
def over(i, n, count):
    """(quotient by n, what is left over) of numbers below a count, in as many bits as that takes. Of 32, which do below 2**31, a
    division is some 20 instructions; of 64 it is a call of a routine of 70."""
    i = i.to(count.dtype)
    times = i // n
    return times, i - times * n


@triton.jit
def load_flat(X, bits, at, inside, ONE: tl.constexpr, HOW: tl.constexpr):
    if X is None:
        return operand_number(bits, HOW)
    elif ONE:
        return promoted_value(tl.load(X), HOW)
    else:
        return promoted_value(tl.load(X + at, inside, 0), HOW)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", *NUMBERS), default=lambda a: {"num_warps": 4})
def pointwise_flat(
    OUT, X0, X1, X2, N, P0: tl.int64, P1: tl.int64, P2: tl.int64, S0: tl.int64, S1: tl.int64, S2: tl.int64,
    HOW: tl.constexpr, ONES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """P: numbers in the places of operands that are None; S: the function's own. ONES: a bit for each operand of which there is
    one element for all. EVEN: N is whole words."""
    N = whole_words(N, EVEN)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    x = load_flat(X0, P0, at, inside, (ONES & 1) > 0, HOW)
    y = load_flat(X1, P1, at, inside, (ONES & 2) > 0, HOW)
    z = load_flat(X2, P2, at, inside, (ONES & 4) > 0, HOW)
    value = applied(x, y, z, S0, S1, S2, HOW)
    tl.store(OUT + at, tl.broadcast_to(stored(value, OUT), [BLOCK]), inside)


@triton.jit
def tile_at(N0, N1, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """(rows, columns, which of the outer tiles) of a program: N0 and N1 are the two innermost loops. WIDE: in int64, so that a
    product with any stride fits; else as wide as the sizes are, in which a division is faster."""
    across = tl.cdiv(N0, COLUMNS)
    down = tl.cdiv(N1, ROWS)
    tile = tl.program_id(0) // across
    row = (tile % down).to(tl.int64 if WIDE else N1.dtype) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % across).to(tl.int64 if WIDE else N0.dtype) * COLUMNS + tl.arange(0, COLUMNS)
    return row, col, tile // down


@triton.jit
def load_tile(
    X, bits, outer, row, col, inside_r, inside_c, stride_r, stride_c, UNIT: tl.constexpr, SAME: tl.constexpr,
    TURNED: tl.constexpr, EVEN: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """[rows, columns] of an operand. UNIT: columns lie side by side; SAME: there is one for all; TURNED: rows lie side by side, and
    the tile is read by columns."""
    outer = whole_words(outer, EVEN)
    if X is None:
        return operand_number(bits, HOW)
    elif SAME:
        return promoted_value(tl.load(X + outer + row[:, None] * stride_r, inside_r[:, None], 0), HOW)
    elif TURNED:
        at = outer + col[:, None] * whole_words(stride_c, EVEN) + row[None, :]
        return tl.trans(promoted_value(tl.load(X + at, inside_c[:, None] & inside_r[None, :], 0), HOW))
    else:
        stride_r = whole_words(stride_r, EVEN)
        at = outer + row[:, None] * stride_r + (col[None, :] if UNIT else col[None, :] * stride_c)
        return promoted_value(tl.load(X + at, inside_r[:, None] & inside_c[None, :], 0), HOW)


@kernel(
    grid=lambda a: (cdiv(a.N0, a.COLUMNS) * cdiv(a.N1, a.ROWS) * a.N2 * a.N3,),
    tokens=(*SIZES, *STRIDES, *STARTS, *NUMBERS), default=lambda a: {"num_warps": 8 if a.ROWS * a.COLUMNS > 1024 else 4},
)  # fmt: skip
def pointwise_tiles(
    OUT, X0, X1, X2, N0, N1, N2, N3, o0, o1, o2, o3, a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, o_start,
    a_start, b_start, c_start, P0: tl.int64, P1: tl.int64, P2: tl.int64, S0: tl.int64, S1: tl.int64, S2: tl.int64,
    HOW: tl.constexpr, UNITS: tl.constexpr, SAME: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loops N0, the innermost, to N3, with strides o of the result and a, b, c of operands, each from its start. UNITS, SAME,
    TURNED: a bit a tensor. EVEN: rows, and columns where tiles are turned, are whole words, and begin at them."""
    N0 = whole_words(N0, EVEN)
    N1 = whole_words(N1, EVEN and TURNED > 0)
    row, col, outer = tile_at(N0, N1, ROWS, COLUMNS, True)
    i2, i3 = (outer % N2).to(tl.int64), (outer // N2).to(tl.int64)
    r = row < N1
    c = col < N0
    x = load_tile(
        X0, P0, a_start + i2 * a2 + i3 * a3, row, col, r, c, a1, a0, (UNITS & 2) > 0, (SAME & 2) > 0,
        (TURNED & 2) > 0, EVEN and (SAME & 2) == 0, HOW,
    )  # fmt: skip
    y = load_tile(
        X1, P1, b_start + i2 * b2 + i3 * b3, row, col, r, c, b1, b0, (UNITS & 4) > 0, (SAME & 4) > 0,
        (TURNED & 4) > 0, EVEN and (SAME & 4) == 0, HOW,
    )  # fmt: skip
    z = load_tile(
        X2, P2, c_start + i2 * c2 + i3 * c3, row, col, r, c, c1, c0, (UNITS & 8) > 0, (SAME & 8) > 0,
        (TURNED & 8) > 0, EVEN and (SAME & 8) == 0, HOW,
    )  # fmt: skip
    value = applied(x, y, z, S0, S1, S2, HOW)
    start = whole_words(o_start + i2 * o2 + i3 * o3, EVEN)
    at = start + row[:, None] * whole_words(o1, EVEN) + (col[None, :] if (UNITS & 1) > 0 else col[None, :] * o0)
    tl.store(OUT + at, tl.broadcast_to(stored(value, OUT), [ROWS, COLUMNS]), r[:, None] & c[None, :])


@triton.jit
def swapped(one, other, BITS: tl.constexpr, MASK: tl.constexpr):
    """Words of which the high part of the first and the low part of the second have changed places, in each pair of parts of so
    many BITS; MASK: the low ones."""
    return (one & MASK) | ((other & MASK) << BITS), ((one >> BITS) & MASK) | (other & ~MASK)


@kernel(
    grid=lambda a: (cdiv(a.N0, a.COLUMNS) * cdiv(a.N1, a.ROWS) * a.N2 * a.N3,),
    tokens=(*SIZES, *STRIDES[: 2 * LOOPS], *STARTS[:2]), default=lambda a: {"num_warps": a.ROWS * a.COLUMNS // 2048},
)  # fmt: skip
def turn_bytes(
    OUT, X, N0, N1, N2, N3, o0, o1, o2, o3, a0, a1, a2, a3, o_start, a_start, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """A copy of bytes, of which columns of the result are rows of the operand: o0 and a1 are 1, and all other sizes, strides and
    starts, in which N0 to N3 are loops as in `pointwise_tiles`, whole words.

    Bytes one by one would be as many accesses of shared memory. So it is moved in words of four: those of four neighbouring columns
    are four rows of four bytes, which are turned within a thread, and what is turned in shared memory are words.
    """
    # Everything counts words of four bytes, 4 of which are moved at once
    N0 = N0 // 16 * 4
    N1 = N1 // 16 * 4
    row, col, outer = tile_at(N0, N1, ROWS // 4, COLUMNS // 4, True)
    i2, i3 = (outer % N2).to(tl.int64), (outer // N2).to(tl.int64)
    c = col < N0
    r = row < N1
    o1 = o1 // 16 * 4
    a0 = a0 // 16 * 4
    from_ = X.to(tl.pointer_type(tl.int32)) + (a_start + i2 * a2 + i3 * a3) // 16 * 4
    from_ += col[:, None] * (4 * a0) + row[None, :]
    inside = c[:, None] & r[None, :]
    w0 = tl.load(from_, inside, 0)
    w1 = tl.load(from_ + a0, inside, 0)
    w2 = tl.load(from_ + 2 * a0, inside, 0)
    w3 = tl.load(from_ + 3 * a0, inside, 0)
    w0, w1 = swapped(w0, w1, 8, 0x00FF00FF)
    w2, w3 = swapped(w2, w3, 8, 0x00FF00FF)
    w0, w2 = swapped(w0, w2, 16, 0x0000FFFF)
    w1, w3 = swapped(w1, w3, 16, 0x0000FFFF)
    to = OUT.to(tl.pointer_type(tl.int32)) + (o_start + i2 * o2 + i3 * o3) // 16 * 4
    to += row[:, None] * (4 * o1) + col[None, :]
    inside = r[:, None] & c[None, :]
    tl.store(to, tl.trans(w0), inside)
    tl.store(to + o1, tl.trans(w1), inside)
    tl.store(to + 2 * o1, tl.trans(w2), inside)
    tl.store(to + 3 * o1, tl.trans(w3), inside)


# ---- host ------------------------------------------------------------------------------------------------------------


class Promoted(NamedTuple):
    common: torch.dtype  # of operands
    result: torch.dtype


def promoted(row: Row, given: list[Any]) -> Promoted:
    """The dtypes of tensors and numbers in tensors' places."""
    common = given[0].dtype if len(given) == 1 or row.promotes == "keep" else common_dtype(given)
    if row.promotes in ("float", "float to bool") and kind_of(common) in ("bool", "integer"):
        plans.by_key_alone()
        common = torch.get_default_dtype()
    taken_as(common, row.dtypes)
    if row.promotes in ("bool", "float to bool"):
        return Promoted(common, torch.bool)
    return Promoted(common, given[0].dtype if row.promotes == "keep" else common)


def tier(value: Any) -> int:
    """Whose dtype counts: that of a tensor with dimensions first, of one without next, of a number last."""
    return 2 if not isinstance(value, Tensor) else 0 if value.dim() else 1


def common_dtype(given: list[Any]) -> torch.dtype:
    """torch's promotion, which `torch.result_type` has for two: a later tier counts only if it is of a higher kind."""
    for value in given:
        if isinstance(value, int):
            plans.int_bits(value)  # which declines what `torch.result_type` does not take
    if len(given) == 2:
        return torch.result_type(*given)
    found = None
    for which in range(3):
        own = [v for v in given if tier(v) == which]
        if not own:
            continue
        dtypes = [v.dtype if which < 2 else torch.result_type(torch.zeros((), dtype=torch.bool), v) for v in own]
        dtype = functools.reduce(torch.promote_types, dtypes)
        if found is None or KINDS.index(kind_of(dtype)) > KINDS.index(kind_of(found)):
            found = dtype
    return found


KINDS = ("bool", "integer", "float", "complex")


@functools.cache
def how_of(function: Any, operands: int, numbers: int, common: torch.dtype, rounded: bool) -> How:
    return How(function, operands, numbers, IN_TRITON[common], IN_TRITON[compute_dtype(common)], rounded)


def run(row: Row, values: dict[str, Any], out: Tensor | None) -> Tensor:
    """One call of a row; `out` is where the result is stored, if that is given."""
    function = row.function if row.choose is None else row.choose(values)
    names = [n for n in row.tensors if values[n] is not None]
    given = [values[n] for n in names]
    shown = [v for v in given if isinstance(v, Tensor)]
    every = shown if out is None else [*shown, out]
    taken(*every)
    common, result = promoted(row, given) if shown else Promoted(out.dtype, out.dtype)
    flat = is_flat(every)  # most calls, for which nothing is to be found out
    shape = tuple(every[0].shape) if flat else layout.broadcast([t.shape for t in (every if row.fills else shown)])
    if shape is None:
        raise Declined("shapes that do not broadcast")
    places = [0 if isinstance(v, Tensor) else bits_in(row, n, v, common) for n, v in zip(names, given)]
    numbers = [
        bits_in(row, n.name, n.default if values[n.name] is None else values[n.name], common) for n in row.numbers
    ]
    # aten casts a number in an operand's place to the promoted dtype: of integers it wraps around before anything is computed
    wraps = len(shown) < len(given) and not common.is_floating_point
    rounded = wraps or row.promotes in ("bool", "float to bool", "keep")
    how = how_of(function, len(given), len(numbers), common, rounded)
    if out is None:
        strides = layout.contiguous_strides(shape) if flat else strides_of(row, values, shape, shown)
        out = own(torch.empty_strided(shape, strides, dtype=result, device=shown[0].device))
    else:
        check_out(out, shape, out.dtype if row.fills else result, shown)
    if out.numel():
        operands = given if len(shown) == len(given) else [v if isinstance(v, Tensor) else None for v in given]
        launch(how, out, operands, [*padded(places), *padded(numbers)], flat)
    return out


def bits_in(row: Row, name: str, value: float, common: torch.dtype) -> int:
    """A number of a call as the int64 that a kernel takes."""
    if isinstance(value, complex):
        raise Declined("a complex number")
    return cast_bits(value, common) if name in row.cast else bits_of(value, compute_dtype(common))


def is_flat(tensors: list[Tensor]) -> bool:
    """Whether tensors of one shape lie alike, without a gap and without a doubt: the strides of a dimension of 1 tell nothing, nor
    do any where there are no elements."""
    shape = tensors[0].shape
    return 1 not in shape and 0 not in shape and all(t.is_contiguous() and t.shape == shape for t in tensors)


def strides_of(row: Row, values: dict[str, Any], shape: Ints, operands: list[Tensor]) -> Ints:
    """How a new result lies."""
    if row.allocates == "contiguous":
        return layout.contiguous_strides(shape)
    if row.allocates == "like":
        return torch.empty_like(operands[0], device="meta").stride()
    if row.allocates == "format" and operands[0].is_cuda:
        return torch.empty(shape, device="meta", memory_format=layout.lies(operands[0])).stride()
    numbers = [n for n in row.tensors if values[n] is not None and not isinstance(values[n], Tensor)]
    return layout.result_strides(shape, operands, any(n not in row.aside for n in numbers))


def padded(bits: list[int]) -> list[int]:
    return [*bits, *[0] * (MOST - len(bits))]


def check_out(out: Tensor, shape: Ints, dtype: torch.dtype, operands: list[Tensor]) -> None:
    """Leave to aten what it resizes, casts unusually, or refuses; and memory that is read and written in another order."""
    if tuple(out.shape) != shape:
        raise Declined("a result that is resized, or refused")
    if not torch.can_cast(dtype, out.dtype) or out.dtype not in TAKEN:
        raise Declined("a result that cannot hold it")
    if self_overlapping(out):
        raise Declined("a result that overlaps itself")
    if any(overlapping(out, t) and not same_memory(out, t) for t in operands):
        raise Declined("a result that overlaps an operand", lasting=False)


def launch(how: How, out: Tensor, operands: list[Tensor | None], bits: list[int], flat: bool) -> None:
    """Fill `out`; an operand that is None is one of the numbers in `bits`. `flat`: all that there is lies alike, without a gap.

    Of small tensors, whose time is the launch's, all that are not flat share one variant.
    """
    tensors = [out, *operands, *[None] * (MOST - len(operands))]
    count = out.numel()
    small, even = size_class(count)
    if flat and not (small and any(t is not None and t.data_ptr() % 16 for t in tensors)):
        plans.one_by_one(BLOCK)
        plans.launch(pointwise_flat, tensors, (count,), bits, how, ONES=0, EVEN=even, BLOCK=BLOCK)
        return
    shape = tuple(out.shape)
    nothing = (0,) * len(shape)
    sizes, strides = layout.loops(shape, [nothing if t is None else layout.expanded(t, shape) for t in tensors])
    if not small and len(sizes) == 1 and all(own[0] in (0, 1) for own in strides):
        ones = sum(1 << i for i, (t, own) in enumerate(zip(operands, strides[1:])) if t is not None and own[0] == 0)
        plans.launch(pointwise_flat, tensors, (count,), bits, how, ONES=ones, EVEN=even, BLOCK=BLOCK)
        return
    outer = sizes[LOOPS:]
    if math.prod(outer) > MOST_LAUNCHES:
        raise Declined("more loops than a launch takes")
    inner = [*sizes[:LOOPS], *[1] * (LOOPS - len(sizes))]
    steps = [[*own[:LOOPS], *[0] * (LOOPS - len(own))] for own in strides]
    tensors, shifts = zip(*[(None, 0) if t is None else aligned(t) if small else (t, 0) for t in tensors])
    units = same = turned = 0
    if not small:
        same = sum(1 << i for i, (t, own) in enumerate(zip(tensors, steps)) if t is not None and own[0] == 0)
        units = sum(1 << i for i, own in enumerate(steps) if own[0] == 1)
        turned = sum(1 << i for i, own in enumerate(steps) if i and own[0] not in (0, 1) and own[1] == 1)
    words = not small and in_words(inner, steps, strides, same, turned)
    rows, columns = SMALL_TILE if small else tile_of(inner[0])
    if turned:
        widest = max(t.element_size() for t in tensors if t is not None)
        rows, columns = TURN if widest <= 4 and min(inner[:2]) > SMALL_TILE[0] else SMALL_TILE
    of_bytes = words and turned == 2 and units & 1 and copies_bytes(how, out, operands)
    for index in itertools.product(*map(range, outer)):
        starts = [shift + sum(i * s for i, s in zip(index, own[LOOPS:])) for shift, own in zip(shifts, strides)]
        if of_bytes:
            rows, columns = TURN_BYTES
            sizes = (*inner, *steps[0], *steps[1], *starts[:2])
            plans.launch(turn_bytes, tensors[:2], sizes, ROWS=rows, COLUMNS=columns)
            continue
        plans.launch(
            pointwise_tiles, tensors, (*inner, *itertools.chain(*steps), *starts), bits, how, UNITS=units, SAME=same,
            TURNED=turned, EVEN=words, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip


def size_class(count: int) -> tuple[bool, bool]:
    """(whether so many elements are small, whether they are whole words)."""
    return count < SMALL, count % WORDS == 0


def aligned(t: Tensor) -> tuple[Tensor, int]:
    """(memory from a multiple of 16 bytes on to the end of a tensor, how many elements the tensor begins after it)."""
    (start, end), size = span(t), t.element_size()
    shift = start % 16 // size
    if not shift or shift > t.storage_offset():
        return t, 0
    return t.as_strided((shift + (end - start) // size,), (1,), t.storage_offset() - shift), shift


def in_words(sizes: list[int], steps: list[list[int]], strides: Sequence[Ints], same: int, turned: int) -> bool:
    """Whether all rows, and columns where tiles are turned, are whole words and begin at one, so that words are moved. Where there
    is one element for all columns it does not matter."""
    if sizes[0] % WORDS or (turned and sizes[1] % WORDS) or any(s % WORDS for own in strides for s in own[LOOPS:]):
        return False
    return all(
        step % WORDS == 0 or (same >> i) & 1 or (at == 0 and step == 1) or (at == 1 and step == 1 and (turned >> i) & 1)
        for i, own in enumerate(steps)
        for at, step in enumerate(own)
    )


def copies_bytes(how: How, out: Tensor, operands: list[Tensor | None]) -> bool:
    """Whether bytes are what a call moves, and can be moved in words."""
    return (
        how.FUNCTION is functions.copy
        and out.element_size() == 1
        and out.dtype == operands[0].dtype
        and not (out.data_ptr() % 16 or operands[0].data_ptr() % 16)
    )


def tile_of(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of 1024 elements."""
    wide = 1024 if columns > 512 else 256 if columns > 64 else 32
    return 1024 // wide, wide
