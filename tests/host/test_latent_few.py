"""Which calls over caches of latents Hopper's kernel for few rows takes, when `auto` does, and what it is launched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.host.test_latent import CACHED, HOPPER, blank, bound, call, chosen, launched, measured_as  # noqa: F401
from tests.latent_oracle import CALLS
from tilewright.attention import preference
from tilewright.attention.hopper import latent, latent_few
from tilewright.bench import preference as measured
from tilewright.bench.cases import CASES
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(page=None),
        call(page=None, kv_len=None),
        call(heads=16, length=2, dtype=torch.float16, softcap=2.0, scale=0.1, causal=False, split=128),
        call(heads=1, length=32),
        call(page=16),
        call(page=192),
        call(width=320, values=256),
        call(width=552),  # 40 columns more
        call(k_cache=blank(64, 64, 1, 512), k_rope=blank(64, 64, 1, 64)),
    ],
)
def test_takes(values):
    assert latent_few.fits(HOPPER, bound(values))
    assert chosen({**values, "backend": latent_few.NAME}) == latent_few.NAME


@pytest.mark.parametrize(
    "values",
    [
        call(heads=33),
        call(heads=16, length=3),
        call(heads=128),
        call(dtype=torch.float32),
        call(page=96),
        call(split=50),
        call(left=100),
    ],
)
def test_leaves_to_others(values):
    assert not latent_few.fits(HOPPER, bound(values))
    with pytest.raises(RuntimeError, match="no backend hopper_latent_few for these arguments"):
        chosen({**values, "backend": latent_few.NAME})


def test_other_chips_have_no_such_kernel():
    assert not any(latent_few.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


def test_auto_takes_what_was_measured_to_be_fastest(measured_as):  # noqa: F811
    times = {latent_few.NAME: 1.0, latent.NAME: 2.0, "portable": 3.0}
    measured_as(preference.made("forward", bound(call()), times, "2026-11-19", "3.6.0"))
    assert chosen(call()) == latent_few.NAME
    assert chosen(call(split=512)) == "portable"  # nothing of the batch chooses


def test_evidence_of_three_backends_makes_a_row():
    """The case names one kernel of the chip, and the other is its rival; a rival that does not take the call tells nothing."""
    case = CASES["attention_decode_mla_paged/1x1x16x1x576x512x8192x64"]
    assert case.arguments["backend"] == latent.NAME and latent_few.NAME in case.beside
    kept = {
        "case": case.name,
        "arch": "sm_90",
        "us": 92.2,
        "date": "2026-11-19T10:00:00",
        "sms": 132,
        "triton": "3.6.0",
    }
    kept |= {"rivals": {"portable": 155.9, latent_few.NAME: 80.0}}
    (row,) = measured.attention_rows([kept], "sm_90", {case.name: case})
    assert (row["best"], row["times"]) == (
        latent_few.NAME,
        {latent.NAME: 92.2, "portable": 155.9, latent_few.NAME: 80.0},
    )
    wide = replace(case, dims={**case.dims, "heads": 128})
    (row,) = measured.attention_rows([kept], "sm_90", {case.name: wide})
    assert latent_few.NAME not in row["times"]


@pytest.mark.parametrize(("heads", "length", "rows"), [(16, 1, 16), (1, 1, 16), (17, 1, 32), (16, 2, 32)])
def test_a_launch(heads, length, rows):
    _, (_, merge) = found = launched(call(batch=64, heads=heads, length=length, pages=64), latent_few.NAME)
    name, given = found[0]
    assert name == "attention_latent_few_hopper" and given["PLAN"].rows == rows
    assert (given["PARTS"], given["SPLIT"], given["PROGRAMS"], given["PAGE"]) == (2, 2048, 128, 64)
    assert given["Q"].shape == [64, heads * length, 576] and given["Q"].block_shape == [1, rows, 64]
    assert merge["PARTS"] == 2 and given["ROPE"] is given["K"] and given["rope_at"] == 512


def test_a_split_that_is_given_is_kept():
    found = launched(call(split=192), latent_few.NAME)
    assert [name for name, _ in found] == ["attention_latent_few_hopper", "attention_parts_merge"]
    assert (found[0][1]["SPLIT"], found[0][1]["PARTS"]) == (192, 6)
    ((_, given),) = launched(call(split=1024), latent_few.NAME)
    assert given["PARTS"] == 1


def test_a_page_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pretend(HOPPER), collect(), pytest.raises(ValueError, match=r"block_table must be .* got 999 at \[1, 2\]"):
        latent_few.forward(**CALLS["no such page"]())


@pytest.mark.parametrize("values", latent.WIDTHS)
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_every_plan_uses_the_memory(values, rows):
    """Pieces make up the keys' columns; two blocks have room, and no further stage has."""
    plan = latent_few.plan_for(values, rows, 64, HOPPER.shared_memory)
    assert plan.rows >= rows and (plan.slabs + 1) % plan.piece == 0 and plan.slabs * 64 == values
    stage = 2 * 64 * 64 * plan.piece
    used = plan.stages * stage + 2 * plan.rows * (values + 64) + 2 * 64 * plan.rows + latent_few.SPARE
    assert used <= HOPPER.shared_memory < used + stage
    assert plan.stages * plan.piece >= 2 * (plan.slabs + 1)


def test_two_blocks_and_more_are_on_their_way():
    assert latent_few.plan_for(512, 16, 64, HOPPER.shared_memory).stages == 8
    assert latent_few.plan_for(512, 32, 64, HOPPER.shared_memory).stages == 7
