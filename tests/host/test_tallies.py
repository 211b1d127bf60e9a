"""What rows of torch's operators are held to together: how many there are, which are as they should be, which were not measured."""

from __future__ import annotations

import pytest

from tilewright.bench import cases, documents
from tilewright.bench.results import understand
from tilewright.bench.tallies import AHEAD, OP, Tally, slower, tallies
from tilewright.commands.bench import goals_table

EVERY = [case for case in cases.CASES.values() if case.op == OP]
LEAST = [case for case in EVERY if case.family == "aten_all_256mb"]
BESIDE = [case for case in EVERY if case.metric == f"vs:{AHEAD}"]
STEPS = [case for case in EVERY if case.direction == "model" and case.options["mode"] == "auto"]
FIVE = [[10.0, 10.1], [10.0, 12.0], [10.0, 9.8], [10.0, 10.0], [10.0, 10.0]]


def row(case: cases.Case, ratio: float = 2.0, **more: object) -> dict:
    rival = case.metric.partition(":")[2]
    about = {"gpu": "G", "triton": "3.6.0", "torch": "2.11.0", "op": OP, "date": "2026-11-18"}
    return {"case": case.name, "us": 10.0, "rivals": {rival: 10.0 * ratio}, **about, **more}


def tallied(rows: list[dict], of: list[cases.Case] = EVERY) -> dict[str, Tally]:
    return {one.name: one for one in tallies([understand(one, {}, ()) for one in rows], of)}


def test_what_is_promised_of_torchs_operators_has_cases():
    assert {case.family for case in STEPS} == {"aten_auto_model", "aten_auto_decode"}
    assert {case.goal for case in LEAST} == {0.9} and len(LEAST) > 15
    assert {case.family for case in BESIDE} == {"aten_flaggems_256mb", "aten_flaggems_host"}
    assert tallied([]).keys() == {"aten_all_256mb_least", "aten_ahead", "aten_no_slower"}
    assert all(one.verdict == "not measured" and "none of" in str(one) for one in tallied([]).values())
    assert tallied([], []) == {}


def test_none_of_a_means_calls_is_under_the_least():
    rows = [row(case, 1.5) for case in LEAST]
    assert tallied(rows)["aten_all_256mb_least"].verdict == "reached"
    rows[3] = row(LEAST[3], 0.89)
    said = tallied(rows)["aten_all_256mb_least"]
    count = len(LEAST)
    assert said.verdict == "short" and f"{count - 1} of {count} (short), 100% are to be." in str(said)
    assert tallied(rows[:3])["aten_all_256mb_least"].verdict == "not measured"


def test_ahead_of_another_in_so_many_of_the_calls_that_it_makes():
    few, count = len(BESIDE) // 20, len(BESIDE)  # 5 % of them
    rows = [row(case, 0.9 if at < few else 1.1) for at, case in enumerate(BESIDE)]
    assert tallied(rows)["aten_ahead"].verdict == "reached"
    assert f"{count - few} of {count}, 95% are to be." in str(tallied(rows)["aten_ahead"])
    rows[few] = row(BESIDE[few], 1.0)  # as fast is not ahead
    assert tallied(rows)["aten_ahead"].verdict == "short"
    rows = [
        row(case, rivals={}, absent={AHEAD: "it has none"}) if at < 10 else row(case) for at, case in enumerate(BESIDE)
    ]
    said = tallied(rows)["aten_ahead"]
    assert said.verdict == "reached" and len(said.told) == count - 10
    assert "; 5 more are not measured." in str(tallied([row(case) for case in BESIDE[5:]])["aten_ahead"])


@pytest.mark.parametrize(("worst", "verdict"), [(9.8, "reached"), (9.71, "reached"), (9.69, "short"), (5.0, "short")])
def test_a_step_is_slower_in_no_run(worst, verdict):
    runs = {"steps": [*FIVE[:4], [10.0, worst]]}
    rows = [row(STEPS[0], runs=runs), *(row(case, runs={"steps": FIVE}) for case in STEPS[1:])]
    assert tallied(rows)["aten_no_slower"].verdict == verdict
    assert slower(FIVE) == 0 and slower([[10.0, 9.0], [9.0, 10.0], [10.0, 9.6]]) == 2
    assert tallied([row(case) for case in STEPS])["aten_no_slower"].verdict == "not measured"  # without runs


def test_pages_and_goals_have_them():
    rows = [row(case, 0.5) for case in LEAST]
    results = [understand(one, {}, ()) for one in rows]
    page = documents.results_section(results, cases.GOALS.values(), cases.CASES.values())
    assert f"Calls of `aten_all_256mb` at 0.9 vs:aten or more: 0 of {len(LEAST)} (short)" in " ".join(page.split())
    found = {one["goal"]: one for one in goals_table(rows, [])}
    assert found["aten_all_256mb_least"]["verdict"] == "short" and found["aten_ahead"]["verdict"] == "not measured"
    assert found["aten_all_256mb"]["verdict"].startswith("short by")
