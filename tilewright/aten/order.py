"""Lines of integer keys put in ascending order, equal ones as they came: what sorting and adding by index stand on.

Short lines are ordered by counting: a key's place is the number of those that come before it. Others take a pass for each digit of
four bits, the lowest first. Of a pass, blocks count their digits, a launch finds where the keys of each digit and block begin, and
blocks move their keys there. Sixteen counts lie in four words, each of which is summed or scanned as one number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .plans import own

COUNTED = 32768  # keys of a line to which counting is taken, whose work grows with the square
COMPARED = 1 << 26  # comparisons of all that take about as long as the three launches of a pass (not measured)
DIGIT = 4  # bits
DIGITS = 1 << DIGIT
BLOCK = 1024  # keys that are moved together; fewer than 2**16, which a count holds


@kernel(grid=lambda a: (a.M * cdiv(a.N, a.OWN),), tokens=("M", "N"), default=lambda a: {"OWN": 16, "num_warps": 4})
def order_by_count(KEYS, SORTED, ORDER, M, N, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """M lines of N keys. BLOCK is a multiple of OWN: of equal keys, those of whole blocks before count, those of blocks after do
    not, and those of one block are left, which comes last."""
    across = tl.cdiv(N, OWN)
    line = (tl.program_id(0) // across).to(tl.int64) * N
    first = tl.program_id(0) % across * OWN
    t = first + tl.arange(0, OWN)[:, None]
    mine = tl.load(KEYS + line + t, t < N, 0)
    before = tl.zeros([OWN, BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        u = start + tl.arange(0, BLOCK)[None, :]
        other = tl.load(KEYS + line + u, u < N, 0)
        less = (other < mine) | ((other == mine) & (start + BLOCK <= first))
        before += (less & (u < N)).to(tl.int32)
    u = first // BLOCK * BLOCK + tl.arange(0, BLOCK)[None, :]
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
def digit_of(key, shift, flip):
    """Four bits of a key, from `shift` on. `flip` turns the highest digit's sign, so that negative keys come first."""
    return ((key >> shift).to(tl.int32) & 15) ^ flip


@triton.jit
def counted(digit, inside):
    """[4, n] of words with one count each: a digit's is in word digit / 4, sixteen bits for each of four."""
    word = tl.arange(0, 4)[:, None]
    one = tl.full(digit.shape, 1, tl.int64) << ((digit & 3) * 16).to(tl.int64)
    return tl.where((word == (digit >> 2)[None, :]) & inside[None, :], one[None, :], 0)


PASS = {
    "grid": lambda a: (a.M * a.BLOCKS,),
    "tokens": ("M", "N", "BLOCKS", "shift", "flip"),
    "default": lambda a: {"num_warps": 4},
}


@kernel(**PASS)
def radix_count(KEYS, COUNTS, M, N, BLOCKS, shift, flip, BLOCK: tl.constexpr):
    """COUNTS [M, 16, BLOCKS]: of a block's keys, those with each digit."""
    line = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    i = block * BLOCK + tl.arange(0, BLOCK)
    digit = digit_of(tl.load(KEYS + line * N + i, i < N, 0), shift, flip)
    words = tl.sum(counted(digit, i < N), 1)
    part = tl.arange(0, 4)[None, :]
    count = (words[:, None] >> (part * 16).to(tl.int64)) & 0xFFFF
    which = tl.arange(0, 4)[:, None] * 4 + part
    tl.store(COUNTS + (line * 16 + which) * BLOCKS + block, count.to(tl.int32))


@kernel(grid=lambda a: (a.M * 16,), tokens=("M", "BLOCKS"), default=lambda a: {"BLOCK": 1024, "num_warps": 4})
def radix_scan(COUNTS, STARTS, M, BLOCKS, BLOCK: tl.constexpr):
    """STARTS [M, 16, BLOCKS]: how many keys of a line come before those of a digit and block."""
    line = (tl.program_id(0) // 16).to(tl.int64) * 16 * BLOCKS
    first = (tl.program_id(0) % 16) * BLOCKS
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, first, BLOCK):
        i = start + tl.arange(0, BLOCK)
        lower += tl.load(COUNTS + line + i, i < first, 0)
    before = tl.sum(lower, 0)
    for start in range(first, first + BLOCKS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        count = tl.load(COUNTS + line + i, i < first + BLOCKS, 0)
        tl.store(STARTS + line + i, before + tl.cumsum(count, 0) - count, i < first + BLOCKS)
        before += tl.sum(count, 0)


@kernel(**PASS)
def radix_move(KEYS, ORDER, STARTS, KEYS_OUT, ORDER_OUT, M, N, BLOCKS, shift, flip, BLOCK: tl.constexpr):
    """Each key to its place among those with its digit. ORDER is None before the first pass: keys are as they came."""
    line = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    key = tl.load(KEYS + line * N + i, inside, 0)
    which = i
    if ORDER is not None:
        which = tl.load(ORDER + line * N + i, inside, 0)
    digit = digit_of(key, shift, flip)
    words = tl.cumsum(counted(digit, inside), 1)
    mine = tl.sum(tl.where(tl.arange(0, 4)[:, None] == (digit >> 2)[None, :], words, 0), 0)
    rank = ((mine >> ((digit & 3) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32) - 1
    at = line * N + tl.load(STARTS + (line * 16 + digit) * BLOCKS + block, inside, 0) + rank
    tl.store(KEYS_OUT + at, key, inside)
    tl.store(ORDER_OUT + at, which, inside)


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
    blocks = cdiv(n, BLOCK)
    counts, starts = (
        own(torch.empty((lines, DIGITS, blocks), dtype=torch.int32, device=keys.device)) for _ in range(2)
    )
    # The last pass writes what is handed back
    spare = own(torch.empty_like(found)), own(torch.empty_like(order))
    targets = [(found, order) if (passes - at) % 2 else spare for at in range(passes)]
    source: tuple[Tensor, Tensor | None] = keys, None
    for at, target in enumerate(targets):
        shift = at * DIGIT
        flip = 1 << (bits - 1 - shift) if signed and at == passes - 1 else 0
        sizes = lines, n, blocks, shift, flip
        plans.launch(radix_count, (source[0], counts), sizes, BLOCK=BLOCK)
        plans.launch(radix_scan, (counts, starts), (lines, blocks))
        plans.launch(radix_move, (*source, starts, *target), sizes, BLOCK=BLOCK)
        source = target
    return found, order
