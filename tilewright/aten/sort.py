"""The sort engine: lines put in order, the first of them, and what is left of equals.

Numbers are compared by integer keys that keep their order (`order.key_of`): both zeros are one, and a NaN of either sign comes
after all else. Sorts are stable. A short line is sorted in registers, a key and its place in one word; others by `order.ordered`.
Of few that come first, a program bounds the k-th key of its part of a line by the k-th of the least keys of groups, and keeps what
is not after that bound, a key and its place in one word: little more than k, unless many are equal. Parts of what was kept follow
until one is left, whose words are then sorted by counting. Of many, or of keys of 64 bits, a program finds the k-th key itself bit
by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import forms, plans, pointwise
from .order import KEY_BITS, key_of, number_of, ordered
from .plans import own
from .pointwise import WORDS, over, whole_words
from .row import Declined, taken
from .select import begin_blocks, contiguous, divided, ones_in, read

WIDTHS = (16, 64, 256, 512)  # of lines that are sorted in registers; each compiles for up to 7 s
TILE = 1024  # elements of such lines a program
BLOCK = 1024
PART = 8192  # elements of a line that a program selects from; half as many of 64 bits
SMALL_PART = 1024
FEW = {
    16: 64,
    64: 128,
}  # to so many that come first: of how many groups the least are compared, and words that are kept
THREADS = (
    256,
    512,
)  # of a program that selects few: from 16 bits at most, or from others, whose keys take more registers
FEW_PART = 2048  # elements of a short line that few are selected from


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def key_at(X, at, inside, flip):
    """Keys of elements; `flip` is -1 to turn their order around, in which equal ones stay equal, or else 0."""
    x = tl.load(X + at, inside, 0)
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    return key_of(x) ^ flip


@triton.jit
def copied(X, at, OUT, to, inside):
    """Copy elements."""
    x = tl.load(X + at, inside, 0)
    if x.dtype == tl.int1:
        x = x.to(tl.int32) != 0
    tl.store(OUT + to, x, inside)


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "N", "K", "flip"), default=lambda a: {"num_warps": 4})
def sort_rows(X, OUT, INDEX, M, N, K, flip, NARROW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of M lines of N elements the K first, in registers. A key and its place are one integer, so that no two are equal; NARROW: of
    32 bits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, WIDTH)[None, :]
    inside = (row < M) & (col < N)
    key = key_at(X, row * N + col, inside, flip)
    if NARROW:
        packed = tl.where(inside, (key << 16) | col, 0x7FFF0000 | col)
        place = tl.sort(packed) & 0xFFFF
    else:
        wide = col.to(tl.int64)
        packed = tl.where(inside, (key.to(tl.int64) << 32) | wide, 0x7FFFFFFF00000000 | wide)
        place = tl.sort(packed) & 0xFFFFFFFF
    place = tl.where(inside, place, 0)
    inside = inside & (col < K)
    copied(X, row * N + place, OUT, row * K + col, inside)
    tl.store(INDEX + row * K + col, place.to(tl.int64), inside)


FLAT = {"grid": lambda a: (cdiv(a.N, a.BLOCK),), "default": lambda a: {"BLOCK": 1024, "num_warps": 4}}


@kernel(**FLAT, tokens=("N", "flip"))
def sort_keys(KEYS, X, N, flip, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(KEYS + i, key_at(X, i, i < N, flip).to(KEYS.dtype.element_ty), i < N)


@kernel(**FLAT, tokens=("N", "LINE", "FROM", "flip"))
def sort_results(X, KEYS, ORDER, CHOSEN, OUT, INDEX, N, LINE, FROM, flip, BLOCK: tl.constexpr):
    """Elements of X, whose lines have FROM, in an order that has LINE for each line. CHOSEN: which of a line's the order is of. An
    element is read only where its key does not tell it."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = start + i < N
    first, low = over(start, LINE, N)
    times, _ = divided(low.to(tl.int64), i, LINE.to(tl.int64), BLOCK)
    line = first.to(tl.int64) + times
    place = tl.load(ORDER + start + i, inside, 0).to(tl.int64)
    if CHOSEN is not None:
        place = tl.load(CHOSEN + line * LINE + place, inside, 0).to(tl.int64)
    number, told = number_of(tl.load(KEYS + start + i, inside, 0) ^ flip, OUT.dtype.element_ty)
    if OUT.dtype.element_ty.is_floating():
        number = tl.where(told, number, tl.load(X + line * FROM + place, inside & (told == 0), 0))
    tl.store(OUT + start + i, number, inside)
    tl.store(INDEX + start + i, place, inside)


@kernel(grid=lambda a: (a.M * a.PARTS,), tokens=("M", "N", "PARTS", "K", "flip"), default=lambda a: {"num_warps": 8})
def select_first(X, FROM, KEYS, CHOSEN, M, N, PARTS, K, flip, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each of PARTS parts of a line, which has at least K elements, the K first, in the order of the line. FROM, if X is keys
    that were selected before, says which of the line they are."""
    line = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    least = N // PARTS
    longer = N - least * PARTS  # so many parts, the first, have one more
    start = (part * least + tl.minimum(part, longer)).to(tl.int64)
    i = start + tl.arange(0, WIDTH)
    inside = i < start + least + (part < longer).to(tl.int64)
    if FROM is None:
        key = key_at(X, line * N + i, inside, flip)
        which = i.to(tl.int32)
    else:
        key = tl.load(X + line * N + i, inside, 0)
        which = tl.load(FROM + line * N + i, inside, 0)
    if BITS == 64:
        code = (key ^ -0x8000000000000000).to(tl.uint64, bitcast=True)
        kth = tl.full((), 0, tl.uint64)
        one = tl.full((), 1, tl.uint64)
    else:
        code = (
            (key ^ -0x80000000).to(tl.uint32, bitcast=True)
            if BITS == 32
            else ((key + (1 << (BITS - 1))) & 0xFFFF).to(tl.uint32)
        )
        kth = tl.full((), 0, tl.uint32)
        one = tl.full((), 1, tl.uint32)
    # The k-th is not before a number of which fewer than k are
    for bit in range(0, BITS):
        more = kth | (one << (BITS - 1 - bit).to(one.dtype))
        kth = tl.where(tl.sum((inside & (code < more)).to(tl.int32), 0) < K, more, kth)
    before = inside & (code < kth)
    equal = inside & (code == kth)
    room = K - tl.sum(before.to(tl.int32), 0)
    kept = before | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    at = tl.program_id(0).to(tl.int64) * K + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(KEYS + at, key.to(KEYS.dtype.element_ty), kept)
    tl.store(CHOSEN + at, which, kept)


LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # a word after every key with its place


@triton.jit
def word_at(X, line, i, inside, flip, PACKED: tl.constexpr):
    """Keys of a line's elements with their places, the lower half; PACKED: X has such words."""
    if PACKED:
        return tl.load(X + line + i, inside, LAST)
    else:
        return (key_at(X, line + i, inside, flip).to(tl.int64) << 32) | i.to(tl.int64)


@triton.jit
def exact(key, i, inside, K):
    """Which are the K first of a tile that has as many, equal ones by their place: bit by bit, of the K-th key, then its place."""
    top: tl.constexpr = key.dtype.primitive_bitwidth - 1
    one = tl.full((), 1, key.dtype)
    kth = one << top  # the least
    for bit in range(0, top + 1):  # the K-th is not before a number of which fewer than K are
        more = kth ^ (one << (top - bit).to(key.dtype))
        kth = tl.where(tl.sum((inside & (key < more)).to(tl.int32)) < K, more, kth)
    before = inside & (key < kth)
    equal = inside & (key == kth)
    room = K - tl.sum(before.to(tl.int32))
    last = tl.full((), 0, tl.int32)
    for bit in range(0, 31):
        more = last | (1 << (30 - bit))
        last = tl.where(tl.sum((equal & (i < more)).to(tl.int32)) < room, more, last)
    return before | (equal & (i <= last))


@triton.jit
def bits_of_threads(truth, bit):
    """Of [threads, rows, columns] an integer a thread, in which each has its bit."""
    return tl.sum(tl.sum(tl.where(truth, 1 << bit, 0), 2), 1)


@kernel(
    grid=lambda a: (a.M * a.PARTS,), tokens=("M", "N", "PARTS", "LENGTH", "K", "flip"),
    default=lambda a: {"num_warps": a.THREADS // 32, "maxnreg": 64 if a.THREADS <= 256 else 40},
)  # fmt: skip
def keep_few(
    X, KEPT, M, N, PARTS, LENGTH, K, flip, PACKED: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    THREADS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """KEPT [M, GROUPS, PARTS]: of each part of LENGTH elements of a line, words of the K first and of few others, then LAST. A
    thread has WORD elements side by side and others as far on as those of all threads go, 32 at most, so that their least and
    which of them are kept are its own affair."""
    ROWS: tl.constexpr = WIDTH // (THREADS * WORD)
    N = whole_words(N, EVEN)
    LENGTH = whole_words(LENGTH, EVEN)
    line = (tl.program_id(0) // PARTS).to(tl.int64)
    to = KEPT + line * GROUPS * PARTS + tl.program_id(0) % PARTS
    line *= N
    start = tl.program_id(0) % PARTS * LENGTH
    thread = tl.arange(0, THREADS)
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, WORD)[None, None, :]
    i = (row * THREADS + thread[:, None, None]) * WORD + column
    inside = (i < LENGTH) & (start + i < N)
    if PACKED:
        key = tl.load(X + line + start + i, inside, LAST)
        inside = key != LAST
        least = key
    else:
        key = key_at(X, line + start + i, inside, flip)
        least = tl.where(inside, key, 0x7FFFFFFF)
    # Of K groups the least come no later than the K-th least of groups: so the K first do
    least = tl.min(tl.reshape(tl.min(tl.min(least, 2), 1), [GROUPS, THREADS // GROUPS]), 1)
    upto = tl.sum((least[None, :] <= least[:, None]).to(tl.int32), 1)
    bound = tl.min(tl.where(upto >= K, least, LAST if PACKED else 0x7FFFFFFF), 0)
    bit = row * WORD + column
    bits = bits_of_threads(inside & (key <= bound), bit)
    count = ones_in(bits)
    total = tl.sum(count, 0)
    if total > GROUPS:
        bits = bits_of_threads(exact(key, i, inside, K), bit)
        count = ones_in(bits)
        total = K
    slot = tl.cumsum(count, 0) - count
    for _ in range(0, tl.max(count, 0)):
        found = bits != 0
        lowest = bits & -bits
        at = (lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # its exponent
        own = start + (at // WORD * THREADS + thread) * WORD + at % WORD
        tl.store(to + slot * PARTS, word_at(X, line, own, found, flip, PACKED), found)
        bits ^= lowest
        slot += 1
    empty = tl.arange(0, GROUPS)
    tl.store(to + empty * PARTS, tl.full([GROUPS], LAST, tl.int64), empty >= total)


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M", "N", "K"), default=lambda a: {"num_warps": 4})
def sort_few(X, KEPT, OUT, INDEX, M, N, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The K first of M lines, of which KEPT has WIDTH words: each goes where the number of those before it says."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.load(KEPT + row * WIDTH + tl.arange(0, WIDTH)[None, :], row < M, LAST)
    rank = tl.zeros([ROWS, WIDTH], tl.int32)
    for start in range(0, WIDTH, 8):
        at = row[:, :, None] * WIDTH + start + tl.arange(0, 8)[None, :, None]
        other = tl.load(KEPT + at, row[:, :, None] < M, LAST)
        rank += tl.sum((other < word[:, None, :]).to(tl.int32), 1)
    place = word & 0xFFFFFFFF
    first = (word != LAST) & (rank < K)
    copied(X, row * N + place, OUT, row * K + rank, first)
    tl.store(INDEX + row * K + rank, place, first)


@triton.jit
def is_first(X, KEYS, ORDER, i, inside):
    """Whether a key in order is the first of its equals. A NaN equals none."""
    x = tl.load(X + tl.load(ORDER + i, inside, 0).to(tl.int64), inside, 0)
    if x.dtype == tl.int1:
        x = x.to(tl.int32)
    other = tl.load(KEYS + i, inside, 0) != tl.load(KEYS + tl.maximum(i - 1, 0), inside, 0)
    return inside & ((i == 0) | other | (x != x))


@kernel(grid=lambda a: (a.BLOCKS,), tokens=("N", "BLOCKS"), default=lambda a: {"num_warps": 4})
def count_first(X, KEYS, ORDER, COUNTS, N, BLOCKS, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(COUNTS + tl.program_id(0), tl.sum(is_first(X, KEYS, ORDER, i, i < N).to(tl.int32), 0))


@kernel(grid=lambda a: (a.BLOCKS,), tokens=("N", "BLOCKS"), default=lambda a: {"num_warps": 4})
def write_first(X, KEYS, ORDER, STARTS, OUT, FIRST, INVERSE, N, BLOCKS, BLOCK: tl.constexpr):
    """What is left of equals, where each begins, and of every element which it is."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    first = is_first(X, KEYS, ORDER, i, inside)
    rank = tl.load(STARTS + tl.program_id(0)) + tl.cumsum(first.to(tl.int32), 0) - 1
    order = tl.load(ORDER + i, inside, 0).to(tl.int64)
    copied(X, order, OUT, rank, first)
    if FIRST is not None:
        tl.store(FIRST + rank, i, first)
    if INVERSE is not None:
        tl.store(INVERSE + order, rank, inside)


@kernel(**FLAT, tokens=("N", "ALL"))
def lengths(COUNTS, FIRST, N, ALL, BLOCK: tl.constexpr):
    """How many of ALL there are from each beginning to the next."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(FIRST + i + 1, i + 1 < N, 0)
    end = tl.where(i + 1 < N, end, ALL)
    tl.store(COUNTS + i, end - tl.load(FIRST + i, i < N, 0), i < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def lines_of(self: Tensor, dim: int) -> Tensor:
    """A tensor with that dimension last, without gaps."""
    return contiguous(self.movedim(dim, -1))


def fresh(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return own(torch.empty(shape, dtype=dtype, device=like.device))


def keys_of(x: Tensor, lines: int, n: int, descending: bool) -> Tensor:
    keys = fresh(x, (lines, n), torch.int64 if KEY_BITS[x.dtype] == 64 else torch.int32)
    plans.launch(sort_keys, (keys, x), (lines * n, -int(descending)))
    return keys


def in_registers(x: Tensor, k: int, values: Tensor, indices: Tensor, descending: bool) -> bool:
    """Whether lines without gaps are short enough; if so, the k first are in the results."""
    n, bits = x.shape[-1], KEY_BITS[x.dtype]
    if n > WIDTHS[-1] or bits > 32:
        return False
    width = next(w for w in WIDTHS if n <= w)
    constants = {"NARROW": bits <= 16, "ROWS": TILE // width, "WIDTH": width}
    plans.launch(sort_rows, (x, values, indices), (x.numel() // n, n, k, -int(descending)), **constants)
    return True


def sort_lines(x: Tensor, values: Tensor, indices: Tensor, descending: bool) -> None:
    """Sort lines without gaps into results without gaps."""
    n = x.shape[-1]
    lines, bits = x.numel() // n, KEY_BITS[x.dtype]
    if in_registers(x, n, values, indices, descending):
        return
    keys, order = ordered(keys_of(x, lines, n, descending), bits, True)
    plans.launch(sort_results, (x, keys, order, None, values, indices), (x.numel(), n, n, -int(descending)))


def sort_stable(
    self: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    taken(self)
    width = max(1, self.dim())
    if not -width <= dim < width:
        raise Declined("a dimension that is not there")
    strides = torch.empty_like(self, device="meta").stride()
    values, indices = (
        own(torch.empty_strided(self.shape, strides, dtype=dtype, device=self.device))
        for dtype in (self.dtype, torch.int64)
    )
    if not self.numel():
        return values, indices
    if self.dim() == 0:
        pointwise.run(forms.COPY, {"self": self}, values)
        pointwise.run(forms.FILL, {"value": 0}, indices)
        return values, indices
    check_length(self.shape[dim])
    x = lines_of(self, dim)
    if values.movedim(dim, -1).is_contiguous():
        sort_lines(x, values, indices, descending)
        return values, indices
    lines = fresh(self, x.shape, self.dtype), fresh(self, x.shape, torch.int64)
    sort_lines(x, *lines, descending)
    for out, made in zip((values, indices), lines):
        pointwise.run(forms.COPY, {"self": made}, out.movedim(dim, -1))
    return values, indices


def sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return sort_stable(self, dim=dim, descending=descending)


def check_length(n: int) -> None:
    if n >= 2**31 - PART:
        raise Declined("more elements of a line than an int32 counts")


def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    taken(self)
    width = max(1, self.dim())
    if not -width <= dim < width or self.dtype == torch.bool:
        raise Declined("a dimension or dtype that is refused")
    n = self.shape[dim] if self.dim() else 1
    if not 0 <= k <= n:
        raise Declined("more than there are")
    check_length(n)
    shape = tuple(k if d == dim % width else size for d, size in enumerate(self.shape))
    values, indices = fresh(self, shape, self.dtype), fresh(self, shape, torch.int64)
    if not values.numel():
        return values, indices
    x = lines_of(self.reshape(1) if self.dim() == 0 else self, dim)
    last = values.dim() == 0 or values.movedim(dim, -1).is_contiguous()
    made = (values, indices) if last else tuple(fresh(self, (*x.shape[:-1], k), t.dtype) for t in (values, indices))
    first_lines(x, k, *made, largest)
    if not last:
        for out, part in zip((values, indices), made):
            pointwise.run(forms.COPY, {"self": part}, out.movedim(dim, -1))
    return values, indices


def first_lines(x: Tensor, k: int, values: Tensor, indices: Tensor, largest: bool) -> None:
    """The k first of lines without gaps."""
    if in_registers(x, k, values, indices, largest):
        return
    n = x.shape[-1]
    lines, bits = x.numel() // n, KEY_BITS[x.dtype]
    if k <= max(FEW) and bits <= 32:
        few_lines(x, k, values, indices, largest)
        return
    part = SMALL_PART if n <= SMALL_PART else PART // 2 if bits == 64 else PART
    if n > part and k > part // 2:  # parts would have too few to choose from
        keys, order = (contiguous(t[:, :k]) for t in ordered(keys_of(x, lines, n, largest), bits, True))
        plans.launch(sort_results, (x, keys, order, None, values, indices), (lines * k, k, n, -int(largest)))
        return
    source, chosen, size = x, None, n
    while True:
        parts = cdiv(size, part)
        keys = fresh(x, (lines, parts * k), torch.int64 if bits == 64 else torch.int32)
        which = fresh(x, (lines, parts * k), torch.int32)
        code = 64 if bits == 64 else 32 if bits == 32 else 16
        tensors = source, chosen, keys, which
        plans.launch(select_first, tensors, (lines, size, parts, k, -int(largest)), BITS=code, WIDTH=part)
        source, chosen, size = keys, which, parts * k
        if parts == 1:
            break
    keys, order = ordered(source, bits, True)
    plans.launch(sort_results, (x, keys, order, chosen, values, indices), (lines * k, k, n, -int(largest)))


def few_lines(x: Tensor, k: int, values: Tensor, indices: Tensor, largest: bool) -> None:
    """The k first, of which there are few, of lines without gaps."""
    n = x.shape[-1]
    lines = x.numel() // n
    groups = next(FEW[most] for most in FEW if k <= most)
    source, size, width = x, n, FEW_PART if n <= FEW_PART else PART
    while True:
        parts = cdiv(size, width)
        length = cdiv(cdiv(size, parts), WORDS) * WORDS
        kept = fresh(x, (lines, groups * parts), torch.int64)
        even = size % WORDS == 0
        threads = THREADS[not even or source.element_size() > 2]
        word = min(16 // source.element_size(), width // threads) if even else 1
        constants = {"PACKED": source is not x, "EVEN": even, "GROUPS": groups, "WIDTH": width}
        numbers = lines, size, parts, length, k, -int(largest)
        plans.launch(keep_few, (source, kept), numbers, **constants, THREADS=threads, WORD=word)
        source, size, width = kept, groups * parts, PART // 2
        if parts == 1:
            break
    tensors = x, source, values, indices
    plans.launch(sort_few, tensors, (lines, n, k), ROWS=512 // groups, WIDTH=groups)


def unique2(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    taken(self)
    n = self.numel()
    check_length(n)
    if not n:
        raise Declined("no elements")
    x = contiguous(self)
    keys, order = ordered(keys_of(x, 1, n, False), KEY_BITS[x.dtype], True)
    blocks = cdiv(n, BLOCK)
    counts, starts = fresh(x, (blocks,), torch.int32), fresh(x, (blocks + 1,), torch.int64)
    plans.launch(count_first, (x, keys, order, counts), (n, blocks), BLOCK=BLOCK)
    plans.launch(begin_blocks, (counts, starts), (blocks,))
    count = read(starts[blocks])
    out = fresh(x, (count,), x.dtype)
    inverse = fresh(x, tuple(self.shape) if return_inverse else (0,), torch.int64)
    lengths_out = fresh(x, (count,) if return_counts else (0,), torch.int64)
    first = fresh(x, (count,), torch.int64) if return_counts else None
    tensors = x, keys, order, starts, out, first, inverse if return_inverse else None
    plans.launch(write_first, tensors, (n, blocks), BLOCK=BLOCK)
    if first is not None:
        plans.launch(lengths, (lengths_out, first), (count, n))
    return out, inverse, lengths_out


FORMS = {"sort": sort, "sort.stable": sort_stable, "topk": topk, "_unique2": unique2}
