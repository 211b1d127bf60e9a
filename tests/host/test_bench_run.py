"""The programs that run benchmark cases and GPU tests: what hangs or crashes costs itself only."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as gpu
from tilewright.bench import cases, check, run

ROOT = Path(__file__).resolve().parents[2]


# ----------------------------------------------------------------------------------------------------------- benchmarks

FAKE_WORKER = """
import json, os, sys, time
replies = os.fdopen(int(sys.argv[-1]), "w")
def reply(row):
    replies.write(json.dumps(row) + "\\n"); replies.flush()
open(os.environ["STARTS"], "a").write("x")
print("noise on stdout", flush=True)
reply({"status": os.environ.get("READY", "ready")})
for line in sys.stdin:
    name = line.strip()
    plan = json.loads(os.environ["PLAN"]).get(name, "ok")
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
        reply({"status": "ok", "us": 9.0, "floor_us": 4.5, "measured": 0.5, "error": 0.0, "method": "events: no"})
    else:
        reply({"status": "ok", "us": 10.0, "floor_us": 9.9, "measured": 0.99, "error": 1e-3, "method": "graph"})
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
    rows = list(run.supervise(["a", "b", "c"], fake(b="wrong"), 20, 20))
    assert [r["status"] for r in rows] == ["ok", "wrong", "ok"] and fake.starts() == 1


def test_a_hang_and_a_crash_cost_one_case_each(fake):
    rows = list(run.supervise(["a", "b", "c", "d", "e"], fake(a="hang", c="crash", d="failed"), 1.0, 20))
    assert [r["status"] for r in rows] == ["lost", "ok", "lost", "failed", "ok"]
    assert rows[0]["why"].startswith("timed out after 1 s")
    assert "status 3" in rows[2]["why"] and "illegal memory access" in rows[2]["why"]
    assert fake.starts() == 4


def test_a_failed_capture_replaces_the_worker(fake):
    rows = list(run.supervise(["a", "b"], fake(a="events"), 20, 20))
    assert [r["status"] for r in rows] == ["ok", "ok"] and fake.starts() == 2


def test_a_worker_that_cannot_start_ends_the_run(fake, monkeypatch):
    monkeypatch.setenv("READY", "no CUDA device")
    with pytest.raises(SystemExit, match="no CUDA device"):
        list(run.supervise(["a"], fake(), 20, 20))
    with pytest.raises(SystemExit, match="did not start"):
        list(run.supervise(["a"], [sys.executable, "-c", "raise ValueError('broken')"], 20, 20))


def test_the_real_worker_says_that_there_is_no_device(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with pytest.raises(SystemExit, match="no CUDA device"):
        run.main(["launch_rms_norm"])


def test_results_are_written_and_judged(fake, tmp_path, monkeypatch):
    path = tmp_path / "deep" / "rows.jsonl"
    said = []
    command = fake(**{"silu_fwd__8192x2048": "wrong", "silu_bwd__8192x2048": "events"})
    status = run.main(["silu_[fb]*/8192*", "rms_norm_fwd/*x2048", "--json", str(path)], command, said.append)
    rows = {r["case"]: r for r in map(json.loads, path.read_text().splitlines())}
    assert status == 1 and len(rows) == 3
    good = rows["rms_norm_fwd/8192x2048"]
    assert good["reached"] and good["goal"] == 0.92 and good["dims"] == {"tokens": 8192, "hidden": 2048}
    assert not rows["silu_bwd/8192x2048"]["reached"]
    assert "us" not in rows["silu_fwd/8192x2048"] and "reached" not in rows["silu_fwd/8192x2048"]
    end = said[-1]
    assert "1 reached, 1 short, 1 without a number" in end
    assert "short: silu_bwd/8192x2048" in end and "wrong or failed: silu_fwd/8192x2048" in end
    assert "short by 0.460  (events: no)" in end and "WRONG: y: off" in end
    monkeypatch.setenv("OUT", str(tmp_path))
    assert run.main(["rms_norm_fwd/8192*"], fake(), said.append) == 0
    assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 1


def test_selection(monkeypatch):
    assert run.select([]) == list(cases.CASES)
    assert len(run.select(["rms_norm_*"])) == 20 and len(run.select(["*/8192x2048"])) == 8
    assert run.select(["launch*", "silu_fwd/4096x4096"]) == ["silu_fwd/4096x4096", "launch_rms_norm/64x512"]
    with pytest.raises(SystemExit, match="no case matches 'rope'"):
        run.select(["rope"])
    said = []
    assert run.main(["--list", "launch*"], say=said.append) == 0
    assert said[0].split() == ["launch_rms_norm/64x512", "vs:torch_add", "0.90"]


def test_the_worker_answers_wrong_cases_and_ends_after_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(run, "machine", lambda: {"gpu": "none"})
    names = list(cases.CASES)[:4]
    outcomes = {
        names[0]: {"us": 1.0, "method": "graph"},
        names[1]: check.Wrong("y: off"),
        names[2]: RuntimeError("a\nb"),
    }

    def measure_case(case):
        outcome = outcomes[case.name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "measure_case", measure_case)
    replies = io.StringIO()
    run.serve(io.StringIO("\n".join(names) + "\n"), replies)
    rows = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [r["status"] for r in rows] == ["ready", "ok", "wrong", "failed"]  # and no answer for the fourth
    assert rows[2]["why"] == "y: off" and rows[3]["why"] == "RuntimeError: a" and "measure_case" in rows[3]["trace"]


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


def test_when_time_is_up_the_rest_is_left(suite, monkeypatch):
    (suite / "tests" / "gpu" / "test_one.py").write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\n"
        "def test_first():\n    pass\ndef test_slow():\n    time.sleep(60)\n"
    )
    status, said = _gpu(suite, "tests/gpu/test_one.py", "--minutes", "0.1")
    assert status == 3 and "run again with --resume" in said[-1]
    assert said[-2].endswith(("0 failed, 0 skipped, 1 left", "0 failed, 0 skipped, 2 left"))


def test_tests_that_cannot_be_imported_are_an_error(suite):
    (suite / "tests" / "gpu" / "test_two.py").write_text("import no_such_module\n")
    with pytest.raises(SystemExit, match="could not collect"):
        _gpu(suite)
    with pytest.raises(SystemExit, match="no tests to run"):
        _gpu(suite, "tests/gpu/test_one.py", "--shard", "9/9")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no CUDA device"):
            gpu.main(["tests/gpu/test_one.py"], root=suite, say=print)


def test_shards_and_units_cover_every_test_once():
    names = [f"tests/gpu/test_{f}.py::test_x[{i}]" for f in ("a", "large_b", "c") for i in range(25)]
    units = gpu.units_of(names, 10)
    assert sorted(n for u in units for n in u) == sorted(names)
    assert all(len({n.split("::")[0] for n in u}) == 1 and len(u) <= 10 for u in units)
    assert [gpu.is_large(u) for u in units] == [True] * 3 + [False] * 6
    parts = [u for k in range(1, 5) for u in units[k - 1 :: 4]]
    assert sorted(map(tuple, parts)) == sorted(map(tuple, units))
    for bad in ("0/2", "3/2", "x", "1"):
        with pytest.raises(SystemExit):
            gpu.parse(["--shard", bad])


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "rows"
    path.write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "outc')
    state = gpu.State([path])
    assert state.outcome("a") == "passed" and state.outcome("b") is None
