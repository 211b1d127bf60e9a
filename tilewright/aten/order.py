"""Lines of integer keys put in ascending order, equal ones as they came: what sorting and adding by index stand on.

Short lines are ordered by counting: a key's place is the number of those that come before it. Others take a pass for each digit of
four bits, the lowest first. Of a pass, blocks count their digits, a launch finds where the keys of each digit and block begin, and
blocks move their keys there. Sixteen counts lie in few words, each of which is summed or scanned as one number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .plans import own
from .pointwise import WORDS, whole_words

COUNTED = 32768  # keys of a line to which counting is taken, whose work grows with the square
COMPARED = 1 << 26  # comparisons of all that take about as long as the three launches of a pass (not measured)
DIGIT = 4  # bits
DIGITS = 1 << DIGIT
BLOCK = 512  # keys that are moved together; fewer than 2**15, which a count holds
LAST32, LAST64 = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFFFFFFFFFFFFFF)  # which no key comes after


@kernel(grid=lambda a: (a.M * cdiv(a.N, a.OWN),), tokens=("M", "N"), default=lambda a: {"OWN": 32, "num_warps": 4})
def order_by_count(KEYS, SORTED, ORDER, M, N, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """M lines of N keys. BLOCK is a multiple of OWN: of equal keys, those of whole blocks before count, those of blocks after do
    not, and those of one block are left, which comes last."""
    across = tl.cdiv(N, OWN)
    line = (tl.program_id(0) // across).to(tl.int64) * N
    first = tl.program_id(0) % across * OWN
    own = first // BLOCK * BLOCK
    t = first + tl.arange(0, OWN)[:, None]
    mine = tl.load(KEYS + line + t, t < N, 0)
    before = tl.zeros([OWN, BLOCK], tl.int32)
    for start in range(0, own, BLOCK):
        other = tl.load(KEYS + line + start + tl.arange(0, BLOCK)[None, :])
        before += (other <= mine).to(tl.int32)
    for start in range(own, N, BLOCK):
        u = start + tl.arange(0, BLOCK)[None, :]
        other = tl.load(KEYS + line + u, u < N, LAST64 if KEYS.dtype.element_ty == tl.int64 else LAST32)
        before += (other < mine).to(tl.int32)
    u = own + tl.arange(0, BLOCK)[None, :]
    other = tl.load(KEYS + line + u, u < N, 0)
    before += ((other == mine) & (u < t)).to(tl.int32)
    at = line + tl.sum(before, 1)[:, None]
    if SORTED is not None:
        tl.store(SORTED + at, mine, t < N)
    tl.store(ORDER + at, t, t < N)


@triton.jit
def key_of(x):
    """Of numbers, signed integers of at least their bits in the order of the numbers: int64 for 64 bits, else int32. Both zeros are
    one, and a NaN of either sign comes after all else."""
    if x.dtype.is_floating():  # of the number's size, which has the order of its bits
        if x.dtype == tl.float64:
            bits = x.to(tl.int64, bitcast=True)
            size = bits & 0x7FFFFFFFFFFFFFFF
            key = tl.where(size > 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF, tl.where(bits < 0, -size, size))
        elif x.dtype == tl.float32:
            bits = x.to(tl.int32, bitcast=True)
            size = bits & 0x7FFFFFFF
            key = tl.where(size > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -size, size))
        else:
            infinite: tl.constexpr = 0x7F80 if x.dtype == tl.bfloat16 else 0x7C00
            bits = x.to(tl.int16, bitcast=True).to(tl.int32)
            size = bits & 0x7FFF
            key = tl.where(size > infinite, 0x7FFF, tl.where(bits < 0, -size, size))
    elif x.dtype == tl.int64:
        key = x
    else:
        key = x.to(tl.int32)
    return key


@triton.jit
def number_of(key, T: tl.constexpr):
    """(numbers that have these keys, whether a key tells which number it was: of a zero the sign is lost, of a NaN all else)."""
    if T.is_floating():
        BITS: tl.constexpr = T.primitive_bitwidth
        NAN: tl.constexpr = 0x7FFF if BITS == 16 else LAST32 if BITS == 32 else LAST64
        told = (key != 0) & (key != NAN)
        bits = tl.where(key < 0, -key | (-1 - NAN), key)
        if BITS == 16:
            bits = bits.to(tl.int16)
        number = bits.to(T, bitcast=True)
    else:
        told = key == key
        number = key != 0 if tl.int1 == T else key.to(T)
    return number, told


@triton.jit
def digit_of(key, shift, flip):
    """Four bits of a key, from `shift` on. `flip` turns the highest digit's sign, so that negative keys come first."""
    return ((key >> shift).to(tl.int32) & 15) ^ flip


@triton.jit
def key_tile(KEYS, line, block, N, THREADS: tl.constexpr):
    """(eight keys of each thread, in the order of the line and by words of four, which they are, whether there are such)."""
    thread = tl.arange(0, THREADS)[:, None, None]
    i = ((block * THREADS + thread) * 2 + tl.arange(0, 2)[None, :, None]) * 4 + tl.arange(0, 4)[None, None, :]
    return tl.load(KEYS + line * N + i, i < N, 0), i, i < N


@triton.jit
def even_and_odd(counts, MASK: tl.constexpr, BITS: tl.constexpr):
    """(counts with even places in a word, those with odd ones): each has twice the bits then."""
    return counts & MASK, (counts >> BITS) & MASK


@triton.jit
def one_each(digit, inside):
    """A word for each digit that counts it once, in four bits for each of sixteen."""
    return tl.where(inside, tl.full(digit.shape, 1, tl.int64) << (digit * 4).to(tl.int64), 0)


@triton.jit
def of_digit(digit, a, b, c, d):
    """A digit's count: in word digit % 4, sixteen bits each."""
    word = tl.where((digit & 2) == 0, tl.where((digit & 1) == 0, a, b), tl.where((digit & 1) == 0, c, d))
    return (word >> (digit >> 2 << 4).to(tl.int64)).to(tl.int32) & 0xFFFF


@triton.jit
def add_words(a0, b0, c0, d0, a1, b1, c1, d1):
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1


@triton.jit
def ranks(digit, inside):
    """Of [threads, 2, 4] digits, how many before each are equal. Sixteen counts lie in one word as long as they are a thread's, and
    in four for threads before."""
    one = one_each(digit, inside)
    words = tl.sum(one, 2)
    # As wide as the digits: a scan of two dimensions would hand its numbers to other threads
    spread = tl.broadcast_to(words[:, :, None], one.shape)
    own = tl.cumsum(one, 2) + (tl.cumsum(spread, 1) - spread)
    a, b, c, d = sixteen_bits(tl.sum(words, 1))
    a1, b1, c1, d1 = tl.associative_scan((a, b, c, d), 0, add_words)
    before = of_digit(
        digit, (a1 - a)[:, None, None], (b1 - b)[:, None, None], (c1 - c)[:, None, None], (d1 - d)[:, None, None]
    )
    return before + ((own >> (digit * 4).to(tl.int64)).to(tl.int32) & 15) - 1


@triton.jit
def sixteen_bits(counts):
    """A word of sixteen counts as four, in which each has sixteen bits: those of digits that are 0, 1, 2, 3 more than a multiple of
    four."""
    even, odd = even_and_odd(counts, 0x0F0F0F0F0F0F0F0F, 4)
    a, c = even_and_odd(even, 0x00FF00FF00FF00FF, 8)
    b, d = even_and_odd(odd, 0x00FF00FF00FF00FF, 8)
    return a, b, c, d


@triton.jit
def counts_of_line(line, BLOCKS):
    """(where the counts of a line's digits begin, how far apart they are: so that each begins at a whole word)."""
    pitch = whole_words(BLOCKS + 15, True)
    return line * 16 * pitch, pitch


PASS = {"grid": lambda a: (a.M * a.BLOCKS,), "tokens": ("M", "N", "BLOCKS", "shift", "flip")}


@kernel(**PASS, default=lambda a: {"num_warps": 4})
def radix_count(KEYS, COUNTS, M, N, BLOCKS, shift, flip, EVEN: tl.constexpr, THREADS: tl.constexpr):
    """COUNTS [M, 16, pitch]: of a block's keys, those with each digit."""
    line = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    key, _, inside = key_tile(KEYS, line, block, whole_words(N, EVEN), THREADS)
    words = sixteen_bits(tl.sum(tl.sum(one_each(digit_of(key, shift, flip), inside), 2), 1))
    a, b, c, d = tl.reduce(words, 0, add_words)
    digit = tl.arange(0, 16)
    first, pitch = counts_of_line(line, BLOCKS)
    tl.store(COUNTS + first + digit * pitch + block, of_digit(digit, a, b, c, d))


@kernel(grid=lambda a: (a.M * a.APART,), tokens=("M", "BLOCKS"), default=lambda a: {"num_warps": a.CHUNK // 512})
def radix_scan(COUNTS, STARTS, TOTALS, M, BLOCKS, APART: tl.constexpr, CHUNK: tl.constexpr):
    """STARTS [M, 16, pitch]: how many keys of a digit come before those of a block; TOTALS [M, 16]: how many it has. A line's
    digits are APART programs'."""
    OWN: tl.constexpr = 16 // APART
    first, pitch = counts_of_line((tl.program_id(0) // APART).to(tl.int64), BLOCKS)
    digit = tl.program_id(0) % APART * OWN + tl.arange(0, OWN)[:, None]
    before = tl.zeros([OWN, 1], tl.int32)
    for start in range(0, BLOCKS, CHUNK // OWN):
        i = start + tl.arange(0, CHUNK // OWN)[None, :]
        count = tl.load(COUNTS + first + digit * pitch + i, i < BLOCKS, 0)
        tl.store(STARTS + first + digit * pitch + i, before + tl.cumsum(count, 1) - count, i < BLOCKS)
        before += tl.sum(count, 1)[:, None]
    tl.store(TOTALS + (tl.program_id(0) // APART).to(tl.int64) * 16 + digit, before)


def move_options(a: Any) -> dict[str, int]:
    """So many registers that five programs share a multiprocessor, where these hold what is needed."""
    fits = a.EVEN and a.KEYS.dtype == torch.int32
    return {"num_warps": a.THREADS // 32, **({"maxnreg": 96} if fits else {})}


@kernel(**PASS, default=move_options)
def radix_move(
    KEYS, ORDER, STARTS, TOTALS, KEYS_OUT, ORDER_OUT, M, N, BLOCKS, shift, flip, EVEN: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Each key to its place among those with its digit. ORDER is None before the first pass: keys are as they came."""
    line = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    N = whole_words(N, EVEN)
    key, which, inside = key_tile(KEYS, line, block, N, THREADS)
    first, pitch = counts_of_line(line, BLOCKS)
    total = tl.load(TOTALS + line * 16 + tl.arange(0, 16))
    start = tl.cumsum(total, 0) - total + tl.load(STARTS + first + tl.arange(0, 16) * pitch + block)
    digit = digit_of(key, shift, flip)
    # Neighbours that have one digit go side by side: they are handed to neighbouring threads first, which write them together
    at = tl.reshape(ranks(digit, inside), [THREADS * 8]) + tl.gather(start, tl.reshape(digit, [THREADS * 8]), 0)
    at = line * N + at.to(tl.int64)
    inside = tl.reshape(inside, [THREADS * 8])
    tl.store(KEYS_OUT + at, tl.reshape(key, [THREADS * 8]), inside)
    if ORDER is not None:
        which = tl.load(ORDER + line * N + which, which < N, 0)
    tl.store(ORDER_OUT + at, tl.reshape(which, [THREADS * 8]), inside)


KEY_BITS = {
    torch.bool: 8, torch.uint8: 12, torch.int8: 8, torch.int16: 16, torch.bfloat16: 16, torch.float16: 16, torch.int32: 32,
    torch.float32: 32, torch.int64: 64, torch.float64: 64,
}  # fmt: skip


def ordered(keys: Tensor, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """(keys in ascending order, which of the line each was): of contiguous int32 or int64 keys [lines, n], of which the lowest
    `bits` tell all. `signed`: the highest of these is a sign."""
    lines, n = keys.shape
    found = own(torch.empty(keys.shape, dtype=keys.dtype, device=keys.device))
    order = own(torch.empty(keys.shape, dtype=torch.int32, device=keys.device))
    if not keys.numel():
        return found, order
    passes = cdiv(max(bits, 1), DIGIT)
    if n <= COUNTED and lines * n * n <= COMPARED * passes:
        block = 256 if keys.dtype == torch.int32 else 128  # as many as registers hold
        plans.launch(order_by_count, (keys, found, order), (lines, n), BLOCK=block)
        return found, order
    blocks, even = cdiv(n, BLOCK), n % WORDS == 0
    apart, chunk = (1, 512) if blocks * DIGITS <= 2048 else (DIGITS, 8192)
    pitch = cdiv(blocks, WORDS) * WORDS
    counts, starts, totals = (
        own(torch.empty((lines, DIGITS, size), dtype=torch.int32, device=keys.device)) for size in (pitch, pitch, 1)
    )
    # The last pass writes what is handed back
    spare = own(torch.empty_like(found)), own(torch.empty_like(order))
    targets = [(found, order) if (passes - at) % 2 else spare for at in range(passes)]
    source: tuple[Tensor, Tensor | None] = keys, None
    for at, target in enumerate(targets):
        shift = at * DIGIT
        flip = 1 << (bits - 1 - shift) if signed and at == passes - 1 else 0
        sizes = lines, n, blocks, shift, flip
        plans.launch(radix_count, (source[0], counts), sizes, EVEN=even, THREADS=BLOCK // 8)
        plans.launch(radix_scan, (counts, starts, totals), (lines, blocks), APART=apart, CHUNK=chunk)
        plans.launch(radix_move, (*source, starts, totals, *target), sizes, EVEN=even, THREADS=BLOCK // 8)
        source = target
    return found, order
