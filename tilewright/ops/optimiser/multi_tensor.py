"""One pass over many tensors, as if they were one vector x of all their elements:

    multi_tensor_norm         (sum |x|^ord)^(1/ord), ord 1 or 2; or max |x|
    multi_tensor_count_zeros  how many x are +0 or -0
    multi_tensor_scale        x * scale * by, at most `limit` in size, tensor by tensor, into new memory or over the old

One launch for any number of tensors of any size, stride and dtype; a program takes one chunk (`multi_tensor_table`). Sums are
float64 from the first element on: squares of fp32 are exact in it, so nothing overflows that has a finite norm, and the
order of the sum does not show in the fp32 result. A second launch of one program sums over the chunks in a fixed order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import above, one_of
from ...core.target import Target
from ...op import Bars, Op, Triton, single, upcast
from ...runtime.kernel import kernel
from .multi_tensor_table import ALIGNED, DENSE, TILE, WORDS, foldable, table_of
from .shards import each_scaled, norm_of_whole, zeros_of_whole


def reference(tensors: list[Tensor], ord: float = 2.0) -> Tensor:
    """The 1-, 2- or inf-norm of all elements of all tensors together, an fp32 scalar (float64 if a tensor is).

    A NaN anywhere gives NaN, an infinity infinity. No tensors, or empty ones, have norm 0. DTensors give the norm of the
    whole tensors.
    """
    parts = [torch.linalg.vector_norm(t, ord, dtype=torch.float64) for t in tensors if t.numel()]
    wide = any(t.dtype == torch.float64 for t in tensors)
    device = tensors[0].device if tensors else None
    total = torch.linalg.vector_norm(torch.stack(parts), ord) if parts else torch.zeros((), device=device)
    return total.to(torch.float64 if wide else torch.float32)


def reference_zeros(tensors: list[Tensor]) -> Tensor:
    """How many elements of all tensors are zero, of either sign, an int64 scalar. DTensors give the count of the whole."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for t in tensors:
        total = total + (t == 0).sum()
    return total


def reference_scale(
    tensors: list[Tensor], scale: float = 1.0, *, by: Tensor | None = None, limit: float | None = None
) -> list[Tensor]:
    """Every tensor times `scale`, and times the scalar `by` if it is given, which stays on the device.

    What is above `limit` then is `limit`, what is below `-limit` is `-limit`; a NaN stays. `out=tensors` writes over the tensors
    themselves; where the factor is exactly 1 and there is no limit they are then not even read.
    """
    factor = scale if by is None else scale * upcast(by)
    scaled = [upcast(t) * factor for t in tensors]
    return [(y if limit is None else y.clamp(-limit, limit)).to(t.dtype) for t, y in zip(tensors, scaled)]


SHAPES = (("tokens", "hidden"), ("hidden",), (), ("tokens", 3, "hidden"), (0, 4), ("tokens", 1))


def inputs(draw: Draw) -> dict:
    return {"tensors": _drawn(draw), "ord": draw.option("ord", 2.0, 1.0, math.inf)}


def inputs_zeros(draw: Draw) -> dict:
    made = _drawn(draw)
    return {"tensors": [t.masked_fill(t.abs() < 0.5, -0.0 if i % 2 else 0.0) for i, t in enumerate(made)]}


def inputs_scale(draw: Draw) -> dict:
    by = draw.maybe("by", lambda: draw.uniform(dtype=torch.float32, low=0.1))
    limit = draw.option("limit", None, 0.6)
    return {"tensors": _drawn(draw), "scale": draw.option("scale", 1.0, 0.37), "by": by, "limit": limit}


def _drawn(draw: Draw) -> list[Tensor]:
    """Tensors of several shapes and dtypes, the largest in the drawn one; or a given number of equal ones."""
    if "count" in draw.options:
        return [draw.tensor("tokens", "hidden") for _ in range(draw.options["count"])]
    others = (draw.dtype, torch.float32, torch.bfloat16, torch.float16)
    return [draw.tensor(*shape, dtype=others[i % 4]) for i, shape in enumerate(SHAPES)]


# ---------------------------------------------------------------- kernels

ROW_WORDS = tl.constexpr(WORDS)
DENSE_BIT = tl.constexpr(DENSE)
ALIGNED_BIT = tl.constexpr(ALIGNED)
DTYPE_BITS = tl.constexpr(DENSE - 1)
LANE_BYTES = tl.constexpr(2048)  # 128 threads with 16 bytes each
ROWS = tl.constexpr(TILE // 2048)  # loads of a thread in flight


@triton.jit
def find_chunk(T, N):
    """(the table's row for this program's chunk, the chunk's number within its tensor)."""
    chunk = tl.program_id(0).to(tl.int64)
    row = T + tl.load(T + N.to(tl.int64) * ROW_WORDS + chunk) * ROW_WORDS
    return row, chunk - tl.load(row + 3)


@triton.jit
def offsets(row, at, WORD: tl.constexpr):
    """Where elements `at` lie, from the strides in the words `WORD` and the next: any order of dimensions, 64-bit."""
    columns = tl.load(row + 4)
    line = at // columns
    return line * tl.load(row + WORD) + (at - line * columns) * tl.load(row + WORD + 1)


@triton.jit
def gather(acc, x, KIND: tl.constexpr):
    """A tile into the accumulator of its lanes."""
    if KIND == "zeros":
        return acc + tl.sum((x == 0.0).to(tl.int32), axis=0)
    elif KIND == "largest":  # bits of |x| are in the order of |x|, with NaN above infinity
        return tl.maximum(acc, tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))
    elif KIND == "sum":
        return acc + tl.sum(tl.abs(x.to(tl.float64)), axis=0)
    else:
        wide = x.to(tl.float64)
        return acc + tl.sum(wide * wide, axis=0)


@triton.jit
def reduce_chunk(row, chunk, P, SPAN, KIND: tl.constexpr, DTYPE: tl.constexpr):
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    LANES: tl.constexpr = LANE_BYTES // SIZE
    STEP: tl.constexpr = ROWS * LANES
    # The hint stands here because the compiler loses one on what a called function gives
    X = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    first = chunk * (SPAN // (STEP * SIZE))  # in tiles
    start = first * STEP
    stop = tl.minimum(start + SPAN // SIZE, tl.load(row + 1))
    layout = tl.load(row + 2)
    lane = tl.arange(0, LANES)
    if KIND == "zeros" or KIND == "largest":
        acc = tl.zeros((LANES,), tl.int32)
    else:
        acc = tl.zeros((LANES,), tl.float64)
    if (layout & ALIGNED_BIT) != 0:
        tiles = (stop - start) // STEP
        for tile in range(first, first + tiles):
            acc = gather(acc, tl.load(X + (tile * STEP + tl.arange(0, ROWS)[:, None] * LANES + lane[None, :])), KIND)
        start += tiles * STEP
    Z = tl.load(row).to(tl.pointer_type(DTYPE))
    other = 1.0 if KIND == "zeros" else 0.0
    if (layout & DENSE_BIT) != 0:
        for at in range(start, stop, LANES):
            acc = gather(acc, tl.load(Z + at + lane, at + lane < stop, other)[None, :], KIND)
    else:
        for at in range(start, stop, LANES):
            acc = gather(acc, tl.load(Z + offsets(row, at + lane, 5), at + lane < stop, other)[None, :], KIND)
    total = tl.max(acc, axis=0) if KIND == "largest" else tl.sum(acc, axis=0)
    tl.store(P + tl.program_id(0), total.to(P.dtype.element_ty))


@kernel(
    grid=lambda a: (a.CHUNKS,), tokens=("N", "CHUNKS", "SPAN"),
    # Left alone the compiler takes 126 registers for the sums: four programs a processor instead of five
    default=lambda a: {"num_warps": 4, "maxnreg": 96},
)  # fmt: skip
def multi_tensor_reduce(T, P, N, CHUNKS, SPAN, KIND: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = find_chunk(T, N)
    dtype = tl.load(row + 2) & DTYPE_BITS
    if dtype == 0:
        reduce_chunk(row, chunk, P, SPAN, KIND, tl.float32)
    elif dtype == 1:
        reduce_chunk(row, chunk, P, SPAN, KIND, tl.bfloat16)
    else:
        reduce_chunk(row, chunk, P, SPAN, KIND, tl.float16)


@kernel(
    grid=lambda a: (1,), tokens=("CHUNKS",),
    default=lambda a: {"ACROSS": 1024, "DOWN": 8, "num_warps": 16, "launch_pdl": a.PDL},
)  # fmt: skip
def multi_tensor_finish(P, Y, CHUNKS, KIND: tl.constexpr, PDL: tl.constexpr, ACROSS: tl.constexpr, DOWN: tl.constexpr):
    """Always one program, always the same order."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((ACROSS,), P.dtype.element_ty)
    lane = tl.arange(0, DOWN)[:, None] * ACROSS + tl.arange(0, ACROSS)[None, :]
    for at in range(0, CHUNKS, DOWN * ACROSS):
        part = tl.load(P + at + lane, at + lane < CHUNKS, 0)
        if KIND == "largest":
            acc = tl.maximum(acc, tl.max(part, axis=0))
        else:
            acc += tl.sum(part, axis=0)
    if KIND == "largest":
        tl.store(Y, tl.max(acc, axis=0).to(tl.float32, bitcast=True))
    elif KIND == "squares":
        tl.store(Y, tl.sqrt(tl.sum(acc, axis=0)).to(tl.float32))
    else:
        tl.store(Y, tl.sum(acc, axis=0).to(Y.dtype.element_ty))


@triton.jit
def limited(x, limit):
    if limit is not None:
        x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def scale_chunk(row, chunk, SPAN, factor, limit, DTYPE: tl.constexpr):
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    LANES: tl.constexpr = LANE_BYTES // SIZE
    STEP: tl.constexpr = ROWS * LANES
    X = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    Y = tl.multiple_of(tl.load(row + 7).to(tl.pointer_type(DTYPE)), 16)
    first = chunk * (SPAN // (STEP * SIZE))  # in tiles
    start = first * STEP
    stop = tl.minimum(start + SPAN // SIZE, tl.load(row + 1))
    layout = tl.load(row + 2)
    lane = tl.arange(0, LANES)
    if (layout & ALIGNED_BIT) != 0:
        tiles = (stop - start) // STEP
        for tile in range(first, first + tiles):
            at = tile * STEP + tl.arange(0, ROWS)[:, None] * LANES + lane[None, :]
            tl.store(Y + at, limited(tl.load(X + at).to(tl.float32) * factor, limit).to(DTYPE))
        start += tiles * STEP
    Z = tl.load(row).to(tl.pointer_type(DTYPE))
    W = tl.load(row + 7).to(tl.pointer_type(DTYPE))
    if (layout & DENSE_BIT) != 0:
        for at in range(start, stop, LANES):
            x = tl.load(Z + at + lane, at + lane < stop, 0.0).to(tl.float32)
            tl.store(W + at + lane, limited(x * factor, limit).to(DTYPE), at + lane < stop)
    else:
        for at in range(start, stop, LANES):
            x = tl.load(Z + offsets(row, at + lane, 5), at + lane < stop, 0.0).to(tl.float32)
            tl.store(W + offsets(row, at + lane, 8), limited(x * factor, limit).to(DTYPE), at + lane < stop)


@kernel(grid=lambda a: (a.CHUNKS,), tokens=("N", "CHUNKS", "SPAN"), default=lambda a: {"num_warps": 4})
def multi_tensor_scale_forward(T, BY, N, CHUNKS, SPAN, scale, limit, OVER: tl.constexpr):
    factor = scale
    if BY is not None:
        factor = scale * tl.load(BY).to(tl.float32)
    if (factor != 1.0) | (not OVER) | (limit is not None):
        row, chunk = find_chunk(T, N)
        dtype = tl.load(row + 2) & DTYPE_BITS
        if dtype == 0:
            scale_chunk(row, chunk, SPAN, factor, limit, tl.float32)
        elif dtype == 1:
            scale_chunk(row, chunk, SPAN, factor, limit, tl.bfloat16)
        else:
            scale_chunk(row, chunk, SPAN, factor, limit, tl.float16)


# ---------------------------------------------------------------- host


def forward(tensors: list[Tensor], ord: float) -> Tensor:
    kind = {1.0: "sum", 2.0: "squares"}.get(ord, "largest")
    partial = torch.int32 if kind == "largest" else torch.float64
    return _reduced(tensors, kind, partial, torch.float32)


def forward_zeros(tensors: list[Tensor]) -> Tensor:
    return _reduced(tensors, "zeros", torch.int64, torch.int64)


def _reduced(tensors: list[Tensor], kind: str, partial: torch.dtype, result: torch.dtype) -> Tensor:
    device = tensors[0].device
    if not any(t.numel() for t in tensors):
        return torch.zeros((), dtype=result, device=device)
    held = [t if foldable(t) else t.contiguous() for t in tensors]  # to the end: the table has their addresses alone
    table = table_of(held)
    P = torch.empty(table.chunks, dtype=partial, device=device)
    y = torch.empty((), dtype=result, device=device)
    PDL = Target.at(device).early_launch
    multi_tensor_reduce(table.words, P, table.rows, table.chunks, table.span, KIND=kind, PDL=PDL)
    multi_tensor_finish(P, y, table.chunks, KIND=kind, PDL=PDL)
    return y


def forward_scale(
    tensors: list[Tensor], scale: float, *, by: Tensor | None, limit: float | None, out: list[Tensor] | None
) -> list[Tensor]:
    results = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors] if out is None else out
    if not any(t.numel() for t in tensors):
        return results
    sources, targets = list(tensors), list(results)
    for i, (t, y) in enumerate(zip(tensors, results)):
        if not foldable(t, y):
            sources[i] = t.contiguous()
            targets[i] = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    over = all(t is y or t.data_ptr() == y.data_ptr() for t, y in zip(sources, targets) if t.numel())
    table = table_of(sources, sources if results is tensors and over else targets)
    multi_tensor_scale_forward(table.words, by, table.rows, table.chunks, table.span, float(scale), limit, OVER=over)
    for y, made in zip(results, targets):
        if y is not made:
            y.copy_(made)
    return results


def sharded_norm(tensors: list[Tensor], ord: float, out: Tensor | None = None) -> Tensor:
    norm = norm_of_whole(multi_tensor_norm, tensors, ord)
    return norm if out is None else out.copy_(norm)


def sharded_zeros(tensors: list[Tensor], out: Tensor | None = None) -> Tensor:
    count = zeros_of_whole(multi_tensor_count_zeros, tensors)
    return count if out is None else out.copy_(count)


def sharded_scale(
    tensors: list[Tensor], *, by: Tensor | None, out: list[Tensor] | None, **given: float
) -> list[Tensor]:
    return each_scaled(multi_tensor_scale, tensors, by, out, **given)


multi_tensor_norm = Op(
    "multi_tensor_norm", reference, inputs, Triton(forward, when=single),
    where={"tensors": "float[...]", "ord": one_of(1.0, 2.0, math.inf)}, sharded=sharded_norm, bars=Bars("B"),
    results={"out": lambda a: "float64[]" if any(t.dtype == torch.float64 for t in a.tensors) else "float32[]"},
)  # fmt: skip
multi_tensor_count_zeros = Op(
    "multi_tensor_count_zeros", reference_zeros, inputs_zeros, Triton(forward_zeros, when=single),
    where={"tensors": "float[...]"}, results={"out": "int64[]"}, sharded=sharded_zeros, bars=Bars("G"),
)  # fmt: skip
multi_tensor_scale = Op(
    "multi_tensor_scale", reference_scale, inputs_scale, Triton(forward_scale, when=single, out=True),
    where={"tensors": "float[...]", "by": "float[]", "limit": above(0.0)}, results={"out": "tensors[...]"},
    sharded=sharded_scale, bars=Bars("A"),
)  # fmt: skip
