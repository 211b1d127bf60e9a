"""Calls over caches by a kernel for Hopper, played from its own source by `gluon_machine`, and the merge of parts by the
interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import gluon_machine
from tests.cached_oracle import agrees
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import Arguments, collect

CHIP = replace(TARGETS["sm_90"], gluon=True)


def played(a: dict[str, Any], seed: int, module: ModuleType) -> tuple[Tensor, Tensor]:
    """(o, lse) of a call, by the kernel of a module."""
    assert module.fits(CHIP, SimpleNamespace(**a))
    with pretend(CHIP), collect() as found:
        o, lse = module.forward(**a)
    first, *merging = found
    given = dict(zip(first.kernel.names, first.ordered))
    for t in (o, lse, given["O"].data, given["LSE"].data):
        t.fill_(math.inf)
    gluon_machine.play(first, seed)
    for wanted in merging:
        grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
        wanted.kernel.jit[grid](*wanted.ordered, **wanted.options)
    return o, lse


def has_its_own_bits(a: dict[str, Any], found: list[tuple[Tensor, Tensor]], module: ModuleType) -> None:
    """What several orders made of a call is right, and alike bit by bit, and its sequences but the first have the bits that they
    have by themselves."""
    agrees(a, *found[0])
    alone = played({**a, **{name: a[name][1:] for name in ("q", "block_table", "kv_len")}}, 9, module)
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0]))
    assert all(torch.equal(x, y[1:]) for x, y in zip(alone, found[0]))
