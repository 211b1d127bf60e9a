"""The bookkeeping of the nets: CPU seconds by op, budgets that warn or err, parts that together are the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import seconds

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import os, subprocess, sys, time
import pytest

def burn(amount):
    end = time.process_time() + amount
    while time.process_time() < end:
        pass

@pytest.mark.parametrize("op", ["rms_norm", "glu"])
@pytest.mark.parametrize("turn", range(3))
def test_works(op, turn):
    burn(0.1)

def test_sleeps():
    time.sleep(1.5)

def test_starts_another():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"], check=True)
"""


@pytest.fixture
def suite(tmp_path) -> Path:
    """A net of a few tests with the conftest of the real ones, over a library that takes no time to import."""
    folder, library = tmp_path / "tests", tmp_path / "tilewright"
    folder.mkdir()
    library.mkdir()
    (folder / "__init__.py").touch()
    (library / "__init__.py").write_text("def catalogue(): pass\n")
    (library / "names.py").write_text('OPS = {"rms_norm": "", "glu": ""}\n')
    for name in ("conftest.py", "seconds.py"):
        (folder / name).write_text((ROOT / "tests" / name).read_text())
    (folder / "test_suite.py").write_text(SUITE)
    return tmp_path


def run(suite: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TILEWRIGHT_", "PYTEST_", "SLOWER"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *options, "tests"]
    env = {
        **kept,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(suite),
        "TILEWRIGHT_NET": "host",
        **environment,
    }
    return subprocess.run(command, cwd=suite, env=env, capture_output=True, text=True, timeout=300)


def kept(suite: Path) -> dict:
    return json.loads((suite / ".cache" / "seconds.json").read_text())


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "two workers"])
def test_cpu_seconds_of_each_op_are_printed_and_kept(suite, options):
    done = run(suite, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    spent = kept(suite)["host"]["1/1"]
    assert spent.keys() == {"rms_norm", "glu", "test_suite", seconds.REST}
    assert 0.3 <= spent["rms_norm"] < 1.4 and 0.3 <= spent["glu"] < 1.4
    assert 0.5 <= spent["test_suite"] < 1.5, "a child's time counts, sleeping does not"
    assert "3 tests  rms_norm" in done.stdout and "budget" not in done.stdout


def test_a_test_whose_process_dies_is_named_beside_the_others(suite):
    (suite / "tests" / "test_dies.py").write_text("import os\ndef test_dies():\n    os._exit(3)\n")
    done = run(suite, "-n", "1", "-k", "works or dies")
    assert done.returncode == 1 and "FAILED tests/test_dies.py::test_dies" in done.stdout, done.stdout
    assert "3 tests  rms_norm" in done.stdout


def test_a_budget_warns_and_errs_only_where_asked(suite):
    few = ("-k", "works")  # without the sleeper and the other process
    slow = {"SLOWER": "0.0001"}  # every budget is exceeded
    done = run(suite, *few, **slow)
    assert done.returncode == 0 and "WARNING: over budget: the host net took" in done.stdout
    assert "WARNING: over budget: glu took" in done.stdout
    done = run(suite, *few, TILEWRIGHT_BUDGETS="error", **slow)
    assert done.returncode == 1 and "ERROR: over budget: the host net took" in done.stdout
    done = run(suite, *few, TILEWRIGHT_BUDGETS="error")
    assert done.returncode == 0 and "over budget" not in done.stdout
    done = run(suite, *few, TILEWRIGHT_BUDGETS="error", TILEWRIGHT_NET="", **slow)
    assert done.returncode == 0 and "over budget" not in done.stdout, "a few tests of a net have no budget"


def test_parts_together_run_every_test_once(suite):
    ran, counts = [], []
    for part in range(1, 4):
        done = run(suite, "-vv", "-k", "works", TILEWRIGHT_SHARD=f"{part}/3")
        assert done.returncode == 0, done.stdout
        mine = [line.split()[0] for line in done.stdout.splitlines() if "PASSED" in line]
        ran += mine
        counts.append(len(mine))
    assert len(ran) == len(set(ran)) == 6 and counts == [2, 2, 2]
    assert kept(suite)["host"].keys() == {"1/3", "2/3", "3/3"}
    assert sum(seconds.by_net(kept(suite))["host"].values()) > 0.6
    run(suite, "-k", "works", TILEWRIGHT_SHARD="1/2")
    assert kept(suite)["host"].keys() == {"1/2"}, "parts of another split are of another run"
    done = run(suite, TILEWRIGHT_SHARD="3/2")
    assert done.returncode == 4 and "SHARD is I/N with 1 <= I <= N, got '3/2'" in done.stderr


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_parts_are_a_partition_whatever_the_order(parts):
    names = [f"tests/host/test_{a}.py::test[{b}]" for a in "abc" for b in range(11)]
    split = [seconds.shard(order, part, parts) for order in (names, names[::-1]) for part in range(1, parts + 1)]
    assert split[:parts] == split[parts:]
    assert sorted(name for mine in split[:parts] for name in mine) == sorted(names)
    sizes = [len(mine) for mine in split]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/", "-1/2", "1/2/3"])
def test_a_malformed_part_is_refused(text):
    with pytest.raises(ValueError, match="SHARD is I/N"):
        seconds.read_shard(text)


def test_what_a_test_is_about():
    assert seconds.subject(Path("tests/host/test_properties.py"), {"op": "glu"}) == "glu"
    assert seconds.subject(Path("tests/host/test_glu.py"), {"kind": 1}) == "glu"
    assert seconds.subject(Path("tests/host/test_cli.py"), {}) == "test_cli"


def test_the_listing_and_the_budgets_of_all_nets(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_BUDGETS", raising=False)
    monkeypatch.delenv("SLOWER", raising=False)
    monkeypatch.setattr(seconds, "OP", 60)
    path = tmp_path / "seconds.json"
    assert seconds.main(path) == 1 and "nothing is kept" in capsys.readouterr().out
    seconds.keep("host", "1/1", {"glu": 40.0, "test_cli": 2.0}, path)
    seconds.keep("smoke", "1/1", {"glu": 1.5}, path)
    assert seconds.main(path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["host", "smoke", "all"] and lines[1].split() == ["40.0", "1.5", "41.5", "glu"]
    assert lines[3].split() == ["42.0", "1.5", "43.5", "in", "all"]
    seconds.keep("interpreter", "1/1", {"glu": 30.0}, path)
    assert seconds.main(path) == 0 and "WARNING: over budget: glu took 72 CPU" in capsys.readouterr().out
    monkeypatch.setenv("TILEWRIGHT_BUDGETS", "error")
    assert seconds.main(path) == 1 and "ERROR: over budget: glu took 72 CPU" in capsys.readouterr().out
    monkeypatch.setenv("SLOWER", "2")
    assert seconds.main(path) == 0
    monkeypatch.setattr(seconds, "OTHERS", 1)  # 2 with SLOWER
    assert seconds.main(path) == 0
    seconds.keep("aten", "1/1", {"test_values": 9.0}, path)
    assert seconds.main(path) == 0, "torch's operators have the budget of their net"
    seconds.keep("smoke", "1/1", {"test_cli": 1.5}, path)
    assert seconds.main(path) == 1 and "all that is no op's took 4 CPU" in capsys.readouterr().out
    path.write_text("{")
    assert seconds.load(path) == {}, "a damaged file is none"
