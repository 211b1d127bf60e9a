"""Keys or values as codes, with a mean over tokens taken off before if that is given.

    mean = sum of x over tokens / tokens;   scale = amax(x - mean) / 127 or 448;   code = round((x - mean) / scale)

The mean goes over the tokens that are there, and what is not finite counts as 0 in it: tokens that nobody sees may hold anything.

A scale is that of a token and head, or of a head and a block of 128 tokens. One for a block is a number that kernels multiply a
whole block with, where one for a token costs them an instruction for each score. Codes of e4m3 lose next to nothing by it, for
their precision is relative; those of INT8 lose a quarter to a half of theirs, and are never made so. Tokens of a block that nobody
sees may hold anything, so that the scale goes over the others: what a query sees is known where codes are made.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.signature import at_least
from ..core.tensor import cdiv, power_of_two
from ..device.quantize import amax, finite
from ..formats.fill import is_fast
from ..formats.fp8 import fp8
from ..formats.integers import int8
from ..op import Bars, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from . import attention as plain
from .cache_read import as_codes
from .cache_write import codes_of, own_scale
from .portable import heads_of, window_between
from .seen import room, seen, sequences
from .tiles import keys_of, keys_seen, lengths, tile_at

Kind = Literal["int8", "fp8"]
Scaled = Literal["key", "block"]  # what has a scale of its own, in each head
PART = 512  # tokens that one program adds up
SCALED = tl.constexpr(128)  # tokens of a block, counted from the first of their sequence


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


def reference_blocks(
    x: Tensor,
    length: int,
    mean: Tensor | None = None,
    *,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, scales [batch, keys, kv_heads]) as `attention_rows` makes them, in e4m3, but with one scale for each 128 keys of a
    sequence, from its first on: that of the largest finite number of those keys which any of `length` queries sees.

    What no query sees is 0, and what is not finite is e4m3's NaN.
    """
    keys, device = x.shape[1], x.device
    y = x.float() if mean is None else x.float() - mean.float()[:, None]
    queries = x.new_empty(1).expand(x.shape[0], length)
    visible = seen(queries, x, causal, left, right, kv_len, cu_seqlens_q, cu_seqlens_k).visible.any(1)
    y = torch.where(visible[..., None, None], y, 0.0)
    first = first_of_blocks(keys, cu_seqlens_k, device)
    own = torch.where(y.isfinite(), y, 0.0).abs().amax(-1)
    top = torch.zeros_like(own).scatter_reduce(1, first[:, None].expand_as(own), own, "amax")[:, first]
    scale = fp8("row", pow2=False, rule="exact").quantize(top[..., None]).scale.reshape(top.shape)
    codes = (y / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(y.isfinite(), codes, 0x7F).view(torch.float8_e4m3fn), scale


def first_of_blocks(keys: int, marks: Tensor | None, device: torch.device) -> Tensor:
    """The first key of each key's block, int64 [keys]."""
    return torch.arange(keys, device=device) - sequences(keys, marks, device)[1] % SCALED.value


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


def inputs_blocks(draw: Draw) -> dict[str, Any]:
    packed = draw.option("cu_seqlens_k", False, True)
    batch, length = 1 if packed else draw.dim("batch"), draw.dim("length")
    keys, heads = length + draw.option("more_keys", 0, 5, 150), draw.dim("heads", (1, 2, 4, 3))
    x = draw.tensor(batch, keys, heads, draw.dim("head_dim", (64, 40, 17, 72, 8, 128)), shift=0.5)
    causal = draw.option("causal", True, False)
    made = {
        "x": x,
        "length": length,
        "mean": draw.maybe("mean", lambda: draw.tensor(batch, *x.shape[2:], dtype=torch.float32)),
        "causal": causal,
        "left": draw.option("left", None, 2, 40),
        "right": None if causal else draw.option("right", None, 3),
    }
    sequences = batch
    if packed:
        marks = [plain.draw_marks(draw, count) for count in (length, keys)]
        made |= {"cu_seqlens_q": marks[0], "cu_seqlens_k": marks[1]}
        sequences = marks[0].shape[0] - 1
    if draw.option("kv_len", False, True):
        made["kv_len"] = draw.integers(sequences, low=-1, high=keys + 1, dtype=torch.int32)
        if packed:
            made["kv_len"] = torch.minimum(made["kv_len"], room(length, keys, False, *marks))
    return made


@triton.jit
def load_scale(S, batch, head, first, j, live, EVERY: tl.constexpr = 1):
    """Scales of tokens j [n] of a sequence that begins at `first`: EVERY so many have one, that of the first of them. NaN where one
    is not finite, which is that of no codes."""
    token = first + j // EVERY * EVERY
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


@triton.jit
def numbers_of_block(X, M, batch, head, HEADS, token, seen, COLUMNS, WIDTH: tl.constexpr):
    """[n, WIDTH] numbers of tokens [n], less their mean; 0 of those that are not seen."""
    column = tl.arange(0, WIDTH)
    inside = seen[:, None] & (column < COLUMNS)[None, :]
    at = batch * X.stride_b + head * X.stride_h + token.to(tl.int64)[:, None] * X.stride_t
    y = tl.load(X.data + at + column.to(tl.int64)[None, :] * X.stride_d, inside, 0.0).to(tl.float32)
    if M is not None:
        y -= tl.load(M + (batch * HEADS + head) * COLUMNS + column, column < COLUMNS, 0.0)[None, :]
        y = tl.where(inside, y, 0.0)
    return y


@kernel(
    grid=lambda a: (a.TILES, a.HEADS, a.BATCH), tokens=("L", "KEYS", "HEADS", "BATCH", "TILES"),
    default=lambda a: {"BLOCK_R": min(SCALED.value, max(1, 8192 // a.WIDTH)), "num_warps": 4},
)  # fmt: skip
def attention_code_blocks(
    X, M, C, S, WINDOW, LENGTHS, L, KEYS, HEADS, BATCH, TILES, COLUMNS, FORMAT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`attention_code_rows`, a program for SCALED tokens of a sequence, which have one scale: they are read twice."""
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tile = tile_at(LENGTHS, tl.program_id(0), tl.program_id(2), L, KEYS, SCALED)
    count, _ = keys_of(LENGTHS, tile)
    start, stop, _, _ = keys_seen(WINDOW, count - tile.count_q, count, 0, tile.count_q - 1)
    stop = tl.where(tile.count_q > 0, stop, start)
    top = tl.zeros([BLOCK_R], tl.float32)
    for first in range(tile.start, tile.start + SCALED, BLOCK_R):
        key = first + tl.arange(0, BLOCK_R)
        seen = (key >= start) & (key < stop)
        y = numbers_of_block(X, M, batch, head, HEADS, tile.first_k + key, seen, COLUMNS, WIDTH)
        top = tl.maximum(top, amax(finite(y), 1))
    s, mult = own_scale(tl.zeros([BLOCK_R], tl.float32) + tl.max(top, 0), FORMAT)
    column = tl.arange(0, WIDTH)
    for first in range(tile.start, tile.start + SCALED, BLOCK_R):
        key = first + tl.arange(0, BLOCK_R)
        live = key < tl.minimum(tile.count_k, tile.start + SCALED)
        seen = (key >= start) & (key < stop)
        y = numbers_of_block(X, M, batch, head, HEADS, tile.first_k + key, seen, COLUMNS, WIDTH)
        row = (batch * KEYS + tile.first_k + key) * HEADS + head
        tl.store(S + row, s, live)
        codes = codes_of(y, s[:, None], mult[:, None], FORMAT)
        tl.store(C + row[:, None] * COLUMNS + column[None, :], codes, live[:, None] & (column < COLUMNS)[None, :])


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


def forward_blocks(
    x: Tensor, length: int, mean: Tensor | None, *, kv_len: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, left: int | None, right: int | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, keys, heads, columns = x.shape
    codes = torch.empty(x.shape, dtype=dtype_of("fp8"), device=x.device)
    scale = torch.empty(batch, keys, heads, dtype=torch.float32, device=x.device)
    if codes.numel():
        how, tiles = lengths(cu_seqlens_k, cu_seqlens_q, keys, length, kv_len, SCALED.value, True)
        attention_code_blocks(
            heads_of(x), None if mean is None else mean.contiguous(), as_codes(codes), scale,
            window_between(left, 0 if causal else right, length, keys), how, length, keys, heads, batch, tiles, columns,
            FORMAT="e4m3:row:fp32:exact" + (":fast" if is_fast(x) else ""), WIDTH=max(16, power_of_two(columns)),
        )  # fmt: skip
    return codes, scale


def dtype_of(kind: Kind) -> torch.dtype:
    return torch.int8 if kind == "int8" else torch.float8_e4m3fn


def check(x: Tensor, mean: Tensor | None, kind: Kind) -> None:
    if not x.shape[3]:
        raise ValueError("attention_rows: x must have columns, got none")


def check_blocks(x: Tensor, causal: bool, right: int | None, kv_len, cu_seqlens_q, cu_seqlens_k, **_: Any) -> None:
    if not x.shape[3]:
        raise ValueError("attention_blocks: x must have columns, got none")
    if causal and right:
        raise ValueError(f"attention_blocks: causal means right=0, got right={right}")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("attention_blocks: cu_seqlens_q and cu_seqlens_k are given together or not at all")
    if cu_seqlens_q is not None and x.shape[0] != 1:
        raise ValueError(f"attention_blocks: packed sequences lie in a batch of 1, got x with a batch of {x.shape[0]}")
    sequences = x.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if kv_len is not None and kv_len.shape[0] != sequences:
        raise ValueError(f"attention_blocks: kv_len must be [{sequences}], got {list(kv_len.shape)}")


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
attention_blocks = Op(
    "attention_blocks", reference_blocks, inputs_blocks, Triton(forward_blocks, None, single),
    where={
        "x": "float[batch keys heads head_dim]", "length": at_least(0), "mean": "float32[batch heads head_dim]",
        "left": at_least(0), "right": at_least(0), "kv_len": "int[sequences]", "cu_seqlens_q": "int[marks+]",
        "cu_seqlens_k": "int[marks+]",
    },
    results={"codes": "float8_e4m3fn[batch keys heads head_dim]", "scale": "float32[batch keys heads]"},
    check=check_blocks, out=Out(contiguous=("codes", "scale")), bars=Bars("G"), internal=True,
)  # fmt: skip
