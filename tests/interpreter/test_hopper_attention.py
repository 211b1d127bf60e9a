"""The forward of attention for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow, NaN in
all that nobody sees. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests import gluon_machine
from tests.attention_oracle import CALLS, agrees, call, ints, poisoned
from tilewright.attention.hopper import forward as hopper
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import Arguments, collect

CHIP = replace(TARGETS["sm_90"], gluon=True, sms=3)  # each program then has several tiles


def launched(a, forward=hopper.forward):
    """(o, lse), not yet written, and the launch that writes them; the ones before are made."""
    assert hopper.fits(CHIP, SimpleNamespace(**a))
    with pretend(CHIP), collect() as found:
        o, lse = forward(**a)
    for wanted in found[:-1]:  # a table of tiles, a counter
        grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
        wanted.kernel.jit[grid](*wanted.ordered)
    o.fill_(math.inf)
    lse.fill_(math.inf)
    return o, lse, found[-1]


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    a = poisoned(call(**CALLS[name]))
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


def loops(module, monkeypatch, lazy):
    """Let the module plan a loop of one kind at any width, with all else as it plans it."""
    plain = module.plan_for
    monkeypatch.setattr(module, "plan_for", lambda *given: plain(*given)._replace(lazy=lazy))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "packed, windows, lengths", "192 and 128"])
def test_both_loops(lazy, kind, monkeypatch):
    loops(hopper, monkeypatch, lazy)
    a = poisoned(call(**CALLS[kind]))
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=1)
    agrees(a, o, lse)


@pytest.mark.parametrize("lazy", [False, True])
def test_largest_scores_that_grow(lazy, monkeypatch):
    """Blocks are walked over from the last to the first: the base of weights moves in some rows of a warp, and in a lazy loop
    lags in others."""
    loops(hopper, monkeypatch, lazy)
    a = call(length=300, keys=700, scale=1.0)
    grows = torch.linspace(6.0, 0.1, 700)[None, :, None, None] * (1 + torch.arange(64) % 3)
    a["k"] = (a["k"].abs() * grows).to(a["k"].dtype)
    a["q"] = (a["q"] * torch.linspace(0.01, 1.0, 300)[None, :, None, None]).to(a["q"].dtype)
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


def test_any_order_gives_the_same_bits():
    a = poisoned(call(**CALLS["packed, windows, lengths"]))
    o, lse, wanted = launched(a)
    found = []
    for seed in range(4):
        gluon_machine.play(wanted, seed)
        found.append((o.view(torch.int16).clone(), lse.view(torch.int32).clone()))
    agrees(a, o, lse)
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0]))


@pytest.mark.parametrize("strides", ["heads first", "a slice of a projection"])
def test_strides(strides):
    a = call(length=150, keys=150, heads=2, kv_heads=2, causal=True)
    if strides == "heads first":
        a |= {n: a[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    else:
        whole = torch.cat([a[n].flatten(2) for n in "qkv"], -1)
        a |= {n: part.unflatten(2, (2, 64)) for n, part in zip("qkv", whole.split(128, -1))}
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


# ---- mutants ---------------------------------------------------------------------------------------------------------

AWAIT_SCORES = "        s = warpgroup_mma_wait(2 if SECOND else 1, deps=(s,))\n"
GIVE_KEYS = "        mbarrier.arrive(rings.k.empty.index(following), count=1)\n"
AWAIT_VALUES = "        o0, o1 = await_values(o0, o1, SECOND)\n"
GIVE_VALUES = "        mbarrier.arrive(rings.v.empty.index(stage), count=1)\n"
MUTANTS = {
    "keys are given back before their product ends": (AWAIT_SCORES + GIVE_KEYS, GIVE_KEYS + AWAIT_SCORES),
    "values are given back before their product ends": (AWAIT_VALUES + GIVE_VALUES, GIVE_VALUES + AWAIT_VALUES),
    "values are never given back": (GIVE_VALUES + "        p0, p1", "        p0, p1"),
    "queries are given back twice": ("rings.q.empty.index(stage_q), count=1", "rings.q.empty.index(stage_q), count=2"),
    "values are not waited for": (
        "        mbarrier.wait(rings.v.full.index(stage), phase)\n        o0, o1 = issue_values",
        "        o0, o1 = issue_values",
    ),
    "keys are not waited for": ("        mbarrier.wait(rings.k.full.index(following), its_phase)\n", ""),
    "scores are taken too early": ("s = warpgroup_mma_wait(2 if SECOND else 1,", "s = warpgroup_mma_wait(2,"),
    "no fence": ("    fence_async_shared()\n", ""),
    "warpgroups do not wait for each other": ("    meet()\n", ""),
    "the last values are not cleared": ("if (key < start) | (key + BLOCK > stop):", "if key < start:"),
    "the first values are not cleared": ("if (key < start) & (work.high - work.low > 1):", "if False:"),
    "a mask off by one": ("ok = j < gl.expand_dims(stop - key, 1)", "ok = j <= gl.expand_dims(stop - key, 1)"),
    "sums are not faded": ("            o0 = scaled_rows(o0, fade)\n", ""),
    "sums of a lazy loop are not faded": ("            o0 = scaled_where_moved(o0, fade)\n", ""),
    "a lazy base never moves": ("new = gl.where(largest > top + LAG, largest, top)", "new = top"),
    "a turn is not given": ("        give_turn(W)\n        s =", "        s ="),
    "the first turn is not given": ("    if W == 1:\n        give_turn(W)\n", ""),
    "a turn is not awaited": ("        await_turn(W)\n", ""),
    "a number is taken without waiting": ("            mbarrier.wait(turns.full.index(slot), phase_n)\n", ""),
    "the phase does not flip": ("        phase = its_phase\n    return", "    return"),
    "queries are copied for nothing": (
        "if work.high > work.low:\n            tile",
        "if work.rows > 0:\n            tile",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path, monkeypatch):
    """By one loop or the other, on a call that has keys past the last that is seen and before the first, tiles that see nothing,
    several turns and stages, and scores so far apart that sums are multiplied in some blocks."""
    kept, instead = MUTANTS[name]
    a = poisoned(call(batch=2, length=400, keys=700, D=128, left=200, causal=True, scale=1.0, kv_len=ints(620, 0)))
    with gluon_machine.broken(hopper, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        for seed in range(8):
            loops(mutant, monkeypatch, lazy=seed % 2 == 1)
            o, lse, wanted = launched(a, mutant.forward)
            gluon_machine.play(wanted, seed)
            agrees(a, o, lse)
