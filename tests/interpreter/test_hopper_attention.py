"""The forward of attention for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow, NaN in
all that nobody sees. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import gluon_machine
from tilewright.attention.attention import reference_lse
from tilewright.attention.hopper import forward as hopper
from tilewright.attention.seen import seen
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import Arguments, collect

CHIP = replace(TARGETS["sm_90"], gluon=True, sms=3)  # each program then has several tiles
PLAIN = {
    "scale": None, "causal": False, "left": None, "right": None, "softcap": 0.0, "sink": None, "slopes": None, "mask": None,
    "kv_len": None, "cu_seqlens_q": None, "cu_seqlens_k": None,
}  # fmt: skip


def call(batch=1, length=200, keys=200, heads=2, kv_heads=1, D=64, V=None, dtype=torch.bfloat16, **options):
    source = torch.Generator().manual_seed(0)
    shapes = ((length, heads, D), (keys, kv_heads, D), (keys, kv_heads, V or D))
    q, k, v = (torch.randn(batch, *shape, generator=source).to(dtype) for shape in shapes)
    return {"q": q, "k": k, "v": v, **PLAIN, **options}


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def poisoned(a):
    """The same with NaN in every key and value that no query sees, and in every query that sees no key."""
    place = seen(*(a[n] for n in ("q", "k", "causal", "left", "right", "kv_len", "cu_seqlens_q", "cu_seqlens_k")))
    lonely, unseen = ~place.visible.any(2), ~place.visible.any(1)
    q, k, v = (
        t.masked_fill(hidden[..., None, None], math.nan)
        for t, hidden in ((a["q"], lonely), (a["k"], unseen), (a["v"], unseen))
    )
    return {**a, "q": q, "k": k, "v": v}


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


def agrees(a, o, lse):
    wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in a.items()}
    wanted_o, wanted_lse = reference_lse(**wide)
    bar = 2.4e-3 / (8 if o.dtype == torch.float16 else 1)
    for got, wanted, most in ((o.double(), wanted_o, bar), (lse.double(), wanted_lse, 1e-6)):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got == -math.inf, wanted == -math.inf)
        live = wanted.isfinite()
        size = wanted[live].square().mean().sqrt() if live.any() else 1.0
        assert live.logical_not().all() or (got - wanted)[live].square().mean().sqrt() <= most * max(size, 1e-3)


CALLS = {
    "causal": {"causal": True},
    "full": {"length": 130, "keys": 333},
    "heads share keys": {"batch": 2, "heads": 6, "kv_heads": 2, "causal": True, "length": 129, "keys": 129},
    "one query": {"length": 1, "keys": 300, "causal": True},
    "more keys": {"length": 100, "keys": 387, "causal": True, "left": 70},
    "fewer keys": {"length": 300, "keys": 90, "causal": True, "sink": torch.tensor([0.5, -math.inf])},
    "windowed": {"length": 400, "keys": 400, "left": 37, "right": 65},
    "narrow": {"length": 300, "keys": 300, "left": 0, "right": 0},
    "far windows": {"length": 140, "keys": 140, "left": 10**12, "right": 10**12},
    "everything": {
        "length": 300, "keys": 310, "causal": True, "left": 150, "softcap": 1.5, "sink": torch.tensor([0.7, -2.0]),
        "slopes": torch.tensor([0.01, 0.1]), "scale": 0.3,
    },  # fmt: skip
    "lengths": {"batch": 5, "length": 140, "keys": 260, "kv_len": ints(260, 261, 0, -1, 131), "causal": True},
    "lengths and a sink": {"batch": 2, "length": 9, "keys": 20, "kv_len": ints(21, 0), "sink": torch.tensor([0.3, 1.0])},
    "packed": {
        "length": 420, "keys": 500, "causal": True, "cu_seqlens_q": ints(3, 3, 140, 290, 291, 400),
        "cu_seqlens_k": ints(0, 50, 200, 200, 330, 481),
    },  # fmt: skip
    "packed, windows, lengths": {
        "length": 300, "keys": 400, "left": 40, "right": 20, "cu_seqlens_q": ints(0, 100, 130, 300), "kv_len": ints(77, 31, 201),
        "cu_seqlens_k": ints(20, 120, 150, 390),
    },  # fmt: skip
    "marks that fall": {
        "length": 150, "keys": 150, "cu_seqlens_q": ints(0, 100, 40, 150), "cu_seqlens_k": ints(0, 60, 90, 150),
    },  # fmt: skip
    "128 columns": {"D": 128, "causal": True, "length": 300, "keys": 300},
    "256 columns": {"D": 256, "causal": True, "left": 100},
    "192 and 128": {"D": 192, "V": 128, "causal": True},
    "96 columns": {"D": 96, "left": 50, "keys": 250},
    "72 and 40": {"D": 72, "V": 40, "kv_len": ints(150)},
    "8 columns": {"D": 8, "causal": True},
    "160 and 224": {"D": 160, "V": 224, "length": 70, "kv_len": ints(190), "left": 20},
    "fp16": {"D": 128, "V": 64, "causal": True, "dtype": torch.float16},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_values(name):
    a = poisoned(call(**CALLS[name]))
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
        "        mbarrier.wait(rings.v.full.index(stage), phase)\n        o0, o1",
        "        o0, o1",
    ),
    "keys are not waited for": ("        mbarrier.wait(rings.k.full.index(following), its_phase)\n", ""),
    "scores are taken too early": ("warpgroup_mma_wait(2 if SECOND else 1,", "warpgroup_mma_wait(2,"),
    "no fence": ("    fence_async_shared()\n", ""),
    "warpgroups do not wait for each other": ("    await_turn(0)  # both", "    # both"),
    "the last values are not cleared": ("if (key < start) | (key + BLOCK > stop):", "if key < start:"),
    "the first values are not cleared": ("if (key < start) & (work.high - work.low > 1):", "if False:"),
    "a mask off by one": ("ok = j < gl.expand_dims(stop - key, 1)", "ok = j <= gl.expand_dims(stop - key, 1)"),
    "sums are not faded": ("        o0 = scaled_rows(o0, fade)\n", ""),
    "a number is taken without waiting": ("            mbarrier.wait(turns.full.index(slot), phase_n)\n", ""),
    "the phase does not flip": ("        phase = its_phase\n    return", "    return"),
    "queries are copied for nothing": (
        "if work.high > work.low:\n            tile",
        "if work.rows > 0:\n            tile",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    """On a call that has keys past the last that is seen and before the first, tiles that see nothing, several turns and stages."""
    kept, instead = MUTANTS[name]
    text = Path(hopper.__file__).read_text()
    assert text.count(kept) == 1
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(kept, instead))
    spec = importlib.util.spec_from_file_location("tilewright.attention.hopper.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutant
    try:
        spec.loader.exec_module(mutant)
        a = poisoned(call(batch=2, length=400, keys=700, D=128, left=200, causal=True, kv_len=ints(620, 0)))
        with pytest.raises(AssertionError):
            for seed in range(8):
                o, lse, wanted = launched(a, mutant.forward)
                gluon_machine.play(wanted, seed)
                agrees(a, o, lse)
    finally:
        del sys.modules[spec.name]
