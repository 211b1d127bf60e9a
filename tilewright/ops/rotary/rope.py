"""Rotary embedding: of every pair (a, b) of a head's leading columns, a' = a cos - b sin and b' = b cos + a sin.

The pairs are (k, k + rotary_dim / 2), "half", or (2k, 2k + 1), "interleaved"; columns past rotary_dim stay as they are. The
backward is the same rotation by the opposite angle, and needs none of the forward's numbers but the angles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_ends, check_indices
from ...core.draw import Draw
from ...core.signature import above, at_least
from ...core.tensor import cdiv, power_of_two
from ...device.rotary import Angles, Heads, load_angles, load_pairs, locate, rotate, store_pairs
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel


def reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["bhsd", "bshd", "sbhd"] = "bhsd",
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first `rotary_dim` columns (default: all) of every head of `q` and of `k`, in fp32 and rounded once.

    `layout` names their dimensions: batch, sequence, heads and head_dim. The angles come as fp32 `freqs`, or as `cos` and
    `sin`, [batch or 1, positions, n]: n is `rotary_dim / 2`, or `rotary_dim` with each angle twice, as `pairing` has it
    (the first of the two is read). `mscale` multiplies cosines and sines.

    A token's position is its index in the sequence dimension; or, with `cu_seqlens`, its index in its own of the sequences
    that are packed there, which begin at these device numbers. With `cp_size` ranks of a context-parallel group this one,
    `cp_rank`, has the chunks cp_rank and 2 * cp_size - 1 - cp_rank of each sequence's 2 * cp_size, and `cu_seqlens` are
    those of the whole sequences. Or its position is what `positions` [batch, length] have on the device. A token whose
    position has no angle becomes NaN.
    """
    tables = angles(freqs, cos, sin, rotary_dim or q.shape[-1], pairing, mscale)
    place = positions_of(q.shape[SEQUENCE[layout]], positions, cu_seqlens, cp_size, cp_rank, q.device)
    return tuple(rotate_by_tables(t, tables, place, layout, pairing).to(t.dtype) for t in (q, k))


def reference_one(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["bhsd", "bshd", "sbhd"] = "bhsd",
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
) -> Tensor:
    """`rope` of one tensor."""
    tables = angles(freqs, cos, sin, rotary_dim or x.shape[-1], pairing, mscale)
    place = positions_of(x.shape[SEQUENCE[layout]], positions, cu_seqlens, cp_size, cp_rank, x.device)
    return rotate_by_tables(x, tables, place, layout, pairing).to(x.dtype)


SEQUENCE = {"bhsd": 2, "bshd": 1, "sbhd": 0}
BATCH = {"bhsd": 0, "bshd": 0, "sbhd": 1}
HEADS = {"bhsd": 1, "bshd": 2, "sbhd": 2}


def angles(freqs, cos, sin, rotary_dim: int, pairing: str, mscale: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) [..., positions, rotary_dim / 2] times mscale."""
    pairs = rotary_dim // 2

    def one_each(t: Tensor) -> Tensor:
        t = upcast(t)
        return t if t.shape[-1] == pairs else t[..., ::2] if pairing == "interleaved" else t[..., :pairs]

    if freqs is not None:
        return one_each(freqs).cos() * mscale, one_each(freqs).sin() * mscale
    return one_each(cos) * mscale, one_each(sin) * mscale


def positions_of(
    length: int, given: Tensor | None, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """The position of each token of the sequence dimension: [batch, length] if they are given, else [length]."""
    if given is not None:
        return given.long()
    token = torch.arange(length, device=device)
    if cu_seqlens is None:
        start, stop = torch.zeros_like(token), torch.full_like(token, length)
    else:
        starts = torch.div(cu_seqlens.long(), cp_size, rounding_mode="trunc").unsqueeze(0)
        before = starts <= token.unsqueeze(1)
        zero = torch.zeros_like(token).unsqueeze(1)
        start = torch.cat([zero, torch.where(before, starts, 0)], 1).amax(1)
        stop = torch.cat([zero + length, torch.where(before, length, starts)], 1).amin(1)
    token = token - start
    if cp_size == 1:
        return token
    half = (stop - start) // 2
    return torch.where(token < half, token + cp_rank * half, token - half + (2 * cp_size - 1 - cp_rank) * half)


def at_positions(tables: tuple[Tensor, Tensor], place: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of tables [..., positions, pairs] at positions [length] or [batch, length], NaN where there is none: [length, pairs]
    of tables and positions without a batch, else [batch or 1, length, pairs]."""
    count = tables[0].shape[-2]
    if count == 0:
        tables, count = tuple(t.new_full((*t.shape[:-2], 1, t.shape[-1]), torch.nan) for t in tables), 1
    known = ((place >= 0) & (place < count)).unsqueeze(-1)
    place = place.clamp(0, count - 1)
    if place.dim() == 2 and tables[0].dim() == 3:
        batch = torch.arange(place.shape[0], device=place.device).unsqueeze(1)
        found = tuple(t.expand(place.shape[0], -1, -1)[batch, place] for t in tables)
    else:
        found = tuple(t[..., place, :] for t in tables)
    return tuple(t.masked_fill(~known, torch.nan) for t in found)


def rotate_columns(x: Tensor, c: Tensor, s: Tensor, pairing: str, to: str | None = None) -> Tensor:
    """x with its leading columns rotated. Pairs lie as `pairing` says before, and as `to` says afterwards."""
    pairs = c.shape[-1]
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (head[..., ::2], head[..., 1::2]) if pairing == "interleaved" else head.chunk(2, -1)
    a, b = a * c - b * s, b * c + a * s
    head = torch.stack([a, b], -1).flatten(-2) if (to or pairing) == "interleaved" else torch.cat([a, b], -1)
    return torch.cat([head, rest], -1)


def rotate_by_tables(x: Tensor, tables: tuple[Tensor, Tensor], place: Tensor, layout: str, pairing: str) -> Tensor:
    """x, of four dimensions, rotated by tables [batch or 1, positions, pairs]."""
    c, s = at_positions(tables, place)  # [batch or 1, length, pairs]
    order = {"bhsd": (0, None, 1), "bshd": (0, 1, None), "sbhd": (1, 0, None)}[layout]
    c, s = (t.permute([d for d in order if d is not None] + [2]).unsqueeze(order.index(None)) for t in (c, s))
    return rotate_columns(upcast(x), c, s, pairing)


def draw_tables(draw: Draw, pairs: int, *dims: int | str) -> dict:
    """Angles, or cosines and sines, of `pairs` pairs by `dims`."""
    kind = draw.option("angles", "freqs", "tables")
    width = pairs * draw.option("twice", 1, 2)
    if kind == "freqs":
        return {"freqs": draw.tensor(*dims, width, dtype=torch.float32, scale=3.0)}
    return {"cos": draw.tensor(*dims, width), "sin": draw.tensor(*dims, width)}


def draw_positions(draw: Draw, batch: int, length: int) -> dict:
    """How tokens lie in sequences, and how many positions there may be."""
    if draw.option("told", "by order", "given") == "given":
        kind = draw.option("index", torch.int32, torch.int64)
        return {"positions": draw.integers(batch, length, high=length, dtype=kind), "cp_size": 1}
    cp_size = draw.option("cp_size", 1, 2, 3)
    ends = None
    if draw.option("cu_seqlens", False, True):
        ends = draw.integers(3, high=length * cp_size + 1, dtype=draw.option("index", torch.int32, torch.int64))
        ends = torch.cat([ends.new_zeros(1), ends]).sort().values
    return {"cu_seqlens": ends, "cp_size": cp_size, "cp_rank": draw.option("cp_rank", 0, 1) % cp_size}


SMALL_HEADS = (1, 2, 3, 5, 8)
HEAD_DIMS = (2, 16, 24, 32, 40, 64, 72)


def inputs_one(draw: Draw) -> dict:
    batch, length = draw.dim("batch"), draw.dim("length")
    head_dim = draw.dim("head_dim", HEAD_DIMS)
    head_dim += head_dim == 1  # one column is no pair
    heads = draw.dim("heads", SMALL_HEADS)
    layout = draw.option("layout", "bhsd", "bshd", "sbhd")
    rotary_dim = max(2, head_dim // draw.option("share", 1, 2, 3) // 2 * 2)
    place = draw_positions(draw, batch, length)
    table_batch = draw.option("table_batch", 1, batch)
    sizes = {"b": batch, "s": length, "h": heads, "d": head_dim}
    return {
        "x": draw.tensor(*(sizes[c] for c in layout)),
        **draw_tables(draw, rotary_dim // 2, table_batch, length * place["cp_size"]),
        "layout": layout,
        "rotary_dim": rotary_dim,
        "pairing": draw.option("pairing", "half", "interleaved"),
        "mscale": draw.option("mscale", 1.0, 1.25),
        **place,
    }


def inputs(draw: Draw) -> dict:
    made = inputs_one(draw)
    x = made.pop("x")
    shape, axis = list(x.shape), HEADS[made["layout"]]
    shape[axis] = -(-shape[axis] // draw.option("queries_per_key", 4, 1))
    return {"q": x, "k": draw.tensor(*shape), **made}


# ---------------------------------------------------------------- positions


@kernel(grid=lambda a: (cdiv(a.L, a.TOKENS),), tokens=("L", "S"), default=lambda a: {"TOKENS": 128, "num_warps": 4})
def token_positions(ENDS, POS, L, S, cp_size, cp_rank, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """POS[l] as `positions_of` has it. ENDS are device data: in whatever order and size they are, nothing but POS follows."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    start = tl.zeros([TOKENS], tl.int64)
    stop = tl.zeros([TOKENS], tl.int64) + L
    if ENDS is not None:
        for first in range(0, S, BLOCK):
            i = first + tl.arange(0, BLOCK)
            end = tl.load(ENDS + i, i < S, 0).to(tl.int64)[None, :] // cp_size
            before = end <= token[:, None]
            start = tl.maximum(start, tl.max(tl.where(before, end, 0), 1))
            stop = tl.minimum(stop, tl.min(tl.where(before, L.to(tl.int64), end), 1))
    half = (stop - start) // 2
    within = token - start
    away = tl.where(within < half, cp_rank * half, (2 * cp_size - 2 - cp_rank) * half)
    if cp_size > 1:
        within += away
    tl.store(POS + token, within, token < L)


def positions_on_device(op: str, a: SimpleNamespace, length: int, count: int, device: torch.device) -> tuple:
    """(the position of each token on the device, of the `count` that have angles, or None where that is its index, and its strides,
    None of positions that all batches share)."""
    cu_seqlens, cp_size, cp_rank = a.cu_seqlens, a.cp_size, a.cp_rank
    if a.positions is not None:
        check_indices(op, "positions", a.positions, 0, count)
        return a.positions, *a.positions.stride()
    if cu_seqlens is None and cp_size == 1:
        return None, None, None
    check_ends(op, "cu_seqlens", cu_seqlens, length * cp_size)
    place = torch.empty(length, dtype=torch.int64, device=device)
    ends, count = (None, 0) if cu_seqlens is None else (cu_seqlens.contiguous(), cu_seqlens.shape[0])
    if ends is None:
        token_positions(None, place, length, count, cp_size, cp_rank, BLOCK=16)
    else:
        token_positions(ends, place, length, count, cp_size, cp_rank, BLOCK=16)
    return place, None, None


def angles_on_device(
    op: str, a: SimpleNamespace, length: int, device: torch.device, rotary_dim: int, pairing: str, batched: bool = False
) -> tuple[Angles, int]:
    """The angles of an op's arguments as kernels take them, and how many positions have any. Angles are `batched` if they may
    differ from batch to batch."""
    freqs, cos, sin, mscale = a.freqs, a.cos, a.sin, None if a.mscale == 1.0 else a.mscale
    if freqs is None and cos is None:
        return Angles(None, None, None, None, None, 0, 0, mscale), 0
    if freqs is None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    t = cos if freqs is None else freqs
    stride_b = (t.stride(0) if t.shape[0] > 1 else 0) if batched else None
    step = 2 if pairing == "interleaved" and t.shape[-1] == rotary_dim else 1
    positions, *placed = positions_on_device(op, a, length, t.shape[-2], device)
    angles = Angles(freqs, cos, sin, positions, stride_b, t.stride(-2), t.stride(-1) * step, mscale, *placed)
    return angles, t.shape[-2]


def check_positions(op: str, batch: int, length: int, cu_seqlens, cp_size, cp_rank, positions) -> None:
    """Raise where positions are said twice, or not for each token."""
    if cp_rank < 0 or cp_rank >= cp_size:
        raise ValueError(f"{op}: cp_rank must be at least 0 and below cp_size, {cp_size}, got {cp_rank}")
    if positions is None:
        return
    for name, given in (("cu_seqlens", cu_seqlens is not None), ("cp_size", cp_size != 1)):
        if given:
            raise ValueError(f"{op}: positions are given beside {name}, which says them too: give either")
    if tuple(positions.shape) != (batch, length):
        raise ValueError(f"{op}: positions must be [batch, length] = [{batch}, {length}], got {list(positions.shape)}")


def check_tables(
    op: str, freqs, cos, sin, rotary_dim, head_dim: int, batch: int, length: int, cu_seqlens, cp_size, cp_rank, positions
) -> None:  # fmt: skip
    """Raise where angles and positions do not go together. Positions that device numbers give are checked on the device."""
    check_positions(op, batch, length, cu_seqlens, cp_size, cp_rank, positions)
    for name, t, other in (("cos", cos, sin), ("sin", sin, cos)):
        if t is not None and freqs is not None:
            raise ValueError(f"{op}: {name} is given beside freqs: give either")
        if t is None and other is not None:
            raise ValueError(f"{op}: {name} must be given: cos and sin come together")
    if cos is not None and cos.shape != sin.shape:
        raise ValueError(f"{op}: sin is {list(sin.shape)}, but cos is {list(cos.shape)}")
    rotary = head_dim if rotary_dim is None else rotary_dim
    if rotary % 2 or rotary > head_dim or rotary < 2:
        raise ValueError(f"{op}: rotary_dim must be even, at least 2 and at most head_dim, {head_dim}, got {rotary}")
    name, t = ("freqs", freqs) if freqs is not None else ("cos", cos)
    if t is None:
        return
    if t.shape[-1] not in (rotary // 2, rotary):
        raise ValueError(
            f"{op}: {name} has {t.shape[-1]} columns, but rotary_dim {rotary} wants {rotary // 2} or {rotary}"
        )
    last = length // 2 * 2 * cp_size if cp_size > 1 else length
    if cu_seqlens is None and positions is None and t.shape[-2] < last:
        raise ValueError(f"{op}: {name} has {t.shape[-2]} positions, but there are {last}")


# ---------------------------------------------------------------- the rotation


@triton.jit
def rotate_heads(
    X, Y, ANGLES, row, head, B, L, P, sense, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, BATCH_INNER: tl.constexpr,
):  # fmt: skip
    """Heads `head` [HEADS] of tokens `row` [TOKENS]."""
    batch, index, position = locate(row, B, L, P, ANGLES, BATCH_INNER)
    h = head.to(tl.int64)[None, :, None]
    at = (batch * X.stride_b + index * X.stride_l)[:, None, None] + h * X.stride_h
    to = (batch * Y.stride_b + index * Y.stride_l)[:, None, None] + h * Y.stride_h
    inside = (row < B * L)[:, None, None] & (head < H)[None, :, None]
    a, b = load_pairs(X.data, at, inside, X.stride_d, 0, 2 * PAIRS, HALF, INTERLEAVED)
    if REST > 0:
        i = 2 * PAIRS + tl.arange(0, REST)[None, None, :]
        rest = tl.load(X.data + at + i.to(tl.int64) * X.stride_d, inside & (i < D), 0.0)
        tl.store(Y.data + to + i, rest, inside & (i < D))
    angles_at = batch * ANGLES.stride_b + position * ANGLES.stride_l
    c, s = load_angles(ANGLES, angles_at, position, row < B * L, PAIRS, HALF)
    a, b = rotate(a, b, c, s * sense)
    store_pairs(Y.data, a, b, to, inside, 2 * PAIRS, HALF, INTERLEAVED)


def lanes(columns: int) -> int:
    """The columns of a tile, two at least: the interpreter takes `other=0` for none in a load of one element."""
    return max(2, power_of_two(columns))


def block_of(count: int, most: int) -> int:
    """How many heads a program takes: a power of two up to `most` that divides them, unless that is much smaller."""
    whole = count & -count
    return min(whole, most) if 4 * whole >= most else min(power_of_two(count), most)


def rows_of(size: int, columns: int) -> int:
    """How many heads of so many columns make a tile of about `size` elements: a power of two, 64 at most."""
    return min(64, power_of_two(max(1, size // columns) + 1) // 2)


def _tile(a, size: int = 4096, warps: int = 4) -> dict:
    # 32 elements a thread: in bf16 four 16-byte loads, and registers for seven programs an SM
    rows = rows_of(size, 2 * a.HALF + a.REST)
    HB = block_of(a.H1, min(8, rows))
    return {"T": max(1, rows // HB), "HB": HB, "num_warps": warps}


@kernel(
    grid=lambda a: (cdiv(a.B * a.L, a.T) * (cdiv(a.H1, a.HB) + cdiv(a.H2, a.HB)),),
    tokens=("B", "L", "P"),
    tune_by=("D",),
    default=_tile,
    candidates=lambda a: [_tile(a, size, warps) for size in (2048, 4096, 8192) for warps in (4, 8)],
)
def rope_rotate(
    X1, X2, Y1, Y2, ANGLES, B, L, P, sense, H1: tl.constexpr, H2: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BATCH_INNER: tl.constexpr, T: tl.constexpr,
    HB: tl.constexpr,
):  # fmt: skip
    """One or two tensors, Y1 and Y2 with columns one apart; a program takes T tokens by HB heads of one of them."""
    FIRST: tl.constexpr = (H1 + HB - 1) // HB
    UNITS: tl.constexpr = FIRST + (H2 + HB - 1) // HB
    unit = tl.program_id(0) % UNITS
    row = tl.program_id(0) // UNITS * T + tl.arange(0, T)
    if unit < FIRST:
        rotate_heads(
            X1, Y1, ANGLES, row, unit * HB + tl.arange(0, HB), B, L, P, sense, H1, D, PAIRS, HALF, REST, INTERLEAVED, BATCH_INNER
        )  # fmt: skip
    elif X2.data is not None:
        rotate_heads(
            X2, Y2, ANGLES, row, (unit - FIRST) * HB + tl.arange(0, HB), B, L, P, sense, H2, D, PAIRS, HALF, REST, INTERLEAVED,
            BATCH_INNER,
        )  # fmt: skip


def launch_rotation(
    op: str, x1: Tensor, x2: Tensor | None, a: SimpleNamespace, sense: float
) -> tuple[Tensor, Tensor | None]:
    """Launch the rotation of an op's one or two tensors, and return contiguous results. A `sense` of -1.0 rotates back."""
    made = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (x1, x2)]
    order = BATCH[a.layout], SEQUENCE[a.layout], HEADS[a.layout], 3
    B, L, D = x1.shape[order[0]], x1.shape[order[1]], x1.shape[3]
    if x1.numel() or (x2 is not None and x2.numel()):
        rotary_dim = D if a.rotary_dim is None else a.rotary_dim
        angles, count = angles_on_device(op, a, L, x1.device, rotary_dim, a.pairing, batched=True)

        def heads(x: Tensor | None) -> Heads:
            return Heads() if x is None else Heads(x, *(x.stride(d) for d in order))

        rope_rotate(
            heads(x1), heads(x2), heads(made[0]), heads(made[1]), angles, B, L, count, sense,
            H1=x1.shape[order[2]], H2=0 if x2 is None else x2.shape[order[2]], D=D, PAIRS=rotary_dim // 2,
            HALF=lanes(rotary_dim // 2), REST=lanes(D - rotary_dim) if rotary_dim < D else 0,
            INTERLEAVED=a.pairing == "interleaved", BATCH_INNER=a.layout == "sbhd",
        )  # fmt: skip
    return made[0], made[1]


def forward(q, k, cos, sin, freqs, **options) -> tuple[Tensor, Tensor]:
    return launch_rotation("rope", q, k, SimpleNamespace(cos=cos, sin=sin, freqs=freqs, **options), 1.0)


def backward(saved: SimpleNamespace, dq: Tensor | None, dk: Tensor | None) -> tuple:
    if dq is None or dk is None:
        one, _ = launch_rotation("rope", dk if dq is None else dq, None, saved, -1.0)
        return (None, one) if dq is None else (one, None)
    return launch_rotation("rope", dq, dk, saved, -1.0)


def forward_one(x, cos, sin, freqs, **options) -> Tensor:
    return launch_rotation("rope_one", x, None, SimpleNamespace(cos=cos, sin=sin, freqs=freqs, **options), 1.0)[0]


def backward_one(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    return (launch_rotation("rope_one", dy, None, saved, -1.0)[0],)


def check(
    x: Tensor, name: str, layout, freqs, cos, sin, rotary_dim, cu_seqlens, cp_size, cp_rank, positions, op: str
) -> None:  # fmt: skip
    batch, length = x.shape[BATCH[layout]], x.shape[SEQUENCE[layout]]
    if batch * length >= 2**31:
        raise ValueError(f"{op}: {name} has {batch * length} tokens, but a launch takes less than 2^31")
    if freqs is None and cos is None and sin is None:
        raise ValueError(f"{op}: freqs must be given, or cos and sin")
    check_tables(
        op, freqs, cos, sin, rotary_dim, x.shape[3], batch, length, cu_seqlens, cp_size, cp_rank, positions
    )  # fmt: skip
    table, words = (freqs, "freqs") if freqs is not None else (cos, "cos")
    if table.shape[0] not in (1, batch):
        raise ValueError(f"{op}: {words} has {table.shape[0]} batches, but must have 1 or {batch}")


def check_two(
    q, k, cos, sin, freqs, layout, rotary_dim, pairing, mscale, cu_seqlens, cp_size, cp_rank, positions
) -> None:  # fmt: skip
    check(q, "q", layout, freqs, cos, sin, rotary_dim, cu_seqlens, cp_size, cp_rank, positions, "rope")
    for d in (BATCH[layout], SEQUENCE[layout]):
        if q.shape[d] != k.shape[d]:
            raise ValueError(f"rope: k is {list(k.shape)} and q {list(q.shape)}: they may differ in heads alone")


def check_one(
    x, cos, sin, freqs, layout, rotary_dim, pairing, mscale, cu_seqlens, cp_size, cp_rank, positions
) -> None:  # fmt: skip
    check(x, "x", layout, freqs, cos, sin, rotary_dim, cu_seqlens, cp_size, cp_rank, positions, "rope_one")


TABLES = {
    "cu_seqlens": "int[sequences]", "mscale": above(0.0), "cp_size": at_least(1), "positions": "int[placed_batch placed_length]",
}  # fmt: skip
WHERE = {**dict.fromkeys(("cos", "sin", "freqs"), "float[tables positions angles]"), **TABLES}


def in_order(layout: str, *dims: str, heads: str = "heads") -> dict[str, str]:
    """What the first dimensions of a tensor are in this layout."""
    words = {"b": "batch", "s": "length", "h": heads}
    return {dim: words[letter] for dim, letter in zip(dims, layout)}


def cut_angles(a: SimpleNamespace, length: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """(which of batch and length may be sharded, what the dimensions of the angles are): a part of the sequence has the same part
    of the angles, unless its positions are others, or has the same part of the positions that are given."""
    table = a.cos if a.freqs is None else a.freqs
    if a.positions is not None:
        names = {"placed_batch": "batch", "placed_length": "length"}
        if table is not None and table.dim() == 3 and table.shape[0] != 1:
            names["tables"] = "batch"
        return ("batch", "length"), names
    whole = a.cu_seqlens is None and a.cp_size == 1 and (table is None or table.shape[-2] == length)
    names = {"positions": "length"} if whole else {}
    if table is not None and table.dim() == 3 and table.shape[0] != 1:
        names["tables"] = "batch"
    return ("batch", "length") if whole else ("batch",), names


def sharding(a: SimpleNamespace, x: Tensor, names: dict[str, str]) -> Sharding:
    local, angles = cut_angles(a, x.shape[SEQUENCE[a.layout]])
    return Sharding((*local, "heads"), {**names, **angles})


def sharding_two(a: SimpleNamespace) -> Sharding:
    q = in_order(a.layout, "batch", "q_length", "q_heads", heads="heads/q")
    return sharding(a, a.q, {**q, **in_order(a.layout, "batch", "k_length", "k_heads", heads="heads/k")})


rope_one = Op(
    "rope_one", reference_one, inputs_one, Triton(forward_one, backward_one, single),
    sibling="rope", where={"x": "float[batch length heads head_dim]", **WHERE},
    results={"y": "x[batch length heads head_dim]"}, out=Out(contiguous=("y",), lies_on={"y": ("x",)}),
    gradient=Gradient(of=("x",), shape_only=lambda values: ("x",)), check=check_one, bars=Bars("A"),
    sharding=lambda a: sharding(a, a.x, in_order(a.layout, "batch", "length", "heads")),
)  # fmt: skip
rope = Op(
    "rope", reference, inputs, Triton(forward, backward, single),
    where={"q": "float[batch q_length q_heads head_dim]", "k": "q[batch k_length k_heads head_dim]", **WHERE},
    results={"q_out": "q[batch q_length q_heads head_dim]", "k_out": "q[batch k_length k_heads head_dim]"},
    out=Out(contiguous=("q_out", "k_out"), lies_on={"q_out": ("q",), "k_out": ("k",)}), check=check_two,
    sharding=sharding_two, bars=Bars("A"),
    gradient=Gradient(of=("q", "k"), through=("q_out", "k_out"), shape_only=lambda values: ("q", "k")),
)  # fmt: skip
