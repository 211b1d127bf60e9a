"""Check, then time, the benchmark cases: `python3 -m tilewright.bench.run [GLOB ...] [--json PATH]`.

Cases run one after another in one guarded worker process, which is replaced after a crash or when a case outlasts its
limit (a wrong barrier hangs). A case whose output is wrong gets no speed. Every result is written as soon as it is
there: to PATH, or to $OUT/bench.jsonl where OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import gc
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import triton

from . import check, timing
from .cases import CASES, Case
from .floor import floor_us

START_LIMIT = 180.0  # seconds for a worker to import torch and open the device
CASE_LIMIT = 90.0
READY = "ready"

Row = dict[str, Any]


# --------------------------------------------------------------------------------------------------------------- worker


def measure_host(case: Case) -> Row:
    """Host time of a call beside its rival's."""
    work = case.build(case.dims, 0, "cuda")
    error = work.check(work.call())
    us, rival = timing.time_host_each([work.call, work.rival])
    return {"us": us, "rival_us": rival, "measured": rival / us, "error": error, "method": "host"}


def measure_device(case: Case) -> Row:
    """Device time of a call whose result was checked before the timing, and again after it in what the replays left."""
    read, written = case.traffic
    work = [case.build(case.dims, 0, "cuda")]
    overwrites = work[0].restore is not None
    sets, calls = timing.plan(read + written, timing.Cuda().l2_bytes(), once=overwrites)
    work += [case.build(case.dims, seed, "cuda") for seed in range(1, sets)]
    check.poison(written)
    error = work[0].check(work[0].call())

    def restore() -> None:
        for one in work:
            one.restore()

    def inspect(results: list[Any]) -> None:
        try:
            work[0].check(results[0])
        except check.Wrong as wrong:
            raise check.Wrong(f"right when called alone, wrong in the timed run: {wrong}") from wrong

    timed = timing.measure([one.call for one in work], calls, restore=restore if overwrites else None, inspect=inspect)
    return {"us": timed.us, "error": error, "method": timed.method}


def measure_case(case: Case) -> Row:
    """One case in this process. Raises `check.Wrong` for a wrong output."""
    if case.metric.startswith("vs:"):
        return measure_host(case)
    row = measure_device(case)
    gc.collect()
    torch.cuda.empty_cache()
    floor = floor_us(*case.traffic)
    return {**row, "floor_us": floor, "measured": floor / row["us"]}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer case names, one a line, with rows as JSON, one a line, until the requests end.

    After an unexpected error, or a failed capture, the process ends: the device may not be itself any more.
    """

    def reply(row: Row) -> None:
        replies.write(json.dumps(row) + "\n")
        replies.flush()

    if not torch.cuda.is_available():
        reply({"status": "no CUDA device"})
        return
    torch.cuda.init()
    about = machine()
    reply({"status": READY})
    for line in requests:
        try:
            row = {"status": "ok", **measure_case(CASES[line.strip()])}
        except check.Wrong as wrong:
            row = {"status": "wrong", "why": str(wrong)}
        except Exception as error:
            text = str(error).strip().split("\n")[0][:400]
            trace = traceback.format_exc()[-2000:]
            reply({"status": "failed", "why": f"{type(error).__name__}: {text}", "trace": trace, **about})
            return
        reply({**row, **about})
        gc.collect()
        torch.cuda.empty_cache()
        if row.get("method", "").startswith("events"):
            return


def machine() -> Row:
    """What the numbers were measured on and with."""
    name = torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}


# ----------------------------------------------------------------------------------------------------------- supervisor


class Lost(Exception):
    """The worker gave no answer; the message says how it ended."""


class Worker:
    """A child process that answers requests, one line each, through a pipe of its own; its output goes to a log."""

    def __init__(self, command: Sequence[str]) -> None:
        readable, writable = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*command, str(writable)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(writable,),
                text=True,
            )
        finally:
            os.close(writable)
        self._replies = readable
        self._waiting = b""

    def read(self, limit: float) -> Row:
        """The next reply, within `limit` seconds."""
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._waiting:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise Lost(f"timed out after {limit:g} s{self._last_words()}")
                received = os.read(self._replies, 1 << 16)
                if not received:
                    raise Lost(f"crashed with status {self._process.wait()}{self._last_words()}")
                self._waiting += received
        line, self._waiting = self._waiting.split(b"\n", 1)
        return json.loads(line)

    def expect_ready(self, limit: float) -> None:
        """Wait for the first reply. A worker that cannot start will not start for the next case either."""
        try:
            status = self.read(limit)["status"]
        except Lost as lost:
            status = f"the worker did not start, {lost}"
        if status != READY:
            raise SystemExit(f"tilewright.bench: {status}")

    def ask(self, request: str, limit: float) -> Row:
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Lost(f"ended with status {self._process.wait()}{self._last_words()}") from None
        return self.read(limit)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().split("\n")
        text = " | ".join(line.strip() for line in lines[-3:] if line.strip())
        return f": {text[-400:]}" if text else ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        self._log.close()


def supervise(names: Iterable[str], command: Sequence[str], limit: float, start_limit: float) -> Iterator[Row]:
    """A row for each name, from one worker for as long as it lives."""
    worker: Worker | None = None
    try:
        for name in names:
            start = time.monotonic()
            try:
                if worker is None:
                    worker = Worker(command)
                    worker.expect_ready(start_limit)
                row = worker.ask(name, limit)
            except Lost as lost:
                row = {"status": "lost", "why": str(lost)}
            row = {"case": name, **row, "wall_s": round(time.monotonic() - start, 2)}
            spoiled = row["status"] in ("lost", "failed") or row.get("method", "").startswith("events")
            if worker is not None and spoiled:
                worker.close()
                worker = None
            yield row
    finally:
        if worker is not None:
            worker.close()


# --------------------------------------------------------------------------------------------------------------- report


def complete(row: Row) -> Row:
    """The row with the case's own facts, and whether it reaches its goal."""
    case = CASES[row["case"]]
    facts = {
        "op": case.op,
        "dims": case.dims,
        "bytes": list(case.traffic),
        "metric": case.metric,
        "goal": case.goal,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if row["status"] == "ok":
        facts["reached"] = row["measured"] >= case.goal
    return {**row, **facts}


def table(rows: Sequence[Row]) -> str:
    """One line a case, goal beside measured, then what fell short and what gave no number."""
    width = max([len(row["case"]) for row in rows] + [4])
    lines = [f"{'case':<{width}}  {'us':>9}  {'beside':>9}  {'measured':>8}  {'goal':>5}  verdict"]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"{row['case']:<{width}}  {row['status'].upper()}: {row.get('why', '')}")
            continue
        beside = row.get("floor_us", row.get("rival_us"))
        verdict = "reached" if row["reached"] else f"short by {row['goal'] - row['measured']:.3f}"
        how = "" if row["method"] in ("graph", "host") else f"  ({row['method']})"
        lines.append(
            f"{row['case']:<{width}}  {row['us']:>9.2f}  {beside:>9.2f}  {row['measured']:>8.3f}  {row['goal']:>5.2f}"
            f"  {verdict}{how}"
        )
    right = [row for row in rows if row["status"] == "ok"]
    short = [row["case"] for row in right if not row["reached"]]
    bad = [row["case"] for row in rows if row["status"] != "ok"]
    lines.append(f"{len(right) - len(short)} reached, {len(short)} short, {len(bad)} without a number")
    if short:
        lines.append(f"short: {' '.join(short)}")
    if bad:
        lines.append(f"wrong or failed: {' '.join(bad)}")
    return "\n".join(lines)


def results_path(given: str | None) -> Path | None:
    """Where rows go: the path given, else bench.jsonl in the folder that OUT names, else nowhere."""
    if given is not None:
        return Path(given)
    return Path(os.environ["OUT"]) / "bench.jsonl" if os.environ.get("OUT") else None


def append(path: Path | None, row: Row) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def select(globs: Sequence[str]) -> list[str]:
    """The cases that any of the globs matches, in their own order; a glob without a slash is for the part before it."""
    for glob in globs:
        if not any(_matches(name, glob) for name in CASES):
            raise SystemExit(f"tilewright.bench: no case matches {glob!r}; --list shows them")
    return [name for name in CASES if not globs or any(_matches(name, glob) for glob in globs)]


def _matches(name: str, glob: str) -> bool:
    return fnmatch.fnmatchcase(name if "/" in glob else name.split("/")[0], glob)


def main(
    argv: Sequence[str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "tilewright.bench.run", "--worker"),
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> int:
    """The program; the exit status is 1 when a case was wrong, crashed or timed out."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tilewright.bench.run", description="Check and time cases on a GPU."
    )
    parser.add_argument(
        "cases", nargs="*", metavar="GLOB", help="which cases, e.g. 'rms_norm*' or '*/8192x2048'; all if none"
    )
    parser.add_argument("--json", metavar="PATH", help="append each result to PATH")
    parser.add_argument("--limit", type=float, default=CASE_LIMIT, help="seconds a case may take")
    parser.add_argument("--list", action="store_true", help="print the cases and their goals")
    parser.add_argument("--worker", type=int, metavar="FD", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker is not None:
        with os.fdopen(options.worker, "w") as replies:
            serve(sys.stdin, replies)
        return 0
    names = select(options.cases)
    if options.list:
        for name in names:
            say(f"{name:<40} {CASES[name].metric} {CASES[name].goal:.2f}")
        return 0
    path = results_path(options.json)
    rows = []
    for row in supervise(names, command, options.limit, START_LIMIT):
        rows.append(complete(row))
        append(path, rows[-1])
        progress = f"{row['measured']:.3f}" if row["status"] == "ok" else f"{row['status']}: {row.get('why', '')}"
        say(f"[{len(rows)}/{len(names)}] {row['case']} {progress} ({row['wall_s']:g} s)")
    say(table(rows))
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
