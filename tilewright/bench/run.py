"""Measuring cases: each is checked, then timed, in one guarded worker process.

The worker is replaced after a crash or when a case outlasts its limit (a wrong barrier hangs). A case whose output is wrong
gets no speed. A rival that chooses its kernels when it is imported is measured by a worker of its own, after the case.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

import torch
import triton

from ..aten import random
from ..aten.verdicts import WAYS, Verdicts, subject
from ..check import guarded
from ..check.provided.aten import written
from ..core.flat import as_tuple
from ..core.target import Target
from ..gemm.arithmetic import computed
from . import check, packaged, replaced, replaced_models, rivals, sol, timing
from .ahead import compiled_ahead
from .cases import CASES, Case, rival_of, waits
from .directed import Absent
from .evidence import Row
from .floor import floor_us
from .results import measured_by, rivals_of
from .source import source
from .turns import settled
from .work import Work, build

CASE_LIMIT = 150.0
COMMAND = (sys.executable, "-m", "tilewright.bench.run")
APART = "--apart"
# Of a choice, in microseconds: calls of a batch, batches or replays of a run, and a graph
BATCH_US, READING_US, LONGEST_CHOICE_US = 4_000.0, 20_000.0, 8_000.0
NARROWEST = 48  # calls that mode "auto" takes by the least margin; a call takes a second
MOST_BATCHES = 25
WAITS = "waits"  # the status of a case that is for another Triton
LONGEST_GRAPH_US = 8 * timing.GRAPH_US
NO_DEVICE = "no CUDA device: a bench needs a GPU (`tilewright doctor` says what is missing)"


# --------------------------------------------------------------------------------------------------------------- worker


def measure(case: Case, beside: Sequence[str]) -> Row:
    """Measure one case in this process, with the rivals asked for and the one that its goal names. Raises `check.Wrong`."""
    here = [name for name in rivals_beside(case, beside) if not packaged.is_apart(name)]
    own = {"host": measure_host, "memory": measure_memory, "queued": measure_queued, "choice": measure_choice}
    row = {**own, "worst": measure_worst, "model": replaced_models.measure}.get(case.direction, measure_device)(
        case, here
    )
    return valued(case, {**row, "fraction": None if row["floor_us"] is None else row["floor_us"] / row["us"]})


def rivals_beside(case: Case, beside: Sequence[str]) -> list[str]:
    """The rivals that were asked for, those of the case, and the one that its metric names."""
    return list(dict.fromkeys([*beside, *case.beside, *filter(None, [rival_of(case.metric)])]))


def valued(case: Case, row: Row) -> Row:
    """A row with what its metric says of it: None where that is about a rival which is absent."""
    return {**row, "measured": measured_by(row["fraction"], rivals_of(row), case.metric)}


def measure_host(case: Case, beside: Sequence[str]) -> Row:
    """The host time of a call and, in batches that alternate with its own, of its rivals."""
    work = build(case)
    result = work.call()
    error = work.verify(result)
    calls, absent = [], {}
    for name in beside:
        try:
            calls.append((name, rivals.call_of(name, work)))
        except (Absent, ImportError) as why:
            absent[name] = reason(why)
    # Batches take turns, so that rivals of another process cannot be among them
    us, *theirs = timing.time_host_each([work.call, *(call for _, call in calls)])
    found = dict(zip([name for name, _ in calls], theirs))
    return {
        "us": us, "floor_us": None, "host_us": us, "rivals": found, "absent": absent, "error": error, "method": "host",
        "bytes": list(work.traffic(result)), "extra_bytes": extra_bytes(work),
    }  # fmt: skip


def measure_memory(case: Case, beside: Sequence[str]) -> Row:
    """Of all replaced overloads, the one whose peak of bytes beside its results is worst beside aten's, which has SPARE more."""
    found: list[tuple[float, str, int, int, replaced.Replaced]] = []
    for name, work in replaced.overloads(case):
        pair = [replaced.flat(written(name, one())) for one in (work.call, work.plain)]
        # In place, the second has what the first made; and of random numbers the second has others
        if name.partition(".")[0][-1] != "_" and name not in random.FORMS and not all(map(alike, *pair)):
            raise check.Wrong(f"{name}: its result is not aten's")
        ours, theirs = extra_bytes(work), extra_bytes(work, work.plain) + replaced.SPARE
        found.append((theirs / max(1, ours), name, ours, theirs, work))
    _, name, ours, theirs, work = min(found, key=lambda one: one[0])
    us, aten = timing.time_host_each([work.call, work.plain])
    return {
        "us": us, "floor_us": None, "host_us": us, "rivals": {"aten": aten}, "rival_bytes": {"aten": theirs}, "error": 0.0,
        "method": "host", "bytes": [0, 0], "extra_bytes": ours, "note": f"the worst of {len(found)} overloads: {name}",
    }  # fmt: skip


def measure_queued(case: Case, beside: Sequence[str]) -> Row:
    """The time of a call among many that another framework has queued, and of its rivals'."""
    work = build(case)
    result = work.call()
    error = work.verify(result)
    found, absent, us = {}, {}, work.queued_us(work.call)
    for name in beside:
        try:
            found[name] = work.queued_us(rivals.call_of(name, work))
        except (Absent, ImportError) as why:
            absent[name] = reason(why)
    return {
        "us": us, "floor_us": None, "host_us": work.host_us(), "rivals": found, "absent": absent, "error": error,
        "method": "queue", "bytes": list(work.traffic(result)), "extra_bytes": None,
    }  # fmt: skip


def measure_choice(case: Case, beside: Sequence[str]) -> Row:
    """A call of torch's operators and aten's own, in turn, several times over: eager, until the device has done it, and in a graph
    where there can be one. Raises `check.Wrong` where runs are too far apart, as on a GPU that is busy or too hot."""
    work, calls, read, written = Sets.build(case)
    work[0].restore()
    error = work[0].verify(work[0].call())
    sides = {"own": [one.call for one in work], "aten": [one.plain for one in work]}
    first = [made[0] for made in sides.values()]
    paces = timing.time_host_each(first, 3, 2, whole=True)
    few = [max(1, min(100, int(BATCH_US / us))) for us in paces]
    batches = max(3, min(MOST_BATCHES, int(READING_US / max(n * us for n, us in zip(few, paces)))))
    runs = {"eager": settled("eager", lambda: timing.time_host_each(first, batches, few, whole=True)), "graph": []}
    spoiled = False
    try:
        graphs = []
        if captured(work[0]):  # last: a capture that fails spoils the process
            for made, us in zip(sides.values(), paces):
                rounds = max(1, min(calls // len(made), int(LONGEST_CHOICE_US / (us * len(made)))))
                with timing.entered(made) as own:
                    graphs.append(timing.Graph(own, rounds * len(made)))
    except timing.CannotCapture:  # aten may wait for the device
        spoiled, graphs = True, []
    if graphs:
        replays = [graph.warm(timing.REPLAYS, READING_US) for graph in graphs]
        runs["graph"] = settled("graph", lambda: [graph.us(count) for graph, count in zip(graphs, replays)])
    us, aten = map(statistics.median, zip(*(runs["graph"] or runs["eager"])))
    extra = None if spoiled else extra_bytes(work[0])
    return {
        "us": us, "floor_us": None, "host_us": None, "rivals": {"aten": aten}, "error": error,
        "absent": {name: "a choice is between ours and aten's" for name in beside if name != "aten"},
        "method": "graph" if runs["graph"] else "eager", "bytes": [read, written], "extra_bytes": extra,
        "runs": runs, "spoiled": spoiled,
    }  # fmt: skip


def measure_worst(case: Case, beside: Sequence[str]) -> Row:
    """Of the calls that choices are measured for, the one that mode "auto" slows most beside aten, eager or in a graph. What it
    leaves alone, for a program that makes such a call alone, is aten's own. Of hundreds that it takes the NARROWEST are timed anew,
    those that its table says win by least. Raises `check.Wrong` where it leaves all of them."""
    verdicts = Verdicts.here()
    table = {subject(row): row for row in verdicts.rows}
    taken: list[tuple[float, str, Case, bool]] = []
    for one in CASES.values():
        kind = replaced.here(one) if one.direction == "choice" else None
        if kind is None or not verdicts.chosen({kind: 1}) & {kind.overload}:
            continue
        # Of a closed overload kinds are taken that no row is of
        times = {way: table[kind][way] for way in WAYS} if kind in table else {}
        margin = min((t["least"] for t in times.values() if t is not None), default=0.0)
        taken.append((margin, one.name, one, None in times.values()))
    found: list[tuple[float, float, float, str]] = []
    for _, name, one, uncaptured in sorted(taken)[:NARROWEST]:
        options = {**one.options, "auto": True, **({"events": True} if uncaptured else {})}
        try:
            runs = measure_choice(replace(one, options=options), ())["runs"]
        except check.Wrong as why:
            raise check.Wrong(f"{name}: {why}") from why
        for way, pairs in runs.items():
            for own, aten in [map(statistics.median, zip(*pairs))] if pairs else ():
                found.append((aten / own, own, aten, f"{name}, {way}"))
    if not found:
        raise check.Wrong(f"mode auto replaces nothing: {verdicts.silence(verdicts.rules, observed=True)}")
    _, us, aten, name = min(found)
    return {
        "us": us, "floor_us": None, "host_us": None, "rivals": {"aten": aten}, "error": 0.0, "method": "choice", "bytes": [0, 0],
        "extra_bytes": None,
        "note": f"the worst of {len(found)} times of {min(len(taken), NARROWEST)} calls that win by least, of {len(taken)} that "
        f"mode auto takes: {name}",
    }  # fmt: skip


def alike(mine: Any, theirs: Any) -> bool:
    return rivals.agrees(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def captured(work: Work | replaced.Replaced) -> bool:
    """Whether a case's calls are timed in a graph. Those that read a size, or draw numbers, are not ours in one."""
    return not work.case.options.get("events", False)


class Sets(NamedTuple):
    """A case's arguments, several times over, and how they are used."""

    work: list[Work | replaced.Replaced]
    calls: int  # in a graph
    read: int
    written: int

    @staticmethod
    def build(case: Case) -> Sets:
        work = [build(case)]
        read, written = work[0].traffic(work[0].call())
        once, flops = work[0].overwrites, flops_of(work[0])
        sets, calls = timing.plan(read + written, timing.Cuda().l2_bytes(), once=once)
        if not once and flops:  # what is bound by products would fill far longer graphs than what is bound by bytes
            longest = max(1, round(LONGEST_GRAPH_US * sol.FLOPS_PER_US / (flops * sets)))
            calls = min(calls, sets * longest)
        return Sets(work + [build(case, seed) for seed in range(1, sets)], calls, read, written)


def measure_device(case: Case, beside: Sequence[str]) -> Row:
    """The device time of a call. Its result is checked before the timing and, in what the replays left, after it."""
    work, calls, read, written = Sets.build(case)
    once = work[0].overwrites

    def restore() -> None:
        for one in work:
            one.restore()

    if once:
        restore()
    check.poison(written)
    error, known = verified(work[0])

    def inspect(results: list[Any]) -> None:
        try:
            if known is None or not check.same_bits(results[0], known):
                work[0].verify(results[0])
        except check.Wrong as wrong:
            raise check.Wrong(f"right when called alone, wrong in the timed run: {wrong}") from wrong

    def reading() -> timing.Timing:
        own = [one.call for one in work]
        return timing.measure(
            own, calls, restore=restore if once else None, inspect=inspect, captured=captured(work[0])
        )

    # Power moves a product's time by a tenth within one run: of two readings the better, as of its rivals
    timed = min((reading() for _ in range(readings_of(work[0]))), key=lambda timed: timed.us)
    extra = extra_bytes(work[0])
    few = max(5, min(100, int(20_000 / timed.us)))  # the launch queue must not fill
    host = timing.time_host(work[0].call, batches=9, per_batch=few)
    floor = floor_of(work[0], read, written)
    rates = matrix_rates(work[0], timed.us)
    if once:
        restore()
    theirs = measure_rivals(work, calls, beside)  # last: a capture that fails spoils the process
    return {
        "us": timed.us, "floor_us": floor, "host_us": host, "error": error, "method": timed.method,
        "bytes": [read, written], "extra_bytes": extra, **theirs, **rates,
    }  # fmt: skip


def verified(work: Work | replaced.Replaced) -> tuple[float, list[Any] | None]:
    """The error of a call's result and, where a call leaves its arguments as they are, a copy of it: what has the same bits is
    right too, and truth takes longer than all readings."""
    result = work.call()
    return work.verify(result), None if work.overwrites else check.copied(result)


def measure_alone(case: Case, rival: str) -> Row:
    """One rival of a case whose row another process makes, over arguments that are drawn alike."""
    if case.direction in ("host", "queued", "choice", "worst", "model"):
        raise Absent("host times are compared within one process")
    work, calls, *_ = Sets.build(case)
    if work[0].overwrites:
        for one in work:
            one.restore()
    return measure_rivals(work, calls, [rival])


def readings_of(work: Work) -> int:
    return 1 if work.flops is None else 2


def flops_of(work: Work) -> float | None:
    """The multiplications and additions of what is timed; None of an op that is no product."""
    if work.flops is None:
        return None
    cost = work.op.cost
    times = {"backward": cost.backward, "step": 1.0 + cost.backward}.get(work.case.direction, 1.0)
    return cost.flops(**work.op.arguments(work.values)) * times


def floor_of(work: Work, read: int, written: int) -> float | None:
    """Microseconds below which a call cannot go, by what its case says bounds it; a step is not bound by bytes."""
    if work.case.floor != "bytes":
        return flops_of(work) / matrix_rate(work.case.floor)
    return None if work.case.direction == "step" else floor_us(read, written)


@functools.cache
def matrix_rate(name: str) -> float:
    """Multiplications and additions a microsecond of torch's large products in a dtype, as a burst, once a process."""
    return sol.matrix(name, sol.PRODUCTS[name]["torch"], timing.Cuda(), sol.sm_clock).burst * 1e6


def matrix_rates(work: Work, us: float) -> Row:
    """The rate of a matrix product in TFLOP/s, as a burst and sustained, which power makes lower, with the clock then; and what the
    chip multiplies. Empty for any other op."""
    if work.flops is None:
        return {}
    flops = flops_of(work)
    steady, mhz = sol.sustained_us(work.call, us, timing.Cuda(), sol.sm_clock)
    rates = {"burst": flops / us / 1e6, "sustained": flops / steady / 1e6, "clock_mhz": mhz}
    if {"a", "b"} <= set(work.values) and work.values["a"].is_cuda:
        rates["math"] = computed(work.values, Target.at(work.values["a"].device)).words
    return {"rates": rates}


def measure_rivals(work: Sequence[Work], calls: int, beside: Sequence[str]) -> Row:
    """Of a row: microseconds by rival and bytes beside its results, why others have none, whether this process is still good."""
    found, extra, absent, spoiled = {}, {}, {}, False
    for name in beside:
        try:
            with compiled_ahead():
                made = [rivals.call_of(name, one) for one in work]
                if work[0].overwrites:  # a rival may have been called, to see what it has
                    work[0].restore()
                ours = work[0].call()
                if work[0].overwrites and work[0].case.direction != "backward":
                    # The rival begins with what ours began with, and results that lie on arguments stay
                    ours = [r.clone() if type(r) is torch.Tensor else r for r in as_tuple(ours)]
                    work[0].restore()
                near = rivals.agrees(ours, rivals.finished(made[0]), rivals.bar(name, work[0]))
            if not near:
                raise Absent("its result is another")
            if work[0].overwrites:
                for one in work:
                    one.restore()
            one = captured(work[0])
            readings = [timing.measure(made, calls, captured=one) for _ in range(readings_of(work[0]))]
            spoiled = spoiled or (one and any(timed.method != "graph" for timed in readings))
            extra[name] = extra_bytes(work[0], made[0])
            found[name] = min(timed.us for timed in readings)
        except (Absent, ImportError) as error:
            absent[name] = reason(error)
        except Exception as error:  # of somebody else's making; ours is measured already
            spoiled, absent[name] = True, reason(error)
        made = None
        gc.collect()
        torch.cuda.empty_cache()
    return {"rivals": found, "rival_bytes": extra, "absent": absent, "spoiled": spoiled}


def reason(error: Exception) -> str:
    """Why a rival is absent, in one line."""
    words = str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
    return " ".join(words.split())[:200]


def extra_bytes(work: Work, call: Callable[[], Any] | None = None) -> int:
    """Memory that a call over these arguments, ours unless another is given, takes beside its results, at its peak."""
    call = work.call if call is None else call
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    return max(0, torch.cuda.max_memory_allocated() - before - work.result_bytes(result))


def serve(
    requests: TextIO,
    replies: TextIO,
    measure: Callable[[Case, Sequence[str]], Row] = measure,
    alone: Callable[[Case, str], Row] = measure_alone,
) -> None:
    """Answer requests for cases, or for one rival of a case, with rows until they end."""
    status = guarded.READY if torch.cuda.is_available() else NO_DEVICE

    def answer(request: str) -> Row:
        asked = json.loads(request)
        case = CASES[asked["case"]]
        try:
            if "compile" in asked:
                return compiled(case)
            return (
                alone(case, asked["alone"]) if "alone" in asked else {**measure(case, asked["rivals"]), **about(case)}
            )
        finally:  # another process may be the next to need the memory
            gc.collect()
            gc.freeze()  # modules and caches, which every later search for garbage would take a tenth of a second to look at
            torch.cuda.empty_cache()

    guarded.serve(answer, (check.Wrong, Absent), requests, replies, status)


def compiled(case: Case) -> Row:
    """Nothing of a case, whose kernels are then in Triton's cache: its call is made, twice: the second may take another way."""
    work = build(case)
    work.call()
    work.call()
    torch.cuda.synchronize()
    return {}


def compile_all(
    names: Iterable[str], jobs: int, command: Sequence[str] = COMMAND, limit: float = CASE_LIMIT
) -> Iterator[Row]:
    """A row for each case that is compiled, by several processes at once: where nothing is timed, they may be in each other's way.
    Raises `guarded.NoWorker`."""
    for row in guarded.supervise((json.dumps({"case": n, "compile": True}) for n in names), command, limit, jobs=jobs):
        yield {**row, "case": json.loads(row["case"])["case"]}


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
    names: Iterable[str],
    beside: Sequence[str],
    also: Mapping[str, Iterable[str]] = MappingProxyType({}),
    command: Sequence[str] = COMMAND,
    limit: float = CASE_LIMIT,
) -> Iterator[Row]:
    """A row for each case, beside rivals of all cases and, in `also`, of single ones, from one worker process for as long as it
    lives; of a case that is for another Triton one that says so. Raises `guarded.NoWorker`."""
    names = list(names)
    waiting = {name: why for name in names if name in CASES and (why := waits(CASES[name], triton.__version__))}
    for name, why in waiting.items():
        yield {"case": name, "status": WAITS, "why": why, "wall_s": 0.0}
    asked = {name: list(dict.fromkeys([*beside, *also.get(name, ())])) for name in names if name not in waiting}
    requests = {json.dumps({"case": name, "rivals": given}): name for name, given in asked.items()}
    others: dict[str, Apart] = {}
    try:
        for row in guarded.supervise(requests, command, limit):
            row = {**row, "case": requests[row["case"]]}
            case = CASES.get(row["case"])
            wanted = rivals_beside(case, asked[case.name]) if case is not None and row["status"] == "ok" else []
            for name in filter(packaged.is_apart, wanted):
                if name not in others:
                    others[name] = Apart(name, command, limit)
                row = valued(case, others[name].beside(row))
            yield row
    finally:
        for one in others.values():
            one.close()


class Apart:
    """A rival that is measured by a worker of its own, for one row after another."""

    def __init__(self, rival: str, command: Sequence[str], limit: float) -> None:
        self._rival, self._next, self._failed = rival, [], rivals.missing(rival)
        # The next request is drawn when the next row is wanted, and there is one by then
        self._rows = guarded.supervise(iter(self._next.pop, None), (*command, APART, rival), limit)

    def beside(self, row: Row) -> Row:
        """The row with this rival's time, or why it has none."""
        reply = self._ask(row["case"])
        if reply["status"] != "ok":
            return {**row, "absent": {**row.get("absent", {}), self._rival: reply["why"]}}
        return {**row, **{name: {**row.get(name, {}), **reply[name]} for name in ("rivals", "rival_bytes", "absent")}}

    def _ask(self, case: str) -> Row:
        if self._failed is None:
            self._next.append(json.dumps({"case": case, "alone": self._rival}))
            try:
                return next(self._rows)
            except guarded.NoWorker as error:  # nor would there be one for the next case
                self._failed = str(error)
        return {"status": "failed", "why": self._failed}

    def close(self) -> None:
        self._rows.close()


def main(words: Sequence[str]) -> None:
    """A worker: `[--apart RIVAL] DESCRIPTOR`, the last being that of the pipe for replies."""
    if words[0] == APART:
        os.environ.update(packaged.RIVALS[words[1]].environment)
    with os.fdopen(int(words[-1]), "w") as replies:
        serve(sys.stdin, replies)


if __name__ == "__main__":
    main(sys.argv[1:])
