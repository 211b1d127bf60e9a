"""A token from each row of logits: temperature, the largest k, the most likely that hold p of the probability, and a draw.

    w_i = floor(2**40 * exp((z_i - max z) / temperature)),  id = the first i with w_0 + ... + w_i > r,  r = u * (sum of w) / 2**64

Weights are integers: their sums are exact in whatever order they are taken, so that a row's token depends on its own numbers alone,
and torch draws the same; but exponentials of two chips may differ in their last bit, and with it a draw that lies on a border. u is
64 bits of Philox 4x32-10, the row's seed being the key and the counter 0.

What is kept is always the logits above a threshold, and equal ones stay or go together: no row is sorted. One launch finds the
largest of every 32 logits or so. Each row then is one program, that holds these: of k largest ones k lie in as many of the groups
with the largest heads. It lists the groups that may matter, holds them too if they are few, and finds thresholds by bisection.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_numbers
from ...core.draw import SIZES, Draw
from ...core.tensor import cdiv, power_of_two, rows
from ...device.dependent import begin_dependent
from ...op import Bars, Cost, Op, Out, Triton, single, upcast
from ...runtime.kernel import kernel

LOG2E = 1.4426950408889634
BITS = 40  # of the weight of the largest logit
STEEPEST = 1e30  # 1 / temperature at most: 0 times infinity would be NaN
LONGEST = 1 << 22  # logits in a row, whose weights add up to less than 2**63
MASK = 0xFFFFFFFF


def reference(
    logits: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """int64 ids [...], one drawn from each row of `logits` [..., vocab]; all that it goes by is read on the device.

    `temperature`, `top_k`, `top_p` and `min_p` broadcast to the rows. Probabilities are those of logits / temperature; temperature
    0 takes the first largest logit. Each limit applies to what those before it left: the `top_k` largest logits (below 1: all);
    of those the fewest largest that hold `top_p` of their probability (1 or more: all); and those at least `min_p` times as likely
    as the most likely. Equal logits stay or go together, so that more than `top_k` may be left. Logits less likely than the most
    likely by 2**-40 are not drawn.

    `seed`, int64, is a number for each row, and what a row draws depends on it and on the row's own numbers: not on its place, nor
    on the batch around it. Rows with one seed draw alike; a step that comes after adds 1, say. A row with a NaN, one that is all
    -inf, and a temperature below 0 or NaN give -1.
    """
    z, lead = upcast(logits), logits.shape[:-1]
    t = upcast(temperature).expand(lead).unsqueeze(-1)
    top = z.amax(-1, keepdim=True)
    bad = z.isnan().any(-1, keepdim=True) | (top == -math.inf) | ~(t >= 0)
    greedy = (z == top).to(torch.int8).argmax(-1)
    warm = torch.where(bad | (t == 0), 1.0, t)
    slope = (torch.full_like(warm, LOG2E) / warm).clamp(max=STEEPEST)
    share = torch.exp2(torch.where(z == top, 0.0, (z - top) * slope))
    there = ((z == top) | ((z > -math.inf) & (top < math.inf))) & ~bad
    w = torch.where(there, share * 2.0**BITS, 0.0).to(torch.int64)
    kept = torch.ones_like(there)
    falling, order = z.sort(-1, descending=True)
    if top_k is not None:
        k = top_k.expand(lead).unsqueeze(-1).long()
        least = falling.gather(-1, (k - 1).clamp(0, z.shape[-1] - 1))
        kept = (k < 1) | (k > z.shape[-1]) | (z >= least)
    if top_p is not None:
        p = upcast(top_p).expand(lead).unsqueeze(-1)
        mass = torch.where(kept, w, 0).gather(-1, order).cumsum(-1)
        enough = mass.double() >= p.double() * mass[..., -1:].double()
        least = falling.gather(-1, enough.to(torch.int8).argmax(-1, keepdim=True))
        kept = kept & (~(p < 1) | (z >= least))
    if min_p is not None:
        p = upcast(min_p).expand(lead).unsqueeze(-1)
        kept = kept & ~(w.double() < torch.where(p > 1, 1.0, p.double()) * 2.0**BITS)
    mass = torch.where(kept, w, 0).cumsum(-1)
    r = high_half(*philox(seed), mass[..., -1])
    drawn = (mass <= r.unsqueeze(-1)).sum(-1)
    return torch.where(bad.squeeze(-1), -1, torch.where(t.squeeze(-1) == 0, greedy, drawn))


def philox(seed: Tensor) -> tuple[Tensor, Tensor]:
    """The first two words of Philox 4x32-10 with the key `seed` and the counter 0, as int64."""
    key = [seed & MASK, (seed >> 32) & MASK]
    c = [torch.zeros_like(seed) for _ in range(4)]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]  # 64 bits each: what wraps is the sign
        c = [(b >> 32) & MASK ^ c[1] ^ key[0], b & MASK, (a >> 32) & MASK ^ c[3] ^ key[1], a & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return c[0], c[1]


def high_half(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """The upper 64 bits of the product of the number a * 2**32 + b and `total`, which is below 2**63."""
    h, low = total >> 32, total & MASK
    first, second = a * low, b * h
    carry = ((b * low >> 32) & MASK) + (first & MASK) + (second & MASK)
    return a * h + ((first >> 32) & MASK) + ((second >> 32) & MASK) + (carry >> 32)


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, vocab = draw.dim("tokens"), draw.dim("vocab", SIZES[1:])
    wide = torch.float32
    low = draw.option("coldest", 0.5, 0.0)  # where it is 0, half of the rows are greedy
    warm = draw.uniform(tokens, low=0.5, high=1.5, dtype=wide)
    fewest, most, least = draw.option("fewest", 0), draw.option("most", 50, 5), draw.option("least_p", 0.3)
    return {
        "logits": draw.tensor(tokens, vocab, scale=3.0),
        "seed": draw.integers(tokens, low=-(2**62), high=2**62),
        "temperature": warm if low else torch.where(warm < 1.0, 0.0, warm),
        "top_k": draw.maybe("top_k", lambda: draw.integers(tokens, low=fewest, high=most, dtype=torch.int32)),
        "top_p": draw.maybe(
            "top_p", lambda: draw.uniform(tokens, low=least, high=1.1 if least < 0.5 else least, dtype=wide)
        ),
        "min_p": draw.maybe("min_p", lambda: draw.uniform(1, high=0.2, dtype=wide)),
    }


# ---------------------------------------------------------------- on the device


@triton.jit
def order_key(x, SHIFT: tl.constexpr):
    """An integer for each fp32 number that came from a narrower one of 32 - SHIFT bits: in its order, both zeros alike and NaN
    above all."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def number_of(key, SHIFT: tl.constexpr):
    """The number that has a key."""
    bits = (key << SHIFT) + tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight(x, top, slope):
    """Integers of up to 2**40 for numbers x, `top` being the largest; nothing but that is drawn where it is infinite."""
    there = (x == top) | ((x > -float("inf")) & (top < float("inf")))
    share = tl.exp2(tl.where(x == top, 0.0, (x - top) * slope))
    return tl.where(there, share * 1099511627776.0, 0.0).to(tl.int64)


@triton.jit
def middle(low, high):
    """Halfway between two integers, rounded up, without overflow."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


@triton.jit
def search(key, value, needed, low, high):
    """The largest threshold from low to high above which, or at it, values add up to `needed`; low if none does."""
    while low < high:
        mid = middle(low, high)
        found = tl.sum(tl.where(key >= mid, value, 0).to(tl.int64))
        enough = found.to(tl.float64) >= needed
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


class Row(NamedTuple):
    """One row: its logits, the heads of its groups, the list of those that may matter and how long that is."""

    logits: Any
    heads: Any
    list: Any
    count: Any
    stride: Any
    size: Any
    top: Any
    slope: Any


@triton.jit
def load_listed(ROW, start, GROUPS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr):
    """(places in the row, keys, weights) [GROUPS, GROUP] of listed groups from `start` on; past the last, places are 2**31 - 1."""
    at = start + tl.arange(0, GROUPS)
    group = tl.load(ROW.list + at, at < ROW.count, 0)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (at < ROW.count)[:, None] & (place < ROW.size)
    x = tl.load(ROW.logits + place.to(tl.int64) * ROW.stride, inside, -float("inf")).to(tl.float32)
    return tl.where(inside, place, 0x7FFFFFFF), order_key(x, SHIFT), weight(x, ROW.top, ROW.slope)


@triton.jit
def listed_sum(ROW, least, COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr):
    """The sum of the weights of listed logits with keys from `least` on, or how many of them have one."""
    total = tl.zeros([], tl.int64)
    for start in range(0, ROW.count, GROUPS):
        at = start + tl.arange(0, GROUPS)
        group = tl.load(ROW.list + at, at < ROW.count, 0)
        heads = tl.load(ROW.heads + group, at < ROW.count, -2147483648)
        if tl.max(heads) >= least:
            place, key, w = load_listed(ROW, start, GROUPS, GROUP, SHIFT)
            if COUNT:
                w = (w > 0).to(tl.int64)
            total += tl.sum(tl.where(key >= least, w, 0))
    return total


@triton.jit
def search_listed(
    ROW, needed, low, high, COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr
):
    """`search` over all listed logits, which are read again in every step."""
    while low < high:
        mid = middle(low, high)
        enough = listed_sum(ROW, mid, COUNT, GROUPS, GROUP, SHIFT).to(tl.float64) >= needed
        low = tl.where(enough, mid, low)
        high = tl.where(enough, high, mid - 1)
    return low


@triton.jit
def product_high(a, b, total):
    """`high_half`."""
    h = total >> 32
    low = total & 0xFFFFFFFF
    first = a * low
    second = b * h
    carry = (((b * low) >> 32) & 0xFFFFFFFF) + (first & 0xFFFFFFFF) + (second & 0xFFFFFFFF)
    return a * h + ((first >> 32) & 0xFFFFFFFF) + ((second >> 32) & 0xFFFFFFFF) + (carry >> 32)


@triton.jit
def first_above(place, w, r):
    """The place of the first weight at which their running sum passes r; 2**31 - 1 where none does."""
    SIZE: tl.constexpr = w.shape[0] * w.shape[1]
    running = tl.cumsum(tl.reshape(w, [SIZE]), 0)
    return tl.min(tl.where(running > r, tl.reshape(place, [SIZE]), 0x7FFFFFFF))


TILE = 4096  # logits a program of `sample_heads`


@kernel(
    grid=lambda a: (a.M * cdiv(a.H, a.GROUPS),), tokens=("M",),
    default=lambda a: {"GROUPS": max(1, TILE // a.GROUP), "num_warps": 4}, dependent=True,
)  # fmt: skip
def sample_heads(
    X, HEADS, M, V, H, stride_r, stride_c, GROUP: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """HEADS[row, h] = the largest key of the GROUP logits from h * GROUP on."""
    begin_dependent(DEPENDENT)
    across = tl.cdiv(H, GROUPS)
    row = (tl.program_id(0) // across).to(tl.int64)
    h = tl.program_id(0) % across * GROUPS + tl.arange(0, GROUPS)
    place = h[:, None].to(tl.int64) * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(X + row * stride_r + place * stride_c, place < V, -float("inf")).to(tl.float32)
    tl.store(HEADS + row * H + h, tl.max(order_key(x, SHIFT), 1), h < H)


@kernel(
    # Strides of numbers for each row are 0 where there is one for all, and of one row they mean nothing
    grid=lambda a: (a.M,), tokens=("M", "stride_s", "stride_t", "stride_k", "stride_p", "stride_m", "stride_i"),
    default=lambda a: {"num_warps": 16 if a.BLOCK_H > 1024 else 4}, dependent=True,
)  # fmt: skip
def sample_rows(
    X, HEADS, LIST, SEED, TEMPERATURE, TOP_K, TOP_P, MIN_P, IDS, M, V, H, stride_r, stride_c, stride_s, stride_t, stride_k,
    stride_p, stride_m, stride_i, GROUP: tl.constexpr, SHIFT: tl.constexpr, GROUPS: tl.constexpr, FAR: tl.constexpr,
    BLOCK_H: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program, one row. Up to GROUPS groups are held; where more may matter, they are read FAR groups at a time."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    heads = tl.load(HEADS + row * H + h, h < H, -2147483648)
    best = tl.max(heads)
    temperature = tl.load(TEMPERATURE + row * stride_t).to(tl.float32)
    top = number_of(best, SHIFT)
    # `best` of NaN is that of a NaN
    if (top != top) | (top == -float("inf")) | (temperature < 0.0) | (temperature != temperature):
        tl.store(IDS + row * stride_i, tl.full([], -1, tl.int64))
        return
    if temperature == 0.0:
        group = tl.min(tl.where(heads == best, h, BLOCK_H))
        place = group * GROUP + tl.arange(0, GROUP)
        x = tl.load(X + row * stride_r + place.to(tl.int64) * stride_c, place < V, -float("inf")).to(tl.float32)
        first = tl.min(tl.where(order_key(x, SHIFT) == best, place, 0x7FFFFFFF))
        tl.store(IDS + row * stride_i, first.to(tl.int64))
        return
    slope = tl.minimum(tl.div_rn(tl.full([], 1.4426950408889634, tl.float32), temperature), 1e30)
    # Groups none of whose logits can be drawn do not matter, nor do those below the k-th head
    drawable = weight(number_of(heads, SHIFT), top, slope) > 0
    drawable = drawable & (h < H)
    limit = tl.full([], 0, tl.int64)
    # Below this weights are 0, with a bit to spare
    least = order_key(top - tl.div_rn(tl.full([], 41.0, tl.float32), slope), SHIFT)
    least = tl.minimum(least, best)  # of an infinite logit at an infinite temperature it is a NaN's, which is above all
    if TOP_K is not None:
        limit = tl.load(TOP_K + row * stride_k).to(tl.int64)
        limit = tl.where((limit < 1) | (limit > V), 0, limit)
        if (limit > 0) & (limit <= H):
            lowest = tl.min(tl.where(h < H, heads, best))
            least = tl.maximum(least, search(heads, (h < H).to(tl.int32), limit.to(tl.float64), lowest, best))
    matters = drawable & (heads >= least)
    tl.store(LIST + row * H + tl.cumsum(matters.to(tl.int32), 0) - 1, h, matters)
    tl.debug_barrier()  # other threads read what was listed
    ROW = Row(
        X + row * stride_r, HEADS + row * H, LIST + row * H, tl.sum(matters.to(tl.int32)), stride_c, V, top, slope
    )
    share = tl.full([], 1.0, tl.float32)
    if TOP_P is not None:
        share = tl.load(TOP_P + row * stride_p).to(tl.float32)
    fewest = tl.full([], 0.0, tl.float64)
    if MIN_P is not None:
        ratio = tl.load(MIN_P + row * stride_m).to(tl.float64)
        ratio = tl.where(ratio == ratio, ratio, 0.0)  # NaN is no limit, as that of TOP_P
        fewest = tl.where(ratio > 1.0, 1.0, ratio) * 1099511627776.0
    seed = tl.load(SEED + row * stride_s).to(tl.int64)
    a, b, c, d = tl.randint4x(seed, tl.full([], 0, tl.int32))
    a = a.to(tl.uint32, bitcast=True).to(tl.int64)
    b = b.to(tl.uint32, bitcast=True).to(tl.int64)
    if ROW.count <= GROUPS:
        place, key, w = load_listed(ROW, 0, GROUPS, GROUP, SHIFT)
        if limit > 0:
            least = search(key, (w > 0).to(tl.int32), limit.to(tl.float64), least, best)
        if share < 1.0:
            total = tl.sum(tl.where(key >= least, w, 0))
            least = search(key, w, share.to(tl.float64) * total.to(tl.float64), least, best)
        kept = tl.where((key >= least) & (w.to(tl.float64) >= fewest), w, 0)
        found = first_above(place, kept, product_high(a, b, tl.sum(kept)))
    else:
        if limit > 0:
            least = search_listed(ROW, limit.to(tl.float64), least, best, True, FAR, GROUP, SHIFT)
        if share < 1.0:
            total = listed_sum(ROW, least, False, FAR, GROUP, SHIFT)
            needed = share.to(tl.float64) * total.to(tl.float64)
            least = search_listed(ROW, needed, least, best, False, FAR, GROUP, SHIFT)
        total = tl.zeros([], tl.int64)
        for start in range(0, ROW.count, FAR):
            place, key, w = load_listed(ROW, start, FAR, GROUP, SHIFT)
            total += tl.sum(tl.where((key >= least) & (w.to(tl.float64) >= fewest), w, 0))
        r = product_high(a, b, total)
        found = tl.full([], 0x7FFFFFFF, tl.int32)
        before = tl.zeros([], tl.int64)
        for start in range(0, ROW.count, FAR):
            place, key, w = load_listed(ROW, start, FAR, GROUP, SHIFT)
            kept = tl.where((key >= least) & (w.to(tl.float64) >= fewest), w, 0)
            own = tl.sum(kept)
            if (before <= r) & (r < before + own):
                found = first_above(place, kept, r - before)
            before += own
    tl.store(IDS + row * stride_i, found.to(tl.int64))


# ---------------------------------------------------------------- host

HEADS = 8192  # of groups, that a program holds
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of fp32 that a narrower number does not have


def groups_of(V: int) -> int:
    """How many logits a group has."""
    return max(32, power_of_two(cdiv(V, HEADS)))


def strides(t: Tensor | None, lead: torch.Size) -> tuple[Tensor | None, int]:
    """A number for each row, or one for all, as a vector, and its stride."""
    if t is None:
        return None, 0
    flat = t.expand(lead).reshape(-1)
    return flat, flat.stride(0)


def forward(logits, seed, temperature, top_k, top_p, min_p) -> Tensor:
    x, lead = rows(logits), logits.shape[:-1]
    check_numbers("sample", "logits", x)
    check_numbers("sample", "temperature", temperature, 0.0)
    ids = torch.empty(lead, dtype=torch.int64, device=x.device)
    (M, V), group, shift = x.shape, groups_of(x.shape[1]), SHIFTS[x.dtype]
    H = cdiv(V, group)
    heads, listed = (torch.empty(M, H, dtype=torch.int32, device=x.device) for _ in range(2))
    given = [strides(t, lead) for t in (seed, temperature, top_k, top_p, min_p)]
    sample_heads(x, heads, M, V, H, *x.stride(), GROUP=group, SHIFT=shift)
    to = ids.reshape(-1)
    sample_rows(
        x, heads, listed, *(t for t, _ in given), to, M, V, H, *x.stride(), *(step for _, step in given), to.stride(0),
        GROUP=group, SHIFT=shift, GROUPS=min(power_of_two(H), max(1, TILE // group)),
        FAR=min(power_of_two(H), max(1, 2 * TILE // group)), BLOCK_H=power_of_two(H),
    )  # fmt: skip
    return ids if to.data_ptr() == ids.data_ptr() else ids.copy_(to.view(ids.shape))


def check(logits, **_) -> None:
    if logits.shape[-1] > LONGEST:
        raise ValueError(f"sample: logits must have at most {LONGEST} columns, got {logits.shape[-1]}")


def moved(logits, **_) -> tuple[int, int]:
    """Logits are read once: what is read again comes from a cache."""
    return logits.numel() * logits.element_size(), 8 * math.prod(logits.shape[:-1])


sample = Op(
    "sample", reference, inputs, Triton(forward, None, single),
    where={
        "logits": "float[... vocab+]", "seed": "int64[...]", "temperature": "float[...?]", "top_k": "int[...?]",
        "top_p": "float[...?]", "min_p": "float[...?]",
    },
    results={"ids": "int64[...]"}, out=Out(), cost=Cost(moved), check=check, bars=Bars("G"),
)  # fmt: skip
