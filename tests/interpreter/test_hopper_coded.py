"""Attention over keys in codes for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow,
NaN in all that nobody sees. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests import gluon_machine
from tests.attention_oracle import CALLS, call, ints
from tests.interpreter.test_hopper_attention import CHIP
from tilewright.attention.coded import reference
from tilewright.attention.coded_rows import reference as rows_of
from tilewright.attention.hopper import coded
from tilewright.attention.seen import seen
from tilewright.core.target import pretend
from tilewright.runtime.kernel import Arguments, collect

KINDS = ("int8", "fp8")
MORE = {
    "mean": {"length": 130, "keys": 200, "causal": True, "mean": True},
    "mean and everything": {**CALLS["everything"], "mean": True},
    "128 and 64": {"D": 128, "V": 64, "length": 150, "keys": 300, "kv_len": ints(260)},
}
NAMES = (
    "causal",
    "heads share keys",
    "everything",
    "lengths",
    "packed, windows, lengths",
    "128 columns",
    "fp16",
    *MORE,
)


def coded_call(kind, mean=False, **options):
    """Arguments of a call, with NaN in all that nobody sees: codes of int8 have none, but their scales do."""
    a = call(**options)
    shift = 0.5 * torch.randn(a["k"].shape[0], *a["k"].shape[2:], generator=torch.Generator().manual_seed(1))
    k, k_scale = rows_of(a["k"], shift if mean else None, kind=kind)
    place = seen(a["q"], k, *(a[n] for n in ("causal", "left", "right", "kv_len", "cu_seqlens_q", "cu_seqlens_k")))
    lonely, unseen = ~place.visible.any(2), ~place.visible.any(1)
    a["q"] = a["q"].masked_fill(lonely[..., None, None], math.nan)
    a["v"] = a["v"].masked_fill(unseen[..., None, None], math.nan)
    k_scale = k_scale.masked_fill(unseen[..., None], math.nan)
    rest = {"q_scale": None, "v_scale": None, "k_mean": shift if mean else None, "out_dtype": "bfloat16"}
    return {**a, "k": k, "k_scale": k_scale, **rest}


def launched(a, forward=coded.forward):
    """(o, lse), not yet written, and the launch that writes them; the ones before are made."""
    assert coded.fits(CHIP, SimpleNamespace(**a))
    with pretend(CHIP), collect() as found:
        o, lse = forward(**a)
    for wanted in found[:-1]:  # a table of tiles, a counter, scales by head
        grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
        wanted.kernel.jit[grid](*wanted.ordered)
    o.fill_(math.inf)
    lse.fill_(math.inf)
    return o, lse, found[-1]


def agrees(a, o, lse, near=2e-5, bar=2.4e-3):
    """To the reference in fp32, which reads the same codes: lse as near as this, o in bf16 to a bar and in fp16 to an eighth."""
    wanted_o, wanted_lse = reference(**{**a, "k_scale": a["k_scale"].nan_to_num(1.0), "q": a["q"].nan_to_num(1.0)})
    bar = bar / (8 if o.dtype == torch.float16 else 1)
    for got, wanted, most in ((o.double(), wanted_o.double(), bar), (lse.double(), wanted_lse.double(), near)):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got == -math.inf, wanted == -math.inf)
        live = wanted.isfinite()
        assert live.any() and (got - wanted)[live].square().mean().sqrt() <= most * wanted[live].square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_values(name, kind):
    a = coded_call(kind, **{**CALLS, **MORE}[name])
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


AWAIT_SCORES = "        s = warpgroup_mma_wait(1, deps=(s,))\n"
GIVE_KEYS = "        mbarrier.arrive(rings.k.empty.index(following), count=1)\n"
MUTANTS = {
    "keys are given back before their product ends": (AWAIT_SCORES + GIVE_KEYS, GIVE_KEYS + AWAIT_SCORES),
    "scales are read before they arrive": (
        "        mbarrier.wait(rings.k.full.index(following), its_phase)\n        by_key = scales_at(scales, following, SHAPED)\n",
        "        by_key = scales_at(scales, following, SHAPED)\n        mbarrier.wait(rings.k.full.index(following), its_phase)\n",
    ),
    "scales of another block": ("by_key = scales_at(scales, following, SHAPED)", "by_key = scales_at(scales, stage, SHAPED)"),
    "scales of one key alone": ("gl.float32, [boxes.shape[4]],", "gl.float32, [boxes.shape[3]],"),
    "scales are not counted": ("K.block_type.nbytes + S.block_type.nbytes", "K.block_type.nbytes"),
    "queries are given back twice": ("rings.q.empty.index(stage_q), count=1", "rings.q.empty.index(stage_q), count=2"),
    "a query that sees nothing": ("by_row = gl.where(begin < end, by_row, 1.0)", "by_row = by_row * 1.0"),
    "sums are not faded": ("        o = scaled_rows(o, fade)\n", ""),
    "the mean is left out": ("row_max(s) * by_row + shift)", "row_max(s) * by_row)"),
    "the first values are not cleared": ("if (key < start) & (work.high - work.low > 1):", "if False:"),
    "a turn is not awaited": ("        await_turn(W)  # all", "        # all"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    many = {
        "batch": 2,
        "D": 128,
        "length": 400,
        "keys": 700,
        "left": 200,
        "causal": True,
        "kv_len": ints(620, 300),
        "mean": True,
    }
    a = coded_call("int8", **many, scale=1.0)
    with gluon_machine.broken(coded, kept, instead, tmp_path) as mutant, pytest.raises(AssertionError):
        for seed in range(8):
            o, lse, wanted = launched(a, mutant.forward)
            gluon_machine.play(wanted, seed)
            agrees(a, o, lse)


def test_a_copy_of_scales_that_begins_anywhere_is_found(tmp_path):
    """Keys of packed sequences begin at no multiple of 16 bytes."""
    a = coded_call("int8", **CALLS["packed"])
    kept, instead = "key % 4, key - key % 4", "0, key"
    with (
        gluon_machine.broken(coded, kept, instead, tmp_path) as mutant,
        pytest.raises(gluon_machine.Wrong, match="a copy from"),
    ):
        gluon_machine.play(launched(a, mutant.forward)[2], 0)
