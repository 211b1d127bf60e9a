"""Run the GPU tests in shards of at most eight minutes: `python3 -m tests.gpu [PATH ...] [--shard I/N] [--resume]`.

Tests run in several guarded processes, each some ninety seconds' worth of one file. What takes longest begins first, by the
seconds of the last run here and by those of the evidence. When no more are waiting, processes that would be idle take over
tests of the others, from their ends. A process that is silent for too long is killed, unless the test it is in is known to take
long; that test counts as failed and the others go to a new process. Outcomes are kept in `.cache/gpu_tests.jsonl` (and in $OUT
where that is set) as they come; `--resume` skips what has passed in that file, `--stale` what has passed over today's code by the
evidence (`passed.py`, which also adds to it), but with `--machinery` not what stands for the code that all ops share, if that has
changed. What counts has passed under the Triton that is installed. `--accuracy` runs what shows that it compiles kernels right:
properties that compare with float64, the tests of kernels in Gluon, and those that hold torch's operators against aten.

`--list FILE` runs nothing and writes the names of the tests that would run, also where there is no GPU; `--only FILE` runs those
without asking pytest for all others, which takes a minute. After the tests, unless some were chosen, comes `tilewright check
--models` with the time that is left. The exit status is 0 when all passed, 1 when one failed, 3 when time ran out first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.seconds import shard
from tilewright.names import OPS

from . import CLAIMS, LOG, claim_of, passed

ROOT = Path(__file__).resolve().parents[2]
STATE = "gpu_tests.jsonl"
MODELS = "gpu_models.jsonl"
EVERYTHING = "tests/gpu"
DONE = ("passed", "skipped")
LAST_START = 30.0  # seconds before the end at which no new process is started: importing torch takes several
SHOWN_FAILURES = 12
# What `--accuracy` runs: of the properties those that compare with float64, files about kernels in Gluon, and files that hold
# torch's operators against aten: until somebody ran these under 3.9, no reduction compiled there
NUMBERS = ("accuracy", "sizes", "as_in_models", "quantised", "every_config")
KERNELS = ("attention", "attention_backward", "chunks", "decode", "fp8_bits", "glu", "hopper_coded", "latent")
KERNELS += ("linear_cross_entropy", "products", "rms_norm")
KERNELS += ("aten", "aten_engines", "aten_index_map", "aten_product")
KERNELS += ("aten_reduction", "aten_rows", "aten_scan", "aten_window")
UNKNOWN = 1.0  # seconds that a test is assumed to take of which nothing is known: most take less, and more makes many processes
LONG = {"tests/gpu/test_concurrency.py": 240.0}  # of a test of these files, if nothing is known: they begin first
PATIENCE = 3.0  # times as long as it took before a test may be silent
SHORTEST = 10.0  # seconds of tests below which a process is not worth its imports, which take 5 to 20

Say = Callable[[str], None]


def pytest_command(*arguments: str) -> list[str]:
    settings = ("-q", "-m", "gpu", "-p", "tests.gpu", "-p", "no:cacheprovider", "--tb=short", "--no-header")
    return [sys.executable, "-m", "pytest", *settings, *arguments]


def environment(log: Path, **more: str) -> dict[str, str]:
    """References are computed on the CPU, by many processes at once: one thread each, or they wait for one another."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, LOG: str(log), **more}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; one cut short by a kill is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


class State:
    """The last outcome of each test under a release of Triton, in files that are appended to as outcomes come, and that hold those
    under others too."""

    def __init__(self, paths: Sequence[Path], triton: str = passed.USUAL) -> None:
        self.paths, self.triton = list(paths), triton
        self.rows: dict[str, dict[str, Any]] = {}
        self.others: dict[tuple[str, str], dict[str, Any]] = {}
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            for row in read_rows(path):
                if "id" in row and passed.triton_of(row) == triton:
                    self.rows[row["id"]] = row
                elif "id" in row:
                    self.others[passed.triton_of(row), row["id"]] = row

    def add(self, row: dict[str, Any]) -> None:
        row = {**row, **passed.naming(self.triton)}
        self.rows[row["id"]] = row
        for path in self.paths:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def rewrite(self, forget: Sequence[str] = ()) -> None:
        """Bring all files to the same rows, without those to forget."""
        for name in forget:
            self.rows.pop(name, None)
        for path in self.paths:
            path.write_text("".join(json.dumps(row) + "\n" for row in (*self.others.values(), *self.rows.values())))

    def outcome(self, name: str) -> str | None:
        return self.rows[name]["outcome"] if name in self.rows else None

    def took(self) -> dict[str, float]:
        """The seconds of the tests that ran to their end; one that failed may have stopped early."""
        return {name: row["seconds"] for name, row in self.rows.items() if row["outcome"] in DONE and "seconds" in row}


def collect(paths: Sequence[str], root: Path, need_cuda: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """The ids of all GPU tests under `paths`, and the rows of files that have none here since something is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "collected"
        command = pytest_command("--collect-only", *paths)
        done = subprocess.run(command, cwd=root, env=environment(log), capture_output=True, text=True, timeout=240)
        rows = read_rows(log)
    if done.returncode not in (0, 5):  # 5: nothing was collected
        raise SystemExit(f"tests.gpu: pytest could not collect:\n{(done.stdout + done.stderr)[-3000:]}")
    if need_cuda and not (rows and rows[0].get("cuda")):
        raise SystemExit("tests.gpu: no CUDA device")
    found = [row for row in rows if "id" in row]
    absent = [row for row in found if row["outcome"] == "skipped"]
    return [row["id"] for row in found if row not in absent], absent


def units_of(names: Sequence[str], took: Mapping[str, float], size: int, most: float, jobs: int) -> list[list[str]]:
    """The tests of each process, all of one file: at most `size` of them and `most` seconds, or one test that takes longer; of less
    where `jobs` processes would not all have some. First come those that take memory, since few of them run at once (`thirds`),
    then what takes longest, so that what begins last is short."""

    def seconds(tests: Sequence[str]) -> float:
        return sum(took.get(name, UNKNOWN) for name in tests)

    units: list[list[str]] = []
    for memory in {thirds([name]) for name in names}:
        alike = [name for name in names if thirds([name]) == memory]
        share = seconds(alike) / (min(jobs, 3 // memory) if memory else jobs)
        bound = min(most, max(SHORTEST, share))
        by_file: dict[str, list[str]] = {}
        for name in alike:
            if seconds([name]) >= bound:
                units.append([name])
            else:
                by_file.setdefault(name.split("::")[0], []).append(name)
        for group in by_file.values():
            units.append([])
            for name in in_order(group):
                if len(units[-1]) == size or seconds([*units[-1], name]) > bound:
                    units.append([])
                units[-1].append(name)
    return sorted(units, key=lambda unit: (-thirds(unit), -seconds(unit)))


def supposed(names: Sequence[str], took: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each test, of one that is not known those of its function with the same op: their median, for of some
    that are slow alone the seconds were kept."""

    def alike(name: str) -> tuple[str, str, str | None]:
        return name.split("::")[0], passed.function_of(name), passed.op_among(OPS, name)

    known: dict[tuple, list[float]] = {}
    for name, seconds in took.items():
        known.setdefault(alike(name), []).append(seconds)
    usual = {kind: statistics.median(some) for kind, some in known.items()}
    return {name: took.get(name, usual.get(alike(name), LONG.get(name.split("::")[0], UNKNOWN))) for name in names}


def in_order(tests: Sequence[str]) -> list[str]:
    """The tests of a file such that neighbours share what they compile: function by function, and of each op by op. Two processes
    that begin together with one op would both compile its kernels."""
    functions = list(dict.fromkeys(map(passed.function_of, tests)))
    return sorted(tests, key=lambda name: (functions.index(passed.function_of(name)), passed.op_among(OPS, name) or ""))


def thirds(unit: Sequence[str]) -> int:
    """How many thirds of the device's memory a unit takes: all where a file is `test_large*.py`, one where strides are wide
    (`check/far_apart.py` sees to that), none elsewhere. What is taken at a time is what there is."""
    if Path(unit[0].split("::")[0]).name.startswith("test_large"):
        return 3
    return 1 if "[wide_strides-" in unit[0] else 0


@dataclass
class Run:
    """One process over one unit, or over what is left of another's: then `helps` is that other."""

    unit: list[str]
    process: subprocess.Popen
    log: Path
    output: Path
    heard: float  # when it last wrote a line
    helps: Run | None = None
    seen: int = 0  # lines of the log read so far
    current: str | None = None
    ended: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    def news(self, now: float) -> Iterator[dict[str, Any]]:
        """Outcomes written since the last look."""
        rows = read_rows(self.log)
        if len(rows) > self.seen:
            self.heard = now
        for row in rows[self.seen :]:
            if row["outcome"] == "started":
                self.current = row["id"]
            else:
                self.current = None
                self.ended.add(row["id"])
                yield row
        self.seen = len(rows)

    def last_words(self) -> str:
        return self.output.read_text(errors="replace")[-1500:]


class Runner:
    """Runs units, at most `jobs` at once, until all are done or the time is up. `took`: the seconds of each test, as supposed."""

    def __init__(
        self, state: State, root: Path, jobs: int, limit: float, seconds: float, took: Mapping[str, float], say: Say
    ) -> None:
        self.state, self.root, self.jobs, self.limit, self.took, self.say = state, root, jobs, limit, took, say
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.running: list[Run] = []
        self.waiting: list[list[str]] = []
        self.ended: set[str] = set()
        self.folder = tempfile.TemporaryDirectory()
        self.claims = Path(self.folder.name) / "claims"
        self.claims.mkdir()
        self.started = 0

    def run(self, units: Sequence[list[str]]) -> None:
        self.waiting = [list(unit) for unit in units]
        told, count = self.begin, sum(map(len, units))
        try:
            while self.running or (self.waiting and self._may_start()):
                self._start()
                self._share()
                time.sleep(0.1)
                now = time.monotonic()
                for run in list(self.running):
                    self._look(run, now)
                if now >= self.end:
                    return
                if now - told >= 10:
                    told = now
                    left = count - len(self.ended)
                    self.say(f"[{now - self.begin:4.0f} s] {left} to go, {len(self.running)} processes")
        finally:
            for run in self.running:
                run.process.kill()
                run.process.wait()
            self.folder.cleanup()

    def _may_start(self) -> bool:
        return time.monotonic() < self.end - min(LAST_START, (self.end - self.begin) / 4)

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.jobs and self._may_start():
            free = 3 - sum(thirds(run.unit) for run in self.running)
            at = next((i for i, unit in enumerate(self.waiting) if thirds(unit) <= free), None)
            if at is None:
                return
            self._begin(self.waiting.pop(at))

    def _share(self) -> None:
        """Where nothing waits, give what would be idle a part of what would end last. The tests go to whoever claims them first."""
        while not self.waiting and 0 < len(self.running) < self.jobs and self._may_start():
            shares = {id(run): self._left(run) for run in self.running if run.helps is None and not thirds(run.unit)}
            for run in self.running:
                if run.helps is not None and id(run.helps) in shares:
                    shares[id(run.helps)].helpers += 1
            most = max(shares.values(), key=Left.each, default=None)
            if most is None or most.each() < SHORTEST:
                return
            self._begin(most.tests[::-1], most.run)

    def _left(self, run: Run) -> Left:
        """What of a process's tests no process has begun. What it has done may have taken longer than was supposed."""
        tests = [name for name in run.unit if self._is_left(name)]
        supposed = sum(self.took.get(name, UNKNOWN) for name in run.ended)
        pace = max(1.0, (time.monotonic() - run.began) / supposed) if supposed else 1.0
        return Left(run, tests, pace * sum(self.took.get(name, UNKNOWN) for name in tests))

    def _is_left(self, name: str) -> bool:
        return name not in self.ended and not claim_of(self.claims, name).exists()

    def _begin(self, unit: list[str], helps: Run | None = None) -> None:
        self.started += 1
        log = Path(self.folder.name) / f"{self.started}.log"
        output = log.with_suffix(".out")
        about = environment(log, **{CLAIMS: str(self.claims)})
        with output.open("w") as file:
            process = subprocess.Popen(
                pytest_command(*unit), cwd=self.root, env=about, stdout=file, stderr=subprocess.STDOUT
            )
        self.running.append(Run(unit, process, log, output, heard=time.monotonic(), helps=helps))

    def _look(self, run: Run, now: float) -> None:
        gone = run.process.poll() is not None  # asked before the log is read, so that no last line is missed
        for row in run.news(now):
            self._record(row)
        limit = max(self.limit, PATIENCE * self.took.get(run.current, 0.0))
        silent = now - run.heard > limit
        if silent and not gone:
            run.process.kill()
            run.process.wait()
        if not (gone or silent):
            return
        self.running.remove(run)
        how = f"silent for {limit:g} s, killed" if silent else f"process ended with status {run.process.returncode}"
        why = f"{how}\n{run.last_words()}"
        if run.current is not None:
            self._record({"id": run.current, "outcome": "failed", "why": why})
        left = [name for name in run.unit if self._is_left(name)]
        if not left or run.helps is not None:  # which has not given them up
            return
        if run.current is None and not run.ended:  # nothing ever began, so a second process would do no better
            for name in left:
                self._record({"id": name, "outcome": "failed", "why": why})
            return
        self.waiting.insert(0, left)  # it began before what waits, so it takes longer

    def _record(self, row: dict[str, Any]) -> None:
        self.ended.add(row["id"])
        self.state.add(row)
        if row["outcome"] == "failed":
            self.say(f"FAILED {row['id']}")


@dataclass
class Left:
    """Tests of a process that no process has begun, the seconds that they may take, and how many processes help it."""

    run: Run
    tests: list[str]
    seconds: float
    helpers: int = 0

    def each(self) -> float:
        """The seconds of each process if one more helped; 0 where one test is left, which its own process comes to."""
        return self.seconds / (self.helpers + 2) if len(self.tests) > 1 else 0.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", description="Run the GPU tests in resumable shards.")
    parser.add_argument("paths", nargs="*", default=[EVERYTHING], help="files or folders of tests")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--resume", action="store_true", help="skip what has passed already")
    parser.add_argument("--stale", action="store_true", help="skip what has passed over today's code")
    parser.add_argument(
        "--machinery", action="store_true", help="with --stale: not what stands for machinery that changed"
    )
    parser.add_argument(
        "--accuracy", action="store_true", help="only what compares with float64 or aten, and tests of kernels in Gluon"
    )
    parser.add_argument("--list", type=Path, metavar="FILE", help="run nothing, write what would run, a name a line")
    parser.add_argument("--only", type=Path, metavar="FILE", help="run the tests of such a file")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to stop; what is left can be resumed")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes at once"
    )
    parser.add_argument("--limit", type=float, default=150.0, help="seconds without news before a process is killed")
    parser.add_argument("--per-process", type=int, default=120, help="tests a process runs at most")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="of tests that a process runs at most, unless one takes longer"
    )
    options = parser.parse_args(argv)
    if options.per_process < 1:
        parser.error(f"--per-process needs to be 1 or more, got {options.per_process}")
    if options.machinery and not options.stale:
        parser.error("--machinery says what --stale does not leave out")
    try:
        options.part, options.parts = map(int, options.shard.split("/"))
    except ValueError:
        parser.error(f"--shard is I/N, got {options.shard!r}")
    if not 1 <= options.part <= options.parts:
        parser.error(f"--shard I/N needs 1 <= I <= N, got {options.shard!r}")
    return options


def by_evidence(names: Sequence[str], root: Path, kept: Sequence[passed.Row], machinery: bool, triton: str) -> set[str]:
    """The tests that have passed over today's code, with `machinery` but for those that stand for it if it has changed."""
    code = passed.Code(root)
    again = passed.passed_otherwise(names, code, kept, of_the_machinery(), triton) if machinery else set()
    return passed.passed(names, code, kept, triton) - again


def of_accuracy(test: str) -> bool:
    """Whether `--accuracy` runs a test."""
    if passed.function_of(test) == "test_property":
        return passed.case_of(test).partition("-")[0] in NUMBERS
    return Path(test.partition("::")[0]).stem.removeprefix("test_") in KERNELS


def installed() -> str:
    """The release of Triton that tests run under."""
    import triton

    from tilewright.core.triton_versions import release

    return release(triton.__version__)


def of_the_machinery() -> list[str]:
    """The parameters of the tests that stand for the machinery: each of its properties with each op that stands for all."""
    from tilewright.check import families, properties, registration

    every = {prop.__name__: prop for prop in (*properties.VALUES, *registration.FACES)}
    found = [name for name, prop in every.items() if prop.about["kernels"][0] == "machinery"]
    return [f"{name}-{op}" for name in found for op in families.tried_on(every[name], "kernels")]


def report(names: Sequence[str], state: State, say: Say) -> int:
    """Say what failed and how many did what; the exit status."""
    failed = [state.rows[name] for name in names if state.outcome(name) == "failed"]
    for row in failed[:SHOWN_FAILURES]:
        say(f"--- {row['id']}\n{row.get('why', '')[-700:]}")
    counts = {what: sum(state.outcome(name) == what for name in names) for what in ("passed", "failed", "skipped")}
    left = len(names) - sum(counts.values())
    say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {left} left")
    if left:
        say("time is up: run again with --resume")
    return 1 if failed else 3 if left else 0


def main(
    argv: Sequence[str] | None = None,
    root: Path = ROOT,
    need_cuda: bool = True,
    say: Say = lambda text: print(text, flush=True),
) -> int:
    """The program; see the module."""
    options = parse(argv)
    begin, triton = time.monotonic(), installed()
    out = os.environ.get("OUT")
    state = State([root / ".cache" / STATE, *([Path(out) / STATE] if out else [])], triton)
    if options.only:
        collected, absent = options.only.read_text().split("\n")[:-1], []
    else:
        collected, absent = collect(options.paths, root, need_cuda and not options.list)
    for row in absent:
        say(f"SKIPPED {row['id']}: {row['why']}")
    chosen = [name for name in collected if not options.accuracy or of_accuracy(name)]
    mine = shard(chosen, options.part, options.parts)
    names = [name for name in chosen if name in mine]
    if not names:
        raise SystemExit("tests.gpu: there are no tests to run")
    keep = {name for name in names if options.resume and state.outcome(name) in DONE}
    kept = passed.read(root / passed.KEPT)
    known = by_evidence(names, root, kept, options.machinery, triton) if options.stale else set()
    pending = [name for name in names if name not in keep and name not in known]
    if options.list:
        options.list.write_text("".join(f"{name}\n" for name in pending))
        return 0
    took = supposed(pending, {**passed.took(kept), **state.took()})
    units = units_of(pending, took, options.per_process, options.seconds, options.jobs)
    state.rewrite(forget=pending)
    for name in sorted(known - keep):
        state.add({"id": name, "outcome": "passed", "why": passed.BY_EVIDENCE})
    say(f"{len(names)} tests, {len(pending)} to run under Triton {triton}, {options.jobs} processes at once")
    seconds = options.minutes * 60 - (time.monotonic() - begin)
    for row in absent:
        state.add(row)
    Runner(state, root, options.jobs, options.limit, seconds, took, say).run(units)
    status = report([*names, *(row["id"] for row in absent)], state, say)
    if options.paths != [EVERYTHING] or options.only or options.accuracy or not need_cuda:
        return status
    return worst(status, at_models(options, options.minutes - (time.monotonic() - begin) / 60, root, say))


def at_models(options: argparse.Namespace, minutes: float, root: Path, say: Say) -> int:
    """Every op at the sizes of real models, side by side where they fit into the device's memory together."""
    if minutes <= LAST_START / 60:
        say("models: no time is left: run again with --resume")
        return 3
    state, out = root / ".cache" / MODELS, os.environ.get("OUT")
    words = ("--models", "--shard", options.shard, "--minutes", f"{minutes:.2f}", "--state", str(state))
    words = (*words, "--jobs", str(options.jobs), *([] if options.resume else ["--again"]))
    command = [sys.executable, "-m", "tilewright", "check", *words]
    status = subprocess.run(command, cwd=root, env=environment(Path(os.devnull))).returncode
    if out and state.exists():
        shutil.copy(state, out)
    return status


def worst(*statuses: int) -> int:
    """The exit status of several parts: something failed, something is left, all is well."""
    return next((s for s in statuses if s not in (0, 3)), max(statuses))


if __name__ == "__main__":
    sys.exit(main())
