"""Choosing the largest of a row by integer keys that order as the numbers do, ties to the lower index.

Tiles are [rows, 1, columns]; columns that stand in groups follow each other group by group. They are loaded so, for then the
lanes that share a row are neighbours however it is split. If groups were a dimension of the load, and joined afterwards, they
might not be, which reductions before Triton 3.7 take them to be (`docs/measured.md`, the compiler).

A NaN is above all numbers, as in torch's sort, and -0 is 0. Two codes lie below every number's key: TAKEN, of what was chosen
already, and OUT, of what cannot be.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**31))
OUT = tl.constexpr(-(2**31) + 1)
BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(v):
    """The key of fp32 numbers."""
    bits = tl.where(v == 0.0, 0, v.to(tl.int32, bitcast=True))
    return tl.where(v != v, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number_of(key):
    """The number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(key, index, AXIS: tl.constexpr):
    """(largest key, lowest index that has it) along an axis, which stays. Two integer reductions, for each is one instruction
    where a row lies in a warp; one of pairs would be ten shuffles."""
    best = tl.max(key, AXIS, keep_dims=True)
    return best, tl.min(tl.where(key == best, index, BEYOND), AXIS, keep_dims=True)


@triton.jit
def keep_groups(key, PLACES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr):
    """`key` with all but KEPT groups of PLACES columns OUT: those whose BEST largest numbers have the largest sums."""
    BLOCK: tl.constexpr = key.shape[2] // PLACES
    group = tl.arange(0, BLOCK)[None, :, None]
    place = tl.arange(0, PLACES)[None, None, :]
    parts = tl.reshape(key, [key.shape[0], BLOCK, PLACES])
    left = parts
    sums = tl.zeros([key.shape[0], BLOCK, 1], tl.float32)
    for _ in range(BEST):
        best, at = first_largest(left, place, 2)
        sums += number_of(best)
        left = tl.where(place == at, TAKEN, left)
    rank = tl.where(group < GROUPS, key_of(sums), OUT)
    for _ in range(KEPT):
        _, at = first_largest(rank, group, 1)
        rank = tl.where(group == at, TAKEN, rank)
    return tl.reshape(tl.where(rank == TAKEN, parts, OUT), key.shape)


@triton.jit
def choose(key, e, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Indices of the K largest of each row in falling order, [rows, COLUMNS]; -1 after the last that is not OUT."""
    col = tl.arange(0, COLUMNS)[None, None, :]
    chosen = tl.full([key.shape[0], 1, COLUMNS], -1, tl.int32)
    for j in range(K):
        best, at = first_largest(key, e, 2)
        key = tl.where(e == at, TAKEN, key)
        chosen = tl.where((col == j) & (best > OUT), at, chosen)
    return tl.reshape(chosen, [key.shape[0], COLUMNS])


@triton.jit
def spread(chosen, value, col, e, K: tl.constexpr):
    """(values [rows, columns] summed at their indices [rows, indices], which of those there were); an index that is no column of
    the result is dropped."""
    out = tl.zeros([chosen.shape[0], e.shape[1]], tl.float32)
    found = tl.zeros([chosen.shape[0], e.shape[1]], tl.int32)  # as truth values they would be packed bit by bit
    bits = value.to(tl.int32, bitcast=True)
    for j in range(K):
        at = tl.max(tl.where(col == j, chosen, -1), 1, keep_dims=True)
        v = tl.max(tl.where(col == j, bits, TAKEN), 1, keep_dims=True).to(tl.float32, bitcast=True)
        out += tl.where(e == at, v, 0.0)
        found = tl.where(e == at, 1, found)
    return out, found
