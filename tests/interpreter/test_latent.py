"""Attention over caches of latents for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers
allow, NaN in all that nobody sees, pages that there are not. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import pytest
import torch

from tests import gluon_machine
from tests.cached_oracle import agrees
from tests.cached_play import has_its_own_bits, played
from tests.latent_oracle import CALLS, call
from tilewright.attention.hopper import latent


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    a = CALLS[name]()
    agrees(a, *played(a, 0, latent))


def begins(module, monkeypatch, late):
    """Let right products begin late or at once in any call."""
    plain = module.plan_for
    monkeypatch.setattr(module, "plan_for", lambda *given: (found := plain(*given)) and found._replace(late=late))


def test_any_order_gives_the_same_bits(monkeypatch):
    """In a batch as alone, begun late or at once."""
    a = call((300, 129), page=64, split=128, tokens=2, values=256)
    found = []
    for seed in range(4):
        begins(latent, monkeypatch, late=seed % 2 == 1)
        found.append(played(a, seed, latent))
    has_its_own_bits(a, found, latent)


def growing(length=448, signs=True):
    """Scores that grow from block to block as they are walked over, in some rows by much; all of them above 0 without `signs`."""
    a = call((length,), scale=1.0, values=256)
    grows = torch.linspace(3.0, 0.1, length)[:, None, None] * (1 + torch.arange(320) % 3)
    a["k_cache"] = (a["k_cache"].abs() * grows).to(torch.bfloat16)
    a["q"] = ((a["q"] if signs else a["q"].abs()) * torch.linspace(0.01, 1.0, 16)[:, None]).to(torch.bfloat16)
    return a


def test_largest_scores_that_grow():
    """Blocks are walked over from the last to the first: sums of both halves are multiplied in some rows of a warp, and the base of
    weights lags in others."""
    a = growing()
    agrees(a, *played(a, 0, latent))


# ---- mutants ---------------------------------------------------------------------------------------------------------

AWAIT_LATE = "            o = warpgroup_mma_wait(3, deps=(o,))\n"
GIVE_LEFT = "            mbarrier.arrive(memory.left.empty.index(stage), count=1)\n"
AWAIT_SUMS = "            o = warpgroup_mma_wait(0, deps=(o,))\n"
AWAIT_RIGHT = "        o = warpgroup_mma_wait(0, deps=(o,))\n        mbarrier.arrive(memory.taken, count=1)\n"
TAKE = "        mbarrier.arrive(memory.taken, count=1)\n"
MUTANTS = {
    "left columns are given back before their product ends": (AWAIT_SUMS + GIVE_LEFT, GIVE_LEFT + AWAIT_SUMS),
    "left columns are given back too early where others begin late": (AWAIT_LATE + GIVE_LEFT, GIVE_LEFT + AWAIT_LATE),
    "a late sum is not waited for": (AWAIT_LATE, AWAIT_LATE.replace("3", "4")),
    "right columns are never given back": ("        mbarrier.arrive(memory.right.empty.index(stage), count=1)\n", ""),
    "weights are taken before their product ends": (AWAIT_RIGHT, TAKE + AWAIT_RIGHT.replace(TAKE, "")),
    "weights are taken twice": (TAKE, TAKE.replace("count=1", "count=2")),
    "weights are not waited for": ("        mbarrier.wait(memory.told, turn)\n        if", "        if"),
    "weights are overwritten": ("    mbarrier.wait(memory.taken, turn)\n    memory.weights", "    memory.weights"),
    "factors are overwritten": ("    mbarrier.wait(memory.taken, turn)\n    memory.factors", "    memory.factors"),
    "left columns are not waited for": ("    mbarrier.wait(memory.left.full.index(stage), phase)\n", ""),
    "right columns are not waited for": (
        "    mbarrier.wait(memory.right.full.index(stage), phase)\n    k =",
        "    k =",
    ),
    "queries are not waited for": ("        mbarrier.wait(memory.queries, 0)\n", ""),
    "weights are not shown": (
        "    memory.factors.store(fade)\n    fence_async_shared()\n",
        "    memory.factors.store(fade)\n",
    ),
    "cleared values are not shown": ("    fence_async_shared()\n    barrier()\n", "    barrier()\n"),
    "left values are not cleared": ("        if key + BLOCK > span.stop:\n", "        if False:\n"),
    "right values are not cleared": ("        if unseen & (i == 0):\n", "        if False:\n"),
    "left sums are not faded": ("        o = scaled_where_moved(o, fade)\n", ""),
    "right sums are not faded": ("o = scaled_where_moved(o, memory.factors.load(BY_ROW))", "o = o"),
    "a lost page is not told": ("            lost |= missing\n", "            pass\n"),
    "a lost page at the edge is not told": ("            s = spoilt(TABLE, s, missing, PLAN)\n", "            pass\n"),
    "a lost page in the first block is not told": ("spoilt(TABLE, s, missing_of(TABLE, memory, 0), PLAN)", "s"),
    "the phase does not flip": ("        phase = its_phase\n", ""),
    "a part ends elsewhere": ("tl.minimum(SPLIT, CAPACITY - begin)", "tl.minimum(SPLIT, CAPACITY - begin) - 64"),
}


def hard():
    """Keys past the last that is seen, blocks at the edge and after it, more of them than stages, rows of two tiles; a page that is
    not there in a first block, in one at the edge, in one that all rows see, and in none."""
    a = call((332, 332, 332, 332), page=64, split=512, tokens=70, heads=1, values=256, scale=1.0)
    for b, at in enumerate((5, 4, 1)):
        a["block_table"][b, at] = 999
    return a


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path, monkeypatch):
    kept, instead = MUTANTS[name]
    a = hard()
    with gluon_machine.broken(latent, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        for seed in range(6):
            begins(mutant, monkeypatch, late=seed % 2 == 1)
            agrees(a, *played(a, seed, mutant))
