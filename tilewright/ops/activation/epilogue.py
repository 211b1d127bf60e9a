"""What follows a product, as an op of its own: y = residual + alpha * gate * act(x + bias + add).

Backward, with a = x + bias + add and t = alpha * dy: dx = t * gate * act'(a), and dbias and dadd are the same; dgate = t * act(a);
dresidual = dy. The gradient of an operand that was broadcast is the sum over what it was broadcast to, in a fixed order.

Operands are read as they lie. Dimensions that lie alike in all of them are one loop: four loops and the columns are what a launch
takes, so that transposed, sliced and repeated tensors, and patches of images, are not copied before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.tensor import cdiv, name_of, power_of_two
from ...device.activation import activate, activate_slope
from ...device.dependent import begin_dependent
from ...formats.fill import fill, fill_from
from ...op import Bars, Gradient, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from .glu import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of results


def reference(
    x: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out_format: Format | None = None,
) -> Tensor:
    """`residual + alpha * gate * act(x + bias + add)`, in fp32 and rounded once; what is None is left out.

    `bias`, `add` and `gate` broadcast to the shape of `x`, as in torch; `residual` has that shape. A number that changes between
    replays of a graph, a step size say, is a `gate` of one element. Nothing is copied before: `x` may be a slice, a transposed or
    an expanded tensor. The result is of `residual`'s dtype, or without one of `x`'s; `out_dtype` is another, and float64 operands
    give float64. It may be stored over `residual` or over `x` (`out=residual`). `out_format` gives a `Quantized` result.
    """
    y = upcast(x)
    for t in (bias, add):
        y = y if t is None else y + upcast(t)
    y = y if act is None else ACTIVATIONS[act](y, 1.0)
    y = y if gate is None else y * upcast(gate)
    y = y if alpha == 1.0 else alpha * y
    y = y if residual is None else upcast(residual) + y
    return store(y, out_format, result_dtype(x, bias, add, gate, residual, out_dtype))


def result_dtype(x, bias, add, gate, residual, out_dtype) -> torch.dtype:
    if any(t is not None and t.dtype == torch.float64 for t in (x, bias, add, gate, residual)):
        return torch.float64
    return out_dtype or (x if residual is None else residual).dtype


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    spans = {"all": (tokens, hidden), "columns": (hidden,), "rows": (tokens, 1), "one": (1,)}

    def operand(name: str, *of: str, **how: float) -> Tensor | None:
        over = draw.option(f"{name}_over", *of)
        return draw.maybe(name, lambda: draw.tensor(*spans[over], **how))

    return {
        "x": draw.tensor(tokens, hidden, scale=2.0),
        "bias": operand("bias", "columns"),
        "add": operand("add", "all", "columns"),
        "act": draw.option("act", None, *ACTIVATIONS),
        "gate": operand("gate", "all", "rows", "one", scale=0.5, shift=1.0),
        "residual": draw.maybe("residual", lambda: draw.tensor(tokens, hidden)),
        "alpha": draw.option("alpha", 1.0, -0.3),
        "out_dtype": draw.option("out_dtype", None, torch.float32),
    }


# ---------------------------------------------------------------- on the device


class Source(NamedTuple):
    """The operands, and how they are gone through: sizes of the inner three of four loops of rows, and strides of each operand,
    the outermost loop's first, the columns' last. It is flat, for Triton 3.6 takes a stride of 1 in a tuple in a tuple for None."""

    x: Any
    bias: Any
    add: Any
    gate: Any
    residual: Any
    alpha: Any
    n1: Any
    n2: Any
    n3: Any
    x4: Any
    x3: Any
    x2: Any
    x1: Any
    x0: Any
    b4: Any
    b3: Any
    b2: Any
    b1: Any
    b0: Any
    a4: Any
    a3: Any
    a2: Any
    a1: Any
    a0: Any
    g4: Any
    g3: Any
    g2: Any
    g1: Any
    g0: Any
    r4: Any
    r3: Any
    r2: Any
    r1: Any
    r0: Any


class Laid(NamedTuple):
    """A result or its gradient, gone through like the operands."""

    data: Any
    s4: Any
    s3: Any
    s2: Any
    s1: Any
    s0: Any


@triton.jit
def offset(S, row, col, s4, s3, s2, s1, s0):
    """Where element (row, col) lies. Rows run over four loops, of which the outermost has all that is left."""
    rest = row // S.n1
    i2 = rest % S.n2
    rest = rest // S.n2
    return rest // S.n3 * s4 + rest % S.n3 * s3 + i2 * s2 + row % S.n1 * s1 + col.to(tl.int64) * s0


@triton.jit
def load_sum(S, row, col, inside):
    """x + bias + add in fp32."""
    a = tl.load(S.x + offset(S, row, col, S.x4, S.x3, S.x2, S.x1, S.x0), inside, 0.0).to(tl.float32)
    if S.bias is not None:
        a += tl.load(S.bias + offset(S, row, col, S.b4, S.b3, S.b2, S.b1, S.b0), inside, 0.0).to(tl.float32)
    if S.add is not None:
        a += tl.load(S.add + offset(S, row, col, S.a4, S.a3, S.a2, S.a1, S.a0), inside, 0.0).to(tl.float32)
    return a


@triton.jit
def load_gate(S, row, col, inside):
    """alpha * gate in fp32; None where there is neither."""
    g = S.alpha
    if S.gate is not None:
        g = tl.load(S.gate + offset(S, row, col, S.g4, S.g3, S.g2, S.g1, S.g0), inside, 0.0).to(tl.float32)
        if S.alpha is not None:
            g *= S.alpha
    return g


@triton.jit
def produce(SOURCE, row, col, inside, MODE: tl.constexpr):
    """Rows of y. MODE is the activation, or none."""
    S = SOURCE
    y = load_sum(S, row, col, inside)
    if MODE != "none":
        y = activate(y, 1.0, MODE)
    g = load_gate(S, row, col, inside)
    if g is not None:
        y *= g
    if S.residual is not None:
        y += tl.load(S.residual + offset(S, row, col, S.r4, S.r3, S.r2, S.r1, S.r0), inside, 0.0).to(tl.float32)
    return y


def _shape(a: Any, size: int = 1024, warps: int = 4) -> dict[str, int]:
    # In bf16 one 16-byte access a thread of each operand, whatever the shape of the tile
    COLS = min(1024, power_of_two(a.N))
    return {"ROWS": max(1, size // COLS), "COLS": COLS, "num_warps": warps}


TILES = {
    "grid": lambda a: (cdiv(a.M, a.ROWS) * cdiv(a.N, a.COLS),),
    "tokens": ("M",),
    "tune_by": ("N",),
    "default": _shape,
    "candidates": lambda a: [_shape(a, size, warps) for size, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8))],
}


@triton.jit
def tile(M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(rows, columns, which of them there are) of this program."""
    across = tl.cdiv(N, COLS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    return row, col, (row < M) & (col < N)


@kernel(**TILES, dependent=True)
def epilogue_forward(
    SOURCE, Y, M, N, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Y may lie on x or on the residual: a tile has an element or more for each thread, so that no two threads hold the same."""
    begin_dependent(DEPENDENT)
    row, col, inside = tile(M, N, ROWS, COLS)
    y = produce(SOURCE, row, col, inside, ACT)
    at = offset(SOURCE, row, col, Y.s4, Y.s3, Y.s2, Y.s1, Y.s0)
    tl.store(Y.data + at, y.to(Y.data.dtype.element_ty), inside)


@kernel(**TILES)
def epilogue_backward(SOURCE, DY, DX, DB, DA, DG, DR, M, N, ACT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The terms of every gradient that is wanted, in contiguous memory of x's shape: what was broadcast is summed after."""
    row, col, inside = tile(M, N, ROWS, COLS)
    at = row * N + col
    dy = tl.load(DY.data + offset(SOURCE, row, col, DY.s4, DY.s3, DY.s2, DY.s1, DY.s0), inside, 0.0).to(tl.float32)
    if DR is not None:
        tl.store(DR + at, dy.to(DR.dtype.element_ty), inside)
    if ACT != "none" or DG is not None:
        value = load_sum(SOURCE, row, col, inside)
        slope = 1.0
        if ACT != "none":
            value, slope = activate_slope(value, 1.0, ACT)
        if DG is not None:
            t = dy * value
            if SOURCE.alpha is not None:
                t *= SOURCE.alpha
            tl.store(DG + at, t.to(DG.dtype.element_ty), inside)
    g = load_gate(SOURCE, row, col, inside)
    if g is not None:
        dy *= g
    if ACT != "none":
        dy *= slope
    if DX is not None:
        tl.store(DX + at, dy.to(DX.dtype.element_ty), inside)
    if DB is not None:
        tl.store(DB + at, dy.to(DB.dtype.element_ty), inside)
    if DA is not None:
        tl.store(DA + at, dy.to(DA.dtype.element_ty), inside)


STEPS = 8  # tiles that a program of `sum_middle` adds up


def summed_tile(B: int) -> tuple[int, int]:
    """(rows, columns) of a tile of 2048 numbers: columns side by side, as many as a warp reads in a row of its own."""
    columns = min(128, power_of_two(B))
    return 2048 // columns, columns


@kernel(
    grid=lambda a: (a.A * a.chunks * cdiv(a.B, a.COLS),), tokens=("A", "R", "chunks"),
    default=lambda a: {**dict(zip(("ROWS", "COLS"), summed_tile(a.B))), "num_warps": 4},
)  # fmt: skip
def sum_middle(P, S, A, R, B, chunks, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """S[a, chunk, b] = sum of P[a, r, b] over the STEPS * ROWS rows r of a chunk, always in the same order."""
    across = tl.cdiv(B, COLS)
    b = (tl.program_id(0) % across).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    rest = tl.program_id(0) // across
    chunk = (rest % chunks).to(tl.int64)
    a = (rest // chunks).to(tl.int64)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(STEPS):
        r = (chunk * STEPS + step) * ROWS + tl.arange(0, ROWS)[:, None]
        total += tl.load(P + (a * R + r) * B + b, (r < R) & (b < B), 0.0).to(tl.float32)
    to = S + (a * chunks + chunk) * B + b
    tl.store(to, tl.sum(total, 0)[None, :].to(S.dtype.element_ty), b < B)


# ---------------------------------------------------------------- loops

ROOM = 3  # operands of a 128x128 tile that ptxas holds without spilling (Triton 3.6, sm_90); of more, y is stored in fp32 before
MOST = 4  # loops of rows
NARROW = 128  # columns, below which the columns take in the dimension before them: patches of images have 3


def strides_in(t: Tensor | None, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of an operand seen in that shape: 0 where it is repeated."""
    if t is None:
        return None
    missing = len(shape) - t.dim()
    own = zip(t.shape, t.stride(), shape[missing:])
    return (0,) * missing + tuple(0 if size == 1 and whole != 1 else stride for size, stride, whole in own)


class Loops(NamedTuple):
    """How many `rows` and `columns` there are, `sizes` of the inner three loops of rows, and five `strides` of each operand."""

    rows: int
    columns: int
    sizes: tuple[int, ...]
    strides: list[tuple]


def loops(shape: Sequence[int], operands: Iterable[Tensor | None], merge: bool = True) -> Loops | None:
    """The fewest loops over all elements in the order of `shape`; None if they are too many. `merge`: columns may be those of
    several dimensions."""
    given = [strides_in(t, shape) for t in operands]
    there = [own for own in given if own is not None]
    made: list[tuple[int, list[int]]] = []  # size and strides of each loop, the columns first
    for d in reversed(range(len(shape))):
        steps = [own[d] for own in there]
        if not made:
            made.append((shape[d], steps))
            continue
        size, inner = made[-1]
        if shape[d] == 1 and not (len(made) == 1 and math.prod(shape[:d]) == 1):
            continue  # but one row keeps the stride that many would have: 0 would be a variant of its own
        lies_on = all(step == size * own for step, own in zip(steps, inner))
        if lies_on and (len(made) > 1 or (merge and size < NARROW)):
            made[-1] = size * shape[d], inner
        else:
            made.append((shape[d], steps))
    columns, *rows = made
    if len(rows) > MOST:
        return None
    # One loop is the outermost, whose size no kernel asks for
    inner, outer = [size for size, _ in rows[:-1]], rows[-1:] or [(1, [0] * len(there))]
    sizes = (*inner, *(1 for _ in range(MOST - 1 - len(inner))))
    spare = [0] * (MOST - 1 - len(inner))
    found = iter(
        (outer[0][1][i], *spare, *(steps[i] for _, steps in reversed(rows[:-1])), columns[1][i])
        for i in range(len(there))
    )
    strides = [(None,) * 5 if own is None else next(found) for own in given]
    return Loops(math.prod(size for size, _ in rows), columns[0], sizes, strides)


def source_of(operands: Sequence[Tensor | None], alpha: float, found: Loops) -> Source:
    strides = [step for own in found.strides[:5] for step in own]
    return Source(*operands, None if alpha == 1.0 else alpha, *found.sizes, *strides)


def laid(t: Tensor, found: Loops) -> Laid:
    """A result, or its gradient: the last of what was gone through."""
    return Laid(t, *found.strides[-1])


def gone_through(shape: Sequence[int], operands: Sequence[Tensor | None], last: Tensor | None, merge: bool = True):
    """(the operands, loops over them and `last`). Operands are copied where there would be too many loops."""
    found = loops(shape, (*operands, last), merge)
    if found is None:
        operands = [None if t is None else t.expand(shape).contiguous() for t in operands]
        found = loops(shape, (*operands, last), merge)
    return operands, found


# ---------------------------------------------------------------- host


def forward(x, *, bias, add, act, gate, residual, alpha, out_dtype, out_format) -> Tensor:
    operands, dtype = [x, bias, add, gate, residual], result_dtype(x, bias, add, gate, residual, out_dtype)
    shape = x.shape or (1,)
    if out_format is None:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        return store_plain(y, shape, operands, act, alpha)
    y = out_format.empty(shape, dtype, x.device)
    if sum(t is not None for t in operands) > ROOM:
        wide = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=torch.float32, device=x.device)
        store_plain(wide.view(shape), shape, operands, act, alpha)
        fill_from(y, wide, out_format.tensor)
    else:
        operands, found = gone_through(shape, operands, None, merge=False)
        fill(y, produce, source_of(operands, alpha, found), act or "none", out_format.tensor)
    return y


def store_plain(
    y: Tensor, shape: Sequence[int], operands: Sequence[Tensor | None], act: str | None, alpha: float
) -> Tensor:
    """y, filled."""
    operands, found = gone_through(shape, operands, y)
    to = y
    if found is None:  # memory of the caller's that is as far from contiguous
        to = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        found = loops(shape, (*operands, to))
    epilogue_forward(source_of(operands, alpha, found), laid(to, found), found.rows, found.columns, ACT=act or "none")
    return y if to is y else y.copy_(to)


NAMES = ("x", "bias", "add", "gate", "residual")


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    x, shape = saved.x, saved.x.shape or (1,)
    wanted = {n: getattr(saved, n) for n in NAMES if n in saved.needs}
    repeated = {n for n, t in wanted.items() if t.shape != x.shape}
    terms = {
        n: torch.empty(x.shape, dtype=torch.float32 if n in repeated else t.dtype, device=x.device)
        for n, t in wanted.items()
    }
    reads = saved.act is not None or "gate" in wanted
    operands = [*((x, saved.bias, saved.add) if reads else (None,) * 3), saved.gate, None]
    operands, found = gone_through(shape, operands, dy)
    if found is None:
        dy = dy.contiguous()
        found = loops(shape, (*operands, dy))
    source, pointers = source_of(operands, saved.alpha, found), map(terms.get, NAMES)
    epilogue_backward(source, laid(dy, found), *pointers, found.rows, found.columns, ACT=saved.act or "none")
    made = {n: summed(t, wanted[n]) if n in repeated else t for n, t in terms.items()}
    return tuple(map(made.get, NAMES))


def summed(terms: Tensor, like: Tensor) -> Tensor:
    """Contiguous terms, summed over what `like` was broadcast to; runs of dimensions one after the other, the last first."""
    missing = terms.dim() - like.dim()
    runs: list[list[int]] = []  # [elements, whether they are summed], runs of dimensions that are treated alike
    for size, kept in zip(terms.shape, (*(None for _ in range(missing)), *like.shape)):
        if kept == size == 1:
            continue
        if runs and runs[-1][1] == (kept != size):
            runs[-1][0] *= size
        else:
            runs.append([size, kept != size])
    while any(over for _, over in runs):
        at = max(i for i, (_, over) in enumerate(runs) if over)
        A, R, B = (math.prod(size for size, _ in some) for some in (runs[:at], runs[at : at + 1], runs[at + 1 :]))
        last = sum(over for _, over in runs) == 1
        while True:
            chunks = cdiv(R, STEPS * summed_tile(B)[0])
            final = last and chunks <= 1
            chunks = max(1, chunks)  # of nothing the sum is 0
            made = torch.empty(A * chunks * B, dtype=like.dtype if final else torch.float32, device=terms.device)
            sum_middle(terms, made, A, R, B, chunks, STEPS=STEPS)
            terms, R = made, chunks
            if chunks == 1:
                break
        del runs[at]
    return terms.view(like.shape)


def check(x, *, out_dtype, out_format, **_) -> None:
    if out_dtype is not None and out_dtype not in DTYPES:
        raise ValueError(
            f"epilogue: out_dtype must be one of {', '.join(map(name_of, DTYPES))}, got {name_of(out_dtype)}"
        )
    if out_format is not None and x.dim() == 0:
        raise ValueError("epilogue: out_format holds rows, and x has no dimension")


def dtype_row(a: SimpleNamespace) -> str:
    return f"{name_of(result_dtype(a.x, a.bias, a.add, a.gate, a.residual, a.out_dtype))}[...]"


def read_backward(values: dict[str, Any]) -> tuple[str, ...]:
    """Of what only enters a sum, without an activation and without a gate, the backward reads shape and dtype."""
    linear = values["act"] is None and values["gate"] is None
    return ("residual", *(("x", "bias", "add") if linear else ()))


epilogue = Op(
    "epilogue", reference, inputs, Triton(forward, backward, single),
    where={
        "x": "float[...]", "bias": "float[...?]", "add": "float[...?]", "gate": "float[...?]", "residual": "float[...]",
    },
    results={"y": dtype_row}, out=Out(lies_on={"y": ("residual", "x")}), check=check, bars=Bars("A"),
    gradient=Gradient(of=("x", "bias", "add", "gate", "residual"), shape_only=read_backward),
)  # fmt: skip
