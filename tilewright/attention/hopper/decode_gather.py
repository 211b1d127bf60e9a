"""How `decode.py` brings keys and values out of pages too small for bulk copies: key by key, by the threads of four warps.

Each key may lie anywhere, so that threads find its page and copy 16 bytes each (`cp.async`), to where a box would have brought
them: a stage is the same for who reads it. Where one warp copies boxes, three beside it do nothing; here they copy, too. The table
is read a block ahead, so that its answer comes while others are copied: nobody writes it while the kernel runs.

Who may write where, and when, is said in `decode.py`, but for this. At `full` arrive all 128 copying threads a phase, each by its
copies: the hardware arrives for a thread when all that it has begun are there, and the thread itself goes on to the next stage.
Only `empty` holds it back, so that as much is on its way as stages hold. What threads copy, unlike what bulk copies bring,
products do not see by a barrier alone: it is written by the threads' way to memory (the generic proxy), and products read by their
own (the async proxy). A fence between the two must lie anywhere on the way from the write to the read. It stands with who reads:
each thread of the warpgroup waits for `full`, after which it sees what all copiers have written; by its fence it shows products
what it sees; and then its warp issues the product. So no copier waits for its own copies, and no warp for another. The other way
round it is enough that products are waited for before their warpgroup arrives at `empty`: nothing of theirs is on its way then.

A key that nobody sees, or a value that has no page, is copied as zero bytes, which reads nothing and fills its place with 0. A key
that has no page is NaN, copied from a few bytes that hold nothing else: rows that see it become NaN in what they add up; of others
the score is hidden, and its value is 0. So the warpgroup need not be told. Each program writes these bytes for itself before its
first copy; they are no one else's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.triton_versions import arrive_when_copied, barrier, copy_ahead, gl, gluon, mbarrier
from ...device.dependent import await_last
from ...device.warpgroups import advance
from .forward import CLEARED, rows_of
from .latent import matrices

KEYS = gl.constexpr(64)  # of a block
COPIERS = gl.constexpr(128)  # threads
WORD = gl.constexpr(8)  # numbers in 16 bytes, which a thread copies at a time
LOST = gl.constexpr(-1)  # instead of a page: there is none
UNSEEN = gl.constexpr(-2)  # nobody asks for it


class Words(NamedTuple):
    """A cache, its strides in words of 16 bytes, so that the compiler knows where rows begin; for each program a row of memory that
    it makes NaN, or None where a key without a page is 0."""

    data: Any
    stride_b: Any
    stride_t: Any
    stride_h: Any
    nothing: Any


@gluon.jit
def make_stages(X, PLAN: gl.constexpr):
    """Blocks of keys as products take them, which is how boxes of 64 columns lie."""
    shape: gl.constexpr = [PLAN.stages, KEYS, PLAN.columns]
    return gl.allocate_shared_memory(X.data.dtype.element_ty, shape, rows_of(PLAN.columns))


@gluon.jit
def make_full(COUNT: gl.constexpr):
    """Barriers at each of which all copying threads arrive a phase."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=COPIERS)
    return made


@gluon.jit
def places_in(key):
    """The keys of the block that begins at `key`, of which a thread has four, and seven others have them too."""
    return key + gl.arange(0, KEYS, gl.SliceLayout(1, CLEARED))


@gluon.jit
def is_seen(span, row):
    """Whether any row sees these keys, of the program's part."""
    return (row >= gl.maximum(span.start, span.low * KEYS)) & (row < span.stop)


@gluon.jit
def look_up(TABLE, span, key, PAGE: gl.constexpr):
    """What the table says of a block's keys: not looked at yet, so that nobody waits for it. Of those that nobody sees it is not
    asked."""
    row = places_in(key)
    at = span.batch.to(gl.int64) * TABLE.stride_s + (row // PAGE).to(gl.int64) * TABLE.stride_m
    return gl.load(TABLE.data + at, is_seen(span, row), 0)


@gluon.jit
def pages_of(said, span, key, PAGES):
    """The pages of a block's keys, of what the table said; LOST or UNSEEN."""
    said = said.to(gl.int64)
    page = gl.where((said >= 0) & (said < PAGES), said, LOST).to(gl.int32)
    return gl.where(is_seen(span, places_in(key)), page, UNSEEN)


@gluon.jit
def gather_block(X, memory, stage, phase, head, page, key, WIDTH: gl.constexpr, PAGE: gl.constexpr, PLAN: gl.constexpr):
    """Copy WIDTH columns of a block's keys into a stage when it is empty; 0 past them."""
    c = gl.arange(0, PLAN.columns, gl.SliceLayout(0, CLEARED))
    there = page >= 0
    place = places_in(key) % PAGE
    word = gl.where(there, page, 0).to(gl.int64) * X.stride_b + place.to(gl.int64) * X.stride_t
    source = X.data + (word + head.to(gl.int64) * X.stride_h) * WORD
    if X.nothing is not None:
        # Of an address that is one of two the compiler forgets that it is a multiple of 16
        source = gl.multiple_of(gl.where(there, source, X.nothing + gl.program_id(0).to(gl.int64) * PLAN.columns), 16)
        there = page != UNSEEN
    there = gl.expand_dims(there, 1)
    if PLAN.columns > WIDTH:
        there = there & gl.expand_dims(c < WIDTH, 0)
    mbarrier.wait(memory.empty.index(stage), phase)
    into = matrices(memory.boxes, PLAN.stages, PLAN.columns).index(stage)
    copy_ahead(into, gl.expand_dims(source, 1) + gl.expand_dims(c, 0), there)
    arrive_when_copied(memory.full.index(stage), increment_count=False)


@gluon.jit
def gather_part(
    K, V, TABLE, memory, span, PAGES, DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE: gl.constexpr, PLAN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """`copy_part` of `decode.py`, from pages of any size."""
    await_last(DEPENDENT)
    key = (span.high - 1) * KEYS
    said = look_up(TABLE, span, key, PAGE)
    c = gl.arange(0, PLAN.columns, gl.SliceLayout(0, CLEARED))
    nothing = gl.full([PLAN.columns], float("nan"), K.nothing.dtype.element_ty, gl.SliceLayout(0, CLEARED))
    gl.store(K.nothing + gl.program_id(0).to(gl.int64) * PLAN.columns + c, nothing)
    barrier()  # other threads copy it
    stage = 0
    phase = 1  # of a barrier that nobody has arrived at yet: the first round does not wait
    page = pages_of(said, span, key, PAGES)
    said = look_up(TABLE, span, key - KEYS, PAGE)
    gather_block(K, memory, stage, phase, span.head, page, key, DIM, PAGE, PLAN)
    stage, phase = advance(stage, phase, PLAN.stages)
    # In the order in which they are needed: the scores of a block come before the values of the one before
    for _ in range(span.high - span.low - 1):
        key -= KEYS
        before = page
        page = pages_of(said, span, key, PAGES)
        gather_block(K, memory, stage, phase, span.head, page, key, DIM, PAGE, PLAN)
        stage, phase = advance(stage, phase, PLAN.stages)
        said = look_up(TABLE, span, key - KEYS, PAGE)
        gather_block(V, memory, stage, phase, span.head, before, key + KEYS, COLUMNS, PAGE, PLAN)
        stage, phase = advance(stage, phase, PLAN.stages)
    gather_block(V, memory, stage, phase, span.head, page, key, COLUMNS, PAGE, PLAN)


def words_of(t: Tensor, nothing: Tensor | None = None) -> Words:
    """A cache [pages, keys, heads, columns] as threads copy it; of a dimension of one element any stride will do."""
    return Words(t, *(stride // WORD.value for stride in t.stride()[:3]), nothing)


def room_for_nothing(t: Tensor, programs: int, columns: int) -> Tensor:
    """A row for each program."""
    return torch.empty(programs * columns, dtype=t.dtype, device=t.device)
