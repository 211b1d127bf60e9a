"""Row map of a mixture of experts: where each token's rows go when rows are grouped by expert.

Expert e has c_e rows, tokens ascending; its group begins at the sum over earlier experts of c rounded up to `align`. The rows
that a group has more than c_e are padding. Rows at and past `capacity` are dropped, the last in expert-major order.

Two launches, and everything stays on the device. The first counts, for every block of tokens, those of each expert. In the
second each block sums the counts of all and of the earlier blocks, which gives its first row for each expert. A token's row is
that many further as there are tokens before it in the block with the same expert; these are found meanwhile, from a word for
every 32 tokens and expert with one bit per token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...device.matrices import Matrix
from ...device.quantize import interleave4
from ...gemm.tiles import matrix
from ...op import Bars, Op, Out, Triton
from ...runtime.kernel import kernel

BLOCKS = 128  # programs at most: each reads the counts of all, so that more would cost more than they bring
WARPS = 4  # 8 take 3 us longer at 8192 tokens and 256 experts (H200, November 2026)


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
    where an index outside [0, experts) is none and a repeated one has one row. `row_map` has the rows of each token,
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


class Form(NamedTuple):
    """What a routing holds for each token: SLOTS indices of experts or, MAP, flags of theirs. It has at most WIDTH rows."""

    WIDTH: int
    SLOTS: int
    MAP: bool


class Sums(NamedTuple):
    """How counts of blocks of tokens are summed: there is room for MOST blocks, of which AT_ONCE are read at a time; BYTES: four
    counts are one int32."""

    MOST: int
    AT_ONCE: int
    BYTES: bool


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


def chosen_experts(routing: Tensor, experts: int | None, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(expert of each slot, whether the slot has a row of its own, the first slot of its token with that expert)."""
    tokens, slots = routing.shape
    slot = torch.arange(slots, device=routing.device).expand(tokens, slots)
    if experts is None:
        counts = routing != 0
        return slot, counts & (counts.cumsum(1) <= width), slot
    expert = routing.to(torch.int64)
    first = torch.where(expert[:, :, None] == expert[:, None, :], slot[:, None, :], slots).amin(2)
    return expert, (expert >= 0) & (expert < experts) & (first == slot), first


def find_rows(routing: Tensor, experts: int | None, topk: int | None, align: int, capacity: int | None) -> RowMap:
    """The map in plain torch, for references."""
    (tokens, slots), device = routing.shape, routing.device
    count, width, capacity = sizes(routing, experts, topk, align, capacity)
    expert, counts, first = chosen_experts(routing, experts, width)
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
        row.gather(1, first),
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
def read_routing(R, t, k, T, E, FORM: tl.constexpr):
    """The expert of slots k of tokens t, -1 for none: device data, of which nothing outside [0, E) is kept."""
    at = R.data + t.to(tl.int64) * R.stride_r + k.to(tl.int64) * R.stride_c
    v = tl.load(at, (t < T) & (k < FORM.SLOTS), 0 if FORM.MAP else -1)
    if FORM.MAP:
        expert = tl.where(v != 0, k, -1)
    else:
        v = v.to(tl.int64)
        expert = tl.where((v >= 0) & (v < E), v, -1).to(tl.int32)
    return expert


@triton.jit
def counted(expert, k, FORM: tl.constexpr):
    """The experts of whole tokens [.., slots], -1 where a slot does not count: it is one too many, or repeats one before."""
    if FORM.MAP:
        if FORM.WIDTH < FORM.SLOTS:
            expert = tl.where(tl.cumsum((expert >= 0).to(tl.int32), 1) <= FORM.WIDTH, expert, -1)
    else:
        repeated = expert < 0
        for j in range(FORM.SLOTS - 1):
            other = tl.sum(tl.where(k == j, expert, 0), 1)[:, None]
            repeated = repeated | ((other == expert) & (j < k))
        expert = tl.where(repeated, -1, expert)
    return expert


@triton.jit
def slot_experts(t, k, R, T, E, FORM: tl.constexpr):
    """(the expert that each slot names or -1, the same but for slots that repeat one, its place among its token's experts)."""
    named = read_routing(R, t, k, T, E, FORM)
    expert = counted(named, k, FORM)
    if FORM.MAP:
        named = expert
        counts = (expert >= 0).to(tl.int32)
        place = tl.cumsum(counts, 1) - counts
    else:
        place = tl.zeros(expert.shape, tl.int32)
        for j in range(FORM.SLOTS):
            other = tl.sum(tl.where(k == j, expert, 0), 1)[:, None]
            place += ((other >= 0) & (other < named)).to(tl.int32)
    return named, expert, place


@triton.jit
def add_repeated(named, expert, prob, k, SLOTS: tl.constexpr):
    """The probabilities of slots; the first that names an expert has the sum of all that do."""
    # Always, though routers seldom repeat an expert: asking whether one did takes longer, for it waits for all threads
    total = tl.zeros(prob.shape, tl.float32)
    for j in range(SLOTS):
        other = tl.sum(tl.where(k == j, named, 0), 1)[:, None]
        total += tl.where(other == expert, tl.sum(tl.where(k == j, prob, 0.0), 1)[:, None], 0.0)
    return total


@kernel(
    grid=lambda a: (a.P,),
    tokens=("T", "P", "steps"),
    default=lambda a: {"num_warps": WARPS},
)
def moe_count(
    R, COUNTS, T, E, P, steps, FORM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNTS [P, BLOCK_E]: tokens that each block of TOKENS * steps sends to each expert. PDL: the next launch may start now; it
    waits by itself. This one does not start early: what reads its input before it waits, two launches on, counts on that."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    k = tl.arange(0, BLOCK_S)[None, :]
    total = tl.zeros([BLOCK_E], tl.int32)
    for i in range(steps):
        t = (p * steps + i) * TOKENS + tl.arange(0, TOKENS)[:, None]
        expert = counted(read_routing(R, t, k, T, E, FORM), k, FORM)
        if FORM.MAP:
            total += tl.sum((expert >= 0).to(tl.int32), 0)
        else:
            flat = tl.reshape(expert, [TOKENS * BLOCK_S])
            total += tl.histogram(tl.maximum(flat, 0), BLOCK_E, flat >= 0)
    at = COUNTS + p.to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    tl.store(at, total.to(COUNTS.dtype.element_ty))


@triton.jit
def sum_counts(COUNTS, p, P, BLOCK_E: tl.constexpr, SUMS: tl.constexpr):
    """(tokens of each expert, those of them in blocks before p). Of four counts in an int32 every other one is summed at once, in
    16 bits each; blocks are so few and short that no sum needs the sixteenth."""
    BYTES: tl.constexpr = SUMS.BYTES
    AT_ONCE: tl.constexpr = SUMS.AT_ONCE
    COLS: tl.constexpr = BLOCK_E // 4 if BYTES else BLOCK_E
    c = tl.arange(0, COLS)[None, :]
    total = tl.zeros([COLS], tl.int32)
    before, odd, odd_before = total, total, total
    # There is room for MOST blocks: in a loop over P, or with a mask, fewer loads would be under way at once
    for start in range(0, SUMS.MOST, AT_ONCE):
        q = start + tl.arange(0, AT_ONCE)[:, None]
        v = tl.where(q < P, tl.load(COUNTS + q * COLS + c), 0)
        if BYTES:
            w = (v >> 8) & 0x00FF00FF
            v = v & 0x00FF00FF
            odd += tl.sum(w, 0)
            odd_before += tl.sum(tl.where(q < p, w, 0), 0)
        total += tl.sum(v, 0)
        before += tl.sum(tl.where(q < p, v, 0), 0)
    if BYTES:
        total = interleave4(total & 0xFFFF, odd & 0xFFFF, total >> 16, odd >> 16)
        before = interleave4(before & 0xFFFF, odd_before & 0xFFFF, before >> 16, odd_before >> 16)
    return total, before


@triton.jit
def fill_unused(
    SOURCE, PROBS, full, end, p, P, e, last, capacity, ALIGN: tl.constexpr, BLOCK_A: tl.constexpr
):  # fmt: skip
    """Source -1 and probability 0 for padding rows, from full to end, of experts p, p + P .., and for a share of the rows past
    the last group."""
    if ALIGN > 1:
        mine = (e % P == p)[:, None]
        for start in range(0, ALIGN - 1, BLOCK_A):
            r = full[:, None] + start + tl.arange(0, BLOCK_A)[None, :]
            store_none(SOURCE, PROBS, r, mine & (r < end[:, None]))
    for start in range(last + p * 1024, capacity, P * 1024):
        r = start + tl.arange(0, 1024)
        store_none(SOURCE, PROBS, r, r < capacity)


@triton.jit
def store_none(SOURCE, PROBS, r, inside):
    tl.store(SOURCE + r, tl.full(r.shape, -1, tl.int32), inside)
    if PROBS is not None:
        tl.store(PROBS + r, tl.zeros(r.shape, PROBS.dtype.element_ty), inside)


@triton.jit
def write_words(
    tile, R, WORDS, T, E, FORM: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """WORDS [TILE / 32, BLOCK_E]: for each expert a bit for every token of a tile that goes there."""
    if FORM.MAP:
        e = tl.arange(0, BLOCK_E)
        for w in range(TILE // 32):
            bits = tl.zeros([BLOCK_E], tl.uint32)
            for start in range(0, 32, 8):  # few at a time: a row of flags is as wide as there are experts
                bit = start + tl.arange(0, 8)[:, None]
                expert = read_routing(R, tile * TILE + 32 * w + bit, e[None, :], T, E, FORM)
                chosen = (counted(expert, e[None, :], FORM) >= 0).to(tl.uint32)
                bits += tl.sum(chosen << bit.to(tl.uint32), 0)
            tl.store(WORDS + w * BLOCK_E + e, bits.to(tl.int32, bitcast=True))
    else:
        # Through memory: comparing every index with every expert in registers would take longer than all the rest. The order in
        # which bits are set means nothing.
        room = tl.arange(0, TILE // 32 * BLOCK_E)
        tl.store(WORDS + room, tl.zeros(room.shape, tl.int32))
        tl.debug_barrier()
        k = tl.arange(0, BLOCK_S)[None, :]
        for start in range(0, TILE, TOKENS):
            j = start + tl.arange(0, TOKENS)[:, None]
            expert = read_routing(R, tile * TILE + j, k, T, E, FORM)
            bit = tl.full(j.shape, 1, tl.uint32) << (j % 32).to(tl.uint32)
            bit = tl.broadcast_to(bit.to(tl.int32, bitcast=True), expert.shape)
            at = WORDS + j // 32 * BLOCK_E + tl.maximum(expert, 0)
            tl.atomic_or(at, bit, expert >= 0, sem="relaxed", scope="cta")
    tl.debug_barrier()


@triton.jit
def tokens_in(WORDS, TILE: tl.constexpr, BLOCK_E: tl.constexpr):
    """How many tokens of the tile each expert has."""
    total = tl.zeros([BLOCK_E], tl.int32)
    for w in tl.static_range(TILE // 32):
        bits = tl.load(WORDS + w * BLOCK_E + tl.arange(0, BLOCK_E), cache_modifier=".cg")
        total += popcount(bits.to(tl.uint32, bitcast=True))
    return total


@triton.jit
def find_pairs(
    t, R, PROBS, WORDS, T, E, FORM: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """(expert, place among the token's experts, tokens before it in the tile with that expert, probability) of the slots of
    tokens t."""
    k = tl.arange(0, BLOCK_S)[None, :]
    named, expert, place = slot_experts(t, k, R, T, E, FORM)
    counts = expert >= 0
    j = t % TILE
    rank = tl.zeros(expert.shape, tl.int32)
    for w in tl.static_range(TILE // 32):
        at = WORDS + w * BLOCK_E + tl.maximum(expert, 0)
        bits = tl.load(at, counts & (j >= 32 * w), 0, cache_modifier=".cg").to(tl.uint32, bitcast=True)
        below = (tl.full(j.shape, 1, tl.uint32) << (j % 32).to(tl.uint32)) - 1
        rank += popcount(bits & tl.where(j < 32 * w + 32, below, 0xFFFFFFFF))
    if PROBS.data is None:
        prob = tl.full(expert.shape, 1.0, tl.float32)
    else:
        at = PROBS.data + t.to(tl.int64) * PROBS.stride_r + k.to(tl.int64) * PROBS.stride_c
        prob = tl.load(at, named >= 0, 0.0).to(tl.float32)
    if not FORM.MAP:
        prob = add_repeated(named, expert, prob, k, FORM.SLOTS)
    return expert, place, rank, prob


@triton.jit
def place_pairs(
    t, expert, place, rank, prob, first, FOUND, ROW_PROBS, T, usable, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Give tokens t their rows; first is the row of each expert's first token in the tile."""
    counts = expert >= 0
    flat = tl.reshape(tl.maximum(expert, 0), [expert.shape[0] * expert.shape[1]])
    row = tl.reshape(tl.gather(first, flat, 0), expert.shape) + rank
    kept = counts & (row < usable)
    tl.store(FOUND.row_map + t.to(tl.int64) * WIDTH + place, row, kept)
    tl.store(FOUND.source + row, tl.broadcast_to(t, row.shape), kept)
    if ROW_PROBS is not None:
        tl.store(ROW_PROBS + row, prob.to(ROW_PROBS.dtype.element_ty), kept)
    c = tl.arange(0, BLOCK_W)[None, :]
    rest = (t < T) & (c >= tl.sum(kept.to(tl.int32), 1)[:, None]) & (c < WIDTH)
    tl.store(FOUND.row_map + t.to(tl.int64) * WIDTH + c, tl.full(rest.shape, -1, tl.int32), rest)


@kernel(
    grid=lambda a: (a.P,),
    tokens=("T", "P", "steps", "capacity"),
    default=lambda a: {"num_warps": WARPS, "launch_pdl": a.PDL},
)
def moe_place(
    R, PROBS, WORDS, COUNTS, FOUND, ROW_PROBS, T, E, P, steps, capacity, FORM: tl.constexpr, SUMS: tl.constexpr,
    ALIGN: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FOUND, a `RowMap`, and probabilities of its rows from routing and counts, TOKENS at a time; WORDS [P, TILE / 32, BLOCK_E]
    is room. What needs no counts comes before the wait for them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    WORDS += p.to(tl.int64) * (TILE // 32 * BLOCK_E)
    t = p * steps * TOKENS + tl.arange(0, TOKENS)[:, None]
    tile = p * steps * TOKENS // TILE
    write_words(tile, R, WORDS, T, E, FORM, TILE, BLOCK_E, BLOCK_S, TOKENS)
    expert, place, rank, prob = find_pairs(t, R, PROBS, WORDS, T, E, FORM, TILE, BLOCK_E, BLOCK_S)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total, before = sum_counts(COUNTS, p, P, BLOCK_E, SUMS)
    padded = tl.cdiv(total, ALIGN) * ALIGN
    ends = tl.cumsum(padded, 0)
    usable = capacity // ALIGN * ALIGN
    full = ends - padded + total
    end = tl.minimum(ends, usable)
    first = ends - padded + before
    for i in range(1, steps + 1):
        place_pairs(t, expert, place, rank, prob, first, FOUND, ROW_PROBS, T, usable, FORM.WIDTH, BLOCK_W)
        if i < steps:
            t += TOKENS
            if i % (TILE // TOKENS) == 0:
                first += tokens_in(WORDS, TILE, BLOCK_E)
                tile += 1
                tl.debug_barrier()  # all have read the words
                write_words(tile, R, WORDS, T, E, FORM, TILE, BLOCK_E, BLOCK_S, TOKENS)
            expert, place, rank, prob = find_pairs(t, R, PROBS, WORDS, T, E, FORM, TILE, BLOCK_E, BLOCK_S)
    fill_unused(FOUND.source, ROW_PROBS, full, end, p, P, e, tl.max(end, 0), capacity, ALIGN, BLOCK_A)
    if p == 0:
        tl.store(FOUND.offsets + e, end, e < E)
        tl.store(FOUND.overflow, tl.sum(tl.minimum(tl.maximum(full - usable, 0), total), 0))


# ---- host ------------------------------------------------------------------------------------------------------------


def routing_form(routing: Tensor, experts: int | None, width: int) -> tuple[Matrix, Form]:
    """The routing and what kernels must know of it."""
    R = routing.view(torch.uint8) if routing.dtype == torch.bool else routing
    return matrix(R), Form(width, routing.shape[1], experts is None)


def build_map(
    op: str, routing: Tensor, probs: Tensor | None, experts: int | None, topk: int | None, align: int,
    capacity: int | None, row_probs: Tensor | None = None,
) -> RowMap:  # fmt: skip
    """The map on the device; `row_probs`, if given, is filled with the probability of each row, without `probs` how many slots
    name it."""
    if experts is not None:
        check_indices(op, "routing", routing, -1, experts)
    E, width, capacity = sizes(routing, experts, topk, align, capacity)
    T, slots = routing.shape
    R, form = routing_form(routing, experts, width)
    TILE = 64 if T <= 64 * BLOCKS else 128
    tiles = max(1, cdiv(T, TILE * BLOCKS))
    P = max(1, cdiv(T, TILE * tiles))
    in_bytes = tiles == 1

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=routing.device)

    BLOCK_E = max(16, power_of_two(E))
    BLOCK_S = BLOCK_E if experts is None else power_of_two(slots)
    TOKENS = max(1, min(TILE, (2048 if experts is None else 4096) // BLOCK_S))
    steps = tiles * (TILE // TOKENS)
    at_once = max(1, min(BLOCKS, 32768 // BLOCK_E))
    sums = Sums(cdiv(BLOCKS, at_once) * at_once, at_once, in_bytes)
    counts = empty(sums.MOST, BLOCK_E, dtype=torch.uint8 if in_bytes else torch.int32)
    found = RowMap(empty(T, width), empty(capacity), empty(E), empty())
    words = empty(P, TILE // 32, BLOCK_E)
    pdl = Target.at(routing.device).early_launch
    blocks = {"BLOCK_E": BLOCK_E, "BLOCK_S": BLOCK_S, "TOKENS": TOKENS, "PDL": pdl}
    moe_count(R, counts, T, E, P, steps, FORM=form, **blocks)
    moe_place(
        R, matrix(probs), words, counts.view(torch.int32), found, row_probs, T, E, P, steps, capacity, FORM=form, **blocks,
        SUMS=sums, ALIGN=align, TILE=TILE, BLOCK_A=max(1, min(power_of_two(align), 4096 // BLOCK_E)),
        BLOCK_W=power_of_two(width),
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


def named_sizes(a: SimpleNamespace) -> dict[str, int]:
    """The dimensions of results that `sizes` gives."""
    return dict(zip(("experts", "width", "capacity"), sizes(a.routing, a.experts, a.topk, a.align, a.capacity)))


NUMBERS = {"experts": at_least(1), "topk": at_least(1), "align": at_least(1), "capacity": at_least(1)}
MAP_ROWS = {
    "row_map": "int32[rows width]", "source": "int32[capacity]", "offsets": "int32[experts]", "overflow": "int32[]",
}  # fmt: skip
LIVE = {"capacity": "offsets"}  # there is room for more rows than a routing may give

moe_row_map = Op(
    "moe_row_map", reference, inputs, Triton(forward),
    groups="offsets", where={"routing": "int_or_bool[rows slots]", **NUMBERS},
    results=MAP_ROWS, sizes=named_sizes, out=Out(contiguous=tuple(MAP_ROWS), live=LIVE), check=check, bars=Bars("G"),
)  # fmt: skip
