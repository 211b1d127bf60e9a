"""Split of a packed projection into queries, keys and values, with the norm and rotary embedding of queries and keys.

    per head of q and k:  y = x * rstd * weight,  rstd = 1 / sqrt(mean(x**2) + eps);  then `rope` of y; v is copied

with x = silu(x) of all three before, if asked. Backward of a head, with g the gradient rotated back: dweight sums g * x * rstd
over tokens and heads, and dx = rstd * (g * weight - x * rstd * mean(x * rstd * g * weight)).
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import at_least
from ...core.tensor import cdiv, vector
from ...device.activation import sigmoid
from ...device.rotary import (
    QKV,
    Angles,
    Columns,
    Rows,
    column_of,
    load_angles,
    load_pairs,
    load_vector_pairs,
    locate,
    rotate,
    store_pairs,
)
from ...op import Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from .qkv_split_backward import blocks, gradients, units
from .rope import (
    HEAD_DIMS,
    SMALL_HEADS,
    TABLES,
    angles,
    angles_on_device,
    at_positions,
    check_positions,
    check_tables,
    cut_angles,
    draw_positions,
    draw_tables,
    lanes,
    positions_of,
    rotate_columns,
)


def reference(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    freqs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    packing: Literal["grouped", "plain"] = "grouped",
    transposed: bool = False,
    silu: bool = False,
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each [batch, length, heads, head_dim], of `qkv` [batch, length, width] or, `transposed`, [length, batch, width].

    A row of qkv holds, "grouped", for each key head its query heads, itself and its value head; "plain", all query, then
    all key, then all value heads. `heads` and `kv_heads` may be those of a whole tensor-parallel group: they are divided by
    how many times narrower the row is than they say. `silu` goes before all else; heads with a weight are RMS-normalised;
    q and k are rotated as by `rope` if there are angles, whose `freqs`, or `cos` and `sin`, are [positions, n] here.
    Everything is fp32 up to one rounding. Packed sequences (`cu_seqlens`) lie along the length, [1, tokens, width] say, or
    `positions` [batch, length] says on the device where tokens stand.
    """
    x = upcast(qkv.transpose(0, 1) if transposed else qkv)
    H, KV = local_heads(qkv, heads, kv_heads, head_dim)
    if packing == "grouped":
        grouped = x.unflatten(-1, (KV, H // KV + 2, head_dim))
        q, k, v = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        q, k, v = x.unflatten(-1, (H + 2 * KV, head_dim)).split((H, KV, KV), 2)
    if silu:
        q, k, v = (t * torch.sigmoid(t) for t in (q, k, v))
    q, k = (
        t if w is None else t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * upcast(w)
        for t, w in ((q, q_weight), (k, k_weight))
    )
    if freqs is not None or cos is not None:
        place = positions_of(x.shape[1], positions, cu_seqlens, cp_size, cp_rank, x.device)
        c, s = at_positions(angles(freqs, cos, sin, rotary_dim or head_dim, pairing, mscale), place)
        q, k = (rotate_columns(t, c.unsqueeze(-2), s.unsqueeze(-2), pairing) for t in (q, k))
    return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)


def local_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int, op: str = "qkv_split") -> tuple[int, int]:
    """Query and key heads in this row."""
    width = qkv.shape[-1]
    parts = (heads + 2 * kv_heads) * head_dim // width if width else 0
    if parts == 0 or parts * width != (heads + 2 * kv_heads) * head_dim or heads % parts or kv_heads % parts:
        raise ValueError(
            f"{op}: qkv has {width} columns, but {heads} heads, twice {kv_heads} kv_heads, of head_dim {head_dim} are"
            f" {(heads + 2 * kv_heads) * head_dim}, or an even share of that"
        )
    return heads // parts, kv_heads // parts


def inputs(draw: Draw) -> dict:
    batch, length = draw.dim("batch"), draw.dim("length")
    head_dim = draw.dim("head_dim", (1, *HEAD_DIMS))
    heads = draw.dim("heads", SMALL_HEADS)
    queries = math.gcd(heads, draw.option("queries_per_key", 8, 1, 2, 3))
    # Many heads of both kinds would be many programs for the interpreter
    kv_heads = 1 if queries == 1 and heads > max(SMALL_HEADS) else heads // max(1, queries)
    shards = draw.option("shards", 1, 2)
    transposed = draw.option("transposed", False, True)
    rotary_dim = max(2, head_dim // draw.option("share", 2, 1, 3) // 2 * 2)
    rotates = head_dim > 1 and draw.option("turns", True, True, False)
    place = draw_positions(draw, batch, length)
    outer = (length, batch) if transposed else (batch, length)
    return {
        "qkv": draw.tensor(*outer, (heads + 2 * kv_heads) * head_dim),
        "q_weight": draw.maybe("q_weight", lambda: draw.tensor(head_dim, scale=0.5, shift=1.0)),
        "k_weight": draw.maybe("k_weight", lambda: draw.tensor(head_dim, scale=0.5, shift=1.0)),
        **(draw_tables(draw, rotary_dim // 2, length * place["cp_size"]) if rotates else {}),
        "heads": heads * shards,
        "kv_heads": kv_heads * shards,
        "head_dim": head_dim,
        "eps": draw.option("eps", 1e-6, 1e-5),
        "rotary_dim": rotary_dim if head_dim > 1 else None,
        "pairing": draw.option("pairing", "half", "interleaved"),
        "packing": draw.option("packing", "grouped", "plain"),
        "transposed": transposed,
        "silu": draw.option("silu", False, True),
        "mscale": draw.option("mscale", 1.0, 1.25),
        **place,
    }


# ---------------------------------------------------------------- on the device


@triton.jit
def normed_heads(X, W, at, inside, eps, D: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr):
    """Heads at offsets `at` of X, [TOKENS, HEADS, 1]: the pairs that are to be rotated, and the others, a number where there are
    none."""
    # All loads of x before the angles, which wait for theirs and cross threads. The other columns are pairs as well, so that
    # with half of a head rotated all parts have one shape and one layout
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    HALF: tl.constexpr = COLUMNS.HALF
    REST: tl.constexpr = COLUMNS.REST
    INTERLEAVED: tl.constexpr = COLUMNS.INTERLEAVED
    OTHERS: tl.constexpr = D - 2 * PAIRS
    a, b, d, e = 0.0, 0.0, 0.0, 0.0
    if PAIRS > 0:
        a, b = load_pairs(X.data, at, inside, X.stride_n, 0, 2 * PAIRS, HALF, INTERLEAVED)
        if SILU:
            a *= sigmoid(a, 1.0)
            b *= sigmoid(b, 1.0)
    if REST > 0:
        d, e = load_pairs(X.data, at, inside, X.stride_n, 2 * PAIRS, OTHERS, REST, INTERLEAVED)
        if SILU:
            d *= sigmoid(d, 1.0)
            e *= sigmoid(e, 1.0)
    if W is not None:
        if REST == 0:
            square = tl.sum(a * a + b * b, 2)
        elif PAIRS == 0:
            square = tl.sum(d * d + e * e, 2)
        elif HALF == REST:
            square = tl.sum(a * a + b * b + (d * d + e * e), 2)
        else:
            square = tl.sum(a * a + b * b, 2) + tl.sum(d * d + e * e, 2)
        rstd = tl.rsqrt(square * (1.0 / D) + eps)[:, :, None]
        if PAIRS > 0:
            wa, wb = load_vector_pairs(W, 2 * PAIRS, HALF, INTERLEAVED)
            a *= rstd * wa
            b *= rstd * wb
        if REST > 0:
            wd, we = load_vector_pairs(W + 2 * PAIRS, OTHERS, REST, INTERLEAVED)
            d *= rstd * wd
            e *= rstd * we
    return a, b, d, e


@triton.jit
def split_heads(
    X, W, Y, ANGLES, at, to, inside, angles_at, position, live, eps, D: tl.constexpr, COLUMNS: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Heads at offsets `at` of X to offsets `to` of Y, both [TOKENS, HEADS, 1]."""
    PAIRS: tl.constexpr = COLUMNS.PAIRS
    HALF: tl.constexpr = COLUMNS.HALF
    REST: tl.constexpr = COLUMNS.REST
    INTERLEAVED: tl.constexpr = COLUMNS.INTERLEAVED
    a, b, d, e = normed_heads(X, W, at, inside, eps, D, COLUMNS, SILU)
    if REST > 0:
        store_pairs(Y, d, e, to + 2 * PAIRS, inside, D - 2 * PAIRS, REST, INTERLEAVED)
    if PAIRS > 0:
        c, s = load_angles(ANGLES, angles_at, position, live, PAIRS, HALF)
        a, b = rotate(a, b, c, s)
        store_pairs(Y, a, b, to, inside, 2 * PAIRS, HALF, INTERLEAVED)


@triton.jit
def copy_heads(X, Y, at, to, inside, D: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr):
    i = tl.arange(0, LANES)[None, None, :]
    x = tl.load(X.data + at + i.to(tl.int64) * X.stride_n, inside & (i < D), 0.0)
    if SILU:
        x = x.to(tl.float32)
        x *= sigmoid(x, 1.0)
    tl.store(Y + to + i, x.to(Y.dtype.element_ty), inside & (i < D))


def _tile(a, size: int = 4096, warps: int = 4) -> dict:
    # 32 elements a thread: in bf16 four 16-byte loads, in registers for six or more programs an SM
    return {**blocks(a, size, 2), "num_warps": warps}


@kernel(
    grid=lambda a: (cdiv(a.B * a.L, max(a.T, a.TK)) * units(a),),
    tokens=("B", "L", "P"),
    tune_by=("D",),
    default=_tile,
    candidates=lambda a: [_tile(a, size, warps) for size in (2048, 4096, 8192) for warps in (4, 8)],
)
def qkv_split_forward(
    X, WEIGHTS, ANGLES, OUT, B, L, P, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPED: tl.constexpr, SILU: tl.constexpr, BATCH_INNER: tl.constexpr, T: tl.constexpr, HB: tl.constexpr,
    TK: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """A program takes T tokens by HB query heads, or TK tokens by KB key heads and their values. Programs of the same tokens
    are neighbours."""
    SPAN: tl.constexpr = max(T, TK)
    QUERIES: tl.constexpr = (H + HB - 1) // HB
    ASKING: tl.constexpr = QUERIES * (SPAN // T)
    KEYS: tl.constexpr = (KV + KB - 1) // KB
    UNITS: tl.constexpr = ASKING + KEYS * (SPAN // TK)
    unit = tl.program_id(0) % UNITS
    first = tl.program_id(0) // UNITS * SPAN
    # Names of their own in each branch: a name of both must have one shape
    if unit < ASKING:
        row_q = first + unit // QUERIES * T + tl.arange(0, T)
        live_q = row_q < B * L
        batch_q, index_q, position_q = locate(row_q, B, L, P, ANGLES, BATCH_INNER)
        head_q = unit % QUERIES * HB + tl.arange(0, HB)[None, :, None]
        column_q = column_of(head_q, "q", H, KV, D, GROUPED)
        at_q = (batch_q * X.stride_b + index_q * X.stride_l)[:, None, None] + column_q * X.stride_n
        to_q = ((batch_q * L + index_q)[:, None, None] * H + head_q) * D
        split_heads(
            X, WEIGHTS.q, OUT.q, ANGLES, at_q, to_q, live_q[:, None, None] & (head_q < H), position_q * ANGLES.stride_l,
            position_q, live_q, eps, D, COLUMNS, SILU,
        )  # fmt: skip
    else:
        other = unit - ASKING
        row = first + other // KEYS * TK + tl.arange(0, TK)
        live = row < B * L
        batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
        head_k = other % KEYS * KB + tl.arange(0, KB)[None, :, None]
        inside = live[:, None, None] & (head_k < KV)
        start = (batch * X.stride_b + index * X.stride_l)[:, None, None]
        to = ((batch * L + index)[:, None, None] * KV + head_k) * D
        at_v = start + column_of(head_k, "v", H, KV, D, GROUPED) * X.stride_n
        copy_heads(X, OUT.v, at_v, to, inside, D, COLUMNS.LANES, SILU)
        at_k = start + column_of(head_k, "k", H, KV, D, GROUPED) * X.stride_n
        split_heads(
            X, WEIGHTS.k, OUT.k, ANGLES, at_k, to, inside, position * ANGLES.stride_l, position, live, eps, D, COLUMNS, SILU
        )  # fmt: skip


def constants_of(a: SimpleNamespace) -> dict:
    """The constants that kernels are compiled for."""
    H, KV = local_heads(a.qkv, a.heads, a.kv_heads, a.head_dim)
    rotates = a.freqs is not None or a.cos is not None
    rotary = (a.head_dim if a.rotary_dim is None else a.rotary_dim) if rotates else 0
    rest = lanes(cdiv(a.head_dim - rotary, 2)) if rotary < a.head_dim else 0
    columns = Columns(rotary // 2, lanes(rotary // 2), rest, lanes(a.head_dim), a.pairing == "interleaved")
    return {
        "H": H, "KV": KV, "D": a.head_dim, "COLUMNS": columns, "GROUPED": a.packing == "grouped", "SILU": a.silu,
        "BATCH_INNER": a.transposed,
    }  # fmt: skip


def operands(a: SimpleNamespace, op: str = "qkv_split") -> tuple[Rows, QKV, Angles, tuple[int, int, int]]:
    """(qkv, weights, angles, (batch, length, positions that have angles)) as kernels take them. `op` is whose they are."""
    batch, length = (1, 0) if a.transposed else (0, 1)
    B, L = a.qkv.shape[batch], a.qkv.shape[length]
    x = Rows(a.qkv, a.qkv.stride(batch), a.qkv.stride(length), a.qkv.stride(2))
    angles, P = angles_on_device(op, a, L, a.qkv.device, a.rotary_dim or a.head_dim, a.pairing)
    return x, QKV(vector(a.q_weight), vector(a.k_weight), None), angles, (B, L, P)


def forward(**values) -> tuple[Tensor, Tensor, Tensor]:
    a = SimpleNamespace(**values)
    constants = constants_of(a)
    x, weights, angles, (B, L, P) = operands(a)
    counts = constants["H"], constants["KV"], constants["KV"]
    made = [torch.empty(B, L, count, a.head_dim, dtype=a.qkv.dtype, device=a.qkv.device) for count in counts]
    qkv_split_forward(x, weights, angles, QKV(*made), B, L, P, a.eps, **constants)
    return tuple(made)


def backward(saved: SimpleNamespace, *grads: Tensor | None) -> tuple:
    constants = constants_of(saved)
    x, weights, angles, sizes = operands(saved)
    some = next(g for g in grads if g is not None)
    counts = constants["H"], constants["KV"], constants["KV"]
    zero = torch.zeros(1, dtype=some.dtype, device=some.device) if None in grads else None
    full = [
        zero.expand(*sizes[:2], count, saved.head_dim) if g is None else g for g, count in zip(grads, counts)
    ]  # fmt: skip
    return gradients(x, weights, angles, full, sizes, saved.eps, constants, saved.needs)


def check(
    qkv, heads, kv_heads, head_dim, q_weight, k_weight, freqs, cos, sin, eps, rotary_dim, pairing, packing, transposed, silu,
    mscale, cu_seqlens, cp_size, cp_rank, positions, op="qkv_split",
) -> None:  # fmt: skip
    H, KV = local_heads(qkv, heads, kv_heads, head_dim, op)
    if packing == "grouped" and H % KV:
        raise ValueError(f"{op}: heads, {heads}, must be a multiple of kv_heads, {kv_heads}, in grouped packing")
    if qkv.shape[0] * qkv.shape[1] >= 2**31:
        raise ValueError(f"{op}: qkv has {qkv.shape[0] * qkv.shape[1]} tokens, but a launch takes less than 2^31")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and weight.shape[0] != head_dim:
            raise ValueError(f"{op}: {name} has {weight.shape[0]} numbers, but head_dim is {head_dim}")
    length, batch = qkv.shape[:2] if transposed else qkv.shape[1::-1]
    if freqs is not None or cos is not None or sin is not None or rotary_dim is not None:
        check_tables(
            op, freqs, cos, sin, rotary_dim, head_dim, batch, length, cu_seqlens, cp_size, cp_rank, positions
        )  # fmt: skip
    else:
        check_positions(op, batch, length, cu_seqlens, cp_size, cp_rank, positions)


def sizes(a: SimpleNamespace) -> dict[str, int]:
    H, KV = local_heads(a.qkv, a.heads, a.kv_heads, a.head_dim)
    outer, inner = a.qkv.shape[1::-1] if a.transposed else a.qkv.shape[:2]
    return {"outer": outer, "inner": inner, "own_heads": H, "own_kv_heads": KV}


def sharding(a: SimpleNamespace) -> Sharding:
    """A part of the columns is whole groups of heads if these are packed together and each rank has as many."""
    _, KV = local_heads(a.qkv, a.heads, a.kv_heads, a.head_dim)
    local, angles = cut_angles(a, a.qkv.shape[0 if a.transposed else 1])
    first, second = ("length", "batch") if a.transposed else ("batch", "length")
    heads = {"width": "heads/qkv", "own_heads": "heads/q", "own_kv_heads": "heads/k"}
    names = {"batch": first, "length": second, "outer": "batch", "inner": "length", **heads, **angles}
    return Sharding((*local, "heads") if a.packing == "grouped" else local, names, {"heads": KV})


qkv_split = Op(
    "qkv_split", reference, inputs, Triton(forward, backward, single),
    where={
        "qkv": "float[batch length width]", **dict.fromkeys(("q_weight", "k_weight"), "float[head_dim]"),
        **dict.fromkeys(("freqs", "cos", "sin"), "float[positions angles]"), **TABLES,
        "heads": at_least(1), "kv_heads": at_least(1), "head_dim": at_least(1), "eps": at_least(0.0),
    },
    results={
        "q": "qkv[outer inner own_heads head_dim]", **dict.fromkeys(("k", "v"), "qkv[outer inner own_kv_heads head_dim]"),
    },
    sizes=sizes, out=Out(contiguous=("q", "k", "v")), check=check, sharding=sharding,
    gradient=Gradient(of=("qkv", "q_weight", "k_weight"), through=("q", "k", "v")),
)  # fmt: skip
