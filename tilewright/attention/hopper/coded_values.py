"""Values as codes for `coded.py`: how they lie in memory, and how weights become codes that are multiplied with them.

    o = 2^exponent * sum of codes(p * scale_v / 2^exponent) . code_v

Products of 8-bit codes on Hopper take both factors with what is summed over side by side. So the codes of values are turned before,
to [columns, keys], in blocks of keys that are one sequence's own. What no query of the sequence sees is 0 there, codes and scales:
neither a NaN in it nor its size reaches a sum. The scales of a block are divided by a power of two, so that the largest is 1/2 to
1, and weights are 2^RAISED times as large, where codes have room above and below. If the block has one scale, that is the divisor:
nothing is left to multiply weights with.

Sums of a row are held divided by 2^exponent, so that the weights of a block, times its scales, are codes near the largest: however
low the scores of the block are, or however small its values, beside those before. The exponent that a block asks for is its largest
score and the logarithm of what its scales are divided by. It stays what it is while that is a little above or below, and is never
so far below the highest that sums overflow.

Tensor cores keep about 14 bits of the largest of what they add up, and cut off the rest of each product: where products have one
sign, a sum of thousands is too small by several per cent. So sums of a few blocks are set aside, in shared memory, and added up in
fp32. By a model of that in float64, at 16384 keys, scores and values of standard deviation 1 and values of mean 3, the error of o
is 25 % if nothing is set aside, 3.5 % with 16 blocks together and 0.1 % with 1. With 8 it was 1.5 % on an H200.

A thread's weights go to the tensor cores from the registers that it has them in. Of 16 keys it has two and, eight further on, two;
of the factor it gives four that lie side by side. So the keys of turned codes stand in that order: 0 1 8 9, 2 3 10 11, 4 5 12 13,
6 7 14 15. Nothing else knows of it, for a sum has one order in both of its factors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.tensor import cdiv
from ...core.triton_versions import async_load, gl, gluon, mbarrier, reinterpret
from ...runtime.kernel import kernel
from ..coded_rows import load_scale
from ..portable import heads_of, load_part
from ..tiles import Window, keys_of, keys_seen, lengths, tile_at

RAISED = tl.constexpr(6.0)  # the power of two that the largest weight of a block is, if sums have the block's exponent
ABOVE = tl.constexpr(2.0)  # how far a block's exponent may be above that of sums: codes are up to 256 then, of 448
BELOW = tl.constexpr(4.0)  # and how far below
FURTHEST = tl.constexpr(40.0)  # how far the exponent of sums may be below the highest
VANISHED = tl.constexpr(60.0)  # weights of 2^-54 are 0 as codes, and no less than numbers as parts of a row's sum
LEAST = tl.constexpr(2.0**-100)  # of the power of two: quotients are numbers then
EXPONENT = tl.constexpr(0x7F800000)
# Of sums set aside: what eight threads of a column have, in pairs, lies in eight different places of 32 bytes
ASIDE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
WORDS = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $5, $4; cvt.rn.satfinite.e4m3x2.f32 hi, $7, $6;"
    " mov.b32 $0, {lo, hi}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }"
)
MOST_EMPTY = 2**16  # keys that packed sequences may leave room for, beside as many as there are


# ---- turned ----------------------------------------------------------------------------------------------------------


@triton.jit
def first_block(LENGTHS, tile, BLOCK: tl.constexpr):
    """The block that a sequence's turned values begin with. Of packed ones the first key says it, and how many come before: two
    never share a block, and none is told where another ends."""
    if LENGTHS.table is None:
        return 0
    else:
        return tile.first_k // BLOCK + tile.sequence


@kernel(
    grid=lambda a: (a.TILES, a.HEADS, a.BATCH), tokens=("L", "KEYS", "HEADS", "BATCH", "TILES", "BLOCKS"),
    default=lambda a: {"num_warps": 4},
)  # fmt: skip
def attention_values_turned(
    V, S, T, N, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, BLOCKS, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):  # fmt: skip
    """T [batch, HEADS, COLUMNS, BLOCKS * BLOCK]: bytes V of a block's keys, turned, 16 keys at a time in the order of products. N
    [batch, HEADS, BLOCKS, 2, BLOCK]: their scales S, divided, and below them the logarithm of what they are divided by, for weights
    that are 2^RAISED times as large. BY_BLOCK: N [batch, HEADS, BLOCKS], that logarithm alone, -inf where all codes are 0."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    tile = tile_at(LENGTHS, tl.program_id(0), batch, L, KEYS, BLOCK)
    if tile.sequence >= 0:
        count, _ = keys_of(LENGTHS, tile)
        start, stop, _, _ = keys_seen(WINDOW, count - tile.count_q, count, 0, tile.count_q - 1)
        place = tl.arange(0, BLOCK)
        key = tile.start + (place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2)
        seen = (key >= start) & (key < stop)
        codes = load_part(V, batch, head, tile.first_k + key, seen, COLUMNS, 0, COLUMNS)
        s = load_scale(S, batch, head, tile.first_k, key, seen, BLOCK if BY_BLOCK else 1)
        some = tl.max(codes & 0x7F, 1) > 0  # rows of 0 may have any scale
        if BY_BLOCK:
            codes = tl.where((s != s)[:, None], 0x7F, codes).to(tl.uint8)  # which a logarithm would not tell
        block = first_block(LENGTHS, tile, BLOCK) + tile.start // BLOCK
        unit = batch.to(tl.int64) * HEADS + head
        column = tl.arange(0, COLUMNS)
        at = (unit * COLUMNS + column)[:, None] * (BLOCKS * BLOCK) + (block * BLOCK + place)[None, :]
        tl.store(T + at, tl.trans(codes))
        largest = tl.max(tl.where(some & (s == s), tl.abs(s), 0.0), 0)
        if BY_BLOCK:
            log_by = tl.where(largest > 0.0, tl.log2(tl.where(largest > 0.0, largest, 1.0)), float("-inf"))
            tl.store(N + unit * BLOCKS + block, log_by - RAISED)
        else:
            by = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            by = tl.maximum(by, LEAST) * 2.0
            key = tile.start + place
            s = load_scale(S, batch, head, tile.first_k, key, (key >= start) & (key < stop))
            s = tl.div_rn(s, tl.zeros_like(s) + by)
            at = (unit * BLOCKS + block) * (2 * BLOCK) + place
            tl.store(N + at, tl.where(tl.abs(s) > 1.0, 1.0, s))
            log_by = ((by.to(tl.int32, bitcast=True) & EXPONENT) >> 23) - 127
            tl.store(N + at + BLOCK, tl.zeros_like(s) + (log_by.to(tl.float32) - RAISED))


def blocks_of(keys: int, marks: Tensor | None, block: int) -> int:
    """How many blocks there is room for: of packed sequences one more for each mark, since each begins a block."""
    return cdiv(keys, block) + (0 if marks is None else marks.shape[0])


def turned(
    v: Tensor, v_scale: Tensor, window: Window, length: int, kv_len: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, block: int, by_block: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codes [batch, heads, columns, keys of all blocks], scales [batch, heads, 1, twice as many]). `by_block`: for each block its
    scale's logarithm."""
    batch, keys, heads, columns = v.shape
    blocks = blocks_of(keys, cu_seqlens_k, block)
    codes = torch.empty(batch, heads, columns, blocks * block, dtype=v.dtype, device=v.device)
    numbers = blocks * (1 if by_block else 2 * block)
    scales = torch.empty(batch, heads, 1, numbers, dtype=torch.float32, device=v.device)
    how, tiles = lengths(cu_seqlens_k, cu_seqlens_q, keys, length, kv_len, block, True)
    attention_values_turned(
        heads_of(v.view(torch.uint8)), heads_of(v_scale.unsqueeze(-1)), codes.view(torch.uint8), scales, window, how, length,
        keys, heads, batch, tiles, blocks, COLUMNS=columns, BLOCK=block, BY_BLOCK=by_block,
    )  # fmt: skip
    return codes, scales


# ---- multiplied ------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_turned(V, S, ring, scales, stage, phase, batch, head, at, BY_BLOCK: gl.constexpr):
    """Copy a block of turned values, which begins at place `at`, and its scales, if each has one, into a stage when it is empty."""
    mbarrier.wait(ring.empty.index(stage), phase)
    ready = ring.full.index(stage)
    if BY_BLOCK:
        mbarrier.expect(ready, V.block_type.nbytes)
    else:
        mbarrier.expect(ready, V.block_type.nbytes + S.block_type.nbytes)
        async_load(S, [batch, head, 0, 2 * at], ready, scales.index(stage))
    async_load(V, [batch, head, 0, at], ready, ring.first.index(stage))


@gluon.jit
def divided_at(boxes, at, SHAPED: gl.constexpr):
    """The scales of a block of values, divided, [1, keys]."""
    KEYS: gl.constexpr = boxes.shape[4] // 2
    LAID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_key = reinterpret(boxes.index(at), gl.float32, [2, KEYS], LAID).index(0)
    return gl.expand_dims(by_key.load(gl.SliceLayout(0, SHAPED)), 0)


@gluon.jit
def log_divisor_at(boxes, at, SHAPED: gl.constexpr):
    """The logarithm of what they are divided by, a number for each of 64 rows."""
    KEYS: gl.constexpr = boxes.shape[4] // 2
    LAID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_block = reinterpret(boxes.index(at), gl.float32, [KEYS // 32, 64], LAID).index(KEYS // 64)
    return by_block.load(gl.SliceLayout(1, SHAPED))


@gluon.jit
def weights_as_words(w, SUMS: gl.constexpr):
    """Weights [64, keys], times the scales of their values, as codes that products with turned values take: keys in their order,
    which moves nothing between threads. Four codes are a word, in the place of the first; the others' places hold nothing.

    Words, and not codes, go around the loop: the compiler takes codes apart there, and puts them together again."""
    KEYS: gl.constexpr = w.shape[1]
    TAKEN: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    w = w.reshape([64, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, KEYS])
    return gl.inline_asm_elementwise(WORDS, "=r,=r,=r,=r,r,r,r,r", [gl.convert_layout(w, TAKEN)], gl.float32, False, 4)


@gluon.jit
def codes_of_words(words):
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], gl.float8e4nv, False, 4)


@gluon.jit
def next_exponent(largest, log_by, exponent, highest, LAZY: gl.constexpr):
    """(the exponent of sums from here on, what those before are to be multiplied with, the highest exponent that a block asked for,
    how far below 1 the largest weight of the block is to be, as an exponent) of each row. `largest`: its largest score in the
    block, -inf if it sees none; `log_by`: the logarithm of what scales of values are divided by, less RAISED, -inf if all values
    are 0. LAZY: it stays while it can."""
    own = largest + log_by
    highest = gl.maximum(highest, own)
    wanted = gl.maximum(own, highest - FURTHEST)
    stays = own == float("-inf")
    if LAZY:
        stays = stays | ((own <= exponent + ABOVE) & (own >= exponent - BELOW))
    wanted = gl.where(stays, exponent, wanted)
    fade = gl.exp2(gl.where(stays, 0.0, exponent - wanted))
    below = wanted - own
    return wanted, fade, highest, gl.where(below < VANISHED, below, VANISHED) - RAISED


@gluon.jit
def set_aside(sums, aside):
    """Write sums where the same threads read them again."""
    aside.store(sums)


@gluon.jit
def with_aside(o, aside, was, exponent):
    """o and the sums that were set aside, whose exponent `was` another, -inf of none."""
    SUMS: gl.constexpr = o.type.layout
    fade = gl.where(was == float("-inf"), 0.0, gl.exp2(was - exponent))
    return o + aside.load(SUMS) * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
