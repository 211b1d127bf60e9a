"""Keys or values as codes, a scale for each token and head, with a mean over tokens taken off before if that is given.

    mean = sum of x over tokens / tokens;   scale = amax(x - mean) / 127 or 448;   code = round((x - mean) / scale)

The mean goes over the tokens that are there, and what is not finite counts as 0 in it: tokens that nobody sees may hold anything.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.tensor import cdiv, power_of_two
from ..device.quantize import amax, finite
from ..formats.fill import is_fast
from ..formats.fp8 import fp8
from ..formats.integers import int8
from ..op import Bars, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from .cache_write import codes_of, own_scale
from .cached_parts import as_codes
from .portable import heads_of

Kind = Literal["int8", "fp8"]
PART = 512  # tokens that one program adds up


def reference_mean(x: Tensor, there: Tensor | None = None) -> Tensor:
    """The mean [batch, kv_heads, columns] of `x` [batch, keys, kv_heads, columns] over its keys; what is not finite counts as 0.

    `there`, bool [batch, keys], says which keys count, where not all do; the mean of none is 0.
    """
    y = upcast(x)
    if there is None:
        return torch.where(y.isfinite(), y, 0.0).sum(1) / max(1, x.shape[1])
    kept = y.isfinite() & there[:, :, None, None]
    return torch.where(kept, y, 0.0).sum(1) / there.sum(1).clamp(min=1)[:, None, None]


def reference(x: Tensor, mean: Tensor | None = None, *, kind: Kind = "int8") -> tuple[Tensor, Tensor]:
    """(codes, scales [batch, keys, kv_heads]) of `x` [batch, keys, kv_heads, columns], less `mean` [batch, kv_heads, columns] if
    that is given, by the rules of `int8("row")` and `fp8("row", pow2=False, rule="exact")`."""
    y = x.float() if mean is None else x.float() - mean.float()[:, None]
    made = (int8("row") if kind == "int8" else fp8("row", pow2=False, rule="exact")).quantize(y)
    return made.data, made.scale.reshape(x.shape[:-1])


def draw_rows(draw: Draw) -> Tensor:
    width = draw.dim("head_dim", (64, 40, 17, 72, 8, 128))
    return draw.tensor("batch", "length", draw.dim("heads", (1, 2, 4, 3)), width, shift=0.5)


def inputs_mean(draw: Draw) -> dict[str, Any]:
    x = draw_rows(draw)
    there = draw.maybe("there", lambda: draw.uniform(*x.shape[:2], dtype=torch.float32) < 0.7)
    return {"x": x, "there": there}


def inputs(draw: Draw) -> dict[str, Any]:
    x = draw_rows(draw)
    given = draw.maybe("mean", lambda: draw.tensor(x.shape[0], *x.shape[2:], dtype=torch.float32))
    return {"x": x, "mean": given, "kind": draw.option("kind", "int8", "fp8")}


@triton.jit
def load_codes(X, batch, head, token, live, COLUMNS: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[n, WIDTH] codes or numbers of tokens [n] of one head, 0 where there are none; a number of no width."""
    if WIDTH == 0:
        return 0.0
    else:
        column = FROM + tl.arange(0, WIDTH)
        at = batch.to(tl.int64) * X.stride_b + head.to(tl.int64) * X.stride_h
        at = at + token.to(tl.int64)[:, None] * X.stride_t + column.to(tl.int64)[None, :] * X.stride_d
        ZERO: tl.constexpr = 0 if X.data.dtype.element_ty.is_int() else 0.0
        return tl.load(X.data + at, live[:, None] & (column < COLUMNS)[None, :], ZERO)


@triton.jit
def load_scale(S, batch, head, token, live):
    """Scales of tokens [n]; NaN where one is not finite, which is that of no codes."""
    at = batch.to(tl.int64) * S.stride_b + token.to(tl.int64) * S.stride_t + head.to(tl.int64) * S.stride_h
    s = tl.load(S.data + at, live, 0.0).to(tl.float32)
    return s + s * 0.0


@kernel(
    grid=lambda a: (a.PARTS, a.HEADS, a.BATCH), tokens=("KEYS", "PARTS", "HEADS", "BATCH"),
    default=lambda a: {"BLOCK_R": max(1, 4096 // a.WIDTH), "num_warps": 4},
)  # fmt: skip
def attention_mean_parts(
    X, THERE, stride_tb, stride_tt, P, N, KEYS, PARTS, HEADS, BATCH, COLUMNS, PART: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """P [batch, heads, PARTS, COLUMNS]: sums over PART tokens each, of those that are THERE; N [batch, heads, PARTS] how many these
    are. Both None: all tokens are."""
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK_R, WIDTH], tl.float32)
    count = tl.zeros([BLOCK_R], tl.int32)
    for first in range(part * PART, tl.minimum(part * PART + PART, KEYS), BLOCK_R):
        token = first + tl.arange(0, BLOCK_R)
        live = (token < KEYS) & (token < part * PART + PART)
        if THERE is not None:
            live &= tl.load(THERE + batch * stride_tb + token.to(tl.int64) * stride_tt, live, 0) != 0
            count += live.to(tl.int32)
        inside = live[:, None] & (column < COLUMNS)[None, :]
        at = batch * X.stride_b + head * X.stride_h + token.to(tl.int64)[:, None] * X.stride_t
        total += finite(tl.load(X.data + at + column.to(tl.int64)[None, :] * X.stride_d, inside, 0.0).to(tl.float32))
    to = ((batch * HEADS + head) * PARTS + part) * COLUMNS + column
    tl.store(P + to, tl.sum(total, 0), column < COLUMNS)
    if N is not None:
        tl.store(N + (batch * HEADS + head) * PARTS + part, tl.sum(count, 0))


@kernel(
    grid=lambda a: (a.HEADS, a.BATCH), tokens=("KEYS", "PARTS", "HEADS", "BATCH"), default=lambda a: {"num_warps": 4}
)
def attention_mean_of_parts(P, N, M, KEYS, PARTS, HEADS, BATCH, COLUMNS, WIDTH: tl.constexpr):
    """M [batch, heads, COLUMNS]: parts added up in their order, over KEYS, or over the sum of N."""
    unit = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    if N is None:
        count = KEYS
    else:
        count = tl.zeros([], tl.int32)
    for part in range(PARTS):
        total += tl.load(P + (unit * PARTS + part) * COLUMNS + column, column < COLUMNS, 0.0)
        if N is not None:
            count += tl.load(N + unit * PARTS + part)
    mean = tl.div_rn(total, tl.maximum(count, 1).to(tl.float32))
    tl.store(M + unit * COLUMNS + column, mean, column < COLUMNS)


@kernel(
    grid=lambda a: (cdiv(a.KEYS, a.BLOCK_R), a.HEADS, a.BATCH), tokens=("KEYS", "HEADS", "BATCH"),
    default=lambda a: {"BLOCK_R": max(1, 4096 // a.WIDTH), "num_warps": 4},
)  # fmt: skip
def attention_code_rows(
    X, M, C, S, KEYS, HEADS, BATCH, COLUMNS, FORMAT: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr
):
    """C as X, contiguous, S [batch, KEYS, heads]; M None: nothing is taken off."""
    token = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    live = token < KEYS
    inside = live[:, None] & (column < COLUMNS)[None, :]
    at = batch * X.stride_b + head * X.stride_h + token.to(tl.int64)[:, None] * X.stride_t
    y = tl.load(X.data + at + column.to(tl.int64)[None, :] * X.stride_d, inside, 0.0).to(tl.float32)
    if M is not None:
        y -= tl.load(M + (batch * HEADS + head) * COLUMNS + column, column < COLUMNS, 0.0)[None, :]
        y = tl.where(inside, y, 0.0)
    s, mult = own_scale(amax(y, 1), FORMAT)
    row = (batch * KEYS + token) * HEADS + head
    tl.store(S + row, s, live)
    codes = codes_of(y, s[:, None], mult[:, None], FORMAT)
    tl.store(C + row[:, None] * COLUMNS + column[None, :], codes, inside)


def forward_mean(x: Tensor, there: Tensor | None) -> Tensor:
    batch, keys, heads, columns = x.shape
    mean = torch.empty(batch, heads, columns, dtype=torch.float32, device=x.device)
    if mean.numel():
        width, parts = max(16, power_of_two(columns)), cdiv(keys, PART)
        sums = torch.empty(batch, heads, parts, columns, dtype=torch.float32, device=x.device)
        counts = None if there is None else torch.empty(batch, heads, parts, dtype=torch.int32, device=x.device)
        strides = (0, 0) if there is None else there.stride()
        if parts:
            attention_mean_parts(
                heads_of(x), there, *strides, sums, counts, keys, parts, heads, batch, columns, PART=PART, WIDTH=width
            )
        attention_mean_of_parts(sums, counts, mean, max(1, keys), parts, heads, batch, columns, WIDTH=width)
    return mean


def forward(x: Tensor, mean: Tensor | None, *, kind: Kind) -> tuple[Tensor, Tensor]:
    batch, keys, heads, columns = x.shape
    codes = torch.empty(x.shape, dtype=dtype_of(kind), device=x.device)
    scale = torch.empty(batch, keys, heads, dtype=torch.float32, device=x.device)
    if codes.numel():
        words = ("int8" if kind == "int8" else "e4m3") + ":row:fp32:exact" + (":fast" if is_fast(x) else "")
        attention_code_rows(
            heads_of(x), None if mean is None else mean.contiguous(), as_codes(codes), scale, keys, heads, batch, columns,
            FORMAT=words, WIDTH=max(16, power_of_two(columns)),
        )  # fmt: skip
    return codes, scale


def dtype_of(kind: Kind) -> torch.dtype:
    return torch.int8 if kind == "int8" else torch.float8_e4m3fn


def check(x: Tensor, mean: Tensor | None, kind: Kind) -> None:
    if not x.shape[3]:
        raise ValueError("attention_rows: x must have columns, got none")


X = "float[batch length heads head_dim]"
attention_mean = Op(
    "attention_mean", reference_mean, inputs_mean, Triton(forward_mean, None, single),
    where={"x": X, "there": "bool[batch length]"},
    results={"mean": "wide(x)[batch heads head_dim]"}, out=Out(contiguous=("mean",)), bars=Bars("C"), internal=True,
)  # fmt: skip
attention_rows = Op(
    "attention_rows", reference, inputs, Triton(forward, None, single),
    where={"x": X, "mean": "float32[batch heads head_dim]"},
    results={
        "codes": lambda a: f"{str(dtype_of(a.kind)).removeprefix('torch.')}[batch length heads head_dim]",
        "scale": "float32[batch length heads]",
    },
    check=check, out=Out(contiguous=("codes", "scale")), bars=Bars("G"), internal=True,
)  # fmt: skip
