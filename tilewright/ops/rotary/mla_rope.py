"""Rotary embedding of multi-head latent attention: a head is `nope` plain columns, then the ones that are rotated.

    q' = [q_nope | rotate(q_rope)];  k = [kv_nope | rotate(k_pos), the same for all heads];  v = the rest of kv

The rotated columns come as interleaved pairs (2k, 2k + 1) and leave as halves (k, k + n / 2). Backward: the same rotation by the
opposite angle, the gradient of k_pos summed over heads before it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.tensor import cdiv
from ...device.rotary import Heads, Rows, load_angles, load_pairs, locate, rotate, rotate_back, store_pairs
from ...op import Bars, Gradient, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel
from .rope import (
    SMALL_HEADS,
    TABLES,
    angles,
    angles_on_device,
    at_positions,
    block_of,
    check_tables,
    draw_positions,
    draw_tables,
    in_order,
    lanes,
    positions_of,
    rotate_columns,
    rows_of,
    sharding,
)


def reference(
    q: Tensor,
    kv: Tensor,
    k_pos: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["sbhd", "bshd"] = "sbhd",
    pairing: Literal["interleaved", "half"] = "interleaved",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) for attention from `q` [.., heads, nope + n], `kv` [.., heads, nope + v] and `k_pos` [.., 1, n] of all heads.

    The n columns are rotated in fp32, from pairs as `pairing` has them to halves. `layout` says whether the first dimension
    is the sequence or the batch. Angles, `freqs` or `cos` and `sin`, are [positions, n / 2] or [positions, n], whose first
    half is read; `mscale`, `cu_seqlens`, `cp_size`, `cp_rank` and `positions` are those of `rope`. k is [.., heads, nope + n], v
    [.., heads, v].
    """
    count = k_pos.shape[-1]
    nope = q.shape[-1] - count
    place = positions_of(q.shape[0 if layout == "sbhd" else 1], positions, cu_seqlens, cp_size, cp_rank, q.device)
    c, s = (t.unsqueeze(-2) for t in at_positions(angles(freqs, cos, sin, count, "half", mscale), place))
    if layout == "sbhd":
        c, s = (t.unsqueeze(1) if t.dim() == 3 else t.transpose(0, 1) for t in (c, s))
    rotated = [rotate_columns(upcast(t), c, s, pairing, "half") for t in (q[..., nope:], k_pos)]
    shared = rotated[1].expand(*q.shape[:-1], count)
    q_out = torch.cat([upcast(q[..., :nope]), rotated[0]], -1).to(q.dtype)
    k = torch.cat([upcast(kv[..., :nope]), shared], -1).to(q.dtype)
    return q_out, k, kv[..., nope:].clone()


def inputs(draw: Draw) -> dict:
    batch, length = draw.dim("batch"), draw.dim("length")
    nope = draw.dim("head_dim", (1, 8, 24, 32))
    heads = draw.dim("heads", SMALL_HEADS)
    count = draw.option("turned_columns", 64, 2, 16, 24) if nope else 0
    layout = draw.option("layout", "sbhd", "bshd")
    place = draw_positions(draw, batch, length)
    outer = (length, batch) if layout == "sbhd" else (batch, length)
    return {
        "q": draw.tensor(*outer, heads, nope + count),
        "kv": draw.tensor(*outer, heads, nope + max(1, nope)),
        "k_pos": draw.tensor(*outer, 1, count),
        **draw_tables(draw, count // 2, length * place["cp_size"]),
        "layout": layout,
        "pairing": draw.option("pairing", "interleaved", "half"),
        "mscale": draw.option("mscale", 1.0, 1.25),
        **place,
    }


# ---------------------------------------------------------------- on the device


@triton.jit
def copy_columns(X, Y, at, to, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, LANES: tl.constexpr):
    i = tl.arange(0, LANES)[None, None, :]
    x = tl.load(X + at + (FIRST + i).to(tl.int64) * stride, inside & (i < COUNT), 0.0)
    tl.store(Y + to + i, x, inside & (i < COUNT))


def _tile(a, size: int = 4096, warps: int = 4) -> dict:
    rows = rows_of(size, a.NOPE + 2 * a.HALF)
    HB = block_of(a.H, min(8, rows))
    return {"T": max(1, rows // HB), "HB": HB, "num_warps": warps}


SETTINGS = {
    "tokens": ("B", "L", "P"),
    "tune_by": ("NOPE",),
    "default": _tile,
    "candidates": lambda a: [_tile(a, size, warps) for size in (2048, 4096, 8192) for warps in (4, 8)],
}


@kernel(grid=lambda a: (cdiv(a.B * a.L, a.T) * 2 * cdiv(a.H, a.HB),), **SETTINGS)
def mla_rope_forward(
    Q, KV, KP, ANGLES, YQ, YK, YV, B, L, P, H: tl.constexpr, NOPE: tl.constexpr, PAIRS: tl.constexpr, VALUE: tl.constexpr,
    HALF: tl.constexpr, LANES: tl.constexpr, VALUE_LANES: tl.constexpr, INTERLEAVED: tl.constexpr, BATCH_INNER: tl.constexpr,
    T: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """A program takes T tokens by HB heads of queries, or of keys and values. Results are contiguous, in the order of rows."""
    D: tl.constexpr = NOPE + 2 * PAIRS
    BLOCKS: tl.constexpr = (H + HB - 1) // HB
    unit = tl.program_id(0) % (2 * BLOCKS)
    row = tl.program_id(0) // (2 * BLOCKS) * T + tl.arange(0, T)
    batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
    live = row < B * L
    head = unit % BLOCKS * HB + tl.arange(0, HB)[None, :, None]
    h = head.to(tl.int64)
    inside = live[:, None, None] & (head < H)
    to = (row.to(tl.int64)[:, None, None] * H + h) * D
    if unit < BLOCKS:
        at_q = (batch * Q.stride_b + index * Q.stride_l)[:, None, None] + h * Q.stride_h
        copy_columns(Q.data, YQ, at_q, to, inside, Q.stride_d, 0, NOPE, LANES)
        a, b = load_pairs(Q.data, at_q, inside, Q.stride_d, NOPE, 2 * PAIRS, HALF, INTERLEAVED)
        c, s = load_angles(ANGLES, position * ANGLES.stride_l, position, live, PAIRS, HALF)
        a, b = rotate(a, b, c, s)
        store_pairs(YQ, a, b, to + NOPE, inside, 2 * PAIRS, HALF, False)
    else:
        at_k = (batch * KV.stride_b + index * KV.stride_l)[:, None, None] + h * KV.stride_h
        copy_columns(KV.data, YK, at_k, to, inside, KV.stride_d, 0, NOPE, LANES)
        to_v = (row.to(tl.int64)[:, None, None] * H + h) * VALUE
        copy_columns(KV.data, YV, at_k, to_v, inside, KV.stride_d, NOPE, VALUE, VALUE_LANES)
        at_p = (batch * KP.stride_b + index * KP.stride_l)[:, None, None]
        pa, pb = load_pairs(KP.data, at_p, live[:, None, None], KP.stride_n, 0, 2 * PAIRS, HALF, INTERLEAVED)
        pc, ps = load_angles(ANGLES, position * ANGLES.stride_l, position, live, PAIRS, HALF)
        pa, pb = rotate(pa, pb, pc, ps)
        shape: tl.constexpr = [T, HB, HALF]
        store_pairs(
            YK, tl.broadcast_to(pa, shape), tl.broadcast_to(pb, shape), to + NOPE, inside, 2 * PAIRS, HALF, False
        )  # fmt: skip


@kernel(grid=lambda a: (cdiv(a.B * a.L, a.T) * (cdiv(a.H, a.HB) + 1),), **SETTINGS)
def mla_rope_backward(
    GQ, GK, GV, ANGLES, DQ, DKV, DKP, B, L, P, H: tl.constexpr, NOPE: tl.constexpr, PAIRS: tl.constexpr, VALUE: tl.constexpr,
    HALF: tl.constexpr, LANES: tl.constexpr, VALUE_LANES: tl.constexpr, INTERLEAVED: tl.constexpr, BATCH_INNER: tl.constexpr,
    T: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """A program takes T tokens by HB heads of queries, or by all heads of keys and values, which it sums for k_pos."""
    D: tl.constexpr = NOPE + 2 * PAIRS
    BLOCKS: tl.constexpr = (H + HB - 1) // HB
    unit = tl.program_id(0) % (BLOCKS + 1)
    row = tl.program_id(0) // (BLOCKS + 1) * T + tl.arange(0, T)
    batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
    live = row < B * L
    token = row.to(tl.int64)[:, None, None]
    if unit < BLOCKS:
        if DQ is not None:
            head_q = unit * HB + tl.arange(0, HB)[None, :, None]
            inside_q = live[:, None, None] & (head_q < H)
            at_q = (batch * GQ.stride_b + index * GQ.stride_l)[:, None, None] + head_q.to(tl.int64) * GQ.stride_h
            to_q = (token * H + head_q) * D
            copy_columns(GQ.data, DQ, at_q, to_q, inside_q, GQ.stride_d, 0, NOPE, LANES)
            a, b = load_pairs(GQ.data, at_q, inside_q, GQ.stride_d, NOPE, 2 * PAIRS, HALF, False)
            c, s = load_angles(ANGLES, position * ANGLES.stride_l, position, live, PAIRS, HALF)
            a, b = rotate_back(a, b, c, s)
            store_pairs(DQ, a, b, to_q + NOPE, inside_q, 2 * PAIRS, HALF, INTERLEAVED)
    else:
        sa = tl.zeros([T, HB, HALF], tl.float32)
        sb = tl.zeros([T, HB, HALF], tl.float32)
        for first in range(0, H, HB):
            head = first + tl.arange(0, HB)[None, :, None]
            h = head.to(tl.int64)
            inside = live[:, None, None] & (head < H)
            at_k = (batch * GK.stride_b + index * GK.stride_l)[:, None, None] + h * GK.stride_h
            at_v = (batch * GV.stride_b + index * GV.stride_l)[:, None, None] + h * GV.stride_h
            to = (token * H + h) * (NOPE + VALUE)
            copy_columns(GK.data, DKV, at_k, to, inside, GK.stride_d, 0, NOPE, LANES)
            copy_columns(GV.data, DKV, at_v, to + NOPE, inside, GV.stride_d, 0, VALUE, VALUE_LANES)
            ga, gb = load_pairs(GK.data, at_k, inside, GK.stride_d, NOPE, 2 * PAIRS, HALF, False)
            sa += ga
            sb += gb
        pc, ps = load_angles(ANGLES, position * ANGLES.stride_l, position, live, PAIRS, HALF)
        pa, pb = rotate_back(tl.sum(sa, 1)[:, None, :], tl.sum(sb, 1)[:, None, :], pc, ps)
        store_pairs(DKP, pa, pb, token * (2 * PAIRS), live[:, None, None], 2 * PAIRS, HALF, INTERLEAVED)


# ---------------------------------------------------------------- host


def constants_of(q: Tensor, kv: Tensor, k_pos: Tensor, layout: str, pairing: str) -> dict:
    count = k_pos.shape[-1]
    nope = q.shape[-1] - count
    value = kv.shape[-1] - nope
    return {
        "H": q.shape[2], "NOPE": nope, "PAIRS": count // 2, "VALUE": value, "HALF": lanes(count // 2),
        "LANES": lanes(nope), "VALUE_LANES": lanes(value), "INTERLEAVED": pairing == "interleaved",
        "BATCH_INNER": layout == "sbhd",
    }  # fmt: skip


def heads_of(t: Tensor | None, layout: str) -> Heads:
    """A tensor of heads, or none, as kernels take it."""
    if t is None:
        return Heads()
    length, batch = t.stride()[:2] if layout == "sbhd" else t.stride()[1::-1]
    return Heads(t, batch, length, *t.stride()[2:])


def token_rows(t: Tensor, layout: str) -> Rows:
    """A tensor of one head for all, k_pos, as kernels take it."""
    heads = heads_of(t, layout)
    return Rows(t, heads.stride_b, heads.stride_l, heads.stride_d)


def forward(**values) -> tuple[Tensor, Tensor, Tensor]:
    a = SimpleNamespace(**values)
    L, B = a.q.shape[:2] if a.layout == "sbhd" else a.q.shape[1::-1]
    constants = constants_of(a.q, a.kv, a.k_pos, a.layout, a.pairing)
    made = [
        torch.empty(*a.q.shape[:3], width, dtype=a.q.dtype, device=a.q.device)
        for width in (a.q.shape[3], a.q.shape[3], constants["VALUE"])
    ]
    angles, P = angles_on_device("mla_rope", a, L, a.q.device, a.k_pos.shape[-1], "half")
    q, kv = heads_of(a.q, a.layout), heads_of(a.kv, a.layout)
    mla_rope_forward(q, kv, token_rows(a.k_pos, a.layout), angles, *made, B, L, P, **constants)
    return tuple(made)


def backward(saved: SimpleNamespace, gq: Tensor | None, gk: Tensor | None, gv: Tensor | None) -> tuple:
    q, kv, k_pos = saved.q, saved.kv, saved.k_pos  # their shapes alone
    L, B = q.shape[:2] if saved.layout == "sbhd" else q.shape[1::-1]
    constants = constants_of(q, kv, k_pos, saved.layout, saved.pairing)
    some = next(g for g in (gq, gk, gv) if g is not None)
    zero = torch.zeros(1, dtype=some.dtype, device=some.device) if None in (gk, gv) else None
    widths = q.shape[3], constants["VALUE"]
    gk, gv = (zero.expand(*q.shape[:3], w) if g is None else g for g, w in zip((gk, gv), widths))
    dq = None if gq is None else torch.empty(q.shape, dtype=gq.dtype, device=gq.device)
    dkv, dk_pos = (torch.empty(t.shape, dtype=gk.dtype, device=gk.device) for t in (kv, k_pos))
    angles, P = angles_on_device("mla_rope", saved, L, k_pos.device, k_pos.shape[-1], "half")
    grads = (heads_of(g, saved.layout) for g in (gq, gk, gv))
    mla_rope_backward(*grads, angles, dq, dkv, dk_pos, B, L, P, **constants)
    return dq, dkv, dk_pos


def check(
    q, kv, k_pos, cos, sin, freqs, layout, pairing, mscale, cu_seqlens, cp_size, cp_rank, positions
) -> None:  # fmt: skip
    count = k_pos.shape[-1]
    nope = q.shape[-1] - count
    if count % 2 or count < 2 or nope < 0:
        raise ValueError(f"mla_rope: k_pos has {count} columns: they must be even, and no more than q's {q.shape[-1]}")
    if kv.shape[-1] <= nope:
        raise ValueError(
            f"mla_rope: kv has {kv.shape[-1]} columns: more than the {nope} of q before k_pos's are needed"
        )
    if q.shape[2] == 0:
        raise ValueError("mla_rope: q has no heads")
    if q.shape[0] * q.shape[1] >= 2**31:
        raise ValueError(f"mla_rope: q has {q.shape[0] * q.shape[1]} tokens, but a launch takes less than 2^31")
    if freqs is None and cos is None and sin is None:
        raise ValueError("mla_rope: freqs must be given, or cos and sin")
    length, batch = q.shape[:2] if layout == "sbhd" else q.shape[1::-1]
    check_tables(
        "mla_rope", freqs, cos, sin, None, count, batch, length, cu_seqlens, cp_size, cp_rank, positions
    )  # fmt: skip


mla_rope = Op(
    "mla_rope", reference, inputs, Triton(forward, backward, single),
    where={
        "q": "float[batch length heads qk_dim]", "kv": "q[batch length heads kv_dim]", "k_pos": "q[batch length 1 turned]",
        **dict.fromkeys(("cos", "sin", "freqs"), "float[positions angles]"), **TABLES,
    },
    results={**dict.fromkeys(("q_out", "k"), "q[batch length heads qk_dim]"), "v": "q[batch length heads v_dim]"},
    sizes=lambda a: {"v_dim": a.kv.shape[-1] - (a.q.shape[-1] - a.k_pos.shape[-1])},
    out=Out(contiguous=("q_out", "k", "v")), check=check, bars=Bars("A"),
    sharding=lambda a: sharding(a, a.q, in_order(a.layout, "batch", "length", "heads")),
    gradient=Gradient(
        of=("q", "kv", "k_pos"), through=("q_out", "k", "v"), shape_only=lambda values: ("q", "kv", "k_pos")
    ),
)  # fmt: skip
