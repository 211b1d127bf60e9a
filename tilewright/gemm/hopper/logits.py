"""Logits of 16-bit factors on Hopper, in Gluon, which leave the registers as codes: x = hidden @ weight.T + bias in fp32; of each
block of 256 logits of a token the largest, `top`, the sum of exp(x - top), and exp(x - top) itself in the dtype of the factors.

The warps and the ring are those of `grouped_rows.py`. A warpgroup has 64 tokens, as rows of its sums, by the 256 logits of a
block: in each thread lie 64 of two tokens, so that a top takes two shuffles. Codes are written as [vocabulary, tokens]: they are
transposed on their way into shared memory, which costs nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from ...core.target import Target
from ...core.tensor import cdiv
from ...core.triton_versions import async_load, async_store, fence_async_shared, gl, gluon, mbarrier, tma
from ...device.softmax import LOG2E, finite_or_zero
from ...device.warpgroups import advance
from ...op import single
from ...runtime.kernel import kernel
from ..tiles import ROWS, tile_of
from .boxes import box_of, copies_in_bulk
from .grouped_rows import COLUMNS, KINDS, STEP, SUMS, make_ring, pass_over, quarter_of, sum_products
from .plain import HALF, LINE

BLOCK = COLUMNS  # rows of the vocabulary with a top in common
# 192 KB of factors in shared memory, 32 of codes. A band is 2048 tokens, which stay in the L2 while all weights go by
RING = {"STAGES": 4, "BOXES": 2, "BAND": 16, "LEAD": 2}


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_factors(A, B, ring, work, BAND: gl.constexpr, STAGES: gl.constexpr):
    a_ring, b_ring, full, empty = ring
    T, N, K, PROGRAMS = work
    down, across = gl.cdiv(T, 128), gl.cdiv(N, 256)
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    for t in range(gl.program_id(0), down * across, PROGRAMS):
        tile, block = tile_of(t, down, across, BAND)
        for k in range(0, K, 64):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (128 + 256) * 64 * 2)
            for i in gl.static_range(2):
                async_load(A, [tile * 128 + i * 64, k], ready, a_ring.index(2 * stage + i))
            async_load(B, [block * 256, k], ready, b_ring.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def masked(x, col0, N):
    """-inf past the vocabulary."""
    if col0 + 256 > N:
        col = col0 + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
        x = gl.where(gl.expand_dims(col < N, 0), x, -float("inf"))
    return x


@gluon.jit
def store_own(x, OWN, label, token, col0, N, ignore_index):
    """x of the labels in this block; of most blocks there is none."""
    at = label.to(gl.int64) - col0
    mine = (at >= 0) & (at < gl.minimum(N - col0, 256)) & (label != ignore_index)
    if gl.max(mine.to(gl.int32), 0) > 0:
        own = gl.zeros([64], gl.float32, gl.SliceLayout(1, HALF))
        for i in gl.static_range(4):
            place = i * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
            here = gl.expand_dims(at.to(gl.int32), 1) == gl.expand_dims(place, 0)
            own += gl.sum(gl.where(here, quarter_of(x, i), 0.0), 1)
        gl.store(OWN + token, own, mine)


@gluon.jit
def store_codes(code, C, boxes, col0, token0, BOX: gl.constexpr, BOXES: gl.constexpr):
    """64 tokens and 64 logits of each, transposed, by a bulk copy through a box, which a copy before may still be leaving."""
    box = boxes.index(BOX)
    tma.store_wait(BOXES - 1)
    box.permute((1, 0)).store(code.to(C.dtype))
    fence_async_shared()
    async_store(C, [col0, token0], box)


@gluon.jit
def encode_block(x, coded, sums, token, token0, col0, N, T, BOXES: gl.constexpr, W: gl.constexpr):
    """The sums and codes of 64 tokens' logits from col0 on."""
    C, boxes, HELD = coded
    TOP, TOTAL, SLANT = sums
    there = (col0 // 256).to(gl.int64) * T + token
    top = gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, HALF), assert_trivial=True)
    gl.store(TOP + there, top, token < T)
    base = gl.expand_dims(finite_or_zero(top), 1)
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, HALF))
    slant = gl.zeros([64], gl.float32, gl.SliceLayout(1, HALF))
    for i in gl.static_range(4):
        z = quarter_of(x, i) - base
        code = gl.exp2(z * LOG2E)
        total += gl.sum(code, 1)
        if SLANT is not None:
            col = col0 + i * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
            slant += gl.sum(gl.where(gl.expand_dims(col < N, 0), z, 0.0), 1)
        if C is not None:
            if col0 < HELD:
                store_codes(code, C, boxes, col0 + i * 64, token0, W * BOXES + i % BOXES, BOXES)
    if TOTAL is not None:
        gl.store(TOTAL + there, total, token < T)
    if SLANT is not None:
        gl.store(SLANT + there, slant, token < T)


@gluon.jit
def encode_tiles(
    coded, sums, labels, added, ring, work, BOXES: gl.constexpr, BAND: gl.constexpr, LEAD: gl.constexpr, STAGES: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Warpgroup W. Labels and biases are loaded before the products and needed after them."""
    a_ring, b_ring, full, empty = ring
    T, N, K, PROGRAMS = work
    OWN, Y, ignore_index = labels
    BIAS, lines = added
    down, across = gl.cdiv(T, 128), gl.cdiv(N, 256)
    stage = 0
    phase = 0
    x = gl.zeros([64, 256], gl.float32, SUMS)
    if W == 1 and LEAD > 0:
        # LEAD steps behind the other from its first step on, and so at every tile's end: one encodes while the other multiplies
        if K > LEAD * 64:
            mbarrier.wait(full.index(LEAD), 0)
    for t in range(gl.program_id(0), down * across, PROGRAMS):
        tile, block = tile_of(t, down, across, BAND)
        token0 = tile * 128 + W * 64
        col0 = block * 256
        if token0 < T:
            token = token0 + gl.arange(0, 64, gl.SliceLayout(1, HALF))
            if OWN is not None:
                label = gl.load(Y + token, token < T, -1)
            if BIAS is not None:
                col = col0 + gl.arange(0, 256, LINE)
                bias = gl.load(BIAS + col, col < N, 0.0)
            x, stage, phase = sum_products(x, ring, stage, phase, 0, K, False, True, STAGES, W)
            if BIAS is not None:
                # By way of shared memory, for a thread has 64 columns of the product but 2 of a plain load
                lines.index(W).store(bias.to(gl.float32))
                x += gl.expand_dims(lines.index(W).load(gl.SliceLayout(0, SUMS)), 0)
            x = masked(x, col0, N)
            if OWN is not None:
                store_own(x, OWN, label, token, col0, N, ignore_index)
            encode_block(x, coded, sums, token, token0, col0, N, T, BOXES, W)
        else:
            stage, phase = pass_over(ring, stage, phase, K, STAGES)
    tma.store_wait(0)


@kernel(
    grid=lambda a: (a.PROGRAMS,), jit=gluon.jit, tokens=("HELD", "ignore_index", "T", "N", "K", "PROGRAMS"),
    default=lambda a: {"num_warps": 4, "maxnreg": 168},
)  # fmt: skip
def logits_hopper(
    A, B, C, TOP, TOTAL, SLANT, OWN, Y, BIAS, HELD, ignore_index, T, N, K, PROGRAMS, BOXES: gl.constexpr,
    BAND: gl.constexpr, LEAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of T tokens A and N rows of the vocabulary B; codes C of the first HELD of these."""
    ring = make_ring(A, B, STAGES)
    coded = (C, C, HELD)
    if C is not None:
        coded = (C, gl.allocate_shared_memory(C.dtype, [2 * BOXES, 64, 64], C.layout), HELD)
    added = (BIAS, BIAS)
    if BIAS is not None:
        added = (BIAS, gl.allocate_shared_memory(gl.float32, [2, 256], gl.SwizzledSharedLayout(1, 1, 1, [0])))
    work = (T, N, K, PROGRAMS)
    sums = (TOP, TOTAL, SLANT)
    labels = (OWN, Y, ignore_index)
    gl.warp_specialize([
        (encode_tiles, (coded, sums, labels, added, ring, work, BOXES, BAND, LEAD, STAGES, 0)),
        (encode_tiles, (coded, sums, labels, added, ring, work, BOXES, BAND, LEAD, STAGES, 1)),
        (copy_factors, (A, B, ring, work, BAND, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---- host ------------------------------------------------------------------------------------------------------------


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether these arguments of `linear_cross_entropy` are 16-bit factors, not empty, in rows that begin at multiples of 16 bytes,
    and there is no softcap, which codes do not take."""
    if not (target.hopper_gluon and single(target, a)) or a.softcap is not None:
        return False
    if a.weight.dtype not in KINDS or a.hidden.dtype != a.weight.dtype or a.weight.shape[1] % 8:
        return False
    sizes = (a.labels.numel(), *a.weight.shape)
    if min(sizes) == 0 or max(sizes) >= 2**31 - COLUMNS:
        return False
    return a.hidden.data_ptr() % 16 == 0 and copies_in_bulk(a.weight)


def encode(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, codes: Tensor, tops: Tensor,
    total: Tensor | None = None, own: Tensor | None = None, slant: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `tops` [blocks of weight's rows, tokens], `codes` of as many first rows as it has, and the sums that are wanted.
    `hidden` may have more rows than there are labels: for those only codes are written."""
    T, (N, K), held, kind = labels.shape[0], weight.shape, codes.shape[0], KINDS[weight.dtype]
    if N == 0:  # of no rows there is no box
        return
    logits_hopper(
        box_of(hidden, [64, STEP], kind), box_of(weight, [COLUMNS, STEP], kind), box_of(codes, [64, 64], kind) if held else None,
        tops, total, slant, own, labels, bias, held, ignore_index, T, N, K,
        min(Target.at(hidden.device).sms, cdiv(T, ROWS) * cdiv(N, COLUMNS)), **RING,
    )  # fmt: skip
