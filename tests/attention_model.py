"""Attention's backward for Hopper without a GPU: the kernel's functions of integers as Python functions, and what the kernel
computes, in torch, from the arguments that it is launched with."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilewright.attention.hopper import backward as hopper
from tilewright.attention.portable import unit_of
from tilewright.attention.tiles import Tile

KEYS = hopper.KEYS.value
LOG2E = 1.4426950408889634
NUMBERS = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, a, b: a if condition else b)


def on_numbers(function: Any) -> Callable:
    """A kernel's function of integers, with those that it calls, as a Python function."""

    def plain(value: Any) -> Any:
        return on_numbers(value) if hasattr(value, "fn") else getattr(value, "value", value)

    code, known = function.fn.__code__, function.fn.__globals__
    return FunctionType(code, {name: plain(known[name]) for name in code.co_names if name in known} | {"tl": NUMBERS})


blocks_of, turn_of, slot_of, is_whole, queries_alone, keys_alone = (
    on_numbers(getattr(hopper, name))
    for name in ("blocks_of", "turn_of", "slot_of", "is_whole", "queries_alone", "keys_alone")
)
order_of = on_numbers(unit_of)


def box(descriptors: tuple, columns: tuple[int, int], b: int, h: int, row: int, rows: int) -> Tensor:
    """What bulk copies bring of both parts: 0 outside of the tensor, whatever is there inside of it."""
    whole = descriptors[0].base[b, h]
    made = torch.zeros(rows, sum(columns), dtype=torch.float32)
    there = whole[row : row + rows].float()
    made[: there.shape[0], : there.shape[1]] = there
    return made


def as_threads_hold(panel: Tensor) -> Tensor:
    """A panel of dq in the order in which it is added to memory."""
    return panel.reshape(4, 2, 8, -1, 4, 2).permute(0, 3, 2, 4, 1, 5).flatten()


def count_of(LENGTHS: Any, tile: Tile) -> int:
    if LENGTHS.kv_len is None:
        return tile.count_k
    given = int(LENGTHS.kv_len[tile.sequence]) if tile.sequence >= 0 else 0
    return 0 if given > tile.count_k else max(given, 0)


def play_backward(
    Q, Q1, K, K1, V, V1, DO, DO1, LINES, DQ, DK, DV, COUNTER, TURN, SCORES, WINDOW, LENGTHS, L, KEYS_IN_ALL, KV_HEADS, GROUP,
    BATCH, TILES, SLOTS, PROGRAMS, SHAPE, TOGETHER,
) -> None:  # fmt: skip
    """`attention_backward_hopper`, unit after unit: what it reads, clears, masks, rounds and adds, and in that order."""
    D, V_, n = (SHAPE.D0, SHAPE.D1), (SHAPE.V0, SHAPE.V1), SHAPE.QUERIES
    rounded = lambda t: t.to(Q.base.dtype).float()  # noqa: E731
    assert int(COUNTER) == 0
    for unit in range(TILES * KV_HEADS * BATCH):
        index, kv_head, batch = order_of(unit, TILES, KV_HEADS, BATCH, TOGETHER, False)
        if LENGTHS.table is None:
            tile = Tile(batch, 0, L, 0, KEYS_IN_ALL, index * KEYS)
        else:
            tile = Tile(*LENGTHS.table[index, :6].tolist())
        count = count_of(LENGTHS, tile)
        first, blocks = blocks_of(WINDOW, tile, count, n)
        k = box((K, K1), D, batch, kv_head, tile.first_k + tile.start, KEYS)
        v = box((V, V1), V_, batch, kv_head, tile.first_k + tile.start, KEYS)
        j = tile.start + torch.arange(KEYS)[:, None]
        k[((j < keys_alone(WINDOW, tile, count)) | (j >= count))[:, 0]] = 0.0
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for block in range(first + blocks - 1, first - 1, -1):
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                m = block * n
                place = (batch * KV_HEADS * GROUP + head) * SLOTS + slot_of(LENGTHS, tile, n) + block
                lse, delta, position, last = LINES.base[place]
                position, last = (t.view(torch.int32)[None, :] for t in (position, last))
                q = box((Q, Q1), D, batch, head, tile.first_q + m, n)
                do = box((DO, DO1), V_, batch, head, tile.first_q + m, n)
                if m < queries_alone(WINDOW, tile, count) or m + n > tile.count_q:
                    q[last[0] < 0], do[last[0] < 0] = 0.0, 0.0
                s, slope = k @ q.T * SCORES.scale, 1.0
                if SCORES.softcap is not None:
                    bent = torch.tanh(s / SCORES.softcap)
                    s, slope = SCORES.softcap * bent, 1.0 - bent * bent
                if SCORES.slopes is not None:
                    s = s - float(SCORES.slopes[head]) * (position - j).abs()
                seen = torch.ones(KEYS, n, dtype=torch.bool)
                if not is_whole(WINDOW, tile, count, m, n):
                    seen = j <= last
                    if WINDOW.left is not None:
                        seen &= j >= position - WINDOW.left
                p = torch.where(seen, torch.exp2(s * LOG2E - lse), 0.0)
                dv += rounded(p) @ do
                w = p * slope
                ds = (rounded(w) if SHAPE.ROUNDS else w) * (v @ do.T - delta)
                ds = rounded(torch.where(seen, ds, 0.0))
                dk += ds @ q
                dq, mine = ds.T @ k, turn_of(WINDOW, tile, count, m, n)
                assert int(TURN[place]) == mine
                TURN[place] = mine + 1
                parts = dq.split(64, 0) if n == 128 else dq.split(64, 1)
                made = torch.cat([as_threads_hold(part) for part in parts])
                DQ[place] = made if mine == 0 else DQ[place] + made
        at = slice(tile.first_k + tile.start, tile.first_k + min(tile.start + KEYS, tile.count_k))
        rows = max(0, at.stop - at.start)
        DK.data[batch, at, kv_head] = (dk * SCORES.scale)[:rows, : SHAPE.D].to(DK.data.dtype)
        DV.data[batch, at, kv_head] = dv[:rows, : SHAPE.V].to(DV.data.dtype)
