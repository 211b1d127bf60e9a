"""Attention over pages for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow, NaN in all
that nobody sees. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests import gluon_machine
from tests.cached_oracle import CHUNKS, agrees, chunk
from tilewright.attention.hopper import chunks
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import Arguments, collect

CHIP = replace(TARGETS["sm_90"], gluon=True, sms=3)  # each program then has several tiles


def launched(a, forward=chunks.forward):
    """(o, lse), not yet written, and the launch that writes them; the ones before are made."""
    assert chunks.fits(CHIP, SimpleNamespace(**a))
    with pretend(CHIP), collect() as found:
        o, lse = forward(**a)
    for wanted in found[:-1]:  # a counter, NaN, a table of tiles
        grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
        wanted.kernel.jit[grid](*wanted.ordered)
    o.fill_(math.inf)
    lse.fill_(math.inf)
    return o, lse, found[-1]


@pytest.mark.parametrize("name", CHUNKS)
def test_values(name):
    a = chunk(name)
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


# ---- mutants ---------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a page is read twice": ("(key // PAGE).to(gl.int64)", "(key // PAGE // 2).to(gl.int64)"),
    "entries past the keys are read": ("there = key < whose.count", "there = key >= 0"),
    "a page is not clamped": ("(page >= 0) & (page < PAGES)", "page >= 0"),
    "keys of no page are 0": ("            if page >= 0:", "            if page >= -1:"),
    "values of no page are NaN": ("copy_block(V0, V1, None, None, rings", "copy_block(V0, V1, N0, N1, rings"),
    "rows of a page are mixed up": ("row = row % PAGE", "row = key % PAGE"),
    "boxes lie side by side": ("(stage * ACROSS + c) * HIGH + i", "(stage * HIGH + i) * ACROSS + c"),
    "fewer bytes are expected": ("2 * BOXES * HIGH * COLUMNS", "BOXES * HIGH * COLUMNS"),
    "a stage is not waited for": ("    mbarrier.wait(ring.empty.index(stage), phase)\n", ""),
    "marks leave no room": ("i * KEYS, i < MARKS", "i * (KEYS // 2), i < MARKS"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    """On packed sequences with pages that there are not, in blocks of several boxes, tiles that see nothing and several turns; and
    on pages of several boxes."""
    kept, instead = MUTANTS[name]
    calls = chunk("packed", D=128, strays=((0, 5, 29), (1, 1, -1))), chunk("pages of 48")
    broken = gluon_machine.broken(chunks, kept, instead, tmp_path, once=False)
    with broken as mutant, pytest.raises((AssertionError, IndexError)):
        for seed, a in itertools.product(range(4), calls):
            o, lse, wanted = launched(a, mutant.forward)
            gluon_machine.play(wanted, seed)
            agrees(a, o, lse)
