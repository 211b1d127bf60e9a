"""Mode "auto": what measurements say, which calls are ours by them, and what a program's own calls change."""

from __future__ import annotations

import importlib
import json
import re
import sys
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import tilewright as tw
from tests.aten.declined import declined
from tilewright.aten import observed, router, signature, table, verdicts
from tilewright.aten.observed import Calls
from tilewright.aten.row import Declined
from tilewright.aten.signature import Signature, signature_of
from tilewright.aten.verdicts import Place, Verdicts
from tilewright.core.tensor import name_of

HERE = Place.here()
GPU = HERE.gpu
ABOUT = {"gpu": GPU, "torch": str(torch.__version__), "triton": "", "version": tw.__version__, "date": "2026-11-17"}
KB, MB = 1 << 10, 1 << 20
SIZES = 4 * KB, 4 * MB, 256 * MB
FLAT = Calls(GPU, {Signature("neg", "float32", "1 flat", 4 * KB): 1})


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {name: torch._C._dispatch_dump(f"aten::{name}") for name in table.FORMS}
    yield
    assert not router._active and not router._wanted
    assert {name: torch._C._dispatch_dump(f"aten::{name}") for name in table.FORMS} == before


def cell(
    overload: str = "neg", nbytes: int = 4 * KB, least: float = 2.0, dtype: str = "float32", layout: str = "1 flat", **more: Any
) -> dict[str, Any]:  # fmt: skip
    """A row of which ours takes 10 us, and aten's `least` times that for certain."""
    times = {"own": 10.0, "aten": 10.0 * least, "least": least}
    kind = {"overload": overload, "dtype": dtype, "layout": layout, "bytes": nbytes}
    return {**kind, "eager": times, "graph": times, **ABOUT, "triton": HERE.triton, "source": "0", **more}


def fallback(us: float, call: str = "neg") -> dict[str, Any]:
    return {**ABOUT, "triton": HERE.triton, "call": call, "own": 2.0 + us, "aten": 2.0}


def cells(leasts: list[float], overload: str = "neg", **more: Any) -> list[dict[str, Any]]:
    return [cell(overload, size, least, **more) for size, least in zip(SIZES, leasts)]


def both(leasts: list[float], overload: str = "neg", layout: str = "1 flat") -> list[dict[str, Any]]:
    return [row for dtype in ("float32", "bfloat16") for row in cells(leasts, overload, dtype=dtype, layout=layout)]


def whole(leasts: list[float], overload: str = "neg") -> list[dict[str, Any]]:
    """Rows of contiguous operands and of slow ones."""
    return [row for layout in ("1 flat", "1 turned") for row in both(leasts, overload, layout)]


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Callable[..., None]:
    """A function that puts lines into this place's table."""
    monkeypatch.setattr(verdicts, "SHIPPED", tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "own"))

    def put(*lines: dict | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        verdicts.path_of(HERE.arch).write_text("".join(f"{text}\n" for text in texts))
        verdicts.table.cache_clear()

    yield put
    verdicts.table.cache_clear()


# ---- kinds of call ---------------------------------------------------------------------------------------------------


def described(name: str, *args: Any, **kwargs: Any) -> tuple[str, str, int]:
    return signature_of(name, args, kwargs)[1:]


def test_kinds_of_call():
    x, row, wide = torch.ones(4, 6), torch.ones(6), torch.ones(4, 6, dtype=torch.bfloat16)
    assert described("add.Tensor", x, x) == ("float32", "2 flat", 192)
    assert described("add.Tensor", x, row) == ("float32", "2 broadcast", 120)
    assert described("add.Tensor", x, 2.0) == ("float32", "1 flat", 96)
    assert described("add.Tensor", x, x.t().contiguous().t()) == ("float32", "2 turned", 192)
    assert described("add.Tensor", x, wide[:, ::2].repeat(1, 2)[:, ::2]) == ("float32+bfloat16", "2 strided", 120)
    assert described("where.self", x > 0, x, x)[0] == "bool+float32"
    assert described("cat", [x, x], 1)[1] == "2 flat, dim last"
    assert described("cat", [x, x])[1] == described("cat", [x, x], 0)[1] == "2 flat, dim first"
    assert described("_weight_norm_interface", x, row[:4, None].clone())[1] == "2 broadcast, dim first"
    assert described("topk", x, 3, 0) == ("float32", "1 flat, k=3, dim first", 96)
    assert described("mean.dim", x, [0], dtype=torch.float64)[1] == "1 flat, dim first, dtype=float64"
    index = torch.zeros(4, dtype=torch.int64)
    assert described("index_put_", x, [index], x, accumulate=True) == (
        "float32+int64", "3 broadcast, accumulate=True", 224)  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "rank", "word"),
    [(0, 3, "first"), (-1, 3, "last"), (1, 3, "middle"), ([0, 1], 3, "first"), ([1, -1], 3, "last"), ([0, 2], 3, "middle"),
     (None, 2, "all"), ([], 2, "all"), (0, 1, "all"), ([0, 1], 2, "all"), (0, 0, "all")],
)  # fmt: skip
def test_places_of_dimensions(dims, rank, word):
    assert signature.place(dims, rank) == word


# ---- what rows say ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leasts", "verdict", "least"),
    [
        ([1.0, 1.06, 2.0], "closed", 0), ([1.5, 1.04, 1.0], "closed", 0), ([0.99, 1.06, 2.0], "sized", 4 * MB),
        ([0.99, 0.5, 2.0], "sized", 256 * MB), ([2.0, 0.99, 2.0], "sized", 256 * MB), ([2.0, 2.0, 0.99], "never", None),
        ([1.04, 1.04, 1.04], "never", None), ([0.5, 1.0, 1.04], "never", None),
    ],
)  # fmt: skip
def test_verdicts(leasts, verdict, least):
    found = Verdicts(HERE, whole(leasts))
    rule = found.rules["neg"]["float32", "1 flat"]
    assert found.verdict("neg") == verdict and (None if rule is None else rule.least) == least
    assert found.chosen() == ({"neg"} if verdict == "closed" else set())


def test_what_is_closed_is_so_in_every_kind():
    wins, loses = [2.0, 2.0, 2.0], [0.9, 2.0, 2.0]

    def verdict(*lists: list[dict[str, Any]]) -> str:
        return Verdicts(HERE, [row for rows in lists for row in rows]).verdict("neg")

    assert verdict(whole(wins)) == "closed"
    assert verdict(cells(wins), cells(wins, layout="1 turned")) == "sized"  # bf16 is not measured
    assert verdict(both(wins), cells(wins, layout="1 turned")) == "sized"  # nor is it of slow operands
    integers = [cells(wins, dtype="int64", layout=layout) for layout in ("1 flat", "1 strided")]
    assert verdict(*integers) == "closed" and verdict(integers[0]) == "sized"
    assert verdict(whole(wins)[1:]) == "sized"  # nor is the smallest size
    assert verdict(both(wins), both(loses, layout="1 turned")) == "sized"
    before = [{**row, "torch": "1.0.0"} for row in whole(wins)]
    assert verdict(before) == "closed" and verdict(before, [cell(least=0.9, torch="1.1.0")]) == "sized"
    assert Verdicts(HERE, whole(wins)).verdict("exp") == "never"


@pytest.mark.parametrize(
    ("layouts", "verdict"),
    [
        (["1 flat"], "sized"), (["2 broadcast"], "sized"), (["1 turned"], "sized"), (["1 strided"], "sized"),
        (["1 flat", "1 strided"], "closed"), (["2 broadcast", "2 turned, dim last"], "closed"),
        (["1 flat, dim last", "1 flat, dim first"], "closed"), (["1 flat, dim all", "1 flat, dim middle"], "closed"),
        (["1 flat, dim first"], "sized"), (["1 flat, dim last", "1 flat, dim all"], "sized"),
    ],
)  # fmt: skip
def test_what_is_closed_was_measured_of_contiguous_operands_and_of_slow_ones(layouts, verdict):
    rows = [row for layout in layouts for row in both([2.0] * 3, layout=layout)]
    assert Verdicts(HERE, rows).verdict("neg") == verdict


def test_what_is_closed_was_measured_in_the_floats_that_it_takes():
    """An overload that takes one of them alone is not asked for the other."""
    for name in table.FORMS:
        takes = {name_of(dtype) for dtype in (torch.bfloat16, torch.float32)} - set(map(name_of, declined(name)))
        assert not takes or takes == verdicts.ONLY.get(name, verdicts.FLOATS), name
    rows = [cells([2.0] * 3, "neg", dtype="bfloat16", layout=layout) for layout in ("3 flat", "3 turned")]
    assert Verdicts(HERE, [*rows[0], *rows[1]]).verdict("neg") == "sized"
    own = [{**row, "overload": "_flash_attention_forward"} for lines in rows for row in lines]
    assert Verdicts(HERE, own).verdict("_flash_attention_forward") == "closed"
    assert Verdicts(HERE, own[:3]).verdict("_flash_attention_forward") == "sized"  # nothing of slow operands


def test_either_way_of_calling_counts():
    slow = {"own": 10.0, "aten": 9.0, "least": 0.8}
    assert not any(Verdicts(HERE, [cell(graph=slow)]).rules["neg"].values())
    assert not any(Verdicts(HERE, [cell(eager=slow)]).rules["neg"].values())
    assert any(Verdicts(HERE, [cell(graph=None)]).rules["neg"].values())


def test_rows_of_another_place_do_not_count():
    for other in ({"gpu": "another"}, {"version": "0.0.0"}):
        assert not Verdicts(HERE, [{**row, **other} for row in both([2.0] * 3)]).rules
    before = {"torch": "1.0.0"}
    near, far = ([{**row, **before} for row in whole([least] * 3)] for least in (1.29, 1.31))
    assert Verdicts(HERE, near).verdict("neg") == "never"
    assert Verdicts(HERE, far).verdict("neg") == "closed" and "torch 1.0" in Verdicts(HERE, far).foreign("neg")
    assert (
        Verdicts(HERE, [*far[1:], {**near[0], "bytes": 4 * MB}]).verdict("neg") == "sized"
    )  # it is a loss, not absent
    assert Verdicts(HERE, both([2.0] * 3)).foreign("neg") is None


def test_rows_of_this_release_replace_those_of_another(rows):
    """Of a kind of call and a size, whichever come first, and of what falling back costs; the table keeps both."""
    before = {"torch": "1.0.0", "source": "1"}
    foreign = [{**row, **before} for row in whole([1.29] * 3)]
    own = whole([2.0] * 3)
    for lines in ([*foreign, *own], [*own, *foreign]):
        rows(*lines, {**fallback(9.0), "torch": "1.0.0"}, fallback(2.0))
        found = Verdicts.here()
        assert found.verdict("neg") == "closed" and found.foreign("neg") is None and found.fallback_us == 2.0
        assert len(verdicts.table(HERE.arch)) == len(lines) + 2
        there = Verdicts(HERE._replace(torch="1.0"), verdicts.table(HERE.arch))
        assert there.rules["neg"]["float32", "1 flat"].gains[0][1] == pytest.approx(2.9) and there.fallback_us == 9.0
    found = Verdicts(HERE, [*foreign, *own[1:]])  # one size is not measured anew
    assert found.verdict("neg") == "sized" and "torch 1.0" in found.foreign("neg")


def test_a_row_of_another_release_that_stays_is_noticed(rows, monkeypatch):
    own = verdicts.subject
    monkeypatch.setattr(verdicts, "subject", lambda row: (*own(row), row["torch"]))
    with pytest.raises(AssertionError):
        test_rows_of_this_release_replace_those_of_another(rows)


def test_a_gain_is_that_of_the_next_smaller_size():
    found = Verdicts(HERE, both([0.9, 2.0, 3.0]))
    for nbytes, us in ((4 * MB, 10.0), (255 * MB, 10.0), (256 * MB, 20.0), (1 << 40, 20.0)):
        assert found.gain(Signature("neg", "float32", "1 flat", nbytes)) == pytest.approx(us)
    for dtype, nbytes, why in (
        ("float32", 4 * MB - 1, "below 4194304 bytes"),
        ("int8", MB, "nothing is measured of int8"),
    ):
        with pytest.raises(Declined, match=why):
            found.gain(Signature("neg", dtype, "1 flat", nbytes))


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "3", '{"overload": "neg"}', {**cell(), "bytes": "4"}, {**cell(), "bytes": -1}, {**cell(), "eager": None},
        {**cell(), "graph": {"own": 1.0, "aten": 2.0}}, {**cell(), "extra": 1}, {**cell(), "gpu": 1},
        {**cell(), "eager": {"own": 1.0, "aten": 2.0, "least": 3.0}}, {**cell(), "eager": {"own": 0, "aten": 2.0, "least": 1.0}},
        {**fallback(3.0), "own": True},
    ],
)  # fmt: skip
def test_a_damaged_row_is_ignored(line, rows):
    rows(line, cell())
    with pytest.warns(UserWarning, match=r"1 damaged row\(s\) ignored"):
        assert list(verdicts.table(HERE.arch)) == [cell()]


def test_rows_of_the_user_replace_shipped_ones(rows, tmp_path):
    (tmp_path / "own" / "tilewright").mkdir(parents=True)
    mine = tmp_path / "own" / "tilewright" / verdicts.path_of(HERE.arch).name
    rows(cell(), cell(nbytes=4 * MB))
    mine.write_text(verdicts.text_of([cell(least=0.5, source="other kernels")]))
    assert [row["eager"]["least"] for row in verdicts.table(HERE.arch)] == [2.0, 0.5]
    mine.chmod(0o666)
    verdicts.table.cache_clear()
    with pytest.warns(UserWarning, match="writable by you alone"):
        assert len(verdicts.table(HERE.arch)) == 2 and verdicts.table(HERE.arch)[0]["eager"]["least"] == 2.0
    with pytest.raises(ValueError, match="other fields"):
        verdicts.text_of([{"overload": "neg"}])


# ---- whose calls -----------------------------------------------------------------------------------------------------


def test_without_rows_nothing_is_replaced_and_it_says_so(rows):
    said = "nothing is measured in the interpreter, .* on a GPU `tilewright bench"
    with pytest.warns(UserWarning, match=said) as found, tw.aten.use("auto"):
        assert tw.aten.report() == {}
    assert found[0].filename == __file__
    how = "nothing is measured on G: `tilewright bench aten --record` measures it, which takes minutes"
    assert Verdicts(Place("sm_80", "G"), []).silence([]) == how
    rows(*both([0.5, 2.0, 2.0]), *whole([2.0] * 3, "exp"))
    for given, count, why in (
        ({"include": "neg"}, 1, "is closed: see `tw.aten.observe`. Mode 'all' replaces whatever can be"),
        ({"exclude": ["neg", "exp"]}, 0, "is closed"),
        ({"include": "neg", "observed": Calls(GPU)}, 1, "pays for the calls that were observed"),
    ):
        with pytest.warns(UserWarning, match=f"of {count} overloads .* and measured on {GPU} none {why}"):
            tw.aten.enable("auto", **given)
        assert not tw.aten.report()
        tw.aten.disable()


def test_a_choice_is_the_default(rows):
    """Of `enable` and of `use`; where nothing is measured they replace nothing, say so once, and how to measure."""
    rows()
    for begin in (tw.aten.enable, tw.aten.use):
        with pytest.warns(UserWarning, match=r"nothing is measured .*`tilewright bench .* Mode 'all'") as said:
            block = begin() or nullcontext()
        with block:
            assert len(said) == 1 and said[0].filename == __file__ and tw.aten.report() == {}
        tw.aten.disable()
    rows(*whole([2.0] * 3), *both([0.5, 2.0, 2.0], "exp"), fallback(1.0))
    with tw.aten.use():
        assert tw.aten.report().keys() == {"neg"} and tw.aten.report()["neg"]["verdict"] == "closed"
    tw.aten.enable(observed=Calls(GPU, {Signature("exp", "float32", "1 flat", 4 * MB): 1}), exclude="neg")
    assert tw.aten.report().keys() == {"exp"}
    with pytest.raises(ValueError, match="mode 'auto' is in force"):
        tw.aten.enable("all")
    tw.aten.disable()


def test_what_is_closed_is_ours_in_all_that_its_row_takes(rows):
    """Of whatever dtype, layout and size, measured or not: a call that were declined would be slower than without us."""
    rows(*whole([2.0] * 3), fallback(3.0), *both([0.5, 2.0, 2.0], "exp"))
    x = torch.randn(4, 6)
    others = (x[:, ::2], x.int(), x.half(), x.double())  # of which nothing is measured
    with tw.aten.use("auto"):
        for _ in range(4):
            assert torch.equal(torch.neg(x), -1 * x)
        for other in (x.t(), *others):
            assert torch.equal(torch.neg(other), -1 * other)
        torch.neg(torch.complex(x, x))
        said = tw.aten.report()
    assert said.keys() == {"neg"} and said["neg"]["verdict"] == "closed"
    assert said["neg"]["taken"] == 5 + len(others) and sum(said["neg"]["declined"].values()) == 1
    assert "complex64" in next(iter(said["neg"]["declined"]))
    # What is not measured gains nothing that is known
    assert said["neg"]["gained_us"] == pytest.approx(5 * 10.0 - 3.0) and "note" not in said["neg"]
    with tw.aten.use("auto", include=["neg", "exp"]):
        assert tw.aten.report().keys() == {"neg"}
    unmeasured = Signature("neg", "int8", "1 flat", 64)
    with tw.aten.use("auto", observed=Calls(GPU, {unmeasured: 3})):
        assert tw.aten.report().keys() == {"neg"}


def test_a_closed_overload_that_declines_what_is_not_measured_is_noticed(rows, monkeypatch):
    monkeypatch.setattr(Verdicts, "closed", frozenset({"nothing"}))
    with pytest.raises(AssertionError):
        test_what_is_closed_is_ours_in_all_that_its_row_takes(rows)


def test_a_predicate_on_bytes(rows):
    """On either side of the smallest size that wins, by every way through the router: first call, plan, guard."""
    rows(*[{**row, "bytes": row["bytes"] // KB} for row in both([0.5, 2.0, 2.0])], fallback(1.0))
    calls = Calls(GPU, {Signature("neg", "float32", "1 flat", 4 * KB): 10})
    with tw.aten.use("auto", observed=calls):
        for count, times in ((1023, 4), (1024, 4), (1025, 4)):
            x = torch.ones(count)
            for _ in range(times):
                torch.neg(x)
        said = tw.aten.report()["neg"]
    assert said["taken"] == 8 and said["verdict"] == "sized"
    assert said["declined"] == {"fewer than 4096 bytes, from which on ours are known to be faster": 4}


def test_a_predicate_on_bytes_of_each_kind(rows):
    """Of two kinds of call the one is ours from fewer bytes on."""
    small = [{**row, "bytes": row["bytes"] // KB} for row in both([0.5, 2.0, 2.0])]
    large = [{**row, "bytes": row["bytes"] // KB} for row in both([0.5, 0.5, 2.0], layout="1 turned")]
    rows(*small, *large, fallback(1.0))
    kind = Signature("neg", "float32", "1 flat", 4 * KB)
    with tw.aten.use("auto", observed=Calls(GPU, {kind: 10})):
        for x in (torch.ones(32, 32), torch.ones(40, 32).t(), torch.ones(2, 3), torch.ones(256, 256).t()):
            torch.neg(x)
        said = tw.aten.report()["neg"]
    assert said["taken"] == 2 and said["declined"] == {
        "aten is as fast at float32, 1 turned below 262144 bytes": 1,
        "fewer than 4096 bytes, from which on ours are known to be faster": 1,
    }


def test_a_predicate_costs_a_few_calls_of_a_function():
    """Half a microsecond, where one that does nothing takes a tenth: the part of falling back that a small call pays for."""
    x = torch.ones(8, 8)

    def nothing(values: tuple, least: int) -> bool:
        return False

    def least_of(call: Callable[..., bool]) -> float:
        return min(timeit.repeat(lambda: call((x, x), 4096), number=2000, repeat=9))

    assert router.below((x, x), 4096) and not router.below((x, x), 512) and not router.below(([None, x, x],), 512)
    assert least_of(router.below) < 10 * least_of(nothing)


def test_a_predicate_that_is_off_by_a_bucket_is_noticed(rows, monkeypatch):
    own = verdicts.rule_of

    def off(found, place):
        rule = own(found, place)
        return rule and rule._replace(least=min(size for size, _ in rule.gains) // KB)

    monkeypatch.setattr(verdicts, "rule_of", off)
    with pytest.raises(AssertionError):
        test_a_predicate_on_bytes(rows)


def test_the_innermost_block_says_which_calls_are_ours(rows):
    rows(*both([2.0] * 3))
    small, turned = torch.ones(2, 3), torch.ones(3, 2).t()
    with tw.aten.use("all", include="neg"):
        torch.neg(turned)
        with tw.aten.use("auto", observed=FLAT):
            for _ in range(3):
                torch.neg(turned)
                torch.neg(small)
            assert tw.aten.report()["neg"]["taken"] == 4
        torch.neg(turned)
        assert tw.aten.report()["neg"]["taken"] == 5 and "verdict" not in tw.aten.report()["neg"]


def test_explaining_a_call(rows):
    rows(*both([2.0] * 3))
    x = torch.ones(2, 3)
    with tw.aten.use("auto", observed=FLAT):
        assert tw.aten.explain("neg", x) == "neg: ours, by the engine pointwise"
        assert tw.aten.explain("neg", x.t()) == "neg: aten's, because of nothing is measured of float32, 1 turned"
        assert tw.aten.report()["neg"]["taken"] == 0


def test_two_modes_are_not_in_force_at_once(rows):
    rows(*whole([2.0] * 3))
    for one, other in (("all", "auto"), ("auto", "all")):
        tw.aten.enable(one, include="neg")
        with pytest.raises(ValueError, match=f"mode '{one}' is in force"):
            tw.aten.enable(other, include="neg")
        tw.aten.disable()


def test_the_example_trains_as_without(monkeypatch, capsys):
    """In the interpreter, whose calls are a CPU's."""
    monkeypatch.setattr(sys, "argv", ["aten.py", "--steps", "2", "--mode", "all"])
    importlib.import_module("examples.aten").main()
    out = capsys.readouterr().out
    pairs = re.findall(r"^step \d: loss ([\d.]+), replaced ([\d.]+)$", out, re.M)
    assert len(pairs) == 2 and all(abs(float(plain) - float(ours)) < 2e-5 for plain, ours in pairs)
    assert re.search(r"^_softmax: 2 ours$", out, re.M) and re.search(r"^embedding_dense_backward: 2 ours$", out, re.M)


# ---- a program's own calls -------------------------------------------------------------------------------------------


def test_calls_are_counted_by_kind():
    x = torch.randn(8, 8, requires_grad=True)
    with tw.aten.observe() as calls:
        for _ in range(3):
            torch.softmax(x, 0).square().sum().backward()
        torch.full((3,), 2.0)
        torch.linalg.det(torch.eye(3))
    counts = {(call.overload, call.layout): count for call, count in calls.counts.items()}
    assert counts["_softmax", "1 flat, dim first"] == counts["sum", "1 flat"] == 3
    assert counts["fill_.Scalar", "1 flat"] == 1  # which `full` calls
    assert any(call.overload == "_softmax_backward_data" for call in calls.counts)
    assert calls.others["_linalg_det"] == 1 and calls.gpu == GPU
    assert {call.bytes for call in calls.counts if call.overload == "_softmax"} == {256}


@contextmanager
def flash_attention_of_a_processor() -> Iterator[None]:
    """In the place of torch's kernel, which there is for GPUs alone: it calls what that calls, out of a dispatch mode's sight."""

    def kernel(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        turned = [t.transpose(1, 2) for t in (query, key, value)]
        sizes = query.shape[2], key.shape[2]
        o, lse, *state = torch.ops.aten._flash_attention_forward(
            *turned, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale
        )
        return o.transpose(1, 2), lse, None, None, *sizes, *state

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention", kernel, "CPU")
        yield


def attends_as_observed(attend: Callable[..., Any], put: Callable[..., None]) -> None:
    """The kind of call that is counted is the one that the router meets: by rows of it alone, a call is ours."""
    name = "_flash_attention_forward"
    # As long: torch has no mask for others in flash attention
    q, k = (torch.randn(2, 4, 12, 16).bfloat16() for _ in range(2))
    with tw.aten.use("all", include=name):  # in force, for a processor has no other
        with tw.aten.observe() as calls:
            for causal in (True, True, False):
                attend(q, k, k, is_causal=causal)
        assert tw.aten.report()[name]["taken"] == 3
        said = tw.aten.explain("_scaled_dot_product_flash_attention", q, k, k)
        assert said == f"{name}: ours, by the engine attention"
    kind = Signature(name, "bfloat16", "3 turned", 8192)  # of 9216 bytes
    assert calls.counts == {kind: 1, kind._replace(layout="3 turned, is_causal=True"): 2}
    assert not any("attention" in other for other in calls.others)
    put(*[cell(*call[:1], call.bytes, 2.0, *call[1:3]) for call in calls.counts])
    with tw.aten.use("auto", observed=calls):
        attend(q, k, k, is_causal=True)
        assert tw.aten.report()[name]["taken"] == 1


def test_flash_attention_is_counted_by_what_torch_calls_for_it(rows):
    with flash_attention_of_a_processor():
        attends_as_observed(torch.ops.aten._scaled_dot_product_flash_attention, rows)


def test_counts_add_up_and_are_kept(tmp_path):
    one = Calls(GPU, {Signature("neg", "float32", "1 flat", 64): 2}, {"view": 1})
    one.save(tmp_path / "calls.json")
    again = tw.aten.Calls.load(tmp_path / "calls.json")
    assert (again.gpu, again.counts, again.others) == (one.gpu, one.counts, one.others)
    assert (one + again).counts == {Signature("neg", "float32", "1 flat", 64): 4}
    with pytest.raises(ValueError, match="do not add up"):
        one + Calls("another")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"), ("[]", "does not hold calls"), ('{"schema": "2"}', "does not hold calls"),
        (f'{{"schema": "{observed.SCHEMA}", "gpu": "g", "calls": [["neg", "float32", "", 1]], "others": {{}}}}', "is damaged"),
        (f'{{"schema": "{observed.SCHEMA}", "gpu": "g", "calls": [], "others": [1]}}', "is damaged"),
        (f'{{"schema": "{observed.SCHEMA}", "gpu": "NVIDIA H200", "calls": [], "others": {{}}}}', "is of NVIDIA H200, and this is"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(text, said, tmp_path):
    path = tmp_path / "calls.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        tw.aten.enable("auto", observed=path)


def test_a_folder_is_no_file_of_calls(tmp_path):
    with pytest.raises(ValueError, match="is a folder, and no file of calls"):
        tw.aten.enable("auto", observed=tmp_path)


def test_what_observed_may_be(rows):
    rows(*both([0.5, 2.0, 2.0]))
    with pytest.raises(ValueError, match="observed must be what"):
        tw.aten.use("auto", observed={"neg": 3})
    strange = Calls(GPU, {Signature("nonsense", "float32", "1 flat", 64): 2})
    with pytest.warns(UserWarning) as said:
        tw.aten.use("auto", observed=strange)
    assert "observed has calls of nonsense, which are left out" in str(said[0].message)


@pytest.mark.parametrize(("large", "small", "pays"), [(10, 0, True), (10, 47, True), (10, 48, False), (0, 5, False)])
def test_an_overload_is_replaced_if_its_calls_gain_more_than_others_lose(large, small, pays, rows):
    """A large call gains 10 us, a small one loses 2 by falling back: 48 times 2 is within 5 % of 10 times 10."""
    rows(*both([0.5, 2.0, 2.0]), fallback(2.0), fallback(1.0, "add"))
    kind = Signature("neg", "float32", "1 flat", 4 * MB)
    calls = Calls(GPU, {kind: large, kind._replace(bytes=4 * KB): small})
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with tw.aten.use("auto", observed=calls):
            assert tw.aten.report().keys() == ({"neg"} if pays else set())
    whose = {row["bytes"]: row["whose"] for row in calls.rows()}
    assert whose[4 * MB] == ("ours" if pays else "aten's: other calls would lose more by falling back")
    assert "below 4194304 bytes" in whose[4 * KB]


def test_without_the_cost_of_falling_back_nothing_is_weighed(rows):
    rows(*both([0.5, 2.0, 2.0]))
    kind = Signature("neg", "float32", "1 flat", 4 * MB)
    assert Verdicts.here().chosen({kind: 3}) == {"neg"}  # none of its calls falls back
    assert not Verdicts.here().chosen({kind: 1000, kind._replace(bytes=4 * KB): 1})
    assert "falling back is not measured" in str(Calls(GPU, {kind: 1000, kind._replace(bytes=4 * KB): 1}))


def test_the_table_of_calls(rows):
    rows(*both([2.0] * 3), fallback(2.0))
    x = torch.ones(1024)
    with tw.aten.observe() as calls:
        torch.neg(x)
        torch.neg(x)
        torch.exp(x)
    lines = str(calls).splitlines()
    assert lines[0].split() == ["overload", "dtype", "layout", "bytes", "calls", "gain_us", "whose"]
    assert lines[1].split() == ["neg", "float32", "1", "flat", "4096", "2", "20.0", "ours"]
    assert "aten's: nothing is measured of float32, 1 flat" in lines[2] and lines[-1].startswith(
        "0 calls of 0 operators"
    )
