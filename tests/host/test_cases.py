"""Benchmark cases on a CPU, where ops are their references: what they are, what they must move, what passes the checks."""

from __future__ import annotations

import json
import math
import types
from dataclasses import replace
from typing import get_args

import pytest
import torch

import tilewright as tw
from tests.pretended import measuring
from tilewright.bench import cases, check, packaged, results, rivals, run, sol, timing
from tilewright.bench.directed import Absent
from tilewright.bench.work import REPLACED, Work, launches
from tilewright.core.target import TARGETS
from tilewright.core.triton_versions import release
from tilewright.op import Op

MIB = 1 << 20
# Those of one op; whole models and torch's operators have tests of their own
OPS = [case for case in cases.CASES.values() if case.op in tw.catalogue() and case.direction != "train"]
OWN = {case.family: case for case in OPS if case.own}
SMALL = {
    "tokens": 256,
    "hidden": 256,
    "vocab": 300,
    "batch": 2,
    "length": 100,
    "experts": 4,
    "heads": 8,
    "head_dim": 32,
    "columns": 128,
    "rows": 16,
    "kv_heads": 2,
    "value_dim": 24,
    "sequences": 3,
    "shortest": 10,
    "longest": 60,
}
CACHED = {"batch": 4, "length": 16, "context": 40, "longest": 100}
FEW = {"count": 5, "slots": 2, "experts": 4, "ffn": 128}


def small(family: str, **dims: int) -> cases.Case:
    case = OWN[family]
    options = {n: min(v, FEW.get(n, v)) if type(v) is int else v for n, v in case.options.items()}
    given = {n: v for n, v in case.arguments.items() if n != "backend"}  # a CPU has the reference alone
    sizes = {**SMALL, **dims}
    if case.op == "cached_attention":
        sizes |= {n: min(case.dims[n], size) for n, size in CACHED.items() if n in case.dims} | dims
    if case.op == "linear_attention":  # whose reference goes token by token
        sizes |= {"length": 20} | dims
    case = replace(case, arguments=given, beside=[], floor="bytes")
    return replace(case, dims={n: sizes.get(n, size) for n, size in case.dims.items()}, options=options)


def most(case: cases.Case) -> float:
    """Of an honest result's error: roundings, or what quantising costs."""
    return check.COARSE.low if case.way in cases.CODED else 2.5e-3


def tensors(result) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if type(t) is torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------- cases


def test_every_case_has_an_op_and_its_goal():
    for case in cases.CASES.values():
        parts = [part["op"] in tw.catalogue() for part in case.parts]
        assert case.op in tw.catalogue() or all(parts) and parts or case.op == REPLACED, case.name
        if case.family in cases.GOALS:
            goal = cases.GOALS[case.family]
            assert case.metric == goal.metric
            assert case.mean or case.goal == pytest.approx(goal.goal, abs=0.071)
            assert not case.own or case.goal == goal.goal
    assert len({case.name for case in OPS if case.own}) == len(OWN)


def test_suites_are_plain_data():
    rows = [json.loads(line) for path in cases.SUITES.glob("*.jsonl") for line in path.read_text().splitlines()]
    lines = {row["case"]: row for row in rows}
    assert len(lines) == len(rows)
    for row in rows:
        row = cases.whole(row, lines)
        assert {"case", "direction"} <= set(row) and "like" not in row
        assert len({"dims", "over", "calls"} & set(row)) == 1
        assert row["direction"] in get_args(cases.Direction)


def test_a_line_has_from_another_what_it_does_not_say_anew():
    lines = {
        "a": {"case": "a", "op": "x", "dims": {"n": 1}, "least": 0.5},
        "b": {"case": "b", "like": "a", "dims": {"n": 2}},
        "c": {"case": "c", "like": "b", "triton": "newest"},
    }
    assert cases.whole(lines["c"], lines) == {
        "case": "c",
        "op": "x",
        "dims": {"n": 2},
        "least": 0.5,
        "triton": "newest",
    }
    assert cases.whole(lines["a"], lines) == lines["a"]
    with pytest.raises(KeyError, match="d is like e, which no suite has"):
        cases.whole({"case": "d", "like": "e"}, lines)
    dense, newest = ([c for c in OPS if c.family == name] for name in ("fp8_block_dense", "newest_fp8_dense"))
    assert [c.dims for c in dense] == [c.dims for c in newest] and len(newest) == 6
    assert {c.triton for c in newest} == {"newest"} and {c.triton for c in dense} == {None}
    assert all(c.metric == "vs:cublaslt" and c.ours and c.options == {"pair": "fp8_block"} for c in newest)
    (launch,) = cases.select(["launch_newest"])
    assert (launch.direction, launch.dims, launch.goal) == ("host", {"tokens": 64, "hidden": 512}, 0.85)


def test_a_case_for_a_newer_triton_waits_for_one():
    (case,), (plain,) = cases.select(["launch_newest"]), cases.select(["launch_rms_norm"])
    assert "newer than 3.6, and here is 3.6.1" in cases.waits(case, "3.6.1")
    assert cases.waits(case, "3.7.0") is cases.waits(case, "3.10.0+git1") is cases.waits(case, "4.0") is None
    assert cases.waits(plain, "3.6.1") is cases.waits(plain, "3.9.0") is None
    assert [release(v) for v in ("3.6.0", "3.10.1+git12", "3", "")] == ["3.6", "3.10", "3", ""]


def test_norms_have_the_widths_of_real_models():
    """Each within 0.03 of its goal, at 50 to 256 MB; and those beside quack are the ones that its goal is stated for."""
    stated = {
        c.dims["hidden"]: c for c in OPS if c.family in ("rms_norm_fwd_5120", "rms_norm_fwd_2880", "rms_norm_fwd_32768")
    }
    assert {*stated} == {1536, 2560, 2880, 3072, 3584, 5120, 6144, 7168, 8192, 12288, 16384, 32768}
    for c in stated.values():
        assert (
            c.goal >= (0.97 if c.dims["hidden"] == 5120 else 0.94) and c.op == "rms_norm" and c.direction == "forward"
        )
    beside = [c for c in OPS if c.family == "rms_norm_vs_quack"]
    assert [c.dims["hidden"] for c in beside] == [2048, 2880, 4096, 5120, 7168, 8192, 16384, 32768]
    assert all(64e6 <= 2 * c.dims["tokens"] * c.dims["hidden"] <= 256e6 and c.mean for c in beside)


def test_selection():
    assert cases.select([]) == list(cases.CASES.values())
    assert {c.op for c in cases.select(["glu"])} == {"glu"}
    assert [c.name for c in cases.select(["launch_rms_norm"])] == ["launch_rms_norm/64x512"]
    assert len(cases.select(["rms_norm_fwd", "silu_fwd/4096*"])) == 7
    assert cases.select(["training"])
    with pytest.raises(KeyError, match="'rms_nrm'; perhaps rms_norm"):
        cases.select(["rms_nrm"])


def test_traffic_is_the_published_minimum():
    """MB of the known benchmark rows, read once and written once, at an eighth of the rows."""
    for family, megabytes in {
        "rms_norm_quant_fwd": 68.19, "rms_norm_quant_row_fwd": 50.89, "silu_quant_fwd": 101.7, "silu_bwd": 167.8,
    }.items():  # fmt: skip
        work = Work.build(replace(OWN[family], dims={"tokens": 1024, "hidden": 2048}), device="cpu")
        assert sum(work.traffic(work.call())) * 8 / 1e6 == pytest.approx(megabytes, rel=2e-3), family
    work = Work.build(replace(OWN["cross_entropy_bwd"], dims={"tokens": 8, "vocab": 157184}), device="cpu")
    assert sum(work.traffic(work.call())) * 1024 / 1e6 == pytest.approx(5150.8, rel=2e-3)


# ---------------------------------------------------------------------------------------------------------------- codes


def _quantize(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 128 along the last dimension, the multiplier found by trying powers of two."""
    codes, scales = torch.zeros(y.shape, dtype=torch.float8_e4m3fn), torch.zeros(y.shape[0], -(-y.shape[1] // 128))
    for i in range(y.shape[0]):
        for j in range(scales.shape[1]):
            group = y[i, j * 128 : (j + 1) * 128]
            power = max(k for k in range(-40, 40) if group.abs().max().item() * 2.0**k <= 448)
            codes[i, j * 128 : (j + 1) * 128] = (group * 2.0**power).to(torch.float8_e4m3fn)
            scales[i, j] = 2.0**-power
    return codes, scales


FORMAT = tw.fp8("1x128", ways="both")


def _quantized(y: torch.Tensor) -> types.SimpleNamespace:
    """What `Quantized` looks like, both ways."""
    codes, scales = _quantize(y.float())
    column = [_quantize(y[i : i + 128].float().t()) for i in range(0, y.shape[0], 128)]
    return types.SimpleNamespace(
        format=FORMAT,
        shape=y.shape,
        data=codes,
        scale=scales.t(),
        data_t=torch.cat([c.view(torch.uint8) for c, _ in column], 1).view(torch.float8_e4m3fn),
        scale_t=torch.stack([s[:, 0] for _, s in column]),
    )


def exactly(y: torch.Tensor) -> check.Truth:
    """A truth that fp32 can tell."""
    return check.Truth(y, torch.zeros(y.shape[0], 1, dtype=torch.float64))


def _flip(q, field, change):
    """A copy of `q` with one field changed."""
    pieces = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(q).items()}
    change(pieces[field])
    return types.SimpleNamespace(**pieces)


def test_right_codes_pass_and_wrong_ones_do_not():
    torch.manual_seed(0)
    y = torch.randn(200, 192, dtype=torch.float64) * torch.logspace(-6, 6, 192, dtype=torch.float64)
    q = _quantized(y)
    truth = exactly(y)
    assert check.compare_quantized(q, truth, "y") < 1e-3
    row_only = types.SimpleNamespace(**{**vars(q), "data_t": None, "scale_t": None})
    assert check.compare_quantized(row_only, truth, "y") < 1e-3
    wrong = {
        "scale doubled": ("scale", lambda t: t.mul_(2)),
        "column scale of another block": ("scale_t", lambda t: t.copy_(t.flip(1))),
        "one code far off": ("data", lambda t: t.view(torch.uint8)[3, 5].bitwise_xor_(0x10)),
        "one column code far off": ("data_t", lambda t: t.view(torch.uint8)[190, 199].bitwise_xor_(0x10)),
        "transposed codes missing": ("data_t", lambda t: t.view(torch.uint8)[:, 130:].fill_(0xFF)),
        "unwritten scale": ("scale", lambda t: t[1, 199:].fill_(float("nan"))),
    }
    for what, (field, change) in wrong.items():
        with pytest.raises(check.Wrong):
            check.compare_quantized(_flip(q, field, change), truth, what)
    nothing = types.SimpleNamespace(format=FORMAT, shape=y.shape, data=None, scale=None, data_t=None, scale_t=None)
    with pytest.raises(check.Wrong, match="neither"):
        check.compare_quantized(nothing, truth, "y")


def test_a_step_off_is_allowed_only_rarely():
    y = torch.randn(128, 256, dtype=torch.float64)
    q = _quantized(y)

    def step(count):
        def change(t):
            flat = t.view(torch.uint8).view(-1)
            at = (flat % 128 > 8).nonzero()[:count, 0]
            flat[at] -= 1

        return _flip(q, "data", change)

    truth = exactly(y)
    assert check.compare_quantized(step(3), truth, "y") == pytest.approx(3 / y.numel())
    with pytest.raises(check.Wrong, match="200 of 32768 codes differ, 0 by more than a step"):
        check.compare_quantized(step(200), truth, "y")


def test_scales_may_be_off_by_the_roundings_that_make_them_and_no_more():
    """Eight units of 2**-24: five roundings, one of them in an approximate rsqrt."""
    y = torch.randn(128, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = tw.quantize(y, tw.Format.parse("int8:row:row"))
    truth = exactly(y)

    def moved(units: int) -> types.SimpleNamespace:
        there = q.scale.double() * (1 + units * 2.0**-24)
        scale = there.float()  # and not past it
        past = (scale.double() - there) * units > 0
        scale = torch.where(past, torch.nextafter(scale, q.scale), scale)
        return types.SimpleNamespace(
            format=q.format, shape=q.shape, data=q.data, scale=scale, data_t=None, scale_t=None
        )

    for units in (0, 8, -8):
        assert check.compare_quantized(moved(units), truth, "y") < 1e-3
    for units in (12, -12):
        with pytest.raises(check.Wrong, match="scales differ"):
            check.compare_quantized(moved(units), truth, "y")


def test_what_fp32_cannot_tell_is_not_held_against_a_kernel():
    """A scale may move as far as the reference in fp32 is off, and not where it is not."""
    y = torch.randn(128, 256, dtype=torch.float64)
    coded = tw.quantize((y * (1 + 1e-5)).float(), tw.Format.parse("int8:row:row"))
    with pytest.raises(check.Wrong, match="scales differ"):
        check.compare_quantized(coded, exactly(y), "y")
    assert check.compare_quantized(coded, check.Truth.of(y, (y * (1 + 1e-5)).float()), "y") < 1e-3


def test_a_gradient_in_codes_is_held_to_the_same_bars():
    """Of the gradient as it should be, by the reference; a scale or a code that is off shows."""
    case = small("silu_quant_bwd", tokens=300)
    work = Work.build(replace(case, grad_format=None), device="cpu")
    format = tw.Format.parse(case.grad_format)
    dx = check.exact(work.op, work.values, None, work.grads, torch.float32)[1]["x"]
    right = tw.quantize(dx, format)
    assert check.backward(work.op, work.values, work.grads, {"x": right}) < 1e-3
    for other in (1.01 * dx, dx.roll(1, 0), dx.roll(1, 1)):
        with pytest.raises(check.Wrong):
            check.backward(work.op, work.values, work.grads, {"x": tw.quantize(other, format)})


# --------------------------------------------------------------------------------------------------------------- checks


def test_bands_hold_the_first_and_the_last_row():
    for rows in (1, 127, 128, 129, 1000, 16384):
        bands = check.bands(rows)
        assert bands[0].start == 0 and bands[-1].stop == rows and len(bands) <= 6
        assert all(b.start % 128 == 0 and 0 < b.stop - b.start <= 128 for b in bands)
    assert [c for part in check.chunks(10, 4, 12) for c in range(part.start, part.stop)] == list(range(10))


# A CPU runs the reference, which does not quantise a gradient
ON_CPU = [family for family, case in OWN.items() if case.grad_format is None]


@pytest.mark.parametrize("family", ON_CPU)
def test_checks_accept_an_honest_result_and_refuse_damaged_ones(family):
    work = Work.build(small(family), device="cpu")
    result = work.call()
    assert 0 <= work.verify(result) < most(work.case)
    for damaged in tensors(result):
        if not damaged.is_floating_point():
            continue
        before = damaged.clone()
        for damage in (
            lambda t: t.mul_(1.02),
            lambda t: t[(0,) * t.dim()].add_(t.abs().max()),
            lambda t: t[(0,) * t.dim()].fill_(float("nan")),
            lambda t: t.zero_(),
        ):
            damage(damaged)
            with pytest.raises(check.Wrong):
                work.verify(result)
            damaged.copy_(before)
    work.verify(result)


ATTENTION = [family for family in ON_CPU if OWN[family].op in ("attention", "attention_lse")]


@pytest.mark.parametrize("family", ATTENTION)
@pytest.mark.parametrize("dims", [{"length": 300, "longest": 200}, {"length": 259, "heads": 7, "kv_heads": 1}], ids=str)
def test_parts_of_attention_are_pieces_of_the_whole(family, dims):
    """Also where bands are cut from the middle, sequences are packed and seven queries share a key."""
    work = Work.build(small(family, **{"longest": 180, **dims}), device="cpu")
    op, grads = work.op, (torch.randn(work.values["q"].shape[:3] + work.values["v"].shape[3:]),)
    whole, gradients = check.exact(op, work.values, None, grads)
    for with_gradients in (False, True):
        parts = check.parts_of(op, work.values, with_gradients)
        assert 2 <= len(parts) <= 6
        for part in parts:
            of = [g[part.at["o"]] for g in grads]
            results, found = check.exact(op, part.arguments, None, of)
            for name, wanted, piece in zip(op.results, whole, results):
                torch.testing.assert_close(piece, wanted[part.at[name]])
            for name, piece in found.items() if with_gradients else ():
                torch.testing.assert_close(piece, gradients[name][part.at[name]])
        for name in ("q", "k", "v", "o"):  # the first and the last element are in one
            at = [part.at[name] for part in parts]
            assert at[0][1].start == 0 and at[0][2].start == 0
            last = (work.values if name != "o" else {"o": grads[0]})[name]
            assert (at[-1][1].stop, at[-1][2].stop) == tuple(last.shape[1:3])


def test_attention_that_cannot_be_cut_is_compared_whole():
    work = Work.build(small("attention_prefill_full"), device="cpu")
    assert check.parts_of(work.op, work.values, True)
    for given in (
        {"sink": torch.zeros(8)}, {"kv_len": torch.tensor([3, 4])}, {"mask": torch.zeros(1, 1, 100, 100)}, {"left": 3}
    ):  # fmt: skip
        values = {**work.values, **given}
        assert not check.parts_of(work.op, values, False) and not check.parts_of(work.op, values, True)
        result = work.op.function(**values)
        assert check.forward(work.op, values, (result,)) < 2.5e-3
        with pytest.raises(check.Wrong):
            check.forward(work.op, values, (result * 1.02,))


OVER_CACHES = [family for family in ON_CPU if OWN[family].op == "cached_attention"]


@pytest.mark.parametrize("family", OVER_CACHES)
def test_parts_of_attention_over_caches_are_pieces_of_the_whole(family):
    work = Work.build(small(family), device="cpu")
    op = work.op
    whole = check.exact(op, work.values, None)[0]
    first, *_, last = parts = check.parts_of(op, work.values, False)
    assert first.at["o"][2].start == 0 and last.at["o"][2].stop == work.values["q"].shape[2]
    assert last.at["o"][0].stop == work.values["q"].shape[0]
    for part in parts:
        assert part.arguments["k_cache"].numel() < work.values["k_cache"].numel()
        for name, wanted, piece in zip(op.results, whole, check.exact(op, part.arguments, None)[0]):
            torch.testing.assert_close(piece, wanted[part.at[name]])


def test_caches_are_drawn_as_the_goals_say():
    for family in OVER_CACHES:
        case = small(family)
        values, dims = Work.build(case, device="cpu").values, case.dims
        lengths, table = values["kv_len"].tolist(), values["block_table"]
        assert sum(lengths) == dims["batch"] * dims["context"] and len(lengths) == dims["batch"]
        if "page" in dims:
            assert table.flatten().sort().values.tolist() == list(range(values["k_cache"].shape[0]))
            assert dims["page"] > 16 or table.flatten().tolist() != sorted(table.flatten().tolist())
        else:
            assert table is None
        assert ("longest" in dims) == (len(set(lengths)) > 1) and max(lengths) == dims.get("longest", dims["context"])
        assert (values["v_cache"] is None) == ("mla" in family)
        if "fp8" in family:
            assert values["k_cache"].dtype == torch.float8_e4m3fn and values["k_scale"].shape == (1, 1, 2, 1)
        if "tree" in family:
            drafts = torch.arange(dims["length"])
            assert ((values["tree"] >> drafts) & 1).all() and (values["tree"] < 2 << drafts).all()


def test_what_attention_over_caches_moves_and_multiplies():
    """The keys that there are, and not the room for them; a query of several sees those before it."""

    def cost(family: str, **dims: int) -> tuple[int, int, float]:
        work = Work.build(small(family, **dims), device="cpu")
        return *work.traffic(work.call()), run.flops_of(work)

    heads, rows = 2 * 2 * 32 * 2, 4 * 8  # bytes of a key and its value; batch times heads
    read, written, flops = cost("attention_decode_gqa")
    assert read == 4 * 40 * heads + rows * 32 * 2 + 4 * 4 and written == rows * (32 * 2 + 4)
    assert flops == 4 * rows * 40 * 32
    uneven = cost("attention_decode_uneven")
    assert uneven == (read, written, flops)
    paged = cost("attention_decode_paged16")
    assert paged == (read + 4 * 3 * 4, written, flops)
    codes = cost("attention_decode_fp8")
    assert codes[0] == paged[0] - 4 * 40 * heads // 2 + 2 * 2 * 4
    latent = cost("attention_decode_mla")
    assert latent[0] == 4 * 40 * 2 * 32 * 2 + rows * 32 * 2 + 4 * 4 and latent[2] == 2 * rows * 40 * (32 + 24)
    extended = cost("attention_extend_paged")
    assert extended[2] == 4 * rows * sum(range(25, 41)) * 32


def test_a_floor_may_be_the_matrix_rate(pretended, monkeypatch):
    monkeypatch.setattr(run, "matrix_rate", lambda name: {"bf16": 1e6}[name])
    row = run.measure(replace(small("attention_extend_paged"), floor="bf16"), [])
    flops = 4 * 4 * 8 * sum(range(25, 41)) * 32
    assert row["floor_us"] == pytest.approx(flops / 1e6) and row["fraction"] == row["measured"]
    by_rate = {
        "attention_decode_mla",
        "attention_decode_mla_flashmla",
        "attention_decode_mla_paged",
        "attention_extend_fixed",
        "attention_extend_paged",
        "attention_extend_paged16",
        "auto_attention",
        "auto_attention_d256",
        "fused_linear_ce_rate",
    }
    assert {c.family for c in OPS if c.floor == "bf16"} - set(ATTENTION) == by_rate
    assert all(c.floor == "bf16" for c in OPS if c.family in ATTENTION)


def test_a_step_of_a_linear_loss_is_three_products_at_the_matrix_rate(pretended, monkeypatch):
    """Of the logits, of the gradient of hidden and of that of weight, however often they are made."""
    monkeypatch.setattr(run, "matrix_rate", lambda name: {"bf16": 1e6}[name])
    row = run.measure(replace(small("fused_linear_ce_rate"), floor="bf16"), [])
    assert row["floor_us"] == pytest.approx(3 * 2 * 256 * 256 * 300 / 1e6) and row["fraction"] == row["measured"]
    (case,) = cases.select(["fused_linear_ce_rate"])
    assert case.floor == "bf16" and case.dims == {"tokens": 8192, "hidden": 4096, "vocab": 128256}


def test_the_matrix_rate_is_that_of_torchs_best_product(monkeypatch):
    asked = []

    def matrix(name, product, device, clock):
        asked.append((name, product))
        return sol.Light(name, "TFLOP/s", 800.0)

    monkeypatch.setattr(sol, "matrix", matrix)
    monkeypatch.setattr(timing, "Cuda", lambda: None)
    run.matrix_rate.cache_clear()
    assert run.matrix_rate("bf16") == run.matrix_rate("bf16") == 8e8
    assert asked == [("bf16", sol.PRODUCTS["bf16"]["torch"])]
    run.matrix_rate.cache_clear()


def test_a_graph_of_long_products_is_short(pretended, monkeypatch):
    monkeypatch.setattr(timing, "plan", lambda nbytes, l2, once=False: (2, 16))
    counted = []
    for us in (10.0, 4000.0, 1e6):
        monkeypatch.setattr(run, "flops_of", lambda work, us=us: us * sol.FLOPS_PER_US)
        counted.append(run.Sets.build(small("attention_prefill_bf16")).calls)
    assert counted == [16, 6, 2]


def test_what_attention_multiplies_is_what_its_sequences_see():
    full, causal, packed, window = (
        Work.build(small(f"attention_prefill_{kind}"), device="cpu") for kind in ("full", "bf16", "packed", "window")
    )
    window.values["left"] = 9
    full, causal, packed, window = map(run.flops_of, (full, causal, packed, window))
    assert full == 4 * 2 * 8 * 100 * 100 * 32 and causal == 4 * 2 * 8 * (100 * 101 // 2) * 32
    assert window == 4 * 2 * 8 * sum(min(i + 1, 10) for i in range(100)) * 32
    assert packed == sum(4 * 8 * (n * (n + 1) // 2) * 32 for n in (30, 60, 10))
    backward, step = (
        run.flops_of(Work.build(small(f"attention_bwd_{kind}"), device="cpu")) for kind in ("bf16", "memory")
    )
    assert (backward, step) == (2.5 * causal, 3.5 * causal)


@pytest.mark.parametrize("family", ["attention_prefill_bf16", "attention_bwd_bf16", "attention_bwd_memory"])
def test_another_implementation_is_called_over_the_same_arguments(family):
    work = Work.build(small(family), device="cpu")
    other = work.by(scale=0.5)
    assert all(other.values[n] is work.values[n] for n in "qkv") and other.grads is work.grads
    assert rivals.agrees(work.call(), work.by(scale=None).call(), 0.0)
    assert not rivals.agrees(work.call(), other.call(), 1e-2)
    with pytest.raises(Absent, match="what the case itself measures"):
        rivals.call_of("portable", work.by(backend="portable") if family == "attention_prefill_bf16" else fixed(work))
    with pytest.raises(Absent, match="rms_norm has no backend of that name"):
        rivals.call_of("portable", Work.build(small("rms_norm_fwd"), device="cpu"))


def fixed(work: Work) -> Work:
    """A work that names the portable kernels, which a CPU does not run."""
    work.values["backend"] = "portable"
    return work


def test_goals_of_attention_are_measured_by_the_chips_own_kernels():
    """Beside the portable ones, so that a row tells which is the faster; each at one larger and one odd shape."""
    for family in ATTENTION:
        found = [case for case in OPS if case.family == family]
        assert all(c.arguments["backend"] == "hopper" and "portable" in c.beside for c in found), family
        if family in cases.GOALS:
            own, larger, odd = found
            assert own.own and larger.goal == odd.goal == pytest.approx(own.goal - 0.07)
            assert odd.dims["heads"] == 7 * odd.dims["kv_heads"] and 4099 in odd.dims.values()
            more = [c.dims["length"] * c.dims.get("batch", 1) for c in (own, larger)]
            assert more[1] > more[0]
    stated = {name for name, goal in cases.GOALS.items() if goal.op == "attention"}
    assert stated == {name for name in ATTENTION if name in stated}


def test_an_unwritten_row_between_the_bands_is_seen():
    work = Work.build(small("rms_norm_fwd", tokens=2000), device="cpu")
    result = work.call()
    assert not any(b.start <= 300 < b.stop for b in check.bands(2000))
    result[300, 17] = float("nan")
    with pytest.raises(check.Wrong, match="never written"):
        work.verify(result)
    work = Work.build(small("cross_entropy_bwd", tokens=2000), device="cpu")
    result = work.call()
    work.verify(result)
    result[0][300, 17] += 1e-3  # where memory held logits, an unwritten element is no NaN
    with pytest.raises(check.Wrong):
        work.verify(result)


@pytest.mark.parametrize("family", ["small_add_rms_norm", "small_glu", "small_qkv_cache", "small_m_bf16"])
def test_small_calls_have_a_larger_and_an_odd_shape(family):
    """Beside those whose mean the goal is stated for, and held to 0.07 less."""
    found = [case for case in cases.CASES.values() if case.family == family]
    larger, odd = (case for case in found if not case.mean)
    assert found[-2:] == [larger, odd] and larger.goal == odd.goal == pytest.approx(cases.GOALS[family].goal - 0.07)
    assert math.prod(larger.dims.values()) > max(math.prod(case.dims.values()) for case in found if case.mean)
    assert math.prod(n for name, n in odd.dims.items() if name in ("tokens", "batch", "length")) % 2


def test_small_elements_beside_large_ones_are_held_too():
    work = Work.build(small("cross_entropy_bwd"), device="cpu")
    result = work.call()
    small_ones = result[0].abs() < 0.1 * result[0].abs().amax(-1, keepdim=True)
    result[0].copy_(torch.where(small_ones, result[0] * (1 + 2.0**-7), result[0]))
    with pytest.raises(check.Wrong):
        work.verify(result)


def test_what_a_backward_writes_over_is_restored():
    work = Work.build(small("cross_entropy_bwd"), device="cpu")
    before = work.values["logits"].clone()
    work.values["logits"].zero_()
    work.restore()
    assert torch.equal(work.values["logits"], before) and work.overwrites


# -------------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def pretended(monkeypatch):
    """The measuring process without a device."""
    return measuring(monkeypatch)


@pytest.mark.parametrize("family", [f for f in ON_CPU if OWN[f].direction != "host"])
def test_a_case_is_checked_timed_and_set_beside_its_floor(family, pretended):
    case = replace(small(family), metric="fraction")
    row = run.measure(case, ["eager", "nobody"] if case.direction == "forward" else [])
    assert row["us"] == pytest.approx(5.0)
    if case.direction == "step":  # bound by products, not by bytes
        assert row["floor_us"] is row["fraction"] is None
    else:
        assert row["fraction"] == row["measured"] == pytest.approx(0.8)
    assert row["method"] == "graph" and 0 <= row["error"] < most(case) and row["extra_bytes"] == 7
    if family.startswith("router"):
        flops = 2 * 256 * 256 * 4 * (2 if case.direction == "backward" else 1)
        assert row["rates"] == pytest.approx({"burst": flops / 5e6, "sustained": flops / 1e7, "clock_mhz": 1500})
    else:
        assert ("rates" in row) == (tw.catalogue()[case.op].cost.flops is not None)
    if case.direction == "forward":
        assert row["rivals"] == {"eager": pytest.approx(5.0)} and "no such rival" in row["absent"]["nobody"]


def test_host_time_is_measured_beside_the_goals_rival(pretended, monkeypatch):
    monkeypatch.setattr(timing, "time_host_each", lambda calls: [10.0, 11.0][: len(calls)])
    row = run.measure(small("launch_rms_norm"), [])
    assert row["us"] == 10.0 and row["rivals"] == {"torch_add": 11.0} and row["measured"] == pytest.approx(1.1)


@pytest.mark.parametrize("family", ["launch_out", "launch_norm_step", "launch_scaled_mm"])
def test_other_ways_of_calling_are_checked_and_timed(family, pretended, monkeypatch):
    """A case that would call another function, or give no memory, would fail here: what is timed is asked."""
    seen = []
    monkeypatch.setattr(
        timing, "time_host_each", lambda calls: [seen.append(calls[0]()), 10.0, 11.0][1 : 1 + len(calls)]
    )
    row = run.measure(small(family), [])
    work = Work.build(small(family))
    (result,) = seen
    rival = cases.GOALS[family].metric.removeprefix("vs:")
    if family == "launch_scaled_mm":  # cuBLASLt is not on a CPU
        assert rival in row["absent"] and row["us"] == 10.0
        assert torch.equal(result, work.op.function(**work.values))
        return
    assert row["us"] == 10.0 and row["rivals"] == {rival: 11.0}
    if family == "launch_out":
        assert work.call() is work.call()
    else:
        theirs = rivals.call_of(rival, work)()
        leading, named = work.as_written(work.given)
        assert [t.requires_grad for t in leading] == [True, True] and not named
        assert (
            len(result) == 3
            and rivals.agrees(result, theirs)
            and [t.shape for t in result] == [t.shape for t in theirs]
        )


def test_host_times_of_codes_are_held_to_those_of_plain_calls():
    """At most 1.5 times these; a library's product is held to torch's own."""
    held = {name.partition("/")[0]: case.goal for name, case in cases.CASES.items() if name.startswith("launch_")}
    for family in ("launch_norm_fp8", "launch_norm_fp8_both", "launch_glu_fp8", "launch_grouped_mm_fp8"):
        assert held[family] == pytest.approx(1 / 1.5, abs=1e-3)
    assert held["launch_scaled_mm_cublaslt"] == cases.GOALS["launch_scaled_mm"].goal


def test_groups_of_quantised_factors_are_timed_beside_plain_ones(pretended, monkeypatch):
    """As a program has them: what is timed gives what the op gives of their codes."""
    seen = []
    monkeypatch.setattr(
        timing, "time_host_each", lambda calls: [seen.append([call() for call in calls]), 10.0, 6.0][1:]
    )
    row = run.measure(small("launch_grouped_mm_fp8"), [])
    work = Work.build(small("launch_grouped_mm_fp8"))
    assert row["rivals"] == {"plain": 6.0} and row["us"] == 10.0
    ((own, plain),) = seen
    assert torch.equal(own, work.op.function(**work.values)) and plain.shape == own.shape


@pytest.mark.parametrize("family", ["launch_norm_fp8", "launch_norm_fp8_both", "launch_glu_fp8"])
def test_calls_that_make_codes_are_timed_beside_those_that_make_none(family, pretended, monkeypatch):
    monkeypatch.setattr(timing, "time_host_each", lambda calls: [15.0, 10.0][: len(calls)])
    row = run.measure(small(family), [])
    work = Work.build(small(family))
    assert row["rivals"] == {"plain": 10.0} and row["measured"] == pytest.approx(2 / 3)
    assert type(work.call()) is tw.Quantized and type(rivals.call_of("plain", work)()) is torch.Tensor


def test_norms_of_many_tensors_are_timed_beside_torch_s(pretended, monkeypatch):
    monkeypatch.setattr(timing, "time_host_each", lambda calls: [150.0, 1000.0][: len(calls)])
    work = Work.build(small("launch_multi_tensor_norm"))
    parts = rivals.call_of("foreach_norm", work)()
    assert torch.stack(parts).norm().item() == pytest.approx(work.call().item(), rel=1e-5)
    assert run.measure(small("launch_multi_tensor_norm"), [])["rivals"] == {"foreach_norm": 1000.0}


def test_every_case_has_launches_that_say_whether_its_number_is_of_todays_code():
    """Where somebody measures, it is too late to learn that a row cannot say what it is of."""
    bare = {name for name, case in cases.CASES.items() if not launches(case, TARGETS["sm_90"])}
    assert {name.partition("/")[0] for name in bare} == {"aten_host_fallback", "launch_scaled_mm_cublaslt"}


def test_a_rival_that_computes_something_else_gets_no_time(pretended, monkeypatch):
    monkeypatch.setitem(rivals.NAMED, "liar", lambda work: lambda: work.call() * 1.1)
    row = run.measure(small("rms_norm_fwd"), ["liar"])
    assert row["rivals"] == {} and row["absent"]["liar"] == "its result is another"


def test_a_case_without_its_goals_rival_has_no_value(pretended, monkeypatch):
    """Neither 0.0, which would be short, nor the rival's time of another day."""
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    row = run.measure(replace(small("rms_norm_fwd"), metric="vs:quack"), [])
    assert row["measured"] is None and row["rivals"] == {} and row["fraction"] == pytest.approx(0.8)
    assert row["absent"] == {"quack": "quack: quack is not installed (pip install quack-kernels)"}


def test_memory_is_the_rivals_bytes_over_ours(pretended):
    row = run.measure(replace(small("rms_norm_fwd"), metric="memory:eager"), [])
    assert row["extra_bytes"] == 7 and row["rival_bytes"] == {"eager": 21} and row["measured"] == pytest.approx(3.0)
    assert results.measured_by(0.9, results.rivals_of({**row, "extra_bytes": 0}), "memory:eager") == 21.0
    nothing = {**row, "extra_bytes": 0, "rival_bytes": {"eager": 0}}
    assert results.measured_by(0.9, results.rivals_of(nothing), "memory:eager") == 1.0
    assert results.measured_by(0.9, results.rivals_of({**row, "rival_bytes": {}}), "memory:eager") is None


@pytest.mark.parametrize("family", ["rms_norm_fwd", "rms_norm_bwd", "cross_entropy_bwd"])
def test_a_rival_is_measured_alone_over_arguments_as_they_were_drawn(family, pretended):
    """Also where our own call, which says how much there is to move, writes over one of them."""
    row = run.measure_alone(small(family), "eager")
    assert (
        row["rivals"] == {"eager": pytest.approx(5.0)} and row["absent"] == {} and row["rival_bytes"] == {"eager": 21}
    )
    with pytest.raises(Absent, match="within one process"):
        run.measure_alone(small("launch_rms_norm"), "eager")


def test_what_a_rival_raises_costs_the_rival_alone(pretended, monkeypatch):
    def broken(work):
        raise AssertionError("no such\nwidth")

    def not_there(work):
        raise ImportError("libcudart.so.12")

    monkeypatch.setitem(rivals.NAMED, "broken", broken)
    monkeypatch.setitem(rivals.NAMED, "not_there", not_there)
    row = run.measure(small("rms_norm_fwd"), ["not_there"])
    assert row["absent"] == {"not_there": "ImportError: libcudart.so.12"} and not row["spoiled"]
    row = run.measure(small("rms_norm_fwd"), ["broken", "eager"])
    assert row["absent"] == {"broken": "AssertionError: no such width"} and row["spoiled"] and "eager" in row["rivals"]


@pytest.mark.parametrize("off", [1.0, 1.05])
def test_a_result_that_goes_wrong_in_the_timed_run_gives_no_time(off, pretended, monkeypatch):
    """One with the bits of what was verified is not verified again."""
    seen = []
    verify, forward = Work.verify, Work.forward

    def counted(work, result):
        seen.append(1)
        return verify(work, result)

    def later_off(work):
        return lambda: forward(work, work.values)() * (off if seen else 1.0)

    monkeypatch.setattr(Work, "verify", counted)
    monkeypatch.setattr(Work, "call", property(later_off))
    if off == 1.0:
        assert run.measure(small("rms_norm_fwd"), [])["us"] > 0 and len(seen) == 1
        return
    with pytest.raises(check.Wrong, match="right when called alone, wrong in the timed run: "):
        run.measure(small("rms_norm_fwd"), [])


def test_same_bits_are_those_of_every_tensor():
    x = torch.tensor([1.0, 0.0, float("nan")])
    result = (x, None, torch.tensor(2), 3)
    known = check.copied(result)
    assert check.same_bits(result, known) and known[0] is not x
    for other in ((x, None, torch.tensor(2)), (x, None, torch.tensor(2), 4), (x.double(), None, torch.tensor(2), 3)):
        assert not check.same_bits(other, known)
    assert not check.same_bits((x * torch.tensor([1.0, -1.0, 1.0]), None, torch.tensor(2), 3), known)  # -0 is not 0
    codes, others = (tw.quantize(t, tw.fp8("1x128")) for t in (torch.randn(32, 128), torch.ones(32, 128)))
    assert check.same_bits(codes, check.copied(codes)) and not check.same_bits(others, check.copied(codes))


def test_rivals_are_named_when_they_are_absent(monkeypatch):
    monkeypatch.setitem(
        packaged.RIVALS, "nowhere", packaged.Rival("no_such_package_at_all", "no-such-package-at-all", {})
    )
    assert rivals.missing("eager") is None
    assert "pip install no-such-package-at-all" in rivals.missing("nowhere")
    work = Work.build(small("silu_fwd"), device="cpu")
    with pytest.raises(rivals.Absent, match="is not installed"):
        rivals.call_of("nowhere", work)
    assert isinstance(work.op, Op) and rivals.agrees(work.call(), rivals.call_of("eager", work)())
