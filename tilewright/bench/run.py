"""Measuring cases: each is checked, then timed, in one guarded worker process.

The worker is replaced after a crash or when a case outlasts its limit (a wrong barrier hangs). A case whose output is wrong
gets no speed.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import torch
import triton

from ..check import guarded
from ..core.target import Target
from ..gemm.arithmetic import computed
from . import check, rivals, sol, timing
from .cases import CASES, Case
from .evidence import Row
from .floor import floor_us
from .source import source
from .work import Work

CASE_LIMIT = 150.0
COMMAND = (sys.executable, "-m", "tilewright.bench.run")
NO_DEVICE = "no CUDA device: a bench needs a GPU (`tilewright doctor` says what is missing)"


# --------------------------------------------------------------------------------------------------------------- worker


def measure(case: Case, beside: Sequence[str]) -> Row:
    """Measure one case in this process, with the rivals asked for and the one that its goal names. Raises `check.Wrong`."""
    named = case.metric.partition("vs:")[2]
    beside = list(dict.fromkeys([*beside, *([named] if named else [])]))
    row = (measure_host if case.direction == "host" else measure_device)(case, beside)
    fraction = None if row["floor_us"] is None else row["floor_us"] / row["us"]
    measured = fraction if not named else row["rivals"].get(named, 0.0) / row["us"]
    return {**row, "fraction": fraction, "measured": measured}


def measure_host(case: Case, beside: Sequence[str]) -> Row:
    """The host time of a call and, in batches that alternate with its own, of its rivals."""
    work = Work.build(case)
    result = work.call()
    error = work.verify(result)
    calls, absent = [], {}
    for name in beside:
        try:
            calls.append((name, rivals.call_of(name, work)))
        except rivals.Absent as why:
            absent[name] = str(why)
    us, *theirs = timing.time_host_each([work.call, *(call for _, call in calls)])
    found = dict(zip([name for name, _ in calls], theirs))
    return {
        "us": us, "floor_us": None, "host_us": us, "rivals": found, "absent": absent, "error": error, "method": "host",
        "bytes": list(work.traffic(result)), "extra_bytes": extra_bytes(work),
    }  # fmt: skip


def measure_device(case: Case, beside: Sequence[str]) -> Row:
    """The device time of a call. Its result is checked before the timing and, in what the replays left, after it."""
    work = [Work.build(case)]
    once = work[0].overwrites
    read, written = work[0].traffic(work[0].call())
    sets, calls = timing.plan(read + written, timing.Cuda().l2_bytes(), once=once)
    work += [Work.build(case, seed) for seed in range(1, sets)]

    def restore() -> None:
        for one in work:
            one.restore()

    if once:
        restore()
    check.poison(written)
    error = work[0].verify(work[0].call())

    def inspect(results: list[Any]) -> None:
        try:
            work[0].verify(results[0])
        except check.Wrong as wrong:
            raise check.Wrong(f"right when called alone, wrong in the timed run: {wrong}") from wrong

    def reading() -> timing.Timing:
        return timing.measure([one.call for one in work], calls, restore=restore if once else None, inspect=inspect)

    # Power moves a product's time by a tenth within one run: of two readings the better, as of its rivals
    timed = min((reading() for _ in range(readings_of(work[0]))), key=lambda timed: timed.us)
    extra = extra_bytes(work[0])
    few = max(5, min(100, int(20_000 / timed.us)))  # the launch queue must not fill
    host = timing.time_host(work[0].call, batches=9, per_batch=few)
    floor = None if case.direction == "step" else floor_us(read, written)  # a product is not bound by bytes
    rates = matrix_rates(work[0], timed.us)
    if once:
        restore()
    found, absent, spoiled = measure_rivals(work, calls, beside)  # last: a capture that fails spoils the process
    return {
        "us": timed.us, "floor_us": floor, "host_us": host, "rivals": found, "absent": absent, "error": error,
        "method": timed.method, "bytes": [read, written], "extra_bytes": extra, "spoiled": spoiled, **rates,
    }  # fmt: skip


def readings_of(work: Work) -> int:
    return 1 if work.op.cost.flops is None else 2


def matrix_rates(work: Work, us: float) -> Row:
    """The rate of a matrix product in TFLOP/s, as a burst and sustained, which power makes lower, with the clock then; and what the
    chip multiplies. Empty for any other op."""
    if work.op.cost.flops is None:
        return {}
    # A gradient of a product is two of its size
    flops = (
        work.op.cost.flops(**work.op.arguments(work.values))
        * {"forward": 1, "backward": 2, "step": 3}[work.case.direction]
    )
    steady, mhz = sol.sustained_us(work.call, us, timing.Cuda(), sol.sm_clock)
    rates = {"burst": flops / us / 1e6, "sustained": flops / steady / 1e6, "clock_mhz": mhz}
    if {"a", "b"} <= set(work.values) and work.values["a"].is_cuda:
        rates["math"] = computed(work.values, Target.at(work.values["a"].device)).words
    return {"rates": rates}


def measure_rivals(
    work: Sequence[Work], calls: int, beside: Sequence[str]
) -> tuple[dict[str, float], dict[str, str], bool]:
    """(microseconds by rival, why the others have none, whether a capture failed)."""
    found, absent, spoiled = {}, {}, False
    for name in beside:
        try:
            made = [rivals.call_of(name, one) for one in work]
            loose = check.COARSE.low if check.is_coarse(work[0].op, work[0].values) else rivals.LOOSE
            if not rivals.agrees(work[0].call(), rivals.finished(made[0]), max(loose, rivals.LOOSER.get(name, 0.0))):
                raise rivals.Absent("its result is another")
            if work[0].overwrites:
                for one in work:
                    one.restore()
            readings = [timing.measure(made, calls) for _ in range(readings_of(work[0]))]
            found[name] = min(timed.us for timed in readings)
            spoiled = spoiled or any(timed.method != "graph" for timed in readings)
        except rivals.Absent as why:
            absent[name] = str(why)
        except (RuntimeError, TypeError, ImportError) as error:  # of somebody else's making; ours is measured already
            spoiled = True
            absent[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        made = None
        gc.collect()
        torch.cuda.empty_cache()
    return found, absent, spoiled


def extra_bytes(work: Work) -> int:
    """Memory that a call takes beside its results, at its peak."""
    work.call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work.call()
    return max(0, torch.cuda.max_memory_allocated() - before - work.result_bytes(result))


def serve(requests: TextIO, replies: TextIO, measure: Callable[[Case, Sequence[str]], Row] = measure) -> None:
    """Answer requests for cases with rows until they end."""
    status = guarded.READY if torch.cuda.is_available() else NO_DEVICE

    def answer(request: str) -> Row:
        asked = json.loads(request)
        gc.collect()
        torch.cuda.empty_cache()
        case = CASES[asked["case"]]
        return {**measure(case, asked["rivals"]), **about(case)}

    guarded.serve(answer, (check.Wrong,), requests, replies, status)


def about(case: Case) -> Row:
    """What a row's number is of, and what it was measured on and with."""
    target = Target.of(torch.cuda.current_device())
    return {
        "op": case.op, "direction": case.direction, "dims": case.dims, "gpu": torch.cuda.get_device_name(),
        "arch": target.arch, "sms": target.sms, "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": source(case.name, target),
    }  # fmt: skip


def supervise(
    names: Iterable[str], beside: Sequence[str], command: Sequence[str] = COMMAND, limit: float = CASE_LIMIT
) -> Iterator[Row]:
    """A row for each case, from one worker process for as long as it lives. Raises `guarded.NoWorker`."""
    requests = {json.dumps({"case": name, "rivals": list(beside)}): name for name in names}
    for row in guarded.supervise(requests, command, limit):
        yield {**row, "case": requests[row["case"]]}


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        serve(sys.stdin, replies)
