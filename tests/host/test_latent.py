"""Which calls over caches of latents Hopper's own kernel takes, when `auto` does, and what it is launched with."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tests.latent_oracle import CALLS
from tilewright.attention import preference
from tilewright.attention.hopper import latent, latent_few
from tilewright.bench import preference as measured
from tilewright.bench.cases import CASES
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
CACHED = tw.catalogue()["cached_attention"]


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape):
    return blank(*shape, dtype=torch.int32)


def call(batch=4, length=1, heads=16, width=576, values=512, page=64, pages=16, dtype=torch.bfloat16, **other):
    """A call over pages of a cache, or, without `page`, of a page for each sequence."""
    cache = blank(batch * pages, page, 1, width) if page else blank(batch, 1024, 1, width)
    return {
        "q": blank(batch, length, heads, width).to(dtype),
        "k_cache": cache.to(dtype),
        "block_table": ints(batch, pages) if page else None,
        "kv_len": ints(batch),
        "value_dim": values,
        **other,
    }


def bound(values):
    return SimpleNamespace(**CACHED.signature.bind((), values))


def chosen(values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return CACHED.implementation(CACHED.signature.bind((), values)).name


def launched(values, backend=latent.NAME):
    with pretend(HOPPER), tw.force("triton"), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind((), {**values, "backend": backend}))
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


@pytest.fixture
def measured_as(tmp_path, monkeypatch):
    """Have `auto` go by these rows alone."""

    def put(*rows):
        preference.path_of("sm_90").write_text(preference.text_of(rows))
        preference.table.cache_clear()
        preference.nearest.cache_clear()

    monkeypatch.setattr(preference, "SHIPPED", tmp_path)
    yield put
    monkeypatch.undo()
    preference.table.cache_clear()
    preference.nearest.cache_clear()


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(page=None),
        call(page=None, kv_len=None),
        call(heads=128, length=3, dtype=torch.float16, softcap=2.0, scale=0.1, causal=False, split=128),
        call(page=16),
        call(page=192),
        call(width=320, values=256),
        call(width=552),  # 40 columns more
        call(k_cache=blank(64, 64, 1, 512), k_rope=blank(64, 64, 1, 64)),
        call(q=blank(16, 4, 1, 576).permute(1, 2, 0, 3)),  # one token, its heads anywhere
        call(k_cache=blank(64, 64, 3, 576)[:, :, 1:2]),  # a cache of several layers
    ],
)
def test_takes(values):
    assert latent.fits(HOPPER, bound(values)) and chosen({**values, "backend": latent.NAME}) == latent.NAME


@pytest.mark.parametrize(
    "values",
    [
        call(dtype=torch.float32),
        call(v_cache=blank(64, 64, 1, 512), value_dim=None),
        call(values=384),
        call(values=576),  # no column is after the values
        call(width=640),
        call(k_cache=blank(64, 64, 2, 576)),
        call(k_cache=blank(64, 64, 1, 576, dtype=torch.int8)),
        call(k_cache=blank(64, 64, 1, 512), k_rope=blank(64, 64, 1, 64), value_dim=256),
        call(page=8),
        call(page=96),
        call(split=50),
        call(scale=0.0),  # the largest product is then not the largest score
        call(left=100),
        call(sink=blank(16)),
        call(slopes=blank(16)),
        call(tree=blank(4, 1, dtype=torch.int64)),
        call(batch=1, cu_seqlens_q=ints(2)),
        call(batch=0),
        call(pages=0),
        call(length=2, q=blank(4, 16, 2, 576).transpose(1, 2)),  # heads before tokens
        call(k_cache=blank(64, 64, 1, 577)[..., :576]),  # rows that do not begin at multiples of 16 bytes
    ],
)
def test_leaves_to_others(values):
    assert chosen(values) == "portable"
    assert not latent.fits(HOPPER, bound(values))
    with pytest.raises(RuntimeError, match=f"no backend {latent.NAME} for these arguments"):
        chosen({**values, "backend": latent.NAME})


def test_other_chips_have_no_such_kernel():
    assert not any(latent.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


def faster(values):
    """The row by which Hopper's kernel is the faster for a call."""
    return preference.made("forward", bound(values), {latent.NAME: 1.0, "portable": 2.0}, "2026-11-17", "3.6.0")


def test_auto_takes_what_was_measured_to_be_faster(measured_as):
    line = faster(call())
    assert (line["kind"], line["bucket"]) == ("cached_16_576_512_latent_pages_64", [4, 16, 1024])
    for rows, taken in (((), "portable"), ((line,), latent.NAME)):
        measured_as(*rows)
        assert chosen(call()) == taken
        assert chosen(call(page=None)) == chosen(call(page=16)) == "portable"
        assert chosen(call(softcap=1.0)) == chosen(call(heads=128)) == taken
    assert json.loads(preference.text_of([line])) == line


def test_with_a_split_nothing_of_the_batch_chooses(measured_as):
    """One kernel, of the same constants, in any batch and for tables of any width; without a split the nearest row chooses."""
    sizes = [{"batch": batch, "pages": pages} for batch in (1, 4, 64, 300) for pages in (16, 64, 513)]
    slower = preference.made("forward", bound(call()), {latent.NAME: 2.0, "portable": 1.0}, "2026-11-17", "3.6.0")
    measured_as(slower, faster(call(batch=64, pages=64)))
    assert {chosen(call(**one)) for one in sizes} == {latent.NAME, "portable"}
    assert {chosen(call(**one, split=512)) for one in sizes} == {"portable"}
    assert {chosen(call(**one, split=512, backend=latent.NAME)) for one in sizes} == {latent.NAME}
    for backend in ("auto", latent.NAME):
        made = [launched(call(**one, split=512), backend) for one in sizes]
        constants = ("PLAN", "SPLIT", "BLOCK_M", "BLOCK_N", "STAGES", "BLOCK")
        of_each = [[(name, *(given.get(n) for n in constants)) for name, given in one] for one in made]
        assert all(one == of_each[0] for one in of_each)


def test_evidence_of_both_backends_makes_a_row():
    case = next(case for case in CASES.values() if case.family == "attention_decode_mla_few")
    kept = {
        "case": case.name,
        "arch": "sm_90",
        "us": 80.0,
        "rivals": {"portable": 155.9},
        "date": "2026-11-17T10:00:00",
    }
    kept |= {"sms": 132, "triton": "3.6.0"}
    (row,) = measured.attention_rows([kept], "sm_90", {case.name: case})
    assert (row["kind"], row["bucket"], row["best"]) == (
        "cached_16_576_512_latent_pages_64",
        [64, 16, 4096],
        latent_few.NAME,
    )
    plain = replace(case, arguments={n: v for n, v in case.arguments.items() if n != "backend"})
    assert not measured.attention_rows([kept], "sm_90", {case.name: plain})  # which does not say whose time it is


def test_evidence_of_three_backends_makes_a_row():
    """Of those that a case's own kernel was timed beside, each that takes the call counts."""
    case = CASES["attention_decode_mla_paged/1x1x16x1x576x512x8192x64"]
    assert latent_few.NAME in case.beside
    rivals = {"portable": 370.0, latent_few.NAME: 120.0, "fa3": 1.0}
    kept = {"case": case.name, "arch": "sm_90", "us": 143.0, "rivals": rivals, "date": "2026-11-17T10:00:00"}
    (row,) = measured.attention_rows([{**kept, "sms": 132, "triton": "3.6.0"}], "sm_90", {case.name: case})
    assert row["best"] == latent_few.NAME
    assert row["times"] == {latent.NAME: 143.0, latent_few.NAME: 120.0, "portable": 370.0}


def test_rows_are_tokens_and_heads():
    _, (_, merge) = found = launched(call(batch=32, heads=128, page=None, k_cache=blank(32, 8192, 1, 576)))
    name, given = found[0]
    plan = given["PLAN"]
    assert name == "attention_latent_hopper" and (plan.stages, plan.late, plan.ahead) == (2, True, 64 * 1152)
    assert (given["TILES"], given["PARTS"], given["SPLIT"], given["PROGRAMS"]) == (2, 2, 4096, 128)
    assert given["Q"].shape == [32, 128, 576] and given["Q"].block_shape == [1, 64, 64]
    assert merge["PARTS"] == 2 and given["ROPE"] is given["K"] and given["rope_at"] == 512


def test_a_tile_of_few_heads_has_keys_to_itself():
    (_, given), *_ = launched(call(batch=64, heads=16))
    assert (given["TILES"], given["PLAN"].late, given["PAGE"]) == (1, False, 64)
    (_, given), *_ = launched(call(k_cache=blank(64, 16, 2, 576)[:, :, :1], page=16))
    assert (given["PLAN"].box, given["PLAN"].ahead) == (16, 0)  # rows do not lie side by side


def test_a_split_that_is_given_is_kept():
    found = launched(call(split=192))
    assert [name for name, _ in found] == ["attention_latent_hopper", "attention_parts_merge"]
    assert (found[0][1]["SPLIT"], found[0][1]["PARTS"]) == (192, 6)
    ((_, given),) = launched(call(split=1024))
    assert given["PARTS"] == 1


def test_a_page_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pretend(HOPPER), collect():
        latent.forward(**CALLS["pages"]())  # whose table holds no pages past the keys
        with pytest.raises(ValueError, match=r"block_table must be .* got 999 at \[1, 2\]"):
            latent.forward(**CALLS["no such page"]())


@pytest.mark.parametrize(
    ("capacity", "units"), [(8192, 64), (4096, 64), (64, 1), (32768, 1), (131072, 3), (8192, 1000)]
)
def test_parts_fill_the_chip(capacity, units):
    split = latent.split_for(capacity, units, 132)
    parts = -(-capacity // split)
    assert split % 64 == 0 and (split >= 512 or capacity < 512)
    even = units * capacity / 132  # keys of each SM if none idled
    assert -(-units * parts // 132) * split <= max(1.2 * even, 512)


@pytest.mark.parametrize("values", latent.WIDTHS)
def test_every_width_has_room(values):
    plan = latent.plan_for(values, 64, 1, 0, HOPPER.shared_memory)
    assert plan.stages >= 2
    used = 128 * (values + 64) * (1 + plan.stages) + 64 * 64 * 2 + latent.SPARE
    assert used <= HOPPER.shared_memory
