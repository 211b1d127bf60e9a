"""Which calls over caches Hopper's kernel for decoding takes, when `auto` does, what it is launched with, and its parts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tests.decode_oracle import CODED, DECODES, decode
from tilewright.attention import preference
from tilewright.attention.hopper import decode as kernels
from tilewright.attention.hopper import decode_codes as codes
from tilewright.bench.cases import CASES
from tilewright.bench.work import arguments
from tilewright.check.variants import Blank
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
E4M3 = torch.float8_e4m3fn
CACHED = tw.catalogue()["cached_attention"]
NAME = "hopper_decode"


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape):
    return blank(*shape, dtype=torch.int32)


def call(batch=2, length=1, page=64, most=8, heads=8, kv_heads=2, D=128, V=None, dtype=torch.bfloat16, **other):
    caches = {n: blank(20, page, kv_heads, w, dtype=dtype) for n, w in (("k_cache", D), ("v_cache", V or D))}
    table = {"block_table": ints(batch, most), "kv_len": ints(batch)}
    return {"q": blank(batch, length, heads, D, dtype=dtype), **caches, **table, **other}


def fixed(**other):
    """A page for each sequence."""
    return call(page=333, block_table=None, **other)


def scale(*shape):
    return blank(*shape, dtype=torch.float32)


def coded(kind=E4M3, page=64, D=128, V=None, **other):
    """Codes, with scales of heads."""
    given = {n: blank(20, page, 2, w, dtype=kind) for n, w in (("k_cache", D), ("v_cache", V or D))}
    scales = {"k_scale": scale(1, 1, 2, 1), "v_scale": scale(1, 1, 2, 1)}
    return call(page=page, D=D, **{**given, **scales, **other})


def bound(values):
    return SimpleNamespace(**CACHED.signature.bind((), values))


def chosen(values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return CACHED.implementation(CACHED.signature.bind((), values)).name


def launched(values, backend=NAME):
    with pretend(HOPPER), tw.force("triton"), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind((), {**values, "backend": backend}))
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(length=16),
        call(left=7, softcap=2.0, sink=blank(8), slopes=blank(8), scale=0.1, causal=False, split=128),
        *(call(page=page) for page in (1, 3, 8, 15, 16, 24, 48, 72, 128, 256)),
        fixed(),
        call(length=16, tree=blank(2, 16, dtype=torch.int64)),
        fixed(kv_len=None),
        call(D=8, dtype=torch.float16),
        call(D=128, V=64),
        call(D=72, V=128),
        call(q=blank(2, 8, 129)[..., 1:].unsqueeze(1)),  # queries are loaded, and may lie anywhere
        call(k_cache=blank(20, 2, 64, 128).transpose(1, 2)),
        call(**{n: blank(20, 2, 64, 2, 128)[:, i] for i, n in enumerate(("k_cache", "v_cache"))}),  # of one allocation
    ],
)
def test_takes(values):
    assert kernels.fits(HOPPER, bound(values)) and chosen({**values, "backend": NAME}) == NAME


@pytest.mark.parametrize(
    "values",
    [
        coded(),
        coded(torch.int8, length=8),
        coded(k_scale=None, v_scale=scale(1, 1, 1, 1), dtype=torch.float16),
        coded(D=16, V=64, page=16, left=7, softcap=2.0, sink=blank(8), slopes=blank(8), scale=-0.1),
        coded(length=8, tree=blank(2, 8, dtype=torch.int64)),
        coded(k_cache=blank(20, 2, 64, 128, dtype=E4M3).transpose(1, 2)),
    ],
)
def test_takes_codes(values):
    assert codes.fits(HOPPER, bound(values)) and not kernels.fits(HOPPER, bound(values))
    assert launched(values)[0][0] == "attention_decode_codes_hopper"


@pytest.mark.parametrize(
    "values",
    [
        call(dtype=torch.float32),
        call(D=136),
        call(D=68),
        call(D=64, V=60),
        call(length=17),  # 68 rows
        call(length=17, tree=blank(2, 17, dtype=torch.int64)),
        call(length=0),
        call(most=0),
        call(scale=0.0),  # the largest product is then not the largest score
        call(split=50),
        call(v_cache=None),
        call(batch=1, cu_seqlens_q=ints(2)),
        call(D=128, q=blank(2, 1, 8, 136), k_rope=blank(20, 64, 2, 8)),
        call(k_cache=blank(20, 64, 2, 128, dtype=E4M3)),
        call(v_cache=blank(20, 64, 2, 128, dtype=torch.int8), v_scale=blank(1, 1, 1, 1, dtype=torch.float32)),
        coded(torch.int8, v_cache=blank(20, 64, 2, 128, dtype=E4M3)),
        coded(k_scale=scale(20, 64, 2, 1)),  # of tokens
        coded(v_scale=scale(20, 1, 2, 1)),
        coded(length=9),  # 36 rows
        coded(length=9, tree=blank(2, 9, dtype=torch.int64)),
        coded(D=120),
        coded(page=8),
        coded(split=50),
        coded(q=blank(2, 1, 8, 128, dtype=torch.float32)),
        call(k_cache=blank(20, 64, 2, 129)[..., :128]),  # rows that do not begin at multiples of 16 bytes
        call(k_cache=blank(20, 64, 1, 128).expand(20, 64, 2, 128)),
        call(batch=1, most=2**24),  # positions past 32 bits
    ],
)
def test_leaves_to_others(values):
    assert not any(one.fits(HOPPER, bound(values)) for one in (kernels, codes)) and chosen(values) == "portable"


def test_other_chips_have_no_such_kernel():
    assert not any(kernels.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


def test_auto_takes_what_was_measured_to_be_faster(tmp_path, monkeypatch):
    row = preference.made("forward", bound(call()), {NAME: 1.0, "portable": 2.0}, "2026-11-17", "3.6.0")
    monkeypatch.setattr(preference, "SHIPPED", tmp_path)
    try:
        for rows, taken in (((), "portable"), ((row,), NAME)):
            preference.path_of("sm_90").write_text(preference.text_of(rows))
            preference.table.cache_clear()
            preference.nearest.cache_clear()
            assert chosen(call()) == taken
            # What is known of 16-bit caches says nothing of codes, nor of trees
            assert {chosen(one) for one in (coded(), call(tree=blank(2, 1, dtype=torch.int64)))} == {"portable"}
            assert {chosen(one) for one in (call(page=16), fixed(), call(split=64))} == {"portable"}
            # However far it is, it says something of caches of its kind, whatever else scores are
            alike = call(batch=64), call(page=320), call(left=5, softcap=2.0, sink=blank(8)), call(dtype=torch.float16)
            assert {chosen(one) for one in alike} == {taken}
    finally:
        monkeypatch.undo()
        preference.table.cache_clear()
        preference.nearest.cache_clear()


def test_what_is_measured_by_name_is_taken():
    asked = [case for case in CASES.values() if case.arguments.get("backend") == NAME]
    names = ("gqa", "paged16", "paged1", "uneven", "one", "fp8", "choice", "choice_fp8")
    assert {case.family for case in asked} == {*(f"attention_decode_{n}" for n in names), "attention_verify_tree"}
    for case in asked:
        given = arguments(case, Blank(CACHED, case.dims, case.options, dtype=getattr(torch, case.dtype)))
        own = codes if "fp8" in case.options else kernels
        assert own.fits(HOPPER, SimpleNamespace(**given)) and "portable" in case.beside


@pytest.mark.parametrize("name", [*DECODES, *CODED])
def test_what_a_gpu_tries_is_taken(name):
    assert [one.fits(HOPPER, bound(decode(name))) for one in (kernels, codes)] == [name in DECODES, name in CODED]


# ---- what is launched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "rows"), [(64, 64), (16, 16), (48, 16), (96, 32), (128, 64), (192, 64)])
def test_boxes_lie_in_one_page(page, rows):
    (_, given), *_ = launched(call(page=page))
    assert given["PAGE"] == page and page % rows == 0 and given["PLAN"].box == rows
    assert [given[n].block_shape for n in ("K", "V")] == [[1, 1, rows, 64]] * 2
    assert (given["CAPACITY"], given["PAGES"], given["GROUP"], given["KV_HEADS"]) == (8 * page, 20, 4, 2)


@pytest.mark.parametrize("page", [1, 2, 3, 8, 15, 24, 72])
def test_keys_of_small_pages_are_copied_one_by_one(page):
    """By strides in words of 16 bytes; each program has a row for what no page holds."""
    (_, given), *_ = launched(call(page=page, most=512, D=72, V=40))
    k, v, plan = given["K"], given["V"], given["PLAN"]
    assert given["PAGE"] == page and plan.box == 0 and plan == kernels.plan_for(128, 0, HOPPER.shared_memory)
    assert k[1:4] == (page * 2 * 72 // 8, 2 * 72 // 8, 72 // 8) and v[1:4] == (page * 2 * 40 // 8, 2 * 40 // 8, 40 // 8)
    assert k.nothing.shape == (given["PROGRAMS"] * plan.columns,) and v.nothing is None


def test_a_page_for_each_sequence():
    (_, given), *_ = launched(fixed(left=10**12, causal=False))
    assert given["PAGE"] == 0 and given["TABLE"] is None and given["CAPACITY"] == 333
    assert given["WINDOW"] == (None, None)  # which reach past every key


def test_a_tree_takes_the_place_of_the_causal_mask():
    (_, given), *_ = launched(call(length=8, tree=blank(2, 8, dtype=torch.int64)))
    assert given["WINDOW"] == (None, None) and tuple(given["TREE"][1:]) == (8, 1)
    assert launched(call(length=8))[0][1]["TREE"] is None


@pytest.mark.parametrize(
    ("length", "others", "rows", "stages"),
    [
        (1, {}, 8, 8),
        (3, {}, 32, 11),
        (8, {}, 32, 11),
        (1, {"tree": blank(2, 1, dtype=torch.int64)}, 8, 8),
        (1, {"slopes": blank(8)}, 32, 11),
    ],
)
def test_codes_are_multiplied_with_as_few_rows_as_there_are(length, others, rows, stages):
    given = launched(coded(length=length, page=96, **others))[0][1]
    assert given["N"] == rows and given["PLAN"] == (128, 128, 32, stages)
    assert [given[n].block_shape for n in ("K", "V")] == [[1, 1, 32, 128]] * 2


@pytest.mark.parametrize(("D", "V", "columns"), [(128, 128, 128), (64, 64, 64), (64, 72, 128), (8, 16, 64)])
def test_half_of_an_sm_is_full_of_stages(D, V, columns):
    (_, given), *_ = launched(call(D=D, V=V))
    plan = given["PLAN"]
    assert plan.columns == columns and plan.stages == 7 * 128 // columns
    assert 2 * (plan.stages * 64 * columns * 2 + 2 * kernels.SPARE) <= HOPPER.shared_memory + kernels.SPARE


def test_a_split_that_is_given_is_kept():
    found = launched(call(split=192))
    assert [name for name, _ in found] == ["attention_decode_hopper", "attention_parts_merge"]
    assert (found[0][1]["SPLIT"], found[0][1]["PARTS"], found[0][1]["PROGRAMS"]) == (192, 3, 12)
    ((_, given),) = launched(call(split=512))
    assert given["PARTS"] == 1


def test_with_a_split_nothing_of_the_batch_chooses():
    """One kernel, of the same constants, in any batch and for tables of any width."""
    sizes = [{"batch": batch, "most": most} for batch in (1, 4, 300) for most in (16, 64, 513)]
    constants = ("PLAN", "SPLIT", "FEW", "BLOCK")
    made = [[[given.get(n) for n in constants] for _, given in launched(call(**one, split=512))] for one in sizes]
    assert all(one == made[0] for one in made)


def test_a_page_that_there_is_not_is_named(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pretend(HOPPER), collect():
        kernels.forward(**decode("no such page before a window"))
        with pytest.raises(ValueError, match=r"block_table must be .* got 16 at \[0, 2\]"):
            kernels.forward(**decode("no such page"))


# ---- parts -----------------------------------------------------------------------------------------------------------

AT_A_TIME = 264


@pytest.mark.parametrize("capacity", [1, 64, 333, 4099, 8192, 32768, 131072])
@pytest.mark.parametrize("units", [1, 8, 124, 256, 1000])
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_parts_cover_all_keys(capacity, units, rows):
    for even in (False, True):
        split = kernels.split_for(capacity, units, rows, AT_A_TIME, even)
        parts = -(-capacity // split)
        assert split % 64 == 0 and split >= min(capacity, 8 * rows)
        # Most of what a chip could do at a time is done, or there are no keys for more
        rounds = -(-units * parts // AT_A_TIME)
        assert (
            rounds * split <= max(1.25 * units * capacity / AT_A_TIME, 64 * (rounds + 7), 64 * -(-rows // 8) * 2)
            or even
        )
        if not even:  # sequences may be short beside long ones
            longest = kernels.LONGEST_PART * (kernels.AT_ONCE if units * parts <= AT_A_TIME else 1)
            assert split <= 64 * max(longest, -(-rows // 8))


def test_parts_as_they_are_measured():
    """Decoding of 32 sequences of 8192 keys, of 32768 at most, and of one of 32768: 8 heads each."""
    sizes = ((8192, 256, False), (8192, 256, True), (32768, 256, False), (32768, 8, False))
    assert [kernels.split_for(n, units, 4, AT_A_TIME, even) for n, units, even in sizes] == [8192, 8192, 2048, 1024]
