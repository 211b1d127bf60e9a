"""Which calls of attention Hopper's own forward takes, when `auto` does, what it is launched with, and how even the shares of its
programs are."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

import tilewright as tw
from tests.attention_model import on_numbers
from tilewright.attention import preference
from tilewright.attention.hopper import forward as hopper
from tilewright.attention.hopper import schedule
from tilewright.attention.portable import Sizes, parts_of
from tilewright.attention.tiles import Window
from tilewright.core.target import TARGETS, pretend
from tilewright.core.triton_versions import release
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
ATTENTION = tw.catalogue()["attention"]


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def call(batch=2, length=300, keys=300, heads=4, kv_heads=2, D=128, V=None, dtype=torch.bfloat16, **other):
    q, k, v = blank(batch, length, heads, D), blank(batch, keys, kv_heads, D), blank(batch, keys, kv_heads, V or D)
    return {**{name: t.to(dtype) for name, t in zip("qkv", (q, k, v))}, **other}


def marks(count=4):
    return blank(count, dtype=torch.int32)


def chosen(values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return ATTENTION.implementation(ATTENTION.signature.bind((), values)).name


def bound(values):
    return SimpleNamespace(**ATTENTION.signature.bind((), values))


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(causal=True, left=7, softcap=2.0, sink=blank(4), slopes=blank(4), scale=0.1),
        call(D=8, dtype=torch.float16),
        call(D=256),
        call(D=192, V=128),
        call(D=64, V=256),
        call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks(), kv_len=blank(3, dtype=torch.int32)),
        call(q=blank(2, 4, 300, 128).transpose(1, 2)),  # heads first
        call(k=blank(2, 300, 3, 2, 128)[:, :, 1], v=blank(2, 300, 3, 2, 128)[:, :, 2]),  # parts of a projection
    ],
)
def test_takes(values):
    assert hopper.fits(HOPPER, bound(values)) and chosen({**values, "backend": "hopper"}) == "hopper"


@pytest.mark.parametrize(
    "values",
    [
        call(dtype=torch.float32),
        call(D=264),
        call(D=64, V=264),
        call(D=68),
        call(D=64, V=60),
        call(length=0),
        call(keys=0),
        call(scale=0.0),  # the largest product is then not the largest score
        call(scale=-1.0),
        call(mask=blank(1, 1, 300, 300, dtype=torch.bool)),
        call(kv_len=blank(2, 300, dtype=torch.int32)),
        call(q=blank(2, 300, 4, 129)[..., :128]),  # rows that do not begin at multiples of 16 bytes
        call(q=blank(2, 300, 128, 4).transpose(2, 3)),
        call(k=blank(2, 300, 1, 128).expand(2, 300, 2, 128)),
        call(batch=1, length=2**29, keys=2**29, heads=1, kv_heads=1, D=8),  # positions past 32 bits
    ],
)
def test_leaves_to_others(values):
    assert not hopper.fits(HOPPER, bound(values)) and chosen(values) == "portable"


@pytest.mark.parametrize(("D", "takes"), [(128, True), (256, False)])
def test_who_asks_by_name_gets_both_ways_or_a_refusal(D, takes):
    """Where a gradient is wanted that these kernels have not, a call that asks for them is refused, before anything is launched."""
    values = call(D=D, backend="hopper")
    assert chosen(values) == "hopper"
    values["q"].requires_grad_()
    with torch.no_grad():
        assert chosen(values) == "hopper"
    if takes:
        assert chosen(values) == "hopper"
    else:
        with pytest.raises(RuntimeError, match="no backend hopper for these arguments.*portable would do"):
            chosen(values)
        with pretend(HOPPER), collect() as found, pytest.raises(RuntimeError, match="no backend hopper"):
            ATTENTION.function(**values)
        assert not found


def test_other_chips_have_no_such_kernel():
    assert not any(hopper.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function that puts lines into the chip's table."""
    monkeypatch.setattr(preference, "SHIPPED", tmp_path)

    def put(*lines: str) -> None:
        preference.path_of("sm_90").write_text("".join(f"{line}\n" for line in lines))
        preference.table.cache_clear()
        preference.nearest.cache_clear()

    put()
    yield put
    preference.table.cache_clear()
    preference.nearest.cache_clear()


def row(kind="bf16_128_128_causal", bucket=(8, 512, 512), hopper=1.0, **other):
    times = {"hopper": hopper, "portable": 2.0}
    whole = {
        "direction": "forward", "kind": kind, "bucket": list(bucket), "best": min(times, key=times.get), "times": times,
        "date": "2026-11-17", "triton": "3.6.0",
    }  # fmt: skip
    return json.dumps({**whole, **other})


def test_auto_takes_what_was_measured_to_be_faster(rows):
    causal = call(causal=True)
    assert chosen(causal) == "portable"
    rows(row())
    assert chosen(causal) == "hopper"
    assert chosen(call()) == chosen(call(causal=True, D=64)) == chosen(call(causal=True, softcap=1.0)) == "portable"
    rows(row(hopper=3.0))
    assert chosen(causal) == "portable"


def test_auto_takes_the_chip_s_kernels_where_nothing_near_was_measured_and_most_sms_have_a_tile(rows):
    half = HOPPER.sms // 2
    large, smaller = (call(batch=1, length=tiles * 128, keys=64, heads=1) for tiles in (half + 1, half))
    assert chosen(large) == "hopper" and chosen(smaller) == "portable"
    rows(row(kind="bf16_128_128_full", bucket=(1, 8192, 64), hopper=3.0))
    assert chosen(large) == "portable"  # by the row


def test_rows_of_this_triton_count_first(rows):
    here, sizes = release(triton.__version__), (8, 512, 512)
    other = "3.6.0" if here != "3.6" else "3.9.0"
    rows(row(hopper=3.0, triton=other), row(hopper=1.0, triton=f"{here}.0"))
    assert chosen(call(causal=True)) == "hopper"
    assert preference.nearest("sm_90", "forward", "bf16_128_128_causal", *sizes, release(other))["best"] == "portable"


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", row(best="portable"), row(bucket=(8, 512)), row(bucket=(8, 0, 512)), row(direction="both"),
        row(times={"hopper": 1.0}), row(times={"hopper": "fast", "portable": 2.0}),
    ],
)  # fmt: skip
def test_damaged_rows_are_not_believed(rows, line):
    rows(line)
    with pytest.warns(UserWarning, match="1 damaged row"):
        assert chosen(call(causal=True)) == "portable"


def test_a_kind_tells_kernels_apart():
    packed = call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks(), kv_len=blank(3, dtype=torch.int32), left=3)
    assert preference.kind_of(bound(packed)) == "bf16_128_128_windowed_kv_len_packed"
    assert preference.kind_of(bound(call(D=192, V=128, dtype=torch.float16, sink=blank(4)))) == "fp16_192_128_full_sink"


# ---- what is launched ------------------------------------------------------------------------------------------------


def launched(values):
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        ATTENTION.run(ATTENTION.signature.bind((), {**values, "backend": "hopper"}))
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


def test_a_dense_call():
    _, (_, given) = launched(call(batch=4, length=4096, keys=4096, heads=32, kv_heads=8, causal=True))
    assert (given["PROGRAMS"], given["TILES"], given["GROUP"]) == (HOPPER.sms, 32, 4)
    plan = given["PLAN"]
    assert (plan.block, plan.stages, plan.queries, plan.lazy, given["CLEARS"]) == (128, 2, 2, False, False)
    assert given["Q0"].block_shape == [1, 1, 64, 128] and given["K0"].block_shape == [1, 1, 128, 128]
    assert given["Q1"] is given["K1"] is given["V1"] is None


@pytest.mark.parametrize(
    ("values", "counted"),
    [
        (call(length=4096, keys=4096, causal=True), True),
        (call(length=4096, keys=4096), False),  # tiles of one length
        (call(length=300, causal=True), False),  # no program has two
        (call(length=4096, kv_len=blank(2, dtype=torch.int32), heads=8), True),
    ],
)
def test_programs_count_tiles_of_different_lengths(values, counted):
    *before, (name, given) = launched(values)
    assert name == "attention_forward_hopper" and (given["COUNTER"] is not None) == counted
    assert [n for n, _ in before] == ["clear_counter"] * counted


def test_packed_sequences_have_a_table_before():
    (first, _), (second, given) = launched(call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks()))
    assert (first, second) == ("attention_tiles", "attention_forward_hopper")
    assert given["TILES"] == 3 + 5 and given["CLEARS"]


def test_columns_in_two_parts():
    ((_, given),) = launched(call(D=192, V=96))
    assert given["PLAN"].lazy
    assert [given[n].block_shape[-1] for n in ("Q0", "Q1", "K0", "K1", "V0", "V1")] == [128, 64, 128, 64, 64, 32]


def test_windows_past_every_key_are_none():
    ((_, given),) = launched(call(left=300, right=600))
    assert tuple(given["WINDOW"]) == (None, None) and not given["CLEARS"]
    ((_, given),) = launched(call(left=299, right=599))
    assert tuple(given["WINDOW"]) == (299, 599) and given["CLEARS"]


@pytest.mark.parametrize("D", range(8, 257, 8))
def test_every_width_has_room(D):
    for V in range(8, 257, 8):
        sizes = Sizes(D, *parts_of(D), V, *parts_of(V))
        plan = schedule.plan_for(sizes, HOPPER.shared_memory)
        assert plan is not None and plan.stages >= 2
        assert schedule.bytes_of(sizes, plan) <= HOPPER.shared_memory - schedule.SPARE


@pytest.mark.parametrize(("length", "units"), [(4096, 128), (16384, 32), (2048, 256), (8192, 16), (2048, 32)])
def test_programs_have_even_shares(length, units):
    """Of a causal call: when the busiest program ends, in blocks, over the mean, if each takes the next tile when it is done; and
    that every PROGRAMS-th would be worse."""
    tiles, programs, each = length // 128, HOPPER.sms, []
    for band in range(0, units, 16):
        each += [blocks for blocks in range(tiles, 0, -1) for _ in range(min(16, units - band))]
    ends = [0] * programs
    for blocks in each:
        heapq.heapreplace(ends, ends[0] + blocks)
    strided = [sum(each[program::programs]) for program in range(programs)]
    assert max(ends) / (sum(each) / programs) < (1.02 if tiles * units > 10 * programs else 1.1)
    assert max(strided) > max(ends)


@pytest.mark.parametrize(("tiles", "heads", "batch"), [(32, 32, 4), (64, 32, 4), (33, 28, 2), (4, 32, 8), (200, 3, 2)])
@pytest.mark.parametrize("window", [Window(), Window(right=0)], ids=["all keys", "causal"])
def test_tiles_are_numbered_once_and_few_heads_keys_are_read_at_a_time(tiles, heads, batch, window):
    """By programs that are all at tiles of consecutive numbers: as few heads as they can be, or a band of them, longest first."""
    numbered = on_numbers(schedule.numbered)
    order = [numbered(number, window, heads, batch, tiles) for number in range(tiles * heads * batch)]
    assert sorted(order) == [(t, h, b) for t in range(tiles) for h in range(heads) for b in range(batch)]
    at_once = [order[at : at + HOPPER.sms] for at in range(0, len(order), HOPPER.sms)]
    most = max(len({(head, b) for _, head, b in programs}) for programs in at_once)
    if window.right is None:
        assert most <= (HOPPER.sms - 2) // tiles + 2
    else:
        band = [tile for tile, _, _ in order[: tiles * schedule.BAND.value]]
        assert band == sorted(band, reverse=True)
