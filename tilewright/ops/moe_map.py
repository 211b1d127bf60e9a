"""Row map of a mixture of experts: where each token's rows go when rows are grouped by expert.

Expert e has c_e rows, tokens ascending; its group begins at the sum over earlier experts of c rounded up to `align`. The rows
that a group has more than c_e are padding. Rows at and past `capacity` are dropped, the last in expert-major order.

Two launches, and everything stays on the device. The first writes for every 32 tokens and expert a word with one bit per
routed token, and for every block of tokens the counts. In the second each block sums the counts of all and of the earlier
blocks; the row of a pair is then its block's first row for that expert plus the number of bits below the token's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_indices
from ..core.draw import Draw
from ..core.kernel import kernel
from ..core.op import Op, Triton
from ..core.signature import at_least
from ..core.target import Target
from ..core.tensor import cdiv, power_of_two

TILE = 64  # tokens that one step of the second kernel places: two words
BLOCKS = 128  # programs at most: each reads the counts of all, so that more would cost more than they bring


def reference(
    routing: Tensor,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_map [tokens, slots], source [capacity], offsets [experts], overflow []), int32: rows grouped by expert.

    `routing` is a map [tokens, experts], not 0 where a token goes to an expert, or, with `experts`, indices [tokens, k],
    where an index outside [0, experts) is none and a repeated one counts once. `row_map` has the rows of each token,
    ascending, then -1: k columns or, for a map, `topk` (default: all experts; what a token has more of is dropped, highest
    experts first). `source` has the token of each row, -1 for padding and beyond. `offsets` are end rows of the experts'
    groups, all multiples of `align`. `capacity` is the number of rows, by default enough for any routing: pairs whose row
    would lie past it, the last in expert-major order, are dropped, and `overflow` counts them.
    """
    return find_rows(routing, experts, topk, align, capacity)[:4]


class RowMap(NamedTuple):
    """Rows of the pairs of tokens and experts; `rows` is where each slot of the routing goes (reference only)."""

    row_map: Tensor  # [tokens, slots] ascending, then -1
    source: Tensor  # [capacity] token of each row, -1 for none
    offsets: Tensor  # [experts] end row of each group
    overflow: Tensor  # [] pairs that did not fit
    rows: Tensor | None = None  # [tokens, slots of the routing], `capacity` for none


def sizes(
    routing: Tensor, experts: int | None, topk: int | None, align: int, capacity: int | None
) -> tuple[int, int, int]:
    """(experts, most rows of a token, rows of the result)."""
    tokens, slots = routing.shape
    count = slots if experts is None else experts
    width = slots if experts is not None else count if topk is None else min(topk, count)
    if capacity is None:
        pairs = tokens * min(width, count)
        capacity = (pairs + torch.sym_min(count, pairs) * (align - 1)) // align * align
    return count, width, capacity


def chosen_experts(routing: Tensor, experts: int | None, width: int) -> tuple[Tensor, Tensor]:
    """(expert of each slot, whether the slot counts)."""
    tokens, slots = routing.shape
    if experts is None:
        counts = routing != 0
        return torch.arange(slots, device=routing.device).expand(tokens, slots), counts & (counts.cumsum(1) <= width)
    expert = routing.to(torch.int64)
    repeated = (expert[:, :, None] == expert[:, None, :]).tril(-1).any(2)
    return expert, (expert >= 0) & (expert < experts) & ~repeated


def find_rows(routing: Tensor, experts: int | None, topk: int | None, align: int, capacity: int | None) -> RowMap:
    """The map in plain torch, for references."""
    (tokens, slots), device = routing.shape, routing.device
    count, width, capacity = sizes(routing, experts, topk, align, capacity)
    expert, counts = chosen_experts(routing, experts, width)
    key = torch.where(counts, expert, count).reshape(-1)
    per = torch.zeros(count + 1, dtype=torch.int64, device=device).scatter_add(0, key, torch.ones_like(key))
    place = torch.zeros_like(key).scatter(0, key.argsort(stable=True), torch.arange(tokens * slots, device=device))
    rank = place - (per.cumsum(0) - per)[key]
    padded = (per[:count] + align - 1) // align * align
    ends, usable = padded.cumsum(0), capacity // align * align
    row = (F.pad(ends - padded, (0, 1))[key] + rank).reshape(tokens, slots)
    kept = counts & (row < usable)
    row = torch.where(kept, row, capacity)
    ascending = row.sort(1).values[:, :width]
    token = torch.arange(tokens, device=device)[:, None].expand(tokens, slots)
    source = torch.full((capacity + 1,), -1, dtype=torch.int64, device=device)
    source = source.scatter(0, row.reshape(-1), token.reshape(-1))[:capacity]
    return RowMap(
        torch.where(ascending < capacity, ascending, -1).to(torch.int32),
        source.to(torch.int32),
        ends.clamp(max=usable).to(torch.int32),
        (counts & ~kept).sum().to(torch.int32),
        row,
    )


def draw_routing(draw: Draw, tokens: int) -> dict:
    """A routing in either form, with the arguments that belong to it."""
    experts = draw.dim("experts", (1, 2, 5, 16))
    slots = draw.option("slots", 2, 3, 5)
    drawn: dict = {"align": draw.option("align", 16, 1, 3)}
    drawn["capacity"] = tokens * slots // 2 + 5 if draw.option("short", False, True) else None
    form = draw.option("form", "indices", "map", "best")
    if form == "best":  # as a router gives them: every token its own, all different
        best = draw.tensor(tokens, experts, dtype=torch.float32).topk(min(slots, experts)).indices
        return {"routing": best, "experts": experts, **drawn}
    if form == "indices":
        index = draw.option("index", torch.int64, torch.int32)
        return {"routing": draw.integers(tokens, slots, low=-1, high=experts, dtype=index), "experts": experts, **drawn}
    flags = draw.integers(tokens, experts, dtype=torch.int32)
    flags = flags != 0 if draw.option("flags", True, False) else flags
    return {"routing": flags, "topk": draw.option("topk", None, 2), **drawn}


def inputs(draw: Draw) -> dict:
    return draw_routing(draw, draw.dim("tokens"))


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def popcount(v):
    """Bits that are set in a uint32; compilers know this form."""
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def read_routing(R, t, k, T, E, stride_t, stride_k, SLOTS: tl.constexpr, MAP: tl.constexpr):
    """The expert of slots k of tokens t, -1 for none: device data, of which nothing outside [0, E) is kept."""
    at = R + t.to(tl.int64) * stride_t + k.to(tl.int64) * stride_k
    v = tl.load(at, (t < T) & (k < SLOTS), 0 if MAP else -1)
    if MAP:
        expert = tl.where(v != 0, k, -1)
    else:
        v = v.to(tl.int64)
        expert = tl.where((v >= 0) & (v < E), v, -1).to(tl.int32)
    return expert


@triton.jit
def ranked(expert, k, WIDTH: tl.constexpr, SLOTS: tl.constexpr, MAP: tl.constexpr):
    """(expert, its place among its token's experts) for whole tokens [.., slots]; -1 where the slot does not count."""
    if MAP:
        counts = (expert >= 0).to(tl.int32)
        place = tl.cumsum(counts, 1) - counts
        expert = tl.where(place < WIDTH, expert, -1)
    else:
        repeated = expert < 0
        for j in range(SLOTS):
            other = tl.sum(tl.where(k == j, expert, 0), 1)[:, None]
            repeated = repeated | ((other == expert) & (j < k))
        expert = tl.where(repeated, -1, expert)
        place = tl.zeros(expert.shape, tl.int32)
        for j in range(SLOTS):
            other = tl.sum(tl.where(k == j, expert, 0), 1)[:, None]
            place += ((other >= 0) & (other < expert)).to(tl.int32)
    return expert, place


@triton.jit
def slot_experts(t, k, R, T, E, stride_t, stride_k, WIDTH: tl.constexpr, SLOTS: tl.constexpr, MAP: tl.constexpr):
    """`ranked` of what is read."""
    return ranked(read_routing(R, t, k, T, E, stride_t, stride_k, SLOTS, MAP), k, WIDTH, SLOTS, MAP)


@triton.jit
def flag_experts(
    R, FLAGS, t, T, E, stride_t, stride_k, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr
):
    """FLAGS [64, BLOCK_E], bytes: 1 where one of 64 tokens has an expert. Through memory: comparing every index with every
    expert in registers would take longer than all the rest."""
    k = tl.arange(0, BLOCK_S)[None, :]
    expert = read_routing(R, t, k, T, E, stride_t, stride_k, SLOTS, False)
    j = tl.arange(0, 64)[:, None]
    tl.store(FLAGS + j * BLOCK_E + tl.arange(0, BLOCK_E)[None, :], tl.zeros([64, BLOCK_E], tl.uint8))
    tl.debug_barrier()
    tl.store(FLAGS + j * BLOCK_E + tl.maximum(expert, 0), tl.full(expert.shape, 1, tl.uint8), expert >= 0)
    tl.debug_barrier()


@kernel(grid=lambda a: (a.P,), tokens=("T", "P", "tiles"), default=lambda a: {"num_warps": 8})
def moe_count(
    R, FLAGS, WORDS, COUNTS, T, E, P, tiles, stride_t, stride_k, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    MAP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WORDS [tokens / 32, E]: a bit per token; COUNTS [P, E]: tokens of each block of 64 * tiles. FLAGS [P, 64, BLOCK_E] is
    room. PDL: the next launch may start now; it waits by itself for what it needs of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    bit = tl.arange(0, 32)[:, None]
    total = tl.zeros([BLOCK_E], tl.int32)
    for i in range(tiles):
        tile = p * tiles + i
        if not MAP:
            FLAGS_HERE = FLAGS + p.to(tl.int64) * 64 * BLOCK_E
            t = tile * 64 + tl.arange(0, 64)[:, None]
            flag_experts(R, FLAGS_HERE, t, T, E, stride_t, stride_k, SLOTS, BLOCK_E, BLOCK_S)
        for half in tl.static_range(2):
            if MAP:
                t = tile * 64 + 32 * half + bit
                expert = read_routing(R, t, e[None, :], T, E, stride_t, stride_k, SLOTS, MAP)
                if WIDTH < SLOTS:
                    expert, _ = ranked(expert, e[None, :], WIDTH, SLOTS, MAP)
                chosen = (expert >= 0).to(tl.uint32)
            else:
                chosen = tl.load(FLAGS_HERE + (32 * half + bit) * BLOCK_E + e[None, :]).to(tl.uint32)
            bits = tl.sum(chosen << bit.to(tl.uint32), 0)
            at = WORDS + (2 * tile + half).to(tl.int64) * E + e
            tl.store(at, bits.to(tl.int32, bitcast=True), e < E)
            total += popcount(bits)
        if not MAP:
            tl.debug_barrier()  # all have read the flags
    tl.store(COUNTS + p.to(tl.int64) * E + e, total.to(COUNTS.dtype.element_ty), e < E)


@triton.jit
def fill_unused(
    SOURCE, PROBS, FULL, p, P, E, last, usable, capacity, ALIGN: tl.constexpr, BLOCK_A: tl.constexpr
):  # fmt: skip
    """Source -1 and probability 0 for padding rows, groups p, p + P .. of them, and for a share of the rows past the last
    group. FULL has where the rows of each group that are none begin."""
    if ALIGN > 1:
        for e in range(p, E, P):
            first = tl.load(FULL + e)
            end = tl.minimum(tl.cdiv(first, ALIGN) * ALIGN, usable)
            r = first + tl.arange(0, BLOCK_A)
            store_none(SOURCE, PROBS, r, r < end)
    for start in range(last + p * 1024, capacity, P * 1024):
        r = start + tl.arange(0, 1024)
        store_none(SOURCE, PROBS, r, r < capacity)


@triton.jit
def store_none(SOURCE, PROBS, r, inside):
    tl.store(SOURCE + r, tl.full(r.shape, -1, tl.int32), inside)
    if PROBS is not None:
        tl.store(PROBS + r, tl.zeros(r.shape, PROBS.dtype.element_ty), inside)


@triton.jit
def place_tokens(
    j, tile, R, W, WORDS, FIRST, ROW_MAP, SOURCE, PROBS, T, E, usable, stride_t, stride_k, stride_wt, stride_wk,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, MAP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Give tokens j of a tile their rows. FIRST has the row of each expert's first token in the tile."""
    t = tile * 64 + j
    k = tl.arange(0, BLOCK_S)[None, :]
    expert, place = slot_experts(t, k, R, T, E, stride_t, stride_k, WIDTH, SLOTS, MAP)
    counts = expert >= 0
    at = tl.where(counts, expert, 0)
    row = tl.load(FIRST + at, counts, 0)
    words = WORDS + tile.to(tl.int64) * 2 * E + at
    low = tl.load(words, counts, 0).to(tl.uint32, bitcast=True)
    high = tl.load(words + E, counts & (j >= 32), 0).to(tl.uint32, bitcast=True)
    below = (tl.full(j.shape, 1, tl.uint32) << (j % 32).to(tl.uint32)) - 1
    row += tl.where(j < 32, popcount(low & below), popcount(low) + popcount(high & below))
    kept = counts & (row < usable)
    tl.store(ROW_MAP + t.to(tl.int64) * WIDTH + place, row, kept)
    tl.store(SOURCE + row, tl.broadcast_to(t, row.shape), kept)
    if PROBS is not None:
        if W is None:
            prob = tl.full(row.shape, 1.0, tl.float32)
        else:
            prob = tl.load(W + t.to(tl.int64) * stride_wt + k.to(tl.int64) * stride_wk, kept, 0.0)
        tl.store(PROBS + row, prob.to(PROBS.dtype.element_ty), kept)
    c = tl.arange(0, BLOCK_W)[None, :]
    rest = (t < T) & (c >= tl.sum(kept.to(tl.int32), 1)[:, None]) & (c < WIDTH)
    tl.store(ROW_MAP + t.to(tl.int64) * WIDTH + c, tl.full(rest.shape, -1, tl.int32), rest)


@kernel(
    grid=lambda a: (a.P,),
    tokens=("T", "P", "tiles", "capacity"),
    default=lambda a: {"num_warps": 8, "launch_pdl": a.PDL},
)
def moe_place(
    R, W, WORDS, COUNTS, FIRST, ROW_MAP, SOURCE, PROBS, OFFSETS, OVERFLOW, T, E, P, tiles, capacity, stride_t, stride_k,
    stride_wt, stride_wk, WIDTH: tl.constexpr, SLOTS: tl.constexpr, MAP: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All results from words and counts; FIRST [P, 2, E] is room for what a program's threads tell each other."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, P, BLOCK_P):
        q = start + tl.arange(0, BLOCK_P)[:, None]
        counts = tl.load(COUNTS + q * E + e[None, :], (q < P) & (e[None, :] < E), 0).to(tl.int32)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(q < p, counts, 0), 0)
    padded = tl.cdiv(total, ALIGN) * ALIGN
    ends = tl.cumsum(padded, 0)
    usable = capacity // ALIGN * ALIGN
    full = ends - padded + total
    if p == 0:
        tl.store(OFFSETS + e, tl.minimum(ends, usable), e < E)
        tl.store(OVERFLOW, tl.sum(tl.minimum(tl.maximum(full - usable, 0), total), 0))
    FIRST += p.to(tl.int64) * 2 * E
    first = ends - padded + before
    tl.store(FIRST + e, first, e < E)
    tl.store(FIRST + E + e, full, e < E)
    tl.debug_barrier()
    fill_unused(
        SOURCE, PROBS, FIRST + E, p, P, E, tl.minimum(tl.sum(padded, 0), usable), usable, capacity, ALIGN, BLOCK_A
    )
    for i in range(tiles):
        tile = p * tiles + i
        for start in range(0, 64, TOKENS):
            j = start + tl.arange(0, TOKENS)[:, None]
            place_tokens(
                j, tile, R, W, WORDS, FIRST, ROW_MAP, SOURCE, PROBS, T, E, usable, stride_t, stride_k, stride_wt,
                stride_wk, WIDTH, SLOTS, MAP, BLOCK_S, BLOCK_W,
            )  # fmt: skip
        if i + 1 < tiles:
            words = WORDS + tile.to(tl.int64) * 2 * E + e
            first += popcount(tl.load(words, e < E, 0).to(tl.uint32, bitcast=True))
            first += popcount(tl.load(words + E, e < E, 0).to(tl.uint32, bitcast=True))
            tl.debug_barrier()  # all have read what lies there
            tl.store(FIRST + e, first, e < E)
            tl.debug_barrier()


# ---- host ------------------------------------------------------------------------------------------------------------


def routing_form(routing: Tensor, experts: int | None, width: int) -> tuple[Tensor, dict]:
    """The routing and what kernels must know of it."""
    R = routing.view(torch.uint8) if routing.dtype == torch.bool else routing
    return R, {"WIDTH": width, "SLOTS": routing.shape[1], "MAP": experts is None}


def build_map(
    op: str, routing: Tensor, probs: Tensor | None, experts: int | None, topk: int | None, align: int,
    capacity: int | None, row_probs: Tensor | None = None,
) -> RowMap:  # fmt: skip
    """The map on the device; `row_probs`, if given, is filled with the probability of each row, 1 without `probs`."""
    if experts is not None:
        check_indices(op, "routing", routing, -1, experts)
    E, width, capacity = sizes(routing, experts, topk, align, capacity)
    T, slots = routing.shape
    R, form = routing_form(routing, experts, width)
    tiles = max(1, cdiv(T, TILE * BLOCKS))
    P = max(1, cdiv(T, TILE * tiles))

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=routing.device)

    words, first = room(P * tiles * 2, E), room(P, 2, E)
    counts = room(P, E, dtype=torch.uint8 if tiles * TILE < 256 else torch.int32)
    found = RowMap(room(T, width), room(capacity), room(E), room())
    BLOCK_E, BLOCK_S = max(16, power_of_two(E)), power_of_two(slots)
    pdl = Target.at(routing.device).tma  # the chips that have the one have the other
    flags = room(P, TILE, BLOCK_E, dtype=torch.uint8) if experts is not None else None
    moe_count(R, flags, words, counts, T, E, P, tiles, *R.stride(), **form, BLOCK_E=BLOCK_E, BLOCK_S=BLOCK_S, PDL=pdl)
    W_strides = (0, 0) if probs is None else probs.stride()
    moe_place(
        R, probs, words, counts, first, found.row_map, found.source, row_probs, found.offsets, found.overflow, T, E, P,
        tiles, capacity, *R.stride(), *W_strides, **form, ALIGN=align, BLOCK_A=power_of_two(align), BLOCK_E=BLOCK_E,
        BLOCK_P=max(1, min(BLOCKS, 32768 // BLOCK_E)), BLOCK_S=BLOCK_S, BLOCK_W=power_of_two(width),
        TOKENS=max(1, min(TILE, 4096 // BLOCK_S)), PDL=pdl,
    )  # fmt: skip
    return found


def forward(routing, *, experts, topk, align, capacity) -> tuple:
    return build_map("moe_row_map", routing, None, experts, topk, align, capacity)[:4]


def check_routing(op: str, routing: Tensor, experts: int | None, topk: int | None, align: int, capacity: int | None):
    """Raise if routing and the numbers about it do not fit each other."""
    if experts is None and routing.shape[1] == 0:
        raise ValueError(f"{op}: routing is a map of no experts, got {list(routing.shape)}")
    if experts is not None and routing.dtype == torch.bool:
        raise TypeError(f"{op}: routing must be int32 or int64 indices when experts is given, got bool")
    if experts is not None and topk is not None:
        raise ValueError(f"{op}: topk is for a map; routing holds {routing.shape[1]} indices a token")
    count, width, rows = sizes(routing, experts, topk, align, capacity)
    if count > 8192:
        raise ValueError(
            f"{op}: {'routing' if experts is None else 'experts'} must have at most 8192 experts, got {count}"
        )
    # Two comparisons: the larger of two sizes would be known to torch.compile for one of them alone
    if rows >= 2**31 or routing.shape[0] * min(width, count) + count * align >= 2**31:
        raise ValueError(
            f"{op}: routing gives up to {rows} rows, but they must be fewer than 2**31: set topk or capacity"
        )


def check(routing, *, experts, topk, align, capacity) -> None:
    check_routing("moe_row_map", routing, experts, topk, align, capacity)


NUMBERS = {"experts": at_least(1), "topk": at_least(1), "align": at_least(1), "capacity": at_least(1)}

moe_row_map = Op(
    "moe_row_map", reference, inputs, Triton(forward),
    where={"routing": "int_or_bool[rows slots]", **NUMBERS},
    results=("row_map", "source", "offsets", "overflow"), graded_results=(), check=check, bars={"class": "G"},
)  # fmt: skip
