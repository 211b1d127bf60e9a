"""rms_norm of wide rows on Hopper, in Gluon: a row waits in shared memory, and is read from memory once in the backward too.

A program walks over rows. Those that come next are on their way to shared memory, copied by its threads, while this one is
normalised and stored; the weight stays there. A row is held as pieces of BLOCK columns, eight consecutive ones a thread. Each piece
has an allocation of its own, for the compiler puts a barrier between any two uses of one if either is a copy.

Sums have one order: over a thread's pieces, its eight columns, its warp, the program's warps. Of the weight's gradient a program
keeps its share in registers; `sum_columns` adds them up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import commit_group, copy_ahead, gl, gluon, wait_group
from ...op import single
from ...runtime.kernel import kernel

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PER_THREAD = 8  # columns of a piece
MOST_PIECES = 9  # what the backward keeps of each in registers, 72 numbers a thread, is what 512 threads have room for
RESERVED = 1024  # bytes of an SM's shared memory that each program takes beside its own, and as many for sums


class Config(NamedTuple):
    """Warps and programs of an SM, and rows of each that are in shared memory or on their way there, at most."""

    warps: int
    programs: int
    slots: int


class From(NamedTuple):
    """The config of rows from so many columns on."""

    columns: int
    config: Config


# Widest first. Below the last the kernels of `rms_norm.py` are taken, which hold rows in registers. Forward that is faster up to
# 32768 columns, 0.955 of streaming against 0.89; backward up to 16384, 0.81 against 0.77, but at 32768 it is 0.51 against 0.80 (an
# H200, November 2026)
FORWARD = (From(32769, Config(16, 1, 2)),)
BACKWARD = (From(16385, Config(16, 1, 2)),)


class Shape(NamedTuple):
    """How a kernel below is launched."""

    BLOCK: int
    PIECES: int
    SLOTS: int
    programs: int  # of an SM


def shape_of(table: tuple[From, ...], target: Target, N: int, row_bytes: int, weight_bytes: int) -> Shape | None:
    """For rows of N columns, which take `row_bytes` of shared memory each; None if they are not taken, or no row has room."""
    config = next((row.config for row in table if row.columns <= N), None)
    if config is None or N % 16:
        return None
    BLOCK = 32 * PER_THREAD * config.warps
    PIECES = cdiv(N, BLOCK)
    room = target.shared_memory // config.programs - RESERVED
    slots = min(config.slots, (room - PIECES * BLOCK * weight_bytes) // (PIECES * BLOCK * row_bytes))
    return Shape(BLOCK, PIECES, slots, config.programs) if slots >= 1 and PIECES <= MOST_PIECES else None


@gluon.jit
def allocate(DTYPE: gl.constexpr, SLOTS: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    memory = ()
    for _ in gl.static_range(PIECES):
        memory = memory + (gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK], FLAT),)
    return memory


@gluon.jit
def copy_piece(P, memory, slot, lane, N, i: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """The i-th piece of the row at P, on its way."""
    if i == PIECES - 1:
        copy_ahead(memory[i].index(slot), P + i * BLOCK + lane, i * BLOCK + lane < N)
    else:
        copy_ahead(memory[i].index(slot), P + i * BLOCK + lane, None)


@gluon.jit
def read_piece(memory, slot, lane, N, i: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """The i-th piece of a row in shared memory, in fp32; 0 past its end."""
    x = memory[i].index(slot).load(lane.type.layout).to(gl.float32)
    if i == PIECES - 1:
        x = gl.where(i * BLOCK + lane < N, x, 0.0)
    return x


@gluon.jit
def store_piece(P, x, lane, N, i: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    if i == PIECES - 1:
        gl.store(P + i * BLOCK + lane, x.to(P.dtype.element_ty), i * BLOCK + lane < N)
    else:
        gl.store(P + i * BLOCK + lane, x.to(P.dtype.element_ty))


@gluon.jit
def load_piece(P, lane, N, i: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    if i == PIECES - 1:
        x = gl.load(P + i * BLOCK + lane, i * BLOCK + lane < N, 0.0)
    else:
        x = gl.load(P + i * BLOCK + lane)
    return x.to(gl.float32)


@gluon.jit
def copy_weight(W, lane, N, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """Shared memory to which the weight is on its way; None without one."""
    memory = None
    if W is not None:
        memory = allocate(W.dtype.element_ty, 1, BLOCK, PIECES)
        for i in gl.static_range(PIECES):
            copy_piece(W, memory, 0, lane, N, i, BLOCK, PIECES)
    return memory


@gluon.jit
def weigh(x, memory, lane, N, weight_offset, i: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """x * (weight + weight_offset), of the i-th piece; an offset of 0 comes as None."""
    if memory is not None:
        w = read_piece(memory, 0, lane, N, i, BLOCK, PIECES)
        if weight_offset is not None:
            w = w + weight_offset
        x = x * w
    return x


@gluon.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "PROGRAMS"),
    default=lambda a: {"num_warps": a.BLOCK // (32 * PER_THREAD)},
)  # fmt: skip
def rms_norm_shared(
    X, W, RSTD_IN, Y, RSTD, M, N, stride_xm, eps, inv_n, weight_offset, PROGRAMS,
    BLOCK: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Y, and RSTD unless None. A row is in registers between its two uses; its slot is then free for one that is to come."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [BLOCK // 256], [0])
    lane = gl.arange(0, BLOCK, LAYOUT)
    xs = allocate(X.dtype.element_ty, SLOTS, BLOCK, PIECES)
    first = gl.program_id(0)
    ws = copy_weight(W, lane, N, BLOCK, PIECES)
    for slot in gl.static_range(SLOTS):
        row = first + slot * PROGRAMS
        if row < M:
            for i in gl.static_range(PIECES):
                copy_piece(X + row.to(gl.int64) * stride_xm, xs, slot, lane, N, i, BLOCK, PIECES)
        commit_group()
    slot = 0
    for row in range(first, M, PROGRAMS):
        wait_group(SLOTS - 1)
        total = gl.zeros([BLOCK], gl.float32, LAYOUT)
        held = ()
        for i in gl.static_range(PIECES):
            x = read_piece(xs, slot, lane, N, i, BLOCK, PIECES)
            total += x * x
            held = held + (x,)
        square = gl.sum(total, 0)
        ahead = row + SLOTS * PROGRAMS
        if ahead < M:
            for i in gl.static_range(PIECES):
                copy_piece(X + ahead.to(gl.int64) * stride_xm, xs, slot, lane, N, i, BLOCK, PIECES)
        commit_group()
        if RSTD_IN is None:
            rstd = gl.rsqrt(square * inv_n + eps)
        else:
            rstd = gl.load(RSTD_IN + row)
        if RSTD is not None:
            gl.store(RSTD + row, rstd)
        y = Y + row.to(gl.int64) * N
        for i in gl.static_range(PIECES):
            normed = weigh(held[i] * rstd, ws, lane, N, weight_offset, i, BLOCK, PIECES)
            store_piece(y, normed, lane, N, i, BLOCK, PIECES)
        slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
    wait_group(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("M", "PROGRAMS"),
    default=lambda a: {"num_warps": a.BLOCK // (32 * PER_THREAD)},
)  # fmt: skip
def rms_norm_backward_shared(
    X, W, RSTD, DY, DH, DX, DW, M, N, stride_xm, stride_ym, stride_hm, eps, inv_n, weight_offset, PROGRAMS,
    BLOCK: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `rms_norm_backward`. A row is read from shared memory twice. Where a piece was read the second time, that of a row to come
    takes its place at once, so that one slot for x and dy will do. Each piece is waited for by itself."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [BLOCK // 256], [0])
    lane = gl.arange(0, BLOCK, LAYOUT)
    xs = allocate(X.dtype.element_ty, SLOTS, BLOCK, PIECES)
    dys = allocate(DY.dtype.element_ty, SLOTS, BLOCK, PIECES)
    first = gl.program_id(0)
    ws = copy_weight(W, lane, N, BLOCK, PIECES)
    for slot in gl.static_range(SLOTS):
        row = first + slot * PROGRAMS
        for i in gl.static_range(PIECES):
            if row < M:
                copy_piece(X + row.to(gl.int64) * stride_xm, xs, slot, lane, N, i, BLOCK, PIECES)
                copy_piece(DY + row.to(gl.int64) * stride_ym, dys, slot, lane, N, i, BLOCK, PIECES)
            commit_group()
    dws = ()
    for _ in gl.static_range(PIECES):
        dws = dws + (gl.zeros([BLOCK], gl.float32, LAYOUT),)
    slot = 0
    for row in range(first, M, PROGRAMS):
        squares = gl.zeros([BLOCK], gl.float32, LAYOUT)
        products = gl.zeros([BLOCK], gl.float32, LAYOUT)
        for i in gl.static_range(PIECES):
            wait_group(SLOTS * PIECES - 1 - i)
            x = read_piece(xs, slot, lane, N, i, BLOCK, PIECES)
            dy = read_piece(dys, slot, lane, N, i, BLOCK, PIECES)
            squares += x * x
            products += x * weigh(dy, ws, lane, N, weight_offset, i, BLOCK, PIECES)
        square, cross = gl.reduce((squares, products), 0, add_pairs)
        if RSTD is None:
            rstd = gl.rsqrt(square * inv_n + eps)
        else:
            rstd = gl.load(RSTD + row)
        mean = cross * inv_n * rstd
        ahead = row + SLOTS * PROGRAMS
        sums = ()
        for i in gl.static_range(PIECES):
            xhat = read_piece(xs, slot, lane, N, i, BLOCK, PIECES) * rstd
            dy = read_piece(dys, slot, lane, N, i, BLOCK, PIECES)
            if ahead < M:
                copy_piece(X + ahead.to(gl.int64) * stride_xm, xs, slot, lane, N, i, BLOCK, PIECES)
                copy_piece(DY + ahead.to(gl.int64) * stride_ym, dys, slot, lane, N, i, BLOCK, PIECES)
            commit_group()
            sums = sums + (dws[i] if DW is None else dws[i] + dy * xhat,)
            if DX is not None:
                dx = rstd * (weigh(dy, ws, lane, N, weight_offset, i, BLOCK, PIECES) - xhat * mean)
                if DH is not None:
                    dx += load_piece(DH + row.to(gl.int64) * stride_hm, lane, N, i, BLOCK, PIECES)
                store_piece(DX + row.to(gl.int64) * N, dx, lane, N, i, BLOCK, PIECES)
        dws = sums
        slot = gl.where(slot == SLOTS - 1, 0, slot + 1)
    wait_group(0)
    if DW is not None:
        for i in gl.static_range(PIECES):
            store_piece(DW + first.to(gl.int64) * N, dws[i], lane, N, i, BLOCK, PIECES)


def aligned(t: Tensor) -> bool:
    """Whether 16 bytes of a row of t [M, N] may be copied at once, anywhere."""
    return t.stride(1) == 1 and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0


def forward_shape(target: Target, x: Tensor, weight: Tensor | None) -> Shape | None:
    """How `rms_norm_shared` takes x [M, N]; None if it does not."""
    return shape_of(FORWARD, target, x.shape[1], x.element_size(), 0 if weight is None else weight.element_size())


def backward_shape(target: Target, x: Tensor, weight: Tensor | None) -> Shape | None:
    """How `rms_norm_backward_shared` takes x [M, N] and a dy like it; None if it does not."""
    return shape_of(BACKWARD, target, x.shape[1], 2 * x.element_size(), 0 if weight is None else weight.element_size())


def programs_for(shape: Shape, target: Target, M: int) -> int:
    """As many as share the rows evenly."""
    return cdiv(M, cdiv(M, shape.programs * target.sms))


def launch_forward(shape: Shape, x, weight, rstd_in, y, rstd, eps, weight_offset) -> None:
    M, N = x.shape
    rms_norm_shared(
        x, weight, rstd_in, y, rstd, M, N, x.stride(0), eps, 1.0 / N, weight_offset or None,
        programs_for(shape, Target.at(x.device), M), BLOCK=shape.BLOCK, PIECES=shape.PIECES, SLOTS=shape.SLOTS,
    )  # fmt: skip


def launch_backward(shape: Shape, x, weight, rstd, dy, dh, dx, part, eps, weight_offset, early: bool) -> None:
    """A row of `part` is each program's. `early`: as PDL."""
    M, N = x.shape
    rms_norm_backward_shared(
        x, weight, rstd, dy, dh, dx, part, M, N, x.stride(0), dy.stride(0), 0 if dh is None else dh.stride(0), eps, 1.0 / N,
        weight_offset or None, programs_for(shape, Target.at(x.device), M), BLOCK=shape.BLOCK, PIECES=shape.PIECES,
        SLOTS=shape.SLOTS, PDL=early,
    )  # fmt: skip


def fits_shared(target: Target, a: SimpleNamespace) -> bool:
    """Whether a kernel above takes this call or its backward, which has h where a residual was added, and of x no element."""
    x, out = getattr(a, "h", a.x), getattr(a, "out", None)
    return (
        single(target, a)
        and a.out_format is None
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() > 0
        and x.is_contiguous()
        and x.data_ptr() % 16 == 0
        and (a.weight is None or a.weight.data_ptr() % 16 == 0)
        and (out is None or out.data_ptr() % 16 == 0)
        and any(find(target, x.view(-1, x.shape[-1]), a.weight) is not None for find in (forward_shape, backward_shape))
        and target.hopper_gluon
    )
