"""RMS norm over the last dimension: y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x**2) + eps).

`add_rms_norm` first adds a residual: h = x + residual, rounded once and returned, and y is the norm of that h.
Backward: with g = dy * (weight + weight_offset), dx = rstd * g - rstd**3 * x * mean(x * g), dweight = sum over rows of dy * x * rstd.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.format import Format, Quantized, store
from ..core.kernel import kernel
from ..core.op import Op, Triton, upcast
from ..core.signature import at_least
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two, rows


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rstd: Tensor | None = None,
    out_format: Format | None = None,
    out: Tensor | Quantized | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root-mean-square, then by `weight + weight_offset`; statistics in fp32.

    `rstd`, one number per row, is the statistic from an earlier call on the same `x` (`rms_norm_rstd` returns it): it is used
    instead of being computed, and the gradient is the same. `out_format` gives a `Quantized` result, `out` writes into it.
    """
    return normalise(x, weight, eps, weight_offset, rstd, out_format)[0]


def normalise(x, weight, eps, weight_offset, rstd, out_format) -> tuple[Tensor, Tensor]:
    """(y, rstd). A given rstd takes the computed one's place in value, not in the gradient."""
    computed = torch.rsqrt(upcast(x).square().mean(-1, keepdim=True) + eps)
    if rstd is not None:
        computed = computed + (upcast(rstd).unsqueeze(-1) - computed).detach()
    y = upcast(x) * computed
    if weight is not None:
        y = y * (upcast(weight) + weight_offset)
    return store(y, out_format, x.dtype), computed.squeeze(-1).detach()


def reference_rstd(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and the fp32 reciprocal root-mean-square of each row that it used."""
    y, rstd = normalise(x, weight, eps, weight_offset, None, out_format)
    return y, rstd


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual, the new residual."""
    h = (upcast(x) + upcast(residual)).to(x.dtype)
    return normalise(h, weight, eps, weight_offset, None, out_format)[0], h


def inputs(draw: Draw) -> dict:
    return dict(
        x=draw.tensor("tokens", "hidden"),
        weight=draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5, shift=1.0)),
        eps=draw.option("eps", 1e-6, 1e-5),
        weight_offset=draw.option("weight_offset", 0.0, 1.0),
    )


def inputs_add(draw: Draw) -> dict:
    return {**inputs(draw), "residual": draw.tensor("tokens", "hidden")}


WIDEST = 16384  # columns that one program holds in registers; a wider row is read twice


def _default(a) -> dict:
    # About 4096 elements a program: at 2048 columns 2 rows on 4 warps was best on an H200 (November 2026)
    rows = max(1, min(16, 4096 // a.BLOCK))
    return dict(ROWS=rows, num_warps=min(16, max(4, a.BLOCK // 1024)))


@triton.jit
def load_row(X, R, H, row, col, inside, stride_xm, stride_xn, stride_rm, stride_rn, stride_hm):
    """x in fp32, or the new residual h = x + r as it is stored."""
    x = tl.load(X + row * stride_xm + col * stride_xn, inside, 0.0)
    if R is not None:
        r = tl.load(R + row * stride_rm + col * stride_rn, inside, 0.0)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(H.dtype.element_ty)
        tl.store(H + row * stride_hm + col, x, inside)
    return x.to(tl.float32)


@triton.jit
def scale_row(x, rstd, W, col, N, weight_offset):
    y = x * rstd
    if W is not None:
        y = y * (tl.load(W + col, col < N, 0.0).to(tl.float32) + weight_offset)
    return y


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), tune_by=("N",), default=_default)
def rms_norm_forward(
    X, R, W, RSTD_IN, Y, H, RSTD, M, N, stride_xm, stride_xn, stride_rm, stride_rn, stride_ym, stride_hm, eps, weight_offset,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = row < M
    if SINGLE:
        x = load_row(X, R, H, row, col, live & (col < N), stride_xm, stride_xn, stride_rm, stride_rn, stride_hm)
        square = tl.sum(x * x, axis=1)[:, None]
    else:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            c = start + col
            x = load_row(X, R, H, row, c, live & (c < N), stride_xm, stride_xn, stride_rm, stride_rn, stride_hm)
            total += x * x
        square = tl.sum(total, axis=1)[:, None]
        if R is not None:
            tl.debug_barrier()  # other threads of this program read back what was just stored in H
    if RSTD_IN is None:
        rstd = tl.rsqrt(tl.div_rn(square, N.to(tl.float32)) + eps)
    else:
        rstd = tl.load(RSTD_IN + row, live, 0.0)
    if RSTD is not None:
        tl.store(RSTD + row, rstd, live)
    if SINGLE:
        y = scale_row(x, rstd, W, col, N, weight_offset)
        tl.store(Y + row * stride_ym + col, y.to(Y.dtype.element_ty), live & (col < N))
    else:
        for start in range(0, N, BLOCK):
            c = start + col
            inside = live & (c < N)
            if R is not None:
                x = tl.load(H + row * stride_hm + c, inside, 0.0).to(tl.float32)
            else:
                x = tl.load(X + row * stride_xm + c * stride_xn, inside, 0.0).to(tl.float32)
            y = scale_row(x, rstd, W, c, N, weight_offset)
            tl.store(Y + row * stride_ym + c, y.to(Y.dtype.element_ty), inside)


@kernel(
    grid=lambda a: (a.PROGRAMS,),
    tokens=("M",),
    tune_by=("N",),
    default=lambda a: dict(ROWS=max(1, min(16, 2048 // a.BLOCK)), num_warps=min(16, max(4, a.BLOCK // 1024))),
)
def rms_norm_backward(
    X, W, RSTD, DY, DH, DX, DW, M, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_hm, stride_hn, stride_dm, eps, weight_offset,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Each program takes every PROGRAMS-th block of rows and keeps its share of dweight, DW[program], in registers."""
    col = tl.arange(0, BLOCK)[None, :]
    if W is not None:
        w = tl.load(W + col, col < N, 0.0).to(tl.float32) + weight_offset
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), PROGRAMS):
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        live = row < M
        inside = live & (col < N)
        x = tl.load(X + row * stride_xm + col * stride_xn, inside, 0.0).to(tl.float32)
        dy = tl.load(DY + row * stride_ym + col * stride_yn, inside, 0.0).to(tl.float32)
        if RSTD is None:
            rstd = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1)[:, None], N.to(tl.float32)) + eps)
        else:
            rstd = tl.load(RSTD + row, live, 0.0)
        xhat = x * rstd
        if DW is not None:
            dw += dy * xhat
        if DX is not None:
            g = dy
            if W is not None:
                g = dy * w
            dx = rstd * (g - xhat * tl.div_rn(tl.sum(xhat * g, axis=1)[:, None], N.to(tl.float32)))
            if DH is not None:
                dx += tl.load(DH + row * stride_hm + col * stride_hn, inside, 0.0).to(tl.float32)
            tl.store(DX + row * stride_dm + col, dx.to(DX.dtype.element_ty), inside)
    if DW is not None:
        tl.store(DW + tl.program_id(0).to(tl.int64) * N + tl.arange(0, BLOCK), tl.sum(dw, axis=0), tl.arange(0, BLOCK) < N)


@kernel(grid=lambda a: (a.M,), tokens=("M",), default=lambda a: dict(BLOCK=4096, num_warps=8))
def rms_norm_row_sums(X, W, RSTD_IN, DY, RSTD, MEAN, M, N, stride_xm, stride_xn, stride_ym, stride_yn, eps, weight_offset,
                      BLOCK: tl.constexpr):  # fmt: skip
    """For rows too wide for one program: rstd and mean(xhat * g) of each."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        c = start + col
        x = tl.load(X + row * stride_xm + c * stride_xn, c < N, 0.0).to(tl.float32)
        g = tl.load(DY + row * stride_ym + c * stride_yn, c < N, 0.0).to(tl.float32)
        if W is not None:
            g = g * (tl.load(W + c, c < N, 0.0).to(tl.float32) + weight_offset)
        square += x * x
        cross += x * g
    if RSTD_IN is None:
        rstd = tl.rsqrt(tl.div_rn(tl.sum(square, axis=0), N.to(tl.float32)) + eps)
    else:
        rstd = tl.load(RSTD_IN + row)
    tl.store(RSTD + row, rstd)
    tl.store(MEAN + row, tl.div_rn(tl.sum(cross, axis=0) * rstd, N.to(tl.float32)))


@kernel(grid=lambda a: (a.BANDS, cdiv(a.N, a.BLOCK)), tokens=("M",), default=lambda a: dict(BLOCK=1024, num_warps=4))
def rms_norm_backward_wide(
    X, W, RSTD, MEAN, DY, DH, DX, DW, M, N, stride_xm, stride_xn, stride_ym, stride_yn, stride_hm, stride_hn, stride_dm, weight_offset,
    BANDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A band of rows by a block of columns, given the rows' sums."""
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < N
    dw = tl.zeros([BLOCK], tl.float32)
    for r in range(tl.program_id(0), M, BANDS):
        row = r.to(tl.int64)
        rstd = tl.load(RSTD + row)
        xhat = tl.load(X + row * stride_xm + col * stride_xn, inside, 0.0).to(tl.float32) * rstd
        dy = tl.load(DY + row * stride_ym + col * stride_yn, inside, 0.0).to(tl.float32)
        dw += dy * xhat
        if DX is not None:
            g = dy
            if W is not None:
                g = dy * (tl.load(W + col, inside, 0.0).to(tl.float32) + weight_offset)
            dx = rstd * (g - xhat * tl.load(MEAN + row))
            if DH is not None:
                dx += tl.load(DH + row * stride_hm + col * stride_hn, inside, 0.0).to(tl.float32)
            tl.store(DX + row * stride_dm + col, dx.to(DX.dtype.element_ty), inside)
    if DW is not None:
        tl.store(DW + tl.program_id(0).to(tl.int64) * N + col, dw, inside)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("M",), default=lambda a: dict(ROWS=32, BLOCK=64, num_warps=4))
def sum_columns(P, OUT, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[n] = sum over m of P[m, n], always in the same order."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, M, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(P + row.to(tl.int64) * N + col, (row < M) & (col < N), 0.0)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + c, tl.sum(total, axis=0).to(OUT.dtype.element_ty), c < N)


def launch_forward(x, residual, weight, rstd_in, y, h, rstd, eps, weight_offset) -> None:
    M, N = x.shape
    BLOCK = power_of_two(N)
    SINGLE = BLOCK <= WIDEST
    strides = residual.stride() if residual is not None else (0, 0)
    rms_norm_forward(
        x, residual, weight, rstd_in, y, h, rstd, M, N, *x.stride(), *strides, N, N, eps, weight_offset,
        BLOCK=BLOCK if SINGLE else 4096, SINGLE=SINGLE,
    )  # fmt: skip


def vector(t: Tensor | None) -> Tensor | None:
    """A contiguous one-dimensional operand."""
    return None if t is None else t.reshape(-1)


def forward(x, weight, eps, *, weight_offset, rstd, out_format, out) -> Tensor:
    y = out if out is not None else torch.empty_like(x, memory_format=torch.contiguous_format)
    launch_forward(rows(x), None, vector(weight), vector(rstd), y, None, None, eps, weight_offset)
    return y


def forward_rstd(x, weight, eps, *, weight_offset, out_format) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launch_forward(rows(x), None, vector(weight), None, y, None, rstd, eps, weight_offset)
    return y, rstd


def forward_add(x, residual, weight, eps, *, weight_offset, out_format) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = torch.empty_like(y)
    launch_forward(rows(x), rows(residual), vector(weight), None, y, h, None, eps, weight_offset)
    return y, h


def gradients(x, weight, rstd, dy, dh, eps, weight_offset, needs) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), None where not needed. dweight is summed in fp32, per program and then over programs: no atomics."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if "x" in needs or "residual" in needs else None
    dweight = torch.empty_like(weight) if "weight" in needs else None
    x2, dy2 = rows(x), rows(dy)
    M, N = x2.shape
    dh2 = rows(dh) if dh is not None else None
    BLOCK = power_of_two(N)
    SMS = Target.of(x.get_device()).sms if x.is_cuda else 4
    strides = (*x2.stride(), *dy2.stride(), *(dh2.stride() if dh2 is not None else (0, 0)), N)
    common = (eps, weight_offset)
    PROGRAMS = max(1, min(2 * SMS, cdiv(M, max(1, 2048 // BLOCK))))
    part = torch.empty(PROGRAMS, N, dtype=torch.float32, device=x.device) if dweight is not None else None
    if BLOCK <= WIDEST:
        rms_norm_backward(x2, weight, vector(rstd), dy2, dh2, dx, part, M, N, *strides, *common, BLOCK=BLOCK, PROGRAMS=PROGRAMS)
    else:
        sums = torch.empty(2, M, dtype=torch.float32, device=x.device)
        rms_norm_row_sums(x2, weight, vector(rstd), dy2, sums[0], sums[1], M, N, *strides[:4], *common)
        rms_norm_backward_wide(x2, weight, sums[0], sums[1], dy2, dh2, dx, part, M, N, *strides, weight_offset, BANDS=PROGRAMS)
    if dweight is not None:
        sum_columns(part, dweight, PROGRAMS, N)
    return dx, dweight


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    return gradients(saved.x, saved.weight, getattr(saved, "rstd", None), dy, None, saved.eps, saved.weight_offset, saved.needs)


def backward_add(saved: SimpleNamespace, dy: Tensor | None, dh: Tensor | None) -> tuple:
    if dy is None:
        return dh, dh, None
    dx, dweight = gradients(saved.h, saved.weight, None, dy, dh, saved.eps, saved.weight_offset, saved.needs)
    return dx, dx, dweight


def no_double(target: Target, a: SimpleNamespace) -> bool:
    return all(t is None or t.dtype != torch.float64 for t in vars(a).values() if isinstance(t, Tensor))


WHERE = {"x": "float[... hidden]", "weight": "float[hidden]", "eps": at_least(0.0)}

rms_norm_rstd = Op(
    "rms_norm_rstd", reference_rstd, inputs, Triton(forward_rstd, backward, no_double), where=WHERE,
    results=("y", "rstd"), differentiable=("x", "weight"), saves=("x", "weight", "rstd"),
)  # fmt: skip
add_rms_norm = Op(
    "add_rms_norm", reference_add, inputs_add, Triton(forward_add, backward_add, no_double),
    where={**WHERE, "residual": "x[... hidden]"}, results=("y", "h"), graded_results=(0, 1),
    differentiable=("x", "residual", "weight"), saves=("weight", "h"),
    resume=lambda saved: {**vars(saved), "x": saved.h, "residual": torch.zeros_like(saved.h)},
)  # fmt: skip
rms_norm = Op(
    "rms_norm", reference, inputs, Triton(forward, backward, no_double),
    where={**WHERE, "rstd": "float32[...]", "out": "x[... hidden]"}, differentiable=("x", "weight"),
)  # fmt: skip
