"""The measuring code itself, on a pretended device: what is timed, what is checked, and what survives a bad case."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended import Pretended
from tilewright.bench import check, floor, timing

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


# --------------------------------------------------------------------------------------------------------------- timing


@pytest.mark.parametrize("nbytes", [1, 100_000, 68 * MIB, 240 * MIB, 5000 * MIB])
def test_plan_outgrows_the_cache(nbytes):
    sets, calls = timing.plan(nbytes, 60 * MIB)
    assert sets >= 2 and calls % sets == 0 and sets <= calls <= 8 * sets
    assert sets * nbytes >= 4 * 60 * MIB or sets == 64
    assert timing.plan(nbytes, 60 * MIB, once=True) == (sets, sets)


def test_graph_time_is_a_median_call():
    device = Pretended()
    costs = iter([10.0, 30.0])

    def make():
        cost = next(costs)
        return lambda: device.work(cost)

    assert timing.time_graph(make, 2, 8, device=device) == pytest.approx(20.0)
    assert device.flushes == 0


def test_slow_calls_are_made_less_often():
    """A rival may take thousands of times as long as its bytes would have it."""
    device = Pretended()
    made = []

    def call():
        made.append(0)
        device.work(60_000.0)

    assert timing.time_graph(lambda: call, 2, 16, device=device) == pytest.approx(60_000.0)
    assert device.now < 3e6 and len(made) == 6  # each set twice before the capture and once in it


def test_results_rotate_with_the_sets():
    device = Pretended()
    alive: set[int] = set()
    most = []

    class Result:
        def __init__(self) -> None:
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    def call():
        device.work(5.0)
        return Result()

    seen = []
    timing.time_graph(lambda: call, 3, 12, device=device, inspect=lambda results: seen.extend(results))
    assert max(most[6:]) == 3  # neither one buffer written over and over, nor memory that grows with the calls
    assert len(seen) == 3 and all(isinstance(r, Result) for r in seen)


def test_overwritten_inputs_are_restored_outside_the_time():
    device = Pretended()
    fresh = [True, True]

    def make_for(i):
        def use() -> None:
            used.append(fresh[i])
            fresh[i] = False

        return lambda: device.work(7.0, use)

    def restore() -> None:
        device.now += 500.0
        fresh[:] = [True, True]

    used: list[bool] = []
    makers = iter([make_for(0), make_for(1)])
    assert timing.time_graph(lambda: next(makers), 2, 2, device=device, restore=restore) == pytest.approx(7.0)
    assert all(used[4:]) and len(used) > 30  # the first four are the warm-up
    assert device.flushes > 0
    with pytest.raises(ValueError, match="3 calls for 2 sets"):
        timing.time_graph(lambda: lambda: None, 2, 3, device=device, restore=restore)


def test_what_cannot_be_captured_is_timed_by_events_and_says_so():
    device = Pretended(capturable=False)
    seen = []

    def call():
        device.work(42.0)
        return "result"

    timed = timing.measure([call, call], 8, inspect=seen.extend, device=device)
    assert timed.us == pytest.approx(42.0) and timed.method == "events: it copies to the host"
    assert seen == ["result"] and device.flushes >= 25
    assert timing.measure([call], 4, device=Pretended()).method == "graph"


def test_a_wrong_result_is_not_taken_for_a_failed_capture():
    def refuse(results):
        raise check.Wrong("no")

    with pytest.raises(check.Wrong):
        timing.measure([lambda: None], 1, inspect=refuse, device=Pretended())


def test_host_time_takes_turns_and_ignores_a_slow_spell():
    now = [0]
    drained = []
    calls_since_drain = [0]

    def slow():
        calls_since_drain[0] += 1
        now[0] += 7_000_000 if len(drained) == 4 else 7_000

    def quick():
        calls_since_drain[0] += 1
        now[0] += 2_000

    def drain():
        drained.append(calls_since_drain[0])
        calls_since_drain[0] = 0
        now[0] += 123_456

    was = gc.isenabled()
    times = timing.time_host_each([slow, quick], batches=9, per_batch=10, clock=lambda: now[0], drain=drain)
    assert times == pytest.approx([7.0, 2.0])
    assert max(drained[1:]) == 10  # never more than one batch in the queue
    assert gc.isenabled() == was
    assert timing.time_host(quick, batches=3, per_batch=5, clock=lambda: now[0], drain=drain) == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize(
    "read, written, expected",
    [
        (100, 100, (1, 1)),
        (67_108_864, 34_603_008, (2, 1)),
        (100_663_296, 69_206_016, (3, 2)),
        (10**9, 40_000, (1, 0)),
        (0, 7, (0, 1)),
        (1, 8, (1, 8)),
    ],
)
def test_proportion(read, written, expected):
    assert floor.proportion(read, written) == expected


def test_floor_programs_move_the_bytes_asked_for():
    with pytest.raises(ValueError, match="bytes to move"):
        floor.proportion(0, 0)
    for block, _, unroll in floor.CONFIGS:
        for read, written in ((67_108_864, 34_603_008), (10**9, 0), (5_000_000, 5_000_000)):
            count, factor = floor.programs(read, written, block, unroll)
            blocks = sum(floor.proportion(read, written)) * unroll
            assert count * blocks * block * 4 * factor == pytest.approx(read + written)
            assert 0.8 < factor < 1.2
    assert floor.programs(10, 10, 1024, 1) == (1, 1.0)


def test_stream_kernel_reads_and_writes_every_block():
    script = """
import torch
from tilewright.bench.floor import stream
x = torch.randint(-2**31, 2**31 - 1, (3, 2, 64), dtype=torch.int32)
y = torch.full((3, 3, 64), 7, dtype=torch.int32)
stream[(3,)](x, y, READ=2, WRITE=0, BLOCK=64)
assert (y == 7).all()
stream[(3,)](x, y, READ=2, WRITE=3, BLOCK=64)
want = (x.long().sum(1) + torch.arange(3)[:, None]).to(torch.int32)
assert torch.equal(y, want[:, None].expand(3, 3, 64))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": _path()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def _path() -> str:
    return os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
