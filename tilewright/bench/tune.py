"""Search of the candidates that kernels declare: every one checked against the default, then timed, in a guarded worker.

A task is one kernel at one key (the sizes it is tuned by), found by making the calls of the named models' dimensions on
tensors without memory. Its row is written as soon as it is finished, so that stopping loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

import tilewright as tw

from ..check import memory
from ..check.guarded import READY, Row, serve
from ..check.models import place_calls
from ..check.variants import FORWARD, Blank, Call, Plain, passes
from ..core.format import Format, Quantized
from ..core.target import Target
from ..op import Op
from ..runtime import config
from ..runtime.results import flatten, saved_results
from . import timing

GAIN = 0.02  # a config must win by this much: timings of one binary differ by about 1 % between two runs
FORMATS = ("", "fp8:e4m3:1x128:both:pow2:te", "fp8:e4m3:1x128:row:pow2:te")
# Relative RMS distance of two right results: a sum in another order moves a few roundings
APART = {torch.bfloat16: 2e-3, torch.float16: 2.5e-4, torch.float32: 1e-5, torch.float64: 1e-5}
MOST_CODES_OFF = 1e-3
PIECE = 1 << 25  # elements that are compared at once
Config = dict[str, Any]


class Differs(Exception):
    """A config that may not be used; the message says why."""


# ---------------------------------------------------------------- what there is to tune


@dataclass(frozen=True)
class Task:
    """One kernel at one key, the call that launches it, and the configs to try, the default first."""

    op: str
    dims: dict[str, int]
    format: str
    direction: str
    kernel: str
    key: dict[str, int]
    configs: tuple[Config, ...]
    allowed: tuple[Config, ...]  # those that a row may name

    @property
    def name(self) -> str:
        return f"{self.kernel} {' '.join(f'{n}={v}' for n, v in self.key.items())}"

    def request(self, chosen: Config) -> str:
        fields = ("op", "dims", "format", "direction", "kernel", "key")
        return json.dumps({**{n: getattr(self, n) for n in fields}, "default": self.configs[0], "config": chosen})


def sizes(op: Op, names: Iterable[str], tokens: int) -> list[dict[str, int]]:
    """The dimensions at which an op is called in these models, each once."""
    found = [call.dims for call in place_calls(op, names, (tokens,))]
    return [dims for i, dims in enumerate(found) if dims not in found[:i]]


def tasks(ops: Iterable[Op], names: Sequence[str], target: Target, tokens: int) -> list[Task]:
    """Everything that can be tuned of these ops at these models' sizes on a chip. A kernel of several ops is the last one's,
    which is the plain one, and of a composite only if no other launches it: its time is that of products as well."""
    found: dict[tuple, Task] = {}
    plain_last = sorted(ops, key=lambda op: not op.composite)
    for op in reversed(plain_last):
        for dims in sizes(op, names, tokens):
            for fmt in FORMATS if "out_format" in op.signature.names else FORMATS[:1]:
                for task in _tasks_of_call(op, dims, fmt, target):
                    found.setdefault((task.kernel, *sorted(task.key.items())), task)
    return list(found.values())


def _tasks_of_call(op: Op, dims: dict[str, int], fmt: str, target: Target) -> Iterator[Task]:
    seen: list[tuple[Any, dict[str, int], list[Config], Config]] = []

    def notice(kernel: Any, a: Any) -> None:
        if kernel.candidates is not None and kernel.tune_by:
            key = {n: int(a[n]) for n in kernel.tune_by}
            seen.append((kernel, key, [dict(c) for c in kernel.candidates(a)], dict(kernel.default(a))))

    values = op.inputs(Blank(op, dims))
    if fmt:
        values["out_format"] = Format.parse(fmt)
    try:
        with config.overridden(notice):
            passes(op, Call(values, FORWARD), target)
            forward, seen = seen, []
            passes(op, Call(values, FORWARD if fmt else None), target)
    except (ValueError, RuntimeError):  # a call that the op, or the chip, refuses
        return
    for at, (kernel, key, allowed, default) in enumerate(seen):
        configs = [default, *(c for c in allowed if c != default)]
        unique = tuple(c for i, c in enumerate(configs) if c not in configs[:i])
        direction = "forward" if at < len(forward) else "backward"
        if len(unique) > 1:
            yield Task(op.name, dims, fmt, direction, kernel.name, key, unique, tuple(allowed))


# ---------------------------------------------------------------- in the worker


class Subject:
    """Buffer sets of one call, its results with the default config, and the calls over them to time."""

    def __init__(self, op: Op, dims: Mapping[str, int], fmt: str, direction: str, device: Any = None) -> None:
        self.op, self.device = op, timing.Cuda() if device is None else device
        self.direction, self._made = direction, 0
        where = "cuda" if torch.cuda.is_available() else "cpu"

        def make() -> Callable[[], Any]:
            self._made += 1
            values = op.signature.bind((), op.inputs(Plain(op, dims, seed=self._made, device=where)))
            if fmt:
                values["out_format"] = Format.parse(fmt)
            return self._call(values)

        first = make()
        moved = sum(t.nbytes for t in self._inputs + _flat(first()))
        sets, self.in_graph = timing.plan(moved, self.device.l2_bytes())
        self.calls = [first, *(make() for _ in range(sets - 1))]
        self._right: tuple[str, list[Tensor]] | None = None

    def _call(self, values: dict[str, Any]) -> Callable[[], Any]:
        op = self.op
        self._inputs = [v for v in values.values() if isinstance(v, Tensor)]
        if self.direction == "forward":
            return lambda: op.run(values)
        flat = flatten(op.run(values))
        results = saved_results(op, flat)
        grads = [torch.randn(flat[i].shape, device=flat[i].device).to(flat[i].dtype) for i in op.graded(values)]
        needs = frozenset(n for n in op.differentiable if values[n] is not None)
        return lambda: op.run_backward(values, results, grads, needs)

    def measure(self, kernel: str, key: Config, default: Config, chosen: Config) -> Row:
        """Microseconds with a config, its result having been compared with the default's."""
        task = json.dumps([kernel, key, default])
        if self._right is None or self._right[0] != task:
            with self._forced(kernel, key, default):
                self._right = task, self._results()
        with self._forced(kernel, key, chosen) as applied:
            compare(self._results(), self._right[1])
            if not applied:
                raise Differs("the call does not launch the kernel at this key")
            timed = timing.measure(self.calls, self.in_graph, device=self.device)
        return {"us": timed.us, "method": timed.method}

    def _results(self) -> list[Tensor]:
        """What the first call gives in memory full of NaN, nothing around it written: what a config skips will show."""
        with memory.guarded_allocations(memory.FILLS[0]) as guards:
            made = [t.clone() for t in _flat(self.calls[0]())]
        for guard in guards:
            guard.check("this config")
        return made

    @contextlib.contextmanager
    def _forced(self, kernel: str, key: Config, chosen: Config) -> Iterator[list[bool]]:
        """The kernel runs with this config inside; the list is empty as long as it has not been launched."""
        applied: list[bool] = []

        def instead(launched: Any, a: Any) -> Config | None:
            if launched.name != kernel or any(int(a[n]) != v for n, v in key.items()):
                return None
            applied.append(True)
            return chosen

        self._forget()
        try:
            with config.overridden(instead):
                yield applied
        finally:
            self._forget()

    def _forget(self) -> None:
        # The public function's own guards may hold older plans; nothing here calls it.
        self.op.plans.clear()
        self.op.backward_plans.clear()


def _flat(results: Any) -> list[Tensor]:
    """Every plain tensor among an op's results or gradients."""
    parts = results if isinstance(results, tuple) else (results,)
    flat = [t for p in parts for t in (p.tensors() if isinstance(p, Quantized) else (p,))]
    return [t for t in flat if t is not None and t.numel()]


def compare(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Raise unless two configs gave one result, as far as sums in another order do."""
    for at, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Differs(f"result {at} is {a.dtype}{list(a.shape)}, the default's {b.dtype}{list(b.shape)}")
        a, b = a.reshape(-1), b.reshape(-1)
        wrong = total = 0.0
        for x, y in zip(a.split(PIECE), b.split(PIECE)):
            if a.element_size() == 1:  # codes
                wrong += float((x.view(torch.uint8) != y.view(torch.uint8)).sum())
                continue
            if not a.is_floating_point():
                wrong += float((x != y).sum())
                continue
            if not torch.equal(x.isnan(), y.isnan()):
                raise Differs(f"result {at} has NaN, or was never written, where the default's is not")
            x, y = x.double().nan_to_num(), y.double().nan_to_num()
            wrong += float((x - y).square().sum())
            total += float(y.square().sum())
        if a.element_size() == 1:
            distance, bar = wrong / a.numel(), MOST_CODES_OFF
        elif a.is_floating_point():
            distance, bar = (wrong / total) ** 0.5 if total else wrong, APART[a.dtype]
        else:
            distance, bar = wrong, 0.0
        if not distance <= bar:
            raise Differs(f"result {at} is {distance:.3g} from the default's, allowed {bar:.3g}")


def answer() -> Callable[[str], Row]:
    """The worker's answers; the buffers of the last call are kept for the next config of it."""
    kept: dict[str, Subject] = {}

    def measure(line: str) -> Row:
        asked = json.loads(line)
        call = {n: asked[n] for n in ("op", "dims", "format", "direction")}
        name = json.dumps(call)
        if name not in kept:
            kept.clear()
            gc.collect()
            torch.cuda.empty_cache()
            op = tw.catalogue()[asked["op"]]
            kept[name] = Subject(op, asked["dims"], asked["format"], asked["direction"])
        return kept[name].measure(asked["kernel"], asked["key"], asked["default"], asked["config"])

    return measure


# ---------------------------------------------------------------- the search


@dataclass(frozen=True)
class Found:
    """What the search of one task gave: the config to use, and the times behind that."""

    task: Task
    config: Config
    default_us: float
    us: float
    tried: int

    @property
    def gain(self) -> float:
        return self.default_us / self.us - 1.0


class OutOfTime(Exception):
    """The search has used the time it was given."""


def search(
    wanted: Sequence[Task],
    supervise: Callable[[Iterator[str]], Iterable[Row]],
    seconds: float,
    finished: Callable[[Found], None],
    *,
    say: Callable[[str], None] = lambda text: None,
    tick: Callable[[Task], None] = lambda task: None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Try every config of every task, while there is time; how many tasks were finished.

    `supervise` gives one reply for each request that it draws from the iterator, before it draws the next.
    """
    end, inbox, done = clock() + seconds, [], 0

    def ask(task: Task, chosen: Config) -> Iterator[str]:
        if clock() >= end:
            raise OutOfTime
        yield task.request(chosen)
        row = inbox.pop()
        tick(task)
        if row["status"] == "ok":
            return row["us"]
        say(f"{task.name} {json.dumps(chosen)}: {row['status']}: {row.get('why', '')}")
        return None

    def requests() -> Iterator[str]:
        nonlocal done
        with contextlib.suppress(OutOfTime):
            for task in wanted:
                found = yield from _one(task, ask)
                if found is None:
                    say(f"{task.name}: the default gave no time, so nothing is tuned")
                else:
                    finished(found)
                done += 1

    for row in supervise(requests()):
        inbox.append(row)
    return done


def _one(task: Task, ask: Callable) -> Iterator[str]:
    """Time all configs of a task, then the default and the best again: one lucky reading must not make a row."""
    default = task.configs[0]
    first = yield from ask(task, default)
    if first is None:
        return None
    times: list[tuple[float, int]] = []
    for at, chosen in enumerate(task.configs[1:]):
        us = yield from ask(task, chosen)
        if us is not None:
            times.append((us, at + 1))
    count = len(times) + 1
    if not times or min(times)[0] > first * (1 - GAIN):
        return Found(task, default, first, first, count)
    us, at = min(times)
    repeated = (yield from ask(task, task.configs[at])) or float("inf")
    second = (yield from ask(task, default)) or first
    slowest, fastest = max(us, repeated), min(first, second)
    if slowest > fastest * (1 - GAIN):
        return Found(task, default, fastest, fastest, count)
    return Found(task, task.configs[at], fastest, slowest, count)


# ---------------------------------------------------------------- rows


def rows(found: Iterable[Found], others: Sequence[tuple], shipped: Sequence[tuple]) -> list[tuple]:
    """The rows of a file: `others`, already there, less those found anew, and each finding that a call would not make by
    itself. A default is a row of its own only where a neighbour's row would be taken for it."""
    found = list(found)
    measured = {(f.task.kernel, _text(f.task.key)) for f in found}
    kept = [row for row in others if (row[0], _text(row[1])) not in measured]
    kept += [(f.task.kernel, f.task.key, f.config) for f in found if f.config != f.task.configs[0]]
    neighbours = [*kept, *shipped]
    for f in found:
        task, default = f.task, f.task.configs[0]
        if f.config == default and default in task.allowed:
            names = tuple(task.key)
            if any(
                kernel == task.kernel and chosen != default and chosen in task.allowed
                and config.distance(key, task.key, names) <= 1.0
                for kernel, key, chosen in neighbours
            ):  # fmt: skip
                kept.append((task.kernel, task.key, default))
    return kept


def save(path: Path, arch: str, found: Iterable[Found]) -> int:
    """Merge findings into a file of rows, in one step and one writer at a time; how many rows it has."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        why = config.distrusted(path) if path.exists() else None
        if why is not None:  # its rows would not be read, and so be lost
            raise OSError(why)
        ship = config.SHIPPED / f"{arch}.jsonl"
        same = path.exists() and ship.exists() and path.samefile(ship)
        kept = rows(found, config.read(path), [] if same else config.read(ship))
        lines = sorted(json.dumps({"kernel": k, "key": key, "config": chosen}) for k, key, chosen in kept)
        if lines or path.exists():
            _replace(path, "".join(line + "\n" for line in lines))
    finally:
        os.close(folder)
    config.table.cache_clear()
    return len(lines)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _text(key: Mapping[str, int]) -> str:
    return json.dumps(key, sort_keys=True)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[-1]), "w") as stream:
        state = READY if torch.cuda.is_available() else "no CUDA device"
        # What the compiler or the chip's limits refuse leaves the process as it was
        serve(answer(), (Differs, AssertionError, TritonError), sys.stdin, stream, state)
