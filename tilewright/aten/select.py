"""The index engine, what is found rather than named: elements under a mask, coordinates of what is not 0, repeated indices, and
whether elements are among others.

Elements under a mask are counted by blocks, and a bit is kept of each; of several blocks, a launch finds where each begins, and
programs write theirs there. How many there are is the one number that is read. What is looked for is looked up in the others, which
are put in order (`order.py`): in a bucket of numbers that lie near, where these are many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import collecting, kernel
from . import forms, layout, plans, pointwise, scan
from .layout import Ints
from .order import KEY_BITS, key_of, ordered
from .plans import only_now, own
from .pointwise import IN_TRITON, WORDS, over, stored, whole_words
from .reduction import loops_of, offset
from .row import TAKEN, Declined, of_numbers, taken

BLOCK = 8192  # elements that are counted together, fewer than 2**16
OWN = 1024  # of these that a program writes
BUCKETS = 64, 32768  # from so many others on these are looked up by buckets, of which there are so many at most
MOST_DIMS = 6  # whose coordinates a launch writes
SIZES = tuple(f"n{i}" for i in range(MOST_DIMS))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def is_set(X, at, inside):
    """Whether elements are not 0."""
    x = tl.load(X + at, inside, 0)
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    return (x != 0) & inside


@triton.jit
def ones_in(bits):
    """How many bits of a word are set: an instruction, as the compiler knows these steps."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    return ((((bits + (bits >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@kernel(
    grid=lambda a: (a.BLOCKS,), tokens=("N", "BLOCKS", "K0", "K1", "k0", "k1", "k2"), default=lambda a: {"num_warps": 8}
)
def count_set(
    X, WORDS, COUNTS, STARTS, N, BLOCKS, K0, K1, k0, k1, k2, FLAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many elements of each block are set. WORDS has for 16 elements which of them are, and above these bits how many of the
    block come before. FLAT: elements lie one after another; EVEN: they are whole words. One block fills STARTS as `begin_blocks`
    does for several."""
    N = whole_words(N, EVEN)
    word = tl.arange(0, BLOCK // 16)
    bit = tl.arange(0, 16)[None, :]
    i = tl.program_id(0).to(tl.int64) * BLOCK + (word[:, None] * 16 + bit)
    found = is_set(X, i if FLAT else offset(i, N, K0, K1, k0, k1, k2), i < N)
    bits = tl.sum(tl.where(found, 1 << bit, 0), 1)
    count = ones_in(bits)
    before = tl.cumsum(count, 0) - count
    tl.store(WORDS + tl.program_id(0).to(tl.int64) * (BLOCK // 16) + word, (before << 16) | bits)
    total = tl.sum(count, 0)
    tl.store(COUNTS + tl.program_id(0), total)
    if BLOCKS == 1:
        tl.store(STARTS, 0)
        tl.store(STARTS + 1, total)


@kernel(grid=lambda a: (1,), tokens=("BLOCKS",), default=lambda a: {"BLOCK": 8192, "num_warps": 16})
def begin_blocks(COUNTS, STARTS, BLOCKS, BLOCK: tl.constexpr):
    """STARTS [BLOCKS + 1]: how many come before each block, and how many there are."""
    before = tl.full((), 0, tl.int64)
    for start in range(0, BLOCKS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(COUNTS + i, i < BLOCKS, 0)
        tl.store(STARTS + i, before + (tl.cumsum(count, 0) - count), i < BLOCKS)
        before += tl.sum(count, 0)
    tl.store(STARTS + BLOCKS, before)


@triton.jit
def set_in_block(WORDS, STARTS, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """(numbers of a program's elements from its first on, whether each is set, how many that are come before). Neighbours are of
    one warp, which writes those that are set side by side."""
    i = tl.max_contiguous(tl.arange(0, OWN), 1)  # a thread that read several side by side would write them so
    word = tl.load(WORDS + tl.program_id(0).to(tl.int64) * (OWN // 16) + i // 16)
    bit = i % 16
    before = ((word >> 16) & 0xFFFF) + ones_in(word & ((1 << bit) - 1))
    return i, ((word >> bit) & 1) > 0, tl.load(STARTS + tl.program_id(0) // (BLOCK // OWN)) + before


@kernel(
    grid=lambda a: (cdiv(a.N, a.OWN),), tokens=("N", "K0", "K1", "p0", "p1", "p2"), default=lambda a: {"num_warps": 2}
)  # fmt: skip
def write_set(
    OUT, X, WORDS, STARTS, N, K0, K1, p0, p1, p2, FLAT: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """Of N elements of X, of strides p, those that words say are set."""
    i, found, to = set_in_block(WORDS, STARTS, BLOCK, OWN)
    start = tl.program_id(0).to(tl.int64) * OWN
    at = X + start + i if FLAT else X + offset(start + i, N, K0, K1, p0, p1, p2)
    value = tl.load(at, found, 0)
    if OUT.dtype.element_ty == tl.int1:
        value = value.to(tl.int32)
    tl.store(OUT + to, stored(value, OUT), found)


@triton.jit
def divided(low, more, size, MOST: tl.constexpr):
    """(quotient, remainder) of numbers that are fewer than MOST `more` than one below `size`, without a division for each: a larger
    size goes in once at most, and a product with the inverse of a smaller one is exact enough."""
    if size >= MOST:
        times = (more >= tl.minimum(size - low, MOST).to(tl.int32)).to(tl.int32)
        left = tl.where(times > 0, low - size, low) + more
    else:
        total = low.to(tl.int32) + more
        times = ((total.to(tl.float32) + 0.5) * (1.0 / size.to(tl.float32))).to(tl.int32)
        left = (total - times * size.to(tl.int32)).to(tl.int64)
    return times, left


@kernel(grid=lambda a: (cdiv(a.N, a.OWN),), tokens=("N", *SIZES, "dims", "apart"), default=lambda a: {"num_warps": 2})
def write_coordinates(
    OUT, WORDS, STARTS, N, n0, n1, n2, n3, n4, n5, dims, apart, DIMS: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """Of N elements the coordinates of those that words say are set: of so many dimensions, DIMS at most, of which n0 is the last's
    size. Those of one dimension lie side by side."""
    more, found, to = set_in_block(WORDS, STARTS, BLOCK, OWN)
    start = tl.program_id(0).to(tl.int64) * OWN
    sizes = (n0, n1, n2, n3, n4, n5)
    for d in tl.static_range(DIMS):
        start, low = over(start, sizes[d], N)
        more, left = divided(low.to(tl.int64), more, sizes[d].to(tl.int64), OWN)
        tl.store(OUT + (dims - 1 - d).to(tl.int64) * apart + to, left, found & (d < dims))


@triton.jit
def lower_bound(SORTED, key, n, steps):
    """How many of n keys in order come before each of these."""
    low = tl.zeros(key.shape, tl.int64)
    high = low + n
    for _ in range(0, steps):
        middle = (low + high) // 2
        right = (low < high) & (tl.load(SORTED + tl.minimum(middle, n - 1)) < key)
        high = tl.where(right | (low >= high), high, middle)
        low = tl.where(right, middle + 1, low)
    return low


@triton.jit
def distance(low, key):
    """How far keys lie above the lowest."""
    return (key.to(tl.int64) - low.to(tl.int64)).to(tl.uint64, bitcast=True)


@kernel(
    grid=lambda a: (cdiv(a.BUCKETS + 2, a.BLOCK),), tokens=("n", "steps", "BUCKETS"),
    default=lambda a: {"BLOCK": 256, "num_warps": 4},
)  # fmt: skip
def begin_buckets(STARTS, SORTED, n, steps, BUCKETS, BLOCK: tl.constexpr):
    """STARTS [BUCKETS + 2]: how many of n keys in order come before each bucket, which is of so many numbers, a power of two, that
    all have one; then n, and which power it is."""
    low = tl.load(SORTED)
    reach = distance(low, tl.load(SORTED + n - 1))
    shift = tl.full((), 0, tl.uint64)
    for bit in range(0, 64):
        shift += ((reach >> bit.to(tl.uint64)) >= BUCKETS).to(tl.uint64)
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = b.to(tl.uint64) << shift
    key = (low.to(tl.int64) + first.to(tl.int64, bitcast=True)).to(low.dtype)
    start = tl.where(first > reach, n, lower_bound(SORTED, key, n, steps))
    tl.store(STARTS + b, start.to(tl.int32), b < BUCKETS)
    tl.store(STARTS + b, tl.where(b == BUCKETS, n, shift.to(tl.int32)), (b >= BUCKETS) & (b < BUCKETS + 2))


@triton.jit
def bound_in_bucket(SORTED, STARTS, key, n, BUCKETS):
    """How many of n keys in order come before each of these, if it is one of them; else any number to n."""
    low = tl.load(SORTED)
    bucket = distance(low, key) >> tl.load(STARTS + BUCKETS + 1).to(tl.uint64)
    known = (key >= low) & (bucket < BUCKETS)
    bucket = tl.where(known, bucket, 0).to(tl.int32)
    first = tl.load(STARTS + bucket)
    end = tl.load(STARTS + bucket + 1)
    left = tl.max(end - first, 0)
    while left > 0:
        middle = (first + end) >> 1
        right = (first < end) & (tl.load(SORTED + tl.minimum(middle, n - 1)) < key)
        end = tl.where(right | (first >= end), end, middle)
        first = tl.where(right, middle + 1, first)
        left = left >> 1
    return first


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "n", "steps", "BUCKETS"),
    default=lambda a: {"BLOCK": 1024, "num_warps": 4},
)  # fmt: skip
def is_among(
    OUT, X, SORTED, STARTS, N, n, steps, BUCKETS, COMMON: tl.constexpr, INVERT: tl.constexpr, BLOCK: tl.constexpr
):
    """Whether elements are among others, whose keys are in order. A NaN is among none. STARTS: where buckets of these begin."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = as_common(tl.load(X + i, i < N, 0), COMMON)
    key = key_of(x)
    if STARTS is None:
        at = lower_bound(SORTED, key, n, steps)
    else:
        at = bound_in_bucket(SORTED, STARTS, key, n, BUCKETS)
    found = (at < n) & (tl.load(SORTED + tl.minimum(at, n - 1)) == key) & (x == x)
    tl.store(OUT + i, found != INVERT, i < N)


@triton.jit
def as_common(x, COMMON: tl.constexpr):
    """Elements promoted; a bool is 0 or 1."""
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    if tl.int1 == COMMON:
        x = x.to(tl.int32)
    else:
        x = x.to(COMMON)
    return x


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N",), default=lambda a: {"BLOCK": 1024, "num_warps": 4})
def keys_in_order(KEYS, X, N, COMMON: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of promoted elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = key_of(as_common(tl.load(X + i, i < N, 0), COMMON))
    tl.store(KEYS + i, key.to(KEYS.dtype.element_ty), i < N)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "n", "steps"), default=lambda a: {"BLOCK": 1024, "num_warps": 4}
)
def repeated(OUT, ENDS, N, n, steps, BLOCK: tl.constexpr):
    """Which of n ends, ascending, is the first after each number."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = lower_bound(ENDS, i + 1, n, steps)
    tl.store(OUT + i, found.to(OUT.dtype.element_ty), i < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def read(t: Tensor) -> int:
    """A number from the device, which a result's size depends on: no plan does that. Where launches are only collected, 1."""
    only_now()
    if collecting() or t.is_meta:
        return 1
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Declined("a size that is read, during graph capture", lasting=False)
    return int(t)


def words_of(mask: Tensor, shape: Ints, strides: Ints) -> tuple[Tensor, Tensor, int]:
    """(words of what is set, how many set elements come before each block, how many there are)."""
    N = math.prod(shape)
    blocks = cdiv(N, BLOCK)
    sizes, (steps,) = loops_of(shape, [strides])
    flat = is_flat(N, steps)
    words = own(torch.empty(blocks * (BLOCK // 16), dtype=torch.int32, device=mask.device))
    counts = own(torch.empty(blocks, dtype=torch.int32, device=mask.device))
    starts = own(torch.empty(blocks + 1, dtype=torch.int64, device=mask.device))
    constants = {"FLAT": flat, "EVEN": flat and N % WORDS == 0, "BLOCK": BLOCK}
    plans.launch(count_set, (mask, words, counts, starts), (N, blocks, *sizes[:2], *steps), **constants)
    if blocks > 1:
        plans.launch(begin_blocks, (counts, starts), (blocks,))
    return words, starts, read(starts[blocks])


def is_flat(N: int, steps: Sequence[int]) -> bool:
    """Whether elements lie one after another. Of few, all share one variant."""
    return N >= pointwise.SMALL and list(steps) == [1, 0, 0]


def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    taken(self, mask)
    shape = layout.broadcast([self.shape, mask.shape])
    if mask.dtype != torch.bool or shape is None:
        raise Declined("a mask that is not bool, or shapes that do not broadcast")
    N = math.prod(shape)
    if not N:
        return own(torch.empty(0, dtype=self.dtype, device=self.device))
    sizes, (steps,) = loops_of(shape, [layout.expanded(self, shape)])
    words, starts, count = words_of(mask, shape, layout.expanded(mask, shape))
    out = own(torch.empty(count, dtype=self.dtype, device=self.device))
    if count:
        numbers = N, *sizes[:2], *steps
        plans.launch(write_set, (out, self, words, starts), numbers, FLAT=is_flat(N, steps), BLOCK=BLOCK, OWN=OWN)
    return out


def nonzero(self: Tensor) -> Tensor:
    taken(self)
    dims, N = self.dim(), self.numel()
    if not 0 < dims <= MOST_DIMS:
        raise Declined("no dimension, or more than a launch takes")
    if not N:
        return coordinates(self, 0)
    words, starts, count = words_of(self, tuple(self.shape), self.stride())
    out = coordinates(self, count)
    if count:
        numbers = N, *reversed(self.shape), *[1] * (MOST_DIMS - dims), dims, out.stride(1)
        most = dims if N >= pointwise.SMALL else MOST_DIMS
        plans.launch(write_coordinates, (out, words, starts), numbers, DIMS=most, BLOCK=BLOCK, OWN=OWN)
    return out


def coordinates(self: Tensor, count: int) -> Tensor:
    """Memory for the result: torch has those of one dimension side by side. On a GPU its result is a turned matrix, whose stride
    is 1 at least, where nothing is found too."""
    apart = max(count, 1) if self.is_cuda else count
    return own(torch.empty_strided((count, self.dim()), (1, apart), dtype=torch.int64, device=self.device))


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    taken(repeats)
    if repeats.dim() != 1 or repeats.dtype not in (torch.int32, torch.int64):
        raise Declined("repeats that are refused")
    n = repeats.shape[0]
    if not n:
        return own(torch.empty(0, dtype=repeats.dtype, device=repeats.device))
    ends = scan.cumsum(repeats, 0, dtype=torch.int64)
    only_now()
    count = read(ends[n - 1])
    if not collecting() and (int(repeats.min()) < 0 or output_size not in (None, count)):
        raise Declined("a negative number of repeats, or another size than all", lasting=False)
    count = count if output_size is None else output_size
    out = own(torch.empty(count, dtype=repeats.dtype, device=repeats.device))
    if count:
        plans.launch(repeated, (out, ends), (count, n, n.bit_length()))
    return out


def contiguous(t: Tensor) -> Tensor:
    if t.is_contiguous():
        return t
    made = own(torch.empty(t.shape, dtype=t.dtype, device=t.device))
    return pointwise.run(forms.COPY, {"self": t}, made)


def sorted_keys(t: Tensor, common: torch.dtype) -> Tensor:
    """Keys of promoted elements, in order."""
    n = t.numel()
    wide = torch.int64 if KEY_BITS[common] == 64 else torch.int32
    keys = own(torch.empty((1, n), dtype=wide, device=t.device))
    plans.launch(keys_in_order, (keys, contiguous(t)), (n,), COMMON=IN_TRITON[common])
    return ordered(keys, KEY_BITS[common], True)[0] if n > 1 else keys


def among(elements: Tensor, others: Tensor, common: torch.dtype, invert: bool) -> Tensor:
    if common not in TAKEN:
        raise Declined(f"dtype {common}")
    out = own(torch.empty(elements.shape, dtype=torch.bool, device=elements.device))
    n = others.numel()
    if not n:
        return pointwise.run(forms.FILL, {"value": invert}, out)
    if out.numel():
        keys, starts, buckets = sorted_keys(others, common), None, 0
        if n >= BUCKETS[0] and out.numel() >= pointwise.SMALL:  # each step of the search that is left out is a read
            buckets = min(1 << n.bit_length(), BUCKETS[1])
            starts = own(torch.empty(buckets + 2, dtype=torch.int32, device=out.device))
            plans.launch(begin_buckets, (starts, keys), (n, n.bit_length(), buckets))
        numbers = out.numel(), n, n.bit_length(), buckets
        tensors = out, contiguous(elements), keys, starts
        plans.launch(is_among, tensors, numbers, COMMON=IN_TRITON[common], INVERT=invert)
    return out


def no_bools(*operands: Any) -> None:
    """Leave to aten what it refuses: it looks for no bool, and among none."""
    if any(isinstance(one, bool) or isinstance(one, Tensor) and one.dtype == torch.bool for one in operands):
        raise Declined("dtype bool")


def isin(elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    taken(elements, test_elements)
    no_bools(elements, test_elements)
    return among(elements, test_elements, torch.result_type(elements, test_elements), invert)


def as_tensor(value: Any, like: Tensor) -> tuple[Tensor, torch.dtype]:
    """(a number in memory, the dtype that both promote to)."""
    common = torch.result_type(like, value)
    if common not in TAKEN:
        raise Declined(f"dtype {common}")
    made = own(torch.empty((), dtype=common, device=like.device))
    return pointwise.run(forms.FILL, {"value": value}, made), common


@of_numbers("test_element")
def isin_number(elements: Tensor, test_element: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    taken(elements)
    no_bools(elements, test_element)
    other, common = as_tensor(test_element, elements)
    return among(elements, other, common, invert)


@of_numbers("element")
def number_isin(element: Any, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    taken(test_elements)
    no_bools(element, test_elements)
    one, common = as_tensor(element, test_elements)
    return among(one, test_elements, common, invert)


FORMS = {
    "masked_select": masked_select, "nonzero": nonzero, "repeat_interleave.Tensor": repeat_interleave, "isin.Tensor_Tensor": isin,
    "isin.Tensor_Scalar": isin_number, "isin.Scalar_Tensor": number_isin,
}  # fmt: skip
