"""Tuning without a GPU: what is searched, which reading is believed, what a row says and what becomes of the file."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilewright as tw
from tests.pretended import Pretended
from tilewright.bench import tune
from tilewright.check import guarded
from tilewright.check.guarded import supervise
from tilewright.core.target import TARGETS
from tilewright.runtime import config
from tilewright.runtime.kernel import Arguments

ARCH = "sm_90"
A, B, C = ({"ROWS": rows, "num_warps": 4} for rows in (1, 2, 4))


def task(size: int = 4096, configs: tuple = (A, B, C), kernel: str = "toy") -> tune.Task:
    return tune.Task("op", {"tokens": 8}, "", "forward", kernel, {"N": size}, configs, configs)


# ---------------------------------------------------------------- what there is to tune


def test_an_op_is_called_at_the_sizes_it_has_in_a_model():
    ops = tw.catalogue()
    widths = {d["hidden"] for d in tune.sizes(ops["glu"], ["deepseek-v3", "llama-3-8b", "mixtral-8x7b"], 64)}
    assert widths == {18432, 2048, 14336}  # dense and expert layers, never the hidden size
    assert {d["hidden"] for d in tune.sizes(ops["rms_norm"], ["llama-3-8b", "mixtral-8x7b"], 64)} == {4096}
    twice = tune.sizes(ops["cross_entropy"], ["llama-3-8b", "llama-3-70b"], 64)
    assert twice == [{"tokens": 64, "vocab": 128256}]


def test_tasks_name_the_launch_and_its_candidates():
    ops = tw.catalogue()
    pair = [ops["cross_entropy_lse"], ops["cross_entropy"], ops["glu"]]
    found = {t.name: t for t in tune.tasks(pair, ["mixtral-8x7b"], TARGETS[ARCH], 512)}
    assert set(found) == {
        f"{name}_{way} N={size}" for name, size in (("glu", 14336), ("cross_entropy", 32000)) for way in ("forward", "backward")
    }  # fmt: skip
    for name, one in found.items():
        assert one.direction in name and one.op in ("glu", "cross_entropy")
        assert all(one.configs.count(c) == 1 for c in one.configs) and len(one.configs) > 4
        asked = json.loads(one.request(one.configs[1]))
        assert asked["default"] == one.configs[0] and asked["config"] == one.configs[1] and asked["key"] == one.key
    assert tune.tasks([ops["quantize"]], ["mixtral-8x7b"], TARGETS[ARCH], 512) == []


def test_an_override_holds_inside_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    config.table.cache_clear()
    kernel = SimpleNamespace(name="toy", tune_by=("N",), default=lambda a: A, candidates=lambda a: [A, B])
    a = Arguments(N=64)
    with config.overridden(lambda k, a: B if k.name == "toy" and a.N == 64 else None):
        assert config.config_for(kernel, a, TARGETS[ARCH]) == B
        assert config.config_for(kernel, Arguments(N=65), TARGETS[ARCH]) == A
    assert config.config_for(kernel, a, TARGETS[ARCH]) == A
    config.table.cache_clear()


# ---------------------------------------------------------------- the search


def searched(times, tasks=(), seconds=1e9, clock=lambda: 0.0):
    """Search with made-up readings: `times` gives the reply to a config at the n-th time it is asked for."""
    asked, found, said = [], [], []

    def pretend(requests):
        for line in requests:
            row = json.loads(line)
            name = row["config"]["ROWS"]
            count = sum(1 for other in asked if other == name)
            asked.append(name)
            reply = times(name, count)
            yield {"status": "ok", "us": reply} if isinstance(reply, float) else reply

    done = tune.search(tasks or [task()], pretend, seconds, found.append, say=said.append, clock=clock)
    return done, asked, found, said


def test_the_best_config_is_found_and_measured_twice():
    done, asked, found, said = searched(lambda rows, n: {1: 10.0, 2: 8.0, 4: 9.0}[rows])
    assert done == 1 and asked == [1, 2, 4, 2, 1] and not said
    assert found[0].config == B and found[0].gain == pytest.approx(0.25) and found[0].tried == 3


@pytest.mark.parametrize("times", [{2: (9.9, 9.9)}, {2: (8.0, 10.5)}, {2: (9.0, 9.0), 1: (10.0, 9.1)}], ids=str)
def test_little_or_lucky_gains_make_no_row(times):
    readings = {1: (10.0, 10.0), 2: (11.0, 11.0), 4: (11.0, 11.0), **times}
    _, _, found, _ = searched(lambda rows, n: readings[rows][n])
    assert found[0].config == A and found[0].gain == 0.0


def test_a_config_that_fails_is_skipped_with_a_line():
    bad = {"status": "lost", "why": "timed out after 90 s"}
    _, _, found, said = searched(lambda rows, n: {1: 10.0, 2: bad, 4: 9.0}[rows])
    assert found[0].config == C and len(said) == 1
    assert "toy N=4096" in said[0] and '"ROWS": 2' in said[0] and "timed out" in said[0]


def test_without_a_default_nothing_is_tuned():
    wrong = {"status": "wrong", "why": "no"}
    done, asked, found, said = searched(lambda rows, n: wrong)
    assert (done, asked, found) == (1, [1], []) and "nothing is tuned" in said[-1]


def test_time_runs_out_between_configs():
    now = iter(range(1000))
    done, asked, found, _ = searched(
        lambda rows, n: {1: 10.0, 2: 8.0, 4: 9.0}[rows], [task(), task(8192)], 8.0, lambda: float(next(now))
    )
    assert done == 1 and len(found) == 1 and found[0].task.key == {"N": 4096}
    assert len(asked) == 7  # five of the first task, two of the second, which makes no row


WORKER = """
import json, os, sys, time
replies = os.fdopen(int(sys.argv[-1]), "w")
def reply(row):
    replies.write(json.dumps(row) + "\\n"); replies.flush()
reply({"status": "ready"})
for line in sys.stdin:
    rows = json.loads(line)["config"]["ROWS"]
    if rows == 2:
        time.sleep(60)
    reply({"status": "ok", "us": {1: 10.0, 4: 5.0}[rows]})
"""


def test_a_config_that_hangs_costs_itself_alone(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    found, said = [], []
    tune.search(
        [task()], lambda lines: supervise(lines, [sys.executable, str(script)], 1.0, 20), 60, found.append, say=said.append
    )  # fmt: skip
    assert found[0].config == C and len(said) == 1 and "timed out after 1 s" in said[0]


# ---------------------------------------------------------------- the worker


def test_a_worker_goes_on_after_a_verdict_and_ends_after_an_error():
    def answer(line):
        if line == "bad":
            raise tune.Differs("off by one")
        if line == "worse":
            raise RuntimeError("an illegal memory access\nand more")
        return {"us": float(line)}

    replies = io.StringIO()
    guarded.serve(answer, (tune.Differs,), io.StringIO("1\nbad\n2\nworse\n3\n"), replies)
    rows = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [row["status"] for row in rows] == ["ready", "ok", "wrong", "ok", "failed"]
    assert rows[2]["why"] == "off by one" and rows[4]["why"] == "RuntimeError: an illegal memory access"
    replies = io.StringIO()
    guarded.serve(answer, (), io.StringIO("1\n"), replies, "no CUDA device")
    assert json.loads(replies.getvalue()) == {"status": "no CUDA device"}


@pytest.mark.parametrize(
    ("got", "want", "why"),
    [
        (torch.ones(3), torch.ones(4), "is torch.float32[3]"),
        (torch.ones(3), torch.ones(3).half(), "the default's torch.float16"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "never written"),
        (torch.ones(2), torch.tensor([1.0, float("nan")]), "never written"),
        (torch.full((8,), 1.001), torch.ones(8), "from the default's"),
        (torch.arange(4), torch.arange(4) * 2, "from the default's"),
        (torch.ones(64).to(torch.float8_e4m3fn), torch.zeros(64).to(torch.float8_e4m3fn), "from the default's"),
        (torch.ones(4), torch.zeros(4), "from the default's"),
    ],
    ids=str,
)
def test_another_result_is_no_candidate(got, want, why):
    with pytest.raises(tune.Differs) as error:
        tune.compare([want, got], [want, want])
    assert why in str(error.value) and "result 1" in str(error.value)


def test_sums_in_another_order_are_one_result():
    x = torch.randn(1000)
    y = x * (1 + 1e-7 * torch.randn(1000))
    nan = torch.tensor([float("nan"), 1.0])
    tune.compare([y, x.bfloat16(), nan, torch.arange(3)], [x, x.bfloat16(), nan.clone(), torch.arange(3)])


def test_a_kernel_that_the_call_does_not_launch_has_no_time():
    """On a CPU the reference runs, which launches nothing."""
    subject = tune.Subject(tw.catalogue()["glu"], {"tokens": 4, "hidden": 8}, "", "forward", Pretended())
    with pytest.raises(tune.Differs, match="does not launch"):
        subject.measure("glu_forward", {"N": 8}, A, B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_the_real_worker_says_that_there_is_no_device():
    command = [sys.executable, "-m", "tilewright.bench.tune"]
    with pytest.raises(guarded.NoWorker, match="no CUDA device"):
        list(supervise(iter(["{}"]), command, 60, 120))


# ---------------------------------------------------------------- rows


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "SHIPPED", tmp_path / "shipped")
    config.table.cache_clear()
    yield config.folder() / f"{ARCH}.jsonl"
    config.table.cache_clear()


def found(size: int, chosen: dict, **more) -> tune.Found:
    return tune.Found(task(size, **more), chosen, 10.0, 8.0, 3)


def test_saved_rows_are_chosen_by_calls(path):
    assert tune.save(path, ARCH, [found(4096, B), found(64, A)]) == 1
    kernel = SimpleNamespace(name="toy", tune_by=("N",), default=lambda a: A, candidates=lambda a: [A, B, C])
    assert config.config_for(kernel, Arguments(N=4096), TARGETS[ARCH]) == B
    assert config.config_for(kernel, Arguments(N=64), TARGETS[ARCH]) == A


def test_rows_are_replaced_by_key_and_others_kept(path):
    tune.save(path, ARCH, [found(4096, B), found(512, B), found(64, C, kernel="another")])
    tune.save(path, ARCH, [found(4096, C), found(512, A)])
    lines = path.read_text().splitlines()
    assert lines == sorted(lines)
    assert [(r["kernel"], r["key"]["N"], r["config"]) for r in map(json.loads, lines)] == [
        ("another", 64, C), ("toy", 4096, C)
    ]  # fmt: skip


def test_a_default_is_a_row_where_a_neighbour_would_win(path):
    """2048 is within a factor of two of 4096: without a row of its own it would run with what is best there."""
    tune.save(path, ARCH, [found(2048, A), found(4096, B), found(16384, A)])
    assert {r["key"]["N"] for r in map(json.loads, path.read_text().splitlines())} == {2048, 4096}
    other = tune.Found(tune.Task("op", {}, "", "forward", "toy", {"N": 2048}, (A, B), (B,)), A, 9.0, 9.0, 2)
    assert tune.rows([other], [("toy", {"N": 4096}, B)], []) == [("toy", {"N": 4096}, B)]  # nobody would believe it


def test_a_shipped_row_that_lost_here_is_overruled(path):
    config.SHIPPED.mkdir()
    (config.SHIPPED / path.name).write_text(json.dumps({"kernel": "toy", "key": {"N": 4096}, "config": B}) + "\n")
    tune.save(path, ARCH, [found(4096, A)])
    assert json.loads(path.read_text())["config"] == A
    shipped = config.SHIPPED / path.name
    tune.save(shipped, ARCH, [found(4096, A)])  # in the shipped file itself the row just goes
    assert shipped.read_text() == ""


def test_nothing_to_say_makes_no_file(path):
    assert tune.save(path, ARCH, [found(4096, A)]) == 0 and not path.exists()


def test_damaged_lines_go_and_good_ones_stay(path):
    tune.save(path, ARCH, [found(64, C)])
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.warns(UserWarning, match="damaged"):
        assert tune.save(path, ARCH, [found(4096, B)]) == 2
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    tune.save(path, ARCH, [found(64, C)])
    before = path.read_text()

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tune.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        tune.save(path, ARCH, [found(4096, B)])
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_that_would_not_be_read_is_not_replaced(path, monkeypatch):
    tune.save(path, ARCH, [found(64, C)])
    path.chmod(0o664)
    with pytest.raises(OSError, match="writable by you alone"):
        tune.save(path, ARCH, [found(4096, B)])
    assert len(path.read_text().splitlines()) == 1
    monkeypatch.setattr(config, "SHIPPED", path.parent)  # a checkout's own files may be the group's
    monkeypatch.chdir(path.parent)
    assert tune.save(Path(path.name), ARCH, [found(4096, B)]) == 2


def test_two_runs_at_once_lose_nothing(path):
    threads = [threading.Thread(target=tune.save, args=(path, ARCH, [found(64**k, B)])) for k in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(path.read_text().splitlines()) == 8
