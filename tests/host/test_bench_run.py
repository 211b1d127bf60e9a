"""The programs that run benchmark cases and GPU tests: what hangs or crashes costs itself only."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
import triton
from typer.testing import CliRunner

from tests.gpu import __main__ as gpu
from tilewright.__main__ import app
from tilewright.bench import cases, check, evidence, packaged, run
from tilewright.check import guarded
from tilewright.commands import bench as commands

ROOT = Path(__file__).resolve().parents[2]
SUPERVISE = run.supervise


# ----------------------------------------------------------------------------------------------------------- benchmarks

FAKE_WORKER = """
import json, os, sys, time
replies = os.fdopen(int(sys.argv[-1]), "w")
FACTS = {"op": "x", "direction": "forward", "dims": {}, "floor_us": 4.5, "rivals": {}, "error": 1e-3, "extra_bytes": 0,
         "host_us": 3.0, "bytes": [1, 2], "gpu": "G", "arch": "sm_90", "sms": 132, "torch": "2", "triton": "3", "date": "d",
         "source": "s"}
def reply(row):
    replies.write(json.dumps(row) + "\\n"); replies.flush()
open(os.environ["STARTS"], "a").write("x")
print("noise on stdout", flush=True)
reply({"status": os.environ.get("READY_APART" if "--apart" in sys.argv else "READY", "ready")})
for line in sys.stdin:
    name = json.loads(line)["case"]
    plan = json.loads(os.environ["PLAN"]).get(name, "ok")
    if "alone" in json.loads(line):
        rival = json.loads(line)["alone"]
        assert sys.argv[1:3] == ["--apart", rival]
        if plan == "alone-fails":
            reply({"status": "wrong", "why": "it has no weight"})
        else:
            reply({"status": "ok", "rivals": {rival: 5.0}, "rival_bytes": {rival: 3}, "absent": {}, "spoiled": False})
        continue
    if plan == "absent":
        why = {"quack": "it is not installed"}
        reply({**FACTS, "status": "ok", "us": 10.0, "fraction": 0.9, "measured": None, "absent": why, "method": "graph"})
        continue
    if plan == "rival":
        FACTS["rivals"] = {n: 20.0 for n in json.loads(line)["rivals"]}
    if plan == "hang":
        time.sleep(60)
    elif plan == "crash":
        print("Fatal: illegal memory access", file=sys.stderr, flush=True)
        os._exit(3)
    elif plan == "wrong":
        reply({"status": "wrong", "why": "y: off"})
    elif plan == "failed":
        reply({"status": "failed", "why": "RuntimeError: no"})
    elif plan == "events":
        reply({**FACTS, "status": "ok", "us": 9.0, "fraction": 0.5, "measured": 0.5, "method": "events: no"})
    else:
        reply({**FACTS, "status": "ok", "us": 10.0, "fraction": 0.99, "measured": 0.99, "method": "graph"})
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A worker without a device; the function sets what it does with each case."""
    script = tmp_path / "worker.py"
    script.write_text(FAKE_WORKER)
    starts = tmp_path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.delenv("OUT", raising=False)

    def plan(**what):
        monkeypatch.setenv("PLAN", json.dumps({k.replace("__", "/"): v for k, v in what.items()}))
        return [sys.executable, str(script)]

    plan.starts = lambda: len(starts.read_text())
    return plan


def test_one_worker_serves_all_good_cases(fake):
    rows = list(run.supervise(["a", "b", "c"], [], {}, fake(b="wrong"), 20))
    assert [r["status"] for r in rows] == ["ok", "wrong", "ok"] and fake.starts() == 1


def test_a_hang_and_a_crash_cost_one_case_each(fake):
    rows = list(run.supervise(["a", "b", "c", "d", "e"], [], {}, fake(a="hang", c="crash", d="failed"), 1.0))
    assert [r["status"] for r in rows] == ["lost", "ok", "lost", "failed", "ok"]
    assert rows[0]["why"].startswith("timed out after 1 s")
    assert "status 3" in rows[2]["why"] and "illegal memory access" in rows[2]["why"]
    assert fake.starts() == 4


def test_workers_side_by_side_lose_no_case_and_stay_within_the_weight(fake):
    names = [json.dumps({"case": c}) for c in "abcdefgh"]
    command, live, most = fake(a="crash", c="hang", e="failed"), [], []

    def drawn():
        for name in names:
            live.append(name)
            most.append(len(live))
            yield name

    rows = []
    for row in guarded.supervise(drawn(), command, 2.0, 20, jobs=3, weight=lambda name: 2.0, most=6.0):
        live.remove(row["case"])
        rows.append(row)
    found = {json.loads(row["case"])["case"]: row["status"] for row in rows}
    assert found == {**dict.fromkeys("bdfgh", "ok"), "a": "lost", "c": "lost", "e": "failed"}
    assert max(most) == 3 and 3 <= fake.starts() <= 6
    heavy = {names[1]: 5.0, names[4]: 9.0}
    running: set[str] = set()
    for row in guarded.supervise(iter(names), fake(), 20, 20, jobs=3, weight=lambda n: heavy.get(n, 1.0), most=5.0):
        running.add(row["case"])
    assert running == set(names)


def test_a_failed_capture_replaces_the_worker(fake):
    rows = list(run.supervise(["a", "b"], [], {}, fake(a="events"), 20))
    assert [r["status"] for r in rows] == ["ok", "ok"] and fake.starts() == 2


def test_a_worker_that_cannot_start_ends_the_run(fake, monkeypatch):
    monkeypatch.setenv("READY", "no CUDA device")
    with pytest.raises(guarded.NoWorker, match="no CUDA device"):
        list(run.supervise(["a"], [], {}, fake(), 20))
    with pytest.raises(guarded.NoWorker, match="did not start"):
        list(run.supervise(["a"], [], {}, [sys.executable, "-c", "raise ValueError('broken')"], 20))


def test_the_real_worker_says_that_there_is_no_device(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    started = []
    monkeypatch.setattr(guarded, "Worker", started.append)
    done = CliRunner().invoke(app, ["bench", "launch_rms_norm"])
    assert done.exit_code == 2 and "no CUDA device" in done.stderr and done.stderr.count("\n") == 1
    assert not started  # it is said at once


def bench(fake, monkeypatch, *words: str, **plan: str):
    command = fake(**plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        run, "supervise", lambda names, beside, also, limit: SUPERVISE(names, beside, also, command, limit)
    )
    return CliRunner().invoke(app, ["bench", *words])


def test_results_are_written_and_judged(fake, tmp_path, monkeypatch):
    words = ["silu_[fb]*/8192*", "rms_norm_fwd/*x2048", "--record", "--evidence", str(tmp_path), "--json"]
    plan = {"silu_fwd__8192x2048": "wrong", "silu_bwd__8192x2048": "events"}
    done = bench(fake, monkeypatch, *words, **plan)
    assert done.exit_code == 1, done.output
    rows = {r["case"]: r for r in json.loads(done.stdout)}
    good = rows["rms_norm_fwd/8192x2048"]
    assert len(rows) == 3 and good["reached"] and good["goal"] == cases.GOALS["rms_norm_fwd"].goal
    assert not rows["silu_bwd/8192x2048"]["reached"]
    assert "us" not in rows["silu_fwd/8192x2048"] and "reached" not in rows["silu_fwd/8192x2048"]
    recorded = {r["case"]: r for r in evidence.everything(tmp_path)}
    assert set(recorded) == {"rms_norm_fwd/8192x2048", "silu_bwd/8192x2048"}
    assert recorded["silu_bwd/8192x2048"]["method"] == "events: no"
    done = bench(fake, monkeypatch, "rms_norm_fwd/8192*", "--against", "goals", "--evidence", str(tmp_path))
    assert done.exit_code == 0 and "fused_linear_ce" in done.stdout and "not measured" in done.stdout


def test_a_case_for_a_newer_triton_is_reported_as_waiting(fake, tmp_path, monkeypatch):
    """It is neither measured nor a failure; and the goal says what it waits for."""
    monkeypatch.setattr(run.triton, "__version__", "3.6.0")
    words = ["launch_newest", "launch_rms_norm", "--record", "--evidence", str(tmp_path)]
    done = bench(fake, monkeypatch, *words, "--json")
    assert done.exit_code == 0, done.output
    rows = {r["case"]: r for r in json.loads(done.stdout)}
    assert rows["launch_newest/64x512"]["status"] == "waits" and "newer than 3.6" in rows["launch_newest/64x512"]["why"]
    assert rows["launch_rms_norm/64x512"]["status"] == "ok" and "us" not in rows["launch_newest/64x512"]
    assert [r["case"] for r in evidence.everything(tmp_path)] == ["launch_rms_norm/64x512"]
    done = bench(fake, monkeypatch, *words, "--against", "goals")
    assert (
        done.exit_code == 0
        and "WAITS" in done.stdout
        and "waits for a Triton newer than 3.6" in " ".join(done.stdout.split())
    )
    monkeypatch.setattr(run.triton, "__version__", "3.9.0")
    done = bench(fake, monkeypatch, "launch_newest", "--json")
    assert [r["status"] for r in json.loads(done.stdout)] == ["ok"]


def test_a_row_whose_rival_is_absent_is_neither_reached_nor_short(fake, tmp_path, monkeypatch):
    case = "rms_norm_vs_quack/8192x8192"
    done = bench(fake, monkeypatch, case, "--json", rms_norm_vs_quack__8192x8192="absent")
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 0 and row["reached"] is None and row["goal"] == 0.9
    done = bench(
        fake, monkeypatch, case, "--record", "--evidence", str(tmp_path), rms_norm_vs_quack__8192x8192="absent"
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert "quack absent: it is not installed" in said and "short" not in said and "rival absent" in said
    assert evidence.everything(tmp_path)[0]["absent"] == {"quack": "it is not installed"}


def test_a_case_is_recorded_again_beside_the_rivals_that_it_had(fake, tmp_path, monkeypatch):
    """They are asked for without being named. Where one is gone, the row is kept aside in one line."""
    case, words = "silu_fwd/8192x2048", ["silu_fwd/8192x2048", "--record", "--evidence", str(tmp_path)]
    done = bench(fake, monkeypatch, *words, silu_fwd__8192x2048="rival")
    assert done.exit_code == 0 and evidence.everything(tmp_path)[0]["rivals"] == {}  # none was asked for
    done = bench(fake, monkeypatch, *words, "--rivals", "eager", silu_fwd__8192x2048="rival")
    assert evidence.everything(tmp_path)[0]["rivals"] == {"eager": 20.0}
    done = bench(fake, monkeypatch, *words, "--json", silu_fwd__8192x2048="rival")
    assert json.loads(done.stdout)[0]["rivals"] == {"eager": 20.0} and "aside" not in done.stderr
    done = bench(fake, monkeypatch, *words)  # a worker that does not give it
    assert done.exit_code == 0 and done.stderr.count("kept aside") == 1
    assert f"{case}: kept aside: the recorded row has eager" in done.stderr
    assert evidence.everything(tmp_path)[0]["rivals"] == {"eager": 20.0}


def test_a_row_without_the_rival_of_its_goal_is_measured_again(monkeypatch):
    case = next(case for case in cases.CASES.values() if case.metric == "vs:empty")
    monkeypatch.setattr(evidence, "freshness", lambda row: row["age"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    here = {"case": case.name, "gpu": "a GPU", "triton": triton.__version__}
    for rivals, age, fresh in (({"empty": 0.7}, "fresh", True), ({"empty": 0.7}, "stale", False), ({}, "fresh", False)):
        assert commands.fresh_here(case.name, [{**here, "rivals": rivals, "age": age}]) == fresh


def test_a_row_without_what_is_always_timed_beside_it_is_measured_again(monkeypatch):
    """Unless it says why that was absent; of a model, variants of its own are among its steps."""
    case = next(case for case in cases.CASES.values() if case.beside == ["compile"] and case.metric == "fraction")
    model = next(case for case in cases.CASES.values() if case.direction == "train" and case.beside)
    monkeypatch.setattr(evidence, "freshness", lambda row: "fresh")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    here = {"gpu": "a GPU", "triton": triton.__version__}
    for row, fresh in (({"compile": 0.7}, True), ({"eager": 0.7}, False)):
        assert commands.fresh_here(case.name, [{**here, "case": case.name, "rivals": row}]) == fresh
    assert commands.fresh_here(case.name, [{**here, "case": case.name, "rivals": {}, "absent": {"compile": "gone"}}])
    whole = {"case": model.name, "rivals": {"liger": 2.0}, "steps": dict.fromkeys(model.beside, {})}
    assert commands.fresh_here(model.name, [{**here, **whole}])


def test_a_rival_that_is_chosen_at_import_has_a_worker_of_its_own(fake, monkeypatch):
    """One for all cases, with its environment; it is asked after the case, and never where the case failed."""
    monkeypatch.setattr(run.rivals, "missing", lambda name: None)
    names = ["silu_fwd/8192x2048", "silu_fwd/4096x4096", "rms_norm_fwd/8192x2048", "rms_norm_fwd/4096x4096"]
    command = fake(silu_fwd__4096x4096="wrong", rms_norm_fwd__8192x2048="alone-fails")
    rows = list(run.supervise(names, ["liger_cutedsl", "eager"], {}, command, 20))
    assert [r["status"] for r in rows] == ["ok", "wrong", "ok", "ok"] and fake.starts() == 2
    assert rows[0]["rivals"] == rows[3]["rivals"] == {"liger_cutedsl": 5.0}
    assert rows[0]["rival_bytes"] == {"liger_cutedsl": 3} and "rivals" not in rows[1]
    assert rows[2]["rivals"] == {} and rows[2]["absent"] == {"liger_cutedsl": "it has no weight"}
    monkeypatch.setattr(run.rivals, "missing", lambda name: "liger_cutedsl: not installed")
    rows = list(run.supervise(names[:1], ["liger_cutedsl"], {}, fake(), 20))
    assert rows[0]["absent"] == {"liger_cutedsl": "liger_cutedsl: not installed"} and fake.starts() == 3


def test_a_worker_that_cannot_start_for_a_rival_costs_the_rival_alone(fake, monkeypatch):
    monkeypatch.setattr(run.rivals, "missing", lambda name: None)
    monkeypatch.setenv("READY_APART", "no room")
    names = ["silu_fwd/8192x2048", "silu_fwd/4096x4096"]
    rows = list(run.supervise(names, ["liger_cutedsl"], {}, fake(), 20))
    assert [r["absent"] for r in rows] == [{"liger_cutedsl": "no room"}] * 2 and fake.starts() == 2


def test_a_worker_of_a_rival_has_its_environment(monkeypatch):
    """Set before anything of the package is imported, which is when it chooses."""
    seen = []
    monkeypatch.setattr(run, "serve", lambda requests, replies: seen.append(os.environ.get("LIGER_KERNEL_IMPL")))
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "")  # so that what is set here is undone
    monkeypatch.delenv("LIGER_KERNEL_IMPL")
    assert packaged.is_apart("liger_cutedsl") and not packaged.is_apart("liger") and not packaged.is_apart("torch_add")
    for words in ([], [run.APART, "liger_cutedsl"]):
        reader, writer = os.pipe()
        run.main([*words, str(writer)])
        os.close(reader)
    assert seen == [None, "cutedsl"] and not packaged.is_apart("liger_cutedsl")


def test_rows_are_kept_when_a_run_is_interrupted(fake, tmp_path, monkeypatch):
    command = fake()

    def interrupted(names, beside, also, limit):
        for i, row in enumerate(SUPERVISE(names, beside, also, command, limit)):
            if i == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "supervise", interrupted)
    done = CliRunner().invoke(app, ["bench", "rms_norm_fwd", "--record", "--evidence", str(tmp_path)])
    assert done.exit_code == 130
    assert "interrupted after 2 of 5" in done.stderr and len(evidence.everything(tmp_path)) == 2


def test_bad_words_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for words, said in (
        (["bench", "rope_nonsense_xyz"], "no case, op or suite matches"),
        (["bench", "rms_norm_fwd", "--rivals", "nobody"], "no such rival"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "gpu.jsonl").write_text("{\n")
    done = CliRunner().invoke(app, ["bench", "rms_norm_fwd", "--evidence", str(tmp_path)])
    assert done.exit_code == 2 and "gpu.jsonl:1 is not JSON" in done.stderr


def test_the_worker_answers_wrong_cases_and_ends_after_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(run, "about", lambda case: {"gpu": "none"})
    names = list(cases.CASES)[:4]
    outcomes = {
        names[0]: {"us": 1.0, "method": "graph"},
        names[1]: check.Wrong("y: off"),
        names[2]: RuntimeError("a\nb"),
    }

    def measure(case, beside):
        outcome = outcomes[case.name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    replies = io.StringIO()
    requests = "".join(json.dumps({"case": name, "rivals": []}) + "\n" for name in names)
    run.serve(io.StringIO(requests), replies, measure)
    rows = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [r["status"] for r in rows] == ["ready", "ok", "wrong", "failed"]  # and no answer for the fourth
    assert rows[2]["why"] == "y: off" and rows[3]["why"] == "RuntimeError: a" and "measure" in rows[3]["trace"]


# ------------------------------------------------------------------------------------------------------------ GPU tests

TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("i", range(4))
def test_good(i):
    pass


def test_bad():
    assert os.environ.get("REPAIRED"), "off by one"


def test_hangs():
    if not os.environ.get("REPAIRED"):
        time.sleep(60)


def test_crashes():
    if not os.environ.get("REPAIRED"):
        os._exit(11)


@pytest.fixture
def broken():
    raise RuntimeError("no buffer")


def test_skipped():
    pytest.skip("no such chip")


def test_broken_setup(broken):
    pass


def test_last():
    pass
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A folder of tests beside the real ones."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\n")
    (folder / "test_one.py").write_text(TESTS)
    (folder / "test_two.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_two():\n    pass\n\ndef test_host_only():\n    assert False\n"
    )
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.delenv("REPAIRED", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def _gpu(suite: Path, *arguments: str) -> tuple[int, list[str]]:
    said: list[str] = []
    status = gpu.main(["--jobs", "2", *arguments], root=suite, need_cuda=False, say=said.append)
    return status, said


def test_bad_tests_cost_themselves_only_and_resume_repeats_them(suite, monkeypatch):
    monkeypatch.setenv("OUT", str(suite / "out"))
    status, said = _gpu(suite, "--limit", "5")
    assert status == 1 and said[-1] == "6 passed, 4 failed, 1 skipped, 0 left"
    failed = {line.split("::")[1] for line in said if line.startswith("FAILED")}
    assert failed == {"test_bad", "test_hangs", "test_crashes", "test_broken_setup"}
    told = "\n".join(said)
    assert "off by one" in told and "silent for 5 s" in told and "status 11" in told and "no buffer" in told
    assert (suite / "out" / gpu.STATE).read_text() == (suite / ".cache" / gpu.STATE).read_text()

    monkeypatch.setenv("REPAIRED", "1")
    (suite / "out" / gpu.STATE).unlink()  # a fresh machine's results folder is empty
    status, said = _gpu(suite, "--resume")
    assert "11 tests, 4 to run" in said[0]
    assert status == 1 and said[-1] == "9 passed, 1 failed, 1 skipped, 0 left"
    status, said = _gpu(suite, "tests/gpu/test_two.py")
    assert status == 0 and "1 tests, 1 to run" in said[0] and said[-1] == "1 passed, 0 failed, 0 skipped, 0 left"


SLOW = """
import os, time
from pathlib import Path

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("i", range(16))
def test_slow(i):
    with Path("ran").open("a") as file:
        file.write(f"{os.getpid()} {i}\\n")
    if i == 12 and not Path("crashed").exists():
        Path("crashed").touch()
        os._exit(11)
    time.sleep(0.4)
"""


def test_an_idle_process_takes_over_what_another_has_not_begun(suite, monkeypatch):
    """From its end, each test once, also where one of the two crashes."""
    monkeypatch.setattr(gpu, "SHORTEST", 1.0)
    (suite / "tests" / "gpu" / "test_one.py").write_text(SLOW)
    names = [f"tests/gpu/test_one.py::test_slow[{i}]" for i in range(16)]
    state, said = gpu.State([suite / "state"]), []
    gpu.Runner(state, suite, 2, 20.0, 60.0, {}, said.append).run([names])
    assert {state.outcome(name) for name in names} == {"passed", "failed"}
    assert said == ["FAILED tests/gpu/test_one.py::test_slow[12]"]
    ran: dict[str, list[int]] = {}
    for line in (suite / "ran").read_text().splitlines():
        process, i = line.split()
        ran.setdefault(process, []).append(int(i))
    assert sorted(i for some in ran.values() for i in some) == [*range(16)]
    # Whichever of them comes first on a busy machine: one goes on from the beginning, another from the end
    rising, falling = ([some for some in ran.values() if some == sorted(some, reverse=turn)] for turn in (False, True))
    assert rising and any(len(some) > 1 for some in falling) and all(some in rising + falling for some in ran.values())


def test_what_is_known_to_take_long_may_be_silent_for_long(suite):
    (suite / "tests" / "gpu" / "test_one.py").write_text(
        "import pytest, time\n\n@pytest.mark.gpu\ndef test_long():\n    time.sleep(8)\n"
    )
    name = "tests/gpu/test_one.py::test_long"
    for took, outcome in (({name: 4.0}, "passed"), ({}, "failed")):
        state = gpu.State([suite / outcome])
        gpu.Runner(state, suite, 1, 5.0, 60.0, took, print).run([[name]])
        assert state.outcome(name) == outcome


def test_when_time_is_up_the_rest_is_left(suite, monkeypatch):
    (suite / "tests" / "gpu" / "test_one.py").write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\n"
        "def test_first():\n    pass\ndef test_slow():\n    time.sleep(60)\n"
    )
    status, said = _gpu(suite, "tests/gpu/test_one.py", "--minutes", "0.1")
    assert status == 3 and "run again with --resume" in said[-1]
    assert said[-2].endswith(("0 failed, 0 skipped, 1 left", "0 failed, 0 skipped, 2 left"))


def test_a_file_that_lacks_something_is_skipped_and_says_what(suite):
    (suite / "tests" / "gpu" / "test_one.py").write_text(
        "import pytest\npytest.importorskip('no_such_module', reason='no_such_module is not installed')\n"
        "@pytest.mark.gpu\ndef test_one():\n    pass\n"
    )
    for _ in range(2):
        status, said = _gpu(suite, "--resume")
        assert status == 0 and said[-1] == "1 passed, 0 failed, 1 skipped, 0 left"
        assert said[0].startswith("SKIPPED tests/gpu/test_one.py: ") and said[0].endswith(
            "no_such_module is not installed"
        )
    names = suite / "names"  # of which one machine has made a list and another runs them
    names.write_text("tests/gpu/test_one.py::test_one\ntests/gpu/test_two.py::test_two\n")
    status, said = _gpu(suite, "--only", str(names))
    assert status == 0 and said[-1] == "1 passed, 0 failed, 1 skipped, 0 left"


def test_tests_that_cannot_be_imported_are_an_error(suite):
    (suite / "tests" / "gpu" / "test_two.py").write_text("import no_such_module\n")
    with pytest.raises(SystemExit, match="could not collect"):
        _gpu(suite)
    with pytest.raises(SystemExit, match="no tests to run"):
        _gpu(suite, "tests/gpu/test_one.py", "--shard", "99/99")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            gpu.main(["tests/gpu/test_one.py"], root=suite, say=print)


def test_models_are_a_part_with_the_time_that_is_left(tmp_path, monkeypatch):
    asked: list[list[str]] = []

    def run(command, **settings):
        asked.append(command)
        (tmp_path / ".cache").mkdir(exist_ok=True)
        (tmp_path / ".cache" / gpu.MODELS).write_text("{}\n")
        return types.SimpleNamespace(returncode=3)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setenv("OUT", str(tmp_path))
    said: list[str] = []
    assert gpu.at_models(gpu.parse(["--shard", "2/3"]), 5.0, tmp_path, said.append) == 3 and not said
    words = asked[0][asked[0].index("check") :]
    assert words[:6] == ["check", "--models", "--shard", "2/3", "--minutes", "5.00"] and words[-1] == "--again"
    assert (tmp_path / gpu.MODELS).exists()
    gpu.at_models(gpu.parse(["--resume"]), 5.0, tmp_path, said.append)
    assert "--again" not in asked[1]
    assert gpu.at_models(gpu.parse([]), 0.1, tmp_path, said.append) == 3 and "--resume" in said[0] and len(asked) == 2
    assert [gpu.worst(*s) for s in ((0, 0), (0, 3), (3, 1), (2, 3), (1, 0))] == [0, 3, 1, 2, 1]


def test_units_cover_every_test_once_and_those_that_take_memory_come_first():
    names = [f"tests/gpu/test_{f}.py::test_x[{i}]" for f in ("a", "large_b", "c") for i in range(25)]
    names += [f"tests/gpu/test_c.py::test_y[wide_strides-{i}]" for i in range(9)]
    units = gpu.units_of(names, dict.fromkeys(names, 3.0), 10, 1000.0, jobs=4)
    assert sorted(n for u in units for n in u) == sorted(names)
    assert all(len({n.split("::")[0] for n in u}) == 1 and len(u) <= 10 for u in units)
    assert [gpu.thirds(u) for u in units] == [3] * 3 + [1] * 3 + [0] * 6
    assert [len(u) for u in units if gpu.thirds(u) == 1] == [3, 3, 3]  # some for each of the three that may run at once
    assert gpu.units_of([], {}, 10, 60.0, jobs=4) == []
    for bad in (["--shard", "0/2"], ["--shard", "3/2"], ["--shard", "x"], ["--shard", "1"], ["--per-process", "0"]):
        with pytest.raises(SystemExit):
            gpu.parse(bad)


def test_a_process_has_tests_for_so_many_seconds_and_the_longest_begin_first():
    long, slow, quick = ([f"tests/gpu/test_{f}.py::test_x[{i}]" for i in range(20)] for f in ("a", "b", "c"))
    took = {**dict.fromkeys(long, 1.0), **dict.fromkeys(slow, 12.0), **dict.fromkeys(quick, 0.5), long[7]: 70.0}
    units = gpu.units_of([*quick, *slow, *long], took, 80, 60.0, jobs=2)
    # The first of the others are not cut in two by the long one between them
    assert units == [[long[7]], *(slow[i : i + 5] for i in (0, 5, 10, 15)), [*long[:7], *long[8:]], quick]
    seconds = [sum(took[n] for n in u) for u in units]
    assert seconds == sorted(seconds, reverse=True) == [70.0, *[60.0] * 4, 19.0, 10.0]
    assert [len(u) for u in gpu.units_of(quick, took, 6, 60.0, jobs=1)] == [6, 6, 6, 2]
    assert [len(u) for u in gpu.units_of(slow[:6], took, 80, 60.0, jobs=3)] == [2, 2, 2]  # a third of the seconds each
    assert [len(u) for u in gpu.units_of(quick, took, 80, 60.0, jobs=20)] == [20]  # a second process would only import
    nothing_known = gpu.units_of(slow, {}, 80, 10.0, jobs=1)
    assert [len(u) * gpu.UNKNOWN for u in nothing_known] == [10.0, 10.0]


def test_of_a_test_that_nobody_timed_its_neighbours_say_how_long_it_takes():
    case = "tests/gpu/test_properties.py::test_property[{}-{}]".format
    timed = {case("strides", "rms_norm"): 9.0, case("outs", "rms_norm"): 1.0, case("paths", "rms_norm"): 2.0}
    timed["tests/gpu/test_a.py::test_x[3]"] = 7.0
    files = ("tests/gpu/test_a.py::test_x[4]", "tests/gpu/test_a.py::test_y", "tests/gpu/test_concurrency.py::test_z")
    names = [case("strides", "rms_norm"), case("sizes", "rms_norm"), case("sizes", "glu"), *files]
    long = gpu.LONG["tests/gpu/test_concurrency.py"]
    assert [*gpu.supposed(names, timed).values()] == [9.0, 2.0, gpu.UNKNOWN, 7.0, gpu.UNKNOWN, long]


def test_neighbours_are_of_one_op():
    case = "tests/gpu/test_properties.py::{}[{}]".format
    ops = [case("test_property", f"{what}-{op}") for what in ("strides", "outs") for op in ("glu", "rms_norm")]
    names = [case("test_streams", "rms_norm"), case("test_streams", "glu"), *ops, case("test_threads", "none")]
    (unit,) = gpu.units_of(names, {}, 80, 60.0, jobs=1)
    assert unit == [names[1], names[0], ops[0], ops[2], ops[1], ops[3], names[-1]]


def test_shards_agree_whatever_has_been_kept(suite):
    """What one shard adds to the evidence moves no test into another shard, and none is lost."""
    listed = suite / "listed"

    def names(part):
        assert _gpu(suite, "--shard", f"{part}/2", "--list", str(listed)) == (0, [])
        return listed.read_text().splitlines()

    first = names(1)
    kept = suite / gpu.passed.KEPT
    rows = [{"file": (at := n.partition("::"))[0], "test": at[2], "passed": [""], "seconds": {"": 99}} for n in first]
    kept.parent.mkdir(parents=True)
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = names(2)
    assert len({*first, *second}) == len(first) + len(second) == 11 and names(1) == first


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "outc')
    state = gpu.State([path])
    assert state.outcome("a") == "passed" and state.outcome("b") is None
    for name, outcome in (("c", "passed"), ("d", "failed")):
        state.add({"id": name, "outcome": outcome, "seconds": 4.5})
    assert state.took() == {"c": 4.5}  # who failed may have stopped early, and of the first nobody wrote it down


def small_tree(root):
    """A library of two ops that share a device function, and its GPU tests."""
    texts = {
        "tilewright/names.py": 'NAMES = {"fp8": "formats.fp8"}\nOPS = {"one": "ops.a.one", "two": "ops.a.two"}\n',
        "tilewright/ops/a/one.py": """from ...device.shared import f
from ...core import draw
from ...gemm.preference import chosen


def forward():
    \'\'\'It.\'\'\'
    chosen()
    return f()


def beside():
    return 1


declared = Op("one", forward)
""",
        "tilewright/ops/a/two.py": """from ...formats import fp8 as codes


def room():
    return 9


two = Op("two", codes.g, bars=Bars("E", drift=room))
""",
        "tilewright/device/shared.py": "LIMIT = 1\n\n\ndef f():\n    return LIMIT\n\n\ndef other():\n    return 2\n",
        "tilewright/formats/fp8.py": "def g():\n    return 1\n\n\n@kept('x')\ndef hidden():\n    return 3\n\n\nfp8 = g\n",
        "tilewright/core/draw.py": "h = 1\n",
        "tilewright/gemm/preference.py": "def chosen():\n    return inner()\n\n\ndef inner():\n    return 11\n",
        "tilewright/integrations/every.py": "def all_of_them():\n    return 7\n",
        "tilewright/check/provided/rows.py": """import tilewright as tw


def of_one():
    return tw.one(6)


CALLS = {"a": {"first-b": of_one, "second": lambda: tw.two(8)}}
""",
        "tests/helper.py": "def made(x):\n    return x\n\n\ndef unused():\n    return 5\n",
        "tests/gpu/test_properties.py": """import tilewright as tw


def test_property(op):
    assert tw.catalogue()[op]
""",
        "tests/gpu/test_two.py": """import tilewright as tw
from tests.helper import made

LIMIT = 1


@fixture(autouse=True)
def always():
    return 4


@fixture
def below():
    return 12


@fixture
def given(below):
    return 13


@mark
def test_x():
    made(tw.two(tw.fp8))


@mark(2)
def test_z(given):
    assert 1 < LIMIT
""",
        "tests/gpu/test_chosen.py": "from tilewright.gemm import preference\n\n\ndef test_c():\n    preference.chosen()\n",
        "tests/gpu/test_rest.py": "from tilewright.integrations.every import one\n\n\ndef test_y(n):\n    assert one(n)\n",
        "tests/gpu/test_rows.py": """from tilewright.check.provided.rows import CALLS


def test_call(name, row):
    CALLS[name][row]()
""",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("changed", "old", "again"),
    [
        ("tilewright/ops/a/one.py", "return f()", {"one", "rest", "row"}),
        ("tilewright/ops/a/one.py", "return 1", {"rest"}),  # no op has it
        ("tilewright/ops/a/one.py", "It.", set()),
        ("tilewright/ops/a/two.py", "return 9", set()),  # what an op is held to
        ("tilewright/device/shared.py", "LIMIT = 1", {"one", "rest", "row"}),
        ("tilewright/device/shared.py", "return 2", {"rest"}),
        ("tilewright/formats/fp8.py", "return 1", {"two", "test_x", "rest", "other"}),
        # Who knows where a decorator put it
        ("tilewright/formats/fp8.py", "return 3", {"two", "test_x", "rest", "other"}),
        ("tilewright/core/draw.py", "h = 1", set()),
        ("tilewright/gemm/preference.py", "return 11", {"chosen"}),
        ("tilewright/check/provided/rows.py", "one(6)", {"row"}),
        ("tilewright/check/provided/rows.py", "two(8)", {"other"}),
        ("tests/helper.py", "return x", {"test_x"}),
        ("tests/helper.py", "return 5", set()),
        ("tests/gpu/test_two.py", "tw.two", {"test_x"}),
        ("tests/gpu/test_two.py", "return 4", {"test_x", "test_z"}),  # a fixture may be every test's
        ("tests/gpu/test_two.py", "return 13", {"test_z"}),  # or that of a test that asks for it
        ("tests/gpu/test_two.py", "return 12", {"test_z"}),
        ("tests/gpu/test_two.py", "LIMIT = 1", {"test_z"}),
        ("tests/gpu/test_two.py", "mark(2)", {"test_z"}),
        ("tests/gpu/test_properties.py", "catalogue()", {"one", "two"}),
    ],
)
def test_what_has_passed_over_this_code_is_not_run_again(tmp_path, changed, old, again):
    from tests.gpu import passed

    small_tree(tmp_path)
    tests = {
        "one": "tests/gpu/test_properties.py::test_property[accuracy-one]",
        "two": "tests/gpu/test_properties.py::test_property[accuracy-two]",
        "test_x": "tests/gpu/test_two.py::test_x",
        "test_z": "tests/gpu/test_two.py::test_z",
        "rest": "tests/gpu/test_rest.py::test_y[3]",
        "row": "tests/gpu/test_rows.py::test_call[a-first-b]",
        "other": "tests/gpu/test_rows.py::test_call[a-second]",
        "chosen": "tests/gpu/test_chosen.py::test_c",
    }
    outcomes = [{"id": test, "outcome": "passed"} for test in tests.values()]
    state = tmp_path / "state.jsonl"
    state.write_text("".join(json.dumps(row) + "\n" for row in outcomes))
    passed.main([str(state)], root=tmp_path)
    kept = passed.read(tmp_path / passed.KEPT)
    assert passed.passed(tests.values(), passed.Code(tmp_path), kept) == {*tests.values()}
    text = (tmp_path / changed).read_text()
    assert text.count(old) == 1
    (tmp_path / changed).write_text(f"{text.replace(old, f'{old}  + 1' if 'It.' not in old else 'That.')}# another\n")
    code = passed.Code(tmp_path)
    assert {*tests.values()} - passed.passed(tests.values(), code, kept) == {tests[name] for name in again}
    failed = passed.add([{"id": tests["rest"], "outcome": "failed"}], code, kept, "a chip")
    assert tests["rest"] not in passed.passed(tests.values(), code, failed)


def test_a_definition_may_move_to_another_file(tmp_path):
    from tests.gpu import passed

    small_tree(tmp_path)
    test = "tests/gpu/test_properties.py::test_property[accuracy-one]"
    source = passed.Code(tmp_path).source(test)
    shared, own = tmp_path / "tilewright/device/shared.py", tmp_path / "tilewright/ops/a/one.py"
    shared.rename(shared.with_name("moved.py"))
    assert passed.Code(tmp_path).source(test) != source  # which then does not reach it
    own.write_text(own.read_text().replace("device.shared", "device.moved"))
    assert passed.Code(tmp_path).source(test) == source


def test_what_stands_for_changed_machinery_is_run_again(tmp_path):
    """Only that, and not for the sake of a comment; a row says with which machinery its tests ran."""
    from tests.gpu import passed

    small_tree(tmp_path)
    words = ("unlike-one",)
    standing, another = (
        f"tests/gpu/test_properties.py::test_property[{what}]" for what in ("unlike-one", "accuracy-one")
    )
    tests, chip = [standing, another], "a chip"

    def rows(kept, why=None, which=tests):
        return passed.add(
            [{"id": t, "outcome": "passed", "why": why} for t in which], passed.Code(tmp_path), kept, chip
        )

    def again(kept):
        return passed.passed_otherwise(tests, passed.Code(tmp_path), kept, words)

    kept = rows([])
    assert not again(kept)
    drawn = tmp_path / "tilewright/core/draw.py"
    drawn.write_text('"""Words."""\nh = 1  # one\n')
    assert not again(kept)
    drawn.write_text("h = 2\n")
    kept = rows(kept, passed.BY_EVIDENCE)
    assert again(kept) == {standing} and passed.passed(tests, passed.Code(tmp_path), kept) == {*tests}
    assert again([{k: v for k, v in row.items() if k != "machinery"} for row in kept]) == {standing}
    kept = rows(kept, which=[standing])
    assert not again(kept) and [len(row["passed"]) for row in kept] == [1, 1]
    with pytest.raises(SystemExit):
        gpu.parse(["--machinery"])
    assert {"unlike-quantize", "refusals-matmul"} <= {*gpu.of_the_machinery()}


def test_what_passed_under_one_triton_has_not_passed_under_another(tmp_path):
    """Rows that name none are the usual one's, and stay as they are."""
    from tests.gpu import passed

    small_tree(tmp_path)
    code, test = passed.Code(tmp_path), "tests/gpu/test_two.py::test_x"

    def added(kept, outcome="passed", triton="3.9"):
        return passed.add([{"id": test, "outcome": outcome, **passed.naming(triton)}], code, kept, "a chip")

    def under(kept, triton):
        return bool(passed.passed([test], code, kept, triton))

    usual = added([], triton=passed.USUAL)
    assert "triton" not in usual[0] and under(usual, "3.6") and not under(usual, "3.9")
    both = added(usual)
    assert [row.get("triton") for row in both] == [None, "3.9"] and under(both, "3.6") and under(both, "3.9")
    assert added(both, "failed") == usual and under(added(both, "failed", passed.USUAL), "3.9")
    draws = tmp_path / "tilewright/core/draw.py"
    draws.write_text("h = 2\n")  # other machinery: what stands for it is to run again, under each Triton
    code = passed.Code(tmp_path)
    ran = added(both)
    assert passed.passed_otherwise([test], code, ran, [""], "3.6") == {test}
    assert not passed.passed_otherwise([test], code, ran, [""], "3.9")
    (tmp_path / "tests/helper.py").write_text(
        "def made(x):\n    return -x\n"
    )  # what has run leaves its own Triton's rows
    code = passed.Code(tmp_path)
    assert [row.get("triton") for row in added(ran)] == [None, "3.9"] and not under(added(ran), "3.6")


def test_outcomes_under_another_triton_are_kept_and_do_not_count(suite, monkeypatch):
    monkeypatch.setattr(gpu, "installed", lambda: "3.6")
    alone = "tests/gpu/test_two.py"
    assert _gpu(suite, alone)[0] == 0 and "0 to run under Triton 3.6" in _gpu(suite, alone, "--resume")[1][0]
    monkeypatch.setattr(gpu, "installed", lambda: "3.9")
    assert "1 to run under Triton 3.9" in _gpu(suite, alone, "--resume")[1][0]
    rows = gpu.read_rows(suite / ".cache" / gpu.STATE)
    assert [(row["id"].partition("::")[2], row.get("triton")) for row in rows] == [
        ("test_two", None),
        ("test_two", "3.9"),
    ]
    assert "0 to run" in _gpu(suite, alone, "--resume")[1][0]


def test_accuracy_is_what_compares_with_float64_and_the_kernels_in_gluon(suite):
    from tilewright.check.properties import VALUES

    assert {*gpu.NUMBERS} <= {prop.__name__ for prop in VALUES}
    assert all((ROOT / "tests" / "gpu" / f"test_{name}.py").exists() for name in gpu.KERNELS)
    files = {
        "properties": ("test_property[accuracy-glu]", "test_property[strides-glu]", "test_streams[glu]"),
        "glu": ("test_x",),
    }
    names = [f"tests/gpu/test_{file}.py::{test}" for file, tests in files.items() for test in tests]
    assert [gpu.of_accuracy(name) for name in names] == [True, False, False, True]
    with pytest.raises(SystemExit, match="no tests to run"):
        _gpu(suite, "--accuracy")


def test_seconds_are_kept_of_what_is_slow(tmp_path):
    """Also beside rows from before they were kept, which say nothing of theirs."""
    from tests.gpu import passed

    small_tree(tmp_path)
    code = passed.Code(tmp_path)
    fast, slow, alone = (f"tests/gpu/test_{n}" for n in ("rest.py::test_y[3]", "rest.py::test_y[4]", "two.py::test_x"))

    def added(kept, test, seconds=None, outcome="passed", **more):
        timed = {} if seconds is None else {"seconds": seconds}
        return passed.add([{"id": test, "outcome": outcome, **timed, **more}], code, kept, "a chip")

    old = added([], alone)
    assert "seconds" not in old[0] and passed.took(old) == {}
    kept = added(added(old, fast, 0.2), slow, 17.6)
    assert [row.get("seconds") for row in kept] == [{"4": 18}, None]
    assert passed.took(kept) == {fast: passed.FAST, slow: 18}
    assert passed.passed([fast, slow, alone], code, kept) == {fast, slow, alone}
    assert added(kept, slow, why=passed.BY_EVIDENCE) == kept  # what did not run keeps its seconds
    assert passed.took(added(kept, slow, 2.9)) == {fast: passed.FAST, slow: passed.FAST}
    assert passed.took(added(kept, slow, 1.0, "failed")) == {fast: passed.FAST}
    assert passed.took(added(kept, alone, 5.0))[alone] == 5
    other = [{**kept[0], "source": "another", "seconds": {"3": 9}}]  # the same tests over other code
    assert passed.took([*other, *kept]) == {fast: 9, slow: 18}
