"""Chunks of rows in another order, as an all-to-all between experts needs them: chunk i of the result is chunk order[i] of x.

Chunk c of x are the `sizes[c]` rows after those of the chunks before it. With first rows s_c in x and t_i in the result, row r
of chunk i of the result is row r + s_order[i] - t_i of x; backward: row r of chunk c of dx is row r + t_i - s_c of dy, where
order[i] = c.

Two launches, and everything stays on the device: the first, one program, finds the end of each chunk and the shift of its rows,
in both directions; in the second, programs have equally many rows of the result and look up the chunk of each.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...core.debug import can_read
from ...core.draw import Draw
from ...core.target import Target
from ...core.tensor import BITS, cdiv, power_of_two
from ...op import Bars, Gradient, Op, Out, Triton
from ...runtime.kernel import kernel


def reference(x: Tensor, sizes: Tensor, order: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(rows [rows, hidden], row_probs [rows]): the chunks of `x`, of `sizes` rows each, in the order `order`.

    `order`, a permutation of the chunks, has for each chunk of the result its number in `x`, whose elements are of any type of
    up to 8 bytes. `probs` has a number for each row, which goes with it (without it `row_probs` is 1, fp32). Where `sizes` add
    up to less than the rows of `x`, the last rows of the result and their numbers are 0. Sizes below 0 count as 0, rows that
    `x` has not as none, and an entry of `order` that is no chunk, or one named before, as a chunk of no rows. Scales of FP8 codes,
    [blocks, rows], move as `scale.t()` in a call of their own.
    """
    source = source_rows(sizes, order, x.shape[0])
    live = source < x.shape[0]
    at = torch.where(live, source, 0)
    codes = x.element_size() == 1  # torch selects among no float8
    rows = x.view(torch.uint8) if codes else x
    rows = torch.where(live[:, None], rows[at], rows.new_zeros(()))
    weights = torch.ones(at.shape, device=x.device) if probs is None else probs[at]
    return rows.view(x.dtype) if codes else rows, torch.where(live, weights, weights.new_zeros(()))


def source_rows(sizes: Tensor, order: Tensor, count: int) -> Tensor:
    """The row of x of each of `count` rows of the result, `count` for none."""
    chunks, device = sizes.shape[0], sizes.device
    ends = sizes.to(torch.int64).clamp(0, count).cumsum(0).clamp(max=count)
    starts = F.pad(ends, (1, 0))  # one more than there are chunks: that which is none has no rows
    ends = torch.cat([ends, starts[-1:]])
    place = torch.arange(chunks, device=device)
    chunk = torch.where((order >= 0) & (order < chunks), order, chunks).to(torch.int64)
    first = torch.full((chunks + 1,), chunks, dtype=torch.int64, device=device).scatter_reduce(0, chunk, place, "amin")
    chunk = torch.where(first[chunk] == place, chunk, chunks)
    length = (ends - starts)[chunk]
    until = length.cumsum(0)
    row = torch.arange(count, device=device)
    i = torch.searchsorted(until, row, right=True)
    shift = F.pad(starts[chunk] - (until - length), (0, 1), value=0)
    return torch.where(i < chunks, row + shift[i], count)


def inputs(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    ends = draw.ends(tokens)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    sizes = sizes // 2 if draw.option("short", False, True) else sizes
    order = draw.uniform(ends.shape[0], dtype=torch.float32).argsort().to(ends.dtype)
    probs = draw.maybe("probs", lambda: draw.uniform(tokens, low=0.1, dtype=torch.float32))
    codes = probs is None and draw.option("codes", False, True)
    x = draw.integers(tokens, hidden, high=256, dtype=torch.uint8) if codes else draw.tensor(tokens, hidden)
    return {"x": x, "sizes": sizes, "order": order, "probs": probs}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    grid=lambda a: (1,), tokens=("T", "C"), default=lambda a: {"BLOCK": 128 if a.C <= 128 else 1024, "num_warps": 4}
)
def chunk_table(
    SIZES, ORDER, PLACE, ENDS, SHIFTS, BACK_ENDS, BACK_SHIFTS, T, C, stride_s, stride_o, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Ends [C] and shifts [C] of the chunks of the result and, BACK, of those of x. A shift of T leads to no row. PLACE is room for
    the place of each chunk of x in the result: of two that name it the first has it, whichever comes first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    last = tl.full([1], 0, tl.int64)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        size = tl.load(SIZES + c.to(tl.int64) * stride_s, c < C, 0).to(tl.int64)
        size = tl.minimum(tl.maximum(size, 0), T)
        tl.store(BACK_ENDS + c, tl.minimum(last + tl.cumsum(size, 0), T), c < C)
        tl.store(BACK_SHIFTS + c, tl.zeros([BLOCK], tl.int64) + T, c < C)
        tl.store(PLACE + c, tl.zeros([BLOCK], tl.int32) + C, c < C)
        last += tl.sum(size, 0)
    tl.debug_barrier()
    for start in range(0, C, BLOCK):
        i = start + tl.arange(0, BLOCK)
        c = tl.load(ORDER + i.to(tl.int64) * stride_o, i < C, -1).to(tl.int64)
        named = (c >= 0) & (c < C)
        tl.atomic_min(PLACE + tl.where(named, c, 0), i, named, sem="relaxed")
    tl.debug_barrier()
    last = tl.full([1], 0, tl.int64)
    for start in range(0, C, BLOCK):
        i = start + tl.arange(0, BLOCK)
        c = tl.load(ORDER + i.to(tl.int64) * stride_o, i < C, -1).to(tl.int64)
        named = (c >= 0) & (c < C)
        c = tl.where(named, c, 0)
        named = named & (tl.load(PLACE + c, named, -1) == i)
        first = tl.load(BACK_ENDS + c - 1, named & (c > 0), 0)
        size = tl.load(BACK_ENDS + c, named, 0) - first
        end = last + tl.cumsum(size, 0)
        shift = first - (end - size)
        tl.store(ENDS + i, end, i < C)
        tl.store(SHIFTS + i, shift, i < C)
        tl.store(BACK_SHIFTS + c, -shift, named)
        last += tl.sum(size, 0)


def _shape(a, size: int = 16384, warps: int = 4) -> dict:
    """`size` bytes a program: a row or, while they are short, several."""
    count = size // (1 if a.X is None else a.X.element_size())
    BLOCK = max(16, min(count, power_of_two(a.N)))
    return {"ROWS": max(1, min(64, count // BLOCK)), "BLOCK": BLOCK, "num_warps": warps, "launch_pdl": a.PDL}


@kernel(
    grid=lambda a: (cdiv(a.T, a.ROWS) * max(1, cdiv(a.N, a.BLOCK)),),
    tokens=("T", "C", "steps"),
    tune_by=("N",),
    default=_shape,
    candidates=lambda a: [_shape(a, size, warps) for size, warps in ((8192, 4), (16384, 4), (16384, 8), (32768, 8))],
)
def chunk_move(
    X, P, ENDS, SHIFTS, Y, Q, T, N, C, steps, stride_xt, stride_xn, stride_p, PDL: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Y[row] = X[row + shift of its chunk] and Q[row] = P[the same], 1 without P; 0 for no row. 2**steps > C."""
    across = tl.maximum(tl.cdiv(N, BLOCK), 1)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    chunk = tl.zeros([ROWS, 1], tl.int32)  # how many end at or before the row
    for k in range(steps):
        probe = chunk + (1 << (steps - 1 - k))
        end = tl.load(ENDS + probe - 1, probe <= C, T)
        chunk = tl.where((probe <= C) & (end <= row), probe, chunk)
    source = row + tl.load(SHIFTS + chunk, chunk < C, T)
    live = (row < T) & (source >= 0) & (source < T)
    source = tl.where(live, source, 0)
    if X is not None:
        v = tl.load(X + source * stride_xt + col.to(tl.int64) * stride_xn, live & (col < N), 0)
        tl.store(Y + row * N + col, v, (row < T) & (col < N))
    q = live.to(tl.float32)
    if P is not None:
        q = tl.load(P + source * stride_p, live, 0.0)
    tl.store(Q + row, q, (row < T) & (tl.program_id(0) % across == 0))


# ---- host ------------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Where the chunks of the result, and of x, end and how far their rows are to be moved."""

    ends: Tensor
    shifts: Tensor
    back_ends: Tensor
    back_shifts: Tensor


def find_chunks(sizes: Tensor, order: Tensor, count: int) -> Table:
    """The table of chunks of `count` rows."""
    (C,), device = sizes.shape, sizes.device
    room = torch.empty((4, C + C % 2), dtype=torch.int64, device=device)  # rows of whole 16 bytes
    table = Table(room[0], room[1], room[2], room[3])
    place = torch.empty(C, dtype=torch.int32, device=device)
    chunk_table(
        sizes, order, place, *table, count, C, sizes.stride(0), order.stride(0), PDL=Target.at(device).early_launch
    )  # fmt: skip
    return table


def move(
    x: Tensor | None, probs: Tensor | None, ends: Tensor, shifts: Tensor, count: int, chunks: int
) -> tuple[Tensor | None, Tensor]:
    """Rows of x, and the numbers that go with them."""
    device = ends.device
    row_probs = torch.empty(count, dtype=torch.float32 if probs is None else probs.dtype, device=device)
    stride_p, settings = 0 if probs is None else probs.stride(0), {"PDL": Target.at(device).early_launch}
    if x is None:
        chunk_move(
            None, probs, ends, shifts, None, row_probs, count, 0, chunks, chunks.bit_length(), 0, 1, stride_p, **settings
        )  # fmt: skip
        return None, row_probs
    y = torch.empty(x.shape, dtype=x.dtype, device=device)
    bits = BITS[x.element_size()]
    chunk_move(
        x.view(bits), probs, ends, shifts, y.view(bits), row_probs, count, x.shape[1], chunks, chunks.bit_length(),
        *x.stride(), stride_p, **settings,
    )  # fmt: skip
    return y, row_probs


def forward(x, sizes, order, probs) -> tuple:
    check_chunks(sizes, order, x.shape[0])
    table = find_chunks(sizes, order, x.shape[0])
    return move(x, probs, table.ends, table.shifts, x.shape[0], sizes.shape[0])


def backward(saved: SimpleNamespace, drows: Tensor | None, drow_probs: Tensor | None) -> tuple:
    count, chunks = saved.x.shape[0], saved.sizes.shape[0]
    drows = drows if "x" in saved.needs else None
    drow_probs = drow_probs if "probs" in saved.needs else None
    if drows is None and drow_probs is None:
        return None, None
    table = find_chunks(saved.sizes, saved.order, count)
    dx, dprobs = move(drows, drow_probs, table.back_ends, table.back_shifts, count, chunks)
    return dx, None if drow_probs is None else dprobs


def check_chunks(sizes: Tensor, order: Tensor, count: int) -> None:
    """With TILEWRIGHT_DEBUG=1: raise if the sizes are no sizes of `count` rows, or the order is none."""
    if not can_read(sizes):
        return
    least, total = int(sizes.min()), int(sizes.sum())
    if least < 0 or total > count:
        raise ValueError(f"sort_chunks: sizes must be >= 0 and add up to {count} at most, got {least} and {total}")
    wrong = order.sort().values != torch.arange(order.shape[0], device=order.device)
    if bool(wrong.any()):
        raise ValueError(
            f"sort_chunks: order must be a permutation of {order.shape[0]} chunks, got {order.tolist()[:16]}"
        )


def check(x, sizes, order, probs) -> None:
    if x.element_size() not in BITS:
        raise TypeError(f"sort_chunks: x must have elements of {', '.join(map(str, BITS))} bytes, got {x.dtype}")


sort_chunks = Op(
    "sort_chunks", reference, inputs, Triton(forward, backward), check=check,
    # Rows have a name of their own, not that of tokens: they go to other places in the result.
    where={"x": "any[rows hidden]", "sizes": "int[chunks]", "order": "int[chunks]", "probs": "float[rows]"},
    results={"rows": "x[rows hidden]", "row_probs": lambda a: "float32[rows]" if a.probs is None else "probs[rows]"},
    gradient=Gradient(
        of=("x", "probs"), through=("rows", "row_probs"), saves=("sizes", "order"), shape_only=lambda values: ("x", "probs")
    ),
    out=Out(contiguous=("rows", "row_probs")), bars=Bars("G"),
)  # fmt: skip
