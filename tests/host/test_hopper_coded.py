"""Which calls of attention over codes Hopper's own kernel takes, when `auto` does, and what it is launched with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tests.host.test_hopper_attention import HOPPER, blank, marks, row, rows  # noqa: F401
from tilewright.attention import preference
from tilewright.attention.coded import attention_codes, attention_codes_pv
from tilewright.attention.hopper import coded, schedule
from tilewright.bench import cases
from tilewright.bench.check import Wrong
from tilewright.bench.preference import of_codes
from tilewright.bench.work import arguments, build, launches
from tilewright.check.variants import Blank
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

FP8 = torch.float8_e4m3fn


def call(
    batch=2, length=300, keys=300, heads=4, kv_heads=2, D=128, V=None, dtype=torch.bfloat16, kind=torch.int8, **other
):  # fmt: skip
    made = {
        "q": blank(batch, length, heads, D, dtype=dtype), "k": blank(batch, keys, kv_heads, D, dtype=kind),
        "v": blank(batch, keys, kv_heads, V or D, dtype=dtype), "k_scale": blank(batch, keys, kv_heads, dtype=torch.float32),
    }  # fmt: skip
    return {**made, **other}


def coded_call(keys=300, kv_heads=2, D=128, V=None, kind=FP8, batch=2, **other):
    """The same with values in codes too."""
    v = {
        "v": blank(batch, keys, kv_heads, V or D, dtype=kind),
        "v_scale": blank(batch, keys, kv_heads, dtype=torch.float32),
    }
    return call(batch=batch, keys=keys, kv_heads=kv_heads, D=D, kind=kind, **{**v, **other})


def op_of(values):
    return attention_codes_pv if "v_scale" in values else attention_codes


def chosen(values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return op_of(values).implementation(op_of(values).signature.bind((), values)).name


def bound(values):
    return SimpleNamespace(**op_of(values).signature.bind((), values))


@pytest.mark.parametrize(
    "values",
    [
        call(),
        call(kind=FP8, causal=True, left=7, softcap=2.0, sink=blank(4), slopes=blank(4), scale=0.1),
        call(D=64, V=128, dtype=torch.float16, k_mean=blank(2, 2, 64, dtype=torch.float32)),
        call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks(), kv_len=blank(3, dtype=torch.int32)),
        call(k_scale=blank(2, 2, 300, dtype=torch.float32).transpose(1, 2)),
        coded_call(causal=True, left=7, softcap=2.0, sink=blank(4), slopes=blank(4), scale=0.1),
        coded_call(D=64, V=128, dtype=torch.float16, k_mean=blank(2, 2, 64, dtype=torch.float32)),
        coded_call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks(), kv_len=blank(3, dtype=torch.int32)),
        coded_call(scaled="block"),
        coded_call(
            v=blank(2, 2, 300, 129, dtype=torch.uint8)[..., 1:].view(FP8).transpose(1, 2)
        ),  # which are turned anyway
    ],
)
def test_takes(values):
    assert coded.fits(HOPPER, bound(values)) and chosen({**values, "backend": "hopper"}) == "hopper"
    assert chosen(values) == "portable"  # nothing was measured


@pytest.mark.parametrize(
    "values",
    [
        call(dtype=torch.float32),
        call(v=blank(2, 300, 2, 128, dtype=torch.float16)),
        call(D=96),
        call(V=256),
        call(length=0),
        call(keys=0),
        call(scale=-1.0),
        call(mask=blank(1, 1, 300, 300, dtype=torch.bool)),
        call(kv_len=blank(2, 300, dtype=torch.int32)),
        call(k_scale=blank(2, 300, 2, dtype=torch.float64)),
        call(k_mean=blank(2, 2, 128, dtype=torch.float64)),
        call(q=blank(2, 300, 4, 128, dtype=torch.int8), q_scale=blank(2, 300, 4, dtype=torch.float32)),
        call(k=blank(2, 300, 2, 129, dtype=torch.int8)[..., :128]),  # rows that do not begin at multiples of 16 bytes
        coded_call(kind=torch.int8),
        coded_call(V=256),
        coded_call(v_scale=blank(2, 300, 2, dtype=torch.float64)),
        coded_call(q=blank(2, 300, 4, 128, dtype=FP8), q_scale=blank(2, 300, 4, dtype=torch.float32)),
        # Sequences of which each takes a block of 128 keys, and has few
        coded_call(batch=1, cu_seqlens_q=blank(2000, dtype=torch.int32), cu_seqlens_k=blank(2000, dtype=torch.int32)),
    ],
)
def test_leaves_to_others(values):
    assert not coded.fits(HOPPER, bound(values)) and chosen(values) == "portable"


def test_other_chips_have_no_such_kernel():
    assert not any(coded.fits(t, bound(call())) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False)))


def test_auto_takes_what_was_measured_to_be_faster(rows):  # noqa: F811
    rows(row(kind="bf16_128_128_causal_int8"))
    assert chosen(call(causal=True)) == "hopper"
    assert chosen(call(causal=True, kind=FP8)) == chosen(call()) == "portable"
    rows(row(kind="bf16_128_128_causal_fp8"))
    assert (chosen(call(causal=True, kind=FP8)), chosen(coded_call(causal=True))) == ("hopper", "portable")
    rows(row(kind="bf16_128_128_causal_fp8_pv"))
    assert (chosen(call(causal=True, kind=FP8)), chosen(coded_call(causal=True))) == ("portable", "hopper")


def test_a_row_of_numbers_says_nothing_of_codes(rows):  # noqa: F811
    rows(row())
    assert chosen(call(causal=True)) == "portable"


def test_large_calls_of_codes_are_the_chip_s_where_any_call_of_such_codes_was_measured(rows):  # noqa: F811
    large = dict(batch=4, length=4096, keys=4096, heads=32)
    int8, fp8 = call(**large), call(**large, kind=FP8)
    pv = coded_call(4096, batch=4, length=4096, heads=32)
    rows(row(kind="bf16_64_64_causal_int8"))
    assert [chosen(values) for values in (int8, fp8, pv)] == ["hopper", "portable", "portable"]
    rows(row(kind="bf16_64_64_causal_fp8_pv"))
    assert [chosen(values) for values in (int8, fp8, pv)] == ["portable", "portable", "hopper"]
    for values, said in ((fp8, "portable"), (pv, "hopper")):
        assert preference.decide(HOPPER, "forward", bound(values)).best == said


def launched(values):
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        op_of(values).run(op_of(values).signature.bind((), {**values, "backend": "hopper"}))
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


def test_a_dense_call():
    values = call(batch=4, length=4096, keys=4095, heads=32, kv_heads=8, causal=True)
    (first, _), (second, scales), (name, given) = launched(values)
    assert (first, second, name) == ("clear_counter", "attention_scales_by_head", "attention_codes_hopper")
    assert (given["PROGRAMS"], given["TILES"], given["GROUP"], given["CLEARS"]) == (HOPPER.sms, 32, 4, False)
    assert tuple(given["PLAN"]) == (128, 3, 2, False, 0)
    assert given["K"].block_shape == [1, 1, 128, 128] and given["V"].block_shape == [1, 1, 128, 128]
    # Rows of scales begin at multiples of 16 bytes, and past the last key a copy brings 0
    assert scales["ROOM"] == 4096 and given["KS"].strides == [8 * 4096, 4096, 4096, 1]
    assert (given["KS"].shape, given["KS"].block_shape) == ([4, 8, 1, 4095], [1, 1, 1, 128])
    assert given["VS"] is None


@pytest.mark.parametrize("packed", [False, True])
def test_values_in_codes(packed):
    """Are turned, in whole blocks, of packed sequences with room for one more each; then nothing is left to be cleared."""
    more = {"batch": 1, "cu_seqlens_q": marks(), "cu_seqlens_k": marks()} if packed else {"batch": 4}
    values = coded_call(length=4096, keys=4095, heads=32, kv_heads=8, causal=True, left=100, **more)
    names, found = zip(*launched(values))
    assert names == (
        *(["attention_tiles"] if packed else []), "clear_counter", "attention_scales_by_head",
        *(["attention_tiles"] if packed else []), "attention_values_turned", "attention_codes_hopper",
    )  # fmt: skip
    turn, given, blocks = found[-2], found[-1], 32 + (marks().shape[0] if packed else 0)
    assert (turn["BLOCKS"], turn["TILES"], given["CLEARS"]) == (blocks, blocks + packed, False)
    assert (given["V"].shape, given["V"].block_shape) == ([more["batch"], 8, 128, 128 * blocks], [1, 1, 128, 128])
    assert (given["VS"].shape, given["VS"].block_shape) == ([more["batch"], 8, 1, 256 * blocks], [1, 1, 1, 256])
    assert tuple(given["PLAN"]) == (128, 3, 1, True, coded.TOGETHER)


def test_a_scale_for_each_block():
    """Is read where it lies: no box of scales is made, and of values their logarithms stand by block."""
    values = coded_call(batch=4, length=4096, keys=4095, heads=32, kv_heads=8, causal=True, scaled="block")
    names, found = zip(*launched(values))
    assert names == ("clear_counter", "attention_values_turned", "attention_codes_hopper")
    given = found[-1]
    assert given["BY_BLOCK"] and given["KS"].data.shape == (4, 4095, 8, 1) and given["KS"].stride_t == 8
    assert given["VS"].data.shape == (4, 32, 8, 1) and given["VS"].stride_t == 1


def test_a_packed_call():
    """Has its scales four times, in rows that begin at keys 0 to 3, so that copies of them begin at multiples of 16 bytes."""
    values = call(batch=1, cu_seqlens_q=marks(), cu_seqlens_k=marks())
    _, (_, scales), (_, given) = launched(values)[-3:]
    assert (
        scales["SHIFTS"] == 4
        and given["KS"].shape == [1, 2, 4, 300]
        and given["KS"].strides == [8 * 300, 4 * 300, 300, 1]
    )


@pytest.mark.parametrize("D", coded.WIDTHS)
@pytest.mark.parametrize("V", coded.WIDTHS)
@pytest.mark.parametrize("values", [False, True])
def test_every_width_has_room(D, V, values):
    sizes = coded.sizes_of(blank(1, 1, 1, D), blank(1, 1, 1, V))
    plan = coded.plan_for(sizes, HOPPER.shared_memory, values)
    assert plan.stages >= 2 and coded.bytes_of(sizes, plan, values) <= HOPPER.shared_memory - schedule.SPARE


def test_a_public_call_by_name():
    q, k, v = (torch.zeros(2, 40, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    with pretend(HOPPER), tw.force("triton"), collect() as found:
        tw.attention(q, k, v, math="int8", causal=True, backend="hopper")
        tw.attention(q, k, v, math="fp8_pv", causal=True, backend="hopper")
    assert [w.kernel.name for w in found] == [
        "attention_code_rows",
        "attention_scales_by_head",
        "attention_codes_hopper",
        *["attention_code_blocks"] * 2,
        "attention_values_turned",
        "attention_codes_hopper",
    ]
    with pretend(HOPPER), collect() as found:
        for math, wide in (("int8", 96), ("int8_pv", 64), ("fp8_pv", 96)):
            given = (torch.zeros(2, 40, 2, wide, dtype=torch.bfloat16) for _ in range(3))
            with pytest.raises(ValueError, match="attention: backend hopper does not take"):
                tw.attention(*given, math=math, backend="hopper")
    assert not found
    values = attention_codes_pv.signature.bind(
        (), {**call(v=blank(2, 300, 2, 128, dtype=torch.int8)), "backend": "hopper"}
    )
    with pretend(HOPPER), pytest.raises(RuntimeError, match="no backend hopper"):
        attention_codes_pv.implementation(values)


@pytest.mark.parametrize("family", ["attention_prefill_int8", "attention_prefill_fp8"])
def test_the_benchmarks_case(family):
    """What is timed is the public call, which makes its codes, and a result without codes' errors or with more is not its own."""
    (case,) = (one for one in cases.CASES.values() if one.family == family and one.own)
    names = [wanted.kernel.name for wanted in launches(case, HOPPER)]
    assert names.count("attention_code_blocks") == (2 if family.endswith("fp8") else 0)
    assert names.count("attention_code_rows") == (0 if family.endswith("fp8") else 1)
    assert ("attention_codes_hopper" in names) == (case.arguments.get("backend") == "hopper")
    dims = {"batch": 1, "length": 200, "heads": 4, "kv_heads": 2, "head_dim": 64}
    work = build(replace(case, dims=dims, arguments={"causal": True}), device="cpu")
    made = work.call()
    given = {name: work.values[name] for name in ("q", "k", "v", "causal")}
    assert torch.equal(made, tw.attention(**given, math=case.way)) and not torch.equal(made, tw.attention(**given))
    assert 2e-3 < work.verify(made) < 8e-2
    with pytest.raises(Wrong):
        work.verify(made * 1.05)


@pytest.mark.parametrize("math", ["int8", "fp8_pv"])
def test_a_measured_case_is_a_row_of_codes(math):
    family = f"attention_prefill_{math.removesuffix('_pv')}"
    (case,) = (one for one in cases.CASES.values() if one.family == family and one.own)
    drawn = SimpleNamespace(**arguments(case, Blank(tw.catalogue()["attention"], case.dims, case.options)))
    given = of_codes(drawn, case.way)
    assert coded.fits(HOPPER, given)
    assert preference.kind_of_codes(given) == f"bf16_128_128_causal_{math}"
