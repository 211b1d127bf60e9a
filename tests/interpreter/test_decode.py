"""Decoding for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow, NaN in all that nobody
sees, pages that there are not. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import pytest
import torch

from tests import gluon_machine
from tests.cached_oracle import agrees
from tests.cached_play import has_its_own_bits, played
from tests.decode_oracle import CODED, DECODES, bits, decode
from tilewright.attention.hopper import decode as kernels
from tilewright.attention.hopper import decode_codes as codes
from tilewright.attention.hopper import decode_gather as gathering


@pytest.mark.parametrize("name", [*DECODES, *CODED])
def test_values(name):
    a = decode(name)
    agrees(a, *played(a, 0, codes if name in CODED else kernels))


def test_any_order_gives_the_same_bits():
    """More blocks than stages; in a batch as alone."""
    a = decode("parts", of=(700, 450), split=512, kv_heads=1, heads=2)
    found = [played(a, seed, kernels) for seed in range(3)]
    has_its_own_bits(a, found, kernels)


# ---- mutants ---------------------------------------------------------------------------------------------------------

AWAIT_SCORES = "        s = warpgroup_mma_wait(1, deps=(s,))\n"
GIVE_KEYS = "        mbarrier.arrive(memory.empty.index(stage), count=1)\n"
AWAIT_VALUES = (
    "        o = warpgroup_mma_wait(0, deps=(o,))\n        mbarrier.arrive(memory.empty.index(at), count=1)\n"
)
GIVE_VALUES = "        mbarrier.arrive(memory.empty.index(at), count=1)\n"
MUTANTS = {
    "a stage is not waited for": ("    mbarrier.wait(memory.empty.index(stage), phase)\n", ""),
    "keys are given back before their product ends": (AWAIT_SCORES + GIVE_KEYS, GIVE_KEYS + AWAIT_SCORES),
    "keys are never given back": (GIVE_KEYS, ""),
    "values are given back before their product ends": (
        AWAIT_VALUES,
        GIVE_VALUES + AWAIT_VALUES.replace(GIVE_VALUES, ""),
    ),
    "values are given back twice": (GIVE_VALUES, GIVE_VALUES.replace("count=1", "count=2")),
    "the first keys are not waited for": ("    mbarrier.wait(memory.full.index(0), 0)\n", ""),
    "keys are not waited for": ("        mbarrier.wait(memory.full.index(stage), phase)\n        s", "        s"),
    "values are not waited for": (
        "        mbarrier.wait(memory.full.index(at), its_phase)\n        o = issue_values",
        "        o = issue_values",
    ),
    "the phase does not flip": ("= advance(at, its_phase, PLAN.stages)", "= advance(at, phase, PLAN.stages)"),
    "fewer bytes are expected": ("SLABS * COUNT * BOX.block_type.nbytes", "COUNT * BOX.block_type.nbytes"),
    "boxes are mixed up": ("(stage * SLABS + slab) * COUNT + i", "(stage * COUNT + i) * SLABS + slab"),
    "cleared values are not shown": ("    fence_async_shared()\n    barrier()\n", "    barrier()\n"),
    "values past the keys are not cleared": (
        "    if (key < span.start) | (key + BLOCK > (span.stop if TREE is None else shift)):\n",
        "    if False:\n",
    ),
    "values before a window are not cleared": (
        "        if (key < span.start) & (span.high - span.low > 1):\n",
        "        if False:\n",
    ),
    "sums are not faded": ("        o = scaled_where_moved(o, fade)\n", ""),
    "a lost page is not told": ("            lost |= missing\n", "            pass\n"),
    "a lost page at the edge is not told": ("            s = spoilt(TABLE, s, missing, PLAN)\n", "            pass\n"),
    "a lost page in the first block is not told": ("    s = spoilt(TABLE, s, missing, PLAN)\n    p, top", "    p, top"),
    "a lost page is told of no block": ("TABLE is not None, PLAN", "False, PLAN"),
    "first values lie elsewhere": ("gl.where(span.high - span.low > 1, 2, 1)", "1"),
    "a part ends elsewhere": (
        "stop = tl.minimum(stop, begin + tl.minimum(SPLIT, CAPACITY - begin))",
        "stop = tl.minimum(stop, begin + tl.minimum(SPLIT, CAPACITY - begin) - 64)",
    ),
    "drafts that nobody sees are not cleared": ("        live &= is_drawn(drafts, row - shift)\n", "        pass\n"),
    "a second block of drafts is not cleared": ("        if upper < span.high - 1:", "        if False:"),
    "second values lie elsewhere": ("    if key <= span.low * BLOCK:\n", "    if True:\n"),
    "all rows see all drafts": ("whole = span.count if TREE is None else shift", "whole = span.count"),
    "rows have the bits of others": ("bits_of(TREE, span, r // GROUP, live)", "bits_of(TREE, span, 0 * r, live)"),
    "every part has a sink": ("live & (span.part == 0), float", "live, float"),
    "heads are mixed up": (
        "number // KV_HEADS // PARTS, number % KV_HEADS,",
        "number // KV_HEADS // PARTS, 0 * number,",
    ),
}


AWAIT_CODED = "        s = warpgroup_mma_wait(1, deps=(s,))\n"
MEET = "        o = warpgroup_mma_wait(0, deps=(o,))\n"
GIVE_CODES = "        mbarrier.arrive(memory.empty.index(stage), count=1)\n"
OF_CODES = {
    "scores are not waited for": (AWAIT_CODED, AWAIT_CODED.replace("wait(1", "wait(2")),
    "keys are not waited for": ("        mbarrier.wait(memory.full.index(stage), phase)\n        missing", "        missing"),
    "values are not waited for": ("        mbarrier.wait(memory.full.index(at), its_phase)\n", ""),
    "the first keys are not waited for": ("    mbarrier.wait(memory.full.index(0), 0)\n", ""),
    "the last values are not waited for": ("    mbarrier.wait(memory.full.index(stage), phase)\n    words", "    words"),
    "sums are not waited for": (MEET, MEET.replace("wait(0", "wait(1")),
    "keys are never given back": (GIVE_CODES, ""),
    "values are given back twice": (
        "        mbarrier.arrive(memory.empty.index(at), count=1)\n", "        mbarrier.arrive(memory.empty.index(at), count=2)\n",
    ),
    "the first keys are not given back": ("    mbarrier.arrive(memory.empty.index(0), count=1)\n", ""),
    "the phase does not flip": ("= advance(at, its_phase, PLAN.stages)", "= advance(at, phase, PLAN.stages)"),
    "weights are not shown": ("permute((1, 0)))\n    fence_async_shared()\n", "permute((1, 0)))\n"),
    "queries are not shown": ("store(q)\n    fence_async_shared()\n", "store(q)\n"),
    "weights have one buffer": ("        turn ^= 1\n", ""),
    "columns of keys are mixed up": ("(k >> 1) % 4 * 32", "(k >> 1) % 4 * 16"),
    "columns of values are mixed up": ("(m >> 4) % 4 * 32 + m % 8 * 4", "(m >> 4) % 4 * 4 + m % 8 * 16"),
    "codes are mixed up": ("gl.join(gl.join(x[0], x[1])", "gl.join(gl.join(x[0], x[2])"),
    "words of keys are mixed up": ("x.permute((0, 2, 5, 4, 1, 3))", "x.permute((0, 2, 4, 5, 1, 3))"),
    "words of values are mixed up": ("x.permute((4, 1, 3, 2, 0))", "x.permute((3, 1, 4, 2, 0))"),
    "queries are not taken back": ("gl.convert_layout(back, BY_ROW)", "gl.convert_layout(0.0 * back + 1.0, BY_ROW)"),
    "keys have the scale of another head": ("load_scale(KS, 0, 0, span.head,", "load_scale(KS, 0, 0, span.head * 0,"),
    "values have the scale of another head": ("load_scale(VS, 0, 0, span.head,", "load_scale(VS, 0, 0, span.head * 0,"),
    "weights stay lifted": ("smaller = 1.0 / LIFT", "smaller = 1.0"),
    "the edge is no block longer": ("gl.maximum(upper - 1, span.low)", "upper"),
    "values at the edge are not cleared": (
        "            words = without_unseen(words, key + BLOCK, span, drafts, rows.position)\n", "            pass\n",
    ),
    "the last values are not cleared": ("    words = without_unseen(words, span.low * BLOCK, span, drafts, shift)\n", ""),
    "drafts that nobody sees are not cleared": ("        live &= is_drawn(drafts, j - shift)\n", "        pass\n"),
    "rows see all drafts": ("            ok &= is_drawn(gl.expand_dims(bits, 0), j - rows.position)\n", "            pass\n"),
    "sums are not faded": ("        o = o * gl.expand_dims(fade, 0)\n", ""),
    "totals are not faded": ("total * gl.expand_dims(fade, 0) + p", "total + p"),
    "a lost page is not told": ("            lost |= missing\n", "            pass\n"),
    "a lost page at the edge is not told": ("float(\"nan\"), s)", "0.0, s)"),
    "every part has a sink": ("live & (span.part == 0), float", "live, float"),
}  # fmt: skip


def hard_codes():
    """The same over codes: a window with parts and sinks, pages that are not there, a tree whose drafts lie in two blocks."""
    strays = ((0, 5, 999), (1, 2, -1), (2, 7, 999))
    # Of the last two sequences every page is there
    windowed = decode(
        "codes and everything", of=(690, 690, 690, 690, 64), left=500, split=512, strays=strays, slopes=None
    )
    tree = decode("a tree of 32 over codes", of=(276, 130), tree=bits(2, 32, (0, 21)))
    return windowed, decode("codes in pages of 16", of=(1000,), split=1024), tree


@pytest.mark.parametrize("name", OF_CODES)
def test_mutants_of_codes_are_found(name, tmp_path):
    kept, instead = OF_CODES[name]
    broken = gluon_machine.broken(codes, kept, instead, tmp_path, once=False)
    with broken as mutant, pytest.raises((AssertionError, IndexError)):
        for seed in range(12):  # values may come in time
            for a in hard_codes():
                agrees(a, *played(a, seed, mutant))


def hard():
    """Blocks at the edge, with NaN, and after it, more of them than stages, in a window; a page that is not there in a first
    block, in one that all rows see, in one at the edge, and in none; a tree whose drafts lie in two blocks."""
    strays = ((0, 10, 999), (1, 6, -1), (2, 2, 999))
    few = {
        "of": (690, 690, 690, 690),
        "length": 4,
        "heads": 2,
        "left": 500,
        "scale": 1.0,
        "sink": torch.tensor([40.0, 45.0]),
    }
    windowed = decode("parts", **few, kv_heads=2, split=512, strays=strays)
    return (
        windowed,
        decode("pages of 16", of=(500,), split=512),
        decode("a tree of 64", of=(300,), tree=bits(1, 64, (0, 50))),
    )


# Of keys that threads copy: the file of what is broken, and how
LOOKED_UP = "        page = pages_of(said, span, key, PAGES)\n"
SHOWN = "    if PLAN.box == 0:\n        fence_async_shared()  # threads wrote them\n"
GATHERS = {
    "a stage is not waited for": (gathering, "    mbarrier.wait(memory.empty.index(stage), phase)\n", ""),
    "half of the threads arrive": (gathering, "count=COPIERS", "count=2 * COPIERS"),
    "one is waited for": (gathering, "count=COPIERS", "count=1"),
    "threads arrive before they copy": (
        gathering,
        "    copy_ahead(into, gl.expand_dims(source, 1) + gl.expand_dims(c, 0), there)\n"
        "    arrive_when_copied(memory.full.index(stage), increment_count=False)\n",
        "    arrive_when_copied(memory.full.index(stage), increment_count=False)\n"
        "    copy_ahead(into, gl.expand_dims(source, 1) + gl.expand_dims(c, 0), there)\n",
    ),
    "nobody arrives": (gathering, "    arrive_when_copied(memory.full.index(stage), increment_count=False)\n", ""),
    "values of another block": (gathering, "before, key + KEYS,", "before, key,"),
    "values of another block's pages": (gathering, "        before = page\n" + LOOKED_UP, LOOKED_UP + "        before = page\n"),
    "pages of another block": (gathering, "        said = look_up(TABLE, span, key - KEYS, PAGE)\n", ""),
    "keys past the last are seen": (gathering, "(row < span.stop)", "(row >= 0)"),
    "numbers of pages are believed": (gathering, "(said >= 0) & (said < PAGES)", "said >= 0"),
    "a lost key is 0": (gathering, "    if X.nothing is not None:\n", "    if False:\n"),
    "a lost value is NaN": (
        kernels,
        "words_of(k_cache, room_for_nothing(k_cache, parts * units, plan.columns)), words_of(v_cache)",
        "[words_of(t, n) for n in [room_for_nothing(k_cache, parts * units, plan.columns)] for t in (k_cache, v_cache)]",
    ),
    "what nothing holds is not written": (gathering, "    gl.store(K.nothing", "    gl.store(K.nothing + 2**20"),
    "heads are mixed up": (gathering, "head.to(gl.int64) * X.stride_h", "0 * head.to(gl.int64)"),
    "places are mixed up": (gathering, "places_in(key) % PAGE", "0 * places_in(key)"),
    "the phase does not flip": (
        gathering,
        "key + KEYS, COLUMNS, PAGE, PLAN)\n        stage, phase = advance",
        "key + KEYS, COLUMNS, PAGE, PLAN)\n        stage, _ = advance",
    ),
    "keys are not shown to products": (kernels, SHOWN + "    k =", "    k ="),
    "values are not shown to products": (kernels, SHOWN + "    v =", "    v ="),
    "keys are not waited for": (kernels, "        mbarrier.wait(memory.full.index(stage), phase)\n        s", "        s"),
    "values are given back before their product ends": (kernels, *MUTANTS["values are given back before their product ends"]),
}  # fmt: skip


def hard_to_gather():
    """As `hard`, key by key: lost keys that all see, some see and none sees; other columns than stages have, in pages of 24."""
    few = {"of": (450, 450), "length": 4, "heads": 2, "kv_heads": 2, "left": 380, "split": 512, "scale": 1.0}
    strays = ((0, 448, 999999), (0, 10, 999999), (1, 300, -1))
    return (
        decode("pages of 1", **{**few, "room": 450}, strays=strays),
        decode("72 and 40 in pages of 8", of=(400, 130), heads=4, page=24, split=512, strays=((1, 3, -1),)),
    )


@pytest.mark.parametrize("name", GATHERS)
def test_mutants_that_gather_are_found(name, tmp_path, monkeypatch):
    of, kept, instead = GATHERS[name]
    with gluon_machine.broken(of, kept, instead, tmp_path) as mutant:
        if of is gathering:
            for part in ("gather_part", "make_full", "make_stages", "room_for_nothing", "words_of"):
                monkeypatch.setattr(kernels, part, getattr(mutant, part))
        with pytest.raises((AssertionError, IndexError)):
            for seed in range(4):
                for a in hard_to_gather():
                    agrees(a, *played(a, seed, kernels if of is gathering else mutant))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    broken = gluon_machine.broken(kernels, kept, instead, tmp_path, once=False)
    with broken as mutant, pytest.raises((AssertionError, IndexError)):
        for seed in range(4):
            for a in hard():
                agrees(a, *played(a, seed, mutant))
