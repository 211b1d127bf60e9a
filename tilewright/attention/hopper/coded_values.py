"""Values as codes for `coded.py`: how they lie in memory, and how weights become codes that are multiplied with them.

    o = sum over blocks of by_block * (codes(p * scale_v / by_block) . code_v)

Products of 8-bit codes on Hopper take both factors with what is summed over side by side. So the codes of values are turned before,
to [columns, keys], in blocks of keys that are one sequence's own. What no query of the sequence sees is 0 there, codes and scales:
neither a NaN in it nor its size reaches a sum. The scales of a block are divided by a power of two, which brings the largest near
the largest code, and which sums over the block are multiplied with.

Weights are relative to the largest score of their row in the block, and their sums over a block are added, in registers, to those
of the blocks before: products of e4m3 keep about 14 bits of the largest that they have added up, too few for thousands of keys.

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
from ...core.triton_versions import async_load, gl, gluon, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from ...device.quantize import PACK_E4M3
from ...runtime.kernel import kernel
from ..coded_rows import load_codes, load_scale
from ..portable import heads_of
from ..tiles import Window, keys_of, keys_seen, lengths, tile_at

LARGEST = tl.constexpr(128.0)  # scales of a block, divided, are below twice this, and e4m3 goes to 448
LEAST = tl.constexpr(2.0**-100)  # of the power of two: quotients are numbers then
EXPONENT = tl.constexpr(0x7F800000)
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
    V, S, T, N, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, BLOCKS, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """T [batch, HEADS, COLUMNS, BLOCKS * BLOCK]: bytes V of a block's keys, turned, 16 keys at a time in the order of products. N
    [batch, HEADS, BLOCKS, 2, BLOCK]: their scales S, divided, and below them what they are divided by."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    tile = tile_at(LENGTHS, tl.program_id(0), batch, L, KEYS, BLOCK)
    if tile.sequence >= 0:
        count, _ = keys_of(LENGTHS, tile)
        start, stop, _, _ = keys_seen(WINDOW, count - tile.count_q, count, 0, tile.count_q - 1)
        place = tl.arange(0, BLOCK)
        key = tile.start + (place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2)
        seen = (key >= start) & (key < stop)
        codes = load_codes(V, batch, head, tile.first_k + key, seen, COLUMNS, 0, COLUMNS)
        s = load_scale(S, batch, head, tile.first_k + key, seen)
        some = tl.max(codes & 0x7F, 1) > 0  # rows of 0 may have any scale
        largest = tl.max(tl.where(some & (s == s), tl.abs(s), 0.0), 0)
        by = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        by = tl.maximum(by, LEAST) * (1.0 / LARGEST)
        block = first_block(LENGTHS, tile, BLOCK) + tile.start // BLOCK
        unit = batch.to(tl.int64) * HEADS + head
        column = tl.arange(0, COLUMNS)
        at = (unit * COLUMNS + column)[:, None] * (BLOCKS * BLOCK) + (block * BLOCK + place)[None, :]
        tl.store(T + at, tl.trans(codes))
        key = tile.start + place
        s = load_scale(S, batch, head, tile.first_k + key, (key >= start) & (key < stop))
        s = tl.div_rn(s, tl.zeros_like(s) + by)
        at = (unit * BLOCKS + block) * (2 * BLOCK) + place
        tl.store(N + at, tl.where(tl.abs(s) > 2.0 * LARGEST, 2.0 * LARGEST, s))
        tl.store(N + at + BLOCK, tl.zeros_like(s) + by)


def blocks_of(keys: int, marks: Tensor | None, block: int) -> int:
    """How many blocks there is room for: of packed sequences one more for each mark, since each begins a block."""
    return cdiv(keys, block) + (0 if marks is None else marks.shape[0])


def turned(
    v: Tensor, v_scale: Tensor, window: Window, length: int, kv_len: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codes [batch, heads, columns, keys of all blocks], scales [batch, heads, 1, twice as many])."""
    batch, keys, heads, columns = v.shape
    blocks = blocks_of(keys, cu_seqlens_k, block)
    codes = torch.empty(batch, heads, columns, blocks * block, dtype=v.dtype, device=v.device)
    scales = torch.empty(batch, heads, 1, blocks * 2 * block, dtype=torch.float32, device=v.device)
    how, tiles = lengths(cu_seqlens_k, cu_seqlens_q, keys, length, kv_len, block, True)
    attention_values_turned(
        heads_of(v.view(torch.uint8)), heads_of(v_scale.unsqueeze(-1)), codes.view(torch.uint8), scales, window, how, length,
        keys, heads, batch, tiles, blocks, COLUMNS=columns, BLOCK=block,
    )  # fmt: skip
    return codes, scales


# ---- multiplied ------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_turned(V, S, ring, scales, stage, phase, batch, head, at):
    """Copy a block of turned values, which begins at place `at`, and its scales into a stage when it is empty."""
    mbarrier.wait(ring.empty.index(stage), phase)
    ready = ring.full.index(stage)
    mbarrier.expect(ready, V.block_type.nbytes + S.block_type.nbytes)
    async_load(V, [batch, head, 0, at], ready, ring.first.index(stage))
    async_load(S, [batch, head, 0, 2 * at], ready, scales.index(stage))


@gluon.jit
def divided_at(boxes, at, SHAPED: gl.constexpr):
    """Of a block of values: its keys' scales, [1, keys], and what they are divided by, a number for each of 64 rows."""
    KEYS: gl.constexpr = boxes.shape[4] // 2
    LAID: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_key = reinterpret(boxes.index(at), gl.float32, [2, KEYS], LAID).index(0).load(gl.SliceLayout(0, SHAPED))
    by_block = reinterpret(boxes.index(at), gl.float32, [KEYS // 32, 64], LAID).index(KEYS // 64)
    return gl.expand_dims(by_key, 0), by_block.load(gl.SliceLayout(1, SHAPED))


@gluon.jit
def weights_as_codes(w, SUMS: gl.constexpr):
    """Weights [64, keys], times the scales of their values, as codes that products with turned values take: keys in their order,
    which moves nothing between threads."""
    KEYS: gl.constexpr = w.shape[1]
    TAKEN: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    w = w.reshape([64, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, KEYS])
    return gl.inline_asm_elementwise(PACK_E4M3, "=r,r,r,r,r", [gl.convert_layout(w, TAKEN)], gl.float8e4nv, False, 4)


@gluon.jit
def add_values(o, fade, codes, by, values, into):
    """(o * fade + by * (codes @ values), registers that nobody needs any more). `into` is what the product is made of, whatever it
    held. o is faded while the product goes on."""
    SUMS: gl.constexpr = o.type.layout
    sums = warpgroup_mma(codes, values, into, use_acc=False, is_async=True)
    o = o * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUMS)), 1)
    o, sums = warpgroup_mma_wait(0, deps=(o, sums))
    o += sums * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, SUMS)), 1)
    # For no product: so that sums are added here, and not after the next product is issued into their registers
    return warpgroup_mma_wait(0, deps=(o, sums))
