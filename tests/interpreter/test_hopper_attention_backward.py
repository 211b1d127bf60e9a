"""The backward of attention for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow, and
scores so large that fp32 keeps them to less than 1."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests import gluon_machine
from tests.attention_oracle import call, poisoned
from tilewright.attention.attention import reference_lse
from tilewright.attention.hopper import backward as hopper
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import Arguments, collect

CHIP = replace(TARGETS["sm_90"], gluon=True, sms=2)


def played(a, o, lse, do, seed=0, hopper=hopper):
    """(dq, dk, dv) of a call whose results were these."""
    saved = SimpleNamespace(**a, o=o, lse=lse, needs=frozenset("qkv"), backend="hopper")
    assert hopper.fits_backward(CHIP, saved)
    with pretend(CHIP), collect() as found:
        gradients = hopper.backward(saved, do, None)[:3]
    for wanted in found:
        if wanted.kernel is hopper.attention_backward_hopper:
            gluon_machine.play(wanted, seed)
        else:
            grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
            wanted.kernel.jit[grid](*wanted.ordered)
    return gradients


CALLS = {
    "causal": {"D": 128, "length": 200, "keys": 200, "causal": True},
    "heads share keys": {"D": 128, "length": 130, "keys": 150, "heads": 4, "kv_heads": 2},
    "windowed": {"D": 128, "length": 150, "keys": 300, "left": 90, "right": 20},
}


def right(name, seed, hopper=hopper):
    a = call(**CALLS[name])
    wide = {n: t.double().requires_grad_() if n in "qkv" else t for n, t in a.items()}
    o, lse = reference_lse(**wide)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(a["q"].dtype)
    wanted = torch.autograd.grad(o, [wide[n] for n in "qkv"], do.double())
    found = played(poisoned(a), o.detach().to(do.dtype), lse.detach().float(), do, seed, hopper)
    for got, want in zip(found, wanted):
        assert (got.double() - want).square().mean().sqrt() <= 4e-3 * want.square().mean().sqrt()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(2))
def test_values(name, seed):
    right(name, seed)


def huge(hopper=hopper):
    """Of one key, whose weight is 1, and an lse that fp32 rounds down: dv is the sum of do."""
    a = call(D=128, length=64, keys=1, heads=1, scale=2.0**20)
    a["q"], a["k"] = torch.full_like(a["q"], 1.0), torch.full_like(a["k"], 1.0)
    lse = torch.full((1, 1, 64), 2.0**27).nextafter(torch.tensor(0.0))
    _, _, dv = played(a, a["v"].expand(1, 64, 1, 128).contiguous(), lse, torch.ones_like(a["q"]), hopper=hopper)
    assert torch.equal(dv.float(), torch.full(dv.shape, 64.0))


def test_weights_of_huge_scores_are_at_most_1():
    huge()


MUTANTS = {
    "weights may be more than 1": ("p = weight(s, lse)", "p = gl.exp2(s - lse)"),
    "the other's ds is not waited for": (
        "        mbarrier.wait(ds_full.index(2 * (buffer ^ 1) + 1 - W), ((step - 1) >> 1) & 1)\n",
        "        pass\n",
    ),
    "no fence before ds is read": (
        "WIDE).store(y)\n    fence_async_shared()\n",
        "WIDE).store(y)\n",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    with gluon_machine.broken(hopper, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        huge(mutant)
        for seed in range(4):
            right("causal", seed, mutant)
