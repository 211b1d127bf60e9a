"""Choices between our replacements and aten's operators: what is measured, what is refused, which rows that makes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from typer.testing import CliRunner

import tilewright as tw
from tests.pretended import measuring
from tilewright.__main__ import app
from tilewright.aten import verdicts
from tilewright.bench import cases, check, choices, documents, evidence, replaced, run, source, timing, tried, turns
from tilewright.commands import bench
from tilewright.core.target import TARGETS

EVERY = cases.select(["aten_choice"])
TARGET = TARGETS["sm_90"]
H200 = verdicts.Place("sm_90", "NVIDIA H200", "2.11", "3.6")
ABOUT = {"gpu": "NVIDIA H200", "arch": "sm_90", "sms": 132, "torch": "2.11.0+cu130", "triton": "3.6.0"}
ABOUT |= {"date": "2026-11-17T13:24:17+00:00", "fraction": None, "floor_us": None, "host_us": None, "extra_bytes": 0}
RUNS = [[10.0, 20.0], [10.1, 20.1], [9.9, 20.2], [10.0, 19.9], [10.0, 20.0]]


def recorded(case: cases.Case, runs: dict | None = None, **more: object) -> evidence.Row:
    row = {
        "op": "aten",
        "case": case.name,
        "direction": case.direction,
        "dims": case.dims,
        "us": 10.0,
        "error": 0.0,
        "bytes": [1, 1],
    }
    row |= {"rivals": {"aten": 20.0}, "method": "graph", "source": source.digest(case, TARGET), **ABOUT, **more}
    return row if runs is None else {**row, "runs": runs}


def one(call: str, size: str) -> cases.Case:
    (case,) = cases.select([f"aten_choice/{call}/{size}"])
    return case


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_every_case_is_of_one_overload_in_two_dtypes_and_three_sizes():
    kinds = [choices.reached(case, TARGET) for case in EVERY]
    assert None not in kinds and len(set(kinds)) == len(kinds)  # of which the table has one row
    sizes: dict[tuple[str, ...], set[int]] = {}
    for kind in kinds:
        sizes.setdefault(kind[:3], set()).add(kind.bytes)
    for kind, found in sizes.items():
        assert len(found) == verdicts.SIZES and min(found) <= verdicts.SMALL < max(found), kind
    dtypes = {word for dtype in {kind[1] for kind in sizes} for word in dtype.split("+")}
    assert dtypes == {"bfloat16", "float32", "int64", "bool", "uint8"}
    for overload in {kind[0] for kind in sizes} - {"isin.Tensor_Tensor"}:
        own = {dtype.partition("+")[0] for name, dtype, _ in sizes if name == overload}
        assert own - {"uint8"} == verdicts.ONLY.get(overload, verdicts.FLOATS), overload


def test_every_overload_where_aten_is_slow_has_a_choice():
    """Those of aten_wins.tsv and two more, in place too; `stack` and `gather_backward` are made of others."""
    names = {choices.kind_of(case.name, TARGET).overload for case in EVERY}
    assert names >= {
        "cumsum", "nll_loss_forward", "nll_loss2d_forward", "cummax", "cummin", "_softmax", "_log_softmax",
        "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
        "native_group_norm", "native_group_norm_backward", "native_batch_norm", "_weight_norm_interface",
        "_weight_norm_interface_backward", "clone", "copy_", "add.Tensor", "mul.Tensor", "embedding_dense_backward",
        "index_put_", "_index_put_impl_", "index_add", "index_add_", "scatter_add", "scatter_add_", "isin.Tensor_Tensor", "topk",
        "masked_select", "count_nonzero", "avg_pool2d_backward", "cat", "addmv", "mv", "masked_fill.Scalar", "masked_fill.Tensor",
        "masked_fill_.Tensor", "fill_.Tensor", "isclose", "isfinite", "isinf", "allclose", "mse_loss", "constant_pad_nd",
        "slice_scatter", "select_scatter", "sort", "native_batch_norm_backward",
    }  # fmt: skip


def test_every_kind_of_call_that_mode_auto_is_to_gain_by_has_a_choice():
    """Without rows of it a call is aten's, unless its overload is closed."""
    measured = {choices.kind_of(case.name, TARGET)[:3] for case in EVERY}
    for case in cases.select(["aten_auto_gain"]):
        assert {kind[:3] for kind in replaced.kinds_of(case, TARGET)} <= measured, case.name


@pytest.mark.parametrize(
    "overload",
    ["constant_pad_nd", "isclose", "isfinite", "isin.Tensor_Tensor", "isinf", "masked_fill.Scalar", "masked_fill.Tensor",
     "slice_scatter", "_softmax", "_log_softmax", "_softmax_backward_data", "topk", "cumsum", "add.Tensor", "clone",
     "_flash_attention_forward", "index_put", "index_put_", "_index_put_impl_", "masked_fill_.Tensor", "mse_loss",
     "count_nonzero", "nll_loss2d_forward"],
)  # fmt: skip
def test_there_are_cases_enough_to_close_an_overload(overload):
    """Of contiguous operands and of slow ones: where every one of them wins, that is the verdict."""
    own = [case for case in EVERY if choices.kind_of(case.name, TARGET).overload == overload]
    rows = [recorded(case, {"eager": RUNS, "graph": RUNS}) for case in own]
    assert verdicts.Verdicts(H200, choices.rows_of(rows, ())["sm_90"]).verdict(overload) == "closed"


def test_attention_is_measured_as_programs_call_it():
    """Of heads after their tokens and before them, causal and full, and of key heads that queries share."""
    found = {(kind := choices.reached(case, TARGET)).layout for case in EVERY if case.call.startswith("attention")}
    ways = {f"3 {lying}" for lying in ("flat", "turned")}
    assert kind.overload == "_flash_attention_forward"
    assert found == ways | {f"{way}, is_causal=True" for way in (*ways, "3 broadcast")}


def test_composites_are_seen_as_a_whole():
    assert choices.reached(one("isclose", "16x128"), TARGET).overload == "isclose"
    assert {w.kernel.name for w in replaced.launches(one("isclose", "16x128"), TARGET)} == {"pointwise_flat"}


# ---- measuring -------------------------------------------------------------------------------------------------------


def tiny(call: str = "clone") -> cases.Case:
    return replace(next(case for case in EVERY if case.call == call), dims={"rows": 8, "columns": 16})


def host_times(monkeypatch, *times: list[float]) -> None:
    """Pairs of host times that are found, the last of them from then on."""
    found = iter(times)
    last = [times[-1]]

    def each(calls, batches, per_batch, whole):
        last[0] = next(found, last[0])
        return last[0]

    monkeypatch.setattr(timing, "time_host_each", each)


def test_both_are_timed_in_turn_several_times(monkeypatch):
    measuring(monkeypatch)
    host_times(monkeypatch, [8.0, 8.4])
    row = run.measure(tiny(), ["eager"])
    assert row["runs"] == {"eager": [[8.0, 8.4]] * turns.RUNS, "graph": [[pytest.approx(5.0)] * 2] * turns.RUNS}
    assert (
        row["rivals"] == {"aten": pytest.approx(5.0)}
        and row["measured"] == pytest.approx(1.0)
        and row["method"] == "graph"
    )
    assert row["absent"] == {"eager": "a choice is between ours and aten's"}
    row = run.measure(tiny("nonzero"), [])
    assert row["runs"]["graph"] == [] and row["measured"] == pytest.approx(1.05) and row["method"] == "eager"


@pytest.mark.parametrize("call", ["index_add_", "fill_value_", "copy_transposed_", "allclose"])
def test_calls_in_place_are_checked_over_arguments_as_they_were(call, monkeypatch):
    """Though the call that says how much there is to move, and all that are timed, write over one."""
    measuring(monkeypatch)
    host_times(monkeypatch, [8.0, 12.0])
    case = replace(next(case for case in EVERY if case.call == call), dims={"rows": 8, "columns": 16, "places": 5})
    row = run.measure(case, [])
    assert 0.0 <= row["error"] < 0.01 and (row["method"] == "eager") == bool(case.options.get("events"))


def test_each_side_is_captured_once(monkeypatch):
    device, captures = measuring(monkeypatch), []
    own = device.capture
    monkeypatch.setattr(device, "capture", lambda body: captures.append(body) or own(body))
    host_times(monkeypatch, [8.0, 8.4])
    assert len(run.measure(tiny(), [])["runs"]["graph"]) == turns.RUNS and len(captures) == 2


@pytest.mark.parametrize(
    ("own", "aten", "runs"),
    [(8.0, 12.0, 3), (8.0, 10.5, 3), (8.0, 10.3, 5), (8.0, 8.0, 5), (8.0, 7.5, 5), (8.0, 7.0, 3), (8.0, 4.0, 3)],
)  # fmt: skip
def test_what_is_close_is_run_more_often(own, aten, runs):
    assert len(turns.settled("eager", lambda: [own, aten])) == runs


def test_few_runs_are_no_fewer_than_their_spread_allows():
    """Three that say 1.32 in the mean and are apart are not yet far ahead."""
    times = iter([[10.0, 13.2], [10.0, 13.5], [10.0, 12.9], [10.0, 13.2], [10.0, 13.2]])
    assert len(turns.settled("eager", lambda: next(times))) == turns.RUNS


def test_slow_calls_are_timed_less_often(monkeypatch):
    """Batches and graphs are as long as their own side's calls allow: aten may take a hundred times as long."""
    measuring(monkeypatch)
    monkeypatch.setattr(timing, "plan", lambda nbytes, l2, once=False: (2, 16))
    sizes, graphs, paces = [], [], [100.0, 12_000.0]

    def each(calls, batches, per_batch, whole):
        sizes.append((batches, per_batch))
        return paces

    class Counted(timing.Graph):
        def __init__(self, work, calls):
            graphs.append(calls)
            super().__init__(work, calls)

    monkeypatch.setattr(timing, "time_host_each", each)
    monkeypatch.setattr(timing, "Graph", Counted)
    run.measure(tiny(), [])
    assert sizes[1:] == [(3, [40, 1])] * turns.FEWEST_RUNS
    assert graphs == [16, 2]


def test_what_cannot_be_captured_is_judged_by_eager_calls(monkeypatch):
    measuring(monkeypatch)
    host_times(monkeypatch, [8.0, 12.0])
    own, made = timing.Graph, []

    def graph(*args):
        if made:
            raise timing.CannotCapture("it waits")
        made.append(own(*args))
        return made[0]

    monkeypatch.setattr(timing, "Graph", graph)
    row = run.measure(tiny(), [])
    assert (
        row["spoiled"]
        and row["method"] == "eager"
        and row["runs"]["graph"] == []
        and row["measured"] == pytest.approx(1.5)
    )


def test_runs_that_are_far_apart_are_refused():
    times = iter([[8.0, 8.0 * 1.03**at] for at in range(turns.TRIES * turns.RUNS)])
    with pytest.raises(check.Wrong, match=r"runs of aten, eager, are \d+.\d% apart: is the GPU busy, or too hot\?"):
        turns.settled("eager", lambda: next(times))


def test_runs_that_are_far_apart_once_are_made_anew():
    times = iter([[8.0, 12.0], [8.0, 12.0], [9.0, 12.0], *[[8.0, 12.0]] * turns.RUNS])
    pairs = turns.settled("eager", lambda: next(times))
    assert [9.0, 12.0] not in pairs and all(pair == [8.0, 12.0] for pair in pairs)


def test_the_worst_that_mode_auto_does(monkeypatch):
    """Of the calls that it takes alone, in whichever way; what it leaves alone is not timed."""
    measuring(monkeypatch)
    every = [case for case in EVERY if case.call in ("isinf", "cummax_last", "add")]
    losing = [[20.0, 10.0]] * 3
    rows = [
        recorded(c, {"eager": losing if c.call == "add" else RUNS, "graph": RUNS}) for c in every if c.call != "isinf"
    ]
    rows += [recorded(c, {"eager": RUNS}) for c in every if c.call == "isinf"]  # which cannot be captured
    found = verdicts.Verdicts(H200, choices.rows_of(rows, ())["sm_90"])
    monkeypatch.setattr(verdicts.Verdicts, "here", staticmethod(lambda: found))
    timed: dict[str, cases.Case] = {}

    def measure(case, beside):
        timed[case.name] = case
        graph = [[10.0, 9.8 if case.call == "cummax_last" and case.dims["rows"] == 16 else 15.0]] * 3
        return {"runs": {"eager": [[10.0, 12.0]] * 3, "graph": [] if "events" in case.options else graph}}

    monkeypatch.setattr(run, "measure_choice", measure)
    (case,) = cases.select(["aten_auto_worst"])
    row = run.measure(case, [])
    assert row["measured"] == pytest.approx(0.98) and "aten_choice/cummax_last/16x128, graph" in row["note"]
    assert {one.call for one in timed.values()} == {"isinf", "cummax_last"} and len(timed) == 12
    assert all(one.options.get("auto") for one in timed.values())
    assert {one.call for one in timed.values() if one.options.get("events")} == {"isinf"}
    monkeypatch.setattr(run, "NARROWEST", 5)
    timed.clear()
    run.measure(case, [])
    assert len(timed) == 5
    monkeypatch.setattr(verdicts.Verdicts, "here", staticmethod(lambda: verdicts.Verdicts(H200, [])))
    with pytest.raises(check.Wrong, match="mode auto replaces nothing: nothing is measured on NVIDIA H200"):
        run.measure(case, [])


def test_compiling_makes_the_call_of_a_case_twice(monkeypatch):
    """Which is what a process that only compiles is asked for."""
    measuring(monkeypatch)
    made, case = [], one("clone", "16x128")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(replaced, "here", lambda case: None)
    monkeypatch.setitem(replaced.CALLS, "clone", replaced.Call(lambda x: made.append("called") or x.clone()))
    replies = io.StringIO()
    run.serve(io.StringIO(json.dumps({"case": case.name, "compile": True}) + "\n"), replies)
    assert [json.loads(line) for line in replies.getvalue().splitlines()] == [{"status": "ready"}, {"status": "ok"}]
    assert made[-3:] == ["called", "called", "waited"]


def test_a_call_is_waited_for_to_its_end():
    """A clock that the drain moves on: whole calls have it, what the host takes has not."""
    now = [0]
    settings = {"clock": lambda: now[0], "drain": lambda: now.__setitem__(0, now[0] + 1000)}

    def call() -> None:
        now[0] += 50

    assert timing.time_host_each([call], 3, 10, **settings) == [pytest.approx(0.05)]
    assert timing.time_host_each([call], 3, 10, whole=True, **settings) == [pytest.approx(0.15)]


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_confidence():
    assert choices.least_of([[10.0, 20.0]] * 3) == pytest.approx(2.0)
    wide, narrow = ([[10.0, 20.0 * (1 + d)] for d in (-x, 0.0, x)] for x in (0.05, 0.01))
    assert choices.least_of(wide) < choices.least_of(narrow) < 2.0
    assert choices.least_of(wide) == pytest.approx(2.0 * 0.9187, rel=1e-3)
    for few in ([[10.0, 20.0]] * 2, [[10.0, 20.0]]):
        with pytest.raises(ValueError, match="3 to 10 runs"):
            choices.least_of(few)


def test_recorded_choices_make_the_table():
    won = ("isinf", "isinf_strided", "cummax_last")
    wins = [recorded(case, {"eager": RUNS, "graph": RUNS}) for case in EVERY if case.call in won]
    (fallback, *_) = cases.select(["aten_host_fallback"])
    plain = cases.CASES["aten_isin/8388608x20000x40000"]
    rows = [*wins, recorded(fallback), recorded(plain)]
    assert [evidence.problem(row) for row in rows] == [None] * len(rows)
    ((name, text),) = choices.tables(rows, evidence.stale_keys(rows)).items()
    made = [verdicts.row_of(line) for line in text.splitlines()]
    assert name == "aten_sm_90.jsonl" and None not in made and len(made) == 19
    found = verdicts.Verdicts(H200, made)
    assert found.verdict("isinf") == "closed" and found.verdict("isin.Tensor_Tensor") == "never"
    assert found.verdict("cummax") == "sized"  # along the last dimension alone
    assert found.fallback_us == pytest.approx(0.0)  # 10 us beside 20
    (row,) = [
        row for row in made if (row.get("overload"), row.get("dtype"), row.get("bytes")) == ("isinf", "bfloat16", 4096)
    ]
    assert row["eager"]["own"] == pytest.approx(10.0, rel=1e-3) and 1.95 < row["eager"]["least"] < 2.0
    assert row["version"] == tw.__version__ and row["graph"] == row["eager"]


def test_what_is_stale_makes_no_row():
    case = one("isinf", "16x128")
    rows = [
        recorded(case, {"eager": RUNS, "graph": RUNS}),
        recorded(one("cummax_last", "16x128"), {"eager": RUNS}, source="before"),
    ]
    ((_, text),) = choices.tables(rows, evidence.stale_keys(rows)).items()
    assert [json.loads(line)["overload"] for line in text.splitlines()] == ["isinf"]
    assert not choices.tables(rows[1:], evidence.stale_keys(rows)) and not choices.tables([], ())


def test_a_verdict_from_stale_rows_is_noticed(monkeypatch):
    monkeypatch.setattr(evidence, "freshness", lambda row: "fresh")
    with pytest.raises(AssertionError):
        test_what_is_stale_makes_no_row()


@pytest.mark.parametrize("runs", [None, [], {"eager": [[1.0]]}, {"eager": [[1.0, 0.0]]}, {"eager": [[1.0, True]]}])
def test_damaged_runs_are_no_evidence(runs):
    assert evidence.problem({**recorded(one("isinf", "16x128")), "runs": runs}) == "has runs that are none"
    assert evidence.problem(recorded(one("isinf", "16x128"))) == "has runs that are none"


def test_what_a_user_measures_is_kept_beside_earlier_rows(tmp_path):
    first, second = (recorded(one("isinf", size), {"eager": RUNS, "graph": RUNS}) for size in ("16x128", "8x128"))
    (path,) = choices.keep([first], where=tmp_path)
    assert choices.keep([second], where=tmp_path) == [path] and path.name == "aten_sm_90.jsonl"
    assert {row["dtype"] for row in verdicts.read(path)} == {"bfloat16", "float32"}
    assert path.stat().st_mode & 0o077 == 0 and choices.keep([], where=tmp_path) == []


def test_what_a_user_measures_anew_replaces_what_was_measured_of_other_kernels(tmp_path):
    case = one("isinf", "16x128")
    before = recorded(case, {"eager": RUNS, "graph": RUNS}, source="before")
    other = recorded(case, {"eager": RUNS}, torch="2.12.0")
    (path,) = choices.keep([before], where=tmp_path)
    choices.keep([other], where=tmp_path)
    slower = [[own, own / 2] for own, _ in RUNS]
    assert choices.keep([recorded(case, {"eager": slower, "graph": RUNS})], where=tmp_path) == [path]
    found = {row["torch"]: row["eager"]["least"] for row in verdicts.read(path)}
    assert found == {"2.11.0+cu130": pytest.approx(0.5), "2.12.0": pytest.approx(1.99, abs=0.01)}
    assert len(verdicts.read(path)) == 2


def test_an_old_row_that_stays_in_a_users_table_is_noticed(tmp_path, monkeypatch):
    own = verdicts.key_of
    monkeypatch.setattr(verdicts, "key_of", lambda row: (*own(row), row.get("source")))
    with pytest.raises(AssertionError):
        test_what_a_user_measures_anew_replaces_what_was_measured_of_other_kernels(tmp_path)


def test_what_is_stale_leaves_a_users_table(tmp_path):
    stale = recorded(one("isinf", "16x128"), {"eager": RUNS, "graph": RUNS}, source="before")
    fresh = recorded(one("isinf", "8x128"), {"eager": RUNS, "graph": RUNS})
    (path,) = choices.keep([stale, fresh], where=tmp_path)
    choices.keep([stale, fresh], evidence.stale_keys([stale, fresh]), tmp_path)
    assert [row["dtype"] for row in verdicts.read(path)] == ["float32"]


# ---- explained -------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A chip with rows of two overloads, and a function that explains them."""
    monkeypatch.setattr(verdicts, "SHIPPED", tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    won = ("isinf", "isinf_strided")
    rows = [recorded(case, {"eager": RUNS, "graph": RUNS}) for case in EVERY if case.call in won]
    rows += [recorded(one("add", size), {"eager": [[20.0, 10.0]] * 3}) for size in ("16x128", "1024x2048")]
    rows += [recorded(one("add", "8192x16384"), {"eager": RUNS})]
    text = choices.tables(rows, ())["aten_sm_90.jsonl"]
    release = verdicts.release(torch.__version__), verdicts.release(triton.__version__)
    text = text.replace("2.11.0+cu130", f"{release[0]}.0").replace("3.6.0", f"{release[1]}.0")
    (tmp_path / "aten_sm_90.jsonl").write_text(text)
    choices.forget()

    def explain(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, ["explain", "aten", *words], env={"COLUMNS": "200"})
        return done.exit_code, done.stdout, done.stderr

    yield explain
    choices.forget()


def test_explaining_verdicts_and_their_rows(told):
    status, out, _ = told("--json")
    found = {row["overload"]: row for row in json.loads(out)["verdicts"]}
    assert status == 0 and {name: row["verdict"] for name, row in found.items()} == {
        "isinf": "closed",
        "add.Tensor": "sized",
    }
    assert (
        found["isinf"]["gpu"] == "NVIDIA H200"
        and found["isinf"]["engine"] == "pointwise"
        and not found["isinf"]["note"]
    )
    status, out, _ = told("isinf", "--dtype", "bf16", "--json")
    rows = json.loads(out)["rows"]
    sizes = [4 << 10, 4 << 20, 256 << 20]
    assert [row["bytes"] for row in rows] == [*sizes, *(size // 2 for size in sizes)]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    for size, whose in (("1024x1024", "aten's: aten is as fast"), ("16384x16384", "ours, 10.0 us sooner")):
        (one,) = json.loads(told("add", "--shape", size, "--json")[1])["whose"]
        assert one["whose"].startswith(whose) and one["bytes"] == 2 * two_bytes_of(size)
    status, out, _ = told("add", "--shape", "16384x16384")
    assert status == 0 and "add on sm_90: verdicts" in out and "ours" in out
    assert told("--arch", "sm_80")[1].startswith("aten on sm_80: never, nothing is measured: `tilewright bench")


def two_bytes_of(size: str) -> int:
    rows, columns = map(int, size.split("x"))
    return 2 * rows * columns


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["signoid"], "did you mean sigmoid"), (["add", "--dtype", "bf17"], "--dtype bf17"),
        (["add", "--shape", "8x"], "8192x4096"), (["--shape", "8x8"], "need an overload"),
        (["--full"], "aten takes an overload"), (["--arch", "sm_91"], "sm_90"),
    ],
)  # fmt: skip
def test_what_cannot_be_explained_is_one_line(words, said, told):
    status, out, err = told(*words)
    assert status == 2 and out == "" and said in err and err.count("\n") == 1
    done = CliRunner().invoke(app, ["explain", "glu", "--dtype", "bfloat16"])
    assert done.exit_code == 2 and "are for aten" in done.stderr


def test_the_page_of_what_was_tried_has_verdicts(told):
    about = {"torch": torch.__version__, "triton": triton.__version__, "date": "2026-11-17", "failed": [], "source": ""}
    row = {"overload": "isinf", "tried": 3, "passed": 3, "declined": {}, "where": "NVIDIA H200", **about}
    rows = [row, {**row, "overload": "neg"}]
    made = tried.section({"nvidia-h200": rows})
    said = {line.split(" | ")[0]: line for line in made.splitlines() if line.startswith("| `")}
    assert said["| `isinf` (stale)"].endswith("| 3 | 3 |  |  | closed |")
    assert said["| `neg` (stale)"].endswith("| 3 | 3 |  |  | never |")
    assert "| 3 | 3 |  |  |  |\n" in tried.section({"other": [{**row, "where": "another GPU"}]})


@pytest.mark.parametrize("checkout", [True, False])
def test_what_is_recorded_is_where_calls_look_for_it(checkout, tmp_path, monkeypatch):
    """A GPU is pretended: its rows come ready made."""
    case = one("isinf", "16x128")
    row = {**recorded(case, {"eager": RUNS, "graph": RUNS}), "status": "ok", "wall_s": 1.0, "measured": 2.0}
    (tmp_path / "README.md").touch() if checkout else None
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path / "evidence")
    monkeypatch.setattr(choices, "put", partial(choices.put, where=tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "supervise", lambda names, *_, **__: (row for name in names if name == case.name))
    done = CliRunner().invoke(app, ["bench", case.name, "--record"])
    path = (tmp_path if checkout else tmp_path / "cache" / "tilewright") / "aten_sm_90.jsonl"
    assert done.exit_code == 0 and f"written: {path}" in done.stderr.replace("\n", "")
    assert [found["overload"] for found in verdicts.read(path)] == ["isinf"]
    done = CliRunner().invoke(app, ["bench", case.name, "--record", "--evidence", str(tmp_path / "other")])
    assert done.exit_code == 0 and "written" not in done.stderr and list((tmp_path / "other").glob("*.jsonl"))


def test_what_mode_auto_does_is_measured_by_the_table_of_the_same_run(tmp_path, monkeypatch):
    """By workers that begin once it is written. Without a choice among the cases, there is one for them all."""
    (tmp_path / "README.md").touch()
    ready = {
        **recorded(one("isinf", "16x128"), {"eager": RUNS, "graph": RUNS}),
        "status": "ok",
        "wall_s": 1.0,
        "measured": 2.0,
    }
    path, workers = tmp_path / "aten_sm_90.jsonl", []

    def supervise(names, *_, **__):
        workers.append((path.exists(), set(names)))
        for name in names:
            yield {**ready, "case": name, "direction": cases.CASES[name].direction}

    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path / "evidence")
    monkeypatch.setattr(choices, "put", lambda recorded, stale: [path.touch() or path])
    monkeypatch.setattr(evidence, "stale_keys", lambda rows: set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "supervise", supervise)
    gain, kept = "aten_auto_gain/isinf/8192x16384", ["aten_all_model/*", "aten_host_fallback/*"]
    auto = [gain, "aten_auto_worst/1", "aten_auto_model/32x512", "aten_auto_decode/4x1x1024"]
    before = {"aten_choice/isinf/16x128", *(case.name for case in cases.select(kept))}
    words = ["bench", "aten_choice/isinf/16x128", *auto, *kept, "--record"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and workers == [(False, before), (True, set(auto))], done.stderr
    workers.clear()
    done = CliRunner().invoke(app, [*words, "--minutes", "0.0000001"])  # the first case is begun, and no other
    assert done.exit_code == 130 and [names for _, names in workers] == [before]
    workers.clear()
    for words in (["bench", *auto, *kept, "--record"], ["bench", *auto, "aten_choice/isinf/16x128"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert [names for _, names in workers] == [
        {*auto, *before} - {"aten_choice/isinf/16x128"},
        {*auto, "aten_choice/isinf/16x128"},
    ]


def test_a_run_that_ends_early_goes_on_where_it_was(tmp_path, monkeypatch):
    """All kernels are compiled before the first case is timed; cases of one call come together; none is begun after the minutes."""
    begun: list[str] = []

    def supervise(names, *_, **__):
        for name in names:
            begun.append(name)
            row = recorded(cases.CASES[name], {"eager": RUNS, "graph": RUNS}, triton=triton.__version__)
            yield {**row, "status": "ok", "wall_s": 1.0, "measured": 2.0}

    def compile_all(names, jobs, limit):
        assert not begun and jobs == 4
        return [{"case": name, "status": "ok"} for name in names]

    now = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: now.__setitem__(0, now[0] + 2.0) or now[0]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "supervise", supervise)
    monkeypatch.setattr(run, "compile_all", compile_all)
    few = [case.name for case in EVERY if case.call in ("add", "isinf", "nonzero")]
    words = ["bench", *few, "--record", "--stale", "--evidence", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--minutes", "0.2"])
    assert done.exit_code == 130 and "cases: the same with --stale goes on" in done.stderr, done.stderr
    first, seen = len(begun), {cases.CASES[name].call for name in begun}
    assert 3 <= first < 10 and len(seen) <= 2 and len(evidence.everything(tmp_path)) == first
    begun.clear()
    done = CliRunner().invoke(app, [*words, "--jobs", "4"])
    assert done.exit_code == 0 and f"compiled: {len(few) - first} of {len(few) - first} cases" in done.stderr
    assert len(begun) == len(few) - first and len(evidence.everything(tmp_path)) == len(few)
