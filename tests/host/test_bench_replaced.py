"""Cases of torch's operators, replaced, on a CPU, where they are aten's: what they are, what they must move, what passes the check,
how rivals are called. That they are ours is for the interpreter's test of the same name."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tests.pretended import measuring
from tilewright.aten import table
from tilewright.bench import cases, replaced, results, rivals, run, source, timing
from tilewright.bench.check import Wrong
from tilewright.bench.directed import Absent
from tilewright.bench.replaced import CALLS, Replaced, Word, error_of
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

EVERY = [case for case in cases.CASES.values() if case.suite == "aten"]
MB = 1 << 20
TINY = {"rows": 32, "columns": 48, "part": 5, "tokens": 40, "vocab": 30, "places": 7, "most": 60}
TINY |= {
    "batch": 2,
    "images": 1,
    "channels": 32,
    "height": 64,
    "width": 96,
}  # of images, of which pooling leaves rows and columns
TINY |= {"length": 20, "heads": 4, "kv_heads": 2, "head_dim": 16}
# The goals of operators that have a replacement, whose cases are here
STATED = {
    "aten_pointwise_flat", "aten_pointwise_broadcast", "aten_pointwise_transposed", "aten_transpose_copy", "aten_fused_chains",
    "aten_cat_odd", "aten_sum", "aten_sum_short", "aten_arg", "aten_var_mean", "aten_cumsum_inner", "aten_cumsum_outer",
    "aten_cumsum_tall", "aten_host_all", "aten_host_fallback", "aten_host_new_shape", "aten_memory_worst", "aten_all_256mb",
    "aten_flaggems_256mb", "aten_flaggems_host", "aten_embedding_bwd", "aten_index_accumulate", "aten_select", "aten_isin",
    "aten_topk", "aten_sort", "aten_random", "aten_auto_gain", "aten_auto_worst",
    "aten_auto_model", "aten_all_model",
}  # fmt: skip
STATED |= {
    "aten_softmax_inner", "aten_softmax_outer", "aten_layer_norm", "aten_layer_norm_bwd", "aten_group_norm", "aten_group_norm_bwd",
    "aten_batch_norm", "aten_weight_norm", "aten_product", "aten_pool",
}  # fmt: skip


def tiny(family: str, at: int = 0) -> cases.Case:
    return replace([case for case in EVERY if case.family == family][at], dims=TINY)


# ---- what they are ---------------------------------------------------------------------------------------------------


def test_every_goal_of_a_replaced_operator_has_cases():
    families = {case.family for case in EVERY}
    assert families & set(cases.GOALS) == STATED
    assert families - STATED == {"aten_all_4mb", "aten_all_4kb", "aten_host_4mb", "aten_choice", "aten_auto_decode"}
    assert all(
        case.op == "aten" and (case.call in CALLS or case.direction in ("memory", "worst", "model")) for case in EVERY
    )
    assert {case.call for case in EVERY} - {None} == set(CALLS)
    assert len({case.name for case in EVERY}) == len(EVERY)


def test_a_goal_for_several_calls_is_their_geometric_mean():
    stated = [case for case in EVERY if case.family == "aten_cumsum_inner"]
    assert [case.name for case in stated] == [f"aten_cumsum_inner/{n}_last/4096x8192" for n in ("cumsum", "cummax")]
    rows = [
        {"case": c.name, "gpu": "G", "triton": "3.6.0", "us": 1.0, "fraction": f} for c, f in zip(stated, (0.5, 0.98))
    ]
    goal = cases.GOALS["aten_cumsum_inner"]
    (one,) = results.standings([results.understand(row, {}, ()) for row in rows], [goal], EVERY)
    assert one.value == pytest.approx(0.7) and one.verdict == "reached"
    (one,) = results.standings([results.understand(rows[0], {}, ())], [goal], EVERY)
    assert one.value is None and one.verdict == "not measured"


@pytest.mark.parametrize(
    ("family", "least", "most"),
    [("aten_all_256mb", 256 * MB, 256 * MB), ("aten_all_4mb", 4 * MB, 4 * MB), ("aten_all_4kb", 4096, 4096),
     ("aten_host_all", 4096, 4096), ("aten_host_fallback", 4096, 4096), ("aten_flaggems_256mb", 128 * MB, 270 * MB),
     ("aten_pointwise_flat", 256 * MB, 256 * MB), ("aten_sum_short", 256 * MB, 256 * MB)],
)  # fmt: skip
def test_sizes_are_those_of_the_largest_operand(family, least, most):
    for case in (c for c in EVERY if c.family == family):
        words = [Word.read(word, case) for word in CALLS[case.call].tensors]
        largest = max(math.prod(word.shape) * word.dtype.itemsize for word in words)
        assert least <= largest <= most, case.name


# The cases that the goal "over the 40 cases of aten_wins.tsv" is about, and the case here that stands for each
WINS = list(csv.DictReader((cases.GOALS_FILE.parent / "aten_wins.tsv").open(newline=""), delimiter="\t"))
# Of the overloads of aten_wins.tsv, those that FlagGems has
BESIDE_FLAGGEMS = {
    "cumsum", "nll_loss_forward", "nll_loss2d_forward", "cummax", "cummin", "_softmax", "_log_softmax",
    "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "_weight_norm_interface",
    "_weight_norm_interface_backward", "add.Tensor", "mul.Tensor", "index_put_", "index_add", "index_add_",
    "isin.Tensor_Tensor", "topk", "masked_select", "count_nonzero", "avg_pool2d_backward", "cat", "addmv",
    "masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Tensor", "fill_.Tensor", "isclose", "isfinite", "isinf",
    "allclose", "mse_loss", "constant_pad_nd", "slice_scatter", "select_scatter",
}  # fmt: skip


def operator_of(overload: str) -> str:
    """In place or not."""
    return overload.partition(".")[0].strip("_")


def test_goals_over_the_cases_where_aten_is_slow_are_of_all_of_them():
    made = [case for case in EVERY if case.family == "aten_auto_gain"]
    standing = {row["bench case"] for row in WINS}
    assert len({row["case"] for row in WINS}) == len(standing) == 40 and standing <= {case.name for case in made}
    for row in WINS:
        kinds = replaced.kinds_of(cases.CASES[row["bench case"]], TARGETS["sm_90"])
        reached, said = [kind.overload for kind in kinds], row["overloads"].split(", ")
        assert set(map(operator_of, reached)) & set(map(operator_of, said)), row["case"]
        assert row["expected vs:aten"] == "no sync" or float(row["expected vs:aten"]) > 1.0, row["case"]
    assert {case.dtype for case in made if case.call == "transpose"} == {"bfloat16", "uint8"}
    assert [case.dtype for case in made if case.call == "addmv"] == ["float32"]
    beside = [case for case in EVERY if case.family == "aten_flaggems_256mb"]
    found = {kind.overload for case in beside for kind in replaced.kinds_of(case, TARGETS["sm_90"])}
    assert found >= BESIDE_FLAGGEMS and all(case.partial for case in beside)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [*((f"aten_{name}", "add sum softmax norm") for name in ("all_256mb", "all_4mb", "all_4kb", "host_4mb")),
     ("aten_host_all", "add sum softmax"), ("aten_host_fallback", "neg add sum softmax")],
)  # fmt: skip
def test_a_family_has_calls_of_each_kind_that_its_goal_names(family, kinds):
    calls = [case.call for case in EVERY if case.family == family]
    assert all(any(kind in call for call in calls) for kind in kinds.split()), calls


def test_a_mean_may_leave_out_calls_that_its_rival_does_not_make():
    stated = [case for case in EVERY if case.family == "aten_flaggems_256mb"]
    rows = [{"case": c.name, "gpu": "G", "triton": "3.6.0", "us": 1.0, "rivals": {"flaggems": 2.0}} for c in stated]
    goal = cases.GOALS["aten_flaggems_256mb"]

    def standing(rows: list[dict], of: list[cases.Case] = EVERY) -> results.Standing:
        return results.standings([results.understand(row, {}, ()) for row in rows], [goal], of)[0]

    lacking = {**rows[0], "rivals": {}, "absent": {"flaggems": "it has none"}}
    assert standing([lacking, *rows[1:]]).value == pytest.approx(2.0)
    assert standing(rows[1:]).value is None and standing([{**rows[0], "rivals": {}}, *rows[1:]]).value is None
    assert standing([{**lacking, "case": c.name} for c in stated]).verdict == "rival absent"
    whole = [replace(case, partial=False) for case in stated]
    assert standing([lacking, *rows[1:]], whole).verdict == "rival absent"


def test_what_a_call_writes_over_is_put_back():
    """Before it is checked, and after: results that lie on an argument are compared as they were."""
    work = Replaced.build(replace(tiny("aten_sum"), call="index_add_"), device="cpu")
    before = work.given[0].clone()
    result = work.call()
    assert result is work.given[0] and work.overwrites and not torch.equal(result, before)
    assert work.verify(result) < 0.01 and torch.equal(work.given[0], before)
    work.call()
    with pytest.raises(Wrong):  # of the second call over what the first left
        work.verify(work.call())


def test_compulsory_bytes():
    """Read once and written once: of a triangle half is read, and of a row of numbers the row."""
    elements = 32 * 48
    wanted = {
        "add": (4 * elements, 2 * elements), "add_row": (2 * elements + 96, 2 * elements), "triu": (elements, 2 * elements),
        "isclose": (4 * elements, elements), "masked_fill": (3 * elements, 2 * elements), "sum_last": (2 * elements, 64),
        "max_first": (2 * elements, 48 * 10), "mse_loss": (4 * elements, 2), "stack": (4 * elements, 4 * elements),
        "repeat": (2 * elements, 8 * elements), "slice_scatter": (2 * elements + 320, 2 * elements),
    }  # fmt: skip
    for name, moved in wanted.items():
        work = Replaced.build(replace(tiny("aten_sum"), call=name), device="cpu")
        assert work.traffic(work.call()) == moved, name
        assert work.result_bytes(work.call()) == moved[1], name


def test_what_words_say_of_tensors():
    work = Replaced.build(replace(tiny("aten_sum"), call="isclose"), device="cpu")
    assert 0.3 < (work.given[0] == work.given[1]).float().mean() < 0.7 and work.given[0].dtype == torch.bfloat16
    assert 0.3 < Replaced.build(replace(tiny("aten_sum"), call="isfinite"), device="cpu").call().float().mean() < 0.7
    assert Replaced.build(replace(tiny("aten_sum"), call="pow"), device="cpu").given[0].min() > 0
    assert not torch.equal(*(Replaced.build(tiny("aten_sum"), seed, "cpu").given[0] for seed in (0, 1)))


# ---- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_atens_own_result_passes_and_damaged_ones_do_not(name):
    work = Replaced.build(replace(tiny("aten_sum"), call=name), device="cpu")
    result = work.apart(work.call())
    assert 0.0 <= work.verify(result) < 0.01
    for at, own in enumerate(result):
        for damaged in damages(own):
            with pytest.raises(Wrong):
                work.verify([*result[:at], damaged, *result[at + 1 :]])
    with pytest.raises(Wrong, match="results, not"):
        work.verify([*result, result[0]])


def test_attention_is_exact_a_sequence_at_a_time():
    """By the formula over all sequences at once; and aten's operator is called as torch declares it."""
    work = Replaced.build(replace(tiny("aten_sum"), call="attention_shared_causal"), device="cpu")
    q, k, v = (t.double().transpose(1, 2) for t in work.given)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    o, lse = work.function(*map(replaced.doubled, work.given))
    torch.testing.assert_close(o, wanted)
    scores = (q @ k.repeat_interleave(2, 1).mT / 4.0).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    blank = work.function(*(t.to("meta") for t in work.given))
    assert [(t.shape, t.dtype, t.stride()) for t in blank] == [(t.shape, t.dtype, t.stride()) for t in work.call()]


def damages(own: torch.Tensor | bool) -> list[torch.Tensor | bool]:
    """Results with one element wrong, or of another dtype or shape, or lying otherwise."""
    if isinstance(own, bool):
        return [not own]
    made = [own.clone() for _ in range(3)]
    first, last = (0,) * own.dim(), (-1,) * own.dim()
    if own.dtype == torch.bool:
        made[0][first] ^= True
    elif own.is_floating_point():
        made[0][first] = float("nan")
        made[1][last] += 0.1 * (own.abs().max() + 1)
    else:
        made[0][last] += 1
    otherwise = own.t().contiguous().t() if own.is_contiguous() and own.dim() == 2 else own.contiguous()
    others = [own.double() if own.dtype != torch.float64 else own.float(), own.unsqueeze(0)]
    return [t for t in made if not torch.equal(t, own)] + others + [otherwise] * (otherwise.stride() != own.stride())


def test_an_error_is_held_to_atens():
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)
    aten = truth.bfloat16()
    assert error_of(aten, aten, truth) < 2e-3
    off = (truth * (1 + 2.0**-6)).bfloat16()  # every element is two steps off
    with pytest.raises(Wrong, match="an element is off"):
        error_of(off, aten, truth)


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_case_is_timed_beside_aten_and_its_floor(monkeypatch):
    measuring(monkeypatch)
    row = run.measure(replace(tiny("aten_pointwise_flat"), beside=[]), ["aten", "eager"])
    assert row["us"] == pytest.approx(5.0) and row["fraction"] == row["measured"] == pytest.approx(0.8)
    assert row["rivals"] == {"aten": pytest.approx(5.0), "eager": pytest.approx(5.0)} and not row["absent"]
    row = run.measure(tiny("aten_all_256mb"), [])
    assert row["measured"] == pytest.approx(1.0)
    monkeypatch.setattr(timing, "time_host_each", lambda calls: [10.0, 8.0])
    for family in ("aten_host_all", "aten_host_fallback", "aten_host_new_shape"):
        assert run.measure(tiny(family), [])["measured"] == pytest.approx(0.8), family


def test_the_overload_whose_memory_is_worst_counts(monkeypatch):
    measuring(monkeypatch)
    (case,) = cases.select(["aten_memory_worst"])
    every = replaced.overloads(replace(case, dims={"times": 2}), "cpu")
    some = [one for one in every if one[0] in ("allclose", "clone", "exp_", "neg")]
    extra = {"clone": (5, 3), "neg": (9 << 20, 2)}
    monkeypatch.setattr(replaced, "overloads", lambda case: iter(some))
    monkeypatch.setattr(run, "extra_bytes", lambda work, call=None: extra.get(*work.names, (0, 0))[call is not None])
    monkeypatch.setattr(timing, "time_host_each", lambda calls: [10.0, 8.0])
    row = run.measure(case, [])
    assert row["note"] == "the worst of 4 overloads: neg" and row["extra_bytes"] == 9 << 20
    assert row["measured"] == pytest.approx((2 + MB) / (9 * MB), rel=1e-6)


def test_what_calls_are_made_inside_of_is_entered_once_for_a_graph():
    entered: list[str] = []

    @contextlib.contextmanager
    def inside():
        entered.append("in")
        yield
        entered.append("out")

    calls = [timing.Within(lambda: entered.append("call"), inside) for _ in range(2)]
    with timing.entered(calls) as own:
        for call in own:
            call()
    calls[0]()
    assert entered == ["in", "call", "call", "out", "in", "call", "out"]


# ---- rivals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gems(monkeypatch) -> list[str]:
    """FlagGems as far as it is called, as 5.0.2 has it: a block may be entered once, and not inside another."""
    seen: list[str] = []
    made = ModuleType("flag_gems")
    made.__spec__ = importlib.util.spec_from_loader("flag_gems", None)

    class use_gems:
        def __enter__(self) -> None:
            assert seen.count("in") == seen.count("out") and not hasattr(self, "used")
            seen.append("in")

        def __exit__(self, *_: object) -> None:
            self.used = True
            seen.append("out")

    made.use_gems, made.all_registered_keys = use_gems, lambda: ["add.Tensor", "copy_", "sum.dim_IntList"]
    monkeypatch.setitem(sys.modules, "flag_gems", made)
    return seen


def test_flaggems_is_called_inside_of_its_own_block(gems, monkeypatch):
    measuring(monkeypatch)
    work = Replaced.build(tiny("aten_sum"))
    call = rivals.call_of("flaggems", work)
    assert gems == ["in", "out"] and torch.equal(call(), work.plain())
    row = run.measure(replace(tiny("aten_sum"), metric="vs:flaggems", beside=[]), ["aten"])  # torch.compile takes 20 s
    assert row["measured"] == pytest.approx(1.0) and gems.count("in") == gems.count("out")


def test_flaggems_is_absent_where_it_has_nothing_of_a_call(gems):
    work = Replaced.build(tiny("aten_transpose_copy"), device="cpu")  # a clone, which it has not, calls what it has
    assert torch.equal(rivals.call_of("flaggems", work)(), work.plain())
    with pytest.raises(Absent, match=r"flaggems has none of .*cumsum"):
        rivals.call_of("flaggems", Replaced.build(tiny("aten_cumsum_inner"), device="cpu"))
    with pytest.raises(Absent, match="no call of torch's operators"):
        rivals.call_of(
            "aten", run.build(replace(cases.CASES["silu_fwd/8192x2048"], dims={"tokens": 2, "hidden": 8}), 0, "cpu")
        )


def test_torch_compile_is_of_the_plain_call(monkeypatch):
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: made.append((function, given)) or function)
    rivals._compiled_once.cache_clear()
    for seed in (0, 1):  # of all buffer sets once
        work = Replaced.build(tiny("aten_sum"), seed, "cpu")
        assert torch.equal(rivals.call_of("compile", work)(), work.plain())
    assert made == [(work.function, {"dynamic": False})]
    other = Replaced.build(tiny("aten_sum", 1), device="cpu")
    rivals.call_of("compile", other)
    assert made[1:] == [(other.function, {"dynamic": False})]
    rivals._compiled_once.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "factor", "timed"), [("bfloat16", 1.2, True), ("bfloat16", 0.0, False), ("float32", 1.2, False)]
)
def test_a_rival_that_rounds_after_each_addition_is_timed(dtype, factor, timed, monkeypatch):
    """aten is 0.14 off where it adds in bf16: a case that is about such sums would have no rival."""
    measuring(monkeypatch)
    monkeypatch.setitem(rivals.NAMED, "rough", lambda work: lambda: work.plain() * factor)
    for at in range(3):
        row = run.measure(replace(tiny("aten_index_accumulate", at), dtype=dtype), ["rough"])
        assert ("rough" in row["rivals"]) == timed and "aten" in row["rivals"], row
    assert rivals.bar("aten", Replaced.build(tiny("aten_sum"), device="cpu")) == rivals.LOOSE


def test_some_cases_are_timed_beside_torch_compile():
    beside = {case.family for case in EVERY if "compile" in case.beside}
    sizes = {"aten_all_4kb", "aten_all_4mb", "aten_all_256mb"}
    assert beside == {"aten_pointwise_flat", "aten_sum", "aten_softmax_inner", "aten_softmax_outer", *sizes}
    assert all({"compile", "flaggems"} <= {*case.beside} for case in EVERY if case.family in sizes)
    large = max(math.prod(case.dims.values()) for case in EVERY if "compile" in case.beside)
    assert large <= 1 << 27  # 256 MB of bf16: what is larger would take seconds


# ---- which code ------------------------------------------------------------------------------------------------------


def test_a_cases_code_is_that_of_its_kernels():
    target = TARGETS["sm_90"]
    for case in {(case.family, case.call, case.dtype): case for case in EVERY}.values():
        names = [wanted.kernel.name for wanted in replaced.launches(case, target)]
        assert bool(names) != bool(case.options.get("declined")), case.name
    (memory,) = cases.select(["aten_memory_worst"])
    launched = {wanted.kernel.name for wanted in replaced.launches(memory, target)}
    assert {"pointwise_flat", "pointwise_tiles", "reduce_tiles", "scan_tiles", "patch", "band", "ramp"} <= launched
    one, other = (cases.CASES[f"aten_all_256mb/{name}/16384x8192"] for name in ("add", "gelu"))
    assert source.digest(one, target) != source.digest(other, target)


def test_the_net_compiles_few_variants_of_an_overload(monkeypatch):
    """What the samples of the GPU's net compile, for all overloads and dtypes together: three for each at most."""
    from tests.aten import samples  # slow to import
    from tests.aten.test_opinfo import MOST, NAMES

    monkeypatch.setattr(samples, "DEVICE", "cpu")
    kinds: set[tuple] = set()
    variants: set[tuple] = set()

    def noted(name, form):
        def call(*args, **kwargs):
            with collect() as found, pretend(TARGETS["sm_90"]):
                made = form(*args, **kwargs)
            tensors = [t.dtype for t in replaced.flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]
            kinds.add((name, *tensors))
            variants.update((w.kernel.name, w.kernel.key(w.ordered, w.options, 0)) for w in found)
            return made

        return call

    forms = {name: noted(name, form) for name, form in table.FORMS.items()}
    for name in NAMES:
        for dtype in samples.dtypes_of(name):
            for one in samples.samples(name, dtype, MOST):
                with contextlib.suppress(Exception), replaced.Routing(forms):
                    samples.ENTRIES[name](one.input, *one.args, **one.kwargs)
    assert len(kinds) > 200 and len(variants) <= 3 * len(kinds), f"{len(variants)} of {len(kinds)}"
