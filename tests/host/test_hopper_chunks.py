"""Which calls over caches Hopper's kernel for chunks takes, when `auto` does, and what it is launched with."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tests.cached_oracle import chunk
from tilewright.attention import preference
from tilewright.attention.hopper import chunks
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
CACHED = tw.catalogue()["cached_attention"]
NAME = "hopper_chunks"


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape):
    return blank(*shape, dtype=torch.int32)


def call(batch=2, length=300, page=64, most=8, heads=4, kv_heads=2, D=128, V=None, dtype=torch.bfloat16, **other):
    caches = {n: blank(20, page, kv_heads, w, dtype=dtype) for n, w in (("k_cache", D), ("v_cache", V or D))}
    table = {"block_table": ints(batch, most), "kv_len": ints(batch)}
    return {"q": blank(batch, length, heads, D, dtype=dtype), **caches, **table, **other}


def fixed(**other):
    """A page for each sequence."""
    return call(page=333, block_table=None, **other)


def packed(**other):
    return call(**{"batch": 1, "block_table": ints(3, 8), "kv_len": ints(3), "cu_seqlens_q": ints(4), **other})


def bound(values):
    return SimpleNamespace(**CACHED.signature.bind((), values))


def chosen(values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return CACHED.implementation(CACHED.signature.bind((), values)).name


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(length=1),
        call(left=7, softcap=2.0, sink=blank(4), slopes=blank(4), scale=0.1, causal=False),
        *(call(page=page) for page in (16, 48, 128, 256)),
        fixed(),
        fixed(kv_len=None),
        packed(),
        call(D=8, dtype=torch.float16),
        call(D=256),
        call(D=192, V=128),
        call(q=blank(2, 4, 300, 128).transpose(1, 2)),  # heads first
        call(k_cache=blank(20, 2, 64, 128).transpose(1, 2)),
        call(**{n: blank(20, 2, 64, 2, 128)[:, i] for i, n in enumerate(("k_cache", "v_cache"))}),  # of one allocation
    ],
)
def test_takes(values):
    assert chunks.fits(HOPPER, bound(values)) and chosen({**values, "backend": NAME}) == NAME


@pytest.mark.parametrize(
    "values",
    [
        call(dtype=torch.float32),
        call(D=264),
        call(D=68),
        call(D=64, V=60),
        call(length=0),
        call(most=0),
        call(page=8),
        call(page=72),
        call(scale=0.0),  # the largest product is then not the largest score
        call(split=512),
        call(v_cache=None),
        call(tree=blank(2, 300, dtype=torch.int64)),
        call(D=128, q=blank(2, 300, 4, 136), k_rope=blank(20, 64, 2, 8)),
        call(k_cache=blank(20, 64, 2, 128, dtype=torch.float8_e4m3fn)),
        call(v_cache=blank(20, 64, 2, 128, dtype=torch.int8), v_scale=blank(1, 1, 1, 1, dtype=torch.float32)),
        call(k_cache=blank(20, 64, 2, 129)[..., :128]),  # rows that do not begin at multiples of 16 bytes
        call(k_cache=blank(20, 64, 1, 128).expand(20, 64, 2, 128)),
        call(batch=1, most=2**24, heads=1, kv_heads=1),  # positions past 32 bits
        packed(block_table=ints(3, 2**23 + 2**22), kv_len=ints(3)),
    ],
)
def test_leaves_to_others(values):
    assert not chunks.fits(HOPPER, bound(values)) and chosen(values) == "portable"


def test_other_chips_have_no_such_kernel():
    assert not any(chunks.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


def test_a_split_that_is_given_is_refused_by_name():
    with pytest.raises(RuntimeError, match="no backend hopper_chunks for these arguments.*portable would do"):
        chosen(call(split=512, backend=NAME))


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_auto_takes_what_was_measured_to_be_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(preference, "SHIPPED", tmp_path)

    def put(**times):
        row = {
            "direction": "forward", "kind": "cached_16_128_128_pages_64", "bucket": [2, 2048, 512],
            "best": min(times, key=times.get), "times": times, "date": "2026-11-17", "triton": "3.6.0",
        }  # fmt: skip
        preference.path_of("sm_90").write_text(json.dumps(row) + "\n")
        preference.table.cache_clear()
        preference.nearest.cache_clear()

    try:
        put(hopper_chunks=1.0, portable=2.0)
        assert chosen(call()) == NAME
        alike = (
            call(causal=False),
            call(softcap=2.0),
            call(dtype=torch.float16),
            call(length=4096),
            call(page=192, most=3),
        )
        assert [chosen(one) for one in alike] == [NAME] * len(alike)
        # Of few queries, what was measured of many says nothing
        others = call(page=16), call(D=64), fixed(), packed(), call(length=1), call(length=64), call(split=64)
        assert {chosen(one) for one in others} == {"portable"}
        put(hopper_chunks=3.0, portable=2.0)
        assert chosen(call()) == "portable"
    finally:
        monkeypatch.undo()
        preference.table.cache_clear()
        preference.nearest.cache_clear()


# ---- what is launched ------------------------------------------------------------------------------------------------


def launched(values):
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind((), {**values, "backend": NAME}))
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


@pytest.mark.parametrize(("page", "rows"), [(64, 64), (16, 16), (48, 16), (96, 32), (128, 128), (192, 64), (1024, 128)])
def test_boxes_lie_in_one_page(page, rows):
    (first, _), (second, given) = launched(call(page=page))
    assert (first, second) == ("attention_chunks_begin", "attention_chunks_hopper")
    assert given["PAGE"] == page and given["PAGE"] % rows == 0
    assert [given[n].block_shape for n in ("K0", "V0", "N0")] == [[1, 1, rows, 64]] * 3
    assert given["K1"] is given["V1"] is given["N1"] is None and (given["KEYS"], given["PAGES"]) == (8 * page, 20)


def test_a_page_for_each_sequence():
    _, (_, given) = launched(fixed())
    assert given["PAGE"] == 0 and given["TABLE"] is given["N0"] is None and given["KEYS"] == 333
    assert given["K0"].block_shape == [1, 1, 128, 64]


def test_packed_sequences_have_room_for_as_many_keys():
    (_, begin), (table, marks), (_, given) = launched(packed())
    assert table == "attention_tiles" and begin["OWN"] is marks["OTHER"] and begin["MARKS"] == marks["COUNT"] == 4
    assert marks["OTHERS"] == 3 * begin["KEYS"] == 3 * given["KEYS"] == 3 * 8 * 64


def test_columns_in_two_parts():
    _, (_, given) = launched(call(D=192, V=96))
    assert [given[n].block_shape[-1] for n in ("K0", "K1", "V0", "V1", "N0", "N1")] == [64, 64, 64, 32, 64, 64]


def test_a_page_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pretend(HOPPER), collect():
        for kind in ("a chunk", "packed", "no such page before a window"):
            chunks.forward(**chunk(kind))
        with pytest.raises(ValueError, match=r"block_table must be .* got 16 at \[0, 2\]"):
            chunks.forward(**chunk("no such page"))
