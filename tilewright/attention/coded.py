"""Attention whose products multiply codes: of queries and keys, and perhaps of weights and values too. Forward only.

    s = (code_q . code_k) * scale_q * scale_k + q . mean,   o = sum of codes(p * scale_v) . code_v,   the rest is `attention`

Rows of q are quantised where they are read, if they are not codes yet. `mean` is what was taken off the keys before they were
quantised: a number for each row of scores, which adds it again, so that lse, sinks and softcap are those of the whole keys.
Weights times the scales of their values are quantised anew for each row of each block of keys, by the largest of them.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.draw import Draw
from ..core.target import Target
from ..device.products import widen_codes
from ..device.quantize import amax, decode, has, max_nan
from ..device.softmax import LN2, LOG2E
from ..formats.fill import is_fast
from ..formats.fp8 import fp8
from ..formats.integers import int8
from ..gemm.operands import DTYPES, OutDtype
from ..op import Bars, Cost, Op, Out, Triton, single, upcast
from ..runtime.kernel import kernel
from . import attention as plain
from .cache_read import as_codes
from .cache_write import codes_of, own_scale
from .coded_rows import SCALED, Scaled, first_of_blocks, load_scale
from .hopper import coded as hopper_coded
from .portable import (
    TOGETHER,
    Sizes,
    add_part,
    bend,
    blocks,
    heads_of,
    load_part,
    no_part,
    parts_of,
    scores_of,
    shape_scores,
    store_part,
    unit_of,
    used_rows,
    window_of,
)
from .tiles import check_lengths, is_seen, keys_of, keys_seen, lengths, row_keys, tile_at

Backend = Literal["auto", "triton", "hopper", "portable"]  # as in `attention.py`
CODES = "int8|float8_e4m3fn"


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    q_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    out_dtype: OutDtype = "bfloat16",
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scaled: Scaled = "key",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(o, lse) of `attention_lse` over `k` in codes, int8 or e4m3, with a `k_scale` [batch, keys, kv_heads].

    `scaled="block"`: of the scales of keys and of values, which are above 0, those of every 128th key of a sequence from its first
    on count, each for 128 keys; there is no mask then, nor lengths by row.

    `q` is codes of that kind with a `q_scale` [batch, length, heads], or numbers, which are quantised by row as by `int8("row")`
    and `fp8("row", pow2=False, rule="exact")`. `k_mean` [batch, kv_heads, head_dim] is added to all keys, and
    multiplied by q as it is given. o has the dtype of q or
    else of v, and `out_dtype` if both are codes. There is no gradient.
    """
    if scaled == "block":
        first = first_of_blocks(k.shape[1], cu_seqlens_k, k.device)
        k_scale, v_scale = (None if scale is None else scale[:, first] for scale in (k_scale, v_scale))
    rows, keys = rows_of(q, q_scale, k.dtype == torch.int8), numbers(k, k_scale)
    scale = plain.scale_of(q) if scale is None else scale
    if k_mean is not None:  # one more score, of the mean and of queries as they were given
        wide = numbers(q, q_scale).to(rows.dtype)
        mean = upcast(k_mean)[:, None].expand(keys.shape)
        rows, keys = torch.cat([rows, wide], -1), torch.cat([keys, mean.to(keys.dtype)], -1)
    made = plain.reference_lse(
        rows, keys, numbers(v, v_scale), scale=scale, causal=causal, left=left, right=right, softcap=softcap, sink=sink,
        slopes=slopes, mask=mask, kv_len=kv_len, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return made[0].to(DTYPES.get(dtype_of(q, q_scale, v, v_scale, out_dtype), torch.float64)), made[1]


def numbers(x: Tensor, scale: Tensor | None) -> Tensor:
    """What codes [..., columns] with scales [...] stand for, NaN where these are not finite; what has none is numbers."""
    if scale is None:
        return upcast(x)
    return x.to(scale.dtype) * torch.where(scale.isfinite(), scale, torch.nan)[..., None]


def rows_of(q: Tensor, q_scale: Tensor | None, integers: bool) -> Tensor:
    """Queries as codes have them, int8 or e4m3."""
    if q_scale is not None:
        return numbers(q, q_scale)
    codes = (int8("row") if integers else fp8("row", pow2=False, rule="exact")).quantize(q)
    return numbers(codes.data, codes.scale.reshape(q.shape[:-1])).to(upcast(q).dtype)


def dtype_of(q: Tensor, q_scale: Tensor | None, v: Tensor, v_scale: Tensor | None, out_dtype: str) -> str:
    """The name of the dtype of o."""
    own = q.dtype if q_scale is None else v.dtype if v_scale is None else DTYPES[out_dtype]
    return str(own).removeprefix("torch.")


def inputs(draw: Draw, pv: bool) -> dict[str, Any]:
    made = plain.inputs(draw)
    kind = draw.option("codes", torch.int8, torch.float8_e4m3fn)

    def codes(x: Tensor) -> tuple[Tensor, Tensor]:
        low = draw.uniform(*x.shape[:-1], low=0.004, high=0.02, dtype=torch.float32)
        if kind == torch.int8:
            return draw.integers(*x.shape, low=-127, high=128, dtype=torch.int8), low
        return draw.tensor(*x.shape, scale=60.0, dtype=torch.float32).to(kind), low

    made["k"], made["k_scale"] = codes(made["k"])
    if draw.option("coded", False, True):
        made["q"], made["q_scale"] = codes(made["q"])
    if pv:
        made["v"], made["v_scale"] = codes(made["v"])
    batch, _, kv_heads, width = made["k"].shape
    if made.get("mask") is None and (made.get("kv_len") is None or made["kv_len"].dim() == 1):
        made["scaled"] = draw.option("scaled", "key", "block")
    made["k_mean"] = draw.maybe("k_mean", lambda: draw.tensor(batch, kv_heads, width, dtype=torch.float32))
    return made


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def value_of(codes, FORMAT: tl.constexpr):
    """What codes stand for, in fp32."""
    if has(FORMAT, "int8", "fast"):
        return codes.to(tl.float32)
    else:
        return decode(codes, "e4m3")


@triton.jit
def code_product(a, b, FORMAT: tl.constexpr):
    """a @ b of codes, in fp32: int8 exactly, e4m3 as they are or, where a chip does not multiply them, widened."""
    if has(FORMAT, "int8"):
        return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
    elif has(FORMAT, "fast"):
        return tl.dot(a, b)
    else:
        return tl.dot(widen_codes(a, False), widen_codes(b, False))


@triton.jit
def add_codes(total, a, s, b, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """total + (a * s) @ b of a part [k, WIDTH] of b, with a scale for each row of a."""
    if WIDTH == 0:
        return total
    else:
        return total + code_product(a, b, FORMAT) * s[:, None]


@triton.jit
def mean_product(M, batch, kv_head, KV, x, COLUMNS: tl.constexpr, FROM: tl.constexpr):
    """x . mean of rows [n], of a part of their columns."""
    column = FROM + tl.arange(0, x.shape[1])
    at = (batch.to(tl.int64) * KV + kv_head) * COLUMNS + column
    return tl.sum(x * tl.load(M + at, column < COLUMNS, 0.0)[None, :], 1)


@triton.jit
def walk_codes(
    acc0, acc1, top, total, q0, q1, q_scale, shift_by, K, V, KS, VS, SCORES, WINDOW, tile, batch, head, kv_head, row, limit, shift,
    start, stop, from_, to, EDGE: tl.constexpr, PLAIN: tl.constexpr, SIZES: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, FORMAT: tl.constexpr, EVERY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`portable.walk_keys` over keys in codes; EVERY: how many of them have one scale."""
    for n in tl.range(from_, to, BLOCK_N, num_stages=STAGES):
        j = n + tl.arange(0, BLOCK_N)
        token = tile.first_k + j
        there = (j >= start) & (j < stop)
        raw = code_product(
            q0, tl.trans(load_part(K, batch, kv_head, token, there, SIZES.D, 0, SIZES.D0)), FORMAT
        )  # fmt: skip
        if SIZES.D1 > 0:
            raw += code_product(
                q1, tl.trans(load_part(K, batch, kv_head, token, there, SIZES.D, SIZES.D0, SIZES.D1)), FORMAT
            )  # fmt: skip
        raw = raw * q_scale[:, None] * load_scale(KS, batch, kv_head, tile.first_k, j, there, EVERY)[None, :]
        if shift_by is not None:
            raw += shift_by[:, None]
        s, _ = bend(SCORES, raw)
        position = (row + shift)[:, None]
        ok = is_seen(WINDOW, position, j[None, :], limit[:, None])
        s, ok = shape_scores(
            SCORES, s, ok, batch, head, (tile.first_q + row)[:, None], token[None, :], position, j[None, :],
            (row < tile.count_q)[:, None],
        )  # fmt: skip
        if EDGE:
            s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen nothing yet
        p = tl.exp2(s - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        top = new
        v0 = load_part(V, batch, kv_head, token, there, SIZES.V, 0, SIZES.V0)
        v1 = load_part(V, batch, kv_head, token, there, SIZES.V, SIZES.V0, SIZES.V1)
        if VS is None:
            if not PLAIN:
                used = tl.max((ok & (row < tile.count_q)[:, None]).to(tl.int32), 0) > 0
                v0 = used_rows(used, v0, SIZES.V0)
                v1 = used_rows(used, v1, SIZES.V1)
            acc0 = add_part(acc0 * fade[:, None], p, v0, SIZES.V0, PIECES)
            if SIZES.V1 > 0:
                acc1 = add_part(acc1 * fade[:, None], p, v1, SIZES.V1, PIECES)
        else:
            w = p * load_scale(VS, batch, kv_head, tile.first_k, j, there, EVERY)[None, :]
            if EDGE:  # a scale that nobody sees may be NaN
                w = tl.where(ok, w, 0.0)
                if not has(FORMAT, "int8"):  # and so may codes
                    hidden = tl.max((ok & (row < tile.count_q)[:, None]).to(tl.int32), 0) == 0
                    v0 = clear_codes(hidden, v0, SIZES.V0)
                    v1 = clear_codes(hidden, v1, SIZES.V1)
            w_scale, mult = own_scale(amax(w, 1), FORMAT)
            codes = codes_of(w, w_scale[:, None], mult[:, None], FORMAT)
            acc0 = add_codes(acc0 * fade[:, None], codes, w_scale, v0, SIZES.V0, FORMAT)
            if SIZES.V1 > 0:
                acc1 = add_codes(acc1 * fade[:, None], codes, w_scale, v1, SIZES.V1, FORMAT)
    return acc0, acc1, top, total


@triton.jit
def clear_codes(hidden, t, WIDTH: tl.constexpr):
    """A part of a tile of e4m3 codes with 0 for hidden rows."""
    if WIDTH == 0:
        return t
    else:
        bits = t.to(tl.uint8, bitcast=True)
        return tl.where(hidden[:, None], tl.zeros_like(bits), bits).to(t.dtype, bitcast=True)


@kernel(
    grid=lambda a: (a.TILES * a.HEADS * a.BATCH,), tokens=("L", "KEYS", "HEADS", "GROUP", "TILES", "BATCH"),
    default=lambda a: {"num_warps": 4 if a.SIZES.D0 + a.SIZES.V0 <= 256 and a.PIECES == 1 and a.VS is None else 8},
)  # fmt: skip
def attention_codes_forward(
    Q, K, V, QS, KS, VS, MEAN, O, LSE, SINK, SCORES, WINDOW, LENGTHS, L, KEYS, HEADS, GROUP, BATCH, TILES, SIZES: tl.constexpr,
    PLAIN: tl.constexpr, TOGETHER: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, EVERY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`portable.attention_forward` with keys in codes; QS None: q is numbers; VS None: v is; MEAN None: keys are whole."""
    index, head, batch = unit_of(tl.program_id(0), TILES, HEADS, BATCH, TOGETHER, WINDOW.right is not None)
    kv_head = head // GROUP
    tile = tile_at(LENGTHS, index, batch, L, KEYS, BLOCK_M)
    if tile.start < tile.count_q:
        row = tile.start + tl.arange(0, BLOCK_M)
        live = row < tile.count_q
        token = tile.first_q + row
        count, wrong = keys_of(LENGTHS, tile)
        shift = count - tile.count_q
        limit, wrong_row = row_keys(LENGTHS, tile, batch, row, count)
        last = tl.minimum(tile.start + BLOCK_M, tile.count_q) - 1
        start, stop, whole_start, whole_stop = keys_seen(WINDOW, shift, count, tile.start, last)
        if LENGTHS.stride_l is not None:
            stop = tl.maximum(start, tl.minimum(stop, tl.max(tl.where(live, limit, 0), 0)))
        q0 = load_part(Q, batch, head, token, live, SIZES.D, 0, SIZES.D0)
        q1 = load_part(Q, batch, head, token, live, SIZES.D, SIZES.D0, SIZES.D1)
        if QS is None:
            y0 = q0.to(tl.float32)
            largest = amax(y0, 1)
            if SIZES.D1 > 0:
                y1 = q1.to(tl.float32)
                largest = max_nan(largest, amax(y1, 1))
            q_scale, mult = own_scale(largest, FORMAT)
            c0 = codes_of(y0, q_scale[:, None], mult[:, None], FORMAT)
            c1 = 0.0
            if SIZES.D1 > 0:
                c1 = codes_of(y1, q_scale[:, None], mult[:, None], FORMAT)
        else:
            q_scale = load_scale(QS, batch, head, tile.first_q, row, live)
            c0 = q0
            c1 = q1
            y0 = value_of(q0, FORMAT) * q_scale[:, None]
            if SIZES.D1 > 0:
                y1 = value_of(q1, FORMAT) * q_scale[:, None]
        shift_by = None
        if MEAN is not None:
            shift_by = mean_product(MEAN, batch, kv_head, HEADS // GROUP, y0, SIZES.D, 0)
            if SIZES.D1 > 0:
                shift_by += mean_product(MEAN, batch, kv_head, HEADS // GROUP, y1, SIZES.D, SIZES.D0)
        acc0 = no_part(BLOCK_M, SIZES.V0)
        acc1 = no_part(BLOCK_M, SIZES.V1)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINK is not None:  # one more key, whose value is 0
            sink = tl.load(SINK + head).to(tl.float32) * LOG2E
            top = tl.zeros([BLOCK_M], tl.float32) + sink
            total += tl.where(sink == float("-inf"), 0.0, 1.0)
        first = start // BLOCK_N * BLOCK_N
        end = stop
        if PLAIN:
            middle = tl.minimum(
                tl.maximum(tl.cdiv(whole_start, BLOCK_N) * BLOCK_N, first), tl.cdiv(stop, BLOCK_N) * BLOCK_N
            )
            after = tl.maximum(middle, whole_stop // BLOCK_N * BLOCK_N)
            if WINDOW.left is not None:
                acc0, acc1, top, total = walk_codes(
                    acc0, acc1, top, total, c0, c1, q_scale, shift_by, K, V, KS, VS, SCORES, WINDOW, tile, batch, head, kv_head,
                    row, limit, shift, start, stop, first, tl.minimum(middle, end), True, PLAIN, SIZES, BLOCK_N, PIECES, FORMAT,
                    EVERY, STAGES,
                )  # fmt: skip
            acc0, acc1, top, total = walk_codes(
                acc0, acc1, top, total, c0, c1, q_scale, shift_by, K, V, KS, VS, SCORES, WINDOW, tile, batch, head, kv_head, row,
                limit, shift, start, stop, middle, tl.minimum(after, end), False, PLAIN, SIZES, BLOCK_N, PIECES, FORMAT, EVERY,
                STAGES,
            )  # fmt: skip
            first = after
        acc0, acc1, top, total = walk_codes(
            acc0, acc1, top, total, c0, c1, q_scale, shift_by, K, V, KS, VS, SCORES, WINDOW, tile, batch, head, kv_head, row,
            limit, shift, start, stop, first, end, True, PLAIN, SIZES, BLOCK_N, PIECES, FORMAT, EVERY, STAGES,
        )  # fmt: skip
        empty = total == 0.0
        share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        lse = tl.where(empty, float("-inf"), top * LN2 + tl.log(tl.where(empty, 1.0, total)))
        poison = tl.where(wrong_row | wrong, float("nan"), 0.0)
        store_part(O, batch, head, token, live, acc0 * share[:, None] + poison[:, None], SIZES.V, 0, SIZES.V0)
        if SIZES.V1 > 0:
            store_part(
                O, batch, head, token, live, acc1 * share[:, None] + poison[:, None], SIZES.V, SIZES.V0, SIZES.V1
            )
        at = (batch.to(tl.int64) * HEADS + head) * L + token
        tl.store(LSE + at, lse + poison, live)


# ---- host ------------------------------------------------------------------------------------------------------------


def scale_heads(scale: Tensor | None) -> Any:
    """[batch, tokens, heads] as kernels take heads."""
    return None if scale is None else heads_of(scale.unsqueeze(-1))


def forward(q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    a = SimpleNamespace(q=q, k=k, v=v, k_scale=k_scale, **options)
    batch, length, heads, _ = q.shape
    kind = DTYPES[dtype_of(q, a.q_scale, v, a.v_scale, a.out_dtype)]
    o = torch.empty(batch, length, heads, v.shape[-1], dtype=kind, device=q.device)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    check_lengths("attention", q, k, a.kv_len, a.cu_seqlens_q, a.cu_seqlens_k)
    if not lse.numel():
        return o, lse
    # Products of codes sum at least 32 of them: columns of queries and keys, and below keys
    sizes = Sizes(q.shape[-1], *parts_of(q.shape[-1], 32), v.shape[-1], *parts_of(v.shape[-1]))
    block = blocks(o, sizes, sizes.V)
    own, other = max(16, block.own), max(32, block.other)
    how, tiles = lengths(a.cu_seqlens_q, a.cu_seqlens_k, length, k.shape[1], a.kv_len, own, False)
    codes = "int8" if k.dtype == torch.int8 else "e4m3"
    by_sequence = a.kv_len is None or a.kv_len.dim() == 1
    attention_codes_forward(
        heads_of(as_codes(q)), heads_of(as_codes(k)), heads_of(as_codes(v)), scale_heads(a.q_scale), scale_heads(k_scale),
        scale_heads(a.v_scale), None if a.k_mean is None else a.k_mean.contiguous(), heads_of(o), lse,
        None if a.sink is None else a.sink.contiguous(), scores_of(a), window_of(a), how, length, k.shape[1], heads,
        heads // k.shape[2], batch, tiles, SIZES=sizes, PLAIN=a.mask is None and by_sequence,
        TOGETHER=TOGETHER, FORMAT=f"{codes}:row:fp32:exact" + (":fast" if is_fast(q) else ""), BLOCK_M=own, BLOCK_N=other,
        PIECES=3 if v.dtype == torch.float32 else 1, EVERY=SCALED.value if a.scaled == "block" else 1, STAGES=block.stages,
    )  # fmt: skip
    return o, lse


def fits(target: Target, a: SimpleNamespace) -> bool:
    return single(target, SimpleNamespace(q=a.q, k=a.k, v=a.v))


def check(
    q, k, v, k_scale, q_scale, v_scale, k_mean, *, out_dtype, pv: bool, op: str, causal, right, mask, kv_len, cu_seqlens_q,
    cu_seqlens_k, scaled, **_,
) -> None:  # fmt: skip
    plain.check(
        q, k, v, causal=causal, right=right, mask=mask, kv_len=kv_len, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, op=op
    )  # fmt: skip
    for name, t, given in (("q", q, q_scale), ("v", v, v_scale)):
        codes = t.element_size() == 1
        if codes != (given is not None):
            raise ValueError(f"{op}: {name}_scale is for codes, and codes need it; {name} has {t.dtype}")
        if codes and t.dtype != k.dtype:
            raise ValueError(f"{op}: {name} must be {k.dtype}, as k is, or numbers, got {t.dtype}")
    if scaled == "block" and (mask is not None or kv_len is not None and kv_len.dim() == 2):
        raise ValueError(f"{op}: scaled block takes no mask, and no kv_len of rows")
    if (v_scale is not None) != pv:
        raise ValueError(f"{op}: v must be {'codes' if pv else 'numbers'}, got {v.dtype}")


WHERE = {
    **plain.WHERE, "q": f"float|{CODES}[batch length heads head_dim]", "k": f"{CODES}[batch keys kv_heads head_dim]",
    "v": f"float|{CODES}[batch keys kv_heads value_dim]", "q_scale": "float32|float64[batch length heads]",
    "k_scale": "float32|float64[batch keys kv_heads]", "v_scale": "float32|float64[batch keys kv_heads]",
    "k_mean": "float32|float64[batch kv_heads head_dim]",
}  # fmt: skip


def flops(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int | None, right: int | None, **_: Any) -> int:
    return plain.flops(q, k, v, causal=causal, left=left, right=right)


ROWS = {
    "o": lambda a: f"{dtype_of(a.q, a.q_scale, a.v, a.v_scale, a.out_dtype)}[batch length heads value_dim]",
    "lse": "float32[batch heads length]",
}
FELT = ("length", "heads")
OUT = Out(contiguous=("lse",))

attention_codes = Op(
    "attention_codes", reference, partial(inputs, pv=False),
    Triton(hopper_coded.forward, None, hopper_coded.fits_call, "hopper"), Triton(forward, None, fits, "portable"), asks="backend",
    where=WHERE, results=ROWS, check=partial(check, pv=False, op="attention_codes"),
    cost=Cost(flops=flops), bars=Bars("L", felt=FELT, steps=True),
    out=OUT, internal=True,
)  # fmt: skip
attention_codes_pv = Op(
    "attention_codes_pv", reference, partial(inputs, pv=True),
    Triton(hopper_coded.forward, None, hopper_coded.fits_call, "hopper"), Triton(forward, None, fits, "portable"), asks="backend",
    where=WHERE, results=ROWS, check=partial(check, pv=True, op="attention_codes_pv"),
    cost=Cost(flops=flops), bars=Bars("K", felt=FELT, steps=True),
    out=OUT, internal=True,
)  # fmt: skip
