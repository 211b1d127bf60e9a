"""Causal convolution of each column along its sequence: z[t] = bias + sum over j of weight[j] * x[t - (width - 1) + j], y = act(z).

Inputs before a sequence's first are those of its state, or 0. The new state is a sequence's last width - 1 inputs, those of the old
state among them where it is shorter. Backward, with dz = dy * act'(z): dx[t] is the sum over d of weight[width - 1 - d] * dz[t + d]
beside what the new state's gradient gives the inputs that it holds; of places before the first token the same is the gradient of
the state. dweight[j] is the sum over t of dz[t] * x[t - (width - 1) + j], dbias that of dz. Activations are made anew.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.tiles import lengths, tile_at
from ...core.debug import check_ends
from ...core.draw import Draw
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...device.activation import activate, activate_slope
from ...op import Bars, Gradient, Op, Triton, single, upcast
from ...runtime.kernel import kernel
from ..norm.rms_norm import sum_columns
from .places import check_marks, draw_marks, places, sequence_at, sequence_count

WIDEST = 16  # taps of a column: each is a load of its own


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: Literal["silu"] | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each column of `x` [batch, length, hidden] with the last `width` inputs by `weight` [hidden, width]; (y, new state).

    Any strides: [batch, hidden, length] is given transposed. `state` [batch, hidden, width - 1] has the inputs before the first,
    the latest last; without it they are 0. The new state is of the dtype of x and is given in the same way, so that a sequence may
    be cut anywhere; `causal_conv1d_step` goes on from it. Packed sequences lie one after the other in a batch of 1, sequence s from
    `cu_seqlens[s]` to `cu_seqlens[s + 1]`, and states are then [sequences, hidden, width - 1]. An empty sequence keeps its state;
    tokens in no sequence give 0. Gradients of x, weight, bias and state, of both results.
    """
    (batch, length, _), width = x.shape, weight.shape[1]
    at = places(batch, length, cu_seqlens, x.device)
    w, packed = upcast(weight), cu_seqlens is not None
    z = torch.zeros((), dtype=torch.promote_types(upcast(x).dtype, w.dtype), device=x.device)
    for j in range(width):
        z = z + w[:, j] * upcast(earlier(x, state, at.whose, at.index, width - 1 - j, packed))
    if bias is not None:
        z = z + upcast(bias)
    y = z * torch.sigmoid(z) if act == "silu" else z
    y = torch.where((at.whose >= 0)[:, None], y, 0.0)
    return y.to(x.dtype), latest(x, state, at.begin, at.count, width - 1, packed)


def earlier(x: Tensor, state: Tensor | None, whose: Tensor, index: Tensor, by: int, packed: bool) -> Tensor:
    """The inputs `by` tokens before each, [batch, length, hidden]."""
    length = x.shape[1]
    moved = torch.nn.functional.pad(x, (0, 0, by, 0))[:, :length]
    kept = torch.zeros_like(moved)
    if state is not None and state.shape[2] and state.shape[0]:
        column = (state.shape[2] + index - by).clamp(0, state.shape[2] - 1)
        kept = state[whose.clamp(min=0), :, column][None] if packed else state[:, :, column].transpose(1, 2)
    return torch.where((index >= by)[:, None], moved, kept)


def latest(x: Tensor, state: Tensor | None, begin: Tensor, count: Tensor, many: int, packed: bool) -> Tensor:
    """The last `many` inputs of each sequence, [sequences, hidden, many]."""
    sequences, hidden = begin.shape[0], x.shape[2]
    if not (sequences and many and hidden):
        return x.new_zeros(sequences, hidden, many)
    place = count[:, None] - many + torch.arange(many, device=x.device)
    rows = torch.nn.functional.pad(x, (0, 0, 0, 1))  # one that is there, of no tokens
    at = (begin[:, None] + place).clamp(0, x.shape[1])
    own = (rows[0][at] if packed else rows[:, at[0]]).transpose(1, 2)
    kept = torch.zeros_like(own)
    if state is not None:
        kept = state.gather(2, (many + place).clamp(0, many - 1)[:, None].expand(own.shape))
    return torch.where((place >= 0)[:, None], own, kept)


def inputs(draw: Draw) -> dict[str, Any]:
    packed = draw.option("cu_seqlens", False, True)
    batch, length, hidden = 1 if packed else draw.dim("batch"), draw.dim("length"), draw.dim("hidden")
    width = draw.option("width", 4, 3, 1, 2)
    marks = draw_marks(draw, length) if packed else None
    shape = (sequence_count(batch, marks), hidden, width - 1)
    return {
        "x": draw.tensor(batch, length, hidden),
        "weight": draw.tensor(hidden, width, scale=0.5),
        "bias": draw.maybe("bias", lambda: draw.tensor(hidden)),
        "act": draw.option("act", "silu", None),
        "state": draw.maybe("state", lambda: draw.tensor(*shape)),
        "cu_seqlens": marks,
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """A tensor [batch, length, hidden] of any strides."""

    data: Any
    stride_b: Any
    stride_t: Any
    stride_c: Any


class States(NamedTuple):
    """A tensor [sequences, hidden, taps] of any strides, or none."""

    data: Any = None
    stride_s: Any = None
    stride_c: Any = None
    stride_w: Any = None


class Taps(NamedTuple):
    """The weight with its strides, and the bias or None, dense."""

    data: Any
    stride_c: Any
    stride_w: Any
    bias: Any


@triton.jit
def inputs_at(X, STATE, batch, sequence, first, place, live, c, C, WIDTH: tl.constexpr):
    """[n, m]: the inputs at these places of a sequence in fp32; those before its first token are its state's, or 0."""
    inside = (c < C)[None, :]
    at = batch.to(tl.int64) * X.stride_b + (first + place).to(tl.int64)[:, None] * X.stride_t
    own = (live & (place >= 0))[:, None] & inside
    x = tl.load(X.data + at + c.to(tl.int64)[None, :] * X.stride_c, own, 0.0).to(tl.float32)
    if STATE.data is not None:
        at = sequence.to(tl.int64) * STATE.stride_s + (WIDTH - 1 + place).to(tl.int64)[:, None] * STATE.stride_w
        kept = (live & (place < 0) & (place > -WIDTH))[:, None] & inside
        x += tl.load(STATE.data + at + c.to(tl.int64)[None, :] * STATE.stride_c, kept, 0.0).to(tl.float32)
    return x


@triton.jit
def taps_of(TAPS, c, C, WIDTH: tl.constexpr):
    """The weight of columns [m], a vector for each tap."""
    out = ()
    for j in tl.static_range(WIDTH):
        at = c.to(tl.int64) * TAPS.stride_c + tl.full([], j, tl.int64) * TAPS.stride_w
        out = out + (tl.load(TAPS.data + at, c < C, 0.0).to(tl.float32),)
    return out


@triton.jit
def bias_of(TAPS, c, C):
    if TAPS.bias is None:
        return tl.zeros([c.shape[0]], tl.float32)
    else:
        return tl.load(TAPS.bias + c, c < C, 0.0).to(tl.float32)


@triton.jit
def place_of(pid, TILES, BLOCKS, BLOCK_C: tl.constexpr):
    """(batch, tile, columns) of a program: the columns of a tile side by side."""
    unit = pid // BLOCKS
    return unit // TILES, unit % TILES, (pid % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.BLOCKS,), tokens=("L", "BATCH", "TILES"), default=lambda a: {"num_warps": 4}
)
def causal_conv1d_forward(
    X, TAPS, STATE, Y, LENGTHS, L, C, BATCH, TILES, BLOCKS, ACT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one sequence by BLOCK_C columns. A tap is a load of its own, which the cache has from the tap before."""
    batch, index, c = place_of(tl.program_id(0), TILES, BLOCKS, BLOCK_C)
    tile = tile_at(LENGTHS, index, batch, L, L, BLOCK_T)
    if tile.start < tile.count_q:
        row = tile.start + tl.arange(0, BLOCK_T)
        live = row < tile.count_q
        known = live & (tile.sequence >= 0)
        w = taps_of(TAPS, c, C, WIDTH)
        z = tl.zeros([BLOCK_T, BLOCK_C], tl.float32) + bias_of(TAPS, c, C)[None, :]
        for j in tl.static_range(WIDTH):
            x = inputs_at(X, STATE, batch, tile.sequence, tile.first_q, row - (WIDTH - 1 - j), known, c, C, WIDTH)
            z += x * w[j][None, :]
        y = z
        if ACT is not None:
            y = activate(z, 1.0, ACT)
        y = tl.where(known[:, None], y, 0.0)
        at = batch.to(tl.int64) * Y.stride_b + (tile.first_q + row).to(tl.int64)[:, None] * Y.stride_t
        to = Y.data + at + c.to(tl.int64)[None, :] * Y.stride_c
        tl.store(to, y.to(Y.data.dtype.element_ty), live[:, None] & (c < C)[None, :])


@kernel(
    grid=lambda a: (a.BATCH * a.TILES * a.BLOCKS,), tokens=("L", "BATCH", "TILES"), default=lambda a: {"num_warps": 4}
)
def causal_conv1d_rows(
    X, TAPS, STATE, Y, LENGTHS, L, C, BATCH, TILES, BLOCKS, ACT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The same tile where columns lie side by side, STEP tokens at a time: an input is loaded once, and stays in registers for the
    tokens after it."""
    batch, index, c = place_of(tl.program_id(0), TILES, BLOCKS, BLOCK_C)
    tile = tile_at(LENGTHS, index, batch, L, L, BLOCK_T)
    if tile.start < tile.count_q:
        sequence, one = tile.sequence, tl.arange(0, 1)
        known = (one == 0) & (sequence >= 0)
        w = taps_of(TAPS, c, C, WIDTH)
        bias = bias_of(TAPS, c, C)[None, :]
        x = ()
        for j in tl.static_range(WIDTH - 1):
            place = one + (tile.start - (WIDTH - 1) + j)
            x = x + (inputs_at(X, STATE, batch, sequence, tile.first_q, place, known, c, C, WIDTH),)
        for start in range(tile.start, tl.minimum(tile.start + BLOCK_T, tile.count_q), STEP):
            for i in tl.static_range(STEP):
                live = known & (start + i < tile.count_q)
                x = x + (inputs_at(X, States(), batch, sequence, tile.first_q, one + (start + i), live, c, C, WIDTH),)
            for i in tl.static_range(STEP):
                z = tl.zeros([1, BLOCK_C], tl.float32) + bias
                for j in tl.static_range(WIDTH):
                    z += x[i + j] * w[j][None, :]
                y = z
                if ACT is not None:
                    y = activate(z, 1.0, ACT)
                if LENGTHS.table is not None:  # without one, no token is in no sequence
                    y = tl.where(known[:, None], y, 0.0)
                at = batch.to(tl.int64) * Y.stride_b + (tile.first_q + start + i).to(tl.int64) * Y.stride_t
                to = Y.data + at + c.to(tl.int64)[None, :] * Y.stride_c
                tl.store(to, y.to(Y.data.dtype.element_ty), (start + i < tile.count_q) & (c < C)[None, :])
            x = x[STEP:]


@kernel(
    grid=lambda a: (a.SEQUENCES * a.BLOCKS,), tokens=("L", "COUNT", "SEQUENCES"), default=lambda a: {"num_warps": 4}
)
def causal_conv1d_state(
    X,
    STATE,
    FINAL,
    MARKS,
    L,
    C,
    COUNT,
    SEQUENCES,
    BLOCKS,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The last inputs of each sequence, for the next call."""
    sequence = tl.program_id(0) // BLOCKS
    c = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch, first, count = sequence_at(MARKS, sequence, COUNT, L)
    j = tl.arange(0, TAPS)
    x = inputs_at(X, STATE, batch, sequence, first, count - (WIDTH - 1) + j, j < WIDTH - 1, c, C, WIDTH)
    at = sequence.to(tl.int64) * FINAL.stride_s + j.to(tl.int64)[:, None] * FINAL.stride_w
    to = FINAL.data + at + c.to(tl.int64)[None, :] * FINAL.stride_c
    tl.store(to, x.to(FINAL.data.dtype.element_ty), (j < WIDTH - 1)[:, None] & (c < C)[None, :])


@triton.jit
def gradients_at(
    X, DY, STATE, DFINAL, w, bias, batch, sequence, first, count, row, live, c, C, ACT: tl.constexpr, WIDTH: tl.constexpr,
    DX: tl.constexpr, DW: tl.constexpr,
):  # fmt: skip
    """(the gradient of inputs at these places, that of z there, the inputs by tap) of a sequence, each [n, m]. DX, DW: which of
    them are wanted. Places before the first token are those of the state, and give nothing themselves."""
    AFTER: tl.constexpr = WIDTH if DX else 1
    inside = (c < C)[None, :]
    x = ()
    if (ACT is not None) or DW:
        for j in tl.static_range(WIDTH + AFTER - 1):
            place = row - (WIDTH - 1) + j
            x = x + (inputs_at(X, STATE, batch, sequence, first, place, live & (place < count), c, C, WIDTH),)
    dx = tl.zeros([row.shape[0], c.shape[0]], tl.float32)
    own = dx
    for d in tl.static_range(AFTER):
        place = row + d
        there = live & (place >= 0) & (place < count)
        at = batch.to(tl.int64) * DY.stride_b + (first + place).to(tl.int64)[:, None] * DY.stride_t
        dz = tl.load(DY.data + at + c.to(tl.int64)[None, :] * DY.stride_c, there[:, None] & inside, 0.0).to(tl.float32)
        if ACT is not None:
            z = tl.zeros_like(dz) + bias[None, :]
            for j in tl.static_range(WIDTH):
                z += x[d + j] * w[j][None, :]
            _, slope = activate_slope(z, 1.0, ACT)
            dz = tl.where(there[:, None], dz * slope, 0.0)
        if d == 0:
            own = dz
        dx += dz * w[WIDTH - 1 - d][None, :]
    if DX and DFINAL.data is not None:
        j = row - (count - (WIDTH - 1))
        at = sequence.to(tl.int64) * DFINAL.stride_s + j.to(tl.int64)[:, None] * DFINAL.stride_w
        held = (live & (j >= 0) & (j < WIDTH - 1))[:, None] & inside
        dx += tl.load(DFINAL.data + at + c.to(tl.int64)[None, :] * DFINAL.stride_c, held, 0.0).to(tl.float32)
    return dx, own, x


@kernel(
    grid=lambda a: (a.BANDS * a.BLOCKS,), tokens=("L", "TILES", "UNITS", "BANDS"), default=lambda a: {"num_warps": 4}
)
def causal_conv1d_backward(
    X, DY, TAPS, STATE, DFINAL, DX, DW, DB, LENGTHS, L, C, TILES, UNITS, BANDS, BLOCKS, ACT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Every BANDS-th of the UNITS tiles of all rows of the batch. A program keeps its share of dweight [bands, hidden, width] and
    dbias [bands, hidden] in registers."""
    band = tl.program_id(0) // BLOCKS
    c = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    w = taps_of(TAPS, c, C, WIDTH)
    bias = bias_of(TAPS, c, C)
    db = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    dw = ()
    for _ in tl.static_range(WIDTH):
        dw = dw + (tl.zeros([BLOCK_T, BLOCK_C], tl.float32),)
    for unit in range(band, UNITS, BANDS):
        batch = unit // TILES
        tile = tile_at(LENGTHS, unit % TILES, batch, L, L, BLOCK_T)
        row = tile.start + tl.arange(0, BLOCK_T)
        live = row < tile.count_q
        dx, dz, x = gradients_at(
            X, DY, STATE, DFINAL, w, bias, batch, tile.sequence, tile.first_q, tile.count_q, row, live & (tile.sequence >= 0), c,
            C, ACT, WIDTH, DX.data is not None, DW is not None,
        )  # fmt: skip
        if DX.data is not None:
            at = batch.to(tl.int64) * DX.stride_b + (tile.first_q + row).to(tl.int64)[:, None] * DX.stride_t
            to = DX.data + at + c.to(tl.int64)[None, :] * DX.stride_c
            tl.store(to, dx.to(DX.data.dtype.element_ty), live[:, None] & (c < C)[None, :])
        db += dz
        if DW is not None:
            more = ()
            for j in tl.static_range(WIDTH):
                more = more + (dw[j] + dz * x[j],)
            dw = more
    at = band.to(tl.int64) * C + c
    if DB is not None:
        tl.store(DB + at, tl.sum(db, 0), c < C)
    if DW is not None:
        for j in tl.static_range(WIDTH):
            tl.store(DW + at * WIDTH + j, tl.sum(dw[j], 0), c < C)


@kernel(
    grid=lambda a: (a.SEQUENCES * a.BLOCKS,), tokens=("L", "COUNT", "SEQUENCES"), default=lambda a: {"num_warps": 4}
)
def causal_conv1d_state_backward(
    X, DY, TAPS, STATE, DFINAL, DSTATE, MARKS, L, C, COUNT, SEQUENCES, BLOCKS, ACT: tl.constexpr, WIDTH: tl.constexpr,
    HELD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs before a sequence's first."""
    sequence = tl.program_id(0) // BLOCKS
    c = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch, first, count = sequence_at(MARKS, sequence, COUNT, L)
    j = tl.arange(0, HELD)
    live = j < WIDTH - 1
    dx, _, _ = gradients_at(
        X, DY, STATE, DFINAL, taps_of(TAPS, c, C, WIDTH), bias_of(TAPS, c, C), batch, sequence, first, count, j - (WIDTH - 1),
        live, c, C, ACT, WIDTH, True, False,
    )  # fmt: skip
    at = sequence.to(tl.int64) * DSTATE.stride_s + j.to(tl.int64)[:, None] * DSTATE.stride_w
    to = DSTATE.data + at + c.to(tl.int64)[None, :] * DSTATE.stride_c
    tl.store(to, dx.to(DSTATE.data.dtype.element_ty), live[:, None] & (c < C)[None, :])


# ---- host ------------------------------------------------------------------------------------------------------------


def inputs_of(t: Tensor | None) -> Inputs:
    return Inputs(None, 0, 0, 0) if t is None else Inputs(t, *t.stride())


def states_of(t: Tensor | None) -> States:
    return States() if t is None or not t.numel() else States(t, *t.stride())


def taps(weight: Tensor, bias: Tensor | None) -> Taps:
    return Taps(weight, *weight.stride(), None if bias is None else bias.contiguous())


# Columns of a program that goes down rows, 8 bytes of bf16 a thread, whose 64 registers leave an SM 32 warps (Triton 3.6, sm_90;
# 128 with 16 bytes); rows that it goes down, and how many it loads at a time. More taps than NARROW do not stay in registers
ROLLED, DOWN, STEP, NARROW = 512, 64, 8, 4


def blocks_of(x: Tensor, elements: int) -> tuple[int, int]:
    """Tokens and columns of a tile: long in the dimension whose elements lie side by side."""
    along = x.stride(1) == 1 and x.stride(2) != 1
    columns = min(32 if along else 128, max(16, power_of_two(x.shape[2])))
    return max(1, elements // columns), columns


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, act: str | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    (batch, length, hidden), width = x.shape, weight.shape[1]
    check_ends("causal_conv1d", "cu_seqlens", cu_seqlens, length)
    sequences = sequence_count(batch, cu_seqlens)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(sequences, hidden, width - 1, dtype=x.dtype, device=x.device)
    if x.numel():
        rolls = x.stride(2) == 1 and hidden >= 2 * ROLLED and width <= NARROW
        rows, columns = (DOWN, ROLLED) if rolls else blocks_of(x, 2048)
        how, tiles = lengths(cu_seqlens, cu_seqlens, length, length, None, rows, False)
        (causal_conv1d_rows if rolls else causal_conv1d_forward)(
            inputs_of(x), taps(weight, bias), states_of(state), inputs_of(y), how, length, hidden, batch, tiles,
            cdiv(hidden, columns), ACT=act, WIDTH=width, BLOCK_T=rows, BLOCK_C=columns, **({"STEP": STEP} if rolls else {}),
        )  # fmt: skip
    if final.numel():
        causal_conv1d_state(
            inputs_of(x), states_of(state), states_of(final), None if cu_seqlens is None else cu_seqlens.contiguous(), length,
            hidden, 0 if cu_seqlens is None else cu_seqlens.shape[0], sequences, cdiv(hidden, 128), WIDTH=width,
            TAPS=power_of_two(width - 1), BLOCK_C=128,
        )  # fmt: skip
    return y, final


ON_SM = 8  # programs of the backward on one SM


def backward(saved: SimpleNamespace, dy: Tensor | None, dfinal: Tensor | None) -> tuple:
    x, weight, bias, state, marks, needs = saved.x, saved.weight, saved.bias, saved.state, saved.cu_seqlens, saved.needs
    (batch, length, hidden), width = x.shape, weight.shape[1]
    if dy is None:
        dy = torch.zeros(1, dtype=x.dtype, device=x.device).expand(x.shape)
    dx, dweight, dbias, dstate = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if n in needs else None
        for n, t in (("x", x), ("weight", weight), ("bias", bias), ("state", state))
    )
    how_z, given = taps(weight, bias), states_of(dfinal)
    if x.numel():
        rows, columns = blocks_of(x, 1024)
        blocks = cdiv(hidden, columns)
        how, tiles = lengths(marks, marks, length, length, None, rows, False)
        bands = max(1, min(tiles * batch, ON_SM * Target.at(x.device).sms // blocks))
        shares = {"dtype": torch.float32, "device": x.device}
        dw = None if dweight is None else torch.empty(bands, hidden * width, **shares)
        db = None if dbias is None else torch.empty(bands, hidden, **shares)
        causal_conv1d_backward(
            inputs_of(x), inputs_of(dy), how_z, states_of(state), given, inputs_of(dx), dw, db, how, length, hidden, tiles,
            tiles * batch, bands, blocks, ACT=saved.act, WIDTH=width, BLOCK_T=rows, BLOCK_C=columns,
        )  # fmt: skip
        for part, out in ((dw, dweight), (db, dbias)):
            if part is not None:
                sum_columns(part, out, *part.shape)
    else:
        for out in (dweight, dbias):
            if out is not None:
                out.zero_()
    if dstate is not None and dstate.numel():
        causal_conv1d_state_backward(
            inputs_of(x), inputs_of(dy), how_z, states_of(state), given, states_of(dstate),
            None if marks is None else marks.contiguous(), length, hidden, 0 if marks is None else marks.shape[0],
            dstate.shape[0], cdiv(hidden, 128), ACT=saved.act, WIDTH=width, HELD=power_of_two(width - 1), BLOCK_C=128,
        )  # fmt: skip
    return dx, dweight, dbias, dstate


def check(x, weight, bias, *, act, state, cu_seqlens) -> None:
    op = "causal_conv1d"
    check_marks(op, "x", x.shape[0], cu_seqlens)
    width = weight.shape[1]
    if not 1 <= width <= WIDEST:
        raise ValueError(f"{op}: weight must have 1 to {WIDEST} taps for each column, got {width}")
    if state is not None:
        wanted = [sequence_count(x.shape[0], cu_seqlens), x.shape[2], width - 1]
        if list(state.shape) != wanted:
            raise ValueError(
                f"{op}: state must be {wanted}, as many inputs as a tap sees before its own, got {list(state.shape)}"
            )


causal_conv1d = Op(
    "causal_conv1d", reference, inputs, Triton(forward, backward, single), check=check,
    where={
        "x": "float[batch length hidden]", "weight": "float[hidden width]", "bias": "float[hidden]",
        "state": "x[sequences hidden before]", "cu_seqlens": "int[marks]",
    },
    results={"y": "x[batch length hidden]", "final": "x[sequences hidden before]"},
    sizes=lambda a: {"sequences": sequence_count(a.x.shape[0], a.cu_seqlens), "before": a.weight.shape[1] - 1},
    gradient=Gradient(of=("x", "weight", "bias", "state"), through=("y", "final")),
    bars=Bars("A"),
)  # fmt: skip
